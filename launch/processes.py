"""The parent's half: child processes that report, take orders, and leave nothing behind.

Owns the processes, their pipes and the threads that read them. Does not know what a child does or which child is needed for what.

A child is the leader of a session of its own, so that Ctrl-C in a terminal reaches the parent alone. It dies with its parent: the
order pipe is its lifeline (`launch/child.py`). Whatever is left of its process group when it has ended is killed.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from launch.reports import MAX_LINE_BYTES, ORDER_FD, REPORT_FD, Broken, Order, Progress, Report, decode_report, encode

KEPT_LINES = 20
KILL_S = 5.0
"""A killed process is gone within this, or the kernel keeps it."""
_OUTPUT_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reported:
    child: str
    report: Report


@dataclass(frozen=True, slots=True)
class Exited:
    """status: the exit status; −n when signal n ended the child. account: what became of it, for people (`Child.account`)."""

    child: str
    status: int
    account: str


ChildEvent: TypeAlias = Reported | Exited


def launch_command(role: str, flags: Sequence[str]) -> list[str]:
    """The command that runs a role of this very code. -P: a folder where it is started shadows none of its packages."""
    return [sys.executable, "-P", "-m", "launch.main", role, *flags]


class Child:
    """A running child process. on_event is called on threads of the child: every report, then Exited, which is the last."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        on_event: Callable[[ChildEvent], object],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.status: int | None = None
        self.last_report: Report | None = None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._on_event = on_event
        self._gone = threading.Event()
        self._lock = threading.Lock()
        report_fd, child_report_fd = os.pipe()
        child_order_fd, self._order_fd = os.pipe()
        output_fd, child_output_fd = os.pipe()
        pipes = {REPORT_FD: str(child_report_fd), ORDER_FD: str(child_order_fd)}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=child_output_fd,
                stderr=child_output_fd,
                pass_fds=(child_report_fd, child_order_fd),
                env=_with_our_code({**os.environ, **(environment or {}), **pipes}),
                start_new_session=True,
            )
        except OSError:
            for fd in (report_fd, self._order_fd, output_fd):
                os.close(fd)
            raise
        finally:
            for fd in (child_report_fd, child_order_fd, child_output_fd):
                os.close(fd)
        self._output = threading.Thread(target=self._read_output, args=(output_fd,), name=f"{name} output", daemon=True)
        self._output.start()
        threading.Thread(target=self._watch, args=(report_fd,), name=f"{name} reports", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, order: Order) -> None:
        """Give an order; one that has ended takes none."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            if self.status is None:
                os.write(self._order_fd, encode(order))

    def terminate(self) -> None:
        """Ask it to stop in order. Nothing happens to one that has ended."""
        with self._lock:
            if self.status is None:
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it and its process group at once."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self.status is None:
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended and its last event was taken; waits for so long at most."""
        return self._gone.wait(timeout_s)

    def account(self) -> str:
        """What became of it, for people: the reason it gave, or else its exit status, what it did last, and its last lines."""
        match self.last_report:
            case Broken(reason=reason):
                return reason
            case Progress(text=text):
                parts = [f"the last it said was: {text}"]
            case _:
                parts = []
        if self.status is not None:
            parts.insert(0, f"killed by {signal.Signals(-self.status).name}" if self.status < 0 else f"exit status {self.status}")
        lines = "".join(f"\n    {line.rstrip()}" for line in list(self._lines))
        return "; ".join(parts) + (f"\n  last lines of {self.name}:{lines}" if lines else "")

    def _read_output(self, fd: int) -> None:
        with os.fdopen(fd, encoding="utf-8", errors="replace") as output:
            for line in output:
                self._lines.append(line)
                with contextlib.suppress(OSError, ValueError):  # our own stderr may be gone; the child must not block on it
                    sys.stderr.write(line)
                    sys.stderr.flush()

    def _watch(self, fd: int) -> None:
        with os.fdopen(fd, "rb") as lines:
            while line := lines.readline(MAX_LINE_BYTES):
                try:
                    self.last_report = decode_report(line)
                except msgspec.DecodeError as error:
                    _log.error("a report of %s that cannot be read was dropped: %s", self.name, error)
                else:
                    self._on_event(Reported(self.name, self.last_report))
        os.waitid(
            os.P_PID, self.pid, os.WEXITED | os.WNOWAIT
        )  # it keeps its pid until we reap it, so what is killed is its group
        with self._lock:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            status = self._process.wait()
            self.status = status
            os.close(self._order_fd)
        self._output.join(_OUTPUT_S)
        self._on_event(Exited(self.name, status, self.account()))
        self._gone.set()


def stop_children(children: Sequence[Child], deadline_s: float) -> list[str]:
    """Ask all of them to stop and wait; after `deadline_s` kill who is left. Returns the names of those that were killed."""
    for child in children:
        child.terminate()
    until = time.monotonic() + deadline_s
    late = [child for child in children if not child.wait(max(0.0, until - time.monotonic()))]
    for child in late:
        child.kill()
    for child in late:
        child.wait(KILL_S)
    return [child.name for child in late]


def _with_our_code(environment: dict[str, str]) -> dict[str, str]:
    """A child runs the code that its parent runs: from this checkout, if it is not an installed one."""
    root = str(Path(__file__).resolve().parents[1])
    if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return environment
    rest = environment.get("PYTHONPATH")
    return environment | {"PYTHONPATH": f"{root}{os.pathsep}{rest}" if rest else root}
