"""The port of the engine: plans in, sampled tokens out.

Owns the vocabulary between a scheduler and an executor: what the scheduler decided for the next forward, what came of it, and how
log probabilities become messages. Owns no implementation: `engine.torch_executor` (CPU and CUDA) and `engine.timed` (computes
nothing) do. Knows no tensors, requests or time.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from common.errors import TandemError
from common.ids import Digest, Int32Array, Int64Array
from common.messages import EngineChoices, Failed, ModelIdentity, TokenLogprob
from common.messages.text import LEAST_LOGPROB
from common.messages.variants import Task, WeightsSource
from common.pages.layout import KVLayout, MemoryRegion
from common.sampling_params import Grammar, SamplingParams

NOT_DRAFTED = -1
_NO_NUMBERS: Int32Array = np.empty(0, dtype=np.int32)
_NO_LOGPROBS: NDArray[np.float32] = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """How likely some tokens were; by default there are none. Those of a row are side by side, in the order of the sequence. See
    `TokenLogprob`."""

    rows: Int32Array = field(default_factory=_NO_NUMBERS.copy)
    """[tokens] int32: the row of each."""
    token_ids: Int32Array = field(default_factory=_NO_NUMBERS.copy)
    """[tokens] int32, as are ranks."""
    logprobs: NDArray[np.float32] = field(default_factory=_NO_LOGPROBS.copy)
    """[tokens] float32."""
    ranks: Int32Array = field(default_factory=_NO_NUMBERS.copy)
    top_counts: Int32Array = field(default_factory=_NO_NUMBERS.copy)
    """[tokens] int32: how many of the likeliest tokens the row reports."""
    top_ids: Int32Array = field(default_factory=_NO_NUMBERS.copy)
    """[tokens, the largest of the top counts] int32, the likeliest first."""
    top_logprobs: NDArray[np.float32] = field(default_factory=_NO_LOGPROBS.copy)
    """The same shape, float32."""

    @classmethod
    def of(cls, rows: Sequence[int], tokens: Sequence[TokenLogprob]) -> Self:
        """The inverse of `by_row`, for executors that compute no tensors. rows: the row of each token."""
        if not rows:
            return cls()
        top_counts = np.array([len(each.top) for each in tokens], dtype=np.int32)
        shape = len(tokens), int(top_counts.max())
        top_ids, top_logprobs = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.float32)
        for at, each in enumerate(tokens):
            for place, (token_id, logprob) in enumerate(each.top):
                top_ids[at, place], top_logprobs[at, place] = token_id, logprob
        return cls(
            rows=np.array(rows, dtype=np.int32),
            token_ids=np.array([each.token_id for each in tokens], dtype=np.int32),
            logprobs=np.array([each.logprob for each in tokens], dtype=np.float32),
            ranks=np.array([each.rank for each in tokens], dtype=np.int32),
            top_counts=top_counts,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )

    def by_row(self) -> dict[int, tuple[TokenLogprob, ...]]:
        """The messages of each row that is here. Made anew by each call: call it once for a step."""
        if not len(self.rows):
            return {}
        made: dict[int, list[TokenLogprob]] = {row: [] for row in self.rows.tolist()}
        tops = zip(self.top_counts.tolist(), self.top_ids.tolist(), _finite(self.top_logprobs), strict=True)
        top = (tuple(zip(ids[:count], logprobs[:count], strict=True)) for count, ids, logprobs in tops)
        columns = self.token_ids.tolist(), _finite(self.logprobs), self.ranks.tolist()
        for row, token_id, logprob, rank, likeliest in zip(self.rows.tolist(), *columns, top, strict=True):
            made[row].append(TokenLogprob(token_id, logprob, rank, likeliest))
        return {row: tuple(tokens) for row, tokens in made.items()}


def _finite(logprobs: NDArray[np.float32]) -> list[Any]:
    """As a message may carry them. What is not a number cannot come."""
    finite: list[Any] = np.maximum(np.nan_to_num(logprobs, nan=LEAST_LOGPROB), LEAST_LOGPROB).tolist()
    return finite


NO_LOGPROBS = Logprobs()


@dataclass(frozen=True, slots=True, eq=False)
class RowStart:
    """Put a request into a row."""

    row: int
    pages: Int32Array
    """[pages] int32: the page ids that the row holds so far, in token order; `StepPlan.grown_pages` adds to them."""
    sampling: SamplingParams
    length: int = 0
    """Tokens whose KV is in those pages."""
    last_token: int | None = None
    """The token to feed at position `length` if the row decodes at once (its KV is not in the pages yet); None: chunks come
    first."""
    token_ids: Int32Array | None = None
    """[tokens] int32: all that is known of the request, last_token included; None if the sampling parameters do not need them
    (`SamplingParams.needs_tokens`)."""
    answer_tokens: int = 0
    """How many of `token_ids`, the last ones, are the answer's so far."""
    adapter: Digest = Digest("")
    """The adapter that the row computes with; "": the model alone."""
    before: int = 0
    """Tokens of the sequence before the row's first, of which it knows nothing: noise depends on the place in the sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Compute prompt tokens [start, start + len(token_ids)) of a row. The last chunk samples the row's next token.

    token_ids: [tokens] int32.
    """

    row: int
    start: int
    token_ids: Int32Array
    last: bool


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One forward. Applied in this order: starts, growth, then chunks and decode rows in one forward."""

    step: int
    starts: tuple[RowStart, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    decode_rows: Int32Array = field(default_factory=_NO_NUMBERS.copy)
    """[rows] int32: each feeds its last sampled token at its length, writes that token's KV, and samples the next. The plan
    before may still be computing that token: executors run plans in order."""
    grown_rows: Int32Array = field(default_factory=_NO_NUMBERS.copy)
    """[grown] int32: row grown_rows[i] gets page grown_pages[i] after those that it holds. A row occurs at most once."""
    grown_pages: Int32Array = field(default_factory=_NO_NUMBERS.copy)
    held_tokens: int = 0
    """Tokens whose KV the decode rows read, those that they feed among them. For what the step costs; it changes no answer."""
    draft_rows: Int32Array = field(default_factory=_NO_NUMBERS.copy)
    """[drafts] int32: the decode row that each drafted token may continue (speculative decoding, Leviathan et al. 2023). Those of
    a row are side by side, in the order of the sequence. A row with drafts is in no other step that is in flight."""
    draft_tokens: Int32Array = field(default_factory=_NO_NUMBERS.copy)
    """[drafts] int32; NOT_DRAFTED: the executor's draft model proposes it."""
    draft_chunks: tuple[Chunk, ...] = ()
    """For the draft model: tokens whose KV it lacks. Its drafts follow those of the last chunks, and in other rows the last token
    of `verified_tokens`: there it has the KV of all before. For a draft head: see `engine.draft_models`."""
    verified_rows: Int32Array = field(default_factory=_NO_NUMBERS.copy)
    """[rows] int32: rows whose last step had drafts. Their lengths after it, which depend on what was sampled."""
    verified_lengths: Int32Array = field(default_factory=_NO_NUMBERS.copy)
    """[rows] int32: tokens whose KV is in the pages and counts."""
    verified_tokens: Int32Array = field(default_factory=_NO_NUMBERS.copy)
    """[rows] int32: the token behind those, which the row feeds next."""

    @property
    def sampled_rows(self) -> Int32Array:
        """Rows that sample a token, in the order of `StepResult.tokens`: last chunks first, then decode rows. [rows] int32."""
        if not self.chunks:
            return self.decode_rows
        last = np.array([chunk.row for chunk in self.chunks if chunk.last], dtype=np.int32)
        return np.concatenate([last, self.decode_rows])

    @property
    def rows(self) -> Int32Array:
        """Rows that the forward computes, each once. [rows] int32."""
        if not self.chunks:
            return self.decode_rows
        chunks = np.array([chunk.row for chunk in self.chunks], dtype=np.int32)
        return np.concatenate([chunks, self.decode_rows])

    @property
    def draft_offsets(self) -> Int64Array:
        """[drafts] int64: how many tokens each draft is behind the one that its row feeds: 1, 2, … of each row."""
        numbers = np.arange(len(self.draft_rows))
        begins = np.flatnonzero(np.diff(self.draft_rows, prepend=-1))
        return 1 + numbers - np.repeat(begins, np.diff(begins, append=len(numbers)))

    @property
    def draft_places(self) -> Int64Array:
        """[drafts] int64: which of the decode rows each draft continues."""
        places = np.zeros(int(self.decode_rows.max(initial=0)) + 1, dtype=np.int64)
        places[self.decode_rows] = np.arange(len(self.decode_rows))
        return places[self.draft_rows]

    @property
    def decoding(self) -> int:
        """How many rows the forward decodes: a draft is computed as another row."""
        return len(self.decode_rows) + len(self.draft_rows)

    @property
    def chunk_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What one forward gave. Read log probabilities with `by_row()`, which is {} when no row asks for them:

    sampled = result.logprobs.by_row()  # row -> (the TokenLogprob of its token,)
    prompts = result.prompt_logprobs.by_row()  # row -> (TokenLogprob, …), to put behind those of the chunks before
    """

    plan: StepPlan
    tokens: Int32Array
    """[rows] int32, aligned with the plan's `sampled_rows`."""
    logprobs: Logprobs = NO_LOGPROBS
    """The sampled tokens whose rows ask for them (`SamplingParams.logprobs`): one for each such row, and those behind its drafts,
    of which the first ones count, as many as tokens do."""
    prompt_logprobs: Logprobs = NO_LOGPROBS
    """For rows that ask for them and have no answer yet. A chunk [start, end) reports the tokens behind its own, which are
    [start + 1, end + 1), and the last chunk [start + 1, end): a prompt's are complete with its first token."""
    embeddings: Mapping[int, bytes] = field(default_factory=dict)
    """Row -> the embedding of its prompt, float32, little-endian; for the last chunks whose rows ask for it
    (`SamplingParams.pooling`). What such a row samples counts for nothing."""
    failed: Mapping[int, TandemError] = field(default_factory=dict)
    """Row -> why its answer cannot go on: its grammar cannot be followed. What it samples counts for nothing."""
    drafted: Int32Array = field(default_factory=_NO_NUMBERS.copy)
    """[drafts] int32: what was sampled behind each of the plan's drafts. It counts if that draft and those before it are right;
    see `count_right`."""
    drafting_s: tuple[float, float] = (0.0, 0.0)
    """What the draft model took before the forward: its first step, in which it computes what it lacks, and those after it. A
    draft head: what the served model computed for it, and its own steps."""
    failed_behind: Mapping[int, int] = field(default_factory=dict)
    """Rows of `failed` that failed behind drafts which are right -> how many tokens of the step come before that: they count."""


