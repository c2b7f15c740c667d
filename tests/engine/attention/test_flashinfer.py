"""What only the FlashInfer backend promises: calls that the real package takes, and decode steps that a graph can hold."""

import importlib.util
import inspect

import pytest
import torch

from common.pages.layout import KVDtype
from engine.gpu.flashinfer import AttentionNeeds, FlashInferAttention, FlashInferDecodeGraph, float_workspace_bytes
from engine.kv_memory import KVMemory
from engine.ports import LayerAttention
from engine.torch_kernels import Kernels
from tests.engine.attention import flashinfer_double
from tests.engine.attention.flashinfer_double import Call, FlashInferDouble
from tests.engine.attention.steps import Shape, Step
from tests.engine.graph_recorder import RecordedGraphs

ROWS = 4
LAYERS = (LayerAttention(0.1), LayerAttention(0.1, window=7, softcap=3.0))


def a_shape(heads: int = 4, dtype: torch.dtype = torch.float16, kv_dtype: KVDtype = "float16") -> Shape:
    return Shape(heads, 2, 64, 5, LAYERS, dtype, kv_dtype)


def made(memory: KVMemory, shape: Shape, library: FlashInferDouble) -> FlashInferAttention:
    asked = AttentionNeeds(memory, shape.heads, shape.layers, shape.dtype, ROWS, shape.width, "fa2")
    return FlashInferAttention(asked, Kernels(), library)


class Captured:
    """A decode step of a backend for graphs, over persistent tensors."""

    def __init__(self, attention: FlashInferAttention, step: Step) -> None:
        graph = attention.for_graph(len(step.tokens.host_lengths))
        assert isinstance(graph, FlashInferDecodeGraph)
        self.graph, self.query, self.outs = graph, step.query.clone(), [step.query] * len(LAYERS)
        graph.plan(step.tokens)
        self.replay = RecordedGraphs().capture(self._run)

    def _run(self) -> None:
        self.outs = [self.graph.run(layer, self.query) for layer in range(len(LAYERS))]

    def error(self, step: Step) -> float:
        """The error of a replay for another step of the size."""
        self.query.copy_(step.query)
        self.graph.plan(step.tokens)
        self.replay()
        return max(step.error(layer, out) for layer, out in enumerate(self.outs))


@pytest.mark.parametrize(("heads", "kv_dtype"), [(4, "float16"), (8, "float16"), (4, "float8_e4m3fn")])
def test_a_graph_of_one_step_computes_any_later_step_of_its_size(heads: int, kv_dtype: KVDtype) -> None:
    """Rows of other lengths, null rows, and the steps of another size in between."""
    shape, library = a_shape(heads, kv_dtype=kv_dtype), FlashInferDouble()
    memory = shape.memory(ROWS * shape.width + 2)
    attention = made(memory, shape, library)
    first = Step(shape, [], [1], memory=memory, padding=ROWS - 1)
    four, two = Captured(attention, first), Captured(attention, Step(shape, [], [1], memory=memory, padding=1))
    for number, lengths in enumerate(([40, 1, 23, 5], [6], [11, 12, 40])):
        assert four.error(Step(shape, [], lengths, memory=memory, padding=ROWS - len(lengths), seed=number)) < 2e-3
        assert two.error(Step(shape, [], lengths[:2], memory=memory, padding=2 - len(lengths[:2]), seed=number)) < 2e-3


def test_only_the_first_plan_of_a_graph_copies_the_lists() -> None:
    shape, library = a_shape(), FlashInferDouble()
    step = Step(shape, [], [40, 1, 23, 5])
    graph = made(step.memory, shape, library).for_graph(ROWS)
    library.calls.clear()
    for _ in range(3):
        graph.plan(step.tokens)
    assert [call.name for call in library.calls] == ["plan"] * 2 + ["fast_decode_plan"] * 4


def test_layers_that_attend_alike_share_a_plan() -> None:
    shape = Shape(4, 2, 64, 5, LAYERS * 3, torch.float16, "float16")
    step, library = Step(shape, [(0, 7)], [4]), FlashInferDouble()
    made(step.memory, shape, library).plan(step.tokens)
    assert [call.name for call in library.calls].count("plan") == 2 * len(LAYERS)


