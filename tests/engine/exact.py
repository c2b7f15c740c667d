"""Compares a model runner with transformers' own model: every token of greedy answers, and the logits that each came from.

Owns the comparison. Knows neither architectures nor how the runner computes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.config import EngineConfig, ModelConfig
from common.executor import StepPlan, StepResult
from common.ids import Digest, Int32Array
from common.sampling_params import SamplingParams
from engine.model_runner import ModelRunner
from engine.sampling import Sampler
from tests.engine.driver import Driver

GREEDY = SamplingParams(max_new_tokens=99, temperature=0.0)
TOLERANCE = 1e-4
"""The tolerated error of logits, relative to the largest of the position."""


def runner(path: Path, say: Callable[[str], None] = lambda text: None, **changes: object) -> ModelRunner:
    """A runner on the CPU with room for some contexts of these small models, unless the fields of its config say otherwise."""
    fields: dict[str, object] = {"device": "cpu", "page_size": 16, "kv_memory": "8MiB", "max_running": 8}
    return ModelRunner(ModelConfig(model=str(path)), EngineConfig(**(fields | changes)), say)  # type: ignore[arg-type]


@dataclass(slots=True)
class Answer:
    """tokens: the answer. logits: what each token was the largest of, [vocab] each."""

    prompt: Int32Array
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


@contextmanager
def recorded_logits(steps: Callable[[], list[Tensor]] | None = None) -> Iterator[list[Tensor]]:
    """Those from which tokens are drawn while this lasts, step by step, whether a forward is replayed or not. steps: where the
    thread that draws keeps them; None: all in one list."""
    all_steps: list[Tensor] = []
    original = Sampler.draw

    def recording(self: Sampler, logits: Tensor, *args: Any) -> Tensor:
        (all_steps if steps is None else steps()).append(logits)
        return original(self, logits, *args)

    with mock.patch.object(Sampler, "draw", recording):
        yield all_steps


def answers(
    made: ModelRunner,
    prompts: Sequence[Int32Array],
    tokens: int,
    chunk_tokens: int,
    adapters: Sequence[Digest] | None = None,
) -> list[Answer]:
    """Greedy answers of so many tokens: all prompts at once, in chunks of so many tokens beside each other's decode steps.
    adapters: of each prompt; None: the model alone."""
    with recorded_logits() as calls:
        return heard_answers(made, prompts, tokens, chunk_tokens, calls, adapters)


def heard_answers(
    made: ModelRunner,
    prompts: Sequence[Int32Array],
    tokens: int,
    chunk_tokens: int,
    calls: list[Tensor],
    adapters: Sequence[Digest] | None = None,
) -> list[Answer]:
    """As `answers`, while the logits of each step come to `calls`."""
    given = [Answer(prompt) for prompt in prompts]

    def run(plan: StepPlan) -> StepResult:
        calls.clear()
        result = made.run(plan)
        for row, logits in zip(plan.sampled_rows.tolist(), calls[-1] if calls else (), strict=True):
            given[row].logits.append(logits.cpu().clone())
        return result

    sampled = Driver(run, made.description, adapters=adapters).answers(prompts, tokens, GREEDY, chunk_tokens)
    for answer, answer_tokens in zip(given, sampled, strict=True):
        answer.tokens.extend(answer_tokens)
    return given


def reference_logits(model: PreTrainedModel, answer: Answer) -> Tensor:
    """What transformers computes for each token of an answer, in one forward over all of it. [tokens, vocab] float32.

    If at each position the answer's token is the largest, then it is transformers' own greedy answer, by induction.
    """
    ids = np.concatenate([answer.prompt, answer.tokens[:-1]]).astype(np.int64)
    with torch.inference_mode():
        logits: Tensor = model(torch.from_numpy(ids)[None], use_cache=False).logits[0, len(answer.prompt) - 1 :]
    return logits.float()


def assert_exact(model: PreTrainedModel, given: Sequence[Answer]) -> None:
    for answer in given:
        expected = reference_logits(model, answer)
        assert answer.tokens == expected.argmax(-1).tolist()
        assert len(answer.logits) == len(expected)
        worst = (torch.stack(answer.logits) - expected).abs().amax(-1) / expected.abs().amax(-1)
        assert worst.max() < TOLERANCE
