"""A process of `launch`: it reports, takes orders, and stops when it is told to or when its parent is gone.

Owns the signals of the process. Does not know what the process does. A process that a person started in a terminal has no parent
to report to: it prints its reports.

A process is told to stop by SIGTERM, by SIGINT, or by end of file on the order pipe, which also comes when the parent was killed.

    the first time: stop in order; it may take long, because an instance finishes what runs there or hands it off
    a signal after that, or ORPHAN_S without a parent: end at once; HURRY_S to say goodbye, then the process is gone
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import msgspec

from common.config import LogConfig
from common.errors import ConfigError, TandemError
from common.processes.parent import Parent
from launch import environment, logs, signals
from launch.reports import BAD_FLAG, Broken, IntakeClosed, News, Order, Progress, Ready, Report

ORPHAN_S = 15.0
"""How long an orderly stop may take when no parent is left to kill this process."""
HURRY_S = 1.0
"""How long a process lives on after it was told to end at once."""
RETRY_S = 0.2
"""How soon a main thread that is starting is interrupted again: the first signal may have come just before it began to wait."""

_log = logging.getLogger(__name__)


class StoppedWhileStarting(BaseException):
    """Told to stop before the process said how to stop it; raised in the main thread."""


class StoppedAtOnce(TandemError):
    """Told to end at once, during an orderly stop."""


class ChildProcess:
    """This process, and how it is stopped. Create it once, in the main thread, before other threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._stop_asked = False
        self._hurried: str | None = None
        self._ended = threading.Event()
        self._on_stop: Callable[[], object] | None = None
        self._on_order: Callable[[Order], object] | None = None
        self._early_orders: list[Order] = []
        self._on_sudden_end: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._parent: Parent[Order, Report] = Parent(msgspec.json.Decoder[Order](Order))

    @property
    def has_parent(self) -> bool:
        """Whether another process started this one and hears its reports; else a person did, in a terminal."""
        return self._parent.exists

    def listen(self) -> None:
        """Start to listen for signals and orders. The main thread calls this; from now on it may raise StoppedWhileStarting."""
        signal.signal(signal.SIGUSR1, self._interrupted)
        signals.watch(self._ask_to_stop)
        if self._parent.exists:
            threading.Thread(target=self._read_orders, name="orders", daemon=True).start()

    def report(self, report: Report) -> None:
        """Tell the parent, or print when there was none from the start. Any thread may call it."""
        if self._parent.exists:
            self._parent.report(report)
        else:
            _print(self.name, report)

    def progress(self, text: str) -> None:
        self.report(Progress(text=text))

    def on_stop(self, stop: Callable[[], object]) -> None:
        """From now on, call `stop` on another thread instead of raising StoppedWhileStarting in the main thread.

        `stop` is called again when the process is told to end at once, so that the main thread gets to `check_hurry`.
        """
        with self._lock:
            self._on_stop = stop
            asked = self._stop_asked
        if asked:
            stop()

    @property
    def hurried(self) -> bool:
        """Whether the process was told to end at once."""
        return self._hurried is not None

    def check_hurry(self) -> None:
        """Raises StoppedAtOnce when the process was told to end at once."""
        if self._hurried is not None:
            raise StoppedAtOnce(self._hurried)

    def end_within(self, timeout_s: float, reason: str, more: Callable[[], str] | None = None) -> threading.Timer:
        """End this process with status 1 and that reason after `timeout_s`, unless the timer is cancelled: for calls into
        libraries that may hang and that nothing can interrupt. more: asked then, on another thread, for the end of the reason."""

        def end() -> None:
            self.end_now(reason if more is None else reason + more())

        timer = threading.Timer(timeout_s, end)
        timer.daemon = True
        timer.start()
        return timer

    def on_sudden_end(self, act: Callable[[], object]) -> None:
        """Call this too, from any thread, when the process ends without its threads. It must not wait."""
        self._on_sudden_end.append(act)

    def end_now(self, reason: str) -> NoReturn:
        """End this process with status 1 and that reason, without asking its threads and libraries."""
        _log.critical("%s", reason)
        self.report(Broken(reason=reason))
        for act in self._on_sudden_end:
            act()
        os._exit(1)

    def ended(self) -> None:
        """The main thread is done, and must not be interrupted any more."""
        self._ended.set()

    def on_order(self, act: Callable[[Order], object]) -> None:
        """From now on, call `act` with every order, on a thread of its own; with earlier orders at once, on this thread."""
        with self._lock:
            self._on_order = act
            early, self._early_orders = self._early_orders, []
        for order in early:
            act(order)

    def _ask_to_stop(self, number: int | None) -> None:
        """number: of the signal; None when the order pipe ended. A signal after an earlier request to stop means: at once."""
        with self._lock:
            again, self._stop_asked = self._stop_asked, True
        if not again:
            threading.Thread(target=self._stop, name="stop", daemon=True).start()
        elif number is not None:
            self._hurry(f"told again to stop, by {signal.Signals(number).name}")

    def _hurry(self, reason: str) -> None:
        """Give the main thread, the only one that can say goodbye, HURRY_S to do so."""
        self.end_within(HURRY_S, reason)
        with self._lock:
            self._hurried = reason
            stop = self._on_stop
        if stop is not None:
            stop()

    def _stop(self) -> None:
        """Stop the main thread with its `on_stop` function; until it has set one, interrupt it again and again."""
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

    def _read_orders(self) -> None:
        while (orders := self._parent.read_orders()) is not None:
            for order in orders:
                self._take_order(order)
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


def run_process(name: str, log: LogConfig, threads: int, body: Callable[[ChildProcess], None]) -> int:
    """Run the body as this process, with its environment, log and signals. The body does the heavy imports. threads: the size of
    a thread pool; 0: one for each core. Returns the exit status."""
    environment.prepare(threads)
    logs.configure(log, name)
    return run_child(name, body)


def run_child(name: str, body: Callable[[ChildProcess], None]) -> int:
    """Run a process's body; the outermost door of the process. Returns its exit status: 0, 1, or BAD_FLAG.

    Import heavy modules in the body, where the process can be stopped while it imports.
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
        if not process.has_parent:  # a parent says it, once
            _log.error("%s", error)
        process.report(Broken(reason=str(error)))
        return BAD_FLAG if isinstance(error, ConfigError) and not error.retryable else 1
    except Exception as error:  # noqa: BLE001  whoever started this process must learn why it ended, whatever the reason
        _log.critical("%s failed", process.name, exc_info=error)
        process.report(Broken(reason=f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _print(name: str, report: Report) -> None:
    match report:
        case Progress() | News():
            print(f"{name}: {report.text}", file=sys.stderr, flush=True)
        case Ready():
            print(f"{name}: ready, " + ", ".join(f"{use} {address}" for use, address in report.addresses.items()), flush=True)
        case IntakeClosed() | Broken():
            return
