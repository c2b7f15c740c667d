"""The toy executor proves byte placement: every kind of misplacement changes its answer."""

from collections.abc import Callable

import numpy as np
import pytest

from common.engine.plan import Chunk, Plan, RowStart
from common.engine.toy import ToyExecutor
from common.sampling_params import SamplingParams

PROMPT = np.arange(100, 119, dtype=np.int32)  # 19 tokens: 4 full pages of 4 and one with 3
PAGES = np.array([9, 2, 17, 5, 11, 20], dtype=np.int32)


def prefilled(executor: ToyExecutor, chunks: tuple[int, ...] = (19,)) -> int:
    """Compute the prompt in these chunks; the first token."""
    start, token = 0, -1
    for number, tokens in enumerate(chunks):
        chunk = Chunk(0, start, PROMPT[start : start + tokens], last=start + tokens == len(PROMPT))
        starts = (RowStart(0, PAGES, SamplingParams(max_new_tokens=4)),) if number == 0 else ()
        result = executor.launch(Plan(number, starts=starts, chunks=(chunk,))).poll()
        assert result is not None
        start += tokens
        token = int(result.tokens[0]) if chunk.last else token
    return token


def handed_off(executor: ToyExecutor, first_token: int) -> int:
    """Decode one token as a decode instance does after the handoff."""
    start = RowStart(0, PAGES, SamplingParams(max_new_tokens=4), length=len(PROMPT), last_token=first_token)
    result = executor.launch(Plan(9, starts=(start,), decode_rows=np.zeros(1, dtype=np.int32))).poll()
    assert result is not None
    return int(result.tokens[0])


def moved(damage: Callable[[np.ndarray], None] | None = None) -> int:
    """Prefill on one executor, move its memory to another, perhaps damaged, and decode there."""
    source, target = ToyExecutor(24, 2), ToyExecutor(24, 2)
    token = prefilled(source)
    target.pages[:] = source.pages
    if damage is not None:
        damage(target.pages)
    return handed_off(target, token)


def swap_pages(pages: np.ndarray) -> None:
    pages[[9, 2]] = pages[[2, 9]]


def lose_layer(pages: np.ndarray) -> None:
    pages[17, 1] = 0


def shift_slot(pages: np.ndarray) -> None:
    pages[5] = np.roll(pages[5], 1, axis=-2)


def lose_last_page(pages: np.ndarray) -> None:
    pages[11] = 0


def swap_heads(pages: np.ndarray) -> None:
    pages[2, 0, :, [0, 1]] = pages[2, 0, :, [1, 0]]


def swap_keys_and_values(pages: np.ndarray) -> None:
    pages[9, 0, [0, 1]] = pages[9, 0, [1, 0]]


def flip_one_byte(pages: np.ndarray) -> None:
    pages[11, 1, 1, 1, 2, 3] ^= 1


DAMAGES = (swap_pages, lose_layer, shift_slot, lose_last_page, swap_heads, swap_keys_and_values, flip_one_byte)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_each_kind_of_misplacement_changes_the_answer(damage: Callable[[np.ndarray], None]) -> None:
    assert moved(damage) != moved()


def test_what_lies_beyond_the_tokens_in_the_last_page_changes_nothing() -> None:
    def scribble(pages: np.ndarray) -> None:
        pages[11, :, :, :, 3] = 77
        pages[0] = 77

    assert moved(scribble) == moved()


@pytest.mark.parametrize("chunks", [(19,), (8, 8, 3), (1, 18), (4, 4, 4, 4, 3)])
def test_the_chunks_of_a_prompt_change_nothing(chunks: tuple[int, ...]) -> None:
    assert prefilled(ToyExecutor(24, 2), chunks) == prefilled(ToyExecutor(24, 2))


def test_a_row_never_writes_beyond_its_pages() -> None:
    executor = ToyExecutor(24, 2)
    start = RowStart(0, PAGES[:5], SamplingParams(max_new_tokens=4), length=20, last_token=1)
    with pytest.raises(AssertionError, match="outgrows"):
        executor.launch(Plan(1, starts=(start,), decode_rows=np.zeros(1, dtype=np.int32)))
