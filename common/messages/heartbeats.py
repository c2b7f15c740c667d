"""What an instance reports about itself: its load and its totals at every heartbeat, its links when they change, and to routers
that ask, which blocks are in its prefix cache.

Owns the figures. Does not know who uses them: `router/metrics.py` makes a metric of each field of Load and Counters, and
`common/pages/radix_cache.py` says what a block is.
"""

from operator import add
from typing import Literal, TypeAlias

import msgspec

from common.ids import Digest, Incarnation, InstanceId
from common.messages.base import Message
from common.messages.traces import Timeline
from common.messages.variants import WeightVersion
from common.ranges import Amount, Count, Seconds
from common.step_cost import StepCost


class TellCache(Message, frozen=True):
    """router → instance: send the names of all blocks in the prefix cache, and from now on what changes."""


class CacheChanges(Message, frozen=True, omit_defaults=True):
    """instance → router: which blocks have come into its prefix cache and left it, or all that are there.

    A router applies changes only to the version that they follow. Heartbeats say the latest version: who lacks it for longer than
    a heartbeat asks again with TellCache.
    """

    id: InstanceId
    incarnation: Incarnation
    version: Count
    """The version of the cache with this message applied. It rises with every message of changes."""
    since: Count | None = None
    """The version that these changes follow; None: `stored` is a part of all blocks at this version."""
    stored: bytes = b""
    """Names of blocks: little-endian uint64, in any order."""
    gone: bytes = b""
    """Names of blocks that left."""
    part: Count = 0
    """The number of this part of all blocks."""
    more: bool = False
    """Another part follows: act when all are there."""
    weights: Digest = Digest("")
    """What computed the blocks that are there now."""


LinkState: TypeAlias = Literal["connecting", "ready", "lost"]


class LinkTraffic(msgspec.Struct, frozen=True):
    """What was pushed over a link, in totals."""

    pushes: Count = 0
    """Pushes that arrived."""
    runs: Count = 0
    """Contiguous pieces that those pushes consisted of."""
    bytes_pushed: Count = 0
    """Bytes that those pushes wrote."""
    push_seconds: Seconds = 0.0
    """Sum over those pushes of the time from begin to end; pushes overlap."""
    handoffs: Count = 0
    """Requests handed off."""
    exposed_seconds: Seconds = 0.0
    """Sum over handoffs of the time from the first token to the handoff: what computing did not hide."""
    pushes_refused: Count = 0
    """Pushes that failed before anything was written: no link, no lease, or invalid pages."""
    pushes_broken: Count = 0
    """Pushes that failed on the way, and none of their writes is in flight any more."""
    pushes_unproven: Count = 0
    """Pushes that failed and may still write: their pages are in quarantine."""

    def __add__(self, other: "LinkTraffic") -> "LinkTraffic":
        return LinkTraffic(*map(add, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))

    @property
    def pushes_failed(self) -> int:
        return self.pushes_refused + self.pushes_broken + self.pushes_unproven


class LinkInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The link from an instance to one life of a peer."""

    peer: InstanceId
    """Where it leads."""
    incarnation: Incarnation
    """The peer's life."""
    state: LinkState
    """Only a "ready" link takes pushes."""
    detail: str = ""
    """For people: the library and what it really uses, or why there is no link."""
    bytes_per_s: Amount | None = None
    """Speed as measured when the link came up; None: not measured."""
    host_bytes_per_s: Amount | None = None
    """Speed that this host could reach instead; None: not known."""
    warning: str = ""
    """For people; not empty when the link is much slower than the host could be."""
    traffic: LinkTraffic | None = None
    """Totals of this instance towards the peer, in answer to TellLinks; None otherwise."""


