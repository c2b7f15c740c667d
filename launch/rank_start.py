"""The start of an instance with several ranks, on a thread of its own while the main thread loads the model.

Owns the thread. What is said is decided by `common/instance/ranks/gathering.py` on the leader and `joining.py` on a follower.
When the start fails, the main thread may be deep in a library that waits for the other ranks: then the process ends without it.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from common.wire import Mailbox
from launch.child import ChildProcess

END_S = 2.0
"""How long the main thread may take to notice that the start has failed. Then the process ends without it."""
CLOSE_S = 1.0

T = TypeVar("T")


class Start(Protocol):
    """One side of the start."""

    @property
    def complete(self) -> bool: ...

    def turn(self, clock: Callable[[], float]) -> None: ...

    def next_deadline(self, now: float) -> float: ...

    def offer(self, pages: int) -> int: ...

    def agreed(self, number: int) -> int | None: ...

    def end(self, reason: str) -> None: ...


class StartThread:
    """Turns `start` until it is complete or has failed. also: called before each turn. It may raise too."""

    def __init__(
        self, process: ChildProcess, mailbox: Mailbox[Any], start: Start, also: Callable[[float], None] = lambda now: None
    ) -> None:
        self._process = process
        self._mailbox = mailbox
        self._start = start
        self._also = also
        self._failure: Exception | None = None
        self._stopped = False
        self._turned = threading.Condition()
        """Held while the start turns, and while the main thread speaks."""
        self._thread = threading.Thread(target=self._run, name="ranks start", daemon=True)
        self._thread.start()

    def say(self, speak: Callable[[], T]) -> T:
        """Tell the start something, from another thread."""
        with self._turned:
            said = speak()
        self._mailbox.wake()
        return said

    def wait_for(self, look: Callable[[], T | None]) -> T:
        """Wait until `look` finds something. Raises what the start has failed with."""
        with self._turned:
            while True:
                if self._failure is not None:
                    raise self._failure
                found = look()
                if found is not None:
                    return found
                self._turned.wait()

    def agree(self, pages: int) -> int:
        """This rank can hold so many pages. Waits, and returns how many all ranks use."""
        number = self.say(lambda: self._start.offer(pages))
        return self.wait_for(lambda: self._start.agreed(number))

    def finish(self) -> None:
        """Wait until it is complete. From then on the mailbox belongs to the caller. Raises what the start has failed with."""
        self.wait_for(lambda: self._start.complete or None)
        self._thread.join()

    def close(self) -> None:
        """Stop, whatever is open; so the mailbox can be closed. When an error unwinds, the other side hears of it. Idempotent."""
        error = sys.exception()
        if error is not None and self._failure is None and not self._start.complete:
            self.say(lambda: self._start.end(str(error)))
        self._stopped = True
        self._mailbox.wake()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._stopped and (wait_s := self._turn()) is not None:
                self._mailbox.wait(wait_s)
        except Exception as error:  # noqa: BLE001 - the thread's outermost door; the main thread's next wait raises it
            with self._turned:
                self._failure = error
                self._start.end(str(error))
                self._turned.notify_all()
            self._process.end_within(END_S, str(error))

    def _turn(self) -> float | None:
        """Returns how long to wait; None when it is complete."""
        with self._turned:
            now = time.monotonic()
            self._also(now)
            self._start.turn(time.monotonic)
            self._turned.notify_all()
            return None if self._start.complete else self._start.next_deadline(now) - now
