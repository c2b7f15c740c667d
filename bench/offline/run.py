"""`launch bench offline`: an engine in this process, timed while it answers all sequences.

Owns the clock, the figures and the report. Progress goes to stderr.
"""

import threading
import time
from contextlib import closing

import msgspec
import numpy as np

from bench.figures import Outcome, Spread
from bench.hardware import this_hardware
from bench.offline.engine import serve
from bench.offline.plan import OfflineBench
from bench.offline.workload import Asked, sequences
from bench.tables import markdown_report, markdown_table, publish, say, text_report, text_table
from common.config import EngineConfig, ModelConfig
from common.errors import ConfigError
from engine.device import with_device_defaults
from engine.torch_executor import TorchExecutor

WARM_UP = Asked(np.arange(8, dtype=np.int32), 4)
STEADY = "The number of steps is not affected."


class OfflineRun(msgspec.Struct, frozen=True, kw_only=True):
    """All sequences, once. decode_rows: of all steps together. preempted: how often a sequence was computed again."""

    seconds: float
    steps: int
    decode_rows: int
    preempted: int


class OfflineOutcome(Outcome, frozen=True, kw_only=True):
    """All that is known at the end of `launch bench offline`."""

    model: str
    device: str
    dtype: str
    threads: int
    chunk_tokens: int
    rows: int
    kv_pages: int
    sequences: int
    prompt_tokens: int
    answer_tokens: int
    output_tokens_per_s: Spread
    total_tokens_per_s: Spread
    runs: list[OfflineRun]


def run(bench: OfflineBench, model: ModelConfig, engine: EngineConfig, command: str, markdown: bool) -> int:
    """Measure, print the report and write the file. Returns the exit status. Raises OfflineFailed."""
    hardware, ready = this_hardware(), threading.Event()
    engine = with_device_defaults(engine)
    with closing(TorchExecutor(model, engine, ready.set, say)) as executor:
        description = executor.description
        asked = sequences(bench, description.model.vocab_size)
        longest = max(len(each.prompt) + each.answer_tokens for each in asked)
        if longest > description.model.context_tokens:
            raise ConfigError(
                f"the longest sequence has {longest} tokens, and the context {description.model.context_tokens}: give more "
                f"--context-tokens or --kv-memory, or shorter --prompt-tokens and --answer-tokens"
            )
        serve(executor, engine.chunk_tokens, ready, [WARM_UP], bench.temperature)
        runs = []
        for number in range(bench.repeat):
            say(f"{len(asked)} sequences, {number + 1} of {bench.repeat}")
            began = time.perf_counter()
            served = serve(executor, engine.chunk_tokens, ready, asked, bench.temperature)
            seconds = time.perf_counter() - began
            runs.append(
                OfflineRun(seconds=seconds, steps=served.steps, decode_rows=served.decode_rows, preempted=served.preempted)
            )
    prompts, answers = sum(len(each.prompt) for each in asked), sum(each.answer_tokens for each in asked)
    outcome = OfflineOutcome(
        command=command,
        hardware=hardware,
        goals=[],
        model=description.model.name,
        device=description.device,
        dtype=description.model.dtype,
        threads=engine.threads,
        chunk_tokens=engine.chunk_tokens,
        rows=description.max_rows,
        kv_pages=description.total_pages,
        sequences=len(asked),
        prompt_tokens=prompts,
        answer_tokens=answers,
        output_tokens_per_s=Spread.of(answers / each.seconds for each in runs),
        total_tokens_per_s=Spread.of((prompts + answers) / each.seconds for each in runs),
        runs=runs,
    )
    publish(outcome, report(outcome, markdown), bench.json)
    return 0


def report(outcome: OfflineOutcome, markdown: bool) -> str:
    settings = (
        f"{outcome.model} in {outcome.dtype} on {outcome.device}, "
        f"--threads {outcome.threads}, chunks of {outcome.chunk_tokens} tokens, at most {outcome.rows} rows in a step"
    )
    table = (markdown_table if markdown else text_table)(lines(outcome))
    return (markdown_report if markdown else text_report)(outcome, settings, STEADY, [table])


def lines(outcome: OfflineOutcome) -> list[tuple[str, ...]]:
    """The first line is the head."""
    runs = outcome.runs
    head = (
        "sequences", "prompt tokens", "answer tokens", "seconds", "output tokens/s", "total tokens/s", "steps", "rows in a step",
        "computed again",
    )  # fmt: skip
    return [
        head,
        (
            f"{outcome.sequences:,}",
            f"{outcome.prompt_tokens:,}",
            f"{outcome.answer_tokens:,}",
            _spread(Spread.of(each.seconds for each in runs), ".1f"),
            _spread(outcome.output_tokens_per_s, ",.0f"),
            _spread(outcome.total_tokens_per_s, ",.0f"),
            f"{runs[-1].steps:,}",
            f"{runs[-1].decode_rows / runs[-1].steps:.1f}",
            f"{runs[-1].preempted}",
        ),
    ]


def _spread(spread: Spread, form: str) -> str:
    """The median, and between which values it lies where there are several."""
    if spread.least == spread.most:
        return f"{spread.median:{form}}"
    return f"{spread.median:{form}} ({spread.least:{form}} … {spread.most:{form}})"
