"""The planner against a copy head by head, and runs against a copy page by page: the same bytes.

The heads are spread for equal and unequal tensor parallelism, in both in-page orders. Runs are as few as possible, and cut into
small slices. Also checks of pools.
"""

from itertools import cycle, product
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import TransferError
from common.ids import Int32Array, Int64Array
from common.pages.layout import ITEM_BYTES, KVLayout, heads_of
from kv_transfer.planner import PageSlice, check_pages, mismatch, plan_runs, writers
from kv_transfer.transport import slice_runs
from tests.builders import LAYOUT

POOL_PAGES = 12
Order = Literal["layer", "head"]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
SMALL = st.integers(1, 3)
ORDERS: st.SearchStrategy[Order] = st.sampled_from(("layer", "head"))
RANKS = {8: (1, 2, 4, 8, 16), 4: (2, 16), 2: (1, 2, 4, 6), 1: (1, 4)}
"""For each number of KV heads: how many ranks may share them."""
SPLITS = [(heads, source, target) for heads, ranks in RANKS.items() for source in ranks for target in ranks]


def make_layout(order: Order, heads: int, layers: int = 2) -> KVLayout:
    return KVLayout(layers=layers, kv_heads=heads, head_dim=2, page_size=3, dtype="float16", order=order)


def blocks(pool: Bytes, layout: KVLayout) -> Bytes:
    """The pool as [pages, layer, key or value, head, bytes of a block]: a view, whatever the order."""
    block_bytes = layout.page_size * layout.slot_bytes
    if layout.order == "layer":
        return pool.reshape(-1, layout.layers, 2, layout.kv_heads, block_bytes)
    return pool.reshape(-1, layout.kv_heads, layout.layers, 2, block_bytes).transpose(0, 2, 3, 1, 4)


def run_copy(runs: np.ndarray[Any, np.dtype[np.int64]], source: Bytes, target: Bytes) -> None:
    for source_offset, target_offset, run_bytes in runs.tolist():
        target[target_offset : target_offset + run_bytes] = source[source_offset : source_offset + run_bytes]


@given(st.data())
def test_heads_that_both_hold_arrive_and_nothing_else_changes(data: st.DataObject) -> None:
    shape = {"layers": data.draw(SMALL), "head_dim": data.draw(SMALL), "page_size": data.draw(SMALL)}
    dtype = data.draw(st.sampled_from(sorted(ITEM_BYTES)))
    held = [
        PageSlice(
            KVLayout(**shape, kv_heads=data.draw(SMALL), dtype=dtype, order=data.draw(ORDERS)), data.draw(st.integers(0, 3))
        )
        for _ in range(2)
    ]
    (ours, theirs) = held
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    count = data.draw(st.integers(0, 6))
    source_pages, target_pages = (random.permutation(POOL_PAGES)[:count].astype(np.int32) for _ in range(2))
    layers = range(*sorted((data.draw(st.integers(0, shape["layers"])), data.draw(st.integers(0, shape["layers"])))))
    source, target = (random.integers(0, 256, POOL_PAGES * page_slice.layout.page_bytes, dtype=np.uint8) for page_slice in held)
    expected = target.copy()
    for source_page, target_page in zip(source_pages, target_pages, strict=True):
        for head in sorted(set(ours.heads) & set(theirs.heads)):
            for layer in layers:
                moved = blocks(source, ours.layout)[source_page, layer, :, head - ours.first_head]
                blocks(expected, theirs.layout)[target_page, layer, :, head - theirs.first_head] = moved
    runs = plan_runs(source_pages, target_pages, ours, theirs, layers)
    run_copy(runs, source, target)
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize(("order", "source", "target", "count"), [("layer", 1, 3, 5), ("head", 1, 3, 5), ("layer", 7, 0, 5000)])
def test_pages_that_follow_each_other_on_both_sides_are_one_run(order: Order, source: int, target: int, count: int) -> None:
    whole = PageSlice(make_layout(order, 4))
    pages, page_bytes = np.arange(count, dtype=np.int32), whole.layout.page_bytes
    runs = plan_runs(pages + source, pages + target, whole, whole)
    assert runs.tolist() == [[source * page_bytes, target * page_bytes, count * page_bytes]]


def test_a_slice_of_heads_is_one_run_when_heads_come_first_and_one_for_each_layer_and_part_otherwise() -> None:
    page = np.zeros(1, dtype=np.int32)
    for order, count in (("head", 1), ("layer", 2 * 3)):
        layout = make_layout("head" if order == "head" else "layer", 4, layers=3)
        narrow = PageSlice(msgspec.structs.replace(layout, kv_heads=2), first_head=2)
        assert len(plan_runs(page, page, PageSlice(layout), narrow)) == count


