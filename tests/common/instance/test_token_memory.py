"""What an instance remembers of what it emitted: told from any number on, and never more than may be kept."""

import pytest

from common.instance.token_memory import Emitted, TokenMemory
from common.messages import Ending, Failed, Finished, TokenDelta
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
    ],
    ids=["all", "the rest", "nothing", "only the ending", "not what others emitted", "an ending at its place", "none yet"],
)
def test_tokens_are_told_from_a_number_on_with_the_ending(emitted: Emitted, number: int, told: TokenDelta | None) -> None:
    assert emitted.since(key(), number) == told


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
        assert known is not None and known.since(key(name), 98) == TokenDelta(key(name), 98, (98, 99), endings[name])
        memory.forget(key(name))
    assert (len(memory), memory.used_bytes) == (0, 0)


def test_an_answer_without_tokens_and_ending_takes_no_room() -> None:
    memory = TokenMemory()
    memory.keep(key(), Emitted(0, [], None))
    assert (len(memory), memory.used_bytes) == (0, 0)
