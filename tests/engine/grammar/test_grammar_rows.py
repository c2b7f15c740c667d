"""Rows with a grammar in the demo model's engine: the answer is the same however it is carried on, greedy and seeded, and with
drafts."""

import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from common.config import EngineConfig, ModelConfig
from common.executor import Chunk, RowStart, StepPlan
from common.ids import Int32Array
from common.model_path import resolve_model_path
from common.sampling_params import Grammar, SamplingParams
from engine import model_runner
from engine.grammar import masks
from engine.grammar.compiler import Compiler
from engine.model_runner import ModelRunner
from tests.engine.churn import Asked, Churn
from tests.engine.driver import Driver, handed_off

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
}
TOKENS = 24
MODEL: Path = resolve_model_path("demo")


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    """Its grammars are compiled in this process, and not in one of their own."""
    with mock.patch.object(model_runner, "CompilerProcess", Compiler):
        runner = ModelRunner(
            ModelConfig(), EngineConfig(kv_memory="16MiB", context_tokens=512, max_running=12), lambda text: None
        )
    assert runner.grammars is not None
    for sampling in ASKED:
        if sampling.grammar is not None:
            runner.grammars.prepare(sampling.grammar, lambda: None).wait()
    yield runner
    runner.grammars.close()


JSON, DIGITS = Grammar("json_schema", json.dumps(SCHEMA)), Grammar("regex", r"(\d{3}-){4}\d{3}")
ASKED = [
    SamplingParams(max_new_tokens=TOKENS, temperature=0.0, grammar=JSON, logprobs=1),
    SamplingParams(max_new_tokens=TOKENS, temperature=0.0),
    SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=4, grammar=JSON, repetition_penalty=1.1),
    SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=5, top_k=50, grammar=DIGITS, min_tokens=4),
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
    moved = handed_off(runner.run, given, ASKED, TOKENS, description.layout.pages_for(200), first_row=4)
    assert ended(moved, runner) == through


def test_drafts_change_no_answer(runner: ModelRunner) -> None:
    random = np.random.default_rng(3)
    prompts = [random.integers(300, 2000, int(random.integers(3, 90))).astype(np.int32) for _ in range(8)]
    requests = [Asked(prompt, ASKED[at % 4]) for at, prompt in enumerate(prompts)]
    for asked in requests:
        alone = Driver(runner.run, runner.description).answers([asked.prompt], TOKENS, asked.sampling)
        (asked.expected,) = ended(alone, runner)
    churn = Churn(runner.run, runner.description, rows=5, pages=90, seed=2, wrong=0.4)
    churn.serve(requests)
    assert [asked.answer for asked in requests] == [asked.expected for asked in requests]
    assert churn.right > 20


def test_a_grammar_that_fails_behind_drafts_tells_how_many_tokens_come_before(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = SamplingParams(max_new_tokens=TOKENS, temperature=0.0, grammar=DIGITS)
    prompt, pages, rows = np.arange(300, 309, dtype=np.int32), np.arange(2, dtype=np.int32), np.zeros(1, dtype=np.int32)
    start = RowStart(0, pages, asked, token_ids=prompt)
    answer = runner.run(StepPlan(0, (start,), (Chunk(0, 0, prompt, last=True),))).tokens.tolist()
    for step in range(1, 5):
        answer += runner.run(StepPlan(step, decode_rows=rows)).tokens.tolist()
    read = iter([0, 0, masks.MAX_WORK + 1])  # for the third token of the answer
    monkeypatch.setattr(masks, "count_work", lambda matcher: next(read))
    known = np.append(prompt, np.int32(answer[0]))
    start = RowStart(0, pages, asked, length=len(prompt), last_token=answer[0], token_ids=known, answer_tokens=1)
    drafted = np.array(answer[1:4], dtype=np.int32)
    result = runner.run(StepPlan(9, (start,), decode_rows=rows, draft_rows=rows.repeat(3), draft_tokens=drafted))
    assert result.failed.keys() == {0} and result.failed_behind == {0: 2}
    assert [result.tokens[0], result.drafted[0]] == answer[1:3]
