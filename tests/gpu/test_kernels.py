"""The Triton kernels on a card: the contract of `Kernels`, the shapes of real models, large pools, and CUDA graphs."""

import pytest
import torch
from torch import Tensor

from engine.backends import make_kernels
from engine.gpu.triton_kernels import TritonKernels
from engine.ports import PagePlaces, Rotation, RowSampling
from tests.engine.kernels.contract import (
    DTYPES,
    FP8,
    HeadSizes,
    KernelsContract,
    check_activation,
    check_norms,
    check_page_indices,
    check_quantised,
    check_rotation,
    check_samples,
)

CUDA = torch.device("cuda")


class TestTritonKernels(KernelsContract):
    device = CUDA

    def setup_method(self) -> None:
        self.kernels = make_kernels(CUDA)

    def test_a_card_gets_the_triton_kernels(self) -> None:
        assert isinstance(self.kernels, TritonKernels)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("tokens", "hidden", "width"),
        [(1, 1024, 3072), (256, 4096, 14336), (3001, 5120, 17408), (32, 8192, 28672), (8, 18432, 768)],
    )
    def test_norms_and_activation_agree_at_real_shapes(self, dtype: torch.dtype, tokens: int, hidden: int, width: int) -> None:
        check_norms(self.subject(dtype), tokens, hidden)
        check_activation(self.subject(dtype), tokens, width)
        check_quantised(self.subject(dtype), tokens, width)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("tokens", "sizes", "norm"),
        [
            (1, HeadSizes(32, 8, 128, 64), False),
            (2048, HeadSizes(16, 8, 128, 64), True),
            (256, HeadSizes(40, 8, 128, 64), True),
            (33, HeadSizes(28, 4, 128, 32), False),
            (33, HeadSizes(32, 32, 80, 16), False),
            (33, HeadSizes(71, 1, 64, 32), False),
            (33, HeadSizes(16, 8, 256, 128), True),
        ],
    )
    def test_rotation_agrees_at_real_shapes(self, dtype: torch.dtype, tokens: int, sizes: HeadSizes, norm: bool) -> None:
        check_rotation(self.subject(dtype), tokens, sizes, norm=norm, page_dtype=dtype, order="head")
        check_rotation(self.subject(dtype), tokens, sizes, norm=norm, page_dtype=FP8)

    @pytest.mark.parametrize(("rows", "vocab"), [(1, 151_936), (64, 128_256), (256, 32_000)])
    def test_sampled_tokens_are_those_of_the_definition_at_real_vocabularies(self, rows: int, vocab: int) -> None:
        check_samples(self.subject(), rows, vocab)

    def test_the_pages_of_256_rows_lie_one_row_after_the_other(self) -> None:
        check_page_indices(self.subject(), [1 + 37 * row % 8192 for row in range(256)], 8192, 100)

    def test_pages_far_into_a_large_pool_are_written(self) -> None:
        """More than 2**31 elements from the first page, and nothing before or after."""
        page_size, dim = 16, 128
        pool = torch.zeros(2**31 // (2 * page_size * dim) + 3, 2, 1, page_size, dim, dtype=torch.bfloat16, device=CUDA)
        last = len(pool) - 1
        heads = torch.randn(1, 3, dim, dtype=torch.bfloat16, device=CUDA)
        still = Rotation(torch.ones(1, dim // 2, device=CUDA), torch.zeros(1, dim // 2, device=CUDA))
        places = PagePlaces(pool[:, 0], pool[:, 1], torch.tensor([last], device=CUDA), torch.tensor([5], device=CUDA))
        self.kernels.rotate_and_write(heads, still, None, places)
        assert torch.equal(pool[last, :, 0, 5], heads[0, 1:])
        assert int(torch.count_nonzero(pool)) == int(torch.count_nonzero(heads[0, 1:]))


def test_captured_kernels_follow_their_inputs() -> None:
    """One graph of every kernel, replayed with other inputs, gives what the eager kernels give."""
    kernels = make_kernels(CUDA)
    inputs = [torch.empty(8, 1024, dtype=torch.bfloat16, device=CUDA), torch.empty(8, 50_000, device=CUDA)]
    seed, position = torch.arange(8, device=CUDA), torch.arange(8, device=CUDA)
    share, top_k = torch.linspace(0, 2, 8, device=CUDA), torch.arange(8, device=CUDA)
    rows = RowSampling(share, top_k, share, -4 * share, seed, position)
    indptr, out = torch.arange(9, dtype=torch.int32, device=CUDA), torch.zeros(8, dtype=torch.int32, device=CUDA)
    pool = torch.zeros(8, 2, 2, 4, 128, dtype=torch.bfloat16, device=CUDA)
    page, slot = torch.arange(8, device=CUDA), torch.arange(8, device=CUDA) % 4

    def step() -> list[Tensor]:
        x, logits = inputs
        normed, total = kernels.rms_norm(kernels.rms_norm(x, x[0], 1e-6)[0], x[1], 1e-6, x)
        rotation = Rotation(logits[:, :64].cos(), logits[:, :64].sin())
        queries = kernels.rotate_and_write(normed.view(8, 8, 128), rotation, None, PagePlaces(pool[:, 0], pool[:, 1], page, slot))
        tokens = kernels.sample(logits, rows)
        kernels.page_indices(tokens.int()[:, None], seed, indptr, out)
        return [queries, total, kernels.silu_and_mul(total), tokens]

    def fill(number: int) -> None:
        generator = torch.Generator(CUDA).manual_seed(number)
        for tensor in inputs:
            tensor.normal_(generator=generator)

    fill(0)
    step()  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for number in (1, 2):
        fill(number)
        eager = [tensor.clone() for tensor in (*step(), pool, out)]
        pool.zero_()
        out.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip((*outputs, pool, out), eager, strict=True))
