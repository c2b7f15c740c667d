"""`launch bench compare`: its layouts and the order of its turns, ratios and distributions against plain references, its page
and its tables, and stubs that take their turns.
"""

import contextlib
import importlib.util
import json
import re
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import compare
from bench.compare import (
    LEVELS,
    METRICS,
    CompareFailure,
    CompareOutcome,
    CompareRun,
    measure_all,
    pooled,
    publish,
    report,
    run_of,
    table,
)
from bench.options import (
    DECIDED_BY_COMPARE,
    CompareOptions,
    Layout,
    LoadOptions,
    ResultOptions,
    ServeOptions,
    WorkloadOptions,
    check_comparable,
)
from bench.report import ReportStyle, ratios, this_hardware
from bench.serve import MeasuredLoad
from common.errors import ConfigError
from common.options import read_config, to_flags
from common.processes.local_fleet import FleetFailed
from launch.main import build_parser, main

A, B = "a=--prefill 0 --threads 2", "b = --prefill 1 --model 'my model'"
GOOD = ResultOptions(goodput=("ttft:500", "itl:50"))


def test_a_layout_is_flags_of_launch_local_or_a_url() -> None:
    layouts = CompareOptions(layout=(A, B, "vllm=http://host:8000/v1", "x=--router=tcp://h:1")).layouts
    assert layouts == (
        Layout("a", "--prefill 0 --threads 2"),
        Layout("b", "--prefill 1 --model 'my model'"),
        Layout("vllm", "http://host:8000/v1"),
        Layout("x", "--router=tcp://h:1"),
    )
    assert [layout.url for layout in layouts] == ["", "", "http://host:8000/v1", ""]
    assert layouts[1].flags == ("--prefill", "1", "--model", "my model")


def test_layouts_may_be_given_one_by_one_and_the_command_can_be_repeated() -> None:
    parse = build_parser().parse_args
    bench = read_config(CompareOptions, parse(["bench", "compare", "--layout", A, "--layout", B]))
    assert bench.layout == (A, B)
    command = shlex.join(to_flags(bench, LoadOptions(request_rate=2.0), without=DECIDED_BY_COMPARE))
    assert read_config(CompareOptions, parse(["bench", "compare", *shlex.split(command)])) == bench


def test_layouts_take_turns() -> None:
    turns = [(number, layout.name) for number, layout in CompareOptions(layout=(A, B), rounds=3).turns()]
    assert turns == [(0, "a"), (0, "b"), (1, "a"), (1, "b"), (2, "a"), (2, "b")]


def test_layouts_get_the_same_requests_at_a_rate_of_a_round_and_others_at_every_other() -> None:
    bench = CompareOptions(layout=(A, B), rates="4,0.5", seconds=10)
    common = ServeOptions(workload=WorkloadOptions(seed=7), load=LoadOptions(burstiness=2.0, request_rate=1.0), results=GOOD)
    first, other, later = (
        bench.load_on(url, common, 4.0, number) for url, number in (("http://a", 0), ("http://b", 0), ("http://a", 1))
    )
    assert bench.ladder == (0.5, 4.0)
    assert (first.workload, first.load) == (other.workload, other.load)
    seeds = {bench.load_on("http://a", common, rate, number).workload.seed for rate in bench.ladder for number in range(3)}
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
        CompareOptions(**flags)


def test_a_trace_and_a_load_without_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="--goodput is missing"):
        check_comparable(ServeOptions())
    with pytest.raises(ConfigError, match="--dataset-name trace"):
        check_comparable(ServeOptions(workload=WorkloadOptions(dataset_name="trace", dataset_path="t.jsonl"), results=GOOD))


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
        check_comparable(ServeOptions(results=GOOD))
    assert main(["bench", "compare", "--layout", "a=http://127.0.0.1:9", "--goodput", "ttft:1"]) == 2
    assert "pip install -c constraints.txt -e '.[bench]'" in capsys.readouterr().err


def run_with(layout: str, rate: float, number: int, value: float) -> CompareRun:
    """A run whose figures are all the same value."""
    times = {name: [value] * len(LEVELS) for name in ("ttft", "itl", "e2el")}
    return CompareRun(layout=layout, rate=rate, round=number, figures=dict.fromkeys(METRICS, value), quantiles_ms=times)


