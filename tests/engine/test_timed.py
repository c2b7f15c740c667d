"""The timed executor: steps end when their costs have added up, one after the other."""

import numpy as np
import pytest
from msgspec.structs import replace

from common.executor import Chunk, RowStart, StepPlan
from common.ids import Int32Array
from common.messages import TokenLogprob
from common.sampling_params import SamplingParams
from common.step_cost import StepCost
from engine.timed import Pace, TimedExecutor
from tests.builders import HandClock, engine

COST = StepCost(step_s=1.0, chunk_token_s=0.1, decode_row_s=0.01)


def plan(chunk_tokens: int, decode_rows: int) -> StepPlan:
    rows = np.arange(1, 1 + decode_rows, dtype=np.int32)
    return StepPlan(1, chunks=(Chunk(0, 0, np.zeros(chunk_tokens, dtype=np.int32), last=True),), decode_rows=rows)


def test_a_step_takes_what_its_tokens_and_rows_cost() -> None:
    clock = HandClock(100.0)
    step = TimedExecutor(engine(), Pace(COST, clock), words=[12]).launch(plan(5, 3))
    assert step.ends_s == pytest.approx(101.53)
    clock.now_s = 101.52
    assert step.poll() is None
    clock.now_s = 101.54
    result = step.poll()
    assert result is not None
    assert result.tokens.tolist() == [12, 12, 12, 12]
    assert COST.seconds(5, 3) == pytest.approx(1.53)


def test_a_step_begins_when_the_one_before_has_ended_or_when_it_is_launched() -> None:
    clock = HandClock(100.0)
    executor = TimedExecutor(engine(), Pace(COST, clock))
    first, second = executor.launch(plan(10, 0)), executor.launch(plan(20, 0))
    assert (first.ends_s, second.ends_s) == pytest.approx((102.0, 105.0))
    clock.now_s = 200.0
    assert executor.launch(plan(10, 0)).ends_s == pytest.approx(202.0)


def test_it_is_sure_of_its_words_and_of_the_prompts_of_rows_that_ask() -> None:
    executor = TimedExecutor(engine(), Pace(COST, HandClock(1e9)), words=[12])
    pages = np.zeros(1, dtype=np.int32)
    plain = SamplingParams(max_new_tokens=4)
    asks = replace(plain, logprobs=3), replace(plain, prompt_logprobs=0), plain
    starts = tuple(RowStart(row, pages, sampling) for row, sampling in enumerate(asks))
    prompt = np.array([5, 6, 7], dtype=np.int32)
    first = executor.launch(
        StepPlan(1, starts=starts, chunks=tuple(Chunk(row, 0, prompt, last=False) for row in range(3)))
    ).result
    last = executor.launch(StepPlan(2, chunks=tuple(Chunk(row, 3, prompt, last=True) for row in range(3)))).result
    assert first.logprobs.by_row() == {}
    assert last.logprobs.by_row() == {0: (TokenLogprob(12, 0.0, 1),)}
    told = [result.prompt_logprobs.by_row()[1] for result in (first, last)]
    assert told == [tuple(TokenLogprob(token, 0.0, 1) for token in ids) for ids in ((6, 7), (5, 6, 7))]


def test_an_answer_does_not_depend_on_how_much_of_its_prompt_was_cached() -> None:
    executor = TimedExecutor(engine(), Pace(COST, HandClock(1e9)), words=range(12, 99))
    prompt, pages = np.arange(40, dtype=np.int32), np.zeros(1, dtype=np.int32)
    tokens: set[int] = set()
    for there in (0, 16, 32):
        start = RowStart(0, pages, SamplingParams(max_new_tokens=4, seed=5), length=there)
        plan = StepPlan(1, (start,), (Chunk(0, there, prompt[there:], last=True),))
        tokens.update(executor.launch(plan).result.tokens.tolist())
    assert len(tokens) == 1


def test_an_embedding_is_one_zero_and_comes_with_its_prompt() -> None:
    executor = TimedExecutor(engine(), Pace(COST, HandClock(1e9)))
    start = RowStart(0, np.zeros(1, dtype=np.int32), SamplingParams(max_new_tokens=1, pooling="last"))
    chunks = [Chunk(0, at, np.zeros(3, dtype=np.int32), last=at == 3) for at in (0, 3)]
    plans = StepPlan(1, starts=(start,), chunks=(chunks[0],)), StepPlan(2, chunks=(chunks[1],))
    assert [executor.launch(one).result.embeddings for one in plans] == [{}, {0: bytes(4)}]
    plain = RowStart(0, start.pages, SamplingParams(max_new_tokens=1))
    after = StepPlan(3, starts=(plain,), chunks=(Chunk(0, 0, np.zeros(3, dtype=np.int32), last=True),))
    assert executor.launch(after).result.embeddings == {}, "the next request in the row asks for none"


def test_growing_rows_costs_nothing_and_all_pages_are_equal() -> None:
    executor = TimedExecutor(engine(), Pace(COST, HandClock(100.0)))
    rows = np.arange(3, dtype=np.int32)
    assert executor.launch(StepPlan(1, decode_rows=rows, grown_rows=rows, grown_pages=rows)).ends_s == pytest.approx(101.03)
    assert executor.digest_pages(rows) == bytes(12)


def test_a_token_depends_on_seed_and_position_so_an_answer_that_is_resumed_in_another_row_goes_on() -> None:
    words = [11, 12, 13, 14, 15]

    def answer(prompt: int, tokens: int, row: int, seed: int, decodes_only: bool = False) -> list[int]:
        executor = TimedExecutor(engine(), Pace(COST, HandClock(1e9)), words)
        sampling = SamplingParams(max_new_tokens=tokens, seed=seed)
        alone, found = np.array([row], dtype=np.int32), list[int]()
        held = np.zeros(1, dtype=np.int32)

        def run(plan: StepPlan) -> Int32Array:
            step = executor.launch(plan)
            return step.result.tokens

        if decodes_only:
            run(StepPlan(1, starts=(RowStart(row, held, sampling, prompt - 1, last_token=99),)))
        else:
            first = Chunk(row, 0, np.zeros(prompt - 1, dtype=np.int32), last=False)
            last = Chunk(row, prompt - 1, np.zeros(1, dtype=np.int32), last=True)
            assert not len(run(StepPlan(1, starts=(RowStart(row, held, sampling),), chunks=(first,))))
            found += run(StepPlan(2, chunks=(last,))).tolist()
        while len(found) < tokens:
            found += run(StepPlan(3, decode_rows=alone)).tolist()
        return found

    whole = answer(prompt=6, tokens=8, row=0, seed=2**62)
    assert set(whole) == set(words)
    assert answer(prompt=9, tokens=5, row=2, seed=2**62) == whole[3:], "computed anew from the third token on"
    assert answer(prompt=9, tokens=5, row=3, seed=2**62, decodes_only=True) == whole[3:], "handed over with its KV"
    assert answer(prompt=6, tokens=8, row=0, seed=2**62 + 1) == [*whole[1:], answer(6, 9, 0, 2**62)[-1]]
