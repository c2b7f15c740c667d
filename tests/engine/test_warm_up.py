"""The steps that run before an instance is ready."""

from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

from common.executor import StepPlan
from engine.gpu.flashinfer import AttentionNeeds, FlashInferAttention
from engine.grammar.masks import GrammarProcessor, load_mask_kernel
from engine.kv_memory import KVMemory
from engine.model_runner import WARM_UP_PAGES, warm_up
from engine.ports import Attention, LayerAttention, SampledRows
from engine.step_runner import PendingStep
from tests.engine.attention.flashinfer_double import FlashInferDouble
from tests.engine.checkpoints import VOCAB, qwen3, qwen3_moe, saved
from tests.engine.kernels.specialised import StartedKernels, stand_in
from tests.engine.test_graphs import CONTEXT, CPU, EVERY_KIND, ROWS, Engine, prompts


@pytest.mark.parametrize(("chunk_tokens", "max_rows"), [(20, ROWS), (5000, ROWS), (16, 1), (CONTEXT, 2)])
def test_the_largest_steps_run_on_a_pool_of_a_page_and_later_answers_are_as_if_they_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_tokens: int, max_rows: int
) -> None:
    path = saved(qwen3(), tmp_path)
    fresh, warmed = Engine(path), Engine(path)
    plans: list[StepPlan] = []
    launch = warmed.steps.launch

    def noted(plan: StepPlan) -> PendingStep:
        plans.append(plan)
        return launch(plan)

    monkeypatch.setattr(warmed.steps, "launch", noted)
    warm_up(warmed.steps, 8, chunk_tokens, max_rows, CONTEXT)
    assert max(plan.chunk_tokens for plan in plans) == min(chunk_tokens, CONTEXT)
    assert max(len(plan.decode_rows) for plan in plans) == max_rows
    assert {int(page) for plan in plans for start in plan.starts for page in start.pages} == set(range(WARM_UP_PAGES))
    assert warmed.answers(prompts(4), EVERY_KIND) == fresh.answers(prompts(4), EVERY_KIND)


@pytest.mark.parametrize(("make", "sizes"), [(qwen3, ()), (qwen3, (2, 6)), (qwen3_moe, ())], ids=["eager", "graphs", "experts"])
def test_no_later_step_has_triton_compile_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., PreTrainedModel], sizes: tuple[int, ...]
) -> None:
    """Batches, chunks and requests of every kind: while Triton compiles for one, all rows wait."""
    pytest.importorskip("triton", reason="needs the package triton, which is there with torch for CUDA")
    from engine.gpu import triton_source

    kernels, started = stand_in(monkeypatch, triton_source), StartedKernels()

    def attend(memory: KVMemory, heads: int, layers: Sequence[LayerAttention]) -> Attention:
        needs = AttentionNeeds(memory, heads, layers, torch.float32, ROWS, CONTEXT // 8, "fa2")
        return FlashInferAttention(needs, started, FlashInferDouble((torch.float32,)))

    path = saved(make(head_dim=64), tmp_path)
    engine = Engine(path, sizes, attend, kernels=started)
    warm_up(engine.steps, 8, 20, ROWS, CONTEXT)
    before = {name: set(kernel.compiled) for name, kernel in kernels.items()}
    run = ("decode_inputs", "rotation", "rms_norm", "rotate_and_write", "slice_samples", "page_indices")
    assert all(before[name] for name in (*run, *(("route", "sort_pairs", "combine") if make is qwen3_moe else ())))
    for count in (2, 4, 7):
        engine.answers(prompts(count), [EVERY_KIND[(row + count) % len(EVERY_KIND)] for row in range(count)])
    assert {name: kernel.compiled for name, kernel in kernels.items()} == before


def test_no_later_mask_of_a_grammar_has_triton_compile_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """xgrammar's kernel, which is for CUDA."""
    pytest.importorskip("triton", reason="needs the package triton, which is there with torch for CUDA")
    import xgrammar
    from xgrammar.kernels import apply_token_bitmask_inplace_triton as on_cuda

    (kernel,) = stand_in(monkeypatch, on_cuda).values()
    monkeypatch.setattr(xgrammar, "apply_token_bitmask_inplace", on_cuda.apply_token_bitmask_inplace_triton)
    card = mock.Mock(multi_processor_count=132, gcnArchName="")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    load_mask_kernel(VOCAB, CPU)
    before = set(kernel.compiled)
    assert len(before) == 3
    processor = GrammarProcessor(lambda grammar: pytest.fail("no row has one"), 64, VOCAB, (2,), CPU)
    for count in (1, 2, 3, 8, 16, 17, 32, 48, 63):
        rows, at = torch.arange(count), torch.arange(count) + count % 2
        sampled = SampledRows(rows.numpy(), rows, at.numpy(), at)
        processor.apply(torch.zeros(count + 2, VOCAB), sampled)
    assert kernel.compiled == before
