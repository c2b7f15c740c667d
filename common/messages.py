"""Every message between processes: frozen, and one closed union per inbox.

Owns the vocabulary of the wire. Knows no sockets; `common/wire.py` encodes these. A `match` over an inbox's union ends in
`assert_never`, so a new message breaks the type check at each place that must learn it.

    client ─HTTP─► router ─Generate─► prefill ─Reserve─────────────► decode
                     ▲                   │  ◄─Grant | Decline──────────┤
                     │                   │  ─Renew─► ◄─Renewed─        │   every second while a handoff is open
                     │                   │  ══push chunk by chunk═════►│
                     │◄─TextBatch─ detok ◄─TokenBatch─┤ ─Handoff | Withdraw─►│
                     │◄─TextBatch─ detok ◄─TokenBatch──────────────────┤

Token and page ids travel as packed little-endian int32 (`common.ids.pack_ids`).
"""

import re
from operator import add
from typing import Literal, TypeAlias

import msgspec

from common.errors import TandemError
from common.ids import Generation, Incarnation, InstanceId, Key, Role
from common.pages.layout import KVLayout
from common.sampling_params import SamplingParams

_POOL_DEVICE = re.compile(r"cpu|cuda:[0-9]{1,3}")
WIRE_VERSION = 3
"""Raised when a message changes meaning. Neighbouring versions work together: new fields have defaults."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of every message; the tag on the wire is the class name."""


# --- endings ---------------------------------------------------------------------------------------------------------

FinishReason = Literal["stop", "length", "cancelled"]


class Finished(Message, frozen=True):
    """The request ended as it should. `matched` is the stop string or stop token id that ended it, if one did."""

    reason: FinishReason
    matched: str | int | None = None


class Failed(Message, frozen=True):
    """The request could not be finished. `kind`, `status` and `retryable` are those of the error tree (`common.errors`).

    From an instance it is the end of an attempt: where it is retryable, the router resumes the request as the next attempt.
    """

    message: str
    kind: str = "instance_error"
    status: int = 500
    retryable: bool = False

    @classmethod
    def of(cls, error: TandemError) -> "Failed":
        return cls(message=str(error), kind=error.kind, status=error.status, retryable=error.retryable)


Ending: TypeAlias = Finished | Failed


# --- membership: instance ⇄ router -----------------------------------------------------------------------------------


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    pid: int
    host: str
    device: str


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What must match between instances of one fleet. `fingerprint` is a digest of config and weight index."""

    name: str
    fingerprint: str
    architecture: str
    dtype: str
    vocab_size: int
    context_tokens: int


class PoolDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank publishes once so that peers can write into its pool.

    backend: the transport's name. agent: unique per incarnation. address: base of the pool. wire: opaque to all but the backend.
    spare_pages: pages behind those of the pool, which hold nothing: links are measured by writing there.
    """

    backend: str
    agent: str
    address: int
    total_pages: int
    device: str
    layout: KVLayout
    wire: bytes
    spare_pages: int = 0

    @property
    def pool_bytes(self) -> int:
        return (self.total_pages + self.spare_pages) * self.layout.page_bytes

    @property
    def is_addressable(self) -> bool:
        """Every byte of the pool has an address that fits an int64."""
        return 0 <= self.address < 2**63 - self.pool_bytes

    @property
    def has_known_device(self) -> bool:
        """It is "cpu" or "cuda:N"."""
        return _POOL_DEVICE.fullmatch(self.device) is not None


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: InstanceId
    incarnation: Incarnation
    role: Role
    inbox: str
    """ZeroMQ address on which this instance receives everything."""
    ranks: tuple[RankInfo, ...]
    model: ModelIdentity
    pool: PoolDescriptor
    max_running: int
    wire_version: int = WIRE_VERSION


class Register(Message, frozen=True):
    """instance → router, repeated until Welcome or Refused arrives."""

    instance: InstanceInfo


class Welcome(Message, frozen=True):
    """router → instance: you are a member. The answer to every Register and every Heartbeat, and so the router's own heartbeat.

    dead_after_s: a router that left the heartbeats of so long a time unanswered is dead.
    """

    router: Incarnation
    detokenizer: str
    heartbeat_s: float
    dead_after_s: float = 3.0


class Refused(Message, frozen=True):
    """router → instance: you cannot join, and why. The instance says so and exits."""

    reason: str


class Peers(Message, frozen=True):
    """router → instance: the whole set of instances of the other role; replaces the former set."""

    instances: tuple[InstanceInfo, ...]


LinkState = Literal["connecting", "ready", "lost"]


