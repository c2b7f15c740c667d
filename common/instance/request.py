"""A request on an instance: the record that both roles keep, the phases of its life, and how far its prompt is computed.

Owns the record's counters, and the next chunks of prompts under a token budget. Decides nothing: the role's scheduler does. Does
not know sockets or time. A role adds fields of its own.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from msgspec.structs import replace

from common.drafting import Drafting
from common.executor import Chunk, RowStart
from common.ids import AttemptId, Digest, InstanceId, Int32Array, Life
from common.instance.token_memory import Emitted
from common.instance.waiting_line import PATIENCE_S, Rank
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
from common.sampling_params import ANSWER_TOKENS
from common.step_cost import StepCost


@dataclass(frozen=True, kw_only=True)
class InstanceLimits:
    """The limits of an instance, whatever its role."""

    chunk_tokens: int
    """Most prompt tokens of one forward."""
    max_waiting: int
    """Most requests that wait."""
    request_timeout_s: float
    """Longest life of a request here."""
    drain_timeout_s: float
    """How long a draining instance lets its requests run before it ends them."""
    answer_tokens: int = ANSWER_TOKENS
    """How long an answer is expected to be, until some have ended."""
    prefix_cache: bool = True
    """Whether KV is kept for later requests that begin alike."""
    step_limit_s: float = math.inf
    """What a step may take that computes prompts."""
    drafting: Drafting | None = None
    """How the role that decodes drafts tokens; None: it does not."""


@dataclass(slots=True, eq=False)
class PromptProgress:
    """One prompt in one row. What is launched runs ahead of what is computed:

    0 ──── computed ──── launched ──── len(prompt)
            in the pages   in flight      to do

    """

    row: int
    prompt: Int32Array
    launched: int = 0
    computed: int = 0
    owner: str = ""
    """Whose it is: see `Terms`."""
    token_work: int = 1
    """How many tokens of a step's budget one of its tokens counts as."""

    @property
    def left(self) -> int:
        """Tokens that are not launched yet."""
        return len(self.prompt) - self.launched

    @property
    def tokens_to_compute(self) -> int:
        """Tokens that are not computed yet, those in flight among them."""
        return len(self.prompt) - self.computed

    def complete(self, tokens: int) -> None:
        """A chunk of so many tokens came back."""
        self.computed += tokens
        assert 0 <= self.computed <= self.launched


LEAST_CHUNK_TOKENS = 256
"""While a GPU reads all weights for a step, it can compute as many tokens (an H100 about 300 in bfloat16): fewer save no time."""


@dataclass(slots=True)
class ChunkLimit:
    """How many prompt tokens a step may have, to take no longer than `limit_s`; math.inf: any number."""

    limit_s: float
    cost: StepCost = field(default_factory=StepCost)
    """What steps cost of late."""
    _launched: int = 0
    """The most tokens that a step had."""
    _measured: int = LEAST_CHUNK_TOKENS // 2
    """The same of those that the cost knows."""

    def tokens(self, decode_rows: int, held_tokens: int = 0) -> int:
        """For a step with so many decode rows, which hold so many tokens; LEAST_CHUNK_TOKENS at least. At most twice what was
        measured, because short chunks show little of what long ones cost."""
        if math.isinf(self.limit_s):
            return sys.maxsize
        left_s, token_s = self.limit_s - self.cost.seconds(0, decode_rows, held_tokens), self.cost.chunk_token_s
        most = 2 * self._measured
        return int(max(LEAST_CHUNK_TOKENS, most if left_s >= most * token_s else left_s / token_s))

    def launched(self, tokens: int) -> None:
        self._launched = max(self._launched, tokens)

    def measured(self) -> None:
        """The cost is, or is about to be, what the steps that were launched before this show."""
        self._measured = max(self._measured, self._launched)


VOCABULARY_OF_A_TOKEN = 2**15
"""A position whose log probabilities are reported takes a softmax over the vocabulary, and as much work as one more token for
each so many of its tokens."""


