"""The pushes of `launch bench engine`: which pages they take, and where their bytes land."""

from contextlib import ExitStack, closing

import numpy as np
import pytest

from benchmarks.pushes import QUICK_POOL_BYTES, SHAPES, UNIT_BYTES, PoolPlan, PushingEnd, PushShape, copying, pages_of
from common.errors import TransferError
from common.messages.transfers import Expect

PLAN = PoolPlan("cma", "cpu", QUICK_POOL_BYTES)


def test_the_shapes_are_every_page_size_and_count_in_both_arrangements() -> None:
    assert len(set(SHAPES)) == 8 and {shape.page_bytes // UNIT_BYTES for shape in SHAPES} == {1, 8}
    assert {(shape.pages, shape.arrangement) for shape in SHAPES} >= {(32, "contiguous"), (1024, "scattered")}


@pytest.mark.parametrize("arrangement", ["scattered", "contiguous"])
@pytest.mark.parametrize("pages", [5, 8])
def test_a_push_takes_whole_pages_each_once_and_the_next_takes_others(pages: int, arrangement: str) -> None:
    pushes = pages_of(PushShape(2 * UNIT_BYTES, pages, arrangement), PoolPlan("cma", "cpu", 64 * UNIT_BYTES))
    for taken in (side for push in pushes for side in push):
        starts = taken.reshape(pages, 2)
        assert (starts[:, 0] % 2 == 0).all() and (np.diff(starts, axis=1) == 1).all(), "a page is one block"
        assert len(set(starts[:, 0].tolist())) == pages and taken.max() < 64
        assert arrangement == "scattered" or (np.diff(taken) == 1).all()
    assert len({tuple(taken.tolist()) for taken, _ in pushes}) > 1


@pytest.mark.parametrize("way", ["a copy", "a thread"])
def test_bytes_land_where_they_should_and_nowhere_else(way: str) -> None:
    source, target = PLAN.memory(), PLAN.memory()
    source[:] = 7
    pages = np.array([3, 9, 10], np.int32), np.array([15, 0, 1], np.int32)
    with ExitStack() as stack:
        if way == "a copy":
            push = copying(PLAN, source, target, *pages)
        else:
            writer, reader = (stack.enter_context(closing(PushingEnd(PLAN, memory))) for memory in (source, target))
            reader.thread.submit(Expect(1))
            writer.connect(reader.pool)
            push = writer.push(*pages)
        push()
    units = target.reshape(-1, UNIT_BYTES).numpy()
    assert (units[[15, 0, 1]] == 7).all() and (np.delete(units, [15, 0, 1], axis=0) == 1).all()


def test_a_card_that_is_not_there_is_named() -> None:
    with pytest.raises(TransferError, match="no pool of 65536 bytes on cuda:99: "):
        PoolPlan("nixl", "cuda:99", 65536).memory()
