"""The child's half of a process: it reports, takes orders, and stops when told to or when its parent is gone.

Owns the signals of the process and its ends of the two pipes. Does not know what the process does. A process that a person
started in a terminal has no parent of ours: it prints what it would report.

Ways to be told to stop: SIGTERM, SIGINT, and end of file on the order pipe, which also comes when the parent was killed.

    first     stop in order, which may take long: an instance finishes what runs there, or hands it off
    a signal after that, or ORPHAN_S without a parent     end at once: HURRY_S to say goodbye, then the process is gone
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

import msgspec

from common.errors import ConfigError, TandemError
from launch import signals
from launch.reports import (
    BAD_FLAG,
    MAX_LINE_BYTES,
    ORDER_FD,
    REPORT_FD,
    Broken,
    IntakeClosed,
    News,
    Order,
    Progress,
    Ready,
    Report,
    decode_order,
    encode,
)

ORPHAN_S = 15.0
"""How long an orderly stop may take when nobody is left who would kill this process."""
HURRY_S = 1.0
"""How long a process that was told to end at once has left."""
RETRY_S = 0.2
"""How soon a main thread that is starting is interrupted again: it may have been about to wait."""

_log = logging.getLogger(__name__)


class StoppedWhileStarting(BaseException):
    """Told to stop before the process said how to stop it; raised in the main thread."""


class StoppedAtOnce(TandemError):
    """Told to end at once while it stopped in order."""


class ChildProcess:
    """This process, as something that was started and will be stopped. Made once, in the main thread, before other threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._stop_asked = False
        self._hurried: str | None = None
        self._ended = threading.Event()
        self._on_stop: Callable[[], object] | None = None
        self._on_order: Callable[[Order], object] | None = None
        self._early_orders: list[Order] = []
        self._lock = threading.Lock()
        self._report_fd = _take_fd(REPORT_FD)
        self._order_fd = _take_fd(ORDER_FD)

    def listen(self) -> None:
        """From now on signals and orders are heard. The main thread calls this; StoppedWhileStarting may be raised in it."""
        signal.signal(signal.SIGUSR1, self._interrupted)
        signals.watch(self._ask_to_stop)
        if self._order_fd is not None:
            threading.Thread(target=self._read_orders, args=(self._order_fd,), name="orders", daemon=True).start()

    def report(self, report: Report) -> None:
        """Tell the parent, or print. Any thread may call it. A parent that is gone is told nothing."""
        if self._report_fd is None:
            _print(self.name, report)
            return
        with contextlib.suppress(BrokenPipeError), self._lock:
            os.write(self._report_fd, encode(report))

    def progress(self, text: str) -> None:
        self.report(Progress(text=text))

    def on_stop(self, stop: Callable[[], object]) -> None:
        """From now on `stop` is called, on another thread, instead of raising StoppedWhileStarting in the main thread.

        It is called once more when the process is told to end at once, so that the main thread comes to `check_hurry`.
        """
        with self._lock:
            self._on_stop = stop
            asked = self._stop_asked
        if asked:
            stop()

    def check_hurry(self) -> None:
        """Raises StoppedAtOnce when there is no time left for an orderly stop."""
        if self._hurried is not None:
            raise StoppedAtOnce(self._hurried)

    def end_within(self, timeout_s: float, reason: str) -> threading.Timer:
        """End this process with status 1 and that reason after so long, unless the timer is cancelled or the process has ended:
        for what may hang in a library that nothing can interrupt."""

        def give_up() -> None:
            _log.critical("%s", reason)
            self.report(Broken(reason=reason))
            os._exit(1)

        timer = threading.Timer(timeout_s, give_up)
        timer.daemon = True
        timer.start()
        return timer

    def ended(self) -> None:
        """The main thread is done: nothing can stop it any more."""
        self._ended.set()

    def on_order(self, act: Callable[[Order], object]) -> None:
        """From now on `act` is called with every order, on a thread of its own; those that came before are made up for."""
        with self._lock:
            self._on_order = act
            early, self._early_orders = self._early_orders, []
        for order in early:
            act(order)

    def _ask_to_stop(self, number: int | None) -> None:
        """A signal, or with None the parent's wish or end. A signal that follows another wish to stop is in a hurry."""
        with self._lock:
            again, self._stop_asked = self._stop_asked, True
        if not again:
            threading.Thread(target=self._stop, name="stop", daemon=True).start()
        elif number is not None:
            self._hurry(f"told again to stop, by {signal.Signals(number).name}")

    def _hurry(self, reason: str) -> None:
        """Only the main thread can say goodbye; it has HURRY_S to do so."""
        self.end_within(HURRY_S, reason)
        with self._lock:
            self._hurried = reason
            stop = self._on_stop
        if stop is not None:
            stop()

    def _stop(self) -> None:
        """Stop the main thread the way it said, or else interrupt it until it has noticed."""
        while not self._ended.is_set():
            with self._lock:
                stop = self._on_stop
            if stop is not None:
                stop()
                return
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            self._ended.wait(RETRY_S)

    def _interrupted(self, _number: int, _frame: FrameType | None) -> None:
        if self._on_stop is None and not self._ended.is_set():
            raise StoppedWhileStarting

    def _read_orders(self, fd: int) -> None:
        with os.fdopen(fd, "rb") as lines:
            while line := lines.readline(MAX_LINE_BYTES):
                try:
                    self._take_order(decode_order(line))
                except msgspec.DecodeError as error:
                    _log.error("an order that cannot be read was dropped: %s", error)
        self._ask_to_stop(None)
        threading.Event().wait(ORPHAN_S)
        self._hurry(f"an orderly stop took longer than {ORPHAN_S:g} s, and the parent is gone")

    def _take_order(self, order: Order) -> None:
        with self._lock:
            act = self._on_order
            if act is None:
                self._early_orders.append(order)
        if act is not None:
            act(order)


def run_child(name: str, body: Callable[[ChildProcess], None]) -> int:
    """Run a process's body; the outermost door of the process. Returns its exit status: 0, 1, or BAD_FLAG.

    Heavy imports belong in the body: a process that is told to stop while it imports stops.
    """
    process = ChildProcess(name)
    try:
        process.listen()
        return _run(process, body)
    except StoppedWhileStarting:
        return 0
    finally:
        process.ended()


def _run(process: ChildProcess, body: Callable[[ChildProcess], None]) -> int:
    try:
        body(process)
    except TandemError as error:
        _log.error("%s", error)
        process.report(Broken(reason=str(error)))
        return BAD_FLAG if isinstance(error, ConfigError) else 1
    except Exception as error:  # noqa: BLE001  whoever started this process must learn why it ended, whatever the reason
        _log.critical("%s failed", process.name, exc_info=error)
        process.report(Broken(reason=f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _take_fd(variable: str) -> int | None:
    """The pipe's end that the variable names; children of this process do not inherit it."""
    text = os.environ.pop(variable, None)
    if text is None:
        return None
    os.set_inheritable(int(text), False)
    return int(text)


def _print(name: str, report: Report) -> None:
    match report:
        case Progress() | News():
            print(f"{name}: {report.text}", file=sys.stderr, flush=True)
        case Ready():
            print(f"{name}: ready, " + ", ".join(f"{use} {address}" for use, address in report.addresses.items()), flush=True)
        case IntakeClosed() | Broken():
            return