def next_chunks(prompts: Iterable[PromptProgress], budget_tokens: int) -> tuple[Chunk, ...]:
    """Chunks for the next forward, of `budget_tokens` in all, as `PromptProgress.token_work` counts them. Owners get equal parts
    of it, as far as they have prompts, and the prompts of one are served in the order in which they came. Marks the chunks as
    launched."""
    coming = [progress for progress in prompts if progress.left]
    parts = _parts(coming, budget_tokens)
    chunks = []
    for progress in coming:
        part = parts[progress.owner]
        if part == 0:
            continue
        tokens = min(max(1, part // progress.token_work), progress.left)
        parts[progress.owner] = max(0, part - tokens * progress.token_work)
        start, end = progress.launched, progress.launched + tokens
        progress.launched = end
        chunks.append(Chunk(progress.row, start, progress.prompt[start:end], last=progress.left == 0))
    return tuple(chunks)


def _parts(prompts: Iterable[PromptProgress], budget_tokens: int) -> dict[str, int]:
    """How many tokens each owner gets: what is left of it by those who have less goes to the others (max-min fair)."""
    wanted: dict[str, int] = {}
    for progress in prompts:
        wanted[progress.owner] = wanted.get(progress.owner, 0) + progress.left * progress.token_work
    parts: dict[str, int] = {}
    for owner in sorted(wanted, key=wanted.__getitem__):
        parts[owner] = min(wanted[owner], budget_tokens, max(1, budget_tokens // (len(wanted) - len(parts))))
        budget_tokens -= parts[owner]
    return parts


class RequestPhase(Enum):
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
    """One request on one instance, from its message until nothing can touch its pages any more. Times are of this instance's
    clock."""

    asked: Generate | Reserve
    """The message that brought it."""
    key: AttemptId
    prompt: Int32Array
    """[tokens] int32."""
    peer: Life | None
    """The instance that its KV goes to or comes from; None when this instance serves it alone."""
    rank: Rank
    pages: int
    """Pages to lease on admission."""
    times: Times
    deadline_s: float
    next_token: int
    """Number of the token that this instance emits next."""
    pipeline: InstanceId
    """The detokenizer that gets its tokens."""
    keys: PageKeys
    """Names of its pages in the prefix cache."""
    owner: str
    """Whose it is: see `Terms`."""
    phase: RequestPhase = RequestPhase.WAITING
    lease: PageLease | None = None
    row: int | None = None
    """Its place in the executor's batch, from its admission until no step names it any more."""
    progress: PromptProgress | None = None
    """How far its prompt is computed; None where another instance computes it."""
    in_transfer: bool = False
    """A transfer may still read or write its pages: they come home when it is over."""
    decode: Life | None = None
    """On its prefill instance: the life of the decode instance that has granted the reservation."""
    token_ids: list[int] = field(default_factory=list)
    """The tokens before `next_token` that are known here."""
    ending: Ending | None = None
    """The ending that was emitted."""
    logprobs: list[bytes] = field(default_factory=list)
    """Log probabilities of the known tokens, packed one by one, if the client asks for them."""
    prompt_logprobs: list[bytes] = field(default_factory=list)
    """Those of the prompt, packed chunk by chunk, if the client asks for them."""
    prepares: bool = False
    """Its grammar is being made ready, so no row may start with it yet."""
    cached_tokens: int = 0
    """Tokens of its prompt that the instance which computes it found in its prefix cache."""
    hit: Hit = NO_HIT
    """The cached pages that its prompt began with when it was last looked up; once it has its pages, those that it got."""
    awaits: bytes | None = None
    """Digest of the page until which it waits for another request that computes the same."""
    published: int = 0
    """How many pages of its prompt nobody waits for any more."""
    held_rows: int = 0
    """Rows that count as its owner's, see `Shares`."""
    held_pages: int = 0
    """Pages that count as its owner's, see `Shares`."""

    def add_token(self, token_id: int) -> None:
        """The token goes to the client, or has gone there by another instance."""
        self.token_ids.append(token_id)
        self.next_token += 1

    @property
    def adapter(self) -> Digest:
        """What computes it beside the model; "": nothing."""
        return self.keys.variant.adapter

    @property
    def stays(self) -> bool:
        """Whether it stays in the waiting line until there is room. Otherwise its writer asks elsewhere when there is none."""
        return not isinstance(self.asked, Reserve) or self.asked.waits

    @property
    def waits_since_s(self) -> float:
        """Since when it waits for memory. Its writer may have asked elsewhere meanwhile."""
        return self.times.accepted_s - (self.asked.waited_s if isinstance(self.asked, Reserve) else 0.0)

    def has_waited_long(self, now: float) -> bool:
        """Whether nobody behind it may be admitted before it."""
        return self.stays and now - self.waits_since_s >= PATIENCE_S

    def begin_prompt(self, cached_tokens: int, vocab_size: int) -> PromptProgress:
        """Its prompt is computed in its row, behind what is cached."""
        assert self.row is not None
        work = 1 if self.asked.sampling.prompt_logprobs is None else 1 + vocab_size // VOCABULARY_OF_A_TOKEN
        self.progress = PromptProgress(self.row, self.prompt, cached_tokens, cached_tokens, self.owner, work)
        return self.progress

    def row_start(self, length: int = 0, last_token: int | None = None) -> RowStart:
        """The request begins in its row, on its leased pages. length, last_token: see `RowStart`."""
        assert self.lease is not None and self.row is not None
        sampling, token_ids = self.asked.sampling, None
        so_far = [] if last_token is None else [last_token]
        if sampling.needs_tokens:
            token_ids = np.concatenate([self.prompt, np.array(so_far, dtype=np.int32)])
        answer_tokens = self.asked.first + len(so_far)
        return RowStart(self.row, self.lease.pages, sampling, length, last_token, token_ids, answer_tokens, self.adapter)

    def add_sent_token(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """The first token has gone to the client by another instance. It can be told again from here only with everything that
        goes with it: log probabilities of the prompt are not here."""
        asks = self.asked.sampling
        self.next_token += 1
        if (asks.logprobs is not None and logprob is None) or (asks.prompt_logprobs is not None and self.next_token == 1):
            return
        self.token_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(pack_logprobs([logprob]))

    def collect(self, prompt_logprobs: TokenLogprobs) -> None:
        """A chunk of the prompt has brought these. They are told with token 0 of the answer, by the instance that samples it; a
        request that is resumed behind that token has been told them."""
        if self.next_token == 0:
            self.prompt_logprobs.append(pack_logprobs(prompt_logprobs))

    def with_logprobs(self, delta: TokenDelta, logprobs: TokenLogprobs) -> TokenDelta:
        """The delta of tokens that were sampled here, with what is told beside them, which is remembered. logprobs: those of the
        tokens; empty if they are not asked for."""
        self.logprobs += [pack_logprobs([each]) for each in logprobs]
        prompt_logprobs = unpack_logprobs(self.prompt_logprobs) if self.prompt_logprobs and delta.first == 0 else ()
        cached_tokens = self.cached_tokens if delta.first == 0 else 0
        if not logprobs and not prompt_logprobs and not cached_tokens:
            return delta
        return replace(delta, logprobs=logprobs, prompt_logprobs=prompt_logprobs, cached_tokens=cached_tokens)

    def embedded(self, embedding: bytes) -> TokenDelta:
        """The whole answer of a request for an embedding: an ending. embedding: see `Finished`."""
        self.ending = Finished("stop", embedding=embedding)
        return TokenDelta(self.key, self.next_token, (), self.ending)

    @property
    def emitted(self) -> Emitted:
        """What can be sent again."""
        first = self.next_token - len(self.token_ids)
        return Emitted(first, self.token_ids, self.ending, self.logprobs, self.prompt_logprobs, self.cached_tokens)