class LinkTraffic(msgspec.Struct, frozen=True):
    """What was pushed over a link, in totals."""

    pushes: int = 0
    """That arrived."""
    runs: int = 0
    """Contiguous pieces of them."""
    bytes_pushed: int = 0
    push_seconds: float = 0.0
    """From the begin of each push to its end; pushes overlap."""
    handoffs: int = 0
    exposed_seconds: float = 0.0
    """From each first token to its handoff: what the transfers did not hide behind computing."""
    pushes_refused: int = 0
    """Failed before anything was written: no link, no lease, pages that cannot be."""
    pushes_broken: int = 0
    """Failed on the way, and it is proven that nothing of them is under way any more."""
    pushes_unproven: int = 0
    """Failed without that proof: their pages are in quarantine."""

    def __add__(self, other: "LinkTraffic") -> "LinkTraffic":
        return LinkTraffic(*map(add, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))

    @property
    def pushes_failed(self) -> int:
        return self.pushes_refused + self.pushes_broken + self.pushes_unproven


class LinkInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The way from an instance to one life of a peer.

    detail: for people: the library and what it really uses, or why there is no link. bytes_per_s: as measured when it came up;
    None: not measured. host_bytes_per_s: what this host could do in its place, as far as that is known. warning: not empty when
    the link is much slower than that.
    """

    peer: InstanceId
    incarnation: Incarnation
    state: LinkState
    detail: str = ""
    bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None
    warning: str = ""
    traffic: LinkTraffic = LinkTraffic()


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Load in tokens, for a tokens-aware router; requests for people. One instance at one moment."""

    waiting_requests: int = 0
    running_requests: int = 0
    waiting_tokens: int = 0
    running_tokens: int = 0
    pages_free: int = 0
    pages_total: int = 0
    reservations: int = 0
    pushes_in_flight: int = 0
    pages_quarantined: int = 0
    """Held by transfers of which it is not proven that they have ended."""
    oldest_step_s: float = 0.0
    """Age of the oldest step in flight."""
    oldest_transfer_s: float = 0.0
    """How long the longest waiting transfer has made no progress; also the age of a turn of the transfer thread."""


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the incarnation began."""

    requests_accepted: int = 0
    requests_ended: int = 0
    prompt_tokens_computed: int = 0
    tokens_generated: int = 0
    steps: int = 0
    pages_pushed: int = 0
    bytes_pushed: int = 0
    pages_received: int = 0
    bytes_received: int = 0
    handoffs: int = 0
    handoffs_lost: int = 0
    pages_corrupt: int = 0
    preemptions: int = 0
    pushes_failed: int = 0
    push_seconds: float = 0.0
    """From the begin of each push to its end; pushes overlap."""
    exposed_seconds: float = 0.0
    """From each first token to its handoff: what the transfers did not hide behind computing."""
    messages_stale: int = 0
    frames_refused: int = 0
    messages_lost: int = 0


class Heartbeat(Message, frozen=True):
    """instance → router, every `heartbeat_s`."""

    id: InstanceId
    incarnation: Incarnation
    load: Load
    counters: Counters
    links: tuple[LinkInfo, ...] = ()
    draining: bool = False


class Goodbye(Message, frozen=True):
    """instance → router: this incarnation leaves in order and takes no more requests."""

    id: InstanceId
    incarnation: Incarnation


class Drain(Message, frozen=True):
    """router → instance: take no more requests, end those that wait so that they are resumed elsewhere, finish the rest, exit."""


# --- requests: router ⇄ instance -------------------------------------------------------------------------------------


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """When a request is to be served. Durations, not times: clocks differ between hosts.

    priority: the lower, the earlier (as in vLLM). age_s: since the client's request arrived, when this was sent; among equals the
    older is earlier. timeout_s: what is left of its time; None: the receiver's own limit alone.
    """

    priority: int = 0
    age_s: float = 0.0
    timeout_s: float | None = None


class Generate(Message, frozen=True):
    """Serve this request. `decode` is None when the receiving instance serves it alone (local prefill, or one token).

    first: number of the first token to emit. When an answer is resumed it is above 0, and the last `first` ids of the prompt are
    the answer's tokens so far; `sampling.max_new_tokens` counts from there.
    """

    key: Key
    prompt: bytes
    sampling: SamplingParams
    decode: InstanceId | None = None
    first: int = 0
    terms: Terms = Terms()


class Probe(Message, frozen=True):
    """router → instance: nothing was heard of these requests for a while. What do you know of them?"""

    keys: tuple[Key, ...]


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """Where a request stands on an instance. next_token: number of the token it emits next; None: it does not know the key."""

    key: Key
    next_token: int | None


class Probed(Message, frozen=True):
    """instance → router: one standing for each key of a Probe."""

    id: InstanceId
    incarnation: Incarnation
    standings: tuple[Standing, ...]


class Cancel(Message, frozen=True):
    """The request has ended for the client: stop, and bring its pages home. Idempotent; unknown keys are remembered a while."""

    key: Key


# --- handoff: prefill ⇄ decode ---------------------------------------------------------------------------------------


class Reserve(Message, frozen=True):
    """prefill → decode: lease pages for this prompt; its KV will be written into them.

    incarnation: the writer's. first, terms: as in Generate. sent_s: the writer's clock, which comes back in Grant.
    """

    key: Key
    incarnation: Incarnation
    prompt: bytes
    sampling: SamplingParams
    sent_s: float
    first: int = 0
    terms: Terms = Terms()


class Grant(Message, frozen=True):
    """decode → prefill: the reservation exists.

    pages: packed page ids for the prompt's KV in token order, `layout.pages_for(prompt)` of them, of which the first
    `have_tokens // page_size` are already there and must not be written. sent_s, write_lease_s: the writer may write until
    sent_s + write_lease_s on its own clock; sent_s is the latest word of the writer (Reserve or Renew) that the reader has heard.
    """

    key: Key
    generation: Generation
    pages: bytes
    sent_s: float
    write_lease_s: float = msgspec.field(name="lease_s")
    have_tokens: int = 0


class Decline(Message, frozen=True):
    """decode → prefill: there will be no grant for this key, and what the client is told."""

    key: Key
    failed: Failed


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """A handoff that the writer holds open. generation: 0 while no grant has arrived.

    stuck: it was given up, but a write may still be under way, so the pages must wait.
    """

    key: Key
    generation: Generation
    stuck: bool = False


class Renew(Message, frozen=True):
    """prefill → decode, every second while a handoff is open: I am alive, these are open, and every other one is over.

    So one message renews every lease of the pair, and heals what a lost Grant, Handoff, Withdraw or Decline left behind.
    """

    incarnation: Incarnation
    sent_s: float
    claims: tuple[Claim, ...]


class Renewed(Message, frozen=True):
    """decode → prefill: you may write until sent_s + write_lease_s on your clock, but not for the keys in `over`: drain
    and withdraw them. (They were cancelled, or are unknown here.)"""

    sent_s: float
    write_lease_s: float = msgspec.field(name="lease_s")
    over: tuple[Key, ...] = ()


class Handoff(Message, frozen=True):
    """prefill → decode: every write has completed; decode from here. `first_token` is number `first` of the answer and on its way
    to the client. digests: with --verify-pages, one CRC-32 (little-endian uint32) for each pushed page, in token order."""

    key: Key
    generation: Generation
    first_token: int
    pushed_pages: int
    pushed_bytes: int
    digests: bytes = b""


class Withdraw(Message, frozen=True):
    """prefill → decode: no write for this key is or will be under way; its pages may be reused."""

    key: Key


# --- the text pipeline -----------------------------------------------------------------------------------------------


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one request, the first of them number `first` of its answer. `ending` follows the last of them."""

    key: Key
    first: int
    token_ids: tuple[int, ...]
    ending: Ending | None = None


