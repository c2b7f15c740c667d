"""The grid of `launch bench transfer`: what its flags span, and what they refuse."""

import numpy as np
import pytest

from bench.agent import pages_of
from bench.plan import Point, TransferBench, quick
from common.errors import ConfigError

KIB, MIB = 2**10, 2**20


def test_the_grid_is_every_page_size_and_count_once_in_both_arrangements() -> None:
    bench = TransferBench(page_bytes="16KiB,64KiB", pages="1,8", memory="1MiB")
    assert list(bench.points()) == [
        Point(16 * KIB, 1, "contiguous"),
        Point(16 * KIB, 8, "contiguous"),
        Point(16 * KIB, 8, "scattered"),
        Point(64 * KIB, 1, "contiguous"),
        Point(64 * KIB, 8, "contiguous"),
        Point(64 * KIB, 8, "scattered"),
    ]


def test_pages_are_capped_by_what_the_memory_holds_and_no_point_comes_twice() -> None:
    bench = TransferBench(page_bytes="256KiB", pages="1,32,1024", memory="4MiB")
    assert [(point.pages, point.arrangement) for point in bench.points()] == [
        (1, "contiguous"),
        (16, "contiguous"),
        (16, "scattered"),
    ]


def test_a_pool_is_a_whole_number_of_the_largest_pages() -> None:
    assert TransferBench(page_bytes="64KiB,1MiB", memory="2600KiB").pool_bytes == 2 * MIB


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"transport": "pigeon"}, "--transport"),
        ({"page_bytes": "64KiB,100KiB"}, "--page-bytes"),
        ({"page_bytes": "64"}, "--page-bytes"),
        ({"page_bytes": "auto"}, "--page-bytes"),
        ({"page_bytes": "2MiB", "memory": "1MiB"}, "--page-bytes"),
        ({"pages": "1,two"}, "--pages"),
        ({"pages": "0"}, "--pages"),
        ({"memory": "much"}, "--memory"),
        ({"seconds": 0.0}, "--seconds"),
        ({"repeat": 0}, "--repeat"),
        ({"idle_s": -1.0}, "--idle-s"),
        ({"plot": "speed.png"}, "--plot"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_the_name_of_its_flag(flags: dict[str, str | float | int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TransferBench(**flags)  # type: ignore[arg-type]


def test_quick_is_small_and_leaves_what_was_said() -> None:
    small = quick(TransferBench(pages="1,4", transport="nixl"))
    assert (small.pages, small.transport) == ("1,4", "nixl")
    assert small.pool_bytes < TransferBench().pool_bytes and small.repeat == 1


@pytest.mark.parametrize(
    "point", [Point(4 * KIB, 5, "scattered"), Point(4 * KIB, 5, "contiguous"), Point(4 * KIB, 16, "scattered")]
)
def test_a_push_takes_whole_pages_each_once_and_the_next_takes_others(point: Point) -> None:
    unit_bytes, pool_bytes = 1 * KIB, 64 * KIB
    pushes = pages_of(point, unit_bytes, pool_bytes, seed=3)
    for pages in (side for push in pushes for side in push):
        starts = pages.reshape(point.pages, 4)
        assert (starts[:, 0] % 4 == 0).all(), "a page begins where a page begins"
        assert (np.diff(starts, axis=1) == 1).all(), "a page is one block"
        assert len(set(starts[:, 0].tolist())) == point.pages and pages.max() < pool_bytes // unit_bytes
        assert point.arrangement == "scattered" or (np.diff(pages) == 1).all()
    assert not np.array_equal(pushes[0][0], pushes[1][0])


def test_both_processes_choose_the_same_pages_and_another_round_takes_others() -> None:
    point = Point(KIB, 8, "scattered")
    first, again, other = (pages_of(point, KIB, 64 * KIB, seed)[0][1].tolist() for seed in (1, 1, 2))
    assert first == again != other
