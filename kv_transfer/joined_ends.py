"""Joined ends: of a push or a link that has several parts, one event when all of them have spoken.

Owns what the parts have said so far. Parts are the ranks of a peer that one rank writes to (`target_ranks.py`), or the ranks of
our own instance (`ranked_transfers.py`). Knows neither commands nor transports.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from common.ids import Incarnation, InstanceId, Ticket
from common.instance.ports import LinkChanged, PushDone, PushFailed
from common.messages import LinkInfo, LinkState


@dataclass(slots=True)
class _Pushing:
    """A push whose parts have not all ended. waiting: how many. failure: the first; None: none has failed."""

    waiting: int
    pushed_bytes: int = 0
    seconds: float = 0.0
    runs: int = 0
    failure: str | None = None
    quiescent: bool = True
    begun: bool = False


class JoinedPushes:
    """Pushes that several parts carry out. Each ends when its last part does."""

    def __init__(self) -> None:
        self._pushing: dict[Ticket, _Pushing] = {}

    def begin(self, ticket: Ticket, parts: int) -> None:
        assert ticket not in self._pushing, f"push {ticket} is begun twice"
        self._pushing[ticket] = _Pushing(parts)

    def ended(self, ticket: Ticket, part: str, end: PushDone | PushFailed) -> PushDone | PushFailed | None:
        """A part of the push has ended. Returns the end of the whole with the last part: it is done when all are, and quiescent
        when all are. part: its name, for people."""
        push = self._pushing[ticket]
        push.waiting -= 1
        if isinstance(end, PushDone):
            push.begun = True
            push.pushed_bytes += end.pushed_bytes
            push.seconds = max(push.seconds, end.seconds)
            push.runs += end.runs
        else:
            push.failure = push.failure or f"{part}: {end.reason}"
            push.quiescent &= end.quiescent
            push.begun |= end.begun
        if push.waiting:
            return None
        del self._pushing[ticket]
        if push.failure is None:
            return PushDone(ticket, push.pushed_bytes, push.seconds, push.runs)
        return PushFailed(ticket, push.failure, push.quiescent, push.begun)


@dataclass(slots=True)
class _Joined:
    """A link to one life of a peer. said: by its parts, each by its name. told: what was last made of it."""

    incarnation: Incarnation
    parts: int
    said: dict[str, LinkInfo] = field(default_factory=dict)
    told: tuple[LinkState, str] = ("connecting", "")


class JoinedLinks:
    """Links that have several parts: ready when all parts are, lost when one is.

    speed: of a link, from the speeds of its parts, in bytes per second.
    """

    def __init__(self, speed: Callable[[Iterable[float]], float]) -> None:
        self._speed = speed
        self._links: dict[InstanceId, _Joined] = {}

    def expect(self, peer: InstanceId, incarnation: Incarnation, parts: int) -> None:
        """So many parts will speak of the link to this life of the peer. What is known of the same life stays."""
        link = self._links.get(peer)
        if link is None or link.incarnation != incarnation:
            self._links[peer] = _Joined(incarnation, parts)

    def forget(self, peer: InstanceId) -> None:
        self._links.pop(peer, None)

    def changed(self, part: str, said: LinkInfo) -> LinkChanged | None:
        """What a part says; it may name a life of the peer that has left. None: the whole has not changed."""
        link = self._links.get(said.peer)
        if link is None or link.incarnation != said.incarnation:
            return None
        link.said[part] = said
        joined = self._join(link)
        if link.told == (joined.state, joined.detail):
            return None
        link.told = joined.state, joined.detail
        return LinkChanged(joined)

    def _join(self, link: _Joined) -> LinkInfo:
        said = link.said
        for state in ("lost", "connecting"):
            for part, info in said.items():
                if info.state == state:
                    return replace(info, detail=f"{part}: {info.detail}", bytes_per_s=None, host_bytes_per_s=None, warning="")
        info = next(iter(said.values()))
        if len(said) < link.parts:
            return replace(info, state="connecting", detail="", bytes_per_s=None, host_bytes_per_s=None, warning="")
        return replace(
            info,
            detail=", ".join(dict.fromkeys(info.detail for info in said.values())),
            bytes_per_s=self._of_all(info.bytes_per_s for info in said.values()),
            host_bytes_per_s=self._of_all(info.host_bytes_per_s for info in said.values()),
            warning="; ".join(f"{part}: {info.warning}" for part, info in said.items() if info.warning),
        )

    def _of_all(self, speeds: Iterable[float | None]) -> float | None:
        known = [speed for speed in speeds if speed is not None]
        return self._speed(known) if known else None