def count_right(plan: StepPlan, tokens: Int32Array, drafted: Int32Array) -> Int32Array:
    """How many drafts of each decode row are right: those that are what was sampled before them, up to the first that is not.

    tokens, drafted: those of a `StepResult`. Returns [decode rows] int32; a row's answer grows by one token more.
    """
    rows, right = len(plan.decode_rows), np.zeros(len(plan.decode_rows), dtype=np.int32)
    if len(plan.draft_rows):
        at, offsets = plan.draft_places, plan.draft_offsets
        is_first = offsets == 1
        before = np.roll(drafted, 1)
        before[is_first] = tokens[len(tokens) - rows :][at[is_first]]
        wrong = np.concatenate([[0], np.cumsum(plan.draft_tokens != before)])
        of_rows_before = wrong[np.arange(len(at)) - offsets + 1]
        right += np.bincount(at, wrong[1:] == of_rows_before, rows).astype(np.int32)
    return right


K = TypeVar("K")
T = TypeVar("T")


class ExecutorFailed(TandemError):
    """The executor can compute nothing more, so the instance ends. step: the number of the step that has failed, if one has."""

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What an executor holds. Known when it is loaded, and constant from then on."""

    model: ModelIdentity
    layout: KVLayout
    total_pages: int
    max_rows: int
    memory: MemoryRegion
    eos_token_ids: tuple[int, ...]
    device: str
    choices: EngineChoices = EngineChoices()
    weights: Digest = Digest("")
    """What it computes with at first."""
    max_adapters: int = 0
    """Most adapters that it holds at once."""
    adapters_per_batch: int = 0
    """Most different ones that the rows of a batch have."""


class Work(Protocol):
    """What is done beside the steps, such as a grammar that is made ready."""

    @property
    def ends_s(self) -> float | None:
        """When it ends, if that is known in advance; None: its process's loop is woken then."""

    def poll(self) -> str | None:
        """Its result, once it is done; None before. Raises an error of the tree when it cannot be done."""