def outcome_of(runs: list[CompareRun], **others: Any) -> CompareOutcome:
    sides = [Layout(name="one & only", text="--prefill 0"), Layout(name="1P1D", text="--prefill 1 --decode 1")]
    given: dict[str, Any] = {
        "command": "launch bench compare", "hardware": this_hardware(), "layouts": sides, "rates": [1.0, 2.5], "rounds": 3,
        "seconds": 30.0, "limits_ms": {"ttft": 500.0}, "runs": runs, "failures": [],
    }  # fmt: skip
    return CompareOutcome(**given | others)


def test_ratios_are_taken_within_each_round() -> None:
    """A machine that is twice as slow in a round changes no ratio."""
    theirs, ours = {0: 10.0, 1: 20.0, 2: 10.0}, {0: 5.0, 1: 10.0, 2: 6.0}
    spread = ratios(ours, theirs)
    plain = sorted(ours[number] / theirs[number] for number in ours)
    assert spread is not None and (spread.least, spread.most) == (plain[0], plain[-1])
    assert spread.median == statistics.median(plain) == 0.5


def test_a_round_without_its_other_half_has_no_ratio() -> None:
    spread = ratios({0: 5.0, 2: 6.0, 3: 7.0}, {1: 20.0, 2: 3.0, 3: 0.0})
    assert spread is not None and (spread.least, spread.most) == (2.0, 2.0)
    assert ratios({0: 5.0}, {1: 20.0}) is None


def test_the_share_of_good_answers_counts_requests_that_failed() -> None:
    figures = {"completed": 6, "failed": 2, "good_completed": 4, "errors_by_kind": {"timeout": 2}, "request_goodput": None}
    run = run_of("a", 1.0, 0, figures, {name: np.array([1.0, 3.0]) for name in ("ttft", "itl", "e2el")})
    assert run.figures["attainment"] == 0.5 and run.errors == {"timeout": 2}
    assert run.quantiles_ms["itl"][LEVELS.index(50.0)] == 2.0


def test_distributions_of_rounds_are_put_together_with_equal_weight() -> None:
    """Against the share of the times themselves, of rounds of different length."""
    random = np.random.default_rng(1)
    rounds = [random.gamma(2, 10, 4000), random.gamma(3, 20, 900)]
    runs = [run_of("a", 1.0, n, {"completed": 1, "failed": 0, "good_completed": 1, "errors_by_kind": {}},
                   dict.fromkeys(("ttft", "itl", "e2el"), times)) for n, times in enumerate(rounds)]  # fmt: skip
    values, shares = pooled(runs, "itl")
    for at in (1, 10, 30, 60, 120):
        plain = statistics.fmean(float((times <= at).mean()) for times in rounds)
        assert float(np.interp(at, values, shares)) == pytest.approx(plain, abs=0.006)
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert pooled([], "itl") == ([], [])


def test_a_table_names_the_median_the_spread_and_the_ratio_to_the_first_layout() -> None:
    runs = [run_with("one & only", 1.0, n, value) for n, value in enumerate((10.0, 20.0, 12.0))]
    runs += [run_with("1P1D", 1.0, n, value) for n, value in enumerate((5.0, 8.0, 12.0))]
    assert table(outcome_of(runs), "p99_itl_ms") == [
        ("requests/s", "one & only", "1P1D"),
        ("1", "12.0 (10.0 … 20.0)", "8.0 (5.0 … 12.0)  ×0.50 (0.40 … 1.00)"),
        ("2.5", "–", "–"),
    ]


