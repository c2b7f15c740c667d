"""The forecast of growth against what plain loops find: the peak while answers end one after the other, and what answers used."""

import math
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from common.ids import Int64Array
from decode.growth import DEVIATIONS, LONGEST_MEMORY, PRIOR_ANSWERS, AnswerShare, Forecast

PAGE_SIZE = 4
FIRST = 0.75


def int64(values: list[int]) -> Int64Array:
    return np.array(values, dtype=np.int64)


@dataclass(slots=True)
class Running:
    """Requests by the pages that each holds and will need more, and the room for all of them. They grow side by side."""

    share: float
    room: int
    held: list[int] = field(default_factory=list)
    still: list[int] = field(default_factory=list)

    def peak(self) -> int:
        """The most pages at any time. A request that has grown by all that it needs gives everything back."""
        return max(
            sum(held + grown for held, still in zip(self.held, self.still, strict=True) if still >= grown)
            for grown in range(max(self.still) + 1)
        )

    def admits(self, pages: int, prompt: int, limit: int) -> bool:
        """Whether one more fits; then it runs. Its last token is never fed back, so it needs no room."""
        tokens = prompt + math.ceil(self.share * limit) - 1
        needed = math.ceil(tokens / PAGE_SIZE)
        beside = Running(self.share, self.room, [*self.held, pages], [*self.still, max(0, needed - pages)])
        if self.held and beside.peak() > self.room:
            return False
        self.held, self.still = beside.held, beside.still
        return True


@pytest.mark.parametrize("seed", range(40))
def test_a_request_is_admitted_when_the_peak_over_all_ends_fits(seed: int) -> None:
    random = Random(seed)
    rows = random.choice([0, 1, 2, 5, 12])
    plain = Running(random.choice([0.0, 0.3, 1.0, random.random()]), room=0)
    plain.held = [random.randint(1, 9) for _ in range(rows)]
    plain.still = [random.choice([0, 3, random.randint(0, 12)]) for _ in range(rows)]
    plain.room = max(sum(plain.held), (plain.peak() if rows else 0) + random.randint(-10, 40))
    forecast = Forecast(plain.share, PAGE_SIZE, int64(plain.held), int64(plain.still), plain.room - sum(plain.held))
    for _ in range(10):
        prompt, limit = random.randint(1, 24), random.randint(1, 40)
        pages = math.ceil(prompt / PAGE_SIZE)
        assert forecast.admits(pages, prompt, limit) == plain.admits(pages, prompt, limit)
        assert forecast.running == len(plain.held)


def test_the_peak_counts_nobody_who_has_ended() -> None:
    """Two hold a page each. One ends now, the other grows by 6: 7 pages at its end, for the first has given back its page."""
    for room, fits in ((7, True), (6, False)):
        forecast = Forecast(1.0, PAGE_SIZE, int64([1]), int64([6]), room - 1)
        assert forecast.admits(1, 1, 1) == fits


@pytest.mark.parametrize("answers", [0, 1, 7, 60, 61, 200])
def test_the_share_is_the_weighted_mean_of_what_answers_used_plus_its_deviation(answers: int) -> None:
    random = Random(answers)
    share, values = AnswerShare(FIRST), [FIRST] * PRIOR_ANSWERS
    for _ in range(answers):
        limit = random.randint(1, 200)
        tokens = random.randint(1, limit) // 2
        share.add(tokens, limit)
        values.append(tokens / limit)
    fresh, aged = values[:LONGEST_MEMORY], values[LONGEST_MEMORY:]
    weights = [1 / len(fresh)] * len(fresh)
    for _ in aged:  # each later one takes the same part of the weight from all before it
        weights = [weight * (1 - 1 / LONGEST_MEMORY) for weight in weights] + [1 / LONGEST_MEMORY]
    mean = sum(weight * value for weight, value in zip(weights, values, strict=True))
    variance = sum(weight * (value - mean) ** 2 for weight, value in zip(weights, values, strict=True))
    for running in (1, 3, 256):
        expected = min(1.0, mean + DEVIATIONS * math.sqrt(variance / running))
        assert share.of(running) == pytest.approx(expected, rel=1e-9)
    assert share.of(0) == share.of(1)
