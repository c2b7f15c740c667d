"""A fleet of real processes for tests: `launch local` on ports of its choice, and what a client sees of it.

Owns the child process. Knows the command line and the HTTP endpoints, nothing of the inside.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

START_S = 120.0
STOP_S = 60.0
HEARTBEAT_S = 0.5


class LocalFleet:
    """`url` is where the API answers; `cluster()` is what the fleet says of itself."""

    def __init__(self, arguments: Sequence[str], stderr: Path) -> None:
        command = [sys.executable, "-m", "launch.main", "local", "--port", "0", "--control-port", "0", *arguments]
        self._stderr = stderr
        with stderr.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
            )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait_for_url()
        self.client = httpx.Client(base_url=self.url, timeout=120.0)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            found = re.search(r"http://127\.0\.0\.1:\d+", "".join(self._lines))
            if found and "curl" in "".join(self._lines):
                return found.group()
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"the fleet did not start:\n{''.join(self._lines)}\n{self._stderr.read_text()[-4000:]}")

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def cluster(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.get("/cluster").json()
        return answer

    def metric(self, name: str) -> dict[str, float]:
        """Values of one metric by its labels."""
        values = {}
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith((name + "{", name + " ")):
                labels, value = line.rsplit(" ", 1)
                values[labels[len(name) :]] = float(value)
        return values

    def complete(self, prompt: list[int] | str, max_tokens: int, **fields: object) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        completion: dict[str, Any] = answer.json()
        return completion

    @property
    def model(self) -> str:
        name: str = self.client.get("/v1/models").json()["data"][0]["id"]
        return name

    def wait_until_home(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Every page home and every queue empty, as /cluster shows it. AssertionError at the deadline."""
        deadline = time.monotonic() + timeout_s
        time.sleep(2 * HEARTBEAT_S)  # /cluster is as old as the last heartbeat
        while True:
            cluster = self.cluster()
            if _is_home(cluster):
                return cluster
            assert time.monotonic() < deadline, f"not home: {cluster}"
            time.sleep(0.1)

    def stop(self) -> int:
        """Ctrl-C, as a person would. Returns the exit status."""
        self.client.close()
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        if self.process.poll() is None:
            self.process.kill()
            raise AssertionError(f"the fleet did not stop:\n{self.output}\n{self._stderr.read_text()[-4000:]}")
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.returncode


def _is_home(cluster: dict[str, Any]) -> bool:
    loads = [instance["load"] for instance in cluster["instances"]]
    idle = ("waiting_requests", "running_requests", "reservations", "pushes_in_flight")
    return all(load["pages_free"] == load["pages_total"] and not any(load[name] for name in idle) for load in loads)


@contextlib.contextmanager
def local_fleet(tmp_path: Path, *arguments: str) -> Iterator[LocalFleet]:
    """A running fleet; stopped, and its exit status checked, at the end."""
    fleet = LocalFleet(arguments, tmp_path / "fleet.stderr")
    try:
        yield fleet
    finally:
        status = fleet.stop()
    assert status == 0, f"exit status {status}:\n{(tmp_path / 'fleet.stderr').read_text()[-4000:]}"
