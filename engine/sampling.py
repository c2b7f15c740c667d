"""The sampler: from the logits of a step to its tokens, and to the log probabilities that are reported of them.

Owns which rows need more than a draw from the model's own distribution: those that a logits processor concerns, and those that
report log probabilities. A step without such rows pays for one look at an array at most. Waits for nothing on the device. Knows
processors and kernels by their ports; does not know how logits are computed, or how a token is drawn from them.

    logits ─┬─► log probabilities of the model's own distribution
            └─► processors ─► temperature, filters, draw ─► processors get the token
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import TandemError
from common.executor import Logprobs, RowStart, StepPlan
from common.ids import Int32Array, Int64Array
from engine.logits_processors import row_parts
from engine.ports import DEVICE_FAULTS, ROW_FAULTS, LogitsProcessor, RowSampling, SampledRows
from engine.rows import HostStep, Staging
from engine.torch_kernels import Kernels


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobsOnDevice:
    """The log probabilities of some tokens, on their way to the host."""

    rows: Int64Array
    """[tokens] on the host, as in `Logprobs`."""
    top_counts: Int64Array
    packed: Tensor
    """As `measure_logprobs` returns it."""

    def read(self, packed: Int32Array) -> Logprobs:
        """packed: the same, on the host."""
        width = (packed.shape[1] - 3) // 2
        return Logprobs(
            rows=self.rows.astype(np.int32),
            token_ids=packed[:, 0],
            logprobs=packed.view(np.float32)[:, 1],
            ranks=packed[:, 2],
            top_counts=self.top_counts.astype(np.int32),
            top_ids=packed[:, 3 : 3 + width],
            top_logprobs=packed.view(np.float32)[:, 3 + width :],
        )


NOT_CHOSEN = -1


def measure_logprobs(logits: Tensor, token_ids: Tensor, most: int, chosen: Tensor | None = None) -> Tensor:
    """One token's log probability and rank for each row, and the likeliest tokens: in one tensor, so that they come in one copy.

    logits: [tokens, vocab]. token_ids: [tokens] int64. chosen: [tokens, most] int64, tokens in place of the likeliest, or
    NOT_CHOSEN. Returns [tokens, 3 + 2 * most] int32: the token, the bits of its log probability, its rank, the likeliest tokens,
    and the bits of their log probabilities. A vocabulary of fewer tokens than `most` gives fewer columns.
    """
    most = min(most, logits.shape[1])
    packed: list[Tensor] = []
    for part in row_parts(len(logits)):
        in_place = None if chosen is None else chosen[part, :most]
        packed.append(_pack(logits[part].float(), token_ids[part, None], most, in_place))
    return torch.cat(packed)


def _pack(logits: Tensor, token_ids: Tensor, most: int, chosen: Tensor | None) -> Tensor:
    rank = (logits >= logits.gather(1, token_ids)).sum(dim=-1, keepdim=True, dtype=torch.int32)
    logprobs = logits.log_softmax(dim=-1)
    beside = logprobs.topk(most, dim=-1).indices
    if chosen is not None:
        beside = torch.where(chosen == NOT_CHOSEN, beside, chosen)
    own_bits, bits = (logprobs.gather(1, each).view(torch.int32) for each in (token_ids, beside))
    return torch.cat([token_ids.int(), own_bits, rank, beside.int(), bits], dim=1)


class _ReportedTokens(NamedTuple):
    """Tokens whose log probabilities a step reports. All [tokens] int64."""

    rows: Int64Array
    top_counts: Int64Array
    """How many of the likeliest tokens are reported beside each."""
    at: Int64Array
    """Which of the sampled rows they are; for those of prompts, behind which of the step's tokens they come."""
    token_ids: Int64Array
    """For sampled ones: what `measure_logprobs` calls chosen, row by row; empty where no row has chosen any."""


_NOTHING = -1
_NONE = np.empty(0, dtype=np.int64)
_NO_TOKENS = _ReportedTokens(_NONE, _NONE, _NONE, _NONE)


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedDrafts:
    """The rows of a step with drafts that processors concern, as places among the sampled ones. All int64, on the host."""

    owners: Int64Array
    """[sampled]: the row of each."""
    begins: Int64Array
    """[rows]: what is drawn whatever the drafts are."""
    behind: Int64Array
    """[sampled]: the place of the draft behind each; -1: there is none."""
    foreseen: Int64Array
    """[sampled]: the drafted token."""
    failed: dict[int, TandemError] = field(default_factory=dict)
    """See `SampledRows`."""
    failed_behind: dict[int, int] = field(default_factory=dict)
    """See `StepResult`."""


