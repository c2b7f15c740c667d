"""An instance's membership at one of its routers: it registers until it is welcome, then reports.

Owns the times of registration and of heartbeats in both directions. Opens no socket, reads no clock.

The router answers heartbeats. When it falls silent, the instance goes on serving and registers again until a router welcomes
it there. If that is the same life, it was only held up, and still waits for every answer. If it is another life, if nobody
answers for ABANDON_AFTER_S, or if the router's process is proven to be gone, nobody waits for the answers any more.
"""

from collections import deque
from dataclasses import dataclass

from common.ids import InstanceId
from common.instance.ports import Send
from common.messages import Counters, Goodbye, Heartbeat, InstanceInfo, Load, Register, Timeline, Welcome
from common.names import ROUTER_NAME

REGISTER_EVERY_S, SELDOM_EVERY_S = 0.25, 5.0
"""How often it registers: first, and in the end, where somebody is there and does not answer."""
ABANDON_AFTER_S = 300.0
"""A router that has not answered for this long has failed: no stop, swap or burst of work takes minutes. Most requests have ended
by then; the rest would only hold memory."""
OVER_S = 60.0
"""For how long after its last word a life of a router that has a successor is not believed: its mail may be late. It may be back
later, where an address moves between routers."""
OVER_REMEMBERED = 4
"""How many such lives a membership remembers."""
TIMELINES_AT_ONCE, TIMELINES_WAITING = 256, 4_096
"""How many timelines go with a heartbeat, and how many wait for one."""


@dataclass(frozen=True, slots=True)
class State:
    """How the instance is, as its heartbeats say it to all routers. links_version, cache_version: of its latest report of links,
    and of its prefix cache."""

    load: Load
    counters: Counters
    links_version: int
    draining: bool
    cache_version: int = 0


class Membership:
    """The instance's half of joining and staying at the router whose address this is. name: what the mail calls that router."""

    def __init__(self, info: InstanceInfo, address: str, now: float) -> None:
        self.address = address
        self.name = InstanceId(f"{ROUTER_NAME}@{address}")
        self.welcome: Welcome | None = None
        """The latest, from the life of the router whose requests this instance serves. None: it serves no requests from there."""
        self.refusal: str | None = None
        """Why the router does not want us, while it does not."""
        self._info = info
        self._latest: InstanceId | None = None
        """The life that was last believed, even if it is gone."""
        self._over: dict[InstanceId, float] = {}
        """Lives that have a successor, and until when they are not believed."""
        self.next_deadline = now
        self._pause_s = REGISTER_EVERY_S
        self._has_asked = False
        self._sent_s: float | None = None
        self._timelines: deque[Timeline] = deque()
        self.timelines_dropped = 0
        """The oldest, when too many waited."""
        self._unanswered_s = 0.0

    @property
    def joined(self) -> bool:
        """Whether the router answers us."""
        return self.welcome is not None and self._unanswered_s <= self.welcome.dead_after_s

    @property
    def abandoned(self) -> bool:
        """Whether the router has been silent for so long that it must have failed."""
        return self.welcome is not None and self._unanswered_s > ABANDON_AFTER_S

    @property
    def was_welcome(self) -> bool:
        """Whether any life of the router has welcomed us here."""
        return self._latest is not None

    def is_over(self, router: InstanceId, now: float) -> bool:
        """Whether this life of the router has had a successor a short time ago: what it said is only late."""
        return router != self._latest and now < self._over.get(router, now)

    def receive(self, welcome: Welcome, now: float) -> None:
        if self._latest is not None and self._latest != welcome.router:
            self._over.pop(self._latest, None)
            self._over[self._latest] = now + OVER_S
            if len(self._over) > OVER_REMEMBERED:
                del self._over[next(iter(self._over))]
        self._latest = welcome.router
        if self.welcome is None:
            self.next_deadline = min(self.next_deadline, now)  # the next Register may be further than `dead_after_s`
        self.welcome, self.refusal, self._unanswered_s, self._pause_s = welcome, None, 0.0, REGISTER_EVERY_S

    def end(self, now: float) -> None:
        """The router is gone, or does not want us: begin anew."""
        self.welcome, self._unanswered_s, self._pause_s = None, 0.0, REGISTER_EVERY_S
        self._has_asked = False
        self._timelines.clear()
        self.next_deadline = min(self.next_deadline, now + REGISTER_EVERY_S)

    def note(self, timeline: Timeline) -> None:
        """Tell the router with one of the next heartbeats."""
        if len(self._timelines) == TIMELINES_WAITING:
            self._timelines.popleft()
            self.timelines_dropped += 1
        self._timelines.append(timeline)

    def due(self, now: float, state: State, peers_version: int, *, reachable: bool) -> list[Send]:
        """The messages to send at `next_deadline`, which then moves on. peers_version: of this router's set of peers. reachable:
        the connection to it is up. While it is not, one Register waits for it, and no more, because they would all arrive."""
        if self.welcome is not None:
            # At most `heartbeat_s` counts between two messages: a process that was stopped has sent none.
            waited_s = 0.0 if self._sent_s is None else min(now - self._sent_s, self.welcome.heartbeat_s)
            self._unanswered_s, self._sent_s = self._unanswered_s + waited_s, now
        register = Send(self.name, Register(instance=self._info, address=self.address, was_welcome=self.was_welcome))
        if self.welcome is None:
            asks, self._has_asked = reachable or not self._has_asked, True
            self.next_deadline = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, SELDOM_EVERY_S) if reachable else REGISTER_EVERY_S
            return [register] if asks else []
        self.next_deadline = now + self.welcome.heartbeat_s
        if not self.joined:
            return [register] if reachable else []
        beat = Heartbeat(
            id=self._info.id,
            incarnation=self._info.incarnation,
            load=state.load,
            counters=state.counters,
            peers_version=peers_version,
            links_version=state.links_version,
            cache_version=state.cache_version,
            draining=state.draining,
            timelines=self._take_timelines(),
        )
        return [Send(self.name, beat)]

    def _take_timelines(self) -> tuple[Timeline, ...]:
        return tuple(self._timelines.popleft() for _ in range(min(len(self._timelines), TIMELINES_AT_ONCE)))

    def hurry(self, now: float) -> None:
        """Something changed that the router should know soon: send a heartbeat at the next turn."""
        if self.joined:
            self.next_deadline = min(self.next_deadline, now)

    def goodbye(self, reason: str = "") -> Send:
        """With all timelines that wait: no heartbeat follows."""
        timelines = tuple(self._timelines)
        goodbye = Goodbye(id=self._info.id, incarnation=self._info.incarnation, timelines=timelines, reason=reason)
        return Send(self.name, goodbye)
