"""What the sampling parameters cost: decode steps whose rows all ask for the same, beside steps whose rows ask for nothing.

Owns what is asked for. Each round times a few steps of every kind, so that all kinds meet the same disturbances.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec.structs import replace as with_fields

from bench.engine.figures import SampledStep
from bench.engine.models import shape_folder
from bench.engine.plan import MeasureSampling
from bench.engine.steps import in_flight
from bench.report import Spread
from common.config import DEMO_MODEL, EngineConfig, ModelConfig
from common.executor import Plan, RowStart
from common.sampling_params import Grammar, SamplingParams
from engine.model_runner import ModelRunner

PROMPT_TOKENS, STEPS_AT_ONCE = 128, 3
_NOTHING = SamplingParams(max_new_tokens=99, temperature=0.0)
_WORDS = tuple(tuple(range(20 * word, 20 * word + 1 + word % 4)) for word in range(8))
KINDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.8},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit_bias of 300 tokens": {"logit_bias": tuple((token, 1.0) for token in range(300))},
    "min_tokens": {"min_tokens": 99},
    "8 bad words": {"bad_words": _WORDS},
    "logprobs 5": {"logprobs": 5},
}
WITH_VOCABULARY: dict[str, dict[str, Any]] = {
    "a JSON schema": {"grammar": Grammar("json_schema", '{"type":"array","items":{"type":"string"}}')},
    "a regular expression": {"grammar": Grammar("regex", r"(\d{3}-){99}")},
}
"""Only of a model that has a tokenizer."""


def measure(task: MeasureSampling, say: Callable[[str], None]) -> Iterator[SampledStep]:
    with _model(task) as (model, engine):
        engine = replace(engine, max_running=task.rows, context_tokens=256, kv_memory="256MiB")
        runner = ModelRunner(model, engine, say)
    kinds = KINDS | WITH_VOCABULARY if task.model == DEMO_MODEL else KINDS
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with runner.on_device():
        for number in range(task.rounds + 1):
            say(f"round {number}")
            for kind, fields in kinds.items():
                first, *others = _plans(runner, with_fields(_NOTHING, **fields))
                runner.steps.launch(first).wait()
                taken, _ = in_flight(runner, others)
                if number:  # the first round compiles and warms up
                    seconds[kind] += taken
    plain = float(np.median(seconds["nothing"]))
    for kind, taken in seconds.items():
        yield SampledStep(
            model=task.model,
            vocab_size=runner.description.model.vocab_size,
            rows=task.rows,
            asked=kind,
            step_ms=Spread.of(1e3 * each for each in taken),
            ratio=float(np.median(taken)) / plain,
        )


@contextlib.contextmanager
def _model(task: MeasureSampling) -> Iterator[tuple[ModelConfig, EngineConfig]]:
    if task.model == DEMO_MODEL:
        yield ModelConfig(), task.engine
        return
    with shape_folder(task.model, vocab_size=task.vocab_size) as model:
        yield model, replace(task.engine, load_format="dummy")


def _plans(runner: ModelRunner, sampling: SamplingParams) -> list[Plan]:
    """A step in which all rows start, and those that are timed. Nobody has computed the rows' context."""
    if sampling.grammar is not None and runner.grammars is not None:
        runner.grammars.prepare(sampling.grammar, lambda: None).wait()
    described = runner.description
    pages = described.layout.pages_for(PROMPT_TOKENS + STEPS_AT_ONCE + 1)
    random = np.random.default_rng(5)
    starts = [
        RowStart(
            row=row,
            pages=np.arange(row * pages, (row + 1) * pages, dtype=np.int32),
            sampling=sampling,
            length=PROMPT_TOKENS - 1,
            last_token=1,
            token_ids=random.integers(0, described.model.vocab_size, PROMPT_TOKENS).astype(np.int32),
        )
        for row in range(described.max_rows)
    ]
    rows = np.arange(described.max_rows, dtype=np.int32)
    return [Plan(number, tuple(starts) if number == 0 else (), decode_rows=rows) for number in range(STEPS_AT_ONCE + 1)]
