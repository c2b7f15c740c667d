"""An instance's membership of its fleet: it registers until it is welcome, then reports.

Owns the times of registration and heartbeats. Opens no socket, reads no clock. Registration is repeated now and then for ever, so
that a restarted router learns of its instances without their help.
"""

from common.errors import PeerRefused
from common.ids import ROUTER
from common.instance.ports import Send
from common.messages import Counters, Goodbye, Heartbeat, InstanceInfo, LinkInfo, Load, Refused, Register, Welcome

REGISTER_EVERY_S = 0.25
HEARTBEATS_PER_REGISTER = 10


class Membership:
    """The instance's half of joining and staying."""

    def __init__(self, info: InstanceInfo, startup_timeout_s: float, now: float) -> None:
        self.info = info
        self._give_up_s = now + startup_timeout_s
        self._next_s = now
        self._heartbeat_s: float | None = None
        self._beats = 0

    @property
    def joined(self) -> bool:
        return self._heartbeat_s is not None

    @property
    def next_at(self) -> float:
        return self._next_s

    def receive(self, message: Welcome | Refused) -> str | None:
        """Returns the detokenizer's address when it is news. Raises PeerRefused."""
        if isinstance(message, Refused):
            raise PeerRefused(f"the router refused {self.info.id}: {message.reason}")
        self._heartbeat_s = message.heartbeat_s
        return message.detokenizer

    def due(self, now: float, load: Load, counters: Counters, links: tuple[LinkInfo, ...]) -> list[Send]:
        """What is sent at `next_at`, which moves on. Raises PeerRefused at the start-up deadline."""
        if self._heartbeat_s is None:
            if now >= self._give_up_s:
                raise PeerRefused("the router did not answer the registration in time: is --router right, and is it running?")
            self._next_s = now + REGISTER_EVERY_S
            return [Send(ROUTER, Register(instance=self.info))]
        self._next_s = now + self._heartbeat_s
        self._beats += 1
        beat = Heartbeat(id=self.info.id, incarnation=self.info.incarnation, load=load, counters=counters, links=links)
        if self._beats % HEARTBEATS_PER_REGISTER == 0:
            return [Send(ROUTER, beat), Send(ROUTER, Register(instance=self.info))]
        return [Send(ROUTER, beat)]

    def hurry(self, now: float) -> None:
        """Something changed that the router should know soon: beat at the next turn."""
        if self.joined:
            self._next_s = min(self._next_s, now)

    def goodbye(self) -> Send:
        return Send(ROUTER, Goodbye(id=self.info.id, incarnation=self.info.incarnation))