@dataclass(frozen=True, slots=True, eq=False)
class SpecialRows:
    """What a step does for its rows besides a draw from the model's own distribution. Tensors are on the device, [n] int64."""

    processed: Sequence[tuple[LogitsProcessor, SampledRows]]
    """In the order in which they change logits."""
    again: Tensor
    """The rows that are drawn once more behind a graph, which knows no processors."""
    sampled: _ReportedTokens
    sampled_at: Tensor
    """`sampled.at` on the device."""
    chosen: Tensor
    """`sampled.token_ids` there."""
    prompt: _ReportedTokens
    prompt_at: Tensor
    prompt_tokens: Tensor
    drafts: ProcessedDrafts | None
    """In place of `processed` and `again`, if the step has drafts."""

    @property
    def changes_logits(self) -> bool:
        return len(self.processed) > 0 or self.drafts is not None

    broken: dict[int, TandemError]
    """Rows that a processor could not begin, and why."""

    @property
    def failed(self) -> dict[int, TandemError]:
        """Rows whose answers cannot go on, and why. Complete once the step's tokens are drawn."""
        if self.drafts is not None:
            return {**self.drafts.failed, **self.broken}
        return {row: error for _, rows in self.processed for row, error in rows.failed.items()} | self.broken


def _processed_drafts(host: HostStep, is_processed: NDArray[np.bool_]) -> ProcessedDrafts:
    """is_processed: [sampled]."""
    _, _, offsets, tokens = host.arrays.drafts.reshape(4, -1)
    sampled, drafted, decoded = len(host.sampled_owners), len(tokens), len(host.plan.decode_rows)
    places = np.arange(sampled - drafted, sampled)
    behind, foreseen = np.full((2, sampled), -1, dtype=np.int64)
    behind[np.where(offsets == 1, sampled - drafted - decoded + host.plan.draft_places, places - 1)] = places
    foreseen[places] = tokens
    begins = np.flatnonzero(is_processed[: sampled - drafted])
    return ProcessedDrafts(host.sampled_owners, begins, behind, foreseen)


@contextmanager
def _failing(processor: LogitsProcessor, rows: SampledRows) -> Iterator[None]:
    """What the processor raises fails the rows that it concerns, and no others: theirs are the only logits that it changes."""
    try:
        yield
    except DEVICE_FAULTS:
        raise
    except ROW_FAULTS as error:
        for row in rows.host.tolist():
            rows.failed.setdefault(row, _processor_failed(processor, error))


def _processor_failed(processor: LogitsProcessor, error: Exception) -> TandemError:
    return TandemError(f"{type(processor).__name__} failed for this request: {error}")


def drawn_logits(logits: Tensor, tokens: Tensor) -> Tensor:
    """The logit of each token, [rows] float32. logits: [rows, vocab]; tokens: [rows] int64.

    A draw takes NaN for the least of all and infinity for the most. So what it has drawn is not finite where the model's own
    numbers have overflowed, or nothing but NaN was left."""
    return logits.gather(1, tokens[:, None])[:, 0].float()


