"""The toy executor proves byte placement: every kind of misplacement changes its answer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from common.executor import Chunk, RowStart, StepPlan
from common.sampling_params import SamplingParams
from common.step_cost import StepCost
from engine.timed import Pace
from tests.engine.toy import TOY_VOCAB, ToyExecutor

PROMPT = np.arange(100, 119, dtype=np.int32)  # 19 tokens: 4 full pages of 4 and one with 3
DECODE = StepPlan(9, decode_rows=np.zeros(1, dtype=np.int32))
PAGES = np.array([9, 2, 17, 5, 11, 20], dtype=np.int32)
START = RowStart(0, PAGES, SamplingParams(max_new_tokens=4))
PREFILL = StepPlan(1, starts=(START,), chunks=(Chunk(0, 0, PROMPT, last=True),))


def tokens_of(executor: ToyExecutor, plan: StepPlan) -> list[int]:
    """What a step samples that completes at its launch."""
    result = executor.launch(plan).poll()
    assert result is not None
    tokens: list[int] = result.tokens.tolist()
    return tokens


def prefilled(executor: ToyExecutor, chunks: tuple[int, ...] = (19,)) -> int:
    """Compute the prompt in these chunks; the first token."""
    start, sampled = 0, [-1]
    for number, tokens in enumerate(chunks):
        chunk = Chunk(0, start, PROMPT[start : start + tokens], last=start + tokens == len(PROMPT))
        sampled = tokens_of(executor, StepPlan(number, starts=(START,) if number == 0 else (), chunks=(chunk,)))
        start += tokens
    return sampled[0]


def handed_off(executor: ToyExecutor, first_token: int) -> int:
    """Decode one token as a decode instance does after the handoff."""
    start = RowStart(0, PAGES, START.sampling, length=len(PROMPT), last_token=first_token)
    return tokens_of(executor, StepPlan(9, starts=(start,), decode_rows=DECODE.decode_rows))[0]


def moved(damage: Callable[[np.ndarray], None] | None = None) -> int:
    """Prefill on one executor, move its memory to another, perhaps damaged, and decode there."""
    source, target = ToyExecutor(24, 2), ToyExecutor(24, 2)
    token = prefilled(source)
    target.pages[:] = source.pages
    if damage is not None:
        damage(target.pages)
    return handed_off(target, token)


@pytest.mark.parametrize(
    ("place", "damaged"),
    [
        pytest.param(np.s_[[9, 2]], np.flipud, id="swap pages"),
        pytest.param(np.s_[5], lambda page: np.roll(page, 1, axis=-2), id="shift a slot"),
        pytest.param(np.s_[2, 0, :, [0, 1]], np.flipud, id="swap heads"),
        pytest.param(np.s_[9, 0, [0, 1]], np.flipud, id="swap keys and values"),
    ],
)
def test_each_kind_of_misplacement_changes_the_answer(place: Any, damaged: Callable[[np.ndarray], np.ndarray]) -> None:
    def damage(pages: np.ndarray) -> None:
        pages[place] = damaged(pages[place])

    assert moved(damage) != moved()


def test_what_lies_beyond_the_tokens_in_the_last_page_changes_nothing() -> None:
    def scribble(pages: np.ndarray) -> None:
        pages[11, :, :, :, 3] = 77
        pages[0] = 77

    assert moved(scribble) == moved()


def test_every_single_byte_of_the_row_matters_and_no_other_does() -> None:
    """Two tokens, as one of them may be the same by chance."""
    executor = ToyExecutor(24, 1)
    first_token = prefilled(executor)
    prompt = executor.pages.copy()

    def two_tokens() -> tuple[int, int]:
        return handed_off(executor, first_token), tokens_of(executor, DECODE)[0]

    undamaged = two_tokens()
    for place in np.ndindex(prompt.shape):
        page, slot = place[0], place[4]
        if page in PAGES[:5] and not (page == PAGES[4] and slot == 3):  # there the decode step writes before it reads
            executor.pages[:] = prompt
            executor.pages[place] ^= 0x10
            assert two_tokens() != undamaged, place
    executor.pages[:] = 255
    executor.pages[PAGES[:5]] = prompt[PAGES[:5]]
    assert two_tokens() == undamaged


def test_kv_of_another_token_or_position_differs_in_every_place() -> None:
    tokens = [np.full(250, 77), np.arange(0, TOY_VOCAB, 4), np.arange(TOY_VOCAB - 250, TOY_VOCAB)]
    executor = ToyExecutor(200, 3)
    pages = np.arange(189, dtype=np.int32).reshape(3, 63)
    starts = tuple(RowStart(row, pages[row], SamplingParams(max_new_tokens=1)) for row in range(3))
    chunks = tuple(Chunk(row, 0, ids.astype(np.int32), last=True) for row, ids in enumerate(tokens))
    executor.launch(StepPlan(1, starts=starts, chunks=chunks))
    slots = executor.pages[pages].transpose(0, 1, 5, 6, 2, 3, 4).reshape(3, 252, 4, 8)[:, :250]
    places = np.moveaxis(slots, -1, 0).reshape(8, 750, 4)
    written = {(int(token), position) for ids in tokens for position, token in enumerate(ids)}
    for place in places:
        assert len(np.unique(place, axis=0)) == len(written)
        assert place.any(axis=1).all(), "and from memory that was never written"


def test_a_step_reads_what_is_in_memory_when_it_completes() -> None:
    """As a write that lands in the wrong page while the step is in flight would be seen. It ends when its cost is spent after the
    one before it, and not at all once the executor is closed."""
    now_s, tokens = [10.0], set()
    executor = ToyExecutor(24, 1, Pace(StepCost(1.0, 0.0, 0.0), lambda: now_s[0]))
    for damage in (0, 1):
        first, second = executor.launch(PREFILL), executor.launch(DECODE)
        now_s[0] += 0.9
        assert first.poll() is None
        now_s[0] += 0.1
        assert first.poll() is not None and second.poll() is None
        executor.pages[PAGES[1], 0, 0, 0, 0, 0] ^= damage
        now_s[0] += 1
        result = second.poll()
        assert result is not None
        tokens.add(int(result.tokens[0]))
    assert len(tokens) == 2
    last = executor.launch(PREFILL)
    executor.close()
    now_s[0] += 9
    assert last.poll() is None


def test_a_manual_executor_completes_steps_when_it_is_told_to() -> None:
    executor = ToyExecutor(24, 1, manual=True)
    steps = [executor.launch(PREFILL), executor.launch(DECODE)]
    assert [step.poll() for step in steps] == [None, None]
    executor.complete()
    assert [step.poll() is None for step in steps] == [False, True]
    executor.complete(5)
    assert [step.poll() is None for step in steps] == [False, False]
