"""Child processes that take orders, report in lines of JSON, and leave nothing behind: the parent's half and the child's half.

Owns the processes, their pipes, the lines that all children share, and the threads that read them. Does not know what a child
does or which child is needed for what.

    parent ── orders ──► child      end of file on this pipe: the parent is gone, or wants the child to stop
    parent ◄── reports ── child     end of file on this pipe: the child is gone

A child leads a session of its own, so Ctrl-C in a terminal reaches the parent alone. It dies with its parent: the order pipe is
its lifeline. Where that is asked for, the kernel kills it, be it stopped. When a child has ended, the rest of its process group
is killed.
"""

import contextlib
import ctypes
import logging
import os
import queue
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
from typing import Generic, Protocol, TypeAlias, TypeVar

import msgspec

from common.errors import TandemError

ORDER_FD = "TANDEM_ORDER_FD"
REPORT_FD = "TANDEM_REPORT_FD"
KILLED_WITH = "TANDEM_KILLED_WITH"
"""Names the parent's pid to a child that the kernel is to kill when the parent ends."""
MAX_LINE_BYTES = 64 * 2**20
READ_BYTES = 64 * 1024
"""Read no more at once: larger buffers come and go at the top of the heap, which makes resident memory creep."""

LineT = TypeVar("LineT")
_log = logging.getLogger(__name__)