class Sampler:
    """Samples one token per row, which depends on its own row alone. processors: in the order in which they change logits. rows:
    how many the batch has."""

    def __init__(
        self,
        kernels: Kernels,
        processors: Sequence[LogitsProcessor] = (),
        rows: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self._kernels, self._processors = kernels, processors
        self._is_special, self._is_processed = np.zeros((2, rows), dtype=bool)
        self._has_special = False
        self._top_counts = np.full(rows, _NOTHING, dtype=np.int64)
        """How many of the likeliest tokens a row reports beside its own."""
        self._chosen: dict[int, tuple[int, ...]] = {}
        """The tokens that rows report in place of the likeliest."""
        self._broken: dict[int, TandemError] = {}
        """Rows that a processor could not begin, and why."""
        self._prompts: dict[int, tuple[Int32Array, int]] = {}
        """The prompts that rows report on, and how many of the likeliest tokens beside each of theirs."""
        self._staging = Staging(device or torch.device("cpu"))

    # --- on the host -------------------------------------------------------------------------------------------------------

    def start(self, starts: Sequence[RowStart]) -> None:
        """These rows begin anew. Call it before any work of their step is started."""
        if not starts:
            return
        for start in starts:
            row, sampling = start.row, start.sampling
            self._top_counts[row] = _NOTHING if sampling.logprobs is None else len(sampling.logprob_ids) or sampling.logprobs
            self._chosen.pop(row, None)
            if sampling.logprob_ids:
                self._chosen[row] = sampling.logprob_ids
            self._prompts.pop(row, None)
            if sampling.prompt_logprobs is not None and start.last_token is None and start.answer_tokens == 0:
                assert start.token_ids is not None
                self._prompts[row] = start.token_ids, sampling.prompt_logprobs
        rows = np.array([start.row for start in starts], dtype=np.int64)
        for row in self._broken.keys() & {start.row for start in starts}:
            del self._broken[row]
        if self._is_processed.any() or any(start.sampling.changes_logits for start in starts):
            self._is_processed[rows] = False
            for processor in self._processors:
                self._start(processor, starts)
                self._is_processed[rows] |= processor.concerns[rows]
        self._is_special[rows] = self._is_processed[rows] | (self._top_counts[rows] != _NOTHING)
        self._is_special[list(self._broken)] = True
        self._has_special = bool(self._is_special.any())

    def _start(self, processor: LogitsProcessor, starts: Sequence[RowStart]) -> None:
        """One after the other if that fails, so that only the row fails that the processor cannot begin."""
        try:
            processor.start(starts)
        except DEVICE_FAULTS:
            raise
        except ROW_FAULTS as error:
            if len(starts) > 1:
                for start in starts:
                    self._start(processor, [start])
                return
            processor.concerns[starts[0].row] = False
            self._broken[starts[0].row] = _processor_failed(processor, error)

    def prepare(self, plan: StepPlan, host: HostStep, behind_graph: bool) -> SpecialRows | None:
        """What is special about this step; None: nothing. behind_graph: a graph draws the tokens first."""
        rows = host.sampled_owners
        has_prompts = bool(self._prompts) and bool(plan.chunks)
        if not has_prompts and not (self._has_special and self._is_special[rows].any()):
            return None
        prompt = self._reported_of_prompts(plan) if has_prompts else _NO_TOKENS
        reporting = np.flatnonzero(self._top_counts[rows] != _NOTHING)
        sampled = self._reported_of_answers(rows[reporting], reporting)
        is_processed = self._is_processed[rows]
        drafts = _processed_drafts(host, is_processed) if len(plan.draft_rows) and is_processed.any() else None
        concerned = [(each, each.concerns[rows]) for each in self._processors] if drafts is None and is_processed.any() else []
        again, drawn = _NONE, rows
        if behind_graph and concerned:
            again = np.flatnonzero(np.any([which for _, which in concerned], axis=0))
            drawn, concerned = rows[again], [(each, which[again]) for each, which in concerned]
        processors = [(each, np.flatnonzero(which)) for each, which in concerned if which.any()]
        places = [(drawn[at], at) for _, at in processors]
        first = [again, sampled.at, sampled.token_ids, prompt.at, prompt.token_ids]
        sent = self._staging.send([*first, *(array for pair in places for array in pair)])
        on_device = zip(sent[5::2], sent[6::2], strict=True)
        processed = [
            (each, SampledRows(host_rows, device_rows, host_at, at))
            for (each, _), (host_rows, host_at), (device_rows, at) in zip(processors, places, on_device, strict=True)
        ]
        broken = {row: self._broken[row] for row in self._broken.keys() & set(rows.tolist())} if self._broken else {}
        return SpecialRows(processed, sent[0], sampled, sent[1], sent[2], prompt, sent[3], sent[4], drafts, broken)

    def _reported_of_answers(self, rows: Int64Array, at: Int64Array) -> _ReportedTokens:
        """at: which of the sampled rows these are."""
        top_counts, chosen = self._top_counts[rows], _NONE
        if not self._chosen.keys().isdisjoint(rows.tolist()):
            table = np.full((len(rows), top_counts.max()), NOT_CHOSEN)
            for place, row in enumerate(rows.tolist()):
                of_row = self._chosen.get(row, ())
                table[place, : len(of_row)] = of_row
            chosen = table.ravel()
        return _ReportedTokens(rows, top_counts, at, chosen)

    def _reported_of_prompts(self, plan: StepPlan) -> _ReportedTokens:
        """The token behind each token of the chunks, as far as it is one of the prompt."""
        parts, begin = list[_ReportedTokens](), 0
        for chunk in plan.chunks:
            if chunk.row in self._prompts:
                token_ids, top_count = self._prompts[chunk.row]
                behind = token_ids[chunk.start + 1 : chunk.start + 1 + len(chunk.token_ids)].astype(np.int64)
                rows, top_counts = np.full(len(behind), chunk.row), np.full(len(behind), top_count)
                parts.append(_ReportedTokens(rows, top_counts, begin + np.arange(len(behind)), behind))
                if chunk.last:
                    del self._prompts[chunk.row]
            begin += len(chunk.token_ids)
        return _ReportedTokens(*map(np.concatenate, zip(*parts, strict=True))) if parts else _NO_TOKENS

    # --- on the device -----------------------------------------------------------------------------------------------------

    def draw(
        self, logits: Tensor, rows: RowSampling | None, special: SpecialRows | None = None, likeliest: Tensor | None = None
    ) -> Tensor:
        """The tokens of the sampled rows, [rows] int64. The same operations for any rows without a processor, so that a CUDA
        graph may hold them.

        logits: [rows, vocab]; they stay the model's own if log probabilities are reported. rows: how these sample; None: all are
        greedy. likeliest: [rows] int64, the likeliest token of each row, if it is known.
        """
        if special is None or not special.processed:
            tokens = likeliest if rows is None and likeliest is not None else self._kernels.sample(logits, rows)
            if special is not None and special.drafts is not None:
                self._draw_behind_drafts(tokens, logits, rows, special.drafts)
            return tokens
        is_theirs = logits.dtype == torch.float32 and len(special.sampled_at) > 0
        return self._draw_processed(logits.clone() if is_theirs else logits.float().contiguous(), rows, special.processed)

    def redraw(self, tokens: Tensor, logits: Tensor, rows: RowSampling, special: SpecialRows) -> None:
        """Replace in `tokens` those that processors make others: a graph, which knows none, has drawn them. logits:
        [rows, vocab]. rows: all of the step."""
        if special.drafts is not None:
            self._draw_behind_drafts(tokens, logits, rows, special.drafts)
            return
        at = special.again
        tokens[at] = self._draw_processed(logits[at].float(), rows.of(at), special.processed)

    def _draw_processed(
        self, logits: Tensor, rows: RowSampling | None, processed: Sequence[tuple[LogitsProcessor, SampledRows]]
    ) -> Tensor:
        """logits: float32, contiguous; the processors change them in place."""
        for processor, of_rows in processed:
            with _failing(processor, of_rows):
                processor.apply(logits, of_rows)
        tokens = self._kernels.sample(logits, rows)
        for processor, of_rows in processed:
            with _failing(processor, of_rows):
                processor.sampled(of_rows, tokens[of_rows.at])
        return tokens

    def _draw_behind_drafts(self, tokens: Tensor, logits: Tensor, rows: RowSampling | None, drafts: ProcessedDrafts) -> None:
        """Replace in `tokens` those of rows that processors concern: the first of each row, then what is behind those drafts that
        are right, one draft further each time. So processors get no token that is not in the answer. Waits for the device if
        any of these rows has drafts."""
        at, drawn_before = drafts.begins, 0
        while len(at):
            owners = drafts.owners[at]
            which = [(each, np.flatnonzero(each.concerns[owners])) for each in self._processors]
            sent = self._staging.send([at, *(part for _, places in which for part in (places, owners[places]))])
            on_device = zip(sent[1::2], sent[2::2], strict=True)
            processed = [
                (each, SampledRows(owners[places], device_rows, places, device_at))
                for (each, places), (device_at, device_rows) in zip(which, on_device, strict=True)
                if len(places)
            ]
            drawn = self._draw_processed(logits[sent[0]].float(), None if rows is None else rows.of(sent[0]), processed)
            for row, error in [each for _, of_rows in processed for each in of_rows.failed.items()]:
                if row not in drafts.failed and drawn_before:
                    drafts.failed_behind[row] = drawn_before
                drafts.failed.setdefault(row, error)
            drawn_before += 1
            tokens[sent[0]] = drawn
            behind = drafts.behind[at]
            if (behind < 0).all():
                return
            at = behind[(behind >= 0) & (drafts.foreseen[behind] == drawn.cpu().numpy())]

    def logprobs(self, logits: Tensor, tokens: Tensor, special: SpecialRows | None) -> TokenLogprobsOnDevice | None:
        """Those of the sampled tokens. logits: [rows, vocab], the model's own. tokens: [rows] int64."""
        if special is None or not len(special.sampled_at):
            return None
        reported, at = special.sampled, special.sampled_at
        if len(at) < len(tokens):
            logits, tokens = logits[at], tokens[at]
        chosen = special.chosen.view(len(at), -1) if len(special.chosen) else None
        packed = measure_logprobs(logits, tokens, int(reported.top_counts.max()), chosen)
        return TokenLogprobsOnDevice(reported.rows, reported.top_counts, packed)

    def prompt_logprobs(
        self,
        hidden: Tensor,
        logits: Callable[[Tensor], Tensor],
        special: SpecialRows | None,
        between: Callable[[], None] | None = None,
    ) -> TokenLogprobsOnDevice | None:
        """Those of the prompts' tokens. hidden: of all the step's tokens. logits: the model's, computed for some at a time.
        between: called after those."""
        if special is None or not len(special.prompt_at):
            return None
        reported, at, tokens = special.prompt, special.prompt_at, special.prompt_tokens
        most = int(reported.top_counts.max())
        packed: list[Tensor] = []
        for part in row_parts(len(at)):
            packed.append(measure_logprobs(logits(hidden[at[part]]), tokens[part], most))
            if between is not None:
                between()
        return TokenLogprobsOnDevice(reported.rows, reported.top_counts, torch.cat(packed))