class FutureWork(Generic[T]):
    """Work that ends with a future. Implements `Work`. wake: called then, on any thread. result: what `poll` tells, and does, on
    the thread that polls."""

    ends_s: float | None = None

    def __init__(self, future: "Future[T]", wake: Callable[[], None] | None = None, result: Callable[[T], str] = str) -> None:
        self._future, self._result = future, result
        if wake is not None:
            future.add_done_callback(lambda _: wake())

    def poll(self) -> str | None:
        return self._result(self.wait()) if self._future.done() else None

    def wait(self) -> T:
        """Wait until it has ended. Raises what `poll` raises. An error is raised as a copy: each raise adds frames to an error,
        and who keeps the future would keep what they hold."""
        error = self._future.exception()
        if error is not None:
            raise copy.copy(error)
        return self._future.result()


def ended_work(outcome: str | TandemError) -> FutureWork[str]:
    """What was done at once, or refused without a look."""
    future: Future[str] = Future()
    if isinstance(outcome, str):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
    return FutureWork(future)


def take_done(under_way: dict[K, Work]) -> Iterator[tuple[K, str, Failed | None]]:
    """Take out the work that has ended, each with its result, or with why it could not be done."""
    for key, work in list(under_way.items()):
        result: str | None = ""
        failed: Failed | None = None
        try:
            result = work.poll()
        except TandemError as error:
            failed = Failed.of(error)
        if result is not None:
            del under_way[key]
            yield key, result, failed


