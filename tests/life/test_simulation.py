"""Schedules of faults in simulated fleets: whatever dies, stalls, is lost or leaves, everything that must hold does.

`simulation.py` says how to run a failing seed again.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from common.ids import ServingRole
from tests.life.simulation import run_schedule

ROOT = Path(__file__).resolve().parents[2]
CHECKED = 10_000
"""The long run begins here. `./check` runs the first 150 schedules beside the tests, which run other seeds."""
SEEDS = [1_000_000 + number for number in (20, 22, 24, 31, 45, 59, 79, 89)]
"""Everything of HAPPENS happens in these schedules, most of it in several."""
HANG_S = 1_200.0
"""Ends a run that hangs."""
HAPPENS = (
    "finished: length",
    "finished: stop",
    "finished: cancelled",
    "resumed: lost_instance",
    "resumed: failed_attempt",
    "resumed: preempted",
    "resumed: lost_messages",
    "ended by itself: drained",
    "preemptions",
    "handoffs lost",
    "reservations moved",
    "pushes failed",
    "prompt tokens hit",
    "pages evicted",
    "pages spared",
    "caches flushed",
    "letters about caches: lost",
    "cached blocks known",
    "quiet goodbyes",
    "unproven writes",
    "routers killed",
    "requests of a dead router",
    "clients cut off",
    "detokenizers killed",
    "schedules with ranks",
    "ended by itself: RankLost",
    "ranks that ended by themselves",
    *(f"roles taken: {role}" for role in get_args(ServingRole)),
)
"""What must happen somewhere in the schedules, or they prove nothing. The seeds are fixed: each run counts the same."""


def simulate(*flags: str, hash_seed: int = 0, timeout_s: float = HANG_S) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.life.simulation", *flags]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_everything_holds_in_every_schedule() -> None:
    counts = Counter[str]()
    for seed in SEEDS:
        report = run_schedule(seed)
        assert report.problems == (), f"seed {seed}"
        counts += report.counts
    assert counts.keys() >= set(HAPPENS)


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_everything_holds_in_every_schedule_of_a_long_run() -> None:
    run = simulate("--schedules", "100000", "--first", str(CHECKED), timeout_s=3 * 3600)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]


def test_a_schedule_runs_again_exactly_as_it_did() -> None:
    """Even when Python orders sets of names differently."""
    one, other = (simulate("--seed", "3", "--trace", hash_seed=hash_seed) for hash_seed in (1, 2))
    assert len(one.stdout.splitlines()) > 100
    assert one.stdout == other.stdout
