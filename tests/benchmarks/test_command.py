"""How every instrument is started.

Flags are made from its options, a command repeats it, and each instrument refuses by its flag what it cannot measure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.command import Invocation, start
from benchmarks.engine import EngineBench
from common.errors import ConfigError
from common.options import option, require_above_0


@dataclass(frozen=True, kw_only=True)
class Drops:
    """What drips."""

    count: int = option(9, "how many")
    seconds: float = option(3.0, "how long")

    def __post_init__(self) -> None:
        require_above_0(self, "seconds")


def begin(*arguments: str) -> tuple[int, Invocation | None]:
    given: list[Invocation] = []

    def run(invocation: Invocation) -> int:
        given.append(invocation)
        return 0

    status = start("drops", "Count.", run, Drops, arguments=arguments)
    return status, given[0] if given else None


def test_quick_takes_the_place_of_defaults_only_and_the_command_repeats_what_was_given() -> None:
    status, given = begin("--quick", "--seconds=2")
    assert status == 0 and given is not None
    drops = given.config(Drops, {"count": 1, "seconds": 0.1})
    assert (drops.count, drops.seconds, given.style.is_markdown) == (1, 2.0, False)
    assert given.command == "python -m benchmarks.drops --quick --seconds=2.0"


def test_without_quick_its_values_are_not_taken() -> None:
    _, given = begin()
    assert given is not None and given.config(Drops, {"count": 1}) == Drops()
    assert given.command == "python -m benchmarks.drops"


def test_a_value_that_cannot_be_is_refused_by_its_flag_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert begin("--seconds=0") == (2, None)
    assert "python -m benchmarks.drops: --seconds must be above 0" in capsys.readouterr().err


def test_a_flag_that_is_not_known_is_refused_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        begin("--secnds=1")
    assert ended.value.code == 2 and "did you mean --seconds?" in capsys.readouterr().err


REFUSED: list[tuple[Callable[..., object], str, list[Any]]] = [
    (EngineBench, "models", ["GPT-5", ""]),
    (EngineBench, "only", ["steps,lunch"]),
    (EngineBench, "batches", ["1,x"]),
    (EngineBench, "contexts", ["0"]),
    (EngineBench, "rounds", [1]),
    (EngineBench, "budget_s", [0.0]),
]


@pytest.mark.parametrize(
    ("bench", "field", "value"), [(bench, field, value) for bench, field, values in REFUSED for value in values]
)
def test_what_cannot_be_measured_is_refused_by_its_flag(bench: Callable[..., object], field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}"):
        bench(**{field: value})
