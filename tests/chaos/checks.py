"""Checks: what is wrong with answers, and where they differ from those of the run without faults.

Owns the rules for one answer and the comparison of two. Does not know processes or faults.

A difference is right when every token of it is what the oracle says, as far as rounding decides nothing: it is listed, and no
problem. Everything else is one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.chaos.client import Answer, Choice
from tests.chaos.oracle import NEAR, Oracle
from tests.chaos.workload import Request, Workload


@dataclass(frozen=True, slots=True)
class Difference:
    """A choice whose tokens are not those of the run without faults. position: of the first token that differs, from 0. loss: of
    the answer's worst token, as the oracle has it."""

    request: Request
    choice: int
    position: int
    expected: int | None
    got: int | None
    loss: float

    @property
    def is_right(self) -> bool:
        return self.loss <= NEAR

    def __str__(self) -> str:
        how = "greedy" if self.request.is_greedy else f"sampled at {self.request.temperature:g}"
        verdict = "a near tie" if self.is_right else "WRONG"
        what = f"request {self.request.number} choice {self.choice}, {how}: token {self.position} of the answer"
        return f"{what} is {self.got} instead of {self.expected}: {verdict} (its worst token is {self.loss:.2g} below the best)"


@dataclass(frozen=True, slots=True)
class Checks:
    """The rules, for a workload. oracle: what judges tokens."""

    workload: Workload
    oracle: Oracle

    def of_answer(self, answer: Answer) -> Iterator[str]:
        """What a client would complain of. After an error the rest is not judged."""
        name = f"request {answer.request.number}"
        if answer.errors:
            yield from (f"{name}: {error}" for error in answer.errors)
            return
        prompt = len(answer.request.prompt)
        usage = {
            "prompt_tokens": prompt, "completion_tokens": answer.tokens, "total_tokens": prompt + answer.tokens,
        }  # fmt: skip
        if answer.usage is None or answer.usage | usage != answer.usage:
            yield f"{name}: usage is {answer.usage} instead of {usage}"
        for index, choice in enumerate(answer.choices):
            yield from (f"{name} choice {index}: {fault}" for fault in self._of_choice(answer.request, choice))

    def _of_choice(self, request: Request, choice: Choice) -> Iterator[str]:
        """Whether it ends where it should, and its text is that of its tokens."""
        eos = self.workload.eos
        is_silent = choice.finish_reason == "stop" and choice.token_ids[-1:] == [eos] and not request.ignore_eos
        ids = choice.token_ids[:-1] if is_silent else choice.token_ids
        text = str(self.workload.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        is_stopped = request.stop is not None and request.stop in text
        if request.stop is not None and is_stopped:
            text = text[: text.index(request.stop)]
        expected = "stop" if is_silent or is_stopped else "length"
        if choice.finish_reason != expected:
            yield f"finish_reason is {choice.finish_reason} instead of {expected}"
        if expected == "length" and len(choice.token_ids) != request.max_tokens:
            yield f"{len(choice.token_ids)} tokens instead of {request.max_tokens}"
        if choice.text != text:
            yield f"its text is {choice.text!r} instead of {text!r}"

    def of_reference(self, answers: Sequence[Answer]) -> Iterator[str]:
        """Which answers of the run without faults are not the oracle's."""
        for answer in answers:
            for index, choice in enumerate(answer.choices):
                loss = self._loss(answer.request, index, choice)
                if loss > NEAR:
                    yield f"request {answer.request.number} choice {index} without faults: a token is {loss:.2g} below the best"

    def differences(self, reference: Mapping[int, Answer], answers: Sequence[Answer]) -> Iterator[Difference]:
        """Where complete answers are not those of the run without faults. reference: by number of the request."""
        for answer in answers:
            former = reference[answer.request.number]
            if answer.errors or former.errors:
                continue
            for index, (wanted, choice) in enumerate(zip(former.choices, answer.choices, strict=True)):
                if choice.token_ids != wanted.token_ids:
                    position = _first_difference(wanted.token_ids, choice.token_ids)
                    expected, got = _at(wanted.token_ids, position), _at(choice.token_ids, position)
                    yield Difference(answer.request, index, position, expected, got, self._loss(answer.request, index, choice))

    def _loss(self, request: Request, index: int, choice: Choice) -> float:
        """That of its worst token."""
        return float(self.oracle.losses(request, index, choice.token_ids).max(initial=0.0))


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((position for position, (a, b) in pairs if a != b), min(len(one), len(other)))


def _at(ids: Sequence[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None
