"""The short form of the chaos run: every kind of fault once for each role, and no client notices; and a fleet that is cleared.

The first is slow: it starts a fleet of real processes, asks everything once without faults, and then waits for each struck
process to be back before it strikes that role again.
"""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos import fleet as fleet_module
from tests.chaos.faults import Plan
from tests.chaos.fleet import Fleet, Shape
from tests.chaos.report import summary
from tests.chaos.run import run

REQUESTS = 24
"""As many as are open at once, twice. They are sent again until the faults are through."""


@pytest.mark.soak  # ./check --long has 50 faults; e2e/test_supervision.py strikes each kind of process once in every run
@pytest.mark.timeout(600)
def test_answers_under_faults_are_those_of_a_fleet_without_faults(tmp_path: Path) -> None:
    outcome = asyncio.run(run(Plan(requests=REQUESTS, faults=6), tmp_path, print))
    print(*summary(outcome), sep="\n")
    assert not outcome.errors
    assert not outcome.problems
    assert not [str(difference) for difference in outcome.differences if not difference.is_right]
    struck = Counter((fault.role, fault.kind) for fault in outcome.faults)
    assert struck == {(role, kind): 1 for role in ("prefill", "decode") for kind in ("kill", "stop", "term")}
    assert outcome.resumes.total() > 0, "the faults hit requests, or nothing was proven"
    assert len(outcome.answers) >= REQUESTS


def test_a_fleet_that_runs_is_cleared_to_the_last_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the middle of everything, as when a run fails or is told to stop. Its processes only sleep."""
    monkeypatch.setattr(fleet_module, "launch_command", lambda role, flags: ["sleep", "600"])

    async def run() -> list[str]:
        fleet = Fleet(Shape(), tmp_path)
        starting = asyncio.create_task(fleet.start())
        while not list(fleet._marked()):
            await asyncio.sleep(0.01)
        clearing = asyncio.create_task(fleet.clear())
        await asyncio.wait([clearing, starting])
        assert not clearing.cancelled() and starting.exception() is not None
        return [*fleet.problems, *map(str, fleet._marked())]

    assert asyncio.run(run()) == []
