"""The messages between the ranks of one instance: the leader, which is rank 0, and its followers.

Owns the vocabulary between ranks. Does not know schedulers: a follower obeys plans and commands, and reports their results.

    start     follower ─RankHello, again and again──────────► leader      until every rank is there
                       ◄─RankWelcome | RankRefused──────────              to all of them at once: now they load
                       ─Offer(pages that it can hold)───────►
                       ◄─Agreed(pages that all use)─────────
                       ─RankReady(pool)─────────────────────►             when all are ready, the leader joins the fleet

    serving            ◄─Launch(plan)───────────────────────
                       ─LayersReached…, StepReturned(CRC)───►             a step is complete when every rank has returned it
                       ◄─TransferOrder(Connect | Push | …)──
                       ─Events(push done, link changed …)───►
                       ◄─PrepareGrammar, DropGrammars───────
                       ─GrammarPrepared─────────────────────►
                       ◄─DoOnRank, FreeAdapter, SwitchOnRank, DropOnRank
                       ─RankDone────────────────────────────►
                       ◄─Ping(sent)─────────────────────────              every PING_S; the answer tells how clocks differ
                       ─Pong(sent, heard)───────────────────►

    end                ─AskDrain────────────────────────────►             the follower was told to stop: all drain
                       ─RankFailed(reason)──────────────────►             it cannot go on: the instance ends
                       ◄─End(reason)────────────────────────              drained, or a rank is lost

What holds, and what ends the instance when it does not:

1. After RankWelcome, the messages of each direction are numbered 1, 2, 3, … without gaps.
2. Each side hears from the other at least every few seconds: the leader pings, the follower answers at once.
3. Every rank samples the same tokens in every step, which a CRC-32 of them shows.
4. A page id means the same page on every rank, and only the leader's scheduler gives pages out.
5. A write lease of a follower never ends later than the leader's.
6. A row begins with a grammar that the follower holds: between its PrepareGrammar and its DropGrammars.

Each life of a rank has a name of its own as a sender (`rank_name`), so a message of a former life is known and dropped.
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from common.ids import Digest, Incarnation, InstanceId, check_ids
from common.messages.base import WIRE_VERSION, Message
from common.messages.fleet import EngineChoices, ModelIdentity, PoolDescriptor, RankInfo
from common.messages.requests import Failed, Owner
from common.messages.transfers import Allow, Connect, Expect, PackedPush, Settle, TransferEvent
from common.messages.variants import RESULT_CHARS, Task, WeightsSource
from common.ranges import Count, Moment, Seconds, TokenId
from common.sampling_params import Grammar, SamplingParams


def rank_name(instance: str, rank: int, life: Incarnation) -> InstanceId:
    """The sender's name of one life of a rank."""
    return InstanceId(f"{instance}.rank-{rank}.{life}")


# --- start ---------------------------------------------------------------------------------------------------------------


class RankHello(Message, frozen=True):
    """follower → leader, repeated until an answer comes."""

    rank: Count
    """1 or higher."""
    ranks: Count
    """The number that --tp gives."""
    address: str
    """ZeroMQ address of its inbox."""
    info: RankInfo
    """For people."""
    setup: dict[str, str]
    """What must be equal on all ranks: flags, versions and the checkpoint's fingerprint, each by its name."""
    wire_version: Count = WIRE_VERSION


class RankWelcome(Message, frozen=True):
    """leader → follower: every rank is there: load."""

    meeting: str
    """host:port where the ranks' collectives meet; the leader listens there."""


class RankRefused(Message, frozen=True):
    """leader → follower: it cannot be a rank of this instance, and must exit."""

    reason: str
    """For people."""


class Numbered(Message, frozen=True, kw_only=True):
    """Base of the messages after the welcome."""

    number: Count = 0
    """1 for the first of its direction, then one more each time; `RankLine.send` sets it."""


class Offer(Numbered, frozen=True):
    """follower → leader: its weights are loaded, and it can hold so many pages."""

    pages: Count


class Agreed(Numbered, frozen=True):
    """leader → follower: every rank holds so many pages."""

    pages: Count


class RankReady(Numbered, frozen=True):
    """follower → leader: it can take plans and writes."""

    model: ModelIdentity
    pool: PoolDescriptor
    engine: EngineChoices = EngineChoices()
    """What computes there. For people."""


# --- steps ---------------------------------------------------------------------------------------------------------------


class RowBegins(msgspec.Struct, frozen=True, array_like=True):
    """A `RowStart` as it travels; ids are packed, and a grammar is named: the follower holds it."""

    row: Count
    pages: bytes
    sampling: SamplingParams
    length: Count
    last_token: TokenId | None
    token_ids: bytes | None
    answer_tokens: Count
    grammar_id: Count | None = None
    """That of its PrepareGrammar, not yet dropped. `sampling` has no grammar: equal texts may be of different requests."""
    adapter: Digest = Digest("")
    """What the row computes with beside the model."""

    def __post_init__(self) -> None:
        check_ids(self.pages, self.token_ids)


