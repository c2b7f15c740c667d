"""What a scheduler asks of its transfers, and what these report: the commands and events of the port `Transfers`.

Owns the vocabulary. Knows no transport. The leader of an instance with several ranks sends the same commands to its followers and
receives the same events (`common/messages/ranks.py`), so they are messages; only a push is packed on its way.
"""

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from common.ids import AttemptId, Incarnation, InstanceId, Int32Array, Ticket, check_ids, pack_ids, unpack_ids
from common.messages.fleet import InstanceInfo
from common.messages.heartbeats import LinkInfo
from common.ranges import Count, Moment, Seconds

# --- commands --------------------------------------------------------------------------------------------------------------


class Connect(msgspec.Struct, frozen=True, tag="ConnectOrder"):
    """Changes of the set of peers to write to: links to `peers` are made in the background, in place of links to former lives of
    theirs, and links to those that left are closed. A link to the same life that is there already stays as it is."""

    peers: tuple[InstanceInfo, ...]
    left: tuple[InstanceId, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """Write our pages into a peer's: source_pages[i] → target_pages[i]. [pages] int32 each.

    The incarnation makes a push that was meant for a dead process fail instead of landing in its successor.
    """

    ticket: Ticket
    peer: InstanceId
    incarnation: Incarnation
    source_pages: Int32Array
    target_pages: Int32Array
    key: AttemptId
    """The request, for traces."""
    layers: range | None = None
    """The layers to write; None: all."""


class PackedPush(msgspec.Struct, frozen=True, tag="PushOrder"):
    """A `Push` as it travels; pages are packed, layers are first and end."""

    ticket: Ticket
    peer: InstanceId
    incarnation: Incarnation
    source_pages: bytes
    target_pages: bytes
    key: AttemptId
    layers: tuple[Count, Count] | None

    def __post_init__(self) -> None:
        check_ids(self.source_pages, self.target_pages)

    @classmethod
    def pack(cls, push: Push) -> "PackedPush":
        layers = None if push.layers is None else (push.layers.start, push.layers.stop)
        source, target = pack_ids(push.source_pages), pack_ids(push.target_pages)
        return cls(push.ticket, push.peer, push.incarnation, source, target, push.key, layers)

    def unpack(self) -> Push:
        layers = None if self.layers is None else range(*self.layers)
        source, target = unpack_ids(self.source_pages), unpack_ids(self.target_pages)
        return Push(self.ticket, self.peer, self.incarnation, source, target, self.key, layers)


class Allow(msgspec.Struct, frozen=True, tag="AllowOrder"):
    """Pushes to the peer may be written until `until_s`, and not at all without an Allow. It never moves back."""

    peer: InstanceId
    incarnation: Incarnation
    until_s: Moment
    """On the clock of the process whose transfers get this. A follower's is no later than the leader's."""


class Settle(msgspec.Struct, frozen=True, tag="SettleOrder"):
    """Copy what peers wrote to us from our receive buffers into the pages, then report Settled."""

    key: AttemptId


class Expect(msgspec.Struct, frozen=True, tag="ExpectOrder"):
    """Expect this many writes of peers; while there are any, drive progress often."""

    writes: Count
    distant: bool = False
    """Some may come from another host. Over TCP they arrive only as fast as we drive progress."""


TransferCommand: TypeAlias = Connect | Push | Allow | Settle | Expect

# --- events ----------------------------------------------------------------------------------------------------------------


class PushDone(msgspec.Struct, frozen=True, tag="PushDoneNews"):
    """Every byte of the push is visible at the target."""

    ticket: Ticket
    pushed_bytes: Count
    seconds: Seconds
    runs: Count = 1


class PushFailed(msgspec.Struct, frozen=True, tag="PushFailedNews"):
    """The push did not complete."""

    ticket: Ticket
    reason: str
    quiescent: bool
    """No byte of it is or will be under way."""
    begun: bool = True
    """Something may have been written."""


class LinkChanged(msgspec.Struct, frozen=True, tag="LinkNews"):
    """A link came up, or was lost with everything in flight on it."""

    link: LinkInfo


class Settled(msgspec.Struct, frozen=True, tag="SettledNews"):
    """Everything that had arrived for the key's reservation before Settle is now in its pages."""

    key: AttemptId


TransferEvent: TypeAlias = PushDone | PushFailed | LinkChanged | Settled
