"""What only attention in C must show: any shape and any number of threads, and how the work is divided."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from common.pages.layout import KVDtype
from engine.cpu import attention
from engine.cpu.attention import NativeAttention, native_library
from engine.ports import LayerAttention
from engine.torch_attention import PagedAttention
from tests.engine.attention.steps import Shape, Step

DTYPES: list[tuple[torch.dtype, KVDtype]] = [
    (torch.float32, "float32"),
    (torch.bfloat16, "bfloat16"),
    (torch.float32, "bfloat16"),
]
LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def planned(step: Step) -> NativeAttention:
    library = native_library()
    if library is None:
        pytest.skip("there is no C compiler")
    attention = NativeAttention(step.memory, step.shape.heads, step.shape.layers, step.shape.dtype, library)
    attention.plan(step.tokens)
    return attention


def divide_finely(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ALONE_COST", "LIGHTEST", "SPLIT_SLOTS"):
        monkeypatch.setattr(attention, name, 1)


@pytest.mark.parametrize("seed", range(18))
def test_it_is_what_torch_computes_for_any_shape(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Heads that are not whole vectors, groups and pages of any size, items split or not, on one thread or two."""
    random = np.random.default_rng(seed + 100)
    torch.set_num_threads(1 + seed // 3 % 2)
    if seed % 2:
        divide_finely(monkeypatch)
    kv_heads, group = int(random.integers(1, 4)), int(random.choice([1, 2, 3, 4, 5, 7, 8, 17, 71]))
    page_size, dtype = int(random.choice([1, 3, 16, 64, 256])), DTYPES[seed % len(DTYPES)]
    layers = (LayerAttention(0.1), LayerAttention(0.1, int(random.integers(1, 40))), LayerAttention(0.1, 50, 3.0))
    chunks = [(int(random.integers(0, 100)), int(random.integers(1, 60))) for _ in range(random.integers(0, 3))]
    lengths = [int(length) for length in random.integers(1, 150, random.integers(1, 4))]
    width = -(-160 // page_size)
    dim = int(random.choice([8, 17, 40, 64, 72, 80, 128]))
    step = Step(Shape(group * kv_heads, kv_heads, dim, page_size, layers, *dtype, width=width), chunks, lengths, padding=1)
    attention, plain = planned(step), PagedAttention(step.memory, group * kv_heads, layers, torch.float32)
    plain.plan(step.tokens)
    for layer in range(len(layers)):
        difference = attention.run(layer, step.query).float() - plain.run(layer, step.query.float())
        assert difference[: len(step.places)].abs().max() < LARGEST_ERROR[dtype[0]]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_long_row_is_split_over_its_context_and_merged(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    torch.set_num_threads(threads)
    divide_finely(monkeypatch)
    shape = Shape(4, 1, 64, 16, (LayerAttention(0.1), LayerAttention(0.1, 33), LayerAttention(0.1, softcap=3.0)), width=20)
    step = Step(shape, [(100, 2), (250, 25)], [1, 7, 309])
    attention = planned(step)
    for layer in range(len(shape.layers)):
        first, again = (attention.run(layer, step.query) for _ in range(2))
        assert torch.equal(first, again) and step.error(layer, first) < 1e-5
    assert attention._calls[shape.layers[0]].split_count > 0


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_row_gets_the_same_numbers_on_any_number_of_threads_and_beside_any_other_rows(kv_heads: int) -> None:
    shape = Shape(2 * kv_heads, kv_heads, 32, 64, (LayerAttention(0.1), LayerAttention(0.1, 700)), width=32)
    step = Step(shape, [(1500, 70)], [2000, 600, 7])
    alone = replace(step.tokens, chunks=(), decode_rows=torch.tensor([1]), decode_lengths=torch.tensor([2000]))
    alone = replace(alone, host_lengths=np.array([2000], np.int64))
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        attention = planned(step)
        found.append([attention.run(layer, step.query) for layer in range(2)])
        attention.plan(alone)
        for layer in range(2):
            assert torch.equal(attention.run(layer, step.query[70:71])[0], found[0][layer][70])
            assert torch.equal(found[-1][layer], found[0][layer])


@pytest.mark.parametrize("rows", [4, 9, 25])
def test_a_thread_that_takes_several_heads_of_a_page_computes_the_same_as_one_that_takes_one(rows: int) -> None:
    """With as many rows, a turn has one, two or all of the three KV heads; a row alone is computed head by head."""
    shape = Shape(6, 3, 40, 16, (LayerAttention(0.1), LayerAttention(0.1, 33, 3.0)), width=40)
    step = Step(shape, [], [1 + 617 * row % 601 for row in range(rows)])
    attention = planned(step)
    together = [attention.run(layer, step.query) for layer in range(2)]
    assert all(step.error(layer, out) < 1e-5 for layer, out in enumerate(together))
    tokens = step.tokens
    for row in range(rows):
        alone = replace(
            tokens, decode_rows=tokens.decode_rows[row : row + 1], decode_lengths=tokens.decode_lengths[row : row + 1]
        )
        attention.plan(replace(alone, host_lengths=tokens.host_lengths[row : row + 1]))
        for layer in range(2):
            assert torch.equal(attention.run(layer, step.query[row : row + 1])[0], together[layer][row])


def test_each_layer_runs_on_the_threads_that_torch_has_by_then() -> None:
    """A change of torch's number amid a step must not make the runtime end threads and start them again."""
    layers = (LayerAttention(0.1),)
    step = Step(Shape(4, 2, 64, 16, layers, width=40), [(300, 60)], [600])
    torch.set_num_threads(1)
    attention = planned(step)
    expected = attention.run(0, step.query)
    ran: list[int] = []
    function = attention._attend._function

    def noted(call: Any, threads: Any) -> None:
        ran.append(threads)
        function(call, threads)

    attention._attend._function = noted  # type: ignore[assignment]
    for threads in (3, 1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(attention.run(0, step.query), expected)
    assert ran == [3, 1, 2]


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_what_is_not_a_number_is_seen_in_the_result_as_it_is_with_torch(softcap: float | None) -> None:
    """Decode rows and chunks, split and not: a query or a key with NaN or infinity, and scores far below any that occur."""
    shape = Shape(2, 1, 32, 64, (LayerAttention(0.1, softcap=softcap),), width=24)
    for chunks, lengths in (([], [40, 1200]), ([(20, 40), (1100, 40)], [])):
        for change in (torch.nan, torch.inf, -torch.inf, -1e34, None):
            step = Step(shape, chunks, lengths)
            for row in range(2):
                if change is not None:
                    step.memory.layers[0][0][step.table[row, 0], :, 5, 3] = change
            if change is None:
                step.query[:, 0, 0] = torch.nan
            attention, plain = planned(step), PagedAttention(step.memory, 2, shape.layers, torch.float32)
            plain.plan(step.tokens)
            got, expected = attention.run(0, step.query), plain.run(0, step.query)
            assert torch.equal(got.isnan(), expected.isnan())
            assert (got - expected).nan_to_num().abs().max() < 1e-5
    step = Step(Shape(1, 1, 32, 16, (LayerAttention(1.0),)), [(0, 40)], [3])
    step.query.fill_(-1e15)
    for view in step.memory.layers[0]:
        view.abs_().mul_(1e17).add_(1e17)
    attention, plain = planned(step), PagedAttention(step.memory, 1, step.shape.layers, torch.float32)
    plain.plan(step.tokens)
    assert torch.allclose(attention.run(0, step.query), plain.run(0, step.query))


def test_slots_before_a_window_are_not_read() -> None:
    """As `Step` has it, neither are those behind a context."""
    shape = Shape(4, 2, 32, 5, (LayerAttention(0.1, 7),))
    step = Step(shape, [(20, 9)], [9, 30, 40])
    attention = planned(step)
    expected = attention.run(0, step.query)
    for row, context in enumerate([21, 9, 30, 40]):
        for at in range(context - 7):
            for view in step.memory.layers[0]:
                view[step.table[row, at // 5], :, at % 5] = torch.nan
    assert torch.equal(attention.run(0, step.query), expected)


def test_large_scores_do_not_overflow() -> None:
    step = Step(Shape(1, 1, 8, 4, (LayerAttention(1.0),)), [(0, 32)], [13])
    step.memory.pool.fill_(100.0)
    step.query.fill_(1000.0)
    got = planned(step).run(0, step.query)
    assert torch.allclose(got, torch.full_like(got, 100.0))


def test_an_empty_step_is_no_work() -> None:
    step = Step(Shape(2, 1, 8, 4, (LayerAttention(1.0),)), [], [1])
    attention, none = planned(step), step.tokens.decode_rows[:0]
    attention.plan(replace(step.tokens, decode_rows=none, decode_lengths=none, host_lengths=none.numpy()))
    assert attention.run(0, step.query[:0]).shape == (0, 2, 8)
