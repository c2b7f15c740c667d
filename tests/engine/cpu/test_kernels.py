"""The kernels in C, on one thread and on several, at sizes where threads share the work."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.cpu.build import load
from engine.cpu.kernels import SOURCE, NativeKernels, load_native_kernels
from engine.lora.adapter_slots import tiles_of
from engine.ports import AdaptedTokens, HeadNorm, LowRankStack, PagePlaces, Rotation
from engine.torch_kernels import Kernels
from tests.engine.kernels.contract import (
    HeadSizes,
    KernelsContract,
    Subject,
    check_activation,
    check_low_rank,
    check_norms,
    check_rotation,
    check_samples,
)

LIBRARY = load(SOURCE)
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="there is no C compiler")
DTYPES = (torch.float32, torch.bfloat16)
SPECIAL = [
    1 + 2.0**-8,
    1 + 3 * 2.0**-8,
    -1 - 2.0**-8,
    1 + 2.0**-8 + 2.0**-20,
    3.4e38,
    -3.4e38,
    torch.inf,
    -torch.inf,
    1e-40,
    9e-41,
    0.0,
]
"""Between two numbers of bfloat16, just above that, beyond the largest one, not finite, and subnormal."""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class TestNativeKernels(KernelsContract):
    @pytest.fixture(autouse=True)
    def _made(self) -> None:
        self.kernels = kernels(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_the_tokens_and_outputs_of_adapters(dtype: torch.dtype) -> None:
    check_low_rank(Subject(kernels(3), dtype=dtype), [0] * 40 + [-1, 1, 2], 333, [1030, 515, 70], [16, 3, 33], spare=1)


def test_what_an_adapter_adds_to_a_token_depends_on_no_other_token_and_no_number_of_threads() -> None:
    torch.manual_seed(3)
    x, given, slots = torch.randn(23, 203), torch.randn(23, 700), np.array([1, 0, -1] * 7 + [1, 1])
    ends = (600, 700)
    stack = LowRankStack(torch.randn(2, 2, 16, 203), torch.randn(2, 16, 700), torch.tensor([16, 16]), ends, torch.tensor(ends))

    def computed(some: slice, threads: int) -> torch.Tensor:
        out, tokens = given[some].clone(), AdaptedTokens(*map(torch.from_numpy, tiles_of(slots[some])))
        kernels(threads).add_low_rank(out, x[some], stack, tokens)
        return out

    alone = torch.cat([computed(slice(at, at + 1), 1) for at in range(23)])
    assert not torch.equal(alone, given)
    assert all(torch.equal(computed(slice(None), threads), alone) for threads in (1, 2, 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_tokens_that_do_not_divide_evenly(dtype: torch.dtype) -> None:
    subject = Subject(kernels(3), dtype=dtype)
    check_norms(subject, 23, 1001)
    check_activation(subject, 7, 3001)
    check_rotation(subject, 17, HeadSizes(14, 2, 71, 33), norm=True, page_dtype=dtype)
    check_rotation(subject, 17, HeadSizes(14, 2, 71, 33), norm=False, page_dtype=dtype, order="head")


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("dim", "half"), [(128, 64), (71, 33), (20, 5), (1, 0)])
def test_bfloat16_pages_hold_what_float32_pages_do_as_torch_rounds_it(dim: int, half: int, norm: bool) -> None:
    """Bit by bit. Queries are the same, and no other byte of the pool is written."""
    generator = torch.Generator().manual_seed(dim)
    heads = torch.randn(19, 6, dim, generator=generator) * torch.logspace(-20, 20, 19)[:, None, None]
    heads[:, -1, :11] = torch.tensor(SPECIAL)[:dim]
    angles, weights = torch.randn(19, half, generator=generator), torch.randn(2, dim, generator=generator)
    given = Rotation(angles.cos(), angles.sin()), HeadNorm(weights[0], weights[1], 1e-6) if norm else None
    places = torch.randperm(40, generator=generator)[:19]
    pages, slots = places // 4, places % 4
    queries, pools = [], []
    for page_dtype in DTYPES:
        pool = torch.full((2, 10, 2, 4, dim), 7.0, dtype=page_dtype)
        queries.append(kernels(3).rotate_and_write(heads, *given, PagePlaces(pool[0], pool[1], pages, slots)))
        pools.append(pool)
    assert torch.equal(*queries)
    assert torch.equal(pools[0].bfloat16().view(torch.int16), pools[1].view(torch.int16))
    assert torch.equal(pools[1][1][pages, :, slots].view(torch.int16), heads[:, 4:].bfloat16().view(torch.int16))


def test_what_is_not_a_number_stays_so_in_bfloat16_pages() -> None:
    heads, angles = torch.full((1, 3, 40), torch.nan), torch.zeros(1, 16)
    pool = torch.zeros(2, 1, 1, 1, 40, dtype=torch.bfloat16)
    at = torch.zeros(1, dtype=torch.int64)
    kernels(1).rotate_and_write(heads, Rotation(angles, angles), None, PagePlaces(pool[0], pool[1], at, at))
    assert pool.isnan().all()


def test_threads_share_a_vocabulary_and_sample_what_the_definitions_say() -> None:
    for seed in range(3):
        check_samples(Subject(kernels(3)), 9, 12_345, seed)


@pytest.mark.soak
@pytest.mark.parametrize("native", [False, True], ids=["torch", "c"])
def test_100_000_random_rows_are_sampled_as_the_definitions_say(native: bool) -> None:
    subject = Subject(kernels(2) if native else Kernels())
    for seed in range(1000):
        check_samples(subject, 95, [1, 2, 13, 50, 400, 1700][seed % 6], 100 + seed)
        check_samples(subject, 5, 5000, 2000 + seed)
    for seed, vocab in enumerate([32_000, 128_256, 151_936, 262_144]):
        check_samples(subject, 24, vocab, 5000 + seed)


def test_one_logit_far_above_the_others_is_found_wherever_it_is() -> None:
    for at in (0, 511, 512, 8_191, 16_383, 16_384):
        logits = torch.full((2, 16_385), -1.0)
        logits[:, at] = 0.0
        assert kernels(3).sample(logits).tolist() == [at, at]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_that_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    x = torch.ones(3, 40, dtype=dtype)
    x[0, 3], x[1, 4] = torch.nan, torch.inf
    normed, _ = kernels(1).rms_norm(x, x[2], 1e-6)
    assert normed[0].isnan().all() and normed[1, 4].isnan() and normed[2].isfinite().all()
    assert kernels(1).silu_and_mul(x)[:2].isfinite().tolist() == Kernels().silu_and_mul(x)[:2].isfinite().tolist()


def test_the_activation_of_a_number_far_below_zero_is_zero() -> None:
    gate_up = torch.tensor([[-1e38, -1e37, -200.0, -89.0, -88.0, -80.0, 80.0, 1e38] + [1.0] * 8])
    assert torch.allclose(kernels(1).silu_and_mul(gate_up), Kernels().silu_and_mul(gate_up), atol=1e-30)


def test_weights_pages_and_slots_may_lie_in_every_other_place_of_a_tensor() -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(3, 40, generator=generator), torch.randn(80, generator=generator)[::2]
    angles, heads = torch.randn(3, 8, generator=generator), torch.randn(3, 4, 16, generator=generator)
    pages, slots = torch.tensor([0, 3, 1, 3, 2, 3])[::2], torch.tensor([1, 3, 2, 3, 0, 3])[::2]
    norm = HeadNorm(weight[:16], weight[16:32], 1e-6)
    found = []
    for each in (kernels(1), Kernels()):
        memory = torch.zeros(2, 4, 1, 4, 16)
        rotation, places = Rotation(angles.cos(), angles.sin()), PagePlaces(memory[0], memory[1], pages, slots)
        normed = (*each.rms_norm(x, weight, 1e-6), *each.rms_norm(x, weight, 1e-6, x))
        found.append((*normed, each.rotate_and_write(heads, rotation, norm, places), memory))
    assert all(torch.allclose(native, plain, atol=1e-5) for native, plain in zip(*found, strict=True))


def test_threads_share_embeddings_and_angles() -> None:
    table, ids = torch.randn(50, 700), torch.randint(0, 50, (300,))
    assert torch.equal(kernels(3).embed(ids, table), table[ids])
    frequencies, positions = torch.rand(64), torch.arange(2000, 2300)
    alone, shared = (kernels(threads).rotation(positions, frequencies, 1.0) for threads in (1, 3))
    assert torch.equal(alone.cos, shared.cos) and torch.equal(alone.sin, shared.sin)


def test_a_token_id_outside_of_the_vocabulary_reads_nothing_beside_the_table() -> None:
    pool = torch.full((4, 8), torch.nan)
    table = pool[1:3].fill_(1.0)
    assert kernels(1).embed(torch.tensor([0, -1, 2, 2**62, -(2**62)]), table)[1:].eq(0).all()


def test_without_a_compiler_there_are_no_kernels_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert load_native_kernels() is None


def kernels(threads: int) -> NativeKernels:
    assert LIBRARY is not None
    torch.set_num_threads(threads)
    return NativeKernels(LIBRARY)
