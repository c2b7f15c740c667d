"""The forecast of growth against what plain loops find: the peak while answers end one after the other, and how long answers
were. And whole instances whose requests might have the whole context."""

import math
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from common.ids import ROUTER, Int64Array
from common.instance.ports import RouterJoined
from common.messages import Cancel
from decode.batch import Batch
from decode.requests import DEVIATIONS, MEMORY, PRIOR_ANSWERS, Forecast, Growth
from decode.scheduler import DecodeScheduler
from tests.builders import EOS, LAYOUT, engine, instance, key, limits, result, sampling
from tests.schedulers import generate, planned

PAGE_SIZE = 4
FIRST = 48
CONTEXT, ANSWER = 131_072, 200


def int64(values: list[int]) -> Int64Array:
    return np.array(values, dtype=np.int64)


@dataclass(slots=True)
class Running:
    """Requests by the pages that each holds and will need more, and the room for all of them. They grow side by side."""

    answer: int
    room: int
    held: list[int] = field(default_factory=list)
    still: list[int] = field(default_factory=list)

    def peak(self) -> int:
        """The most pages at any time. A request that has grown by all that it needs gives everything back."""
        return max(
            sum(held + grown for held, still in zip(self.held, self.still, strict=True) if still >= grown)
            for grown in range(max(self.still) + 1)
        )

    def admits(self, pages: int, prompt: int, limit: int, hit: int, unheld: int) -> bool:
        """Whether one more fits; then it runs. Its last token is never fed back, so it needs no room. The pages that it finds are
        not its own: those that nobody held are taken for good."""
        tokens = prompt + min(limit, max(PAGE_SIZE, self.answer)) - 1
        needed = math.ceil(tokens / PAGE_SIZE)
        beside = Running(self.answer, self.room - unheld, [*self.held, pages], [*self.still, max(0, needed - pages - hit)])
        if self.held and beside.peak() > beside.room:
            return False
        self.room, self.held, self.still = beside.room, beside.held, beside.still
        return True


