"""The contract of attention, run against every backend: each token attends to its own past, as its layer says."""

from collections.abc import Callable

import pytest
import torch

from common.pages.layout import KVDtype, PageOrder
from engine.cpu.attention import NativeAttention, native_library
from engine.gpu.flashinfer import AttentionNeeds, FlashInferAttention, PrefillKernels
from engine.kv_memory import KVMemory
from engine.ports import Attention, LayerAttention
from engine.torch_attention import PagedAttention
from engine.torch_kernels import Kernels
from tests.engine.attention.flashinfer_double import FlashInferDouble
from tests.engine.attention.steps import Shape, Step

CHUNKS = [(0, 1), (0, 7), (3, 1), (9, 6), (20, 20)]
"""(start, tokens) of each."""
LENGTHS = [1, 4, 5, 6, 23, 40, 11, 12, 12]
STEPS = {"both": (CHUNKS, LENGTHS), "chunks": (CHUNKS[1:4], []), "decode": ([], LENGTHS[3:])}
WAYS = {
    "full": LayerAttention(0.1),
    "window": LayerAttention(0.1, window=7),
    "one token": LayerAttention(0.1, window=1),
    "softcap": LayerAttention(0.1, softcap=3.0),
    "both": LayerAttention(0.2, window=7, softcap=3.0),
}
Maker = Callable[[KVMemory, Shape], Attention]


def torch_backend(memory: KVMemory, shape: Shape) -> Attention:
    return PagedAttention(memory, shape.heads, shape.layers, shape.dtype)


def native_backend(memory: KVMemory, shape: Shape) -> Attention:
    library = native_library()
    if library is None:
        pytest.skip("there is no C compiler")
    return NativeAttention(memory, shape.heads, shape.layers, shape.dtype, library)


def native_decode_backend(memory: KVMemory, shape: Shape) -> Attention:
    """As on a processor with matrix units, where torch computes the chunks."""
    library = native_library()
    if library is None:
        pytest.skip("there is no C compiler")
    return NativeAttention(memory, shape.heads, shape.layers, shape.dtype, library, torch_backend(memory, shape))


def flashinfer_backend(memory: KVMemory, shape: Shape) -> FlashInferAttention:
    kernels: PrefillKernels = "fa3" if memory.pool.dtype == shape.dtype else "fa2"
    asked = AttentionNeeds(memory, shape.heads, shape.layers, shape.dtype, 16, shape.width, kernels)
    return FlashInferAttention(asked, Kernels(), FlashInferDouble())


BACKENDS: list[tuple[Maker, torch.dtype, KVDtype, float]] = [
    (torch_backend, torch.float32, "float32", 5e-6),
    (native_backend, torch.float32, "float32", 5e-6),
    (torch_backend, torch.bfloat16, "bfloat16", 3e-2),
    (native_backend, torch.bfloat16, "bfloat16", 1e-2),
    (native_decode_backend, torch.bfloat16, "bfloat16", 3e-2),
    (torch_backend, torch.float32, "bfloat16", 5e-6),
    (native_backend, torch.float32, "bfloat16", 5e-6),
    (torch_backend, torch.float32, "float8_e4m3fn", 5e-6),
    (flashinfer_backend, torch.float16, "float16", 2e-3),
    (flashinfer_backend, torch.bfloat16, "float8_e4m3fn", 2e-2),
]
"""Backend, dtype of queries and of pages, and the largest error: from rounding the output, and bfloat16's products in torch."""
NAMES = [f"{maker.__name__.removesuffix('_backend')}-{str(dtype)[6:]}-{kv}" for maker, dtype, kv, _ in BACKENDS]
every_backend = pytest.mark.parametrize(("make", "dtype", "kv_dtype", "largest_error"), BACKENDS, ids=NAMES)


@every_backend
@pytest.mark.parametrize("which", STEPS)
def test_each_token_attends_to_its_own_past_as_its_layer_says(
    make: Maker, dtype: torch.dtype, kv_dtype: KVDtype, largest_error: float, which: str
) -> None:
    """Two layers attend alike, and others stand between them."""
    ways = (*WAYS.values(), WAYS["full"])
    step = Step(Shape(6, 2, 64, 5, ways, dtype, kv_dtype), *STEPS[which])
    attention = make(step.memory, step.shape)
    for _ in range(2):  # a plan replaces the former one
        attention.plan(step.tokens)
    for layer in range(len(ways)):
        assert step.error(layer, attention.run(layer, step.query)) < largest_error


@every_backend
@pytest.mark.parametrize(
    ("heads", "kv_heads", "page_size", "order"),
    [(8, 8, 1, "layer"), (8, 1, 16, "head"), (5, 1, 64, "layer"), (4, 2, 16, "layer")],
)
def test_heads_may_share_a_key_and_pages_have_any_size_and_order(
    make: Maker,
    dtype: torch.dtype,
    kv_dtype: KVDtype,
    largest_error: float,
    heads: int,
    kv_heads: int,
    page_size: int,
    order: PageOrder,
) -> None:
    width = -(-40 // page_size)
    shape = Shape(heads, kv_heads, 64, page_size, (WAYS["full"], WAYS["window"]), dtype, kv_dtype, order, width)
    step = Step(shape, [(0, 7), (20, 9)], LENGTHS[4:])
    attention = make(step.memory, shape)
    attention.plan(step.tokens)
    for layer in range(2):
        assert step.error(layer, attention.run(layer, step.query)) < largest_error
