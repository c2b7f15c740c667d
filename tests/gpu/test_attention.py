"""Attention on a card, compared with the definition: FlashInfer eager and in CUDA graphs, and torch."""

from collections.abc import Iterator

import pytest
import torch

from common.config import AttentionName
from common.pages.layout import KVDtype, PageOrder
from engine.backends import flashinfer_refusal, host_of, make_attention, make_kernels
from engine.gpu.flashinfer import AttentionNeeds
from engine.kv_memory import KVMemory
from engine.ports import Attention, LayerAttention
from engine.replay import CudaGraphs
from tests.engine.attention.steps import Shape, Step

CUDA = torch.device("cuda:0")
LAYERS = (LayerAttention(0.1), LayerAttention(0.1, window=100), LayerAttention(0.1, softcap=5.0), LayerAttention(0.1))
CHUNKS = [(0, 1), (0, 150), (700, 33), (3, 1)]
LENGTHS = [1, 16, 17, 1000, 255, 640]
TOLERANCE = 0.04
"""Values are normal numbers: bfloat16 rounds the result by up to 1/256 of it, and the products in it."""
ROWS = 8


def made(asked: AttentionName, memory: KVMemory, shape: Shape) -> Attention:
    needs = AttentionNeeds(memory, shape.heads, shape.layers, shape.dtype, ROWS, shape.width)
    if asked == "flashinfer":
        refusal = flashinfer_refusal(memory.layout, shape.dtype, host_of(CUDA))
        if refusal is not None:
            pytest.skip(refusal.reason)
    return make_attention(needs, asked, make_kernels(CUDA), lambda line: None).attention


def pool(shape: Shape) -> KVMemory:
    return shape.memory((len(CHUNKS) + len(LENGTHS)) * shape.width + 2, "cuda:0")


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Every wait for the device that torch knows of is an error."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("asked", ["flashinfer", "torch"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size", "dtype", "kv_dtype", "order"),
    [
        (8, 2, 128, 16, torch.bfloat16, "bfloat16", "layer"),
        (8, 1, 64, 1, torch.float16, "float16", "layer"),
        (4, 4, 128, 64, torch.bfloat16, "bfloat16", "head"),
        (5, 1, 128, 16, torch.bfloat16, "bfloat16", "layer"),
        (4, 2, 256, 16, torch.bfloat16, "bfloat16", "layer"),
        (8, 2, 128, 16, torch.bfloat16, "float8_e4m3fn", "layer"),
        (16, 8, 128, 16, torch.bfloat16, "bfloat16", "layer"),
        (32, 8, 128, 16, torch.bfloat16, "float8_e4m3fn", "layer"),
        (40, 8, 128, 16, torch.bfloat16, "bfloat16", "layer"),
        (40, 8, 128, 16, torch.bfloat16, "float8_e4m3fn", "layer"),
    ],
)
@torch.inference_mode()
def test_each_token_attends_to_its_own_past(
    no_waiting: None,
    asked: AttentionName,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: KVDtype,
    order: PageOrder,
) -> None:
    shape = Shape(heads, kv_heads, dim, page_size, LAYERS, dtype, kv_dtype, order, width=-(-1000 // page_size))
    memory = pool(shape)
    attention = made(asked, memory, shape)
    step = Step(shape, CHUNKS, LENGTHS, memory=memory)
    attention.plan(step.tokens)  # FlashInfer compiles
    for layer in range(len(LAYERS)):
        assert step.error(layer, attention.run(layer, step.query)) < TOLERANCE
    torch.cuda.synchronize()
    if asked == "flashinfer":
        torch.cuda.set_sync_debug_mode("error")
    attention.plan(step.tokens)
    again = [attention.run(layer, step.query) for layer in range(len(LAYERS))]
    torch.cuda.set_sync_debug_mode("default")
    assert max(step.error(layer, out) for layer, out in enumerate(again)) < TOLERANCE


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kv_dtype"), [(8, 2, "bfloat16"), (4, 2, "bfloat16"), (8, 1, "bfloat16"), (8, 2, "float8_e4m3fn")]
)
@torch.inference_mode()
def test_a_graph_of_one_step_computes_any_later_step_of_its_size(heads: int, kv_heads: int, kv_dtype: KVDtype) -> None:
    """Steps are planned while the former replay may still run; those of another size stand in between."""
    shape = Shape(heads, kv_heads, 128, 16, LAYERS, torch.bfloat16, kv_dtype, width=64)
    memory = pool(shape)
    attention = made("flashinfer", memory, shape)
    maker = CudaGraphs()
    sizes = {}
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for rows in (ROWS, 2):
            step = Step(shape, [], [1], memory=memory, padding=rows - 1)
            graph, query = attention.for_graph(rows), step.query.clone()
            assert graph is not None
            outs: list[torch.Tensor] = []
            graph.plan(step.tokens)

            def run(graph: Attention = graph, query: torch.Tensor = query, outs: list[torch.Tensor] = outs) -> None:
                outs[:] = [graph.run(layer, query) for layer in range(len(LAYERS))]

            sizes[rows] = (graph, query, outs, maker.capture(run))
        for seed, lengths in enumerate(([1000, 1, 17, 640, 16], [900] * ROWS, [5], [33, 700])):
            for rows, (graph, query, outs, replay) in sizes.items():
                step = Step(shape, [], lengths[:rows], memory=memory, padding=max(0, rows - len(lengths)), seed=seed)
                query.copy_(step.query)
                for _ in range(3):
                    graph.plan(step.tokens)
                    replay()
                assert max(step.error(layer, out) for layer, out in enumerate(outs)) < TOLERANCE
