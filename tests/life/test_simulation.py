"""Thousands of schedules of faults in simulated fleets: whatever dies, stalls, is lost or leaves, everything holds that must.

How a seed that fails is run again is said in `simulation.py`.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCHEDULES = 200
"""Here; `./check` runs the first 10,000 beside the tests, and these are of others."""
CHECKED = 10_000
FIRST = 1_000_000
SECONDS = 120.0
"""No schedule is begun after so long: a busy machine does fewer of them."""
FEWEST = 100
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
    "pushes failed",
    "unproven writes",
)
"""What the schedules must have come to, so that it is known that it was tried."""


def simulate(*flags: str, hash_seed: int = 0, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.life.simulation", *flags]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)


def counted(output: str) -> Counter[str]:
    """The lines "what: how often"."""
    return Counter({what: int(often) for what, often in re.findall(r"^([a-zA-Z][^\n]*): (\d+)$", output, re.MULTILINE)})


@pytest.mark.timeout(SECONDS + 60.0)
def test_everything_holds_in_every_schedule() -> None:
    run = simulate("--schedules", str(SCHEDULES), "--first", str(FIRST), "--seconds", str(SECONDS), timeout_s=SECONDS + 50.0)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]
    counts = counted(run.stdout)
    assert counts["schedules"] >= FEWEST
    assert not [what for what in HAPPENS if not counts[what]]


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_everything_holds_in_every_schedule_of_a_long_run() -> None:
    run = simulate("--schedules", "100000", "--first", str(CHECKED), timeout_s=3 * 3600)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_schedule_runs_again_exactly_as_it_did(seed: int) -> None:
    """Also where sets of names are in another order."""
    one, other = (simulate("--seed", str(seed), "--trace", hash_seed=hash_seed) for hash_seed in (1, 2))
    assert len(one.stdout.splitlines()) > 100
    assert one.stdout == other.stdout
