"""Outgoing handoffs: what the sending end keeps of each, and the news of them.

Owns the record of a handoff and of a pair's session. Pure data. `handoff_source.py` says how they change.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from common.ids import AttemptId, Generation, Int32Array, Life, Ticket
from common.messages import Failed, TokenLogprob
from kv_transfer.handoff_target import MARGIN_S, RENEW_S, RENEWALS_AFTER, WRITE_LEASE_S

MOST_RENEWALS = int((WRITE_LEASE_S + MARGIN_S) / RENEW_S)
"""A reader that hears none of so many has given up what it holds."""

HandoffStage = Literal["reserving", "refused", "pushing", "draining", "stuck"]


@dataclass(frozen=True, slots=True)
class SourceClosed:
    """The handoff is over on this side. failure: what the client is told; None when the decode instance has the request, or when
    the request was given up on purpose.

    quiescent: no push can still read the source pages. When False they must be quarantined.
    """

    key: AttemptId
    failure: Failed | None
    quiescent: bool


@dataclass(frozen=True, slots=True)
class SourceGranted:
    """Its peer has granted a reservation: the handoff stays there. have_pages: how many pages of it need not be pushed."""

    key: AttemptId
    have_pages: int = 0


@dataclass(frozen=True, slots=True)
class SourcePosted:
    """Its first push was posted."""

    key: AttemptId


@dataclass(frozen=True, slots=True)
class SourceRefused:
    """Its peer grants no reservation. The caller moves the handoff to another peer, or gives it up."""

    key: AttemptId
    failure: Failed


@dataclass(frozen=True, slots=True)
class SourceRead:
    """Nothing reads the next `pages` of the source pages any more, counted from the first: they are written, and the prompt is
    computed."""

    key: AttemptId
    pages: int


SourceNews: TypeAlias = SourceGranted | SourcePosted | SourceRead | SourceRefused | SourceClosed


@dataclass(slots=True, eq=False)
class Outgoing:
    """Pages [0, posted) are written or in flight; [posted, complete) wait for a grant or are posted next.

    0 ····· read ····· posted ····· complete ····· len(source_pages)

    While the last chunk is computed, the pages from `complete` on hold their first layers_complete layers, and of the pages from
    `posted` on the first layers_posted layers are written or in flight. in_flight: the first page of each push. read: the number
    of pages that SourceRead has reported.
    """

    key: AttemptId
    peer: Life
    source_pages: Int32Array
    reserved_s: float
    stage: HandoffStage = "reserving"
    target_pages: Int32Array | None = None
    generation: Generation = Generation(0)
    posted: int = 0
    complete: int = 0
    layers_complete: int = 0
    layers_posted: int = 0
    in_flight: dict[Ticket, int] = field(default_factory=dict)
    read: int = 0
    first_token: int | None = None
    first_logprob: TokenLogprob | None = None
    failure: Failed | None = None
    quiescent: bool = True
    have_pages: int = 0
    pushed_bytes: int = 0
    has_posted: bool = False


@dataclass(slots=True, eq=False)
class Moved:
    """A handoff that has left a decode instance before its grant. said: how many renewals said so. since_s: when the first of
    them was sent. is_heard: one of them was answered."""

    said: int = 0
    since_s: float = float("inf")
    is_heard: bool = False

    def say(self, now: float) -> None:
        self.said += 1
        self.since_s = min(self.since_s, now)

    @property
    def is_over(self) -> bool:
        """It need not be said again. A Reserve may arrive later than the answer does. A reader that answers nothing for long
        takes its pages back by itself."""
        return self.said >= (RENEWALS_AFTER if self.is_heard else MOST_RENEWALS)


@dataclass(slots=True, eq=False)
class Session:
    """The open handoffs with one decode instance. moved: those that have left it, as long as renewals say so. until_s: when the
    write lease there ends. is_dead: it has a new incarnation, so that nothing more is said here."""

    open: dict[AttemptId, Outgoing] = field(default_factory=dict)
    moved: dict[AttemptId, Moved] = field(default_factory=dict)
    until_s: float = float("-inf")
    renewals_left: int = RENEWALS_AFTER
    is_dead: bool = False
