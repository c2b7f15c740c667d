"""Every message between processes: frozen, and one closed union per inbox.

Owns the vocabulary of the wire: one file per topic, and the unions here. Knows no sockets; `common/mail.py` encodes these.
A `match` over an inbox's union ends in `assert_never`, so a new message breaks the type check at each place that must learn it.

    client ─HTTP─► router ─Generate─► prefill ─Reserve─────────────► decode
                     ▲                   │  ◄─Grant | Decline──────────┤   declined: the next candidate is asked
                     │◄──────Placed──────┤                             │
                     │                   │  ─Renew─► ◄─Renewed─        │   every second while a handoff is open
                     │                   │  ══push chunk by chunk═════►│
                     │◄─TextBatch─ detok ◄─TokenBatch─┤ ─Handoff | Withdraw─►│
                     │◄─TextBatch─ detok ◄─TokenBatch──────────────────┤

    instance ─Register─► router ─Welcome | Refused─► instance       at each router; a Welcome answers Heartbeats too
             ◄────────────Peers, TellLinks, Drain, Probe, Repeat    Peers: what has changed, or the whole set
             ◄────────────FlushCache, TellCache
             ─Heartbeat, LinkReport, Goodbye─►                      LinkReport: prefill instances, when a link changes
             ─CacheChanges─►                                        to the routers that asked with TellCache
             ─Probed─► detok ─Probed─► router                       the answer to a Probe, behind the tokens

    router ─StageWeights, SwitchWeights, DropWeights, HoldSteps─► instance ─WeightsStaged─► router     see `weights.py`
           ─DoTask────────────────────────────────────────────► instance ─TaskDone──────► router     see `tasks.py`
           ─SetAdapters───────────────────────────────────────► instance ─AdaptersHeld──► router     see `adapters.py`
           ─TakeRole──────────────────────────────────────────► instance ─Register, Heartbeat | RoleKept─► router

    router ─Trace─► instance, detok ─Spans─► router                 only while somebody traces the fleet

    rank 0 ─ToFollower─► rank r ─ToLeader─► rank 0                  within one instance: `common/messages/ranks.py`

Each field is documented below its line, save those that mean the same everywhere: `key` is the request and attempt that a message
is about; `id` and `incarnation` are the life of the instance that sends it. Token and page ids that are `bytes` are packed
little-endian int32 (`common.ids.pack_ids`).
"""

from typing import TypeAlias

from common.messages.adapters import AdaptersHeld, SetAdapters
from common.messages.base import WIRE_VERSION, Message
from common.messages.fleet import (
    Drain,
    EngineChoices,
    FlushCache,
    Goodbye,
    InstanceInfo,
    ModelIdentity,
    Peers,
    PoolDescriptor,
    RankInfo,
    Refused,
    Register,
    RoleKept,
    TakeRole,
    TellLinks,
    Welcome,
)
from common.messages.handoffs import Claim, Decline, Grant, Handoff, Renew, Renewed, Reserve, Withdraw
from common.messages.heartbeats import (
    CacheChanges,
    Counters,
    Heartbeat,
    LinkInfo,
    LinkReport,
    LinkState,
    LinkTraffic,
    Load,
    TellCache,
)
from common.messages.ranks import ToFollower, ToLeader
from common.messages.requests import (
    Cancel,
    Ending,
    Failed,
    Finished,
    FinishReason,
    Generate,
    Placed,
    Probe,
    Probed,
    Repeat,
    Standing,
    Terms,
)
from common.messages.tasks import DoTask, TaskDone
from common.messages.text import (
    DetokenizerHeartbeat,
    ExpectAnswer,
    ForgetAnswer,
    TextBatch,
    TextDelta,
    TokenBatch,
    TokenDelta,
    TokenLogprob,
    TokenLogprobs,
    pack_logprobs,
    unpack_logprobs,
)
from common.messages.traces import Span, SpanArgs, Spans, Timeline, Times, Trace, pack_spans, unpack_spans
from common.messages.weights import DropWeights, HoldSteps, StageWeights, SwitchWeights, WeightsStaged

FromInstance: TypeAlias = (
    Register | Heartbeat | LinkReport | CacheChanges | Goodbye | Placed | WeightsStaged | TaskDone | AdaptersHeld | RoleKept
)
WeightsOrder: TypeAlias = StageWeights | SwitchWeights | DropWeights | HoldSteps
OrderOfRouter: TypeAlias = WeightsOrder | Trace | DoTask | SetAdapters | TakeRole
"""What only a router that has welcomed an instance may order, whatever role that has."""
RouterInbox: TypeAlias = FromInstance | Probed | TextBatch | DetokenizerHeartbeat | Spans
FromRouter: TypeAlias = (
    Welcome | Refused | Peers | Drain | FlushCache | TellCache | Generate | Cancel | Probe | Repeat | OrderOfRouter
)
PrefillInbox: TypeAlias = FromRouter | TellLinks | Grant | Decline | Renewed
DecodeInbox: TypeAlias = FromRouter | Reserve | Renew | Handoff | Withdraw
InstanceInbox: TypeAlias = PrefillInbox | DecodeInbox
"""An instance may change its role, so its mail takes what either role gets."""
AnswerMessage: TypeAlias = TokenBatch | ExpectAnswer | ForgetAnswer | Probed
DetokenizerInbox: TypeAlias = AnswerMessage | Trace
AnyMessage: TypeAlias = RouterInbox | InstanceInbox | DetokenizerInbox | ToFollower | ToLeader
