"""`launch bench compare` as a whole: stubs take their turns, and one that fails leaves the others their figures."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.compare.plan import CompareBench, Layout, common_bench
from bench.compare.run import measure_all
from bench.serve.plan import Load, Results, Target, Workload
from common.processes.local_fleet import FleetFailed

ITL_S = {"quick": 0.001, "slow": 0.03}
"""Between the tokens of each stub."""


@contextlib.contextmanager
def stub(layout: Layout) -> Iterator[str]:
    """A server double in place of a fleet."""
    if layout.name == "broken":
        raise FleetFailed("it has no such flag")
    command = [sys.executable, "-m", "tests.bench.serve.double", "--ttft-s=0.001", f"--itl-s={ITL_S[layout.name]}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as double:
        assert double.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(double.stdout.readline())}"
        finally:
            double.terminate()


def test_each_layout_gets_the_load_in_its_turn_and_one_that_fails_is_reported(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one", "output_tokens": 5}\n{"prompt": "two", "output_tokens": 3}\n')
    bench = CompareBench(layout=("quick=-", "broken=-", "slow=-"), rates="100,50", seconds=0.08, rounds=2)
    workload = Workload(dataset_name="custom", dataset_path=str(prompts))
    common = common_bench(Target(), workload, Load(request_rate=1.0), Results(goodput=("itl:20",)))
    runs, failures = measure_all(bench, common, stub, "")
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
