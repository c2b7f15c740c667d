"""The signals that ask a process to stop, taken by a thread of their own.

Owns SIGINT and SIGTERM of this process. A handler in Python runs only when the main thread comes back to Python: a signal that
arrives just before it begins to wait is not seen until the wait is over. A thread that only waits for signals misses none.
"""

import signal
import threading
from collections.abc import Callable

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


def watch(on_signal: Callable[[int], object]) -> None:
    """Call `on_signal` with the number of every stop signal, on a thread. Called once, before the process starts other threads:
    they and child processes inherit that the signals are blocked, so that only this thread takes them."""

    def take() -> None:
        while True:
            on_signal(signal.sigwait(STOP_SIGNALS))

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=take, name="signals", daemon=True).start()
