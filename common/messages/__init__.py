"""Every message between processes: frozen, and one closed union per inbox.

Owns the vocabulary of the wire: one file per topic, and here the unions, and what each version of the wire has added. Knows no
sockets; `common/mail.py` encodes these. A `match` over an inbox's union ends in `assert_never`, so a new message breaks the type
check at each place that must learn it.

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

    router ─StageWeights, SwitchWeights, DropWeights, HoldSteps─► instance ─WeightsStaged─► router     see `variants.py`
           ─DoTask────────────────────────────────────────────► instance ─TaskDone──────► router
           ─SetAdapters───────────────────────────────────────► instance ─AdaptersHeld──► router
           ─TakeRole──────────────────────────────────────────► instance ─Register, Heartbeat | RoleKept─► router

    router ─Trace─► instance, detok ─Spans─► router                 only while somebody traces the fleet

    rank 0 ─ToFollower─► rank r ─ToLeader─► rank 0                  within one instance: `common/messages/ranks.py`

Each field is documented below its line, save those that mean the same everywhere: `key` is the request and attempt that a message
is about; `id` and `incarnation` are the life of the instance that sends it. Token and page ids that are `bytes` are packed
little-endian int32 (`common.ids.pack_ids`).

Releases whose wire versions are neighbours work together, so VERSIONS leaves out what every neighbour has. Both ends of a link
know each other's version, because each frame names its sender's, and they speak the lower one:

    a field is added      it has a default, and a reader that does not know it ignores it
    a type is added       nobody is sent a message of it, or with it, who does not know it (`Mailbox.send`); where it is needed,
                          an older instance is refused by name before (`Member.check_knows`)
    anything else         breaks the neighbour: `tests/common/test_versions.py` holds all types against the released ones

A detokenizer writes to no instance, so instances never know more of it than that it is a neighbour. Ranks of one instance are of
one release, so what they send each other (`ranks.py`) is not in the table.
"""

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

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
from common.messages.text import (
    AnswerParts,
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
from common.messages.variants import (
    AdaptersHeld,
    DoTask,
    DropWeights,
    HoldSteps,
    SetAdapters,
    StageWeights,
    SwitchWeights,
    TaskDone,
    WeightsStaged,
)

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


# --- versions ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WireVersion:
    """What a version has added to the one before it."""

    words: str
    """For people: what it is for."""
    types: tuple[str, ...] = ()
    """Messages and parts of them, by the names of their classes."""
    fields: tuple[str, ...] = ()
    """Fields of types that were there before, as Type.field."""


VERSIONS = {
    15: WireVersion(
        "An instance that leaves says whether its transfers are proven to have ended, may serve in another role, measures what "
        "the KV adds to a step that its rows hold, and tells log probabilities of chosen tokens and the chunks of a prompt.",
        types=("TakeRole", "RoleKept", "AnswerParts"),
        fields=(
            *("Goodbye.is_quiet", "Goodbye.suspects", "Heartbeat.serves_whole", "Generate.incarnation"),
            *("Load.held_token_s", "SamplingParams.logprob_ids", "Counters.tokens_drafted", "Counters.tokens_accepted"),
            *("Times.chunks", "TokenDelta.drafts", "TextDelta.drafts", "TextDelta.thought_tokens"),
            *("ExpectAnswer.parts", "ExpectAnswer.stop_token_ids", "Refused.is_mismatch"),
        ),
    ),
}
SINCE = {name: number for number, version in VERSIONS.items() for name in version.types}
OLDEST = WIRE_VERSION - 1
"""What a peer speaks of which nothing has been heard yet."""


def since(message: msgspec.Struct) -> int:
    """The first version that understands this message, or this part of one."""
    carried = since(message.task) if isinstance(message, DoTask) else OLDEST
    return max(SINCE.get(type(message).__name__, OLDEST), carried)
