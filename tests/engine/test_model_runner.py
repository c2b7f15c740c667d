"""The model runner against transformers, token by token, on random-weight checkpoints."""

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from common.errors import ConfigError, MemoryShort
from common.executor import Chunk, RowStart, StepPlan
from common.ids import Int32Array
from engine import model_runner
from engine.model_runner import ModelRunner
from tests.engine import exact
from tests.engine.checkpoints import VOCAB, llama, qwen3, saved
from tests.engine.driver import Driver
from tests.engine.exact import GREEDY

NEW_TOKENS = 12
runner = partial(exact.runner, page_size=8, max_running=8)
"""On the CPU, with room for the whole context."""


def generated(made: ModelRunner, prompts: list[Int32Array], chunk_tokens: int) -> list[list[int]]:
    return Driver(made.run, made.description).answers(prompts, NEW_TOKENS, GREEDY, chunk_tokens)


def test_without_a_compiler_torch_gives_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(qwen3(), tmp_path)
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (5, 40)]
    with_kernel = generated(runner(path), prompts, 16)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert generated(runner(path), prompts, 16) == with_kernel


def test_bfloat16_runs_and_mostly_agrees(tmp_path: Path) -> None:
    made = runner(saved(qwen3(), tmp_path), dtype="bfloat16")
    assert made.description.layout.dtype == "bfloat16"
    (answer,) = generated(made, [np.arange(3, 40, dtype=np.int32)], 16)
    assert len(answer) == NEW_TOKENS and all(0 <= token < VOCAB for token in answer)


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    path = saved(llama(), tmp_path)
    config = path / "config.json"
    text = config.read_text()
    for before, after, named in (
        ("LlamaForCausalLM", "MambaForCausalLM", "MambaForCausalLM"),
        ('"hidden_act": "silu"', '"hidden_act": "gelu"', "gelu"),
        ('"num_hidden_layers": 2', '"num_hidden_layers": 3', "model.layers.2"),
        ('"num_hidden_layers": 2', '"num_hidden_layers": 1', "model.layers.1"),
    ):
        assert before in text
        config.write_text(text.replace(before, after))
        with pytest.raises(ConfigError, match=named):
            runner(path)


def test_a_context_that_the_memory_cannot_hold_is_capped_and_reported(tmp_path: Path) -> None:
    path = saved(llama(num_hidden_layers=3), tmp_path)
    lines: list[str] = []
    capped = runner(path, lines.append, kv_memory="64KiB").description
    assert capped.model.context_tokens == 64
    assert capped.total_pages == 10
    assert [line for line in lines if "context capped to 64" in line and "512" in line and "--kv-memory" in line]
    lines.clear()
    whole = runner(path, lines.append).description
    assert whole.model.context_tokens == 512
    assert not [line for line in lines if "capped" in line]


def test_the_longest_context_of_a_row_can_be_computed(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=3)
    made = runner(saved(model, tmp_path), kv_memory="64KiB", max_running=1)
    prompt = np.arange(3, 3 + 64 - NEW_TOKENS, dtype=np.int32)
    exact.assert_exact(model, exact.answers(made, [prompt], NEW_TOKENS, 20))


def test_a_context_that_was_asked_for_is_held_or_refused_before_the_weights_are_loaded(tmp_path: Path) -> None:
    path = saved(llama(num_hidden_layers=3), tmp_path)
    assert runner(path, kv_memory="64KiB", context_tokens=77).description.model.context_tokens == 77
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"--kv-memory at least 67584 bytes, or --context-tokens at most 80"):
        runner(path, kv_memory="64KiB", context_tokens=81)
    for kv_memory in ("64KiB", "auto"):
        with pytest.raises(ConfigError, match="more than the model's own context of 512"):
            runner(path, kv_memory=kv_memory, context_tokens=513)
    with pytest.raises(ConfigError, match="less than one page"):
        runner(path, kv_memory="1KiB")


def test_memory_is_measured_once_the_weights_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    def measured(*_: object) -> int:
        lines.append("measured")
        return 2**20

    monkeypatch.setattr(model_runner, "auto_host_kv_bytes", measured)
    made = runner(saved(llama(), tmp_path), lines.append, kv_memory="auto")
    assert [line.split(":")[0].split(" ")[0] for line in lines][:3] == ["loading", "measured", "making"]
    assert made.description.total_pages == 2**20 // made.description.layout.page_bytes


def test_steps_that_do_not_fit_the_memory_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMuch more.")

    monkeypatch.setattr(ModelRunner, "_make_steps", out_of_memory)
    with pytest.raises(MemoryShort, match=r"memory of cpu \(.*2 GiB.\): lower --kv-memory, --chunk-tokens") as refused:
        runner(saved(llama(), tmp_path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("model", "changes", "expected"),
    [
        (lambda: llama(num_hidden_layers=6), {}, [3, 6]),
        (lambda: qwen3(num_hidden_layers=3), {"layer_groups": 3}, [1, 2, 3]),
        (qwen3, {"layer_groups": 0}, []),
    ],
    ids=["two groups by default", "a group for each layer", "no groups"],
)
def test_layers_reported_during_a_last_chunk_are_written(
    tmp_path: Path, model: Callable[[], PreTrainedModel], changes: dict[str, Any], expected: list[int]
) -> None:
    """The flag sets the groups. The KV of reported layers is what it is after the step: pages may be pushed by then."""
    made = runner(saved(model(), tmp_path), **changes)
    layout, region = made.description.layout, made.description.memory
    pages = np.arange(3, dtype=np.int32)
    memory = memoryview((ctypes.c_char * (3 * layout.page_bytes)).from_address(region.address))
    kv = np.frombuffer(memory, dtype=np.float32).reshape(3, layout.layers, -1)
    seen: list[tuple[int, np.ndarray]] = []

    def look(layers: int) -> None:
        seen.append((layers, kv.copy()))

    prompt = np.arange(3, 23, dtype=np.int32)
    made.run(StepPlan(1, starts=(RowStart(0, pages, GREEDY),), chunks=(Chunk(0, 0, prompt[:10], last=False),)), look)
    assert seen == [], "nobody pushes layers of a chunk that another one follows"
    made.run(StepPlan(2, chunks=(Chunk(0, 10, prompt[10:], last=True),)), look)
    assert [layers for layers, _ in seen] == expected
    for layers, then in seen:
        np.testing.assert_array_equal(then[:, :layers], kv[:, :layers])
        assert layers == layout.layers or (then[:, layers:] != kv[:, layers:]).any()