class JsonLine(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Base of every line. `type` in the JSON is the class name."""


class Progress(JsonLine, frozen=True):
    """What people should know while the child starts, or goes on."""

    text: str


class Ready(JsonLine, frozen=True):
    """The child does its work now."""

    addresses: dict[str, str]
    """Where it can be reached, by purpose."""


class IntakeClosed(JsonLine, frozen=True):
    """The router takes no more requests, and every answer that was open has ended."""


class Broken(JsonLine, frozen=True):
    """The child ends for this reason."""

    reason: str


def write_line(fd: int, line: msgspec.Struct) -> None:
    """Raises BrokenPipeError when nobody can read it."""
    data = msgspec.json.encode(line) + b"\n"
    while data:
        data = data[os.write(fd, data) :]


class LineReader(Generic[LineT]):
    """Reads the lines that arrive on a pipe. what: what a line is called in the log, such as "order"."""

    def __init__(self, fd: int, decoder: "msgspec.json.Decoder[LineT]", what: str) -> None:
        self._fd, self._decoder, self._what = fd, decoder, what
        self._unread = b""

    def read(self) -> list[LineT] | None:
        """Wait for bytes and return the lines that they complete; None at the end of the file. Unreadable lines are dropped."""
        data = os.read(self._fd, READ_BYTES)
        if not data:
            return None
        *complete, self._unread = (self._unread + data).split(b"\n")
        if len(self._unread) > MAX_LINE_BYTES:
            self._unread = b""
        lines = []
        for line in complete:
            try:
                lines.append(self._decoder.decode(line))
            except (msgspec.DecodeError, RecursionError) as error:
                _log.error("dropped an unreadable %s: %s", self._what, error)
        return lines


# --- the child's half --------------------------------------------------------------------------------------------------------

_PR_SET_PDEATHSIG = 1
OrderT = TypeVar("OrderT")


class Parent(Generic[OrderT]):
    """The parent of this process. Create it once, before anything starts other processes. decoder: of the orders."""

    def __init__(self, decoder: "msgspec.json.Decoder[OrderT]") -> None:
        if (parent := os.environ.pop(KILLED_WITH, None)) is not None:
            _be_killed_with(int(parent))
        self._lock = threading.Lock()
        self._report_fd = _take_fd(REPORT_FD)
        self.order_fd = _take_fd(ORDER_FD)
        """The end of the pipe at which orders arrive; None when there is no parent."""
        self._reader = None if self.order_fd is None else LineReader(self.order_fd, decoder, "order")

    @property
    def exists(self) -> bool:
        """False when a person started this process in a terminal."""
        return self._reader is not None

    def report(self, report: msgspec.Struct) -> None:
        """Send a report to the parent. Any thread may call it. Does nothing when the parent is gone."""
        if self._report_fd is not None:
            with contextlib.suppress(BrokenPipeError), self._lock:
                write_line(self._report_fd, report)

    def read_orders(self) -> list[OrderT] | None:
        """Wait for orders. Returns None when the parent is gone."""
        return None if self._reader is None else self._reader.read()


def _be_killed_with(parent: int) -> None:
    """The kernel kills this process when its parent ends. A pipe tells only a process that runs, but one that is stopped stays.
    Only Linux can do that; elsewhere the pipe is all there is."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os.kill(os.getpid(), signal.SIGKILL)


def _take_fd(variable: str) -> int | None:
    """The end of a pipe that the variable names. Children of this process do not inherit it."""
    text = os.environ.pop(variable, None)
    if text is None:
        return None
    os.set_inheritable(int(text), False)
    return int(text)


# --- the parent's half -------------------------------------------------------------------------------------------------------

ReportT = TypeVar("ReportT", bound=msgspec.Struct)
KEPT_LINES = 20
KILL_S = 5.0
"""A killed process is gone within this time, unless the kernel keeps it."""
_OUTPUT_S = 1.0
"""How long a child's output is still read after its end: processes that it started may hold the pipe open."""


@dataclass(frozen=True, slots=True)
class Reported(Generic[ReportT]):
    """The child of that name has reported."""

    child: str
    report: ReportT


@dataclass(frozen=True, slots=True)
class Exited:
    """The child of that name has ended."""

    child: str
    status: int
    """Its exit status; −n when signal n ended it."""
    account: str
    """Why it ended, for people (`Child.account`)."""


ChildEvent: TypeAlias = Reported[ReportT] | Exited


class ChildEnded(TandemError):
    """A child ended while a report was expected of it."""


class Child(Generic[ReportT]):
    """A running child process.

    decoder: of its reports. on_event: called with every report, and at last with Exited. on_output: called with each line that it
    writes to stdout or stderr. Both are called on threads that belong to the child. killed_with_us: on Linux the kernel kills it
    when the thread that has started it ends, so only a main thread may ask for that. inherited: open files that it
    has too, by the same numbers. Raises OSError when it cannot be started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        decoder: "msgspec.json.Decoder[ReportT]",
        on_event: Callable[[ChildEvent[ReportT]], object],
        on_output: Callable[[str], object],
        environment: Mapping[str, str] | None = None,
        *,
        killed_with_us: bool = False,
        inherited: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.status: int | None = None
        self.last_report: ReportT | None = None
        self._decoder = decoder
        self._on_event, self._on_output = on_event, on_output
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._gone = threading.Event()
        self._lock = threading.Lock()
        self._order_lock = threading.Lock()
        """Held while an order is written, which a child that does not read makes last; nothing else waits for it."""
        report_fd, child_report_fd = os.pipe()
        child_order_fd, self._order_fd = os.pipe()
        pipes = {REPORT_FD: str(child_report_fd), ORDER_FD: str(child_order_fd)}
        if killed_with_us:
            pipes[KILLED_WITH] = str(os.getpid())
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                pass_fds=(child_report_fd, child_order_fd, *inherited),
                env=with_our_code({**os.environ, **(environment or {}), **pipes}),
                start_new_session=True,
            )
        except BaseException:
            os.close(report_fd)
            os.close(self._order_fd)
            raise
        finally:
            os.close(child_report_fd)
            os.close(child_order_fd)
        self._output = threading.Thread(target=self._read_output, name=f"{name} output", daemon=True)
        self._output.start()
        threading.Thread(target=self._watch, args=(report_fd,), name=f"{name} reports", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, order: msgspec.Struct) -> None:
        """Give an order. Does nothing when the child has ended."""
        with self._order_lock, contextlib.suppress(BrokenPipeError):
            if self.status is None:
                write_line(self._order_fd, order)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child alone. Does nothing when it has ended."""
        with self._lock:
            if self.status is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to stop in order."""
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and its process group at once."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self.status is None:
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended and its last event was taken. Returns False when that takes longer."""
        return self._gone.wait(timeout_s)

    def account(self) -> str:
        """Why it ended, for people: the reason it gave, or else exit status, last progress and last lines of output."""
        match self.last_report:
            case Broken(reason=reason):
                return reason
            case Progress(text=text):
                parts = [f"its last report was: {text}"]
            case _:
                parts = []
        if self.status is not None:
            parts.insert(0, f"killed by {_name_of(-self.status)}" if self.status < 0 else f"exit status {self.status}")
        lines = "".join(f"\n    {line.rstrip()}" for line in list(self._lines))
        return "; ".join(parts) + (f"\n  last lines of {self.name}:{lines}" if lines else "")

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._lines.append(line)
                self._on_output(line)

    def _watch(self, fd: int) -> None:
        reader = LineReader(fd, self._decoder, f"report of {self.name}")
        while (reports := reader.read()) is not None:
            for report in reports:
                self.last_report = report
                self._on_event(Reported(self.name, report))
        os.close(fd)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # its pid stays taken until it is reaped: the group is its own
        with self._lock:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            status = self._process.wait()
            self.status = status
        with self._order_lock:
            os.close(self._order_fd)
        self._output.join(_OUTPUT_S)
        self._on_event(Exited(self.name, status, self.account()))
        self._gone.set()


class Respondent(Child[ReportT]):
    """A child whose reports wait until they are taken."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        decoder: "msgspec.json.Decoder[ReportT]",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._events: queue.SimpleQueue[ChildEvent[ReportT]] = queue.SimpleQueue()
        self.output: list[str] = []
        """The lines that it has written."""
        super().__init__(name, command, decoder, self._events.put, self.output.append, environment)

    def next_report(self, timeout_s: float) -> ReportT | None:
        """The next report; None when there is none within that time. Raises ChildEnded."""
        try:
            event = self._events.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if isinstance(event, Exited):
            self._events.put(event)  # for the next call
            raise ChildEnded(f"{self.name} ended: {event.account}")
        return event.report


class Running(Protocol):
    """Something that was started, is watched and can be stopped, as a `Child` is."""

    name: str

    def terminate(self) -> None:
        """Ask it to stop in order."""

    def kill(self) -> None:
        """End it at once."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended and its last event was taken. Returns False when that takes longer."""

    def account(self) -> str:
        """What it did last, or why it ended, for people."""


def stop_children(children: Sequence[Running], deadline_s: float) -> list[str]:
    """Ask all of them to stop, wait, and kill those that still run after `deadline_s`. Returns the names of those killed."""
    for child in children:
        child.terminate()
    return await_children(children, deadline_s)


def await_children(children: Sequence[Running], deadline_s: float) -> list[str]:
    """Wait until they have ended, and kill those that still run after `deadline_s`. Returns their names."""
    until = time.monotonic() + deadline_s
    late = [child for child in children if not child.wait(max(0.0, until - time.monotonic()))]
    for child in late:
        child.kill()
    for child in late:
        child.wait(KILL_S)
    return [child.name for child in late]


def _name_of(number: int) -> str:
    """Real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def with_our_code(environment: dict[str, str]) -> dict[str, str]:
    """A child runs the code that its parent runs, also when that is a checkout that is not installed."""
    root = str(Path(__file__).resolve().parents[2])
    if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return environment
    rest = environment.get("PYTHONPATH")
    return environment | {"PYTHONPATH": f"{root}{os.pathsep}{rest}" if rest else root}
