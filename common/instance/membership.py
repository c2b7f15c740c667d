"""An instance's membership of its fleet: it registers until it is welcome, then reports.

Owns the times of registration and of heartbeats in both directions. Opens no socket, reads no clock. The router answers every
heartbeat. When it falls silent, the instance registers again until a router (the same, or a new one) welcomes it.
"""

from common.errors import PeerRefused
from common.ids import ROUTER
from common.instance.ports import Send
from common.messages import Counters, Goodbye, Heartbeat, InstanceInfo, LinkInfo, Load, Refused, Register, Welcome

REGISTER_EVERY_S = 0.25
HEARTBEATS_PER_REGISTER = 10


class Membership:
    """The instance's half of joining and staying. detokenizer: the detokenizer's address, once it is known."""

    def __init__(self, info: InstanceInfo, startup_timeout_s: float, now: float) -> None:
        self.info = info
        self.detokenizer: str | None = None
        self._give_up_s: float | None = now + startup_timeout_s
        self._next_s = now
        self._welcome: Welcome | None = None
        self._beats = 0
        self._beat_s: float | None = None
        self._unanswered_s = 0.0

    @property
    def joined(self) -> bool:
        return self._welcome is not None

    @property
    def next_deadline(self) -> float:
        return self._next_s

    def receive(self, message: Welcome | Refused) -> bool:
        """Whether to abandon the requests of a former router, which this one does not know. Raises PeerRefused."""
        if isinstance(message, Refused):
            raise PeerRefused(f"the router refused {self.info.id}: {message.reason}")
        is_other = self._welcome is not None and self._welcome.router != message.router
        self._welcome, self.detokenizer = message, message.detokenizer
        self._give_up_s, self._unanswered_s = None, 0.0
        return is_other

    def router_lost(self) -> bool:
        """Whether the router has left our heartbeats unanswered for so long that it is dead, or takes us for dead; we then
        register again. At most `heartbeat_s` counts between two heartbeats: a process that was stopped has sent none."""
        if self._welcome is None or self._unanswered_s <= self._welcome.dead_after_s:
            return False
        self._welcome, self._beat_s, self._unanswered_s = None, None, 0.0
        return True

    def due(self, now: float, load: Load, counters: Counters, links: tuple[LinkInfo, ...], draining: bool) -> list[Send]:
        """The messages to send at `next_deadline`, which then moves on. Raises PeerRefused at the start-up deadline."""
        if self._welcome is None:
            if self._give_up_s is not None and now >= self._give_up_s:
                raise PeerRefused("the router did not answer the registration in time: is --router right, and is it running?")
            self._next_s = now + REGISTER_EVERY_S
            return [Send(ROUTER, Register(instance=self.info))]
        self._next_s = now + self._welcome.heartbeat_s
        self._beats += 1
        if self._beat_s is not None:
            self._unanswered_s += min(now - self._beat_s, self._welcome.heartbeat_s)
        self._beat_s = now
        beat = Heartbeat(
            id=self.info.id,
            incarnation=self.info.incarnation,
            load=load,
            counters=counters,
            links=links,
            draining=draining,
        )
        if self._beats % HEARTBEATS_PER_REGISTER == 0:
            return [Send(ROUTER, beat), Send(ROUTER, Register(instance=self.info))]
        return [Send(ROUTER, beat)]

    def hurry(self, now: float) -> None:
        """Something changed that the router should know soon: send a heartbeat at the next turn."""
        if self.joined:
            self._next_s = min(self._next_s, now)

    def goodbye(self) -> Send:
        return Send(ROUTER, Goodbye(id=self.info.id, incarnation=self.info.incarnation))
