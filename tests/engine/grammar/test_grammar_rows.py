"""Rows with a grammar in the demo model's engine: the answer is the same however it is carried on, greedy and seeded."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from common.config import EngineConfig, ModelConfig
from common.executor import Chunk, RowStart, StepPlan
from common.ids import Int32Array
from common.model_path import resolve_model_path
from common.sampling_params import Grammar, SamplingParams
from engine.model_runner import ModelRunner
from tests.engine.driver import Driver

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
}
TOKENS = 24
MODEL: Path = resolve_model_path("demo")


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    """Its grammars are compiled in a process of their own."""
    runner = ModelRunner(ModelConfig(), EngineConfig(kv_memory="16MiB", context_tokens=512, max_running=8), lambda text: None)
    assert runner.grammars is not None
    for sampling in ASKED:
        if sampling.grammar is not None:
            runner.grammars.prepare(sampling.grammar, lambda: None).wait()
    yield runner
    runner.grammars.close()


ASKED = [
    SamplingParams(max_new_tokens=TOKENS, temperature=0.0, grammar=Grammar("json_schema", json.dumps(SCHEMA))),
    SamplingParams(max_new_tokens=TOKENS, temperature=0.0),
    SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=4, grammar=Grammar("json_schema", json.dumps(SCHEMA))),
    SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=5, top_k=50, grammar=Grammar("regex", r"(\d{3}-){4}\d{3}")),
]


def prompts() -> list[Int32Array]:
    random = np.random.default_rng(3)
    return [random.integers(300, 2000, 5 + 30 * row).astype(np.int32) for row in range(len(ASKED))]


def ended(answers: list[list[int]], runner: ModelRunner) -> list[list[int]]:
    """Up to their ends: what a row samples behind that is dropped."""
    eos = runner.description.eos_token_ids
    return [answer[: next((at + 1 for at, token in enumerate(answer) if token in eos), None)] for answer in answers]


def test_an_answer_with_a_grammar_is_the_same_through_resumes_and_handoffs(runner: ModelRunner) -> None:
    description, given = runner.description, prompts()
    through = ended(Driver(runner.run, description).answers(given, TOKENS, ASKED, chunk_tokens=40), runner)
    decode = PreTrainedTokenizerFast.from_pretrained(MODEL, local_files_only=True).decode
    texts = [str(decode(answer, skip_special_tokens=True)) for answer in through]
    assert texts[0].lstrip().startswith("{") and texts[2].lstrip().startswith("{")
    assert len(texts[3]) == len("123-" * 4 + "123") and texts[3].replace("-", "").isdigit(), texts[3]
    for answered in (1, 4):
        known = [np.array([*p, *a[:answered]], dtype=np.int32) for p, a in zip(given, through, strict=True)]
        resumed = Driver(runner.run, description).answers(known, TOKENS - answered, ASKED, answered=answered)
        assert ended(resumed, runner) == [answer[answered:] for answer in through]
    assert ended(handed_off(runner, given), runner) == through


def handed_off(runner: ModelRunner, given: list[Int32Array]) -> list[list[int]]:
    """The prompts are computed in some rows, and the answers in others, which get the pages."""
    rows, width = len(given), runner.description.layout.pages_for(200)
    pages = [np.arange(width * row, width * (row + 1), dtype=np.int32) for row in range(rows)]
    starts = [RowStart(row, pages[row], ASKED[row], token_ids=given[row]) for row in range(rows)]
    chunks = [Chunk(row, 0, given[row], last=True) for row in range(rows)]
    answers = [[token] for token in runner.run(StepPlan(1, starts=tuple(starts), chunks=tuple(chunks))).tokens.tolist()]
    moved = [
        RowStart(
            row=7 - row,
            pages=pages[row],
            sampling=ASKED[row],
            length=len(given[row]),
            last_token=answers[row][0],
            token_ids=np.append(given[row], np.int32(answers[row][0])),
            answer_tokens=1,
        )
        for row in range(rows)
    ]
    decode_rows = np.array([7 - row for row in range(rows)], dtype=np.int32)
    for step in range(TOKENS - 1):
        result = runner.run(StepPlan(2 + step, starts=tuple(moved) if step == 0 else (), decode_rows=decode_rows))
        for answer, token in zip(answers, result.tokens.tolist(), strict=True):
            answer.append(token)
    return answers
