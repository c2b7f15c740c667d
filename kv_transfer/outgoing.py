"""Outgoing handoffs: the record that the sending end keeps of each, and the events that it reports.

Owns the record of a handoff and of a pair's session. Pure data. `handoff_writer.py` says how they change.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from common.ids import AttemptId, Generation, Int32Array, Life, Ticket, Variant
from common.messages import Failed, TokenLogprob
from kv_transfer.handoff_reader import MARGIN_S, RENEW_S, RENEWALS_AFTER, WRITE_LEASE_S

MOST_RENEWALS = int((WRITE_LEASE_S + MARGIN_S) / RENEW_S)
"""A reader that hears none of so many has given up what it holds."""

HandoffStage = Literal["reserving", "refused", "pushing", "draining", "stuck"]


@dataclass(frozen=True, slots=True)
class HandoffClosed:
    """The handoff is over on this side."""

    key: AttemptId
    failure: Failed | None
    """What the client gets; None when the decode instance has the request, or when the request was given up on purpose."""
    quiescent: bool
    """No push can still read the source pages. When False they must be quarantined."""


@dataclass(frozen=True, slots=True)
class HandoffGranted:
    """Its peer has granted a reservation: the handoff stays there."""

    key: AttemptId
    have_pages: int = 0
    """How many pages of the reservation need not be pushed."""


@dataclass(frozen=True, slots=True)
class HandoffPosted:
    """Its first push was posted."""

    key: AttemptId


@dataclass(frozen=True, slots=True)
class HandoffRefused:
    """Its peer grants no reservation. The caller moves the handoff to another peer, or gives it up."""

    key: AttemptId
    failure: Failed


@dataclass(frozen=True, slots=True)
class SourcePagesRead:
    """Nothing reads the next `pages` of the source pages any more, counted from the first: they are written, and the prompt is
    computed."""

    key: AttemptId
    pages: int


HandoffEvent: TypeAlias = HandoffGranted | HandoffPosted | SourcePagesRead | HandoffRefused | HandoffClosed


@dataclass(slots=True, eq=False)
class Outgoing:
    """Pages [0, posted) are written or in flight; [posted, complete) wait for a grant or are posted next.

    0 ····· read ····· posted ····· complete ····· len(source_pages)

    While the last chunk is computed, the pages from `complete` on hold their first layers_complete layers, and of the pages from
    `posted` on the first layers_posted layers are written or in flight.
    """

    key: AttemptId
    peer: Life
    source_pages: Int32Array
    reserved_s: float
    variant: Variant = Variant()
    """What computes the pages."""
    stage: HandoffStage = "reserving"
    target_pages: Int32Array | None = None
    generation: Generation = Generation(0)
    posted: int = 0
    complete: int = 0
    layers_complete: int = 0
    layers_posted: int = 0
    in_flight: dict[Ticket, int] = field(default_factory=dict)
    """The first page of each push."""
    read: int = 0
    """How many pages SourcePagesRead has reported."""
    first_token: int | None = None
    first_logprob: TokenLogprob | None = None
    failure: Failed | None = None
    quiescent: bool = True
    have_pages: int = 0
    pushed_bytes: int = 0
    has_posted: bool = False


@dataclass(slots=True, eq=False)
class Moved:
    """A handoff that has left a decode instance before its grant."""

    renewals: int = 0
    """How many renewals have named it."""
    since_s: float = float("inf")
    """When the first of them was sent."""
    is_answered: bool = False
    """One of them was answered."""

    def name_at(self, now: float) -> None:
        """A renewal names it."""
        self.renewals += 1
        self.since_s = min(self.since_s, now)

    @property
    def is_over(self) -> bool:
        """Renewals need not name it any more. A Reserve may arrive later than the answer does. A reader that answers nothing for
        long takes its pages back by itself."""
        return self.renewals >= (RENEWALS_AFTER if self.is_answered else MOST_RENEWALS)


@dataclass(slots=True, eq=False)
class Session:
    """The handoffs with one decode instance."""

    open: dict[AttemptId, Outgoing] = field(default_factory=dict)
    moved: dict[AttemptId, Moved] = field(default_factory=dict)
    """Handoffs that have left the instance, as long as renewals name them."""
    until_s: float = float("-inf")
    """When the write lease there ends."""
    renewals_left: int = RENEWALS_AFTER
    is_dead: bool = False
    """The instance has a new incarnation, so nothing more is sent to this one."""