def test_the_page_holds_the_figures_and_the_charts_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    """At the second rate nothing was answered."""
    runs = [run_with(name, 1.0, n, 7.0 + n) for name in ("one & only", "1P1D") for n in range(3)]
    runs.append(CompareRun(layout="1P1D", rate=2.5, round=1, figures=dict.fromkeys(METRICS, 0.0), errors={"timeout": 3}))
    failure = CompareFailure(layout="1P1D", round=2, reason="the fleet did not start: <nothing>")
    outcome = outcome_of(runs, failures=[failure])
    publish(outcome, tmp_path)
    page = (tmp_path / "page.html").read_text()
    charts = sorted(path.name for path in tmp_path.glob("*.png"))
    assert charts == ["goodput.png", "itl.png", "latencies_1.png", "latencies_2.5.png", "ttft.png"]
    assert page.count('src="data:image/png;base64,') == page.count("<img") == len(charts)
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    assert "one &amp; only" in page and "8.0 (7.0 … 9.0)" in page
    assert "not measured to its end: the fleet did not start: &lt;nothing&gt;" in page
    assert "1P1D, round 2, 2.5 requests/s: failed requests: 3 timeout" in page
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in charts)
    written = json.loads((tmp_path / "figures.json").read_text())
    assert len(written["runs"]) == 7 and written["runs"][0]["figures"]["p99_itl_ms"] == 7.0
    assert "| 1 | 8.0 (7.0 … 9.0) | 8.0 (7.0 … 9.0)  ×1.00 |" in report(outcome, ReportStyle(is_markdown=True))


ITL_S = {"quick": 0.001, "slow": 0.03}
"""Between the tokens of each stub."""


@contextlib.contextmanager
def stub(layout: Layout) -> Iterator[str]:
    """A server double in place of a fleet."""
    if layout.name == "broken":
        raise FleetFailed("it has no such flag")
    command = [sys.executable, "-m", "tests.bench.double", "--ttft-s=0.001", f"--itl-s={ITL_S[layout.name]}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as double:
        assert double.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(double.stdout.readline())}"
        finally:
            double.terminate()


def test_each_layout_gets_the_load_in_its_turn_and_one_that_fails_is_reported(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one", "output_tokens": 5}\n{"prompt": "two", "output_tokens": 3}\n')
    bench = CompareOptions(layout=("quick=-", "broken=-", "slow=-"), rates="100,50", seconds=0.08, rounds=2)
    workload = WorkloadOptions(dataset_name="custom", dataset_path=str(prompts))
    common = ServeOptions(workload=workload, load=LoadOptions(request_rate=1.0), results=ResultOptions(goodput=("itl:20",)))
    runs: list[CompareRun] = []
    failures: list[CompareFailure] = []
    known = [len(runs) + len(failures) for _ in measure_all(bench, common, stub, "", runs, failures)]
    assert known == [2, 3, 5, 7, 8, 10], "what is measured can be written after each turn"
    order = [(run.round, run.layout, run.rate) for run in runs]
    assert order == [(n, name, rate) for n in range(2) for name in ("quick", "slow") for rate in (50.0, 100.0)]
    assert [(each.layout, each.round, each.reason) for each in failures] == [
        ("broken", n, "it has no such flag") for n in range(2)
    ]
    for run in runs:
        asked = 4 if run.rate == 50 else 8
        assert (run.figures["completed"], run.figures["failed"]) == (asked, 0)
        assert run.figures["total_output_tokens"] == asked * 4
        assert run.quantiles_ms["itl"] == sorted(run.quantiles_ms["itl"])
    slow = [run for run in runs if run.layout == "slow"]
    assert all(run.figures["attainment"] == 0.0 and run.figures["p50_itl_ms"] > 20 for run in slow)


def test_a_signal_ends_the_comparison_with_what_was_measured_and_the_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = []

    @contextlib.contextmanager
    def fleet(url: str, *flags: str) -> Iterator[str]:
        turns.append(url)
        if len(turns) == 2:
            raise KeyboardInterrupt
        yield url

    monkeypatch.setattr(compare, "served", fleet)
    monkeypatch.setattr(compare, "measure", lambda bench, api_key: MeasuredLoad("m", {}, [], 0.0, 0.0))
    monkeypatch.setattr(compare, "run_of", lambda layout, rate, number, *_: run_with(layout, rate, number, 1.0))
    bench = CompareOptions(layout=("a=http://a", "b=http://b"), rates="1", rounds=3, output=str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert compare.run(bench, ServeOptions(results=GOOD), "launch bench compare", False, "") == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    written = json.loads((tmp_path / "figures.json").read_text())
    assert [run["layout"] for run in written["runs"]] == ["a"] and len(turns) == 2
    assert written["failures"] == [{"layout": "b", "round": 0, "reason": "stopped by a signal"}]
    assert "stopped by a signal" in (tmp_path / "page.html").read_text()
