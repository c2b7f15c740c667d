"""Drives an engine as schedulers do: prompts in chunks, answers token by token, chunks of some beside decode steps of others.

Owns which pages a row gets, and when. Knows no executor: it is given a function that runs a plan.
"""

from collections.abc import Callable, Sequence

import numpy as np

from common.executor import Chunk, EngineDescription, RowStart, StepPlan, StepResult
from common.ids import Digest, Int32Array
from common.sampling_params import SamplingParams

Run = Callable[[StepPlan], StepResult]


class Driver:
    """Every prompt in a row of its own, on scattered pages.

    growing: a row starts without the last page of its prompt, which it gets in the same plan, and gets each further page in the
    plan that first writes there; else it starts with all of them.
    """

    def __init__(
        self,
        run: Run,
        engine: EngineDescription,
        growing: bool = False,
        adapters: Sequence[Digest] | None = None,
    ) -> None:
        """adapters: of each prompt; None: the model alone computes all."""
        self._run = run
        self._layout = engine.layout
        self._growing, self._adapters = growing, adapters
        self._pages = iter(np.random.default_rng(5).permutation(engine.total_pages).tolist())
        self._held: list[int] = []
        self._grown: dict[int, int] = {}
        self._starts: list[RowStart] = []

    def answers(
        self,
        prompts: Sequence[Int32Array],
        tokens: int,
        sampling: SamplingParams | Sequence[SamplingParams],
        chunk_tokens: int = 1000,
        answered: int = 0,
    ) -> list[list[int]]:
        """So many tokens for each prompt. sampling: of all prompts, or of each. answered: how many tokens of each prompt, the
        last ones, are of an answer that is resumed."""
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        answers: list[list[int]] = [[] for _ in prompts]
        done = [0] * len(prompts)
        step = 0
        while any(len(answer) < tokens for answer in answers):
            chunks, decode = [], []
            for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                if done[row] == 0:
                    self._start(row, prompt, answered, tokens, params[row])
                if done[row] < len(prompt):
                    part = prompt[done[row] : done[row] + chunk_tokens]
                    chunks.append(Chunk(row, done[row], part, last=done[row] + len(part) == len(prompt)))
                    done[row] += len(part)
                elif len(answer) < tokens:
                    decode.append(row)
                    self._reach(row, len(prompt) + len(answer))
            step += 1
            plan = self._plan(step, chunks, decode)
            result = self._run(plan)
            for row, token in zip(plan.sampled_rows.tolist(), result.tokens.tolist(), strict=True):
                answers[row].append(token)
        return answers

    def _start(self, row: int, prompt: Int32Array, answered: int, tokens: int, sampling: SamplingParams) -> None:
        own, most = (self._layout.pages_for(length) for length in (len(prompt), len(prompt) + tokens - 1))
        pages = own - 1 if self._growing else most
        taken = np.array([next(self._pages) for _ in range(pages)], dtype=np.int32)
        known = prompt if sampling.needs_tokens else None
        adapter = Digest("") if self._adapters is None else self._adapters[row]
        self._starts.append(RowStart(row, taken, sampling, token_ids=known, answer_tokens=answered, adapter=adapter))
        self._held.append(pages)
        self._reach(row, len(prompt))

    def _reach(self, row: int, tokens: int) -> None:
        """The row needs pages for so many tokens: at most one more than it holds."""
        if self._layout.pages_for(tokens) > self._held[row]:
            self._grown[row] = next(self._pages)
            self._held[row] += 1

    def _plan(self, step: int, chunks: list[Chunk], decode: list[int]) -> StepPlan:
        plan = StepPlan(
            step,
            starts=tuple(self._starts),
            chunks=tuple(chunks),
            decode_rows=np.array(decode, dtype=np.int32),
            grown_rows=np.array(list(self._grown), dtype=np.int32),
            grown_pages=np.array(list(self._grown.values()), dtype=np.int32),
        )
        self._starts, self._grown = [], {}
        return plan


def handed_off(
    run: Run, prompts: Sequence[Int32Array], sampling: Sequence[SamplingParams], tokens: int, pages_per_row: int, first_row: int
) -> list[list[int]]:
    """The answers when the prompts are computed in the first rows, and so many tokens in the rows from another one on, which get
    the pages."""
    count = len(prompts)
    pages = np.arange(count * pages_per_row, dtype=np.int32).reshape(count, -1)
    given = list(zip(pages, sampling, prompts, strict=True))
    starts = tuple(RowStart(row, pages, params, token_ids=prompt) for row, (pages, params, prompt) in enumerate(given))
    chunks = tuple(Chunk(row, 0, prompt, last=True) for row, prompt in enumerate(prompts))
    answers = [[token] for token in run(StepPlan(1, starts, chunks)).tokens.tolist()]
    known = [np.append(prompt, np.int32(answer[0])) for prompt, answer in zip(prompts, answers, strict=True)]
    moved = tuple(
        RowStart(
            first_row + row, pages, params, length=len(prompt), last_token=int(known[row][-1]), token_ids=known[row],
            answer_tokens=1,
        )
        for row, (pages, params, prompt) in enumerate(given)
    )  # fmt: skip
    rows = np.arange(first_row, first_row + count, dtype=np.int32)
    for step in range(tokens - 1):
        result = run(StepPlan(2 + step, moved if step == 0 else (), decode_rows=rows))
        for answer, token in zip(answers, result.tokens.tolist(), strict=True):
            answer.append(token)
    return answers
