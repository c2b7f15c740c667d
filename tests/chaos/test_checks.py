"""The checks of the chaos run find what they are for: each kind of damage, done to an answer that is right."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from demo.evaluate import MODEL
from tests.chaos.checks import Checks
from tests.chaos.client import Answer, Choice
from tests.chaos.oracle import Oracle
from tests.chaos.workload import Request, Workload

TOKENS = 12


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload()


@pytest.fixture(scope="module")
def checks(workload: Workload) -> Checks:
    return Checks(workload, Oracle(MODEL))


@pytest.fixture(scope="module")
def asked(workload: Workload) -> Request:
    """A greedy request with one choice of TOKENS tokens."""
    found = (one for one in workload.requests(200, seed=3) if one.is_greedy and one.choices == 1 and one.stop is None)
    return replace(next(found), max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def tokens(asked: Request) -> list[int]:
    """The likeliest token, again and again; each of them from the whole beginning."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    ids = list(asked.prompt)
    for _ in range(TOKENS):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-TOKENS:]


def answer_of(workload: Workload, request: Request, tokens: list[int]) -> Answer:
    """A complete answer of these tokens."""
    usage = {
        "prompt_tokens": len(request.prompt), "completion_tokens": len(tokens),
        "total_tokens": len(request.prompt) + len(tokens),
    }  # fmt: skip
    text = str(workload.tokenizer.decode(tokens, skip_special_tokens=True))
    choice = Choice(list(tokens), text, "length", arrivals=[1.0])
    return Answer(request, 0.0, [choice], usage, is_done=True)


def test_a_right_answer_passes(workload: Workload, checks: Checks, asked: Request, tokens: list[int]) -> None:
    answer = answer_of(workload, asked, tokens)
    assert not list(checks.of_answer(answer))
    assert not list(checks.of_reference([answer]))
    assert not list(checks.differences({asked.number: answer}, [answer]))


def repeated(tokens: list[int]) -> list[int]:
    return [*tokens[:5], tokens[4], *tokens[5:-1]]


def missing(tokens: list[int]) -> list[int]:
    return [*tokens[:5], *tokens[6:], 300]


def wrong(tokens: list[int]) -> list[int]:
    return [*tokens[:5], (tokens[5] + 1) % 2000, *tokens[6:]]


@pytest.mark.parametrize("damage", [repeated, missing, wrong])
def test_tokens_that_the_model_does_not_say_are_wrong(
    workload: Workload,
    checks: Checks,
    asked: Request,
    tokens: list[int],
    damage: Callable[[list[int]], list[int]],
) -> None:
    reference, damaged = (answer_of(workload, asked, ids) for ids in (tokens, damage(tokens)))
    (difference,) = checks.differences({asked.number: reference}, [damaged])
    assert difference.position >= 5 and not difference.is_right
    assert "WRONG" in str(difference) and list(checks.of_reference([damaged]))


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
def test_what_a_client_would_complain_of_is_found(
    workload: Workload,
    checks: Checks,
    asked: Request,
    tokens: list[int],
    part: Callable[[Answer], object],
    complaint: str,
) -> None:
    answer = answer_of(workload, asked, tokens)
    part(answer)
    assert complaint in " ".join(checks.of_answer(answer))
