"""Recordings of calls of C: what they compute, what they refuse, and the memory that they keep."""

import gc
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from engine.cpu.build import LISTENING
from engine.cpu.kernels import NativeKernels, load_native_kernels
from engine.replay import CallRecorder, CannotRecord, Recording, load_recorder

KERNELS, FOUND = load_native_kernels(), load_recorder()
pytestmark = pytest.mark.skipif(KERNELS is None or FOUND is None, reason="there is no C compiler")
WIDTH = 48
EPS = 1e-6


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def recorder() -> CallRecorder:
    made = load_recorder()
    assert made is not None
    return made


def kernels() -> NativeKernels:
    assert KERNELS is not None
    return KERNELS


def deep(x: Tensor, weight: Tensor, between: Callable[[int], None]) -> Tensor:
    """Layers of a residual stream, with views between them, as a decoder computes them."""
    normed, _ = kernels().rms_norm(x, weight, EPS)
    for layer in range(5):
        viewed = normed.view(-1, WIDTH).reshape(x.shape[0], WIDTH).contiguous().float()
        between(layer)
        normed, x = kernels().rms_norm(viewed, weight, EPS, x)
    return kernels().silu_and_mul(x)


def recorded(recorder: CallRecorder, rows: int) -> tuple[Tensor, Tensor, Recording]:
    x, weight = torch.zeros(rows, WIDTH), 1 + torch.arange(WIDTH) / WIDTH
    return x, weight, recorder.record(lambda between: (deep(x, weight, between),))


def run(recording: Recording, between: Callable[[], None] | None = None) -> Tensor:
    (result,) = recording.run(between)
    return result


def ignored(_: int) -> None:
    pass


def test_it_computes_what_the_function_does_from_what_its_tensors_hold_then(recorder: CallRecorder) -> None:
    x, weight, recording = recorded(recorder, 7)
    for seed in range(4):
        x.copy_(torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(run(recording), deep(x, weight, ignored))


def test_nothing_is_computed_while_it_is_recorded(recorder: CallRecorder) -> None:
    rows, length = torch.arange(3), torch.tensor([5, 6, 7, 0])
    table = torch.zeros(4, 9, dtype=torch.int32)
    recording = recorder.record(lambda _: (kernels().decode_inputs(rows, length, length, table, 2, 3)[1],))
    assert length.tolist() == [5, 6, 7, 0]
    assert run(recording).tolist() == [5, 6, 7] and length.tolist() == [6, 7, 8, 0]
    assert run(recording).tolist() == [6, 7, 8]


def test_others_have_their_say_where_the_function_let_them(recorder: CallRecorder) -> None:
    x, _, recording = recorded(recorder, 3)
    x.normal_()
    expected = run(recording).clone()
    said: list[int] = []
    assert torch.equal(run(recording, lambda: said.append(1)), expected) and len(said) == 5


def test_it_runs_on_the_threads_that_torch_has_by_then(recorder: CallRecorder) -> None:
    x, weight, recording = recorded(recorder, 2000)
    x.normal_()
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            assert torch.equal(run(recording), deep(x, weight, ignored))
            change = partial(torch.set_num_threads, 1 + threads % 3)
            assert torch.equal(run(recording, change), deep(x, weight, ignored))
    finally:
        torch.set_num_threads(before)


def test_recordings_of_many_sizes_do_not_disturb_each_other_and_outlive_their_recorder(recorder: CallRecorder) -> None:
    made = [recorded(recorder, rows) for rows in (1, 2, 3, 5, 8, 64, 65, 300)]
    del recorder
    gc.collect()
    filler = [torch.full((rows * WIDTH,), torch.nan) for rows in (1, 5, 8, 64, 300)]
    for seed in range(3):
        for x, weight, recording in [*made, *reversed(made)]:
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            assert torch.equal(run(recording), deep(x, weight, ignored))
    assert all(each.isnan().all() for each in filler), "nobody else's memory is written"


def test_sizes_share_memory(recorder: CallRecorder) -> None:
    """Only tensors of a deep function that are alive together take memory of their own, and small sizes take that of the
    largest, which came first."""
    recorded(recorder, 64)
    largest = sum(len(block) for block in recorder._memory._blocks.values())
    assert largest <= 4 * 64 * WIDTH * 4
    for rows in range(63, 0, -1):
        recorded(recorder, rows)
    assert sum(len(block) for block in recorder._memory._blocks.values()) == largest


def test_a_view_keeps_the_memory_of_its_tensor(recorder: CallRecorder) -> None:
    x, weight = torch.randn(4, WIDTH), torch.ones(WIDTH)

    def function(_: Callable[[int], None]) -> Tensor:
        half = kernels().rms_norm(x, weight, EPS)[0][2:]
        kernels().rms_norm(torch.empty(4, WIDTH), weight, EPS)
        return kernels().rms_norm(half, weight, EPS)[0]

    expected, _ = kernels().rms_norm(kernels().rms_norm(x, weight, EPS)[0][2:], weight, EPS)
    assert torch.equal(run(recorder.record(lambda between: (function(between),))), expected)


def test_several_results_do_not_share_memory(recorder: CallRecorder) -> None:
    x, weight = torch.randn(4, WIDTH), torch.ones(WIDTH)
    recording = recorder.record(lambda _: (kernels().rms_norm(x, weight, EPS)[0], kernels().sample(x)))
    normed, likeliest = recording.run()
    assert torch.equal(normed, kernels().rms_norm(x, weight, EPS)[0]) and torch.equal(likeliest, x.argmax(dim=-1))


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        ("add", lambda x: x + 1),
        ("add_", lambda x: x.add_(1)),
        ("copy_", lambda x: x.copy_(x)),
        ("zeros", lambda x: torch.zeros(2, 2)),
        ("index", lambda x: x[torch.tensor([0])]),
        ("reshape", lambda x: x.t().reshape(-1)),
        ("_to_copy", lambda x: x.double()),
        ("item", lambda x: torch.ones(1).expand(int(x[0, 0]) + 2)),
        ("index of what is not computed", lambda x: torch.ones(9)[torch.empty(3, dtype=torch.int64)]),
        ("resize_", lambda x: x.resize_(2, 2)),
        ("of nothing", lambda x: torch.empty(0, 3) + 1),
    ],
)
def test_what_torch_computes_is_refused_and_named(recorder: CallRecorder, name: str, compute: Callable[[Tensor], Tensor]) -> None:
    x, weight = torch.zeros(3, WIDTH), torch.ones(WIDTH)
    with pytest.raises(CannotRecord):
        recorder.record(lambda _: (kernels().rms_norm(compute(kernels().rms_norm(x, weight, EPS)[0]), weight, EPS)[0],))
    with pytest.raises(CannotRecord):
        recorder.record(lambda _: (x.add_(1),))
    assert LISTENING.to is None and x.eq(0).all()
    assert kernels().rms_norm(x + 1, weight, EPS)[0][0, 0].item() == pytest.approx(1), "C computes again"
