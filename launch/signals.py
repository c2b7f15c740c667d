"""The signals that ask a process to stop, taken by a thread of their own.

Owns SIGINT and SIGTERM of this process. A handler in Python runs only when the main thread comes back to Python: a signal that
arrives just before it begins to wait is not seen until the wait is over. A thread that only waits for signals misses none.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


@contextmanager
def kept() -> Iterator[None]:
    """Within it stop signals are left to `watch`. It begins before anything is imported that starts threads, as numpy does: such
    a thread would take a signal, and the main thread that waits would not see it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def watch(on_signal: Callable[[int], object]) -> None:
    """Call `on_signal` with the number of every stop signal, on a thread. Called once, before the process starts other threads:
    they and child processes inherit that the signals are blocked, so that only this thread takes them."""

    def take() -> None:
        while True:
            on_signal(signal.sigwait(STOP_SIGNALS))

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=take, name="signals", daemon=True).start()
