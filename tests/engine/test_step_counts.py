"""What a step starts on a card, as `step_counts` counts it, and the predictions that are made of it."""

import msgspec
import pytest

from benchmarks.engine_figures import PREDICTIONS, Predictions, StepPrediction, group_of
from benchmarks.engine_tasks import checkpoint, prefill_flop, step_weight_bytes
from common.config import EngineConfig
from common.model_path import resolve_model_path
from engine.models.served_shape import read_served_shape
from engine.models.shape import ModelShape
from tests.engine.step_counts import CARDS, GAP_S, SMALLEST_S, CountedStep, Kernel, count, predict, steps


def shape_of(model: str) -> ModelShape:
    with checkpoint(model, EngineConfig()) as (config, _):
        shape = read_served_shape(resolve_model_path(config.model, weights=False))
    assert isinstance(shape, ModelShape)
    return shape


def kv_bytes(shape: ModelShape, tokens: int) -> int:
    return 2 * 2 * tokens * shape.layers * shape.kv_heads * shape.head_dim


@pytest.mark.parametrize(("model", "rows", "quantization"), [("Qwen3-0.6B", 32, "none"), ("Llama-3-8B", 1, "fp8")])
def test_a_decode_step_needs_every_weight_once_and_the_kv_of_its_rows(model: str, rows: int, quantization: str) -> None:
    """Against the closed forms, which are held against transformers elsewhere. The last of the contexts is a few tokens below."""
    shape, engine = shape_of(model), EngineConfig(quantization=quantization)  # type: ignore[arg-type]
    kernels = count(CountedStep(model, "decode", rows, 2048, quantization))  # type: ignore[arg-type]
    expected = step_weight_bytes(shape, 2, engine) + kv_bytes(shape, rows * 2048)
    assert sum(kernel.needed for kernel in kernels) == pytest.approx(expected, rel=0.01)
    assert expected < sum(kernel.moved for kernel in kernels) < 1.1 * expected
    products = [kernel for kernel in kernels if kernel.group == "products"]
    assert len(products) == 4 * shape.layers + 1
    assert sum(kernel.is_fp8 for kernel in products) == (4 * shape.layers if quantization == "fp8" else 0)


def test_a_prompt_takes_the_operations_of_the_closed_form_and_no_graph() -> None:
    kernels = count(CountedStep("Llama-3-8B", "prefill", 1, 8192))
    assert sum(kernel.flop for kernel in kernels) == pytest.approx(prefill_flop(shape_of("Llama-3-8B"), 8192), rel=1e-3)
    assert not any(kernel.in_graph for kernel in kernels)


def test_a_rank_computes_its_part_and_meets_the_others_twice_in_a_layer() -> None:
    shape, kernels = shape_of("Llama-3-70B"), count(CountedStep("Llama-3-70B", "decode", 32, 2048, ranks=8))
    expected = (step_weight_bytes(shape, 2, EngineConfig()) + kv_bytes(shape, 32 * 2048)) / 8
    assert sum(kernel.needed for kernel in kernels) == pytest.approx(expected, rel=0.01)
    assert sum(kernel.name == "all_reduce" for kernel in kernels) == 2 * shape.layers + 1, "and once for the embedding"


def test_a_mixture_reads_the_experts_that_its_tokens_choose() -> None:
    """One token chooses 8 of 128 experts."""
    kernels = count(CountedStep("Qwen3-30B-A3B", "decode", 1, 512))
    assert sum(kernel.needed for kernel in kernels if "grouped_mm" in kernel.name) == pytest.approx(48 * 8 * 3 * 2048 * 768 * 2)


def test_a_step_takes_the_longer_of_bytes_and_operations_of_each_kernel_and_a_gap_for_each() -> None:
    kernels = [
        Kernel("linear", "products", moved=2.9e9 * 0.95, flop=1.0, needed=2.9e9 * 0.95),
        Kernel("linear", "products", moved=1.0, flop=0.72e12 * 0.9),
        Kernel("silu_and_mul", "norms", moved=10.0),
    ]
    made = predict(CountedStep("tiny", "decode", 1, 32), kernels)
    assert made.groups_ms["H100"] == pytest.approx({"products": 2.0, "norms": 1e3 * SMALLEST_S, "gaps": 3e3 * GAP_S})
    assert made.ms("H100") == pytest.approx(2.005) and made.share["H100"] == pytest.approx(0.95 / 2.005, abs=1e-4)
    assert made.groups_ms.keys() == CARDS.keys()


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<...>", "attention"),
        ("nvjet_tst_128x64_64x8_TNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "products"),
        ("add_rms_norm", "norms"),
        ("slice_samples", "sampling"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ranks"),
        ("page_indices", "ends"),
        ("void at::native::index_kernel_impl", "ends"),
    ],
)
def test_a_kernel_belongs_to_one_group_in_counts_and_in_profiles(kernel: str, group: str) -> None:
    assert group_of(kernel) == group


def test_the_predictions_are_of_these_steps_and_no_step_starts_more_kernels_than_when_they_were_made() -> None:
    """If it fails: python -m tests.engine.step_counts."""
    predictions = msgspec.json.decode(PREDICTIONS.read_bytes(), type=Predictions)

    def which(step: CountedStep | StepPrediction) -> tuple[object, ...]:
        return step.model, step.kind, step.rows, step.context, step.quantization, step.ranks

    made = {which(each): each for each in predictions.steps}
    assert made.keys() == {which(step) for step in steps()}
    for step in (CountedStep("Llama-3-8B", "decode", 32, 2048), CountedStep("Qwen3-0.6B", "decode", 256, 2048)):
        now = predict(step, count(step))
        assert now.kernels <= made[which(step)].kernels and now.moved_bytes <= 1.01 * made[which(step)].moved_bytes
