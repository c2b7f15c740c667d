"""`launch plan` from its command line to its page, and what it takes of a running fleet."""

import json
import multiprocessing.dummy
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.errors import ConfigError
from common.processes.router_client import RequestFailed, RouterClient
from launch.child import BAD_FLAG
from launch.main import main
from launch.plan import PlanOutcome, measured_fleet, past_load
from simulation.plan import FleetPlan
from simulation.report import Percentiles
from simulation.search import FleetSearch, SearchRun, Trial

SLOW = [
    "--heartbeat-s=1",
    "--step-cost=0.2,0.001,0.01",
    "--mean-input=100",
    "--mean-output=3",
    "--slo-ttft-s=3",
    "--slo-itl-s=0.6",
]
"""Few requests a second, so that a search is cheap."""


def known_run(search: FleetSearch, trial: Trial, rate: float) -> SearchRun:
    """Instances of both roles bear most."""
    each = trial.candidate
    share, times = 1.0 if rate <= 2.0 + each.both + 0.1 * each.prefill else 0.2, Percentiles.of([0.5])
    return SearchRun(rate=rate, attainment=share, goodput=share * rate, first_token_s=times, mean_between_tokens_s=times)


@pytest.mark.parametrize("is_simulated", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_search_prints_its_choice_and_writes_a_page_that_needs_nothing_else(
    is_simulated: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_simulated:
        monkeypatch.setattr("launch.plan.SPAWN", multiprocessing.dummy)
        monkeypatch.setattr("signal.signal", lambda number, handler: None)  # threads may not set any
        monkeypatch.setattr(FleetSearch, "run", known_run)
    page, figures = tmp_path / "plan.html", tmp_path / "plan.json"
    given = ["plan", "--devices=2", "--seconds=8", "--windows=1", "--jobs=1", *SLOW, f"--page={page}", f"--json={figures}"]
    assert main(given) == 0
    outcome = msgspec.json.decode(figures.read_bytes(), type=PlanOutcome)
    best = outcome.found[0]
    assert is_simulated or best.candidate.shown == "0:0:2"
    assert {each.candidate.shown for each in outcome.found} == {"0:0:2", "1:1:0", "1:0:1"}
    assert all(len(each.windows) == 1 for each in outcome.found)
    assert best.goodput == max(each.goodput for each in outcome.found) > 0
    assert all(sum(map(int, each.candidate.shown.split(":"))) == 3 for each in outcome.one_more)
    printed, text = capsys.readouterr().out, page.read_text()
    assert f"Chosen: {best.candidate.shown}" in printed and printed.split("\n")[2] in text
    assert text.count("<polyline") == 2 + len(outcome.found)
    assert not re.search(r"https?://|<script|src=|url\(", text)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--devices=0"], "--devices must be at least 1"),
        (["--rank-costs=9=0.1,0,0"], "--rank-costs must be N=S,T,R"),
        (["--rank-costs=1=fast"], "--step-cost must be three numbers"),
        (["--policies=best"], "--policies must be some of"),
        (["--chunk-sizes=0"], "--chunk-sizes must be at least 1"),
        (["--attainment=1"], "--attainment must be between 0 and 1"),
        (["--control-key=file"], "--control-key has no effect without --fleet-url"),
        (["--prefill=3"], "--prefill is not a flag"),
    ],
)
def test_what_cannot_be_searched_is_named(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["plan", *flags])
    except SystemExit as refused:
        status = int(refused.code or 0)
    assert status == BAD_FLAG
    assert complaint in capsys.readouterr().err


class FakeRouter(RouterClient):
    """Answers with what it was given."""

    def __init__(self, pages: dict[str, Any]) -> None:
        super().__init__("http://router:1")
        self._pages = pages

    def read(self, path: str) -> bytes:
        if path not in self._pages:
            raise RequestFailed("HTTP 404")
        page = self._pages[path]
        return page if isinstance(page, bytes) else json.dumps(page).encode()


def member(name: str, role: str, **load: float) -> dict[str, Any]:
    shape = {"pages_total": 100, "page_size": 16, "page_bytes": 1600, "max_running": 8, "model": {"context_tokens": 4096}}
    return {"id": name, "role": role, "load": load, **shape}


def test_a_plan_of_a_running_fleet_has_what_its_instances_and_links_have_measured() -> None:
    cluster = {
        "instances": [
            member("p0", "prefill", step_s=0.01, chunk_token_s=0.0001),
            member("p1", "prefill", step_s=0.03, chunk_token_s=0.0003),
            member("d0", "decode", step_s=0.008, decode_row_s=0.0005, held_token_s=3e-8),
        ]
    }
    links = {f"/cluster?links={name}": {"links": [{"bytes_per_s": speed}]} for name, speed in (("p0", 1e9), ("p1", 3e9))}
    plan = measured_fleet(FakeRouter({"/cluster": cluster, **links}))
    assert (plan["prefill"], plan["decode"], plan["kv_pages"], plan["kv_token_bytes"]) == (2, 1, 100, 100)
    assert plan["link_gbit"] == 16.0
    fleet = FleetPlan(**plan)
    first, later = fleet.cost("prefill"), fleet.cost("decode")
    assert [first.step_s, first.chunk_token_s] == pytest.approx([0.02, 0.0002])
    assert (later.step_s, later.decode_row_s, later.held_token_s) == (0.008, 0.0005, 3e-8)


def test_an_instance_that_serves_whole_requests_too_counts_as_one_that_decodes() -> None:
    member_of_both = member("b0", "both", step_s=0.008, chunk_token_s=0.0001, decode_row_s=0.0005)
    plan = measured_fleet(FakeRouter({"/cluster": {"instances": [member_of_both]}}))
    assert (plan["prefill"], plan["decode"]) == (0, 1)


def test_a_fleet_that_has_measured_nothing_or_does_not_answer_is_refused_by_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has not measured its steps yet"):
        measured_fleet(FakeRouter({"/cluster": {"instances": [member("d0", "decode")]}}))
    with pytest.raises(ConfigError, match="--fleet-url http://router:1"):
        measured_fleet(FakeRouter({}))
    with pytest.raises(ConfigError, match="--fleet-url http://router:1"):
        past_load(FakeRouter({}), tmp_path)
