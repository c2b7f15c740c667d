"""Checks: what is wrong with answers, and where they differ from those of the run without faults.

Owns the rules for one answer, the comparison of two, and the oracle that judges tokens: what an answer must be, computed with
transformers and a sampler of its own, apart from everything that is served. Knows the model and the noise's definition: Gumbel
noise by (seed, position, token), where each of them goes through lowbias32. Does not know processes or faults.

A token is right when its score, logit / temperature + noise (greedy: the logit), is the best of all. Chunks, batches and resumes
round differently, so where two scores are nearly equal either token may win, and all that follows it differs. Such an answer is
still right, token by token, given its own beginning: it is listed, and is no problem. One that was
computed from a wrong page is not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tests.chaos.workload import Workload
from tests.rig.client import Answer, Choice, Request

NEAR = 1e-3
"""Scores that differ by less may be in either order: far above what rounding does, far below what differs between answers."""

Scores = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Difference:
    """A choice whose tokens are not those of the run without faults."""

    request: Request
    choice: int
    position: int
    """The first token that differs, from 0."""
    expected: int | None
    got: int | None
    loss: float
    """How far the answer's worst token is below the best one, by the oracle."""

    @property
    def is_right(self) -> bool:
        return self.loss <= NEAR

    def __str__(self) -> str:
        how = "greedy" if self.request.is_greedy else f"sampled at {self.request.body['temperature']:g}"
        verdict = "a near tie" if self.is_right else "WRONG"
        what = f"request {self.request.number} choice {self.choice}, {how}: token {self.position} of the answer"
        return f"{what} is {self.got} instead of {self.expected}: {verdict} (its worst token is {self.loss:.2g} below the best)"


class Oracle:
    def __init__(self, model: Path) -> None:
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def losses(self, request: Request, choice: int, token_ids: Sequence[int]) -> Scores:
        """For each token of the answer how far its score is below the best one."""
        begin = len(request.prompt)
        ids = torch.tensor([[*request.prompt, *token_ids]])
        with torch.inference_mode():
            scores = self._model(ids).logits[0, begin - 1 : -1].double().numpy()
        if not request.is_greedy:
            positions = np.arange(begin, begin + len(token_ids))
            scores = scores / request.body["temperature"] + gumbel(request.body["seed"] + choice, positions, scores.shape[1])
        chosen: Scores = scores.max(axis=1) - scores[np.arange(len(token_ids)), list(token_ids)]
        return chosen


def gumbel(seed: int, positions: npt.NDArray[np.int64], vocab: int) -> Scores:
    """[positions, vocab]"""
    low, high = np.array([seed % 2**32], np.uint64), np.array([(seed >> 32) % 2**32], np.uint64)
    of_seed = _lowbias32((_lowbias32(low) ^ (_lowbias32(high) * np.uint64(3))) & np.uint64(0xFFFFFFFF))
    of_position = _lowbias32(of_seed ^ _lowbias32(positions.astype(np.uint64)))
    bits = _lowbias32(_lowbias32(np.arange(vocab, dtype=np.uint64))[None, :] ^ of_position[:, None])
    noise: Scores = -np.log(-np.log((bits + 0.5) / 2.0**32))
    return noise


def _lowbias32(x: Words) -> Words:
    """https://nullprogram.com/blog/2018/07/31/, of x + 0x9E3779B9."""
    mask = np.uint64(0xFFFFFFFF)
    x = (x + np.uint64(0x9E3779B9)) & mask
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & mask
    x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) & mask
    mixed: Words = x ^ (x >> np.uint64(16))
    return mixed


@dataclass(frozen=True, slots=True)
class Checks:
    """The rules, for a workload."""

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
        is_silent = choice.finish_reason == "stop" and choice.token_ids[-1:] == [eos] and not request.body["ignore_eos"]
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