@pytest.mark.parametrize(
    ("chunks", "kernels"),
    [
        ([(8_000, 128)], "fa2"),  # a turn of a chat
        ([(8_000, 128), (0, 5_000)], "fa3"),  # 41 tiles of 8 heads are work for 132 multiprocessors
        ([(3_000, 128)], "fa3"),
        ([(0, 9_000)], "fa3"),
    ],
)
def test_few_new_tokens_over_a_long_context_are_left_to_fa2(
    chunks: list[tuple[int, int]], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.gpu.flashinfer._multiprocessors", lambda device: 132)
    shape, library = Shape(8, 2, 64, 1_024, LAYERS[:1], torch.float16, "float16", width=9), FlashInferDouble()
    step = Step(shape, chunks, [])
    needs = AttentionNeeds(step.memory, shape.heads, shape.layers, shape.dtype, ROWS, shape.width, "fa3")
    attention = FlashInferAttention(needs, Kernels(), library)
    attention.plan(step.tokens)
    assert attention._prefill[LAYERS[0]].backend == kernels


def recorded_calls(heads: int) -> list[Call]:
    """Every kind of call that the backend makes."""
    shape, library = a_shape(heads), FlashInferDouble()
    step = Step(shape, [(0, 7), (9, 6)], [4, 23])
    attention = made(step.memory, shape, library)
    attention.plan(step.tokens)
    attention.run(0, step.query)
    decode = Step(shape, [], [40, 1, 23, 5], memory=step.memory)
    graph = attention.for_graph(ROWS)
    for _ in range(2):
        graph.plan(decode.tokens)
        graph.run(1, decode.query)
    return library.calls


@pytest.mark.parametrize("heads", [4, 8])
def test_the_real_package_takes_every_call_as_the_double_does(heads: int) -> None:
    """The double shows what the backend means by each argument, and the real signatures what FlashInfer would take it for."""
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer-python is not installed")
    import flashinfer

    calls = recorded_calls(heads)
    assert {f"{call.owner}.{call.name}" for call in calls} == {
        "BatchPrefillWithPagedKVCacheWrapper.__init__",
        "BatchPrefillWithPagedKVCacheWrapper.plan",
        "BatchPrefillWithPagedKVCacheWrapper.run",
        "BatchDecodeWithPagedKVCacheWrapper.__init__",
        "BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer",
        "BatchDecodeWithPagedKVCacheWrapper.plan",
        "BatchDecodeWithPagedKVCacheWrapper.run",
        ".fast_decode_plan",
    }
    for call in calls:
        if call.owner:
            real, double = (getattr(getattr(at, call.owner), call.name) for at in (flashinfer, flashinfer_double))
            before: tuple[object, ...] = (None, [], ()) if call.name == "__init__" else (None,)
            meant = inspect.signature(double).bind(*before, *call.args, **call.kwargs).arguments
            bound = inspect.signature(real).bind(None, *call.args, **call.kwargs).arguments
        else:
            plan = flashinfer_double.BatchDecodeWithPagedKVCacheWrapper.plan
            kwargs = {name: value for name, value in call.kwargs.items() if name != "global_override_indptr_cpu"}
            meant = inspect.signature(plan).bind(*call.args, **kwargs).arguments
            bound = inspect.signature(flashinfer.fast_decode_plan).bind(*call.args, **call.kwargs).arguments
            assert bound.pop("global_override_indptr_cpu") is call.kwargs["global_override_indptr_cpu"]
        for own in ("calls", "dtypes"):
            meant.pop(own, None)
        bound.update(bound.pop("kwargs", {}))  # 0.7 hands the names of the decode plan on
        assert set(bound) == set(meant)
        assert all(bound[name] is meant[name] for name in meant)


@pytest.mark.parametrize(
    ("heads", "multiprocessors", "needed"),
    [
        # Llama-3-70B on one H100: 64 query heads over 8, and 512 rows in a graph, which take 64 tiles for the heads and 511 more.
        (64, 132, 64 * (512 * 8 // 16 + 511) * 16),
        # Chunks of FA2 that share contexts. Only a card of thousands needs more than the least that FlashInfer wants.
        (8, 20_000, 8 * (2 * 20_000 // 8 * 128)),
    ],
)
def test_the_workspace_holds_the_partial_results_of_the_largest_step(heads: int, multiprocessors: int, needed: int) -> None:
    memory = Shape(heads, 8, 128, 16, LAYERS, torch.bfloat16, "bfloat16").memory(1)
    needs = AttentionNeeds(memory, heads, LAYERS, torch.bfloat16, max_rows=512, pages_per_row=512)
    needed_bytes = needed * (128 + 1) * 4
    assert needed_bytes <= float_workspace_bytes(needs, multiprocessors) < needed_bytes + 2**20
