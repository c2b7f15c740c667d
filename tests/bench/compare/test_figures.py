"""Ratios, spreads and distributions of `launch bench compare`, against plain references; its page and its tables."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.compare.figures import LEVELS, METRICS, CompareOutcome, Failure, Run, Side, pooled, ratios, run_of
from bench.compare.page import table
from bench.compare.run import publish, report
from bench.hardware import this_hardware

KEYS = [metric.key for metric in METRICS]
ITL_P99 = next(metric for metric in METRICS if metric.key == "p99_itl_ms")


def run_with(layout: str, rate: float, number: int, value: float) -> Run:
    """A run whose figures are all the same value."""
    times = {name: [value] * len(LEVELS) for name in ("ttft", "itl", "e2el")}
    return Run(layout=layout, rate=rate, round=number, figures=dict.fromkeys(KEYS, value), quantiles_ms=times)


def outcome_of(runs: list[Run], **others: Any) -> CompareOutcome:
    sides = [Side(name="one & only", text="--prefill 0"), Side(name="1P1D", text="--prefill 1 --decode 1")]
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
    assert table(outcome_of(runs), ITL_P99) == [
        ("requests/s", "one & only", "1P1D"),
        ("1", "12.0 (10.0 … 20.0)", "8.0 (5.0 … 12.0)  ×0.50 (0.40 … 1.00)"),
        ("2.5", "–", "–"),
    ]


def test_the_page_holds_the_figures_and_the_charts_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    """At the second rate nothing was answered."""
    runs = [run_with(name, 1.0, n, 7.0 + n) for name in ("one & only", "1P1D") for n in range(3)]
    runs.append(Run(layout="1P1D", rate=2.5, round=1, figures=dict.fromkeys(KEYS, 0.0), errors={"timeout": 3}))
    failure = Failure(layout="1P1D", round=2, reason="the fleet did not start: <nothing>")
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
    assert "| 1 | 8.0 (7.0 … 9.0) | 8.0 (7.0 … 9.0)  ×1.00 |" in report(outcome, markdown=True)
