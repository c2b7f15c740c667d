"""A request on an instance, and the phases of its life there.

Owns the record that both roles keep; a role adds fields of its own. Decides nothing: the role's scheduler does.

Prompts on their way through prefill: how far each is computed, and the next chunks under a token budget.

Owns the counters of a prompt. Knows plans. Does not know messages, pages, sockets or time. The prefill role uses it for every
request, the decode role for requests that it serves alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from msgspec.structs import replace

from common.executor import Chunk, RowStart
from common.ids import AttemptId, InstanceId, Int32Array, Life
from common.instance.token_memory import Emitted
from common.instance.waiting_line import Rank
from common.messages import (
    Ending,
    Finished,
    Generate,
    Reserve,
    Times,
    TokenDelta,
    TokenLogprob,
    TokenLogprobs,
    pack_logprobs,
    unpack_logprobs,
)
from common.pages.pool import PageLease
from common.pages.radix_cache import NO_HIT, Hit, PageKeys


@dataclass(slots=True, eq=False)
class PromptProgress:
    """One prompt in one row. What is launched runs ahead of what is computed:

    0 ──── computed ──── launched ──── len(prompt)
            in the pages   in flight      to do

    owner: whose it is, see `Terms`.
    """

    row: int
    prompt: Int32Array
    launched: int = 0
    computed: int = 0
    owner: str = ""

    @property
    def left(self) -> int:
        """Tokens that are not launched yet."""
        return len(self.prompt) - self.launched

    def complete(self, tokens: int) -> None:
        """A chunk of so many tokens came back."""
        self.computed += tokens
        assert 0 <= self.computed <= self.launched


def next_chunks(prompts: Iterable[PromptProgress], budget_tokens: int) -> tuple[Chunk, ...]:
    """Chunks for the next forward, at most `budget_tokens` in all. Owners get equal parts of it, as far as they have prompts, and
    the prompts of one are served in the order in which they came. Marks the chunks as launched."""
    coming = [progress for progress in prompts if progress.left]
    parts = _parts(coming, budget_tokens)
    chunks = []
    for progress in coming:
        tokens = min(parts[progress.owner], progress.left)
        if tokens == 0:
            continue
        parts[progress.owner] -= tokens
        start, end = progress.launched, progress.launched + tokens
        progress.launched = end
        chunks.append(Chunk(progress.row, start, progress.prompt[start:end], last=progress.left == 0))
    return tuple(chunks)


def _parts(prompts: Iterable[PromptProgress], budget_tokens: int) -> dict[str, int]:
    """How many tokens each owner gets: what is left of it by those who have less goes to the others (max-min fair)."""
    wanted: dict[str, int] = {}
    for progress in prompts:
        wanted[progress.owner] = wanted.get(progress.owner, 0) + progress.left
    parts: dict[str, int] = {}
    for owner in sorted(wanted, key=wanted.__getitem__):
        parts[owner] = min(wanted[owner], budget_tokens, max(1, budget_tokens // (len(wanted) - len(parts))))
        budget_tokens -= parts[owner]
    return parts


class Phase(Enum):
    """From any phase a request may go to ENDED. It is gone when no step and no write can touch its pages any more.

    prefill   WAITING ─► COMPUTING ─► HANDING_OFF ─► ENDED ─► (gone)
    decode    WAITING ─► RESERVED ────────────► DECODING ─► ENDED ─► (gone)
                 └─────► COMPUTING (local prefill) ─►┘
    """

    WAITING = auto()
    RESERVED = auto()
    COMPUTING = auto()
    HANDING_OFF = auto()
    DECODING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """asked: the message that brought it. peer: the instance that its KV goes to or comes from; None when this instance serves it
    alone. decode: the life of the decode instance that has granted the reservation, on its prefill instance. pages: to be leased
    on admission. times, deadline_s: on this instance's clock. next_token: number of the token that this instance emits next.
    token_ids: the tokens up to there that are known here. told: the ending that was emitted. prepares: its grammar is
    being made ready, so no row may start with it yet. pipeline: who gets them. keys: of the prompt's pages in the prefix cache.
    logprobs, prompt_logprobs: those of the known tokens, one by one, and those of the prompt, chunk by chunk; packed, and only if
    the client asks for them. cached_tokens: tokens of its prompt that the instance which computes it found in its prefix cache.
    hit: the cached pages that its prompt began with when it was last looked at; once it has its pages, those that it got. awaits:
    the digest of the page until which it waits for another request. published: how many pages of its prompt nobody waits for any
    more. held_rows, held_pages: what counts as its owner's, see `Shares`.
    """

    asked: Generate | Reserve
    key: AttemptId
    prompt: Int32Array
    peer: Life | None
    rank: Rank
    pages: int
    times: Times
    deadline_s: float
    next_token: int
    pipeline: InstanceId
    keys: PageKeys
    phase: Phase = Phase.WAITING
    lease: PageLease | None = None
    progress: PromptProgress | None = None
    decode: Life | None = None
    token_ids: list[int] = field(default_factory=list)
    told: Ending | None = None
    logprobs: list[bytes] = field(default_factory=list)
    prompt_logprobs: list[bytes] = field(default_factory=list)
    prepares: bool = False
    cached_tokens: int = 0
    hit: Hit = NO_HIT
    awaits: bytes | None = None
    published: int = 0
    held_rows: int = 0
    held_pages: int = 0

    @property
    def owner(self) -> str:
        """Whose it is: see `Terms`."""
        return self.asked.terms.owner

    def note(self, token_id: int) -> None:
        """The token goes to the client, or has gone there by another instance."""
        self.token_ids.append(token_id)
        self.next_token += 1

    def row_start(self, row: int, length: int = 0, last_token: int | None = None) -> RowStart:
        """The request begins in this row, on its leased pages. length, last_token: see `RowStart`."""
        assert self.lease is not None
        sampling, token_ids = self.asked.sampling, None
        so_far = [] if last_token is None else [last_token]
        if sampling.needs_tokens:
            token_ids = np.concatenate([self.prompt, np.array(so_far, dtype=np.int32)])
        return RowStart(row, self.lease.pages, sampling, length, last_token, token_ids, self.asked.first + len(so_far))

    def note_told(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """The first token has gone to the client by another instance. It can be told again from here only with everything that
        goes with it: log probabilities of the prompt are not here."""
        asks = self.asked.sampling
        if (asks.logprobs is not None and logprob is None) or (asks.prompt_logprobs is not None and self.next_token == 0):
            self.next_token += 1
            return
        self.note(token_id)
        if logprob is not None:
            self.logprobs.append(pack_logprobs([logprob]))

    def collect(self, prompt_logprobs: TokenLogprobs) -> None:
        """A chunk of the prompt has brought these. They are told with token 0 of the answer, by the instance that samples it; a
        request that is resumed behind that token has been told them."""
        if self.next_token == 0:
            self.prompt_logprobs.append(pack_logprobs(prompt_logprobs))

    def told_with(self, delta: TokenDelta, logprobs: TokenLogprobs) -> TokenDelta:
        """The delta of a token that was sampled here, with what is told beside it, which is remembered. logprobs: that of the
        token; empty if it is not asked for."""
        if logprobs:
            self.logprobs.append(pack_logprobs(logprobs))
        prompt_logprobs = unpack_logprobs(self.prompt_logprobs) if delta.first == 0 else ()
        cached_tokens = self.cached_tokens if delta.first == 0 else 0
        if not logprobs and not prompt_logprobs and not cached_tokens:
            return delta
        return replace(delta, logprobs=logprobs, prompt_logprobs=prompt_logprobs, cached_tokens=cached_tokens)

    def embedded(self, embedding: bytes) -> TokenDelta:
        """The whole answer of a request for an embedding: an ending. embedding: see `Finished`."""
        self.told = Finished("stop", embedding=embedding)
        return TokenDelta(self.key, self.next_token, (), self.told)

    @property
    def emitted(self) -> Emitted:
        """What can be sent again."""
        first = self.next_token - len(self.token_ids)
        return Emitted(first, self.token_ids, self.told, self.logprobs, self.prompt_logprobs, self.cached_tokens)