class TokenBatch(Message, frozen=True):
    """instance → detokenizer: what one step brought."""

    deltas: tuple[TokenDelta, ...]


class Open(Message, frozen=True):
    """router → detokenizer: expect tokens of this request.

    stop: strings at which the answer ends (they are trimmed). context: packed ids that precede the first token to expect and
    decide how it is decoded. first: its number; when an answer is resumed it is above 0, and the last `first` ids of the context
    are the answer's tokens so far. text: the text that was delivered for those.
    """

    key: Key
    stop: tuple[str, ...] = ()
    first: int = 0
    context: bytes = b""
    text: str = ""
    skip_special_tokens: bool = True
    life_s: float = 3600.0
    """The answer is forgotten after this, whatever was lost on the way."""


class Close(Message, frozen=True):
    """router → detokenizer: forget this request."""

    key: Key


class TextDelta(msgspec.Struct, frozen=True, array_like=True):
    """Text of one request in order, exactly once. `text` may be empty while a character or stop string is incomplete."""

    key: Key
    first: int
    token_ids: tuple[int, ...]
    text: str
    ending: Ending | None = None


class TextBatch(Message, frozen=True):
    """detokenizer → router."""

    deltas: tuple[TextDelta, ...]


class DetokenizerHeartbeat(Message, frozen=True):
    """detokenizer → router, every second. dropped: token deltas that were of no use, since it started."""

    open_answers: int
    early_answers: int
    dropped: int


RouterInbox: TypeAlias = Register | Heartbeat | Goodbye | Probed | TextBatch | DetokenizerHeartbeat
FromRouter: TypeAlias = Welcome | Refused | Peers | Drain | Generate | Cancel | Probe
PrefillInbox: TypeAlias = FromRouter | Grant | Decline | Renewed
DecodeInbox: TypeAlias = FromRouter | Reserve | Renew | Handoff | Withdraw
DetokenizerInbox: TypeAlias = TokenBatch | Open | Close
AnyMessage: TypeAlias = RouterInbox | PrefillInbox | DecodeInbox | DetokenizerInbox
