"""Handoffs: a prefill instance (the writer) moves a request's KV into pages of a decode instance (the reader).

Owns the words of reservation, write lease and handoff; `kv_transfer/handoff_reader.py` explains when a writer may write. Every
`sent_s` is on the writer's clock: the reader only sends it back.

Messages name the lives that they are from and to, because a successor of either process has the same name, the same address and
perhaps the same mail. UNNAMED comes from older versions, which did not say; it fits every life.
"""

import msgspec

from common.ids import AttemptId, Generation, Incarnation, Variant, check_ids
from common.messages.base import UNNAMED, Message
from common.messages.requests import Failed, Salt, Terms
from common.messages.text import TokenLogprob
from common.ranges import Count, Moment, Seconds, TokenId
from common.sampling_params import SamplingParams


class Reserve(Message, frozen=True):
    """prefill → decode: lease pages for this prompt; its KV will be written into them."""

    key: AttemptId
    incarnation: Incarnation
    """The writer's life."""
    prompt: bytes
    """Packed token ids, as in Generate."""
    sampling: SamplingParams
    """As in Generate."""
    sent_s: Moment
    """Writer's clock; comes back in Grant."""
    first: Count = 0
    """As in Generate."""
    terms: Terms = Terms()
    """As in Generate."""
    waits: bool = True
    """It may wait a while for memory. If not, or when that is over, it is declined and forgotten: it may come again."""
    waited_s: Seconds = 0.0
    """So long has the writer asked for it, here and elsewhere."""
    salt: Salt = ""
    """As in Generate."""
    cached_tokens: Count = 0
    """Tokens of the prompt that the writer need not compute; the client sees the figure with the answer's first token."""
    variant: Variant = Variant()
    """What computes the KV that will be written."""

    def __post_init__(self) -> None:
        check_ids(self.prompt)


class Grant(Message, frozen=True):
    """decode → prefill: the reservation exists. The writer may write until sent_s + write_lease_s on its own clock."""

    key: AttemptId
    generation: Generation
    """Number of the reservation."""
    pages: bytes
    """Packed page ids for the prompt's KV in token order: `layout.pages_for(prompt)` of them."""
    sent_s: Moment
    """Writer's clock: the latest Reserve or Renew that the reader has heard."""
    write_lease_s: Seconds = msgspec.field(name="lease_s")
    """Length of the write lease."""
    have_tokens: Count = 0
    """Tokens whose KV is there already: the first `have_tokens // page_size` pages must not be written."""
    incarnation: Incarnation = UNNAMED
    """The reader's life, whose pages these are."""
    writer: Incarnation = UNNAMED
    """The writer's life that may write them."""
    variant: Variant = Variant()
    """Whose KV may be written: that of the Reserve."""

    def __post_init__(self) -> None:
        check_ids(self.pages)


class Decline(Message, frozen=True):
    """decode → prefill: there will be no grant for this key."""

    key: AttemptId
    failed: Failed
    """What the client is told, unless the writer finds another reader."""
    sent_s: Moment | None = None
    """Writer's clock: that of the Reserve which is declined. None: not said."""


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """A handoff that the writer holds open."""

    key: AttemptId
    generation: Generation
    """The generation of the reservation; 0 while no grant has arrived."""
    stuck: bool = False
    """The writer gave it up, but a write may still be in flight, so the pages must wait."""
    moved: bool = False
    """No longer open here: the writer has asked another reader. Nothing was or will be written; nobody is told of an end."""


class Renew(Message, frozen=True):
    """prefill → decode, every second while a handoff is open: I am alive, these are open, and every other one is over.

    So one message renews every write lease of the pair, and heals what a lost Grant, Handoff, Withdraw or Decline left behind.
    """

    incarnation: Incarnation
    """The writer's life."""
    sent_s: Moment
    """Writer's clock; comes back in Renewed."""
    claims: tuple[Claim, ...]
    """Every handoff between the two that is open, and for a while those that have moved."""


class Renewed(Message, frozen=True):
    """decode → prefill: the answer to a Renew. You may write until sent_s + write_lease_s on your clock."""

    sent_s: Moment
    """Writer's clock: that of the Renew."""
    write_lease_s: Seconds = msgspec.field(name="lease_s")
    """Length of the write lease."""
    over: tuple[AttemptId, ...] = ()
    """Claims that were cancelled or are unknown here: stop writing them, and withdraw them."""
    generations: tuple[Generation, ...] = ()
    """The generations of the reservations in `over`, one for each; the claim's where there is no reservation. Empty: unknown."""
    incarnation: Incarnation = UNNAMED
    """The reader's life."""
    writer: Incarnation = UNNAMED
    """The writer's life that is answered."""


class Handoff(Message, frozen=True):
    """prefill → decode: every write has completed; decode from here."""

    key: AttemptId
    generation: Generation
    """The generation of the reservation."""
    first_token: TokenId
    """Token id of number `first` of the answer; it is on its way to the client."""
    pushed_pages: Count
    """Pages that were written."""
    pushed_bytes: Count
    """Bytes that were written."""
    digests: bytes = b""
    """With --verify-pages: the CRC-32 (little-endian uint32) of each page that was written, in token order."""
    first_logprob: TokenLogprob | None = None
    """The log probability of the first token, if the request asks for it: the reader can then send that token again."""
    variant: Variant = Variant()
    """What computed the KV that was written."""


class Withdraw(Message, frozen=True):
    """prefill → decode: no write of this life for this key is in flight or will be; its pages may be reused."""

    key: AttemptId
    incarnation: Incarnation = UNNAMED
    """The writer's life. That of a predecessor may still write."""
    generation: Generation = Generation(0)
    """The generation of the reservation; 0 while no grant has arrived, which fits any."""
