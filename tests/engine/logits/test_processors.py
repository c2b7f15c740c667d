"""Every logits processor against the definitions, over batches that change: rows start, pause, and are taken over by others."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from common.executor import RowStart
from common.sampling_params import SamplingParams
from engine import logits_processors as processors
from engine.logits_processors import make_processors
from engine.ports import SampledRows
from tests.engine.logits.plain import processed

ROWS, VOCAB, STEPS, EOS = 6, 12, 120, (3, 5)
NO_PAGES = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Request:
    sampling: SamplingParams
    prompt: list[int]
    answer: list[int] = field(default_factory=list)


def some_sampling(random: np.random.Generator) -> SamplingParams:
    """Each parameter is there or not; few tokens, so that words and repetitions come up."""
    fields: dict[str, object] = {
        "repetition_penalty": float(random.choice([0.5, 1.7])),
        "presence_penalty": float(random.choice([-1.5, 0.75])),
        "frequency_penalty": float(random.choice([-0.5, 2.0])),
        "logit_bias": tuple((int(token), float(random.normal() * 5)) for token in random.permutation(VOCAB)[:4]),
        "min_tokens": int(random.integers(1, 9)),
        "stop_token_ids": tuple(random.integers(0, VOCAB, 2).tolist()),
        "bad_words": tuple(tuple(random.integers(0, VOCAB, size).tolist()) for size in (1, 2, 2, 2, 3, 16)),
    }
    asked = {name: value for name, value in fields.items() if random.random() < 0.4}
    return SamplingParams(max_new_tokens=99, **asked)  # type: ignore[arg-type]


def some_request(random: np.random.Generator) -> Request:
    """Half of them have a part of their answer already, as after a resume or a handoff."""
    answer = random.integers(0, VOCAB, int(random.integers(1, 20))).tolist() if random.random() < 0.5 else []
    return Request(some_sampling(random), random.integers(0, VOCAB, 3).tolist(), answer)


def start(row: int, request: Request) -> RowStart:
    known = np.array([*request.prompt, *request.answer], dtype=np.int32) if request.sampling.needs_tokens else None
    return RowStart(row, NO_PAGES, request.sampling, token_ids=known, answer_tokens=len(request.answer))


@pytest.mark.parametrize(("at_once", "few"), [(processors.ROWS_AT_ONCE, 1), (2, VOCAB)], ids=["few tokens", "whole rows"])
def test_logits_of_mixed_batches_are_those_of_the_definitions_token_by_token(
    monkeypatch: pytest.MonkeyPatch, at_once: int, few: int
) -> None:
    monkeypatch.setattr(processors, "ROWS_AT_ONCE", at_once)
    monkeypatch.setattr(processors, "_FEW", few)
    random = np.random.default_rng(at_once)
    kept = make_processors(ROWS, VOCAB, EOS, torch.device("cpu"))
    held: dict[int, Request] = {}
    changed = 0
    for _ in range(STEPS):
        new = [row for row in range(ROWS) if row not in held or random.random() < 0.06]
        held.update({row: some_request(random) for row in new})
        for processor in kept:
            processor.start([start(row, held[row]) for row in new])
        assert all(held[row].sampling.changes_logits for row in held if any(each.concerns[row] for each in kept))
        rows = random.permutation(ROWS)[: random.integers(1, ROWS + 1)]
        raw = random.normal(size=(len(rows), VOCAB)) * 4
        logits, tokens = torch.tensor(raw, dtype=torch.float32), random.integers(0, VOCAB, len(rows))
        concerned = []
        for processor in kept:
            at = np.flatnonzero(processor.concerns[rows])
            if len(at):
                concerned.append((processor, SampledRows(rows[at], torch.tensor(rows[at]), at, torch.tensor(at))))
                processor.apply(logits, concerned[-1][1])
        asked = [held[row] for row in rows.tolist()]
        expected = [processed(own, r.prompt, r.answer, r.sampling, EOS) for own, r in zip(raw, asked, strict=True)]
        np.testing.assert_allclose(logits.double().numpy(), expected, rtol=1e-5, atol=1e-5)
        changed += int((raw != expected).any(axis=1).sum())
        for request, token in zip(asked, tokens.tolist(), strict=True):
            request.answer.append(token)
        for processor, which in concerned:
            processor.sampled(which, torch.tensor(tokens)[which.at])
    assert STEPS < changed < STEPS * ROWS, "rows with and without a change"


def test_rows_without_extras_concern_no_processor_and_those_with_min_tokens_only_until_they_have_them() -> None:
    processors = make_processors(ROWS, VOCAB, EOS, torch.device("cpu"))
    requests = {0: SamplingParams(max_new_tokens=9, temperature=0.7, top_k=4), 1: SamplingParams(max_new_tokens=9, min_tokens=3)}
    rows = np.array([0, 1])
    for processor in processors:
        processor.start([start(row, Request(sampling, [1, 2], [])) for row, sampling in requests.items()])
    seen = []
    for _ in range(4):
        concerned = [processor for processor in processors if processor.concerns[rows].any()]
        assert not any(processor.concerns[rows][0] for processor in processors)
        seen.append(len(concerned))
        for processor in concerned:
            which = SampledRows(rows[1:], torch.tensor([1]), np.array([1]), torch.tensor([1]))
            processor.sampled(which, torch.tensor([7]))
    assert seen == [1, 1, 1, 0]
