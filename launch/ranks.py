"""The start of an instance with several ranks on a thread, and the far half of `launch ray`.

Owns the thread that turns the start while the main thread loads the model. `common/instance/ranks/start.py` decides what is sent.
When the start fails, the main thread may be deep in a library that waits for the other ranks: then the process ends without it.

Owns also what runs in a Ray actor, on the node where some ranks of an instance are: one process of `launch`, which starts those
ranks. The driver asks; this answers. Reports cross as JSON. Of Ray it knows the address of its node, and nothing else. When the
actor is gone, so is the process's parent: it ends like any other child.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from common.addresses import free_port
from common.instance.ranks.start import RankStart
from common.mail import Mailbox
from common.processes.child import KILL_S, JsonLine, Reported
from launch.child import ChildEvent, ChildProcess, Report, RoleProcess, launch_command

END_S = 2.0
"""How long the main thread may take to notice that the start has failed. Then the process ends without it."""
CLOSE_S = 1.0

T = TypeVar("T")


class StartThread:
    """Turns `start` until it is complete or has failed. also: a function that is called before each turn; it may raise too."""

    def __init__(
        self, process: ChildProcess, mailbox: Mailbox[Any], start: RankStart, also: Callable[[float], None] = lambda now: None
    ) -> None:
        self._process = process
        self._mailbox = mailbox
        self._start = start
        self._also = also
        self._failure: Exception | None = None
        self._stopped = False
        self._turned = threading.Condition()
        """Held while the start turns, and while the main thread calls it."""
        self._thread = threading.Thread(target=self._run, name="ranks start", daemon=True)
        self._thread.start()

    def call(self, method: Callable[[], T]) -> T:
        """Call a method of the start from another thread."""
        with self._turned:
            result = method()
        self._mailbox.wake()
        return result

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
        number = self.call(lambda: self._start.offer(pages))
        return self.wait_for(lambda: self._start.agreed(number))

    def finish(self) -> None:
        """Wait until it is complete. From then on the mailbox belongs to the caller. Raises what the start has failed with."""
        self.wait_for(lambda: self._start.complete or None)
        self._thread.join()

    def close(self) -> None:
        """Stop, whatever is open; so the mailbox can be closed. When an error unwinds, the other side gets it. Idempotent."""
        error = sys.exception()
        if error is not None and self._failure is None and not self._start.complete:
            self.call(lambda: self._start.end(str(error)))
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


LONG_POLL_S = 5.0
"""How long a question for events may wait for one."""


class Ended(JsonLine, frozen=True):
    """The process has ended. status, account: as in `common.processes.child.Exited`."""

    status: int
    account: str


HostEvent = Report | Ended


class RankHost:
    """Its methods may be called at the same time from several threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._events: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._child: RoleProcess | None = None

    def node(self) -> str:
        """The address of this node, as Ray knows it."""
        from ray.util import get_node_ip_address

        return str(get_node_ip_address())

    def free_port(self) -> int:
        """A port that nobody listens at now."""
        return free_port()

    def start(self, role: str, flags: Sequence[str]) -> None:
        """Start the process. Called once. Raises OSError."""
        self._child = RoleProcess(self._name, launch_command(role, flags), self._keep)

    def next_events(self) -> list[bytes]:
        """Each a HostEvent as JSON. Waits LONG_POLL_S for the first one."""
        try:
            events = [self._events.get(timeout=LONG_POLL_S)]
        except queue.Empty:
            return []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        """Returns when the process is gone."""
        if self._child is not None:
            self._child.kill()
            self._child.wait(KILL_S)

    def _keep(self, event: ChildEvent) -> None:
        line = event.report if isinstance(event, Reported) else Ended(status=event.status, account=event.account)
        self._events.put(msgspec.json.encode(line))
