"""FP8 pages under a whole model: half the memory, and logits that are near those of the weights' own dtype."""

from pathlib import Path

import numpy as np
import torch

from tests.engine.checkpoints import VOCAB, qwen3, saved
from tests.engine.exact import TOLERANCE, answers, reference_logits, runner


def test_logits_over_fp8_pages_are_near_those_of_transformers(tmp_path: Path) -> None:
    """An FP8 number has 3 bits behind the first one: each key and value is up to 1/16 off, and their errors mostly cancel."""
    model = qwen3()
    path = saved(model, tmp_path)
    made = runner(path, kv_dtype="fp8_e4m3", dtype="float32")
    layout, wide = made.description.layout, runner(path, dtype="float32").description.layout
    assert (layout.dtype, made.description.model.dtype) == ("float8_e4m3fn", "float32")
    assert layout.page_bytes * 4 == wide.page_bytes
    prompts = [np.random.default_rng(n).integers(3, VOCAB, n).astype(np.int32) for n in (5, 40, 100)]
    for answer in answers(made, prompts, tokens=8, chunk_tokens=33):
        expected = reference_logits(model, answer)
        errors = (torch.stack(answer.logits) - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert TOLERANCE < errors.max() < 0.25
