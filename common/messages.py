"""Every message between processes: frozen, and one closed union per inbox.

Owns the vocabulary of the wire. Knows no sockets; `common/wire.py` encodes these. A `match` over an inbox's union ends in
`assert_never`, so a new message breaks the type check at each place that must learn it.

    client ─HTTP─► router ─Generate─► prefill ─Reserve─────────────► decode
                     ▲                   │  ◄─Grant | Decline──────────┤
                     │                   │  ══push chunk by chunk═════►│
                     │◄─TextBatch─ detok ◄─TokenBatch─┤ ─Handoff | Withdraw─►│
                     │◄─TextBatch─ detok ◄─TokenBatch──────────────────┤

Token and page ids travel as packed little-endian int32 (`common.ids.pack_ids`).
"""

import re
from typing import Literal, TypeAlias

import msgspec

from common.errors import TandemError
from common.ids import Generation, Incarnation, InstanceId, Key, Role
from common.pages.layout import KVLayout
from common.sampling_params import SamplingParams

_POOL_DEVICE = re.compile(r"cpu|cuda:[0-9]{1,3}")
WIRE_VERSION = 1
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
    """The request could not be finished. `kind` and `status` are those of the error tree (`common.errors`)."""

    message: str
    kind: str = "instance_error"
    status: int = 500

    @classmethod
    def of(cls, error: TandemError) -> "Failed":
        return cls(message=str(error), kind=error.kind, status=error.status)


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
    """

    backend: str
    agent: str
    address: int
    total_pages: int
    device: str
    layout: KVLayout
    wire: bytes

    @property
    def pool_bytes(self) -> int:
        return self.total_pages * self.layout.page_bytes

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
    """router → instance: you are a member. An answer to every Register, so a lost one costs only time."""

    router: Incarnation
    detokenizer: str
    heartbeat_s: float


class Refused(Message, frozen=True):
    """router → instance: you cannot join, and why. The instance says so and exits."""

    reason: str


class Peers(Message, frozen=True):
    """router → instance: the whole set of instances of the other role; replaces the former set."""

    instances: tuple[InstanceInfo, ...]


LinkState = Literal["connecting", "ready", "lost"]


class LinkInfo(msgspec.Struct, frozen=True, kw_only=True):
    peer: InstanceId
    incarnation: Incarnation
    state: LinkState
    detail: str = ""


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
    pushes_failed: int = 0
    push_seconds: float = 0.0
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


# --- requests: router → instance -------------------------------------------------------------------------------------


class Generate(Message, frozen=True):
    """Serve this request. `decode` is None when the receiving instance serves it alone (local prefill, or one token)."""

    key: Key
    prompt: bytes
    sampling: SamplingParams
    decode: InstanceId | None = None


class Cancel(Message, frozen=True):
    """The request has ended for the client: stop, and bring its pages home. Idempotent; unknown keys are remembered a while."""

    key: Key


# --- handoff: prefill ⇄ decode ---------------------------------------------------------------------------------------


class Reserve(Message, frozen=True):
    """prefill → decode: lease pages for this prompt; its KV will be written into them."""

    key: Key
    source: InstanceId
    prompt: bytes
    sampling: SamplingParams


class Grant(Message, frozen=True):
    """decode → prefill: the reservation exists.

    pages: packed page ids for the prompt's KV in token order, `layout.pages_for(prompt)` of them, of which the first
    `have_tokens // page_size` are already there and must not be written.
    """

    key: Key
    generation: Generation
    pages: bytes
    have_tokens: int = 0


class Decline(Message, frozen=True):
    """decode → prefill: there will be no grant for this key, and what the client is told."""

    key: Key
    failed: Failed


class Handoff(Message, frozen=True):
    """prefill → decode: every write has completed; decode from here. `first_token` is number 0 and on its way to the client."""

    key: Key
    generation: Generation
    first_token: int
    pushed_pages: int
    pushed_bytes: int


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


RouterInbox: TypeAlias = Register | Heartbeat | Goodbye | TextBatch
FromRouter: TypeAlias = Welcome | Refused | Peers | Generate | Cancel
PrefillInbox: TypeAlias = FromRouter | Grant | Decline
DecodeInbox: TypeAlias = FromRouter | Reserve | Handoff | Withdraw
DetokenizerInbox: TypeAlias = TokenBatch | Open | Close
AnyMessage: TypeAlias = RouterInbox | PrefillInbox | DecodeInbox | DetokenizerInbox
