"""Serves requests in random order: rows start, pause and end at any step, and the next request takes what was freed last.

Owns the schedule. Knows no executor: it is given a function that runs a plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from common.executor import Chunk, EngineDescription, RowStart, StepPlan
from common.ids import Int32Array
from common.sampling_params import SamplingParams
from tests.engine.driver import Run


@dataclass(slots=True, eq=False)
class Request:
    """tokens: how many it answers. answer: those so far. computed: tokens whose KV is in its pages."""

    prompt: Int32Array
    tokens: int
    sampling: SamplingParams
    answer: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    computed: int = 0


class Churn:
    """rows, pages: how many of the engine's are used, few of both so that they are soon used again."""

    def __init__(self, run: Run, engine: EngineDescription, rows: int, pages: int, seed: int) -> None:
        self._run, self._layout = run, engine.layout
        self._random = np.random.default_rng(seed)
        self._rows: list[Request | None] = [None] * rows
        self._free = self._random.permutation(pages).tolist()

    def serve(self, requests: Sequence[Request]) -> None:
        """Fill in the answers of all of them."""
        waiting = list(reversed(requests))
        step = 0
        while waiting or any(self._rows):
            step += 1
            plan = self._plan(step, waiting)
            if not len(plan.rows):
                continue  # all pause
            result = self._run(plan)
            for row, token in zip(plan.sampled_rows.tolist(), result.tokens.tolist(), strict=True):
                request = self._rows[row]
                assert request is not None
                request.answer.append(token)
                if len(request.answer) == request.tokens:
                    self._free += request.pages
                    self._rows[row] = None

    def _plan(self, step: int, waiting: list[Request]) -> StepPlan:
        """Chunks in some steps only, because a step with chunks is not a graph's."""
        prefills = self._random.random() < 0.3
        starts, chunks, decode = [], [], []
        grown: dict[int, int] = {}
        for row, request in enumerate(self._rows):
            if request is None:
                if waiting and prefills:
                    request = self._rows[row] = waiting.pop()
                    self._lease(request, len(request.prompt))
                    known = request.prompt if request.sampling.needs_tokens else None
                    starts.append(RowStart(row, np.array(request.pages, dtype=np.int32), request.sampling, token_ids=known))
            elif self._random.random() < 0.2:
                continue  # it pauses
            elif request.computed >= len(request.prompt):
                decode.append(row)
                request.computed += 1
                grown.update((row, page) for page in self._lease(request, request.computed))
            if request is not None and prefills and request.computed < len(request.prompt):
                part = request.prompt[request.computed :][: int(self._random.integers(1, 25))]
                chunks.append(Chunk(row, request.computed, part, last=request.computed + len(part) == len(request.prompt)))
                request.computed += len(part)
        rows, pages = (np.array(list(ids), dtype=np.int32) for ids in (grown.keys(), grown.values()))
        return StepPlan(
            step, tuple(starts), tuple(chunks), self._random.permutation(np.array(decode, dtype=np.int32)), rows, pages
        )

    def _lease(self, request: Request, tokens: int) -> list[int]:
        new = [self._free.pop() for _ in range(self._layout.pages_for(tokens) - len(request.pages))]
        request.pages += new
        return new
