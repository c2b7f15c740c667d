"""The far half of `launch ray`: what runs in a Ray actor, on the node where some ranks of an instance are.

Owns one process of `launch`, which starts those ranks. The driver asks; this answers. Reports cross as JSON. Of Ray it knows the
address of its node, and nothing else. When the actor is gone, so is the process's parent: it ends like any other child.
"""

import queue
from collections.abc import Sequence

import msgspec

from common.addresses import free_port
from common.processes.child import KILL_S, Reported
from common.processes.lines import JsonLine
from launch.processes import Child, ChildEvent, launch_command
from launch.reports import Report

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
        self._child: Child | None = None

    def node(self) -> str:
        """The address of this node, as Ray knows it."""
        from ray.util import get_node_ip_address

        return str(get_node_ip_address())

    def free_port(self) -> int:
        """A port that nobody listens at now."""
        return free_port()

    def start(self, role: str, flags: Sequence[str]) -> None:
        """Start the process. Called once. Raises OSError."""
        self._child = Child(self._name, launch_command(role, flags), self._keep)

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
