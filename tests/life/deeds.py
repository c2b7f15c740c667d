"""Deeds: what may befall a fleet in a schedule.

Owns what each is. Pure data: `schedule` draws them, `trial` does them.
"""

from dataclasses import dataclass
from typing import TypeAlias

from common.ids import ServingRole


@dataclass(frozen=True, kw_only=True)
class Kill:
    """The process is gone, memory and all. noticed_s: how long its peers' transports take to see it. back_s: until a successor
    starts. inherits: the successor has its address, and so its mail. breaks: the router sees its connection break."""

    name: str
    noticed_s: float
    back_s: float
    inherits: bool
    breaks: bool


@dataclass(frozen=True, kw_only=True)
class Hang:
    """The process is stopped, and goes on after so many seconds."""

    name: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Supplant:
    """The process is stopped, and a successor starts elsewhere after `next_s`. The former goes on after so many seconds, finds a
    later life in its place, and ends."""

    name: str
    next_s: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A router's process is stopped, or its loop is busy, for so many seconds. This alone befalls no request."""

    seconds: float
    router: int = 0


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A router's loop is busy for so many seconds: each of its turns takes turn_s. This alone befalls no request."""

    seconds: float
    turn_s: float
    router: int = 0


@dataclass(frozen=True, kw_only=True)
class KillRouter:
    """A router's process is gone, and its detokenizers with it; another life of it starts at its address after back_s."""

    router: int
    back_s: float


@dataclass(frozen=True, kw_only=True)
class KillDetokenizer:
    """The process is gone, and its router starts another one after back_s. This alone befalls no request."""

    router: int
    shard: int
    back_s: float


@dataclass(frozen=True, kw_only=True)
class Leave:
    """The instance is drained, by the router or by a signal, and started again when it has left."""

    name: str
    by_signal: bool


@dataclass(frozen=True, kw_only=True)
class ChangeRole:
    """This router tells the instance to serve in another role. Streams go on."""

    name: str
    role: ServingRole
    router: int = 0


@dataclass(frozen=True, kw_only=True)
class Part:
    """Nothing passes between two of them for so many seconds; letters are lost, or queued until then. breaks: the router sees the
    connection break, if it is one of them. router: which one is meant by ROUTER, or whose first one by DETOKENIZER."""

    one: str
    other: str
    seconds: float
    queued: bool
    breaks: bool
    router: int = 0


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Somebody traces the fleet at this router for so many seconds. This befalls no request."""

    seconds: float
    router: int = 0


@dataclass(frozen=True, kw_only=True)
class Flush:
    """This router tells its instances to forget their prefix caches. This befalls no request."""

    router: int = 0


@dataclass(frozen=True, kw_only=True)
class KillRank:
    """The process of one rank is gone, so the instance ends by itself, and is started again. noticed_s: see Kill. back_s: until a
    successor starts, if it is the leader."""

    name: str
    rank: int
    noticed_s: float
    back_s: float


@dataclass(frozen=True, kw_only=True)
class HangRank:
    """The process of one rank is stopped, and goes on after so many seconds. The instance may have ended by then."""

    name: str
    rank: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PartRanks:
    """Nothing passes between the leader and a follower for so many seconds; letters are lost, or queued until then."""

    name: str
    rank: int
    seconds: float
    queued: bool


RankDeed: TypeAlias = KillRank | HangRank | PartRanks
Deed: TypeAlias = (
    Kill | Hang | Supplant | Stall | Slow | Leave | ChangeRole | Part | KillRouter | KillDetokenizer | Watch | Flush | RankDeed
)
