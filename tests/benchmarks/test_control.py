"""`python -m benchmarks.control` with a router that runs: a quick run, and what it leaves."""

import json
import subprocess
import sys
from pathlib import Path

FIGURES = {
    "heartbeat_bytes_per_s",
    "join_bytes",
    "losses_bytes",
    "restart_s",
    "choose_us",
    "metrics_ms",
    "cluster_ms",
    "router_mb",
    "longest_pause_ms",
}
"""Those that are above zero wherever they are measured."""


def test_a_quick_run_measures_prints_and_writes_what_was_asked_for(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.control", "--quick", "--markdown", "--seconds", "0.3"]
    done = subprocess.run([*command, "--json", str(figures)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("```sh\npython -m benchmarks.control --quick --markdown --seconds=0.3 --json=")
    assert "\n| 6 | " in done.stdout
    (fleet,) = json.loads(figures.read_text())
    assert fleet["instances"] == 6 and fleet["trouble"] == ""
    assert {name for name in FIGURES if fleet[name] > 0} == FIGURES
    assert min(fleet["heartbeat_core_share"], fleet["losses_ms"]) >= 0
    assert fleet["start_s"] < fleet["restart_s"]
