"""What an instance remembers of what it emitted: told from any number on, and never more than may be kept."""

import pytest

from common.instance.token_memory import PIECE_TOKENS, Emitted, TokenMemory
from common.messages import Ending, Failed, Finished, TokenDelta, TokenLogprob, pack_logprobs
from tests.builders import key

LENGTH = Finished("length")


@pytest.mark.parametrize(
    ("emitted", "number", "told"),
    [
        (Emitted(2, [7, 8, 9], None), 2, TokenDelta(key(), 2, (7, 8, 9))),
        (Emitted(2, [7, 8, 9], None), 4, TokenDelta(key(), 4, (9,))),
        (Emitted(2, [7, 8, 9], None), 5, None),
        (Emitted(2, [7, 8, 9], LENGTH), 5, TokenDelta(key(), 5, (), LENGTH)),
        (Emitted(2, [7, 8, 9], None), 0, TokenDelta(key(), 2, (7, 8, 9))),
        (Emitted(2, [], Failed("gone")), 3, TokenDelta(key(), 2, (), Failed("gone"))),
        (Emitted(2, [], None), 2, None),
        (Emitted(0, [7, 8], None, cached_tokens=16), 0, TokenDelta(key(), 0, (7, 8), cached_tokens=16)),
        (Emitted(0, [7, 8], None, cached_tokens=16), 1, TokenDelta(key(), 1, (8,))),
    ],
    ids=[
        *("all", "the rest", "nothing", "only the ending", "not what others emitted", "an ending at its place", "none yet"),
        *("token 0 with the tokens that were cached", "not so a later one"),
    ],
)
def test_tokens_are_told_from_a_number_on_with_the_ending(emitted: Emitted, number: int, told: TokenDelta | None) -> None:
    assert list(emitted.since(key(), number)) == ([] if told is None else [told])


def logprob(token_id: int, alternatives: int = 0) -> TokenLogprob:
    return TokenLogprob(token_id, -0.5 * token_id, 1, tuple((token_id + n, -0.25 * n) for n in range(alternatives)))


@pytest.mark.parametrize(("first", "number"), [(0, 0), (0, 9), (0, PIECE_TOKENS + 5), (3, 0)])
def test_a_long_answer_is_told_in_pieces_each_with_the_logprobs_of_its_own_tokens(first: int, number: int) -> None:
    count = 2 * PIECE_TOKENS + 3
    logprobs = [logprob(token_id, 1) for token_id in range(count)]
    prompt = (logprob(1), logprob(2), logprob(3))
    pieces = [pack_logprobs(prompt[:1]), pack_logprobs(prompt[1:])]
    emitted = Emitted(first, list(range(count)), LENGTH, [pack_logprobs([each]) for each in logprobs], pieces)
    told = list(emitted.since(key(), number))
    begin = max(0, number - first)
    assert [token for delta in told for token in delta.token_ids] == list(range(begin, count))
    assert [each for delta in told for each in delta.logprobs] == logprobs[begin:]
    assert all(len(delta.token_ids) == len(delta.logprobs) <= PIECE_TOKENS for delta in told)
    assert [delta.ending for delta in told] == [None] * (len(told) - 1) + [LENGTH]
    assert [delta.first for delta in told] == [first + at for at in range(begin, count, PIECE_TOKENS)]
    assert [delta.prompt_logprobs for delta in told] == [prompt if first + begin == 0 else (), *[()] * (len(told) - 1)]


def test_remembered_logprobs_count_their_bytes() -> None:
    packed = [pack_logprobs([logprob(token_id, 20)]) for token_id in range(100)]
    memory = TokenMemory(limit_bytes=200_000)
    for number in range(20):
        memory.keep(key(str(number)), Emitted(0, range(100), LENGTH, packed, packed))
    assert sum(map(len, packed)) > 20_000
    assert 1 <= len(memory._answers) <= 200_000 // (2 * sum(map(len, packed)))


def test_the_oldest_answers_are_forgotten_when_there_are_too_many_bytes() -> None:
    memory = TokenMemory(limit_bytes=20_000)
    endings: dict[str, Ending | None] = {str(number): LENGTH if number % 2 else None for number in range(100)}
    for name, ending in endings.items():
        memory.keep(key(name), Emitted(0, range(100), ending))
    kept = [name for name in endings if memory.get(key(name)) is not None]
    assert 10 < len(kept) < 50 and kept == list(endings)[-len(kept) :]
    assert 15_000 < memory.used_bytes <= 20_000
    for name in kept:
        known = memory.get(key(name))
        assert known is not None
        assert list(known.since(key(name), 98)) == [TokenDelta(key(name), 98, (98, 99), endings[name])]
        memory.forget(key(name))
    assert (memory._answers, memory.used_bytes) == ({}, 0)


def test_an_answer_without_tokens_and_ending_takes_no_room() -> None:
    memory = TokenMemory()
    memory.keep(key(), Emitted(0, [], None))
    assert (memory._answers, memory.used_bytes) == ({}, 0)