class Load(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The load of one instance at one moment: in tokens for a tokens-aware router, in requests for people."""

    waiting_requests: Count = 0
    """Requests that wait for memory or for their turn."""
    running_requests: Count = 0
    """Requests that are being computed."""
    waiting_tokens: Count = 0
    """Prompt tokens of the waiting requests; on prefill without those that were cached when it was last looked."""
    running_tokens: Count = 0
    """Tokens of the running requests: on prefill what is left to compute, on decode what is held."""
    tokens_to_compute: Count = 0
    """Prompt tokens that are still to be computed here, of waiting and running requests, without those that are cached."""
    pages_free: Count = 0
    """Pages that nobody holds, the cached ones among them."""
    pages_cached: Count = 0
    """Those of them that hold KV of earlier requests, as long as no other one needs them."""
    pages_total: Count = 0
    """Pages of the pool."""
    reservations: Count = 0
    """Reservations that wait for their handoff."""
    pushes_in_flight: Count = 0
    """Pushes that were posted and have not ended."""
    pages_quarantined: Count = 0
    """Pages held by transfers that are not proven to have ended."""
    oldest_step_s: Seconds = 0.0
    """For how long the oldest step in flight has not moved, less a few times what steps of its size take."""
    oldest_transfer_s: Seconds = 0.0
    """Seconds without progress, of the transfer that has had none for longest or of the transfer thread itself."""
    step_s: Seconds = 0.0
    """Measured of late: seconds that any step takes. 0: not measured yet, here and in the next three."""
    chunk_token_s: Seconds = 0.0
    """Seconds that each prompt token adds to a step."""
    decode_row_s: Seconds = 0.0
    """Seconds that each decode row adds to a step."""
    held_token_s: Seconds = 0.0
    """Seconds that each token of KV adds which the decode rows hold."""

    @property
    def pages_in_use(self) -> int:
        """Pages that something may still read or write."""
        return self.pages_total - self.pages_free

    @property
    def cost(self) -> StepCost:
        """The last four. They are fields of their own because older versions send them so."""
        return StepCost(self.step_s, self.chunk_token_s, self.decode_row_s, self.held_token_s)


class Counters(msgspec.Struct, kw_only=True):
    """Totals since the incarnation began. An instance counts in one of these, and reports copies of it."""

    requests_accepted: Count = 0
    """Requests taken in."""
    requests_ended: Count = 0
    """Requests ended, however."""
    prompt_tokens_computed: Count = 0
    """Prompt tokens that went through the model here."""
    prompt_tokens_asked: Count = 0
    """Prompt tokens of the requests that were admitted to be computed here."""
    prompt_tokens_hit: Count = 0
    """Those of them that were in the prefix cache."""
    pages_evicted: Count = 0
    """Cached pages that were given to other requests."""
    pages_spared: Count = 0
    """Pages that were not pushed, because the peer had them in its prefix cache."""
    tokens_generated: Count = 0
    """Tokens sent to the detokenizer."""
    tokens_drafted: Count = 0
    """Tokens that were drafted and verified."""
    tokens_accepted: Count = 0
    """Those of them that were right, and are in an answer."""
    steps: Count = 0
    """Forwards."""
    pages_pushed: Count = 0
    """Pages written into peers, and handed off."""
    bytes_pushed: Count = 0
    """Bytes written into peers, by all ranks."""
    pages_received: Count = 0
    """Pages that peers handed off."""
    bytes_received: Count = 0
    """Bytes of those pages."""
    handoffs: Count = 0
    """Requests handed off, on either side."""
    handoffs_lost: Count = 0
    """Reservations whose writer no longer claims them, though no handoff has arrived."""
    reservations_moved: Count = 0
    """How often another decode instance was asked for a reservation, because the former had no room, left or was out of reach."""
    pages_corrupt: Count = 0
    """Pages whose digest differed after the transfer."""
    preemptions: Count = 0
    """Requests whose memory was taken for an older one."""
    pushes_failed: Count = 0
    """Pushes that failed, for any reason."""
    push_seconds: Seconds = 0.0
    """Sum over pushes of the time from begin to end; pushes overlap."""
    exposed_seconds: Seconds = 0.0
    """Sum over handoffs of the time from the first token to the handoff: what computing did not hide."""
    messages_stale: Count = 0
    """Messages about requests or lives that are over."""
    frames_refused: Count = 0
    """Frames that arrived and were no message."""
    messages_lost: Count = 0
    """Messages that could not be sent."""
    timelines_dropped: Count = 0
    """Timelines of attempts that were dropped unsent, because too many waited for a heartbeat."""


class Heartbeat(Message, frozen=True, omit_defaults=True):
    """instance → router, every `heartbeat_s`. Fields that have their defaults are not sent."""

    id: InstanceId
    incarnation: Incarnation
    load: Load
    """Now."""
    counters: Counters
    """Since it began."""
    peers_version: Count = 0
    """The version of the last Peers that it has applied, from the router that it writes to; 0: none."""
    links_version: Count = 0
    """The version of its last LinkReport; 0: none. The router asks with TellLinks when it has missed one."""
    cache_version: Count = 0
    """The version of its last CacheChanges; 0: none. A router that follows its cache asks with TellCache when it has missed
    one."""
    draining: bool = False
    """It takes no more requests."""
    weights: Digest = Digest("")
    """What it computes with."""
    weight_version: WeightVersion = ""
    """What people call them."""
    weight_changes: Count = 0
    """How often it has changed them. A report that was overtaken by a later one is known by it."""
    staged_update: Count = 0
    """The update of which it has weights staged beside those in use, or begins to; 0: none."""
    holding: bool = False
    """A router wants no step."""
    adapters_version: Count = 0
    """The version of its last AdaptersHeld; 0: none."""
    serves_whole: bool = False
    """A decode instance that gets whole requests too: its role is both."""
    timelines: tuple[Timeline, ...] = ()
    """The timelines of attempts that have left it, in order. Each is sent once: a router that misses a heartbeat misses them."""


class LinkReport(Message, frozen=True):
    """prefill instance → router: the links that changed since the last report, or all of them."""

    id: InstanceId
    incarnation: Incarnation
    version: Count
    """Rises with every report of changes."""
    since: Count | None = None
    """The report that these changes follow; None: `links` are all that there are, with their traffic."""
    links: tuple[LinkInfo, ...] = ()
    """As they are now. Links to peers that left are not reported: the router knows."""
