"""The report of a chaos run counts as gaps of a fault what waited for its victim, and its checks find what they are for.

Each kind of damage is done to an answer that is right.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from demo.evaluate import MODEL
from tests.chaos.checks import Checks, Oracle
from tests.chaos.faults import Fault
from tests.chaos.fleet import Shape
from tests.chaos.report import Outcome, disturbed, longest, undisturbed
from tests.chaos.workload import Workload
from tests.rig.client import Answer, Choice, Request
from tests.rig.report import percentile

SHAPE = Shape(heartbeat_s=0.5, dead_after_s=3.0)
REQUEST = Request("", {})


def answer(sent_s: float, *arrivals: float) -> Answer:
    return Answer(REQUEST, [Choice(arrivals=list(arrivals))], sent_s)


KILLED = Fault(0, "kill", "decode", "decode-0", at_s=10.0, over_s=10.0, back_s=15.0)


@pytest.mark.parametrize(
    ("fault", "streams", "gaps"),
    [
        pytest.param(KILLED, [(8.0, 9.0, 11.5), (8.0, 9.9, 10.9, 12.0), (9.0, 14.0)], [2.5], id="killed decode instance"),
        pytest.param(replace(KILLED, back_s=10.5), [(8.0, 9.5, 10.75)], [1.25], id="one whose next life registers early"),
        pytest.param(
            Fault(0, "stop", "prefill", "prefill-0", at_s=10.0, over_s=16.0, back_s=16.0),
            [(9.0, 14.0), (9.9, 10.2)],
            [5.0],
            id="stopped prefill instance",
        ),
        pytest.param(
            Fault(0, "term", "decode", "decode-0", at_s=10.0, over_s=14.0),
            [(8.0, 9.0, 11.0, 11.5, 20.0, 29.0), (20.0, 21.0, 22.0)],
            [8.5],
            id="drained instance, for which the longest gap of every open stream counts",
        ),
    ],
)
def test_the_gaps_of_a_fault_are_those_that_waited_for_its_victim(
    fault: Fault, streams: list[tuple[float, ...]], gaps: list[float]
) -> None:
    """A first token waits for a prefill instance and for no decode instance, a later one over the moment of the kill."""
    outcome = Outcome(SHAPE, answers=[answer(*times) for times in streams], faults=[fault])
    assert [gap.seconds for gap in disturbed(outcome, [fault])] == gaps


def test_undisturbed_gaps_are_those_away_from_every_fault() -> None:
    fault = Fault(0, "kill", "decode", "decode-0", at_s=10.0, over_s=10.0)
    outcome = Outcome(SHAPE, answers=[answer(4.0, 5.0, 5.5, 9.5, 13.5, 14.5, 14.75)], faults=[fault])
    assert undisturbed(outcome) == [4.0], "from 5.5 to 9.5; what lies after the kill may wait for it"


def test_percentiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.2, 0.5, 0.9, 1.0)] == [1.0, 3.0, 5.0, 5.0]


def test_the_longest_gap_is_listed_with_the_fault_beside_it() -> None:
    outcome = Outcome(SHAPE, answers=[answer(1.0, 1.5), answer(8.0, 9.5, 13.0)], faults=[KILLED])
    first, *_, last = longest(outcome)
    assert "next token from -0.5 to 3.0 (3.5 s); kill decode-0 at 0.0" in first
    assert last.endswith("no fault")


TOKENS = 12


class Case:
    """A greedy request with one choice of TOKENS tokens, the tokens that are right, and the checks."""

    def __init__(self) -> None:
        self.workload = Workload()
        self.checks = Checks(self.workload, Oracle(MODEL))
        every = self.workload.requests(200, seed=3)
        found = (one for one in every if one.is_greedy and one.choices == 1 and one.stop is None)
        drawn = next(found)
        self.asked = replace(drawn, body=drawn.body | {"max_tokens": TOKENS, "ignore_eos": True})
        self.tokens = self._likeliest()

    def _likeliest(self) -> list[int]:
        """The likeliest token, again and again; each of them from the whole beginning."""
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        ids = list(self.asked.prompt)
        for _ in range(TOKENS):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[-TOKENS:]

    def answer(self, tokens: list[int]) -> Answer:
        """A complete answer of these tokens."""
        asked, answered = len(self.asked.prompt), len(tokens)
        usage = {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}
        text = str(self.workload.tokenizer.decode(tokens, skip_special_tokens=True))
        choice = Choice(list(tokens), text, "length", arrivals=[1.0])
        return Answer(self.asked, [choice], 0.0, usage, is_done=True)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def test_a_right_answer_passes(case: Case) -> None:
    answer = case.answer(case.tokens)
    assert not list(case.checks.of_answer(answer))
    assert not list(case.checks.of_reference([answer]))
    assert not list(case.checks.differences({case.asked.number: answer}, [answer]))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda tokens: [*tokens[:5], tokens[4], *tokens[5:-1]], id="repeated"),
        pytest.param(lambda tokens: [*tokens[:5], *tokens[6:], 300], id="missing"),
        pytest.param(lambda tokens: [*tokens[:5], (tokens[5] + 1) % 2000, *tokens[6:]], id="wrong"),
    ],
)
def test_tokens_that_the_model_does_not_say_are_wrong(case: Case, damage: Callable[[list[int]], list[int]]) -> None:
    reference, damaged = case.answer(case.tokens), case.answer(damage(case.tokens))
    (difference,) = case.checks.differences({case.asked.number: reference}, [damaged])
    assert difference.position >= 5 and not difference.is_right
    assert "WRONG" in str(difference) and list(case.checks.of_reference([damaged]))


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        (lambda answer: answer.errors.append("HTTP 503"), "HTTP 503"),
        (lambda answer: answer.usage.update(completion_tokens=TOKENS + 1), "usage"),
        (lambda answer: answer.choices[0].token_ids.pop(), "tokens instead of"),
        (lambda answer: setattr(answer.choices[0], "text", answer.choices[0].text[1:]), "its text"),
        (lambda answer: setattr(answer.choices[0], "finish_reason", "stop"), "finish_reason"),
    ],
)
def test_what_a_client_would_complain_of_is_found(case: Case, part: Callable[[Answer], object], complaint: str) -> None:
    answer = case.answer(case.tokens)
    part(answer)
    assert complaint in " ".join(case.checks.of_answer(answer))
