"""The plans of `launch bench`: what their flags span and refuse, what --quick makes of them, and which fleets are compared."""

from collections.abc import Callable

import pytest

from bench import overlap_plan
from bench.overlap import fleet_flags
from bench.overlap_plan import FLEETS, OverlapBench, prompt_tokens
from common.config import EngineConfig
from common.errors import ConfigError
from common.flags import with_defaults
from launch.main import build_parser


@pytest.mark.parametrize(
    ("bench", "flags", "named"),
    [
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
    bench = with_defaults(OverlapBench(layers=3), overlap_plan.QUICK)
    assert (bench.models, bench.repeat, bench.layers) == (("random",), 1, 3)
    engine = with_defaults(EngineConfig(page_size=8), overlap_plan.QUICK_ENGINE)
    assert (engine.page_size, engine.chunk_tokens) == (8, 64)


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