class StepHandle(Protocol):
    """A step in flight."""

    @property
    def ends_s(self) -> float | None:
        """When the step ends, if that is known in advance; None: the executor wakes its process's loop then."""

    @property
    def progress(self) -> int:
        """Grows while a long step computes, so that it can be told from one that is stuck. It may stay 0."""

    @property
    def layers_done(self) -> int:
        """How many layers, from the first on, have the KV of the plan's chunks in the pages.

        The executor wakes its process's loop a few times while this grows, not at every layer. It may stay 0 until the step is
        complete."""

    def poll(self) -> StepResult | None:
        """The result once the step is complete (its KV is in the pages), None before. Raises ExecutorFailed."""


class Executor(Protocol):
    """Runs plans in the order of their launch. Launching never blocks. When a step completes, the implementation wakes its
    process's loop by the `wake` callable that it got at construction."""

    @property
    def description(self) -> EngineDescription: ...

    def launch(self, plan: StepPlan) -> StepHandle: ...

    def prepare(self, grammar: Grammar, owner: str = "") -> Work:
        """Begin to make the grammar ready, at this owner's turn (see `Terms`). Never blocks. A row with a grammar is launched
        only when it is ready; the implementation wakes its process's loop then."""

    @property
    def weights(self) -> Digest:
        """The digest of those that plans are computed with."""

    def stage(self, source: WeightsSource) -> Work:
        """Begin to make new weights ready; the result is the digest of the whole model with them. Never blocks; steps go on
        meanwhile. What was staged before is dropped."""

    def switch(self) -> None:
        """Use what was staged, and is ready, for the plans that are launched from now on. No step is in flight."""

    def drop_staged(self) -> None:
        """Forget what was staged, ready or not. Idempotent."""

    def perform(self, task: Task) -> Work:
        """Begin a task. Never blocks; steps go on meanwhile. Raises an error of the tree for one that it never can do."""

    def free_adapter(self, digest: Digest) -> None:
        """Forget an adapter. No row that is in flight has it, and none with it begins before it is read again. Idempotent."""

    def digest_pages(self, pages: Int32Array) -> bytes:
        """The CRC-32 of each page's bytes, little-endian uint32. pages: [pages] int32. Blocks; for --verify-pages and tests.

        No step in flight may write these pages."""

    def close(self) -> None:
        """Stop after the steps in flight. Idempotent."""
