"""The draft model: a small model that proposes what may follow, before the step that verifies it.

Owns the order of its steps. Its KV lies in pages of its own, which have the numbers of the served model's: so each row's table
is the same, and nobody counts its pages. What it computes changes no answer: drafts that are wrong are only not taken.

    rows that start or grow ─► tokens that it lacks, or the last one of each row ─► its first draft ─► … ─► its last draft
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from common.executor import RowStart, StepPlan, StepResult
from common.ids import Int32Array
from common.sampling_params import SamplingParams
from engine.step_runner import StepRunner


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
