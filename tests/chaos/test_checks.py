"""The checks of the chaos run find what they are for: each kind of damage, done to an answer that is right."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from demo.evaluate import MODEL
from tests.chaos.checks import Checks, Oracle
from tests.chaos.workload import Workload
from tests.rig.client import Answer, Choice

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
