"""The instrument of routers with fleets that run, and what it makes of the answers of a load."""

import json
from array import array
from pathlib import Path

import pytest

from bench.client import TimedAnswer
from bench.options import ResultOptions
from bench.serve import MeasuredLoad, figures_of
from benchmarks.command import start
from benchmarks.router import RouterBench, WatchedLoad, run
from common.processes.local_fleet import FleetFailed
from tests.rig.forks import forked


def test_a_quick_run_measures_prints_and_writes_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    flags = ["--quick", "--markdown", "--requests", "24", "--open", "4", "--open-s", "4", "--tp", "2", "--json", str(figures)]
    with forked():
        # Nothing here measures prefill instances.
        assert start("router", "", run, RouterBench, arguments=[*flags, "--more=--prefill=0"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("```sh\npython -m benchmarks.router --quick --markdown --requests=24 --open=4 --open-s=4.0 --tp=2 ")
    outcome = json.loads(figures.read_text())
    alone, beside, many, streams, opened = outcome["loads"]
    assert all(0 < each["ttft_p50_ms"] <= each["ttft_p99_ms"] for each in (alone, beside))
    assert beside["load"].endswith("64 streams")
    assert (streams["streams"], streams["failed"], many["failed"], many["requests"]) == (8, 0, 0, 24)
    assert streams["tokens_per_s"] > 0 and streams["router_us"] > 0
    assert (opened["streams"], opened["most_open"], opened["failed"]) == (4, 4, 0) and opened["opened_per_s"] > 0
    assert min(each[rank] for each in (streams, opened) for rank in ("leader_us", "follower_us")) > 0
    assert alone["leader_us"] is None


def answer(first_s: float, *gaps_s: float, error: str = "") -> TimedAnswer:
    """Sent at 10 s; the server says that it is twice as long as it had events."""
    counted = 1 + len(gaps_s)
    last_s = first_s + sum(gaps_s)
    return TimedAnswer(
        10.0, 2 * counted, 4, began_s=10.0, sent_s=10.0, first_s=first_s, token_s=last_s, last_s=last_s, ended_s=last_s,
        counted=counted, output_tokens=2 * counted, gaps_s=array("d", gaps_s), error=error,
    )  # fmt: skip


def watched(*answers: TimedAnswer, parallel: int) -> WatchedLoad:
    """The routers use half of a core, and grow by a MiB in each second; the others use a tenth, a quarter and an eighth."""
    figures = figures_of(answers, 10.0, ResultOptions())
    looks = [(9.0 + t, 100.0 + t, 0.5 * t, 0.1 * t, 0.25 * t, 0.125 * t) for t in range(13)]
    return WatchedLoad(MeasuredLoad("demo", figures, list(answers), 10.0, 0.3), looks, parallel)


def test_rates_are_of_the_time_when_all_streams_are_open_and_opening_takes_until_then() -> None:
    """Both streams are open from 12 s to 15 s: then come 3 events of the first and one of the second, with two tokens each."""
    load = watched(answer(11.0, 2.0, 1.0, 1.0, 3.0), answer(12.0, 1.5, 1.5), parallel=2)
    found = load.figures("streams")
    assert load.all_open_s() == (12.0, 15.0)
    assert found.tokens_per_event == 2.0 and found.tokens_per_s == pytest.approx(2 * (3 + 2) / 3)
    assert found.router_us == pytest.approx(1e6 * 1.5 / 10) and found.router_ms == pytest.approx(1e3 * 5 / 2)
    assert (found.opened_per_s, found.most_open, found.failed) == (1.0, 2, 0)
    assert found.kib_each == pytest.approx(1024 * 12 / 2) and found.detokenizer_us == pytest.approx(1e6 / 16)
    steps = 10 / 2
    assert (found.leader_us, found.follower_us) == pytest.approx((1e6 * 3 / 4 / steps, 1e6 * 3 / 8 / steps))


def test_streams_that_were_never_all_open_are_counted_over_the_whole_load_and_failures_are_named() -> None:
    load = watched(answer(11.0, 1.0), answer(13.0, 1.0), answer(12.0, error="broken"), parallel=3)
    assert load.all_open_s() is None
    found = load.figures("streams")
    assert (found.opened_per_s, found.failed, found.leader_us) == (0.0, 1, None)
    assert found.tokens_per_s == pytest.approx(8 / 10) and found.router_us == pytest.approx(1e6 * 5 / 8)


def test_an_answer_that_is_too_short_is_a_failure() -> None:
    short = answer(11.0, 1.0)
    short.output_tokens = 3
    assert watched(short, answer(11.0), parallel=2).figures("streams").failed == 1
    with pytest.raises(FleetFailed, match="1 of 2 answers ended too short"):
        watched(short, answer(11.0, error="broken"), parallel=2).figures("streams")