@pytest.mark.parametrize("seed", range(40))
def test_a_request_is_admitted_when_the_peak_over_all_ends_fits(seed: int) -> None:
    random = Random(seed)
    rows = random.choice([0, 1, 2, 5, 12])
    plain = Running(random.choice([0, 1, 12, random.randint(0, 50)]), room=0)
    plain.held = [random.randint(1, 9) for _ in range(rows)]
    plain.still = [random.choice([0, 3, random.randint(0, 12)]) for _ in range(rows)]
    plain.room = max(sum(plain.held), (plain.peak() if rows else 0) + random.randint(-10, 40))
    forecast = Forecast(plain.answer, PAGE_SIZE, int64(plain.held), int64(plain.still), plain.room - sum(plain.held))
    for _ in range(10):
        prompt, limit = random.randint(1, 24), random.randint(1, 40)
        hit = random.randint(0, prompt // PAGE_SIZE)
        asked = math.ceil(prompt / PAGE_SIZE) - hit, prompt, limit, hit, random.randint(0, hit)
        assert forecast.admits(*asked) == plain.admits(*asked)
        assert forecast.running == len(plain.held)


def test_the_peak_counts_nobody_who_has_ended() -> None:
    """Two hold a page each. One ends now, the other grows by 6: 7 pages at its end, for the first has given back its page."""
    for room, fits in ((7, True), (6, False)):
        forecast = Forecast(1, PAGE_SIZE, int64([1]), int64([6]), room - 1)
        assert forecast.admits(1, 1, 1) == fits


@pytest.mark.parametrize("answers", [0, 1, 7, 200])
def test_the_forecast_is_all_tokens_over_all_that_stopped_with_the_latest_weighing_most(answers: int) -> None:
    random = Random(answers)
    batch = Batch(1, [EOS])
    growth = Growth(batch, PAGE_SIZE, FIRST)
    had = [(random.randint(1, 200), random.random() < 0.5) for _ in range(answers)]
    for tokens, stopped in had:
        batch.sampled[0] = tokens
        growth.ended(0, stopped=stopped)
    weights = [(1 - 1 / MEMORY) ** age for age in reversed(range(answers))]
    tokens_had = PRIOR_ANSWERS * FIRST + sum(weight * tokens for weight, (tokens, _) in zip(weights, had, strict=True))
    stops = PRIOR_ANSWERS + sum(weight for weight, (_, stopped) in zip(weights, had, strict=True) if stopped)
    for running in (1, 3, 256):
        expected = tokens_had / stops * (1 + DEVIATIONS / math.sqrt(running))
        assert growth.answer_tokens(running) == pytest.approx(expected, abs=1)
    assert growth.answer_tokens(0) == growth.answer_tokens(1)


def test_a_running_request_needs_what_the_forecast_leaves_and_another_page_once_it_is_longer() -> None:
    batch = Batch(4, [EOS])
    for row, (prompt, limit, shared) in enumerate([(5, 100, 0), (5, 8, 1), (5, 100, 0), (5, 17, 1)]):
        batch.join(row, sampling(limit), prompt, room=8, sampled=1, shared=shared)
    for row in (2, 3):
        batch.grew(row, 20)
        for _ in range(15):
            batch._planned[row] += 1  # 16 of its answer
    held, still = batch.pages(12, PAGE_SIZE)
    assert held.tolist() == [2, 1, 5, 4], "of its own"
    fed = [5 + 12 - 1, 5 + 8 - 1, 5 + 16 + PAGE_SIZE - 1, 5 + 17 - 1]
    assert still.tolist() == [math.ceil(tokens / PAGE_SIZE) - pages for tokens, pages in zip(fed, [2, 2, 5, 5], strict=True)]


def served(pool_tokens: int, asked: list[int], answer: int, context_tokens: int = CONTEXT) -> tuple[DecodeScheduler, list[int]]:
    """Requests with these limits, all there from the start, are served to the end by an instance like the product's: how many run
    in each step. Answers stop after so many tokens."""
    bounds = limits(chunk_tokens=8192, max_waiting=1024, answer_tokens=512)
    made = DecodeScheduler(instance("d", "decode"), engine(pool_tokens // LAYOUT.page_size, 64, context_tokens), bounds)
    made.handle(RouterJoined(ROUTER, 1), 0.0)
    for number, limit in enumerate(asked):
        assert made.receive(ROUTER, generate(f"r{number}", 8, limit), 0.0) == []
    return made, finish(made, answer)


def finish(made: DecodeScheduler, answer: int) -> list[int]:
    running = []
    while len(made._requests):
        plan = planned(made.decide(0.0))
        running.append(made._batch.running)
        sampled = made._batch.sampled[plan.sampled_rows]
        made.step_done(result(plan, [EOS if had >= answer - 1 else 60 for had in sampled.tolist()]), 0.0)
    return running


@pytest.mark.parametrize("limit_of_every_other", [CONTEXT - 8, 16])
def test_requests_run_side_by_side_though_each_might_have_the_whole_context(limit_of_every_other: int) -> None:
    """Also beside short completions, which all reach their limits and so say nothing of the length of chats."""
    made, running = served(CONTEXT, [limit_of_every_other, CONTEXT - 8] * 64, ANSWER)
    assert running[1] == 64, "all rows, before any answer has ended"
    assert len(running) < 3 * (ANSWER + 8)
    assert made.report().counters.preemptions == 0


@pytest.mark.parametrize("limit", [2, ANSWER])
def test_neither_clients_that_leave_nor_short_limits_make_the_forecast_short(limit: int) -> None:
    made, _ = served(1000, [1], ANSWER)
    for number in range(100):
        made.receive(ROUTER, generate(f"short{number}", 8, limit), 0.0)
        for _ in range(2):
            made.step_done(result(planned(made.decide(0.0)), [60]), 0.0)
        made.receive(ROUTER, Cancel(key=key(f"short{number}")), 0.0)
    for number in range(20):
        made.receive(ROUTER, generate(f"r{number}", 8, ANSWER), 0.0)
    assert max(finish(made, CONTEXT)) < 10, "five are sure to fit"
    assert made.report().counters.preemptions <= 2


@pytest.mark.parametrize("complete", [True, False])
def test_after_long_answers_the_forecast_comes_down_though_no_answer_stops_by_a_token(complete: bool) -> None:
    """A batch of answers that all reached a long limit, then chats that end by a stop string, or whose clients leave."""
    context_tokens, answer = CONTEXT // 2, ANSWER // 2
    made, _ = served(context_tokens, [500] * 64, CONTEXT, context_tokens)
    for number in range(256):
        made.receive(ROUTER, generate(f"chat{number}", 8, context_tokens - 8), 0.0)
    running = []
    while len(made._requests):
        plan = planned(made.decide(0.0))
        running.append(made._batch.running)
        long_enough = made._batch.sampled[plan.sampled_rows] >= answer - 1
        ended = [made._requests.in_row[row].key for row in plan.sampled_rows[long_enough].tolist()]
        made.step_done(result(plan, [60] * len(plan.sampled_rows)), 0.0)
        for one in ended:
            made.receive(ROUTER, Cancel(key=one, complete=complete), 0.0)
    assert max(running[:answer]) < 16, "few at first"
    assert max(running[-2 * answer :]) == 64, "all rows run side by side again"
