"""What LoRA adapters cost: decode steps whose rows have so many different ones, beside steps of the model alone.

Owns the rounds and their figures. All kinds of steps take turns on one engine, so a ratio is of steps that met
the same disturbances. Adapters and contexts are random numbers, because speed does not depend on what they say. Run it as
`python -m benchmarks.adapters`.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import numpy as np
import torch

from bench.report import Goal, Spread, say
from benchmarks.command import Column, Invocation, start, table_of
from benchmarks.engine import OF_TIMED, SHAPES, SPAWN
from benchmarks.engine_steps import NOTHING, checkpoint, in_flight, sampling_plans
from common.config import DEMO_MODEL, EngineConfig
from common.ids import Digest
from common.options import option, parse_numbers, require, require_at_least
from engine.lora.adapter_files import Adapter, Factors
from engine.model_runner import ModelRunner
from launch import child

QUICK: dict[str, Any] = {"models": "tiny", "adapters": "1,3", "rows": 4, "rounds": 2}
LEAST = {1: 0.9, 8: 0.8, 64: 0.6}
"""Goals: the throughput with so many adapters, as a part of that of the model alone."""
STEADY = "Ratios are taken in one round."
KV_MEMORY = "2GiB"
"""Enough for 64 rows of Qwen3-0.6B, however much memory the adapters take."""
CHOSEN = (
    *OF_TIMED,
    "max_running",
    "context_tokens",
    "kv_memory",
    "lora",
    "max_loaded_loras",
    "max_loras_per_batch",
    "max_lora_rank",
)
"""Fields of the engine that are no flags here."""


@dataclass(frozen=True, kw_only=True)
class AdapterBench:
    """What is measured."""

    models: str = option(f"{DEMO_MODEL},Qwen3-0.6B", f"{DEMO_MODEL}, or random weights in a shape of {', '.join(SHAPES)}")
    adapters: str = option("1,8,64", "how many different adapters the rows of a step have, in turns")
    rank: int = option(16, "rank of each adapter; all linear layers have it")
    rows: int = option(64, "rows of a decode step")
    rounds: int = option(7, "rounds, in each of which every kind of step takes its turn")

    def __post_init__(self) -> None:
        names = self.models.split(",")
        require(set(names) <= SHAPES.keys() | {DEMO_MODEL}, "models", f"of {DEMO_MODEL}, {', '.join(SHAPES)}", self.models)
        require_at_least(self, rank=1, rows=1, rounds=1)
        require(min(self.counts) >= 1 and max(self.counts) <= self.rows, "adapters", "from 1 to --rows each", self.adapters)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(sorted(set(parse_numbers(self.adapters, "adapters", int))))


class AdaptedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Decode steps whose rows have so many different adapters, 0 for the model alone."""

    model: Annotated[str, Column("model")]
    dtype: Annotated[str, Column("dtype")]
    rows: Annotated[int, Column("rows")]
    rank: Annotated[int, Column("rank")]
    adapters: Annotated[int, Column("adapters")]
    step_ms: Annotated[float, Column("step, ms", ".2f")]
    """The median of all rounds."""
    ratio: Annotated[Spread, Column("throughput, to the model alone", ".2f")]


def run(invocation: Invocation) -> int:
    bench, engine = invocation.config(AdapterBench, QUICK), invocation.config(EngineConfig, {})
    child.prepare(engine.threads)
    with ProcessPoolExecutor(1, SPAWN) as process:  # its thread pools are as `prepare` says, because it begins behind that
        found = [steps for model in bench.models.split(",") for steps in process.submit(measure, bench, engine, model).result()]
    goals = []
    for each in found:
        if (least := LEAST.get(each.adapters)) is not None:
            rule = f"{each.model}: {each.adapters} adapters at {least} of the model's throughput or more"
            goals.append(Goal.of(rule, each.ratio.median, ".2f", least=least))
    table = invocation.style.table(table_of(AdaptedSteps, found))
    invocation.publish(f"device {engine.device}, {bench.rounds} rounds", STEADY, [table], goals, steps=found)
    return 0


def measure(bench: AdapterBench, engine: EngineConfig, name: str) -> list[AdaptedSteps]:
    found = list[AdaptedSteps]()
    most = max(bench.counts)
    engine = replace(
        engine,
        max_running=bench.rows,
        context_tokens=256,
        kv_memory=KV_MEMORY,
        max_loaded_loras=most,
        max_loras_per_batch=most,
        max_lora_rank=bench.rank,
    )
    with checkpoint(name, engine) as (model, chosen):
        runner = ModelRunner(model, chosen, say)
    digests = [runner.adapters.hold(adapter) for adapter in random_adapters(runner, most, bench.rank)]
    seconds: dict[int, list[float]] = {count: [] for count in (0, *bench.counts)}
    with runner.on_device():
        for number in range(bench.rounds + 1):
            say(f"{name}, round {number}")
            for count, taken in seconds.items():
                first, *others = sampling_plans(runner, NOTHING, digests[:count] or (Digest(""),))
                runner.steps.launch(first).wait()
                step_s = float(np.median(in_flight(runner, others)[0]))
                if number:  # the first round compiles and warms up
                    taken.append(step_s)
    for count, taken in seconds.items():
        made = AdaptedSteps(
            model=name,
            dtype=runner.description.model.dtype,
            rows=bench.rows,
            rank=bench.rank,
            adapters=count,
            step_ms=1e3 * float(np.median(taken)),
            ratio=Spread.of(alone / adapted for alone, adapted in zip(seconds[0], taken, strict=True)),
        )
        found.append(made)
    return found


def random_adapters(runner: ModelRunner, count: int, rank: int) -> Iterator[Adapter]:
    """Those of all linear layers. They have the same numbers and memory of their own in slots, where steps read them."""
    factors = {
        name: Factors(
            torch.randn(rank, len(target.columns)).to(target.dtype), torch.randn(rank, len(target.rows)).to(target.dtype)
        )
        for name, target in runner.adapters.targets.items()
    }
    for number in range(count):
        yield Adapter(Digest(f"{number:032x}"), rank, factors)


EXPLANATION = "Measure decode steps with LoRA adapters beside those of the model alone."

if __name__ == "__main__":
    sys.exit(start("adapters", EXPLANATION, run, AdapterBench, EngineConfig, without=CHOSEN))
