"""Runs against a copy page by page: the same bytes, in as few runs as possible, cut into small slices; and checks of pools."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import TransferError
from common.ids import Int32Array, Int64Array
from common.pages.layout import ITEM_BYTES, KVLayout
from kv_transfer.planner import PageSlice, check_pages, mismatch, plan_runs
from kv_transfer.transport import slice_runs
from tests.builders import LAYOUT
from tests.kv_transfer.test_planner import run_copy

POOL_PAGES = 24
SMALL = st.integers(1, 3)
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
            goes_on = bool(side) and side[-1] + stretch < POOL_PAGES and draw(st.booleans())
            start = side[-1] + 1 if goes_on else draw(st.integers(0, POOL_PAGES - stretch))
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
def test_runs_copy_the_same_bytes_as_copying_page_by_page(pages: tuple[Int32Array, Int32Array], layout: KVLayout) -> None:
    source, target = np.random.default_rng(0).integers(0, 256, (2, POOL_PAGES, layout.page_bytes), dtype=np.uint8)
    expected = target.copy()
    for source_page, target_page in zip(*pages, strict=True):
        expected[target_page] = source[source_page]
    runs = plan_runs(*pages, PageSlice(layout), PageSlice(layout))
    assert runs.dtype == np.int64 and runs.shape[1] == 3
    assert runs[:, 2].sum() == len(pages[0]) * layout.page_bytes
    run_copy(runs, source.reshape(-1), target.reshape(-1))
    np.testing.assert_array_equal(target, expected)


@given(page_pairs(), LAYOUTS)
def test_runs_that_are_contiguous_on_both_sides_are_merged(pages: tuple[Int32Array, Int32Array], layout: KVLayout) -> None:
    runs = plan_runs(*pages, PageSlice(layout), PageSlice(layout))
    ends = runs[:-1, :2] + runs[:-1, 2:]
    assert not (ends == runs[1:, :2]).all(axis=1).any()
    assert (runs % layout.page_bytes == 0).all() and (runs[:, 2] > 0).all()


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


OTHER: dict[str, object] = {"layers": 3, "head_dim": 6, "page_size": 7} | {
    "dtype": "float32",
    "order": "head",
    "version": 99,
}


@pytest.mark.parametrize("field", OTHER)
def test_the_field_in_which_layouts_differ_is_named_with_both_values(field: str) -> None:
    theirs = msgspec.structs.replace(LAYOUT, **{field: OTHER[field]})
    assert mismatch(LAYOUT, theirs) == f"{field} is {OTHER[field]} there and {getattr(LAYOUT, field)} here"


def test_layouts_that_are_equal_but_for_the_number_of_heads_do_not_differ() -> None:
    assert set(OTHER) == set(KVLayout.__struct_fields__) - {"kv_heads"}
    assert mismatch(LAYOUT, msgspec.structs.replace(LAYOUT, kv_heads=5)) is None
