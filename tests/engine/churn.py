"""Serves requests in random order: rows start, pause, move and end at any step, and the next request takes the pages that were
freed last. With drafts: some are right, some are wrong, some reach the end of a page, of an answer or of the batch.

Owns the requests of every kind, the schedule and the drafts. Knows no executor: it is given a function that runs a plan. Answers
are those of the requests alone and without drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from common.executor import Chunk, EngineDescription, RowStart, StepPlan, StepResult, count_right
from common.ids import Digest, Int32Array
from common.messages import TokenLogprob
from common.sampling_params import SamplingParams
from tests.engine.checkpoints import VOCAB
from tests.engine.driver import Driver, Run

ROWS, PAGES, CONTEXT = 5, 120, 96
KINDS = [
    SamplingParams(max_new_tokens=99, temperature=0.0, logprobs=3),
    SamplingParams(max_new_tokens=99, temperature=0.9, seed=5),
    SamplingParams(max_new_tokens=99, temperature=1.1, top_k=7, seed=6, logprobs=0),
    SamplingParams(max_new_tokens=99, temperature=0.8, top_p=0.9, min_p=0.02, seed=7),
    SamplingParams(max_new_tokens=99, temperature=0.9, seed=8, repetition_penalty=1.4, frequency_penalty=0.5, logprobs=2),
    SamplingParams(max_new_tokens=99, temperature=0.0, min_tokens=9, stop_token_ids=tuple(range(0, VOCAB, 2)), bad_words=((7,),)),
    SamplingParams(
        max_new_tokens=99, temperature=0.0, logit_bias=((17, 9.0), (30, -5.0)), presence_penalty=1.0, logprob_ids=(5, 9),
        logprobs=2,
    ),
    SamplingParams(max_new_tokens=99, temperature=0.7, seed=9, min_tokens=6, logit_bias=((8, 6.0),), bad_words=((8, 8), (9,))),
]  # fmt: skip
DEPTHS = (0, 0, 1, 2, 4, 9)
Told = list[list[TokenLogprob]]
"""The log probabilities of each answer."""


@dataclass(slots=True, eq=False)
class Asked:
    """answer, told: what came so far, and the log probabilities of it. computed: tokens whose KV counts. behind: how far the
    executor is without being told."""

    prompt: Int32Array
    sampling: SamplingParams
    adapter: Digest = Digest("")
    expected: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    told: list[TokenLogprob] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    is_verified: bool = False

    @property
    def is_decoding(self) -> bool:
        return len(self.answer) > 0


class Churn:
    """rows: how many of the engine's are used. wrong: how often a draft is, and what is behind it then is any token. right,
    drafted: how many drafts were."""

    def __init__(self, run: Run, engine: EngineDescription, rows: int, pages: int, seed: int, wrong: float) -> None:
        self._run, self._layout, self._wrong = run, engine.layout, wrong
        self._most, self._vocab = engine.max_rows, engine.model.vocab_size
        self._random = np.random.default_rng(seed)
        self._rows: list[Asked | None] = [None] * rows
        self._free = self._random.permutation(pages).tolist()
        self.right = self.drafted = self.mixed = 0

    def serve(self, requests: Sequence[Asked]) -> None:
        waiting, step = list(reversed(requests)), 0
        while waiting or any(self._rows):
            step += 1
            assert step < 5000
            plan = self._plan(step, waiting)
            if len(plan.rows):
                self._take(plan, self._run(plan))

    def _take(self, plan: StepPlan, result: StepResult) -> None:
        assert len(result.tokens) == len(plan.sampled_rows) and len(result.drafted) == len(plan.draft_rows)
        right = dict(zip(plan.decode_rows.tolist(), count_right(plan, result.tokens, result.drafted).tolist(), strict=True))
        behind = {row: result.drafted[plan.draft_rows == row].tolist() for row in plan.decode_rows.tolist()}
        logprobs = result.logprobs.by_row()
        assert not result.failed
        for row, token in zip(plan.sampled_rows.tolist(), result.tokens.tolist(), strict=True):
            asked = self._rows[row]
            assert asked is not None
            new = [token]
            for draft, next_token in zip(asked.drafts, behind.get(row, ()), strict=True):
                if draft != new[-1]:
                    break
                new.append(next_token)
            assert len(new) == 1 + right.get(row, 0)
            self.right += len(new) - 1
            self.drafted += len(asked.drafts)
            asked.answer += new
            asked.told += logprobs.get(row, ())[: len(new)]
            asked.computed += len(new) - 1
            asked.is_verified, asked.drafts = len(asked.drafts) > 0, []
            if len(asked.answer) >= len(asked.expected):
                self._free += asked.pages
                self._rows[row] = None

    def _plan(self, step: int, waiting: list[Asked]) -> StepPlan:
        prefills, random = self._random.random() < 0.3, self._random
        starts, chunks, decode = list[RowStart](), list[Chunk](), list[int]()
        grown, verified = dict[int, int](), dict[int, int]()
        moved = set[int]()
        for row in random.permutation(len(self._rows)).tolist():
            asked = self._rows[row]
            if row in moved:
                continue
            if asked is None:
                if not waiting or not prefills:
                    continue
                asked = self._rows[row] = waiting.pop()
                asked.pages = [self._free.pop() for _ in range(self._layout.pages_for(len(asked.prompt)))]
                starts.append(self._start(row, asked))
            elif asked.is_decoding and random.random() < 0.2:
                continue
            elif asked.is_decoding and random.random() < 0.1 and None in self._rows:
                other = self._rows.index(None)
                self._rows[row], self._rows[other], row = None, asked, other
                starts.append(self._start(row, asked))
                asked.is_verified = False
                moved.add(row)
            if asked.is_decoding:
                decode.append(row)
                if asked.is_verified:
                    verified[row] = asked.computed
                asked.is_verified = False
                asked.computed += 1
            elif prefills:
                part = asked.prompt[asked.computed :][: int(random.integers(1, 25))]
                chunks.append(Chunk(row, asked.computed, part, last=asked.computed + len(part) == len(asked.prompt)))
                asked.computed += len(part)
        room = self._most - len(decode)
        for row in decode:
            asked = self._rows[row]
            assert asked is not None
            self._draft(asked, room)
            room -= len(asked.drafts)
            wants = asked.computed + int(random.random() < 0.8) * len(asked.drafts)
            if self._layout.pages_for(wants) > len(asked.pages):
                grown[row] = self._free.pop()
                asked.pages.append(grown[row])
            asked.drafts = asked.drafts[: len(asked.pages) * self._layout.page_size - asked.computed]
        decode = random.permutation(np.array(decode, dtype=np.int32)).tolist()
        drafts = [(row, token) for row in decode for token in self._of(row).drafts]
        self.mixed += bool(drafts) and bool(chunks)

        def ids(numbers: Sequence[int]) -> Int32Array:
            return np.array(numbers, dtype=np.int32)

        return StepPlan(
            step, tuple(starts), tuple(chunks), ids(decode), ids(list(grown)), ids(list(grown.values())),
            draft_rows=ids([row for row, _ in drafts]), draft_tokens=ids([token for _, token in drafts]),
            verified_rows=ids(list(verified)), verified_lengths=ids(list(verified.values())),
            verified_tokens=ids([self._of(row).answer[-1] for row in verified]),
        )  # fmt: skip

    def _of(self, row: int) -> Asked:
        asked = self._rows[row]
        assert asked is not None
        return asked

    def _start(self, row: int, asked: Asked) -> RowStart:
        known = np.append(asked.prompt, np.array(asked.answer, dtype=np.int32)).astype(np.int32)
        return RowStart(
            row, np.array(asked.pages, dtype=np.int32), asked.sampling, length=asked.computed,
            last_token=asked.answer[-1] if asked.answer else None, token_ids=known if asked.sampling.needs_tokens else None,
            answer_tokens=len(asked.answer), adapter=asked.adapter,
        )  # fmt: skip

    def _draft(self, asked: Asked, room: int) -> None:
        depth = int(self._random.choice(DEPTHS))
        rest = asked.expected[len(asked.answer) :][:-1]
        asked.drafts = rest[: min(depth, room)]
        if self._random.random() < self._wrong and asked.drafts:
            at = int(self._random.integers(len(asked.drafts)))
            asked.drafts[at] = (asked.drafts[at] + 1) % self._vocab
            if self._random.random() < 0.5:
                asked.drafts[at + 1 :] = self._random.integers(0, self._vocab, len(asked.drafts) - at - 1).tolist()


def asked_by(count: int, seed: int, adapters: Sequence[Digest] = ()) -> list[Asked]:
    """Some of them fill the context to its last token."""
    random, all_asked = np.random.default_rng(seed), list[Asked]()
    for at in range(count):
        prompt = random.integers(3, VOCAB, int(random.integers(1, 60))).astype(np.int32)
        tokens = CONTEXT - len(prompt) if at % 8 == 0 else int(random.integers(1, 34))
        adapter = adapters[at % len(adapters)] if adapters else Digest("")
        all_asked.append(Asked(prompt, KINDS[at % len(KINDS)], adapter, expected=[0] * tokens))
    return all_asked


def answer_without_drafts(run: Run, engine: EngineDescription, requests: Sequence[Asked]) -> Told:
    """What each answers alone and without drafts becomes what is expected."""
    told = Told()

    def heard(plan: StepPlan) -> StepResult:
        result = run(plan)
        told[-1].extend(result.logprobs.by_row().get(0, ()))
        return result

    for asked in requests:
        told.append([])
        driver = Driver(heard, engine, adapters=[asked.adapter])
        asked.expected = driver.answers([asked.prompt], len(asked.expected), asked.sampling)[0]
    return told


def check(run: Run, engine: EngineDescription, requests: Sequence[Asked], told: Told, wrong: float, error: float = 1e-4) -> None:
    """The requests are answered as expected. error: the tolerated one of log probabilities."""
    begun = [Asked(each.prompt, each.sampling, each.adapter, each.expected) for each in requests]
    churn = Churn(run, engine, ROWS, PAGES, seed=1, wrong=wrong)
    churn.serve(begun)
    for asked, expected_told in zip(begun, told, strict=True):
        assert asked.answer == asked.expected
        for ours, theirs in zip(asked.told, expected_told, strict=True):
            assert ours.token_id == theirs.token_id and ours.logprob == pytest.approx(theirs.logprob, abs=error)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
    assert churn.mixed > 1 and churn.drafted > 50
    assert 0 < churn.right <= churn.drafted and (churn.right == churn.drafted) == (wrong == 0)
