"""The data type of KV pages: what the flag means, and what float32 weights give over pages in bfloat16."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.config import Dtype, EngineConfig, KVDtypeName, Quantization
from common.errors import ConfigError
from common.pages.layout import KVDtype
from engine.kv_budget import kv_dtype_of
from tests.engine.checkpoints import VOCAB, mistral, qwen3, saved
from tests.engine.cpu.test_int8 import needs_int8
from tests.engine.exact import Answer, answers, reference_logits, runner
from tests.engine.models.test_transformers_model import gemma2

PROMPTS = [np.random.default_rng(n).integers(3, VOCAB, n).astype(np.int32) for n in (5, 40, 100)]


@pytest.mark.parametrize(
    ("asked", "dtype", "quantization", "pages"),
    [
        ("auto", "float32", "none", "float32"),
        ("auto", "bfloat16", "fp8", "bfloat16"),
        ("auto", "float16", "none", "float16"),
        ("auto", "float32", "int8", "bfloat16"),
        ("auto", "bfloat16", "int8", "bfloat16"),
        ("float32", "float32", "none", "float32"),
        ("float32", "float32", "int8", "float32"),
        ("bfloat16", "float32", "none", "bfloat16"),
        ("bfloat16", "bfloat16", "none", "bfloat16"),
        ("fp8_e4m3", "float16", "none", "float8_e4m3fn"),
        ("fp8_e4m3", "float32", "int8", "float8_e4m3fn"),
    ],
)
def test_pages_are_as_the_flag_says_and_by_default_as_exact_as_the_weights(
    asked: KVDtypeName, dtype: KVDtype, quantization: Quantization, pages: KVDtype
) -> None:
    assert kv_dtype_of(EngineConfig(kv_dtype=asked, quantization=quantization), dtype) == pages


def test_pages_that_have_no_advantage_over_those_of_the_weights_are_refused_before_the_load(tmp_path: Path) -> None:
    lines: list[str] = []
    path = saved(qwen3(), tmp_path)
    with pytest.raises(ConfigError, match=r"--kv-dtype bfloat16 with --dtype float16: .*give --kv-dtype auto"):
        runner(path, lines.append, dtype="float16", kv_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"--kv-dtype float32 with --dtype bfloat16: .*no more exact: give --kv-dtype auto"):
        runner(path, lines.append, dtype="bfloat16", kv_dtype="float32")
    assert lines == []


@pytest.mark.parametrize("attention", ["native", "torch"])
@pytest.mark.parametrize(
    "make",
    [qwen3, lambda: mistral(sliding_window=20), gemma2],
    ids=["qwen3", "mistral, window", "gemma 2, through transformers"],
)
def test_logits_over_bfloat16_pages_are_near_those_of_transformers(
    tmp_path: Path, make: Callable[[], PreTrainedModel], attention: str
) -> None:
    """A number of bfloat16 has 7 bits behind the first one: each key and value is up to 2^-8 off. FP8 is 16 times as far off."""
    model = make()
    path = saved(model, tmp_path)
    made, wide = (runner(path, kv_dtype=name, dtype="float32", attention=attention) for name in ("bfloat16", "auto"))
    assert (made.description.layout.dtype, made.description.model.dtype) == ("bfloat16", "float32")
    assert made.description.layout.page_bytes * 2 == wide.description.layout.page_bytes
    errors = errors_of(answers(made, PROMPTS, tokens=8, chunk_tokens=33), model)
    assert 1e-3 < errors.mean() < 1e-2 and errors.max() < 0.03


@needs_int8
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_int8_weights_have_bfloat16_pages_unless_the_flag_says_otherwise(tmp_path: Path, dtype: Dtype) -> None:
    path = saved(qwen3(), tmp_path)
    described = runner(path, quantization="int8", dtype=dtype).description
    assert described.layout.dtype == "bfloat16"
    assert described.model.dtype == ("float32" if dtype == "auto" else "bfloat16")


@needs_int8
def test_bfloat16_pages_add_little_to_the_error_of_int8_weights(tmp_path: Path) -> None:
    model = qwen3(initializer_range=0.05)
    path = saved(model, tmp_path)
    far = []
    for weights in ({"quantization": "int8", "kv_dtype": "fp8_e4m3"}, {"quantization": "int8"}, {"kv_dtype": "bfloat16"}):
        made = runner(path, **weights)  # type: ignore[arg-type]
        far.append(float(errors_of(answers(made, PROMPTS, tokens=8, chunk_tokens=33), model).mean()))
    with_fp8, with_bfloat16, pages_alone = far
    assert 4 * pages_alone < with_bfloat16 < with_fp8


def errors_of(given: list[Answer], model: PreTrainedModel) -> Tensor:
    """How far the logits of each token are from those of transformers in float32, in parts of these."""
    pairs = [(torch.stack(answer.logits), reference_logits(model, answer)) for answer in given]
    return torch.cat([(ours - theirs).norm(dim=-1) / theirs.norm(dim=-1) for ours, theirs in pairs])
