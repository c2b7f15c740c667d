"""The timed executor: steps take the time that a cost gives them and compute nothing. For simulation and load tests.

Owns when each step ends, and the words that answers are made of. Reads only the clock it was given; nothing runs in the
background. Writes to no page. `timed_checkpoint.py` makes one for a real process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.engine.executor import EngineDescription
from common.engine.grammars import AnythingGoes
from common.engine.logprobs import NO_LOGPROBS, Logprobs
from common.engine.plan import Plan, StepResult
from common.ids import Int32Array
from common.messages import TokenLogprob
from common.pages.digest import digest
from common.sampling_params import Grammar, SamplingParams


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: a constant, and what each prompt token and each decode row adds."""

    step_s: float
    chunk_token_s: float
    decode_row_s: float

    def seconds(self, plan: Plan) -> float:
        return self.step_s + self.chunk_token_s * plan.chunk_tokens + self.decode_row_s * len(plan.decode_rows)


class Pace:
    """When steps end: one after the other, as on a device. cost: of each step. clock: returns seconds."""

    def __init__(self, cost: StepCost, clock: Callable[[], float]) -> None:
        self.cost = cost
        self.clock = clock
        self._busy_until_s = 0.0

    def add(self, plan: Plan) -> float:
        """Returns when the plan's step ends, on the clock. It begins now, or when the step before it ends."""
        self._busy_until_s = max(self.clock(), self._busy_until_s) + self.cost.seconds(plan)
        return self._busy_until_s


_ZERO = np.zeros(1, dtype="<f4").tobytes()


def _certain(tokens: Sequence[tuple[int, int]]) -> Logprobs:
    """tokens: each with its row before it."""
    return Logprobs.of([row for row, _ in tokens], [TokenLogprob(token, 0.0, 1) for _, token in tokens])


@dataclass(slots=True, eq=False)
class TimedStep:
    """A step in flight until the clock reaches `ends_s`."""

    result: StepResult
    ends_s: float
    clock: Callable[[], float]
    layers_done: int = 0

    def poll(self) -> StepResult | None:
        return self.result if self.clock() >= self.ends_s else None


class TimedExecutor:
    """Implements `common.engine.executor.Executor`.

    words: [words] the token ids that answers consist of, in this order again and again; a request's seed chooses the first. So a
    token depends on (seed, position), and an answer that is resumed elsewhere goes on as it would have. pages: [pages, bytes] the
    pool; left out, pages have no bytes.

    It is sure of every token: where log probabilities are asked for, each is 0 and of rank 1, without alternatives. An embedding
    is one zero.
    """

    def __init__(
        self,
        description: EngineDescription,
        pace: Pace,
        words: Sequence[int] | Int32Array = (10,),
        pages: NDArray[np.uint8] | None = None,
    ) -> None:
        self.description = description
        self._pace = pace
        self._words = np.asarray(words, dtype=np.int32)
        self.pages = np.zeros((description.total_pages, 0), dtype=np.uint8) if pages is None else pages
        self._next = np.zeros(description.max_rows, dtype=np.int64)
        """For each row, seed and length: which word follows."""
        self._reports: dict[int, SamplingParams] = {}
        """The rows that ask for log probabilities."""
        self._pooled: set[int] = set()
        """The rows that ask for an embedding."""

    def launch(self, plan: Plan) -> TimedStep:
        for start in plan.starts:
            self._next[start.row] = start.sampling.seed % len(self._words) + start.length
            self._reports.pop(start.row, None)
            if start.sampling.logprobs is not None or start.sampling.prompt_logprobs is not None:
                self._reports[start.row] = start.sampling
            (self._pooled.discard if start.sampling.pooling is None else self._pooled.add)(start.row)
        for chunk in plan.chunks:
            self._next[chunk.row] += len(chunk.token_ids)
        self._next[plan.decode_rows] += 1
        tokens = self._words[self._next[plan.sampled_rows] % len(self._words)]
        reported = self._logprobs(plan, tokens) if self._reports else (NO_LOGPROBS, NO_LOGPROBS)
        embeddings = {chunk.row: _ZERO for chunk in plan.chunks if chunk.last and chunk.row in self._pooled}
        result = StepResult(plan, tokens, *reported, embeddings)
        return TimedStep(result, self._pace.add(plan), self._pace.clock)

    def _logprobs(self, plan: Plan, tokens: Int32Array) -> tuple[Logprobs, Logprobs]:
        asked = self._reports
        sampled = [
            (row, token)
            for row, token in zip(plan.sampled_rows.tolist(), tokens.tolist(), strict=True)
            if row in asked and asked[row].logprobs is not None
        ]
        prompts = [
            (chunk.row, token)
            for chunk in plan.chunks
            if chunk.row in asked and asked[chunk.row].prompt_logprobs is not None
            for token in chunk.token_ids[0 if chunk.start else 1 :].tolist()
        ]
        return _certain(sampled), _certain(prompts)

    def prepare(self, grammar: Grammar, owner: str = "") -> AnythingGoes:
        return AnythingGoes(grammar, "the timed executor")

    def digest_pages(self, pages: Int32Array) -> bytes:
        return digest(self.pages[page] for page in pages.tolist())

    def close(self) -> None:
        """Nothing to stop."""
