"""Plans and their results: what a scheduler decided for the next forward, as pure data.

Owns the vocabulary between scheduler and executor. Knows no tensors, requests, messages or time.

A *row* is a place in the executor's persistent batch. A row's life:

    RowStart ─► Chunk, Chunk, … Chunk(last) ─► in decode_rows, step after step
    RowStart(with last_token) ────────────────► in decode_rows, step after step
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from common.engine.logprobs import NO_LOGPROBS, Logprobs
from common.errors import TandemError
from common.ids import Int32Array
from common.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class RowStart:
    """Put a request into a row.

    pages: [pages] int32, the page ids that the row holds so far, in token order; `Plan.grown_pages` adds to them. length: tokens
    whose KV is in those pages. last_token: the token to feed at position `length` if the row decodes at once (its KV is not in
    the pages yet); None if chunks come first.

    token_ids: [tokens] int32, all that is known of the request, last_token included; None if the sampling parameters do not need
    them (`SamplingParams.needs_tokens`). answer_tokens: how many of them, the last ones, are the answer's so far.
    """

    row: int
    pages: Int32Array
    sampling: SamplingParams
    length: int = 0
    last_token: int | None = None
    token_ids: Int32Array | None = None
    answer_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Compute prompt tokens [start, start + len(token_ids)) of a row. The last chunk samples the row's next token.

    token_ids: [tokens] int32.
    """

    row: int
    start: int
    token_ids: Int32Array
    last: bool


def _no_rows() -> Int32Array:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One forward. Applied in this order: starts, growth, then chunks and decode rows in one forward.

    grown_rows, grown_pages: [grown] int32; row grown_rows[i] gets page grown_pages[i] after those that it holds. A row occurs at
    most once. decode_rows: [rows] int32; each feeds its last sampled token at its length, writes that token's KV, and samples the
    next. The plan before may still be computing that token: executors run plans in order.
    """

    step: int
    starts: tuple[RowStart, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    decode_rows: Int32Array = field(default_factory=_no_rows)
    grown_rows: Int32Array = field(default_factory=_no_rows)
    grown_pages: Int32Array = field(default_factory=_no_rows)

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
    def chunk_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """tokens: [rows] int32, aligned with the plan's `sampled_rows`.

    logprobs: of the sampled tokens whose rows ask for them (`SamplingParams.logprobs`), one for each such row.

    prompt_logprobs: for rows that ask for them and have no answer yet. A chunk [start, end) tells of the tokens behind its own,
    which are [start + 1, end + 1), and the last one of [start + 1, end): a prompt's are complete with its first token.

    Read both with `by_row()`, which is {} when nobody asks:

        sampled = result.logprobs.by_row()  # row -> (the TokenLogprob of its token,)
        prompts = result.prompt_logprobs.by_row()  # row -> (TokenLogprob, …), to put behind those of the chunks before

    embeddings: row -> the embedding of its prompt, float32, little-endian; of the last chunks whose rows ask for it
    (`SamplingParams.pooling`). What such a row samples counts for nothing.

    failed: row -> why its answer cannot go on: its grammar cannot be followed. What it samples counts for nothing.
    """

    plan: Plan
    tokens: Int32Array
    logprobs: Logprobs = NO_LOGPROBS
    prompt_logprobs: Logprobs = NO_LOGPROBS
    embeddings: Mapping[int, bytes] = field(default_factory=dict)
    failed: Mapping[int, TandemError] = field(default_factory=dict)
