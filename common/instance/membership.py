"""An instance's membership of its fleet: it registers until it is welcome, then reports.

Owns the times of registration and of heartbeats in both directions. Opens no socket, reads no clock.

The router answers every heartbeat. When it falls silent, the instance goes on serving and registers again until a router welcomes
it. If that is the same router, it was only held up, and still waits for every answer. If it is another incarnation, or if nobody
answers for ABANDON_AFTER_S, nobody waits for the answers any more.
"""

from dataclasses import dataclass

from common.errors import PeerRefused
from common.ids import ROUTER, InstanceId
from common.instance.ports import Send
from common.messages import Counters, Goodbye, Heartbeat, InstanceInfo, Load, Refused, Register, Welcome

REGISTER_EVERY_S = 0.25
ABANDON_AFTER_S = 300.0
"""A router that has not answered for this long has failed: no stop, swap or burst of work takes minutes. Most requests have ended
by then; the rest would only hold memory."""


@dataclass(frozen=True, slots=True)
class State:
    """How the instance is, as its heartbeats say it. peers_version, links_version: what it has heard of peers, and has said of
    links."""

    load: Load
    counters: Counters
    peers_version: int
    links_version: int
    draining: bool


class Membership:
    """The instance's half of joining and staying. detokenizer: the detokenizer's address, once it is known. router: the life that
    welcomed it last."""

    def __init__(self, info: InstanceInfo, startup_timeout_s: float, now: float) -> None:
        self.info = info
        self.detokenizer: str | None = None
        self.router: InstanceId | None = None
        self._give_up_s: float | None = now + startup_timeout_s
        self._next_s = now
        self._welcome: Welcome | None = None
        """The latest, from the router whose requests this instance serves. None: it serves no router's."""
        self._sent_s: float | None = None
        self._unanswered_s = 0.0

    @property
    def joined(self) -> bool:
        """Whether a router answers us."""
        return self._welcome is not None and self._unanswered_s <= self._welcome.dead_after_s

    @property
    def next_deadline(self) -> float:
        return self._next_s

    def receive(self, message: Welcome | Refused) -> bool:
        """Whether to abandon the requests of a former router, which this one does not know. The same router still knows them,
        however long it was silent. Raises PeerRefused."""
        if isinstance(message, Refused):
            raise PeerRefused(f"the router refused {self.info.id}: {message.reason}")
        is_other = self._welcome is not None and self._welcome.router != message.router
        self._welcome, self.detokenizer, self.router = message, message.detokenizers[0], message.router
        self._give_up_s, self._unanswered_s = None, 0.0
        return is_other

    def router_lost(self) -> bool:
        """Whether to abandon the router's requests, because it has been silent for so long that it must have failed. Says so
        once."""
        if self._welcome is None or self._unanswered_s <= ABANDON_AFTER_S:
            return False
        self._welcome = None
        return True

    def due(self, now: float, state: State) -> list[Send]:
        """The messages to send at `next_deadline`, which then moves on. Raises PeerRefused at the start-up deadline."""
        if self._welcome is not None:
            # At most `heartbeat_s` counts between two messages: a process that was stopped has sent none.
            waited_s = 0.0 if self._sent_s is None else min(now - self._sent_s, self._welcome.heartbeat_s)
            self._unanswered_s, self._sent_s = self._unanswered_s + waited_s, now
        if self._welcome is None or not self.joined:
            if self._give_up_s is not None and now >= self._give_up_s:
                raise PeerRefused("the router did not answer the registration in time: is --router right, and is it running?")
            self._next_s = now + (REGISTER_EVERY_S if self._welcome is None else self._welcome.heartbeat_s)
            return [Send(ROUTER, Register(instance=self.info))]
        self._next_s = now + self._welcome.heartbeat_s
        beat = Heartbeat(
            id=self.info.id,
            incarnation=self.info.incarnation,
            load=state.load,
            counters=state.counters,
            peers_version=state.peers_version,
            links_version=state.links_version,
            draining=state.draining,
        )
        return [Send(ROUTER, beat)]

    def hurry(self, now: float) -> None:
        """Something changed that the router should know soon: send a heartbeat at the next turn."""
        if self.joined:
            self._next_s = min(self._next_s, now)

    def goodbye(self) -> Send:
        return Send(ROUTER, Goodbye(id=self.info.id, incarnation=self.info.incarnation))
