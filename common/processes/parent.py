"""The child's half: a process takes orders from the parent that started it, and reports to it.

Owns this process's ends of the two pipes. Does not know what the orders and reports mean.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from common.processes.lines import KILLED_WITH, ORDER_FD, REPORT_FD, LineReader, write_line

_PR_SET_PDEATHSIG = 1
OrderT = TypeVar("OrderT")
ReportT = TypeVar("ReportT", bound=msgspec.Struct)


class Parent(Generic[OrderT, ReportT]):
    """The parent of this process. Create it once, before anything starts other processes."""

    def __init__(self, decoder: "msgspec.json.Decoder[OrderT]") -> None:
        """decoder: of the orders."""
        if (parent := os.environ.pop(KILLED_WITH, None)) is not None:
            _be_killed_with(int(parent))
        self._lock = threading.Lock()
        self._report_fd = _take_fd(REPORT_FD)
        self._order_fd = _take_fd(ORDER_FD)
        self._reader = None if self._order_fd is None else LineReader(self._order_fd, decoder, "order")

    @property
    def exists(self) -> bool:
        """False when a person started this process in a terminal."""
        return self._reader is not None

    def report(self, report: ReportT) -> None:
        """Tell the parent. Any thread may call it. Does nothing when the parent is gone."""
        if self._report_fd is not None:
            with contextlib.suppress(BrokenPipeError), self._lock:
                write_line(self._report_fd, report)

    def read_orders(self) -> list[OrderT] | None:
        """Wait for orders. Returns None when the parent is gone."""
        return None if self._reader is None else self._reader.read()

    def obey(
        self, act: Callable[[OrderT], ReportT | None], turn: Callable[[], float | None] = lambda: None, wake: int | None = None
    ) -> None:
        """Answer each order with the report that `act` returns, until `act` returns None or the parent is gone.

        turn: called before each wait; returns how many seconds the wait may last. wake: an eventfd that ends the wait.
        """
        assert self._order_fd is not None
        watched = [self._order_fd] if wake is None else [self._order_fd, wake]
        while True:
            ready, _, _ = select.select(watched, [], [], turn())
            if wake is not None and wake in ready:
                os.eventfd_read(wake)
            if self._order_fd not in ready:
                continue
            orders = self.read_orders()
            if orders is None:
                return
            for order in orders:
                answer = act(order)
                if answer is None:
                    return
                self.report(answer)


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
