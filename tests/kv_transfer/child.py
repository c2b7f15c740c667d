"""A process that a test starts and talks to over pipes, in lines of JSON: commands in, reports out.

Owns the process, its pipes and the thread that reads them. Knows neither what is said nor what the process does.
"""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import msgspec

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
"""Longest wait for a report: a process that is silent for longer hangs."""
END_S = 30.0
"""Longest wait for a process to end."""
ReportT = TypeVar("ReportT")


class Child(Generic[ReportT]):
    """Runs `python -m module arguments`. decoder: of its reports. complaints: the file that takes what it and its libraries write
    to stderr and stdout. prefix: what its command is run by, such as `ip netns exec NAME`."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        decoder: "msgspec.json.Decoder[ReportT]",
        complaints: Path,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._complaints = complaints
        with complaints.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **(environment or {})},
            )
        self.pid = self._process.pid
        self._decoder = decoder
        self._reports: queue.SimpleQueue[ReportT | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"reader of {self.pid}", daemon=True)
        self._reader.start()

    def tell(self, command: msgspec.Struct) -> None:
        """Raises AssertionError when it is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise AssertionError(self._obituary()) from None

    def report(self, timeout_s: float) -> ReportT | None:
        """The next report; None when there is none for so long. Raises AssertionError when it is gone."""
        try:
            report = self._reports.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        assert report is not None, self._obituary()
        return report

    def complaints(self) -> str:
        return self._complaints.read_text(errors="replace")

    def wait(self) -> int:
        """Its exit status, when it ends by itself."""
        status = self._process.wait(END_S)
        self._release()
        return status

    def kill(self) -> None:
        """End it at once, whatever state it is in. Idempotent."""
        self._process.kill()
        self._process.wait(END_S)
        self._release()

    def _release(self) -> None:
        self._reader.join(WAIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _obituary(self) -> str:
        return f"process {self.pid} ended with {self._process.wait(END_S)}: {self.complaints()[-2000:]}"

    def _read(self) -> None:
        """On a thread of its own, until the process is gone."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._reports.put(self._decoder.decode(line))
        self._reports.put(None)


def remaining(until: float) -> float:
    """Seconds until then on the monotonic clock; 0 when it is over."""
    return max(0.0, until - time.monotonic())


def reports_to_parent() -> BinaryIO:
    """In the process: where its reports go. From then on its stdout is its stderr, for libraries write there too."""
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return reports