class PromptChunk(msgspec.Struct, frozen=True, array_like=True):
    """A `Chunk` as it travels; ids are packed."""

    row: Count
    start: Count
    token_ids: bytes
    last: bool

    def __post_init__(self) -> None:
        check_ids(self.token_ids)


class Launch(Numbered, frozen=True, omit_defaults=True):
    """leader → follower: compute this plan, after those before it. Rows and pages are packed int32."""

    step: Count
    starts: tuple[RowBegins, ...] = ()
    chunks: tuple[PromptChunk, ...] = ()
    decode_rows: bytes = b""
    grown_rows: bytes = b""
    grown_pages: bytes = b""
    held_tokens: Count = 0
    draft_rows: bytes = b""
    draft_tokens: bytes = b""
    verified_rows: bytes = b""
    verified_lengths: bytes = b""
    verified_tokens: bytes = b""
    draft_chunks: tuple[PromptChunk, ...] = ()

    def __post_init__(self) -> None:
        check_ids(self.decode_rows, self.grown_rows, self.grown_pages)
        check_ids(self.draft_rows, self.verified_rows, self.verified_lengths, self.verified_tokens)
        check_ids(self.draft_tokens, least=-1)  # NOT_DRAFTED


class LayersReached(Numbered, frozen=True):
    """follower → leader: the running step has written the KV of its first `layers` layers."""

    step: Count
    layers: Count


class StepReturned(Numbered, frozen=True):
    """follower → leader: the step is complete here."""

    step: Count
    digest: Count
    """CRC-32 of the sampled tokens, packed."""


class PrepareGrammar(Numbered, frozen=True):
    """leader → follower: make the grammar ready, and keep it until DropGrammars names it."""

    grammar_id: Count
    grammar: Grammar
    owner: Owner = ""
    """At whose turn: see `Terms`."""


class GrammarPrepared(Numbered, frozen=True):
    """follower → leader."""

    grammar_id: Count
    refused: Failed | None = None
    """Why it never will be ready."""


class DropGrammars(Numbered, frozen=True):
    """leader → follower: no request needs these any more."""

    grammar_ids: tuple[Count, ...]


# --- beside the steps ----------------------------------------------------------------------------------------------------


class DoOnRank(Numbered, frozen=True):
    """leader → follower: do this beside the steps. Weights that are made ready take the place of those that were staged."""

    work: Count
    """Counts these messages."""
    task: WeightsSource | Task


class RankDone(Numbered, frozen=True):
    """follower → leader."""

    work: Count
    result: Annotated[str, Meta(max_length=RESULT_CHARS)] = ""
    refused: Failed | None = None
    """Why it could not be done."""


class FreeAdapter(Numbered, frozen=True):
    """leader → follower: forget this adapter; no row that comes has it."""

    adapter: Digest


class SwitchOnRank(Numbered, frozen=True):
    """leader → follower: use what is staged for the plans that follow."""


class DropOnRank(Numbered, frozen=True):
    """leader → follower: forget what is staged."""


# --- transfers -------------------------------------------------------------------------------------------------------------


Order: TypeAlias = Connect | PackedPush | Allow | Settle | Expect


class TransferOrder(Numbered, frozen=True, tag="Command"):
    """leader → follower: for its transfers. The end of an Allow is on the follower's clock."""

    order: Order


class Events(Numbered, frozen=True):
    """follower → leader: the events of its transfers, in order."""

    news: tuple[TransferEvent, ...]


# --- life ------------------------------------------------------------------------------------------------------------------


class Ping(Numbered, frozen=True):
    """leader → follower: answer at once."""

    sent_s: Moment
    """On the leader's clock."""
    serving: bool = False
    """All ranks are ready. Until then each allows for longer silences, because others load."""


class Pong(Numbered, frozen=True):
    """follower → leader."""

    sent_s: Moment
    """That of the Ping."""
    heard_s: Moment
    """When this answer was sent, on the follower's clock."""
    transfer_age_s: Seconds = 0.0
    """How long its transfers have made no progress."""


class AskDrain(Numbered, frozen=True):
    """follower → leader: its process is to stop, so the instance is to drain."""


class RankFailed(Numbered, frozen=True):
    """follower → leader: it cannot go on."""

    reason: str
    """For people."""
    step: Count | None = None
    """The step that has failed; None: it was no step."""


class End(Numbered, frozen=True):
    """leader → follower: exit."""

    reason: str
    """For people."""
    orderly: bool = False
    """The instance has drained."""


FromLeader: TypeAlias = (
    Agreed
    | Launch
    | PrepareGrammar
    | DropGrammars
    | DoOnRank
    | FreeAdapter
    | SwitchOnRank
    | DropOnRank
    | TransferOrder
    | Ping
    | End
)
"""What the leader sends over a line."""
FromFollower: TypeAlias = (
    Offer | RankReady | LayersReached | StepReturned | GrammarPrepared | RankDone | Events | Pong | AskDrain | RankFailed
)
"""What a follower sends over its line."""
ToFollower: TypeAlias = RankWelcome | RankRefused | FromLeader
"""The inbox of a follower."""
ToLeader: TypeAlias = RankHello | FromFollower
"""The inbox of the leader for its followers."""