def test_one_layer_is_one_run_when_layers_come_first() -> None:
    whole = PageSlice(make_layout("layer", 4, layers=3))
    (run,) = plan_runs(np.array([2], dtype=np.int32), np.array([5], dtype=np.int32), whole, whole, range(1, 2)).tolist()
    third = whole.layout.page_bytes // 3
    assert run == [2 * whole.layout.page_bytes + third, 5 * whole.layout.page_bytes + third, third]


@pytest.mark.parametrize(("split", "orders"), list(zip(SPLITS, cycle(product(get_args(Order), repeat=2)), strict=False)))
def test_every_rank_of_the_target_gets_every_head_it_holds_exactly_once(
    split: tuple[int, int, int], orders: tuple[Order, Order]
) -> None:
    (kv_heads, source_ranks, target_ranks), (source_order, target_order) = split, orders
    random = np.random.default_rng(0)
    whole = make_layout("layer", kv_heads)
    truth = random.integers(1, 256, POOL_PAGES * whole.page_bytes, dtype=np.uint8)
    pages = random.permutation(POOL_PAGES).astype(np.int32)
    written = {target: np.zeros(0, dtype=np.uint8) for target in range(target_ranks)}
    times = dict(written)
    for target in range(target_ranks):
        layout = make_layout(target_order, len(heads_of(target, target_ranks, kv_heads)))
        written[target] = np.zeros(POOL_PAGES * layout.page_bytes, dtype=np.uint8)
        times[target] = np.zeros_like(written[target])
    for part in writers(source_ranks, target_ranks, kv_heads):
        held, wanted = heads_of(part.source, source_ranks, kv_heads), heads_of(part.target, target_ranks, kv_heads)
        ours = PageSlice(make_layout(source_order, len(held)), held.start)
        theirs = PageSlice(make_layout(target_order, len(wanted)), wanted.start)
        assert set(part.heads) <= set(held) & set(wanted)
        pool = np.zeros(POOL_PAGES * ours.layout.page_bytes, dtype=np.uint8)
        blocks(pool, ours.layout)[:] = blocks(truth, whole)[:, :, :, held.start : held.stop]
        runs = plan_runs(pages, pages, ours, theirs)
        run_copy(runs, pool, written[part.target])
        run_copy(runs, np.ones_like(pool), ones := np.zeros_like(times[part.target]))
        times[part.target] += ones
    for target in range(target_ranks):
        wanted = heads_of(target, target_ranks, kv_heads)
        layout = make_layout(target_order, len(wanted))
        expected = blocks(truth, whole)[:, :, :, wanted.start : wanted.stop]
        np.testing.assert_array_equal(blocks(written[target], layout), expected)
        assert (times[target] == 1).all(), "each byte is written once"


def test_replicas_share_the_work() -> None:
    assert {part.source for part in writers(8, 8, 2)} == set(range(8))


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(TransferError, match="8 KV heads cannot be divided among 3 ranks"):
        heads_of(0, 3, 8)


PAGES_OF_RUNS = 24
LAYOUTS = st.builds(
    KVLayout,
    layers=SMALL,
    kv_heads=SMALL,
    head_dim=SMALL,
    page_size=SMALL,
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    order=st.sampled_from(["layer", "head"]),
)


@st.composite
def page_pairs(draw: st.DrawFn) -> tuple[Int32Array, Int32Array]:
    """Source and target pages made of stretches, of which some continue each other on one side, on both or on none."""
    source: list[int] = []
    target: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        stretch = draw(st.integers(1, 6))
        for side in (source, target):
            goes_on = bool(side) and side[-1] + stretch < PAGES_OF_RUNS and draw(st.booleans())
            start = side[-1] + 1 if goes_on else draw(st.integers(0, PAGES_OF_RUNS - stretch))
            side += range(start, start + stretch)
    return np.array(source, dtype=np.int32), np.array(target, dtype=np.int32)


def run_lists(max_bytes: int) -> st.SearchStrategy[Int64Array]:
    """Runs of 1 to max_bytes bytes, at any offsets."""
    row = st.tuples(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(1, max_bytes))
    return st.lists(row, max_size=12).map(lambda rows: np.array(rows, dtype=np.int64).reshape(-1, 3))


