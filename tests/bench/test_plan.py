"""The plans of `launch bench`: what their flags span and refuse, what --quick makes of them, and which fleets are compared."""

from collections.abc import Callable

import numpy as np
import pytest

from bench import overlap_plan, plan
from bench.agent import pages_of
from bench.overlap import fleet_flags
from bench.overlap_plan import FLEETS, OverlapBench, prompt_tokens
from bench.plan import Point, TransferBench
from common.config import EngineConfig
from common.errors import ConfigError
from common.flags import with_defaults
from launch.main import build_parser

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
    ("bench", "flags", "named"),
    [
        (TransferBench, {"transport": "pigeon"}, "--transport"),
        (TransferBench, {"page_bytes": "64KiB,100KiB"}, "--page-bytes"),
        (TransferBench, {"page_bytes": "64"}, "--page-bytes"),
        (TransferBench, {"page_bytes": "auto"}, "--page-bytes"),
        (TransferBench, {"page_bytes": "2MiB", "memory": "1MiB"}, "--page-bytes"),
        (TransferBench, {"pages": "1,two"}, "--pages"),
        (TransferBench, {"pages": "0"}, "--pages"),
        (TransferBench, {"memory": "much"}, "--memory"),
        (TransferBench, {"device": "cpu,cuda"}, "--device"),
        (TransferBench, {"device": "cuda:"}, "--device"),
        (TransferBench, {"seconds": 0.0}, "--seconds"),
        (TransferBench, {"repeat": 0}, "--repeat"),
        (TransferBench, {"idle_s": -1.0}, "--idle-s"),
        (OverlapBench, {"model": "demo,"}, "--model"),
        (OverlapBench, {"model": "demo,demo"}, "--model"),
        (OverlapBench, {"chunks": "1,two"}, "--chunks"),
        (OverlapBench, {"chunks": "0,1"}, "--chunks"),
        (OverlapBench, {"repeat": 0}, "--repeat"),
        (OverlapBench, {"layers": 0}, "--layers"),
        (OverlapBench, {"hidden": -1}, "--hidden"),
        (OverlapBench, {"kv_heads": 0}, "--kv-heads"),
        (OverlapBench, {"head_dim": 63}, "--head-dim"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_the_name_of_its_flag(
    bench: Callable[..., object], flags: dict[str, str | float], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        bench(**flags)


def test_quick_is_small_and_leaves_what_was_said() -> None:
    small = with_defaults(TransferBench(pages="1,4", transport="nixl"), plan.QUICK)
    assert (small.pages, small.transport) == ("1,4", "nixl")
    assert small.pool_bytes < TransferBench().pool_bytes and small.repeat == 1
    bench = with_defaults(OverlapBench(layers=3), overlap_plan.QUICK)
    assert (bench.models, bench.repeat, bench.layers) == (("random",), 1, 3)
    engine = with_defaults(EngineConfig(page_size=8), overlap_plan.QUICK_ENGINE)
    assert (engine.page_size, engine.chunk_tokens) == (8, 64)


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


def test_the_defaults_measure_random_weights_and_the_demo_model_at_one_two_and_eight_chunks() -> None:
    bench = OverlapBench()
    assert (bench.models, bench.lengths) == (("random", "demo"), (1, 2, 8))


def test_a_prompt_is_whole_chunks_less_a_page() -> None:
    assert prompt_tokens(8, EngineConfig(chunk_tokens=512, page_size=16)) == 4080
    with pytest.raises(ConfigError, match="--chunk-tokens"):
        prompt_tokens(1, EngineConfig(chunk_tokens=16, page_size=16))


def test_fleets_differ_in_their_instances_and_in_how_the_last_chunk_is_pushed_alone() -> None:
    engine = EngineConfig(threads=3, layer_groups=3)
    plans = [build_parser().parse_args(["local", *fleet_flags(k, "demo", OverlapBench(transport="cma"), engine)]) for k in FLEETS]
    assert [(plan.prefill, plan.decode) for plan in plans] == [(1, 1), (1, 1), (0, 1)]
    assert [plan.layer_groups for plan in plans[:2]] == [3, 0]
    assert {plan.threads for plan in plans} == {3}
    assert {plan.transport for plan in plans} == {"cma"}
