"""python -m tests.soak.fronts PEER=PYTHON...: what this router and others' servers spend on a request and on a token, in one run.

PEER: vllm or sglang. PYTHON: the interpreter of an environment that has it. All serve the demo model's tokenizer with steps that
last a given time and compute nothing (`vllm_timed.py`, `sglang_timed.py`), under the load of `benchmarks.router`. "Router" is a
peer's process for HTTP, which also tokenizes, and in vLLM makes text. So compare the CPU time of router and detokenizer together.
Run it on an idle machine.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx

from bench.report import ReportStyle, say, table_of
from benchmarks.command import below, command_of
from benchmarks.router import (
    GENERATORS,
    KINDS,
    LoadedFleet,
    LoadFigures,
    RouterBench,
    Starter,
    loaded_fleet,
    measure_open,
    measure_requests,
    measure_streams,
)
from common.addresses import free_port
from common.config import DEMO_MODEL
from common.host import allow_many_files
from common.processes.local_fleet import FleetFailed
from tests.rig.pages import until

START_S = 180.0
STEP_TOKENS = 65_536
HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "demo" / "model"


def vllm_command(streams: int) -> list[str]:
    command = ["-m", "vllm.entrypoints.openai.api_server", f"--model={MODEL}", "--enforce-eager", "--dtype=float32"]
    command += ["--distributed-executor-backend=vllm_timed.TimedExecutor", "--no-enable-prefix-caching"]
    command += [f"--max-num-seqs={max(64, streams)}", f"--max-num-batched-tokens={STEP_TOKENS}", "--disable-uvicorn-access-log"]
    return [*command, "--uvicorn-log-level=warning"]


def sglang_command(streams: int) -> list[str]:
    return [
        "-P",
        str(HERE / "sglang_timed.py"),
        f"--model-path={MODEL}",
        "--device=cpu",
        "--skip-server-warmup",
        "--log-level=warning",
    ]


COMMANDS = {"vllm": vllm_command, "sglang": sglang_command}


def peer(name: str, python: str) -> Starter:
    @contextlib.contextmanager
    def started(bench: RouterBench, cost: str, streams: int, *flags: str) -> Iterator[LoadedFleet]:
        port = free_port()
        command = [python, *COMMANDS[name](streams), f"--served-model-name={DEMO_MODEL}", f"--port={port}", "--host=127.0.0.1"]
        with (
            tempfile.TemporaryDirectory() as folder,
            (Path(folder) / "log").open("w") as log,
            GENERATORS.Pool(2, allow_many_files) as generators,
        ):
            executor = HERE / "vllm_timed.py"
            (Path(folder) / executor.name).symlink_to(executor)  # alone: other files here have names of packages
            own = {"STEP_COST_S": cost, "PYTHONPATH": folder, "VLLM_CPU_KVCACHE_SPACE": "4"}
            own["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            environment = os.environ | own
            server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder, start_new_session=True)
            try:
                url = f"http://127.0.0.1:{port}"
                until(lambda: server.poll() is not None or _answers(f"{url}/v1/models"), f"{name} answers", START_S)
                if server.poll() is not None:
                    raise FleetFailed(f"{name} did not start: {Path(log.name).read_text()[-2000:]}")
                pids: dict[str, list[int]] = {kind: [] for kind in KINDS}
                for pid in below(server.pid):
                    pids[_kind(pid, server.pid)].append(pid)
                yield LoadedFleet(url, pids, generators)
            finally:
                with contextlib.suppress(ProcessLookupError):  # with what it has started
                    os.killpg(server.pid, signal.SIGKILL)
                server.wait()

    return started


def _kind(pid: int, server: int) -> str:
    """The process of HTTP is the router, whatever else it does."""
    title = " ".join(command_of(pid))
    if pid == server:
        return "router"
    return "detokenizer" if "detokenizer" in title else "leader"


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.fronts", description="Compare servers' fronts.")
    parser.add_argument("peers", nargs="*", metavar="PEER=PYTHON", help=" or ".join(COMMANDS))
    parser.add_argument("--streams", default="64,1024", metavar="N,N", help="at once")
    parser.add_argument("--rate", type=float, default=5000.0, metavar="N", help="tokens a second for all streams")
    parser.add_argument("--open", type=int, default=10_000, metavar="N", help="streams that are open at once")
    given = parser.parse_args()
    bench = RouterBench(streams=given.streams, rate=given.rate, requests=400, seconds=12, open=given.open)
    starters: dict[str, Starter] = {"tandem": loaded_fleet}
    for each in given.peers:
        name, _, python = each.partition("=")
        starters[name] = peer(name, python)
    for name, started in starters.items():
        loads: list[LoadFigures] = [*measure_requests(bench, started)]
        loads += [measure_streams(bench, number, started) for number in bench.numbers]
        loads += [measure_open(bench, started)] if bench.open else []
        say(f"{name}\n\n{ReportStyle(is_markdown=True).table(table_of(LoadFigures, loads))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
