"""The C kernel against the definition of attention in float64."""

import numpy as np
import pytest
import torch

from common.engine.attention.native import PagedAttentionKernel, load_kernel
from common.engine.kv_memory import KVMemory
from common.pages.layout import KVLayout
from tests.common.engine.reference import gathered, softmax_attention

PAGES = 64
LAYERS = 3


@pytest.fixture(scope="module", params=[1, 2])
def kernel(request: pytest.FixtureRequest) -> PagedAttentionKernel:
    made = load_kernel(threads=request.param)
    if made is None:
        pytest.skip("there is no C compiler")
    return made


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size"), [(4, 2, 64, 16), (8, 8, 32, 7), (6, 1, 17, 1), (4, 4, 128, 32)]
)
def test_it_is_softmax_attention_over_scattered_pages(
    kernel: PagedAttentionKernel, heads: int, kv_heads: int, dim: int, page_size: int
) -> None:
    generator = torch.Generator().manual_seed(page_size)
    layout = KVLayout(layers=LAYERS, kv_heads=kv_heads, head_dim=dim, page_size=page_size, dtype="float32")
    memory = KVMemory(layout, PAGES, torch.device("cpu"))
    memory.pool.copy_(torch.randn(memory.pool.shape, generator=generator))
    lengths = [1, page_size, page_size + 1, 5 * page_size - 1, 8 * page_size]
    table = torch.randperm(PAGES, generator=generator)[: len(lengths) * 8].view(len(lengths), 8).to(torch.int32)
    query = 3 * torch.randn(len(lengths), heads, dim, generator=generator)
    for layer in range(LAYERS):
        keys, values = memory.layers[layer]
        got = kernel(query, keys, values, table, torch.tensor(lengths), dim**-0.5)
        for row, length in enumerate(lengths):
            k, v = (gathered(view, table[row], length) for view in (keys, values))
            expected = softmax_attention(query[row].numpy().astype(np.float64), k, v, dim**-0.5)
            assert np.abs(got[row].numpy() - expected).max() < 2e-5


def test_large_scores_do_not_overflow(kernel: PagedAttentionKernel) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_size=4, dtype="float32")
    memory = KVMemory(layout, 4, torch.device("cpu"))
    memory.pool.fill_(100.0)
    query = torch.full((1, 1, 8), 1000.0)
    keys, values = memory.layers[0]
    got = kernel(query, keys, values, torch.arange(4, dtype=torch.int32)[None], torch.tensor([13]), 1.0)
    assert torch.allclose(got, torch.full_like(got, 100.0))