def each_byte(runs: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The source and the target offset of every byte of the runs, in order."""
    none = np.empty((0, 2), dtype=np.int64)
    offsets = np.concatenate([none, *(np.arange(run[2])[:, None] + run[:2] for run in runs)])
    return offsets[:, 0], offsets[:, 1]


@given(page_pairs(), LAYOUTS)
def test_runs_copy_the_same_bytes_as_copying_page_by_page_and_are_merged_where_they_meet_on_both_sides(
    pages: tuple[Int32Array, Int32Array], layout: KVLayout
) -> None:
    source, target = np.random.default_rng(0).integers(0, 256, (2, PAGES_OF_RUNS, layout.page_bytes), dtype=np.uint8)
    expected = target.copy()
    for source_page, target_page in zip(*pages, strict=True):
        expected[target_page] = source[source_page]
    runs = plan_runs(*pages, PageSlice(layout), PageSlice(layout))
    assert runs.dtype == np.int64 and runs.shape[1] == 3
    assert runs[:, 2].sum() == len(pages[0]) * layout.page_bytes
    assert (runs % layout.page_bytes == 0).all() and (runs[:, 2] > 0).all()
    assert not (runs[:-1, :2] + runs[:-1, 2:] == runs[1:, :2]).all(axis=1).any()
    run_copy(runs, source.reshape(-1), target.reshape(-1))
    np.testing.assert_array_equal(target, expected)


def test_offsets_pass_four_gigabytes() -> None:
    layout = msgspec.structs.replace(LAYOUT, page_size=4096, layers=64)
    page = np.array([2**31 - 1], dtype=np.int32)
    assert plan_runs(page, page, PageSlice(layout), PageSlice(layout)).tolist() == [
        [(2**31 - 1) * layout.page_bytes] * 2 + [layout.page_bytes]
    ]


def test_unequal_numbers_of_pages_are_refused_with_both() -> None:
    with pytest.raises(TransferError, match="3 source pages for 2 target pages"):
        plan_runs(np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32), PageSlice(LAYOUT), PageSlice(LAYOUT))


@given(run_lists(max_bytes=100), st.integers(1, 150))
def test_slices_hold_the_same_bytes_in_the_same_order(runs: Int64Array, slice_bytes: int) -> None:
    slices = slice_runs(runs, slice_bytes)
    together = np.concatenate([np.empty((0, 3), dtype=np.int64), *slices])
    for whole, cut in zip(each_byte(runs), each_byte(together), strict=True):
        np.testing.assert_array_equal(whole, cut)


@given(run_lists(max_bytes=10**9), st.integers(10**7, 10**10))
def test_every_slice_is_full_but_the_last_which_is_not_empty(runs: Int64Array, slice_bytes: int) -> None:
    slices = slice_runs(runs, slice_bytes)
    sizes = [int(part[:, 2].sum()) for part in slices]
    assert all(size == slice_bytes for size in sizes[:-1])
    assert all(0 < size <= slice_bytes for size in sizes)


@pytest.mark.parametrize(
    ("runs", "slice_bytes", "slices"),
    [
        ([[0, 100, 6], [50, 200, 6], [90, 300, 1]], 8, [[[0, 100, 6], [50, 200, 2]], [[52, 202, 4], [90, 300, 1]]]),
        ([[1000, 5000, 25]], 10, [[[1000, 5000, 10]], [[1010, 5010, 10]], [[1020, 5020, 5]]]),
    ],
    ids=["into the next slice", "over several slices"],
)
def test_a_run_is_cut_at_the_end_of_a_slice(runs: list[list[int]], slice_bytes: int, slices: list[list[list[int]]]) -> None:
    assert [part.tolist() for part in slice_runs(np.array(runs, dtype=np.int64), slice_bytes)] == slices


@pytest.mark.parametrize("pages", [[-1, 3], [0, 8], [3, 100]])
def test_pages_outside_of_a_pool_are_named(pages: list[int]) -> None:
    with pytest.raises(TransferError, match=f"between {min(pages)} and {max(pages)} are not all in our pool of 8"):
        check_pages(np.array(pages, dtype=np.int32), 8, "our")


@pytest.mark.parametrize("pages", [[], [0], [7], [7, 0, 3]])
def test_pages_inside_of_a_pool_pass(pages: list[int]) -> None:
    check_pages(np.array(pages, dtype=np.int32), 8, "our")


OTHER: dict[str, object] = {"layers": 3, "head_dim": 6, "page_size": 7} | {"dtype": "float32", "order": "head", "version": 99}


@pytest.mark.parametrize("field", OTHER)
def test_the_field_in_which_layouts_differ_is_named_with_both_values(field: str) -> None:
    theirs = msgspec.structs.replace(LAYOUT, **{field: OTHER[field]})
    assert mismatch(LAYOUT, theirs) == f"{field} is {OTHER[field]} there and {getattr(LAYOUT, field)} here"


def test_layouts_that_are_equal_but_for_the_number_of_heads_do_not_differ() -> None:
    assert set(OTHER) == set(KVLayout.__struct_fields__) - {"kv_heads"}
    assert mismatch(LAYOUT, msgspec.structs.replace(LAYOUT, kv_heads=5)) is None
