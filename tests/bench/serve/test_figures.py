"""The figures of answers whose times are known, by hand and by the standard library."""

import statistics
from array import array
from typing import Any

import pytest

from bench.serve.answers import Answer
from bench.serve.figures import figures_of

ALL = ("ttft", "tpot", "itl", "e2el")


def answer(sent_s: float, ttft_s: float, gaps_s: list[float], error: str = "") -> Answer:
    made = Answer(0, 0, sent_s, asked_tokens=3, prompt_tokens=10)
    made.sent(sent_s, counts_from_due=True)
    made.arrived(sent_s + ttft_s, 1)
    made.gaps_s, made.counted = array("d", gaps_s), 1 + len(gaps_s)
    made.last_s = sent_s + ttft_s + sum(gaps_s)
    made.ended(made.last_s, error)
    return made


def figures(answers: list[Answer], **limits_ms: float) -> dict[str, Any]:
    return figures_of(answers, 4.0, metrics=ALL, percentiles=(25.0, 99.9), limits_ms=limits_ms)


ANSWERS = [
    answer(0.0, 0.1, [0.01, 0.03]),
    answer(0.5, 0.2, [0.02, 0.0]),
    answer(1.0, 0.6, []),
    answer(2.0, 0.3, [0.5], error="broken"),
]


def test_counts_and_rates_are_of_whole_answers() -> None:
    found = figures(ANSWERS)
    assert (found["completed"], found["failed"], found["errors_by_kind"]) == (3, 1, {"broken": 1})
    assert (found["total_input_tokens"], found["total_output_tokens"], found["shorter_than_asked"]) == (30, 7, 1)
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (0.75, 1.75, 9.25)
    assert found["request_goodput"] is None


def test_times_are_those_of_the_standard_library() -> None:
    found = figures(ANSWERS)
    expected = {"ttft": [100, 200, 600], "tpot": [20, 10], "itl": [10, 30, 20, 0], "e2el": [140, 220, 600]}
    for name, values in expected.items():
        assert found[f"mean_{name}_ms"] == pytest.approx(statistics.mean(values))
        assert found[f"median_{name}_ms"] == pytest.approx(statistics.median(values))
        assert found[f"std_{name}_ms"] == pytest.approx(statistics.pstdev(values))
        quarters = statistics.quantiles(values, n=4, method="inclusive")
        assert found[f"p25_{name}_ms"] == pytest.approx(quarters[0])
        assert found[f"p99.9_{name}_ms"] == pytest.approx(statistics.quantiles(values, n=1000, method="inclusive")[-1])


@pytest.mark.parametrize(
    ("limits_ms", "good"),
    [({"ttft": 200}, 2), ({"ttft": 200, "itl": 25}, 1), ({"tpot": 11}, 2), ({"e2el": 601}, 3), ({"e2el": 139}, 0)],
)
def test_goodput_counts_the_answers_that_keep_all_limits(limits_ms: dict[str, float], good: int) -> None:
    found = figures(ANSWERS, **limits_ms)
    assert (found["good_completed"], found["request_goodput"]) == (good, good / 4.0)


def test_peaks_are_the_fullest_second_and_the_most_that_were_open() -> None:
    found = figures([answer(0.0, 0.9, [0.05, 0.1]), answer(0.5, 1.0, [0.1]), answer(1.05, 0.2, [])])
    assert found["max_output_tokens_per_s"] == 4, "in the second second: one, two and one"
    assert found["max_concurrent_requests"] == 2, "the first ends where the third begins"


def test_a_run_in_which_nothing_was_answered_has_figures_too() -> None:
    found = figures(ANSWERS[3:], ttft=1)
    assert (found["completed"], found["p25_itl_ms"], found["max_output_tokens_per_s"], found["request_goodput"]) == (0, 0, 0, 0)


def test_turns_are_told_apart() -> None:
    conversation = [answer(0.0, 0.1, []), answer(1.0, 0.3, []), answer(2.0, 0.2, [])]
    conversation[2].turn, conversation[2].prompt_tokens, conversation[2].cached_tokens = 1, 40, 32
    first, second = figures(conversation)["turns"]
    assert first == {
        "completed": 2,
        "p50_ttft_ms": pytest.approx(200),
        "p99_ttft_ms": pytest.approx(298),
        "input_tokens": 20,
        "cached_tokens": 0,
    }
    assert second == {
        "completed": 1,
        "p50_ttft_ms": pytest.approx(200),
        "p99_ttft_ms": pytest.approx(200),
        "input_tokens": 40,
        "cached_tokens": 32,
    }
