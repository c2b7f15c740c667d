"""Checks of whole answers on the device: with graphs (on CPU: recordings) and without, with FP8 weights and with FP8 pages.

Owns which engines are compared. Tokens of graphs must be those of eager steps where the batch has the size of a graph; a graph
with rows that only fill it takes other matrix kernels, which round differently, so there the rate is measured. The model is the
demo model, which is asked to count: it is sure of each digit, so that rounding decides nothing.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.engine.batch import Batch
from bench.engine.figures import Agreement, Check
from bench.engine.plan import CheckAnswers
from common.config import DEMO_MODEL, EngineConfig, ModelConfig
from common.errors import ConfigError
from common.executor import Chunk
from common.ids import Int32Array
from common.sampling_params import SamplingParams
from common.text.tokenizer_manager import TokenizerManager
from engine.model_runner import ModelRunner

GREEDY = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=1, temperature=0.8, top_p=0.95, top_k=50, seed=5, ignore_eos=True)
ROWS, FILLED_ROWS = 8, 5
COUNTED_TOKENS = 40
Answers = list[list[int]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Case:
    """What is asked of an engine. rows: how many of the prompts."""

    name: str
    rows: int
    sampling: SamplingParams


FULL = (_Case("greedy", ROWS, GREEDY), _Case("sampled", ROWS, SAMPLED))
FILLED = _Case("greedy", FILLED_ROWS, GREEDY)


def check(task: CheckAnswers, say: Say) -> Iterator[Check | Agreement]:
    engine = replace(
        task.engine,
        max_running=ROWS,
        graph_sizes=str(ROWS),
        graphs="off",
        kv_memory="4MiB" if task.is_quick else "256MiB",
        context_tokens=256 if task.is_quick else 1024,
    )
    prompts, tokens = counting_prompts(ROWS), 4 if task.is_quick else COUNTED_TOKENS

    def answers(config: EngineConfig, cases: Sequence[_Case]) -> list[Answers]:
        """Of one runner, which is gone at the end."""
        runner = ModelRunner(ModelConfig(), config, say)
        found = [answers_of(runner, prompts[: case.rows], tokens, case.sampling) for case in cases]
        del runner
        gc.collect()
        return found

    *eager, filled, again = answers(engine, (*FULL, FILLED, FULL[0]))
    yield agreement("eager steps give the same tokens twice", again, eager[0], must_be_equal=True)
    try:
        *full, part = answers(replace(engine, graphs="on"), (*FULL, FILLED))
    except ConfigError as error:
        yield Check(rule="graphs: tokens are those of eager steps", met=None, figure=f"not checked: {error}")
    else:
        for case, ours, theirs in zip(FULL, full, eager, strict=True):
            rule = f"graphs: {case.name} tokens are those of eager steps, {ROWS} rows in a graph of {ROWS}"
            yield agreement(rule, ours, theirs, must_be_equal=True)
        yield agreement(f"graphs: tokens of {FILLED_ROWS} rows in a graph of {ROWS}", part, filled, must_be_equal=False)
    for rule, config in (
        ("FP8 weights (--quantization fp8): tokens as without", replace(engine, dtype="bfloat16", quantization="fp8")),
        ("FP8 pages (--kv-dtype fp8_e4m3): tokens as without", replace(engine, kv_dtype="fp8_e4m3")),
    ):
        try:
            (found,) = answers(config, FULL[:1])
        except ConfigError as error:
            yield Check(rule=rule, met=None, figure=f"not checked: {error}")
        else:
            yield agreement(rule, found, eager[0], must_be_equal=False)


def counting_prompts(count: int) -> list[Int32Array]:
    """Questions whose answers are COUNTED_TOKENS or longer, by the demo model's tokenizer."""
    tokenizer = TokenizerManager(DEMO_MODEL)
    chats = [f"Please count from {11 + 8 * number} to {30 + 8 * number}." for number in range(count)]
    return [np.array(tokenizer.encode_chat([{"role": "user", "content": chat}]), dtype=np.int32) for chat in chats]


def answers_of(runner: ModelRunner, prompts: Sequence[Int32Array], tokens: int, sampling: SamplingParams) -> Answers:
    """So many tokens for each prompt: one prompt after the other, then all rows together."""
    batch = Batch(runner.description, sampling)
    answers: Answers = []
    for row, prompt in enumerate(prompts):
        start = batch.start(row, len(prompt))
        result = runner.run(batch.plan([start], [Chunk(row, 0, prompt, last=True)]))
        answers.append(result.tokens.tolist())
        batch.length[row] = len(prompt)
    batch.left[: len(prompts)] = tokens - 1
    while (batch.left > 0).any():
        for answer, token in zip(answers, runner.run(batch.plan()).tokens.tolist(), strict=True):
            answer.append(token)
    return answers


def agreement(what: str, ours: Answers, theirs: Answers, *, must_be_equal: bool) -> Agreement:
    equal = sum(_until_apart(mine, other) for mine, other in zip(ours, theirs, strict=True))
    return Agreement(what=what, equal=equal, total=sum(map(len, theirs)), must_be_equal=must_be_equal)


def _until_apart(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((at for at, (mine, other) in pairs if mine != other), len(theirs))
