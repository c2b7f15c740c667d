"""The whole hour of the soak, with --soak. `./check` runs its short form, a fixed number of rounds, beside the tests."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.soak.transfers import Record

START_S = 120.0
ROOT = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.timeout(2 * 3600)
@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed (it is for Linux only)")
def test_an_hour_of_joins_and_deaths_leaves_nothing_behind(tmp_path: Path) -> None:
    """Slow on purpose: small leaks show only after thousands of pushes."""
    file = tmp_path / "samples.json"
    command = [sys.executable, "-m", "tests.soak.transfers", "--minutes=60", f"--json={file}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600 + START_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = msgspec.json.decode(file.read_bytes(), type=Record)
    assert record.periods and all(period.counts["done"] for period in record.periods)
