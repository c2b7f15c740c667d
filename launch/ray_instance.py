"""An instance on a Ray cluster, as `launch ray` sees it: started, watched and stopped like a child process.

Owns the joining of an instance's hosts, each of which runs a part of its ranks, to one life with one end. Does not know Ray: a
place (`launch/ray_fleet.py`) finds the hosts, and a host does what it is told (`launch/rank_host.py`).

    wait for a place ─► start every host's ranks ─► pass on what rank 0's host reports ─► one has ended ─► so do the others
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from common.errors import TandemError
from common.processes.child import Exited, Reported
from launch.local import OnEvent, Role
from launch.rank_host import Ended, HostEvent
from launch.ray_plan import Bundle
from launch.reports import Progress, Ready, Report

OTHERS_S = 15.0
"""How long the other hosts of an instance may take to end when one has ended: the ranks miss each other much sooner."""


class HostLost(TandemError):
    """The node or the actor that ran ranks of an instance is gone, or does not answer."""


class Host(Protocol):
    """Some ranks of an instance, on one node. Methods that return something, and `start`, raise HostLost."""

    node: str
    """The address by which other nodes reach its ranks."""

    def free_port(self) -> int:
        """A port of the node that nobody listens at."""

    def start(self, role: str, flags: Sequence[str]) -> None:
        """Start the process of these ranks."""

    def next_events(self) -> list[HostEvent]:
        """Waits some seconds for the first one."""

    def terminate(self) -> None:
        """Ask its process to stop in order. Waits for no answer."""

    def kill(self) -> None:
        """End its process and give the node's resources to the next host."""


class Place(Protocol):
    """What the cluster keeps for an instance, life after life: a bundle of resources on each of its nodes."""

    bundles: Sequence[Bundle]

    def hosts(self, given_up: Callable[[], bool], waits: Callable[[str], object]) -> Sequence[Host]:
        """A new host in each bundle, in order; none when `given_up` says so. waits: told once what is waited for, if that takes
        long. Raises HostLost."""


class RayInstance:
    """One life of an instance. Implements `common.processes.child.Running`."""

    def __init__(self, name: str, role: Role, flags: Sequence[str], place: Place, on_event: OnEvent) -> None:
        """flags: without those that follow from where the ranks are."""
        self.name = name
        self._role, self._flags, self._place, self._on_event = role, flags, place, on_event
        self._told = self._killed = False
        self._hosts: Sequence[Host] = ()
        self._account = "it waits for a place on the Ray cluster"
        self._lock = threading.Lock()
        """Held while hosts are started, so that each is told to stop once: a second time would mean at once."""
        self._gone = threading.Event()
        threading.Thread(target=self._live, name=f"{name} on Ray", daemon=True).start()

    def terminate(self) -> None:
        with self._lock:
            self._told = True
            for host in self._hosts:
                host.terminate()

    def kill(self) -> None:
        self._killed = True  # what is started after this is ended by `_live`
        for host in self._hosts:
            host.kill()

    def wait(self, timeout_s: float) -> bool:
        return self._gone.wait(timeout_s)

    def account(self) -> str:
        return self._account

    # --- the thread of this life -----------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            end = self._run()
        except HostLost as error:
            end = Ended(status=1, account=str(error))
        for host in self._hosts:
            host.kill()
        self._account = end.account
        self._on_event(Exited(self.name, end.status, end.account))
        self._gone.set()

    def _run(self) -> Ended:
        """Raises HostLost."""
        hosts = self._place.hosts(self._given_up, lambda what: self._show(Progress(text=what)))
        if not hosts:
            return Ended(status=0, account="it was stopped while it waited for a place on the Ray cluster")
        with self._lock:
            self._hosts = hosts
            if self._given_up():
                return Ended(status=0, account="it was stopped before its ranks were started")
            for host, flags in zip(hosts, self._flags_of(hosts), strict=True):
                host.start(self._role, flags)
        if self._killed:
            return Ended(status=1, account="it was killed while its ranks were started")
        ends: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        for host in hosts:
            arguments = (host, host is hosts[0], ends)
            threading.Thread(target=self._listen, args=arguments, name=f"{self.name} on {host.node}", daemon=True).start()
        ended = [ends.get()]
        until = time.monotonic() + OTHERS_S
        while len(ended) < len(hosts) and (end := _next(ends, until)) is not None:
            ended.append(end)
        return next((end for end in ended if end.status != 0), ended[0])  # the first that failed is the reason for the others

    def _flags_of(self, hosts: Sequence[Host]) -> list[list[str]]:
        """Raises HostLost."""
        common = [[*self._flags, f"--host={host.node}"] for host in hosts]
        if len(hosts) == 1:
            return common
        leader = f"--leader=tcp://{hosts[0].node}:{hosts[0].free_port()}"
        ranks = [f"--rank={bundle.first}-{bundle.last}" for bundle in self._place.bundles]
        return [[*flags, which, leader] for flags, which in zip(common, ranks, strict=True)]

    def _listen(self, host: Host, leads: bool, ends: "queue.SimpleQueue[Ended]") -> None:
        """Pass on what this host reports, until its process has ended. leads: it has rank 0, which says when all are ready."""
        try:
            while True:
                for event in host.next_events():
                    if isinstance(event, Ended):
                        ends.put(event)
                        return
                    if leads or not isinstance(event, Ready):
                        self._show(event)
        except HostLost as error:
            ends.put(Ended(status=1, account=str(error)))

    def _show(self, report: Report) -> None:
        if isinstance(report, Progress):
            self._account = f"its last report was: {report.text}"
        self._on_event(Reported(self.name, report))

    def _given_up(self) -> bool:
        return self._told or self._killed


def _next(ends: "queue.SimpleQueue[Ended]", until: float) -> Ended | None:
    try:
        return ends.get(timeout=max(0.0, until - time.monotonic()))
    except queue.Empty:
        return None
