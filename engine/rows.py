"""The batch on the device: one entry for each running request, and how the host changes it without waiting.

Owns the page table, lengths, last tokens and sampling parameters, how these are packed, and the pinned buffers through which a
step's arrays are copied. A plan changes only the rows that start or grow; everything else stays on the device. Knows plans; does
not know models, attention or how a token is drawn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from common.executor import RowStart, StepPlan
from common.ids import Int64Array
from engine.ports import RowSampling
from engine.torch_kernels import GREEDY_BELOW

BUFFERS = 4
"""More than the steps in flight, so that a buffer's former copy has long been made when its turn comes again."""

_ALIGNED = 2
"""Every tensor begins at a multiple of 16 bytes, because Triton compiles a kernel anew for tensors that do not."""


@dataclass(slots=True, eq=False)
class _PinnedBuffer:
    """Host memory that the device copies from, and the event behind the last copy."""

    numbers: Tensor
    copied: "torch.cuda.Event"


class Staging:
    """Copies arrays to the device, all of a step in one copy. On CPU the arrays are used where they lie."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_PinnedBuffer] = []
        self._turn = 0

    def send(self, arrays: Sequence[Int64Array]) -> list[Tensor]:
        """A tensor on the device for each array, [n] int64. The arrays may be changed after it returns, but not on CPU."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        begins = np.cumsum([0, *(len(array) + len(array) % _ALIGNED for array in arrays)]).tolist()
        buffer = self._next(begins[-1])
        numbers = buffer.numbers.numpy()
        for begin, array in zip(begins, arrays, strict=False):
            numbers[begin : begin + len(array)] = array
        sent = buffer.numbers[: begins[-1]].to(self._device, non_blocking=True)
        buffer.copied.record()
        return [sent[begin : begin + len(array)] for begin, array in zip(begins, arrays, strict=False)]

    def _next(self, numbers: int) -> _PinnedBuffer:
        if len(self._buffers) < BUFFERS:
            self._buffers.append(_pinned(numbers))
        buffer = self._buffers[self._turn]
        buffer.copied.synchronize()  # it has passed, unless BUFFERS steps were launched without one returning
        if len(buffer.numbers) < numbers:
            buffer = self._buffers[self._turn] = _pinned(numbers)
        self._turn = (self._turn + 1) % BUFFERS
        return buffer


