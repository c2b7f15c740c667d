"""What `launch bench compare` is told: its layouts, the order of its turns, and what each run asks."""

import importlib.util
import shlex
from typing import Any

import pytest

from bench.compare.plan import DECIDED_BY_COMPARE, CompareBench, Layout, common_bench, require_charts, serve_bench
from bench.serve.plan import Load, Results, Target, Workload
from common.errors import ConfigError
from common.flags import read_config, to_flags
from launch.main import build_parser, main

A, B = "a=--prefill 0 --threads 2", "b = --prefill 1 --model 'my model'"
GOOD = Results(goodput=("ttft:500", "itl:50"))


def test_a_layout_is_flags_of_launch_local_or_a_url() -> None:
    layouts = CompareBench(layout=(A, B, "vllm=http://host:8000/v1", "x=--router=tcp://h:1")).layouts
    assert layouts == (
        Layout("a", ("--prefill", "0", "--threads", "2")),
        Layout("b", ("--prefill", "1", "--model", "my model")),
        Layout("vllm", url="http://host:8000/v1"),
        Layout("x", ("--router=tcp://h:1",)),
    )
    assert layouts[1].text == "--prefill 1 --model 'my model'"


def test_layouts_may_be_given_one_by_one_and_the_command_can_be_repeated() -> None:
    parse = build_parser().parse_args
    bench = read_config(CompareBench, parse(["bench", "compare", "--layout", A, "--layout", B]))
    assert bench.layout == (A, B)
    command = shlex.join(to_flags(bench, Load(request_rate=2.0), without=DECIDED_BY_COMPARE))
    assert read_config(CompareBench, parse(["bench", "compare", *shlex.split(command)])) == bench


def test_layouts_take_turns() -> None:
    turns = [(turn.round, turn.layout.name) for turn in CompareBench(layout=(A, B), rounds=3).turns()]
    assert turns == [(0, "a"), (0, "b"), (1, "a"), (1, "b"), (2, "a"), (2, "b")]


def test_layouts_get_the_same_requests_at_a_rate_of_a_round_and_others_at_every_other() -> None:
    bench = CompareBench(layout=(A, B), rates="4,0.5", seconds=10)
    common = common_bench(Target(), Workload(seed=7), Load(burstiness=2.0, request_rate=1.0), GOOD)
    first, other, later = (
        serve_bench(bench, common, url, 4.0, number) for url, number in (("http://a", 0), ("http://b", 0), ("http://a", 1))
    )
    assert bench.ladder == (0.5, 4.0)
    assert (first.workload, first.load) == (other.workload, other.load)
    seeds = {serve_bench(bench, common, "http://a", rate, number).workload.seed for rate in bench.ladder for number in range(3)}
    assert len(seeds) == 6 and later.workload.seed in seeds
    assert (first.workload.num_prompts, first.load.request_rate, first.load.burstiness) == (40, 4.0, 2.0)
    assert (first.target.url, other.target.url) == ("http://a", "http://b")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({}, "--layout is missing"),
        ({"layout": ("a",)}, "--layout must be NAME=FLAGS"),
        ({"layout": ("=--prefill 0",)}, "--layout must be NAME=FLAGS"),
        ({"layout": ("a=--model 'x",)}, "--layout a: the quotes"),
        ({"layout": (A, A)}, "another name"),
        ({"layout": (A,), "rates": "1,x"}, "--rates"),
        ({"layout": (A,), "rates": "0,1"}, "--rates"),
        ({"layout": (A,), "rates": "inf"}, "--rates"),
        ({"layout": (A,), "seconds": 0.0}, "--seconds"),
        ({"layout": (A,), "rounds": 0}, "--rounds"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_its_flag(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        CompareBench(**flags)


def test_a_trace_and_a_load_without_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="--goodput is missing"):
        common_bench(Target(), Workload(), Load(), Results())
    with pytest.raises(ConfigError, match="--dataset-name trace"):
        common_bench(Target(), Workload(dataset_name="trace", dataset_path="t.jsonl"), Load(), GOOD)


def test_a_wrong_flag_of_a_layout_is_refused_before_anything_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "compare", "--layout", A, "b=--prefil 1", "--goodput", "ttft:1"])
    assert "did you mean --prefill?" in capsys.readouterr().err


def test_without_matplotlib_the_command_says_what_to_install_before_it_starts_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    with pytest.raises(ConfigError, match="matplotlib"):
        require_charts()
    assert main(["bench", "compare", "--layout", "a=http://127.0.0.1:9", "--goodput", "ttft:1"]) == 2
    assert "pip install '.[bench]'" in capsys.readouterr().err
