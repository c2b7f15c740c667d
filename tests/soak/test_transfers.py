"""The soak itself: two minutes of it with the other tests, and with --soak the whole hour."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.kv_transfer.child import ROOT
from tests.soak.transfers import Record

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed (it is for Linux only)")
START_S = 120.0


def soak(minutes: float, folder: Path, *flags: str) -> Record:
    """In a process of its own, for it makes itself nice."""
    file = folder / "samples.json"
    command = [sys.executable, "-m", "tests.soak.transfers", f"--minutes={minutes:g}", f"--json={file}", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=minutes * 60 + START_S, check=False)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return msgspec.json.decode(file.read_bytes(), type=Record)


def test_two_minutes_of_joins_and_deaths_leave_nothing_behind(tmp_path: Path) -> None:
    record = soak(2, tmp_path, "--strike-s=10")
    happened = {what for period in record.periods for what in period.counts}
    assert {"kill receiver", "kill sender", "receiver leaves", "sender leaves", "reconnect", "joins", "checked"} <= happened
    assert sum(period.duty for period in record.periods) / len(record.periods) < 0.2, "it leaves the machine to others"


@pytest.mark.soak
@pytest.mark.timeout(2 * 3600)
def test_an_hour_of_joins_and_deaths_leaves_nothing_behind(tmp_path: Path) -> None:
    record = soak(60, tmp_path)
    assert sum(period.counts["done"] for period in record.periods) > 10_000