def _pinned(numbers: int) -> _PinnedBuffer:
    """Room for at least that many. A power of two, because pinning memory is slow and the next step may be larger."""
    room = 2 ** max(12, (numbers - 1).bit_length())
    return _PinnedBuffer(torch.empty(room, dtype=torch.int64, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]


A = TypeVar("A", Int64Array, Tensor)


class StepArrays(NamedTuple, Generic[A]):
    """What the device must know about a step: first as arrays of the host, then as tensors. All [n] int64."""

    started: A
    """The rows that start."""
    started_state: A
    """Eight parts, one after the other, each with a number for each row that starts: length, last token, top-k, seed and what is
    before it, then the bits of temperature, top-p and the logarithm of min-p as float64."""
    table_rows: A
    """The rows of the entries of the page table that change."""
    table_columns: A
    table_pages: A
    token_ids: A
    """The tokens of the chunks, one chunk after the other."""
    positions: A
    token_rows: A
    """The row of each token of the chunks."""
    chunk_rows: A
    chunk_ends: A
    """The length of each chunk's row after the step."""
    decode_rows: A
    """With null rows at the end if the batch is padded."""
    sampled_rows: A
    sampled_at: A
    """Where among the step's tokens the sampled rows have theirs."""
    drafts: A
    """Four parts, one after the other, each with a number for each draft: its row of the batch, the row that it continues, how
    many tokens behind that row's own, and the drafted token."""
    verified: A
    """Three parts, each with a number for each row whose last step had drafts: the row, its length, and its last token."""


@dataclass(frozen=True, slots=True)
class HostStep:
    """A step as the host knows it."""

    plan: StepPlan
    arrays: StepArrays[Int64Array]
    decode_lengths: Int64Array
    """[decode rows], with this step's token; 1 for null rows."""
    is_greedy: bool
    """All of the sampled rows are."""
    decode_owners: Int64Array
    """[decode rows]: the row of the plan that each belongs to: those of drafts to the rows that they continue."""
    sampled_owners: Int64Array
    """The same for `sampled_rows`."""


_NONE = np.empty(0, dtype=np.int64)
_NOTHING = StepArrays(*[_NONE] * len(StepArrays._fields))


def _padded(numbers: Int64Array, size: int, filler: int) -> Int64Array:
    padded = np.full(size, filler)
    padded[: len(numbers)] = numbers
    return padded


class BatchTensors:
    """The rows of the batch. rows: how many requests are computed at once. pages: most pages of a row. spare_page: a page that
    holds no KV.

    After the rows lies the null row, which fills a batch to the size of its CUDA graph. Its one page is the spare page and its
    length stays 0, so what it computes is written where it does not count.

    Behind it lie as many rows for drafts. A drafted token is a row of its own for one step, which shares the pages of the row
    that it continues. So it is computed as a decode step would compute it, in the same graph.
    """

    def __init__(self, rows: int, pages: int, page_size: int, spare_page: int, device: torch.device) -> None:
        self.null = rows
        self.page_size = page_size
        self.table = torch.zeros(2 * rows + 1, pages, dtype=torch.int32, device=device)
        self.table[rows] = spare_page
        self._whole = torch.zeros(5, 2 * rows + 1, dtype=torch.int64, device=device)
        self._shares = torch.zeros(3, 2 * rows + 1, dtype=torch.float32, device=device)
        self.length, self.last_token, *_ = self._whole.unbind()
        self._leased, self._host_length = np.zeros((2, rows + 1), dtype=np.int64)
        self._is_greedy = np.ones(rows + 1, dtype=bool)
        self.owner = torch.arange(2 * rows + 1, device=device)
        """The row that each belongs to: those of drafts to the rows that they continue."""
        self._some_begin_later = False
        """Rows have tokens before them, which only those of a draft head do."""

    # --- on the host -------------------------------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan, decode_size: int) -> HostStep:
        """Take the plan's rows in on the host, and make the arrays of the step. decode_size: pad the decode rows to so many."""
        begun = self._start(plan.starts) if plan.starts else _NOTHING
        grown = plan.grown_rows.astype(np.int64)
        columns = self._leased[grown]
        assert (columns < self.table.shape[1]).all(), "a row would hold more pages than its context has"
        self._leased[grown] += 1
        chunks = self._chunk(plan) if plan.chunks else _NOTHING
        decoded = owners = plan.decode_rows.astype(np.int64)
        verified = _NONE
        if len(plan.verified_rows):
            self._host_length[plan.verified_rows] = plan.verified_lengths
            parts = plan.verified_rows, plan.verified_lengths, plan.verified_tokens
            verified = np.concatenate(parts, dtype=np.int64)
        self._host_length[decoded] += 1
        lengths, drafts = self._host_length[decoded], _NONE
        if len(plan.draft_rows):
            drafts = self._draft(plan)
            rows, of_drafts, offsets, _ = drafts.reshape(4, -1)
            decoded, owners = np.concatenate([decoded, rows]), np.concatenate([owners, of_drafts])
            lengths = np.concatenate([lengths, self._host_length[of_drafts] + offsets])
        planned = np.concatenate([chunks.chunk_rows, owners]) if plan.chunks else owners
        ends = np.concatenate([chunks.chunk_ends, lengths]) if plan.chunks else lengths
        assert (ends <= self._leased[planned] * self.page_size).all(), "a row would write beyond its pages"
        decode, of_decode = decoded, owners
        if decode_size > len(decoded):
            decode, lengths = _padded(decoded, decode_size, self.null), _padded(lengths, decode_size, 1)
            of_decode = _padded(owners, decode_size, self.null) if len(drafts) else decode
        sampled = np.concatenate([chunks.sampled_rows, decoded]) if plan.chunks else decoded
        of_sampled = sampled
        if len(drafts):
            of_sampled = np.concatenate([chunks.sampled_rows, owners])
        tokens = len(chunks.token_ids)
        arrays = chunks._replace(
            started=begun.started,
            started_state=begun.started_state,
            table_rows=np.concatenate([begun.table_rows, grown]),
            table_columns=np.concatenate([begun.table_columns, columns]),
            table_pages=np.concatenate([begun.table_pages, plan.grown_pages], dtype=np.int64),
            decode_rows=decode,
            sampled_rows=sampled,
            sampled_at=np.concatenate([chunks.sampled_at, np.arange(tokens, tokens + len(decoded))]),
            drafts=drafts,
            verified=verified,
        )
        is_greedy = bool(self._is_greedy[of_sampled].all())
        return HostStep(plan, arrays, lengths, is_greedy, of_decode, of_sampled)

    def _draft(self, plan: StepPlan) -> Int64Array:
        """`StepArrays.drafts`."""
        rows = self.null + 1 + np.arange(len(plan.draft_rows))
        return np.concatenate((rows, plan.draft_rows, plan.draft_offsets, plan.draft_tokens), dtype=np.int64)

    def _start(self, starts: tuple[RowStart, ...]) -> StepArrays[Int64Array]:
        """What the step has of the rows that start."""
        whole, share = np.zeros((5, len(starts)), dtype=np.int64), np.zeros((3, len(starts)), dtype=np.float64)
        for at, start in enumerate(starts):
            row, sampling = start.row, start.sampling
            whole[:, at] = start.length, start.last_token or 0, sampling.top_k, sampling.seed, start.before
            self._some_begin_later |= start.before > 0
            share[:, at] = sampling.temperature, sampling.top_p, math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
            self._leased[row], self._host_length[row] = len(start.pages), start.length
            self._is_greedy[row] = np.float32(sampling.temperature) < np.float32(GREEDY_BELOW)
        rows = np.array([start.row for start in starts], dtype=np.int64)
        return _NOTHING._replace(
            started=rows,
            started_state=np.concatenate([whole.ravel(), share.view(np.int64).ravel()]),
            table_rows=np.repeat(rows, [len(start.pages) for start in starts]),
            table_columns=np.concatenate([np.arange(len(start.pages)) for start in starts]),
            table_pages=np.concatenate([start.pages for start in starts], dtype=np.int64),
        )

    def _chunk(self, plan: StepPlan) -> StepArrays[Int64Array]:
        """What the step has of the chunks, some of which sample."""
        lengths = np.array([len(chunk.token_ids) for chunk in plan.chunks], dtype=np.int64)
        starts = np.array([chunk.start for chunk in plan.chunks], dtype=np.int64)
        rows = np.array([chunk.row for chunk in plan.chunks], dtype=np.int64)
        is_last = np.array([chunk.last for chunk in plan.chunks], dtype=bool)
        ends = np.cumsum(lengths)
        self._host_length[rows] = starts + lengths
        return _NOTHING._replace(
            token_ids=np.concatenate([chunk.token_ids for chunk in plan.chunks], dtype=np.int64),
            positions=np.arange(ends[-1]) - np.repeat(ends - lengths - starts, lengths),
            token_rows=np.repeat(rows, lengths),
            chunk_rows=rows,
            chunk_ends=starts + lengths,
            sampled_rows=rows[is_last],
            sampled_at=ends[is_last] - 1,
        )

    # --- on the device -----------------------------------------------------------------------------------------------------

    def apply(self, step: StepArrays[Tensor]) -> None:
        """Set the rows that start, and the pages that rows get. Starts nothing on the device when there are none."""
        if len(step.started):
            rows = step.started
            state = step.started_state.view(8, -1)
            self._whole[:, rows], self._shares[:, rows] = state[:5], state[5:].view(torch.float64).float()
        if len(step.table_rows):
            self.table.index_put_((step.table_rows, step.table_columns), step.table_pages.int())
        if len(step.verified):
            rows, lengths, tokens = step.verified.view(3, -1).unbind()
            self.length[rows], self.last_token[rows] = lengths, tokens
        if len(step.drafts):
            rows, owners, offsets, tokens = step.drafts.view(4, -1).unbind()
            self.table[rows], self._shares[:, rows] = self.table[owners], self._shares[:, owners]
            self._whole[:, rows], self.owner[rows] = self._whole[:, owners], owners
            self.length[rows] += offsets
            self.last_token[rows] = tokens

    def sampling(self, rows: Tensor) -> RowSampling:
        """How these rows sample their next token. Its noise depends on its position in the sequence, not on where the row began.
        Call it when the rows' lengths include the step's token. rows: [rows] int64."""
        position, _, top_k, seed, before = self._whole[:, rows].unbind()
        if self._some_begin_later:
            position = position + before
        temperature, top_p, min_logit = self._shares[:, rows].unbind()
        return RowSampling(temperature, top_k, top_p, min_logit, seed, position)


class RowFeatures:
    """What a draft head reads of the served model: of the last tokens of each row, hidden states of a few layers. Those of drafts
    that were wrong are written over. Source: EAGLE-3, Li et al. 2025.

    combine: [tokens, layers * hidden] → [tokens, features], when they are read: most never are. rows: of the batch. tokens: how
    many of each row are kept.
    """

    def __init__(self, combine: Callable[[Tensor], Tensor], rows: int, tokens: int, like: Tensor) -> None:
        """like: [layers * hidden], of their dtype and device."""
        self._combine, self._tokens = combine, tokens
        self._kept = like.new_zeros(rows + 1, tokens, like.shape[-1])

    def keep(self, rows: Tensor, positions: Tensor, states: Sequence[Tensor]) -> None:
        """rows, positions: [n] int64. states: of each layer, [n, hidden]."""
        self._kept[rows, positions % self._tokens] = torch.cat(list(states), dim=-1)

    def of(self, rows: Tensor, positions: Tensor) -> Tensor:
        """[n, features], where rows, positions are [n] int64."""
        return self._combine(self._kept[rows, positions % self._tokens])
