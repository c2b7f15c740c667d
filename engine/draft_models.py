"""What proposes tokens before the step that verifies them: a small model, or a draft head that reads what the served model has
computed (EAGLE-3, Li et al. 2025).

Owns the order of their steps. What they compute changes no answer: drafts that are wrong are only not taken. A draft model's KV
lies in pages of its own, which have the numbers of the served model's: so each row's table is the same, and nobody counts its
pages. A head knows the last tokens of a row alone, so it needs nothing from an instance that computed the prompt; it has as many
pages for each row as it attends to.

    model   rows that start or grow ─► tokens that it lacks, or the last one of each row ─► its first draft ─► … ─► its last draft
    head    chunk of a row ─► did the row's own steps compute it? ─ no ─► the served model reads it once more ─┐
                                      └──────────────── yes ────────────────────────────────────────────────────┴─► drafts
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from common.drafting import HEAD_TAIL
from common.executor import Chunk, RowStart, StepPlan, StepResult
from common.ids import Int32Array
from common.sampling_params import SamplingParams
from engine.models.eagle3 import Eagle3Head
from engine.rows import RowFeatures
from engine.step_runner import PendingStep, StepRunner


class DraftModel:
    """steps: of the draft model. vocab_size: of the model that is served. Tables of embeddings may be padded to other sizes; what
    one of the models lacks is never sampled."""

    def __init__(self, steps: StepRunner, vocab_size: int) -> None:
        self._steps, self._vocab_size = steps, vocab_size

    def complete(self, plan: StepPlan) -> tuple[StepPlan, tuple[float, float]]:
        """The plan with the drafts that it leaves to this model, and `StepResult.drafting_s`. Waits for them. All rows that the
        plan starts or lets grow do so here too."""
        is_idle = not plan.draft_chunks and not len(plan.draft_rows)
        if is_idle and not plan.starts and not len(plan.grown_rows):
            return plan, (0.0, 0.0)
        own = StepPlan(
            plan.step,
            starts=tuple(RowStart(each.row, each.pages, plain_sampling(each.sampling), each.length) for each in plan.starts),
            chunks=tuple(replace(chunk, token_ids=self._known(chunk.token_ids)) for chunk in plan.draft_chunks),
            grown_rows=plan.grown_rows,
            grown_pages=plan.grown_pages,
        )
        if is_idle:
            self._steps.take_in(own)
            return plan, (0.0, 0.0)
        rows, depths = np.unique(plan.draft_rows, return_counts=True)
        began_s = time.perf_counter()
        steps = [self._first(own, plan, rows)]
        results = [self._steps.launch(steps[0]).wait()]
        caught_up_s = time.perf_counter()
        for offset in range(1, int(depths.max(initial=0)) + 1):
            steps.append(StepPlan(plan.step, decode_rows=rows[depths >= offset]))
        results += [each.wait() for each in [self._steps.launch(step) for step in steps[1:]]]
        seconds = caught_up_s - began_s, time.perf_counter() - caught_up_s
        return replace(plan, draft_tokens=np.minimum(collect(plan, results), self._vocab_size - 1)), seconds

    def _first(self, own: StepPlan, plan: StepPlan, rows: Int32Array) -> StepPlan:
        """The step that samples the first draft of each row. Steps go on until the last draft is fed as well: if all are right,
        the row goes on behind it. own: the step so far, with its chunks."""
        behind = np.array([chunk.row for chunk in own.chunks if chunk.last], dtype=np.int32)
        decode = rows[~np.isin(rows, behind)]
        told = np.isin(plan.verified_rows, decode)
        assert told.sum() == len(decode), "a row that goes on drafting had drafts in its last step"
        return replace(
            own,
            decode_rows=decode,
            verified_rows=plan.verified_rows[told],
            verified_lengths=plan.verified_lengths[told],
            verified_tokens=self._known(plan.verified_tokens[told]),
        )

    def _known(self, tokens: Int32Array) -> Int32Array:
        return np.minimum(tokens, self._steps.vocab_size - 1)


def collect(plan: StepPlan, results: Sequence[StepResult]) -> Int32Array:
    """`StepPlan.draft_tokens`: what these steps have sampled, one behind the other."""
    drafted = np.zeros((int(plan.draft_rows.max(initial=0)) + 1, len(results)), dtype=np.int32)
    for at, result in enumerate(results):
        rows = result.plan.sampled_rows
        is_drafted = rows < len(drafted)
        drafted[rows[is_drafted], at] = result.tokens[is_drafted]
    tokens: Int32Array = drafted[plan.draft_rows, plan.draft_offsets - 1]
    return tokens


def plain_sampling(asked: SamplingParams) -> SamplingParams:
    """That of a row in a draft model: with the same noise, and nothing that changes logits."""
    return SamplingParams(
        max_new_tokens=asked.max_new_tokens,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        seed=asked.seed,
    )


NOWHERE = -1


class DraftHead:
    """steps: of the head, over its pages. features: what it reads of the served model's steps. reread: has the served model
    compute what it reads of chunks whose KV is in the pages; the rows of that plan start and grow in it.

    A chunk of `StepPlan.draft_chunks` [start, end] has the tokens of places whose features the head reads, and one more, the last
    that is known: the head reads each place's features and the token behind it. Behind the last one follow the row's drafts. A
    chunk goes on where the one before it has ended, or begins the row anew.
    """

    def __init__(
        self, head: Eagle3Head, steps: StepRunner, features: RowFeatures, reread: Callable[[StepPlan], PendingStep]
    ) -> None:
        self._head, self._steps, self._features, self._reread = head, steps, features, reread
        rows, width = steps.batch.null, steps.batch.table.shape[1]
        self._pages = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
        """Those of each row. Rows share none: what the head computes of a place depends on where it began, and on the token
        behind the place, so it is no function of the tokens up to there."""
        self._base, self._end = np.full((2, rows), NOWHERE, dtype=np.int64)
        """At which place the head began each row, and how many it has read; NOWHERE: none."""
        self._kept_from = np.zeros(rows, dtype=np.int64)
        """From which place on features of the row are kept."""
        self._sampling: dict[int, SamplingParams] = {}

    def complete(self, plan: StepPlan) -> tuple[StepPlan, tuple[float, float]]:
        """See `DraftModel.complete`."""
        self._take_in(plan)
        chunks = sorted(plan.draft_chunks, key=lambda chunk: chunk.row)
        if not chunks:
            return plan, (0.0, 0.0)
        plan, reading_s = self._read_again(plan, chunks)
        began_s = time.perf_counter()
        rows = np.array([chunk.row for chunk in chunks], dtype=np.int32)
        depths = np.bincount(plan.draft_rows, minlength=int(rows.max()) + 1)[rows]
        first = self._first(plan, chunks)
        self._head.features = self._read(chunks)
        results = [self._steps.launch(first)]
        for offset in range(2, int(depths.max()) + 1):
            goes_on = np.flatnonzero(depths >= offset)
            self._head.features = self._head.carried[torch.from_numpy(goes_on).to(self._head.carried.device)]
            rows, depths = rows[goes_on], depths[goes_on]
            results.append(self._steps.launch(StepPlan(plan.step, decode_rows=rows)))
        drafted = collect(plan, [each.wait() for each in results])
        return replace(plan, draft_tokens=drafted), (reading_s, time.perf_counter() - began_s)

    def _take_in(self, plan: StepPlan) -> None:
        """The rows that start or compute chunks, which keep no features."""
        for start in plan.starts:
            row = start.row
            self._base[row] = self._end[row] = NOWHERE
            self._kept_from[row] = start.length
            self._sampling[row] = plain_sampling(start.sampling)
        for chunk in plan.chunks:
            self._kept_from[chunk.row] = chunk.start + len(chunk.token_ids)

    def _read_again(self, plan: StepPlan, chunks: list[Chunk]) -> tuple[StepPlan, float]:
        """Has the served model compute what is not kept of these chunks' places. Returns what is left of the plan, and the
        seconds that it took; 0: nothing was to be computed."""
        unread = [each for each in chunks if each.start < self._kept_from[each.row]]
        if not unread:
            return plan, 0.0
        began_s = time.perf_counter()
        for chunk in unread:
            self._kept_from[chunk.row] = chunk.start
        again = tuple(replace(chunk, token_ids=chunk.token_ids[:-1], last=False) for chunk in unread)
        none = StepPlan(plan.step)
        entering = replace(plan, chunks=again, decode_rows=none.decode_rows, draft_rows=none.draft_rows, draft_chunks=())
        self._reread(replace(entering, draft_tokens=none.draft_tokens)).wait()
        reading_s = time.perf_counter() - began_s
        left = replace(
            plan, starts=(), grown_rows=none.grown_rows, grown_pages=none.grown_pages, verified_rows=none.verified_rows
        )
        return replace(left, verified_lengths=none.verified_lengths, verified_tokens=none.verified_tokens), reading_s

    def _first(self, plan: StepPlan, chunks: list[Chunk]) -> StepPlan:
        """The step that samples the first draft of each row."""
        starts, own = list[RowStart](), list[Chunk]()
        for chunk in chunks:
            row, places = chunk.row, len(chunk.token_ids) - 1
            if chunk.start != self._end[row] or places >= HEAD_TAIL:
                self._base[row] = chunk.start
                starts.append(RowStart(row, self._pages[row], self._sampling[row], before=chunk.start + 1))
            self._end[row] = chunk.start + places
            own.append(Chunk(row, int(chunk.start - self._base[row]), chunk.token_ids[1:], last=True))
        return StepPlan(plan.step, starts=tuple(starts), chunks=tuple(own))

    def _read(self, chunks: list[Chunk]) -> torch.Tensor:
        """The features of these chunks' places, [places, features]."""
        counts = [len(chunk.token_ids) - 1 for chunk in chunks]
        rows = np.repeat([chunk.row for chunk in chunks], counts)
        places = np.concatenate([chunk.start + np.arange(count) for chunk, count in zip(chunks, counts, strict=True)])
        device = self._steps.batch.table.device
        return self._features.of(torch.from_numpy(rows).to(device), torch.from_numpy(places).to(device))
