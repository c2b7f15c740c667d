"""The engine on one device, built and timed in processes of its own.

Owns the flags, the tasks in their order, the figures, the goals and the report. A task that fails or takes too long is
reported in its place, with what it had found by then, and the next goes on. Uses no device: tasks are done by
`benchmarks/engine_steps.py`. Run it as `python -m benchmarks.engine`.
"""

import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

import msgspec

from bench.report import Goal, Spread, say
from benchmarks.command import Invocation, start
from common.config import DEMO_MODEL, EngineConfig
from common.errors import TandemError
from common.options import option, parse_numbers, require, require_above_0, require_at_least
from launch import child

Section = Literal["ceilings", "host", "sampling", "steps", "floor"]
SECTIONS: tuple[Section, ...] = get_args(Section)

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128,
    "num_key_value_heads": 8, "vocab_size": 151936, "rope_theta": 1e6,
    "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "eos_token_id": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _COMMON | _QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-30M": _COMMON | _QWEN3 | {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 7, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16384, "tie_word_embeddings": True,
    },
    "Llama-3-8B": _COMMON | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rope_theta": 5e5,
        "max_position_embeddings": 8192, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    },
    "Qwen3-14B": _COMMON | _QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
    },
    "tiny": _COMMON | _QWEN3 | {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""config.json of each model, as far as its speed depends on it. tiny: to show that everything works."""
GOAL_STEP, GOAL_PREFILL, GOAL_ROWS = ("Llama-3-8B", 32, 2048), ("Llama-3-8B", 8192), 256
LEAST_MEMORY_SHARE, LEAST_MATMUL_SHARE, MOST_HOST_MS = 0.7, 0.6, 0.5
STEP_RULE = "Llama-3-8B: a decode step of 32 rows and 2048 tokens at 70 % of the speed of a copy or more"
PREFILL_RULE = "Llama-3-8B: prefill of 8192 tokens at 60 % of the speed of a product of matrices or more, with the best chunk"
MISSING = "–"
LEAST_S = 5.0
"""A task is not begun with less time than this."""
STEADY = "Shares are of what the device did in the same run."
OF_TIMED = ("executor", "step_cost")
"""Fields of the engine that are no flags here: what is measured computes."""
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, kw_only=True)
class EngineBench:
    """What is measured, and how long."""

    models: str = option(
        "Qwen3-0.6B,Llama-3-8B,Qwen3-14B", f"shapes of random weights, with commas between them: of {', '.join(SHAPES)}"
    )
    batches: str = option("1,8,32,128,256", "decode steps: how many rows")
    contexts: str = option("512,2048,8192", "decode steps: tokens that each row has")
    prompt_tokens: int = option(8192, "prefill: tokens of the prompt")
    prompt_chunks: str = option("512,2048,8192", "prefill: tokens of a chunk; no chunk is longer than the prompt")
    rounds: int = option(20, "decode steps timed for each batch and context; fewer repeats elsewhere")
    only: str = option("", f"sections, with commas between them, of {', '.join(SECTIONS)}; default: all")
    budget_s: float = option(540.0, "seconds for everything; what does not fit is reported as not measured")

    def __post_init__(self) -> None:
        names = self.shapes
        require(len(names) > 0 and set(names) <= SHAPES.keys(), "models", f"of {', '.join(SHAPES)}", ", ".join(names))
        require(set(_parts(self.only)) <= set(SECTIONS), "only", f"of {', '.join(SECTIONS)}", self.only)
        sizes = {"batches": self.batch_sizes, "contexts": self.context_lengths, "prompt-chunks": self.chunk_lengths}
        for flag, numbers in sizes.items():
            require(min(numbers) >= 1, flag, "at least 1 each", min(numbers))
        require_at_least(self, prompt_tokens=1, rounds=2)
        require_above_0(self, "budget_s")

    @property
    def shapes(self) -> tuple[str, ...]:
        return _parts(self.models)

    @property
    def sections(self) -> tuple[Section, ...]:
        """In their order. The ceilings are always among them: other figures are shares of them."""
        chosen = _parts(self.only) or SECTIONS
        return tuple(name for name in SECTIONS if name in chosen or name == "ceilings")

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return tuple(sorted(set(parse_numbers(self.batches, "batches", int))))

    @property
    def context_lengths(self) -> tuple[int, ...]:
        return tuple(sorted(set(parse_numbers(self.contexts, "contexts", int))))

    @property
    def chunk_lengths(self) -> tuple[int, ...]:
        """No longer than the prompt, each once."""
        chunks = parse_numbers(self.prompt_chunks, "prompt-chunks", int)
        return tuple(sorted({min(self.prompt_tokens, chunk) for chunk in chunks}))


def _parts(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


QUICK: dict[str, Any] = {
    "models": "tiny", "batches": "1,4", "contexts": "32,96", "prompt_tokens": 96, "prompt_chunks": "32,96", "rounds": 3,
}  # fmt: skip
QUICK_ENGINE: dict[str, Any] = {"max_running": 4, "chunk_tokens": 32, "page_size": 8, "kv_memory": "4MiB"}


# --- tasks -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EngineTask:
    """Something to measure, in a process of its own, and so on a device where nothing else of this has memory."""

    section: Section
    label: str
    bench: EngineBench
    engine: EngineConfig
    limit_s: float
    """After this time it is stopped. What it has reported by then is kept."""
    model: str = ""
    vocab_size: int = 0
    """The sampled vocabulary; 0: the model's own."""


def tasks(bench: EngineBench, engine: EngineConfig, is_quick: bool, on_cuda: bool) -> Iterator[EngineTask]:
    """In their order: what matters most comes first, because the time may not be enough for all. The floor is that of a CPU."""
    sampled = [("tiny", 512)] if is_quick else [(DEMO_MODEL, 0), ("tiny", 32_000), ("tiny", 151_936)]
    room = replace(
        engine,
        chunk_tokens=max(*bench.chunk_lengths, engine.chunk_tokens),
        context_tokens=max(*bench.context_lengths, bench.prompt_tokens),
        max_running=max(*bench.batch_sizes, engine.max_running),
    )
    for section in bench.sections:
        make = partial(EngineTask, section=section, bench=bench)
        match section:
            case "ceilings" | "host":
                yield make(label=section, limit_s=60.0, engine=engine)
            case "sampling":
                for name, size in sampled:
                    label = f"sampling {name}, vocabulary of {size or 'its own'}"
                    yield make(label=label, limit_s=150.0, engine=engine, model=name, vocab_size=size)
            case "steps" | "floor":
                for name in bench.shapes if section == "steps" or not on_cuda else ():
                    yield make(label=f"{section} {name}", limit_s=300.0, engine=room, model=name)


# --- figures -----------------------------------------------------------------------------------------------------------------


class Ceilings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the device can do: copies, and products of matrices."""

    device: str
    copy_gb_per_s: Spread
    """Bytes read and written, 10^9."""
    matmul: str
    """Such as "8192^3 bfloat16"."""
    matmul_tflop_per_s: Spread


class EngineFigure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A figure that is a line of a table."""

    title: ClassVar[str]
    heads: ClassVar[tuple[str, ...]]

    def cells(self, ceilings: Ceilings | None) -> tuple[str, ...]:
        raise NotImplementedError


class Started(EngineFigure, frozen=True, kw_only=True):
    """A model runner was started."""

    title = "Start-up"
    heads = ("model", "dtype", "s", "weights read, GB", "pages, GB", "context")
    model: str
    dtype: str
    seconds: float
    weight_bytes: int
    """What a decode step reads."""
    pool_bytes: int
    context_tokens: int

    def cells(self, ceilings: Ceilings | None) -> tuple[str, ...]:
        sizes = f"{self.weight_bytes / 1e9:.2f}", f"{self.pool_bytes / 1e9:.2f}", str(self.context_tokens)
        return self.model, self.dtype, f"{self.seconds:.1f}", *sizes


class DecodeStep(EngineFigure, frozen=True, kw_only=True):
    """A decode step of `batch` rows with about `context` tokens each."""

    title = "Decode steps"
    heads = ("model", "context", "batch", "ms", "device, ms", "launch, ms", "idle", "GB/s", "of the copy")
    model: str
    batch: int
    context: int
    step_ms: Spread
    """From the end of one step to the end of the next, two in flight."""
    launch_ms: Spread
    """Until the host has given the step to the device."""
    device_ms: Spread | None
    """The time of the device alone; None on CPU."""
    read_bytes: int
    """Weights and KV."""

    def memory_share(self, ceilings: Ceilings | None) -> float | None:
        """The part of a step's time that reading its bytes at the speed of a copy takes."""
        if ceilings is None:
            return None
        return self.read_bytes / (ceilings.copy_gb_per_s.median * 1e9) / (self.step_ms.median / 1e3)

    @property
    def gap_share(self) -> float | None:
        """The part of a step's time in which the device has nothing to do."""
        if self.device_ms is None:
            return None
        return max(0.0, 1 - self.device_ms.median / self.step_ms.median)

    def cells(self, ceilings: Ceilings | None) -> tuple[str, ...]:
        which = self.model, str(self.context), str(self.batch)
        device = MISSING if self.device_ms is None else f"{self.device_ms.median:.2f}"
        speed = f"{self.read_bytes / self.step_ms.median / 1e6:.0f}"
        shares = _percent(self.gap_share, 0), speed, _percent(self.memory_share(ceilings), 1)
        return (*which, self.step_ms.text(".2f"), device, f"{self.launch_ms.median:.2f}", *shares)


class Prefill(EngineFigure, frozen=True, kw_only=True):
    """A prompt, chunk after chunk."""

    title = "Prefill"
    heads = ("model", "tokens", "chunk", "ms", "tokens/s", "TFLOP/s", "of the product")
    model: str
    tokens: int
    chunk_tokens: int
    seconds: Spread
    flop: float
    """The operations of all products of matrices, attention's included."""

    def matmul_share(self, ceilings: Ceilings | None) -> float | None:
        return None if ceilings is None else self.flop / self.seconds.median / (ceilings.matmul_tflop_per_s.median * 1e12)

    def cells(self, ceilings: Ceilings | None) -> tuple[str, ...]:
        speeds = f"{self.tokens / self.seconds.median:.0f}", f"{self.flop / self.seconds.median / 1e12:.3g}"
        which = self.model, str(self.tokens), str(self.chunk_tokens), self.seconds.text(".1f", scale=1e3)
        return (*which, *speeds, _percent(self.matmul_share(ceilings), 1))


class Floor(EngineFigure, frozen=True, kw_only=True):
    """A step and its floor."""

    title = "Steps on CPU and their floor, ms: medians of the rounds (goal: at most 1.15)"
    heads = ("model", "step", "rows", "context", "step", "products alone", "attention at the memory's speed", "ratio")
    model: str
    step: str
    """"decode", or "prefill" of one row whose prompt is `context` tokens."""
    rows: int
    context: int
    step_ms: Spread
    products_ms: Spread
    """Its products of matrices alone, SwiGLU included, which is a part of one."""
    attention_ms: Spread
    """Its KV read once at the speed of the memory; in prefill at least its operations at the speed of the products."""
    ratio: Spread
    """The step to its floor in each round, in which they took turns: the memory of a host that others use too may be twice as
    fast in one second as in the next."""

    def cells(self, ceilings: Ceilings | None) -> tuple[str, ...]:
        parts = (f"{part.median:.2f}" for part in (self.step_ms, self.products_ms, self.attention_ms))
        return self.model, self.step, str(self.rows), str(self.context), *parts, self.ratio.text(".2f")


class HostWork(EngineFigure, frozen=True, kw_only=True):
    """The executor's part of the host's work for a decode step: `StepRunner.launch` with a model that computes nothing."""

    title = "Host work of the executor, ms"
    heads = ("device", "rows", "graphs", "launch", "attention")
    device: str
    rows: int
    graphs: bool
    attention: str
    launch_ms: Spread

    def cells(self, ceilings: Ceilings | None) -> tuple[str, ...]:
        attention = self.attention.split(",")[0].removeprefix("attention: ")
        return self.device, str(self.rows), "on" if self.graphs else "off", self.launch_ms.text(".3f"), attention


class SampledStep(EngineFigure, frozen=True, kw_only=True):
    """A decode step in which each row asks for the same, greedily where nothing else is said."""

    title = "What sampling parameters cost"
    heads = ("model", "vocabulary", "rows", "asked", "ms", "to a plain step")
    model: str
    vocab_size: int
    rows: int
    asked: str
    step_ms: Spread
    ratio: float
    """The step to one of the same run in which no row asks for anything."""

    def cells(self, ceilings: Ceilings | None) -> tuple[str, ...]:
        return self.model, str(self.vocab_size), str(self.rows), self.asked, self.step_ms.text(".2f"), f"{self.ratio:.2f}"


Figure: TypeAlias = Ceilings | Started | DecodeStep | Prefill | Floor | HostWork | SampledStep
TABLES: tuple[type[EngineFigure], ...] = (Started, HostWork, SampledStep, Floor, Prefill, DecodeStep)
"""What matters most comes last, because the end of an output is what one sees."""
TitledTable: TypeAlias = tuple[str, list[tuple[str, ...]]]
F = TypeVar("F")


class TaskRun(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a task."""

    label: str
    seconds: float
    failure: str = ""
    """Why it did not come to its end; empty if it did."""


def _of(kind: type[F], figures: Sequence[Figure]) -> list[F]:
    return [figure for figure in figures if isinstance(figure, kind)]


def ceilings_of(figures: Sequence[Figure]) -> Ceilings | None:
    return next(iter(_of(Ceilings, figures)), None)


def _percent(share: float | None, digits: int) -> str:
    return MISSING if share is None else f"{share:.{digits}%}"


def judge(figures: Sequence[Figure]) -> Iterator[Goal]:
    """They are goals of one Hopper card."""
    ceilings = ceilings_of(figures)
    steps = [step for step in _of(DecodeStep, figures) if (step.model, step.batch, step.context) == GOAL_STEP]
    fills = [fill for fill in _of(Prefill, figures) if (fill.model, fill.tokens) == GOAL_PREFILL]
    for rule, least, shares in (
        (STEP_RULE, LEAST_MEMORY_SHARE, [step.memory_share(ceilings) for step in steps]),
        (PREFILL_RULE, LEAST_MATMUL_SHARE, [fill.matmul_share(ceilings) for fill in fills]),
    ):
        yield Goal.of(rule, max((share for share in shares if share is not None), default=None), ".1%", least=least)
    host = max((work.launch_ms.median for work in _of(HostWork, figures) if work.rows == GOAL_ROWS), default=None)
    rule = f"the executor's host work for {GOAL_ROWS} decode rows below {MOST_HOST_MS} ms (the scheduler adds its own)"
    yield Goal.of(rule, host, ".3f", most=MOST_HOST_MS, unit=" ms")


def tables(figures: Sequence[Figure]) -> Iterator[TitledTable]:
    """Those that have figures, each with its title and its heads."""
    ceilings = ceilings_of(figures)
    for kind in TABLES:
        found = _of(kind, figures)
        if found:
            yield kind.title, [kind.heads, *(figure.cells(ceilings) for figure in found)]


# --- running -----------------------------------------------------------------------------------------------------------------


def run(invocation: Invocation) -> int:
    """Returns the exit status: 1 if a task failed, else 0, goals met or not."""
    bench, engine = invocation.config(EngineBench, QUICK), invocation.config(EngineConfig, QUICK_ENGINE)
    child.prepare(engine.threads)
    on_cuda = engine.device.startswith("cuda") or (engine.device == "auto" and bool(invocation.hardware.gpus))
    began = time.monotonic()
    figures: list[Figure] = []
    ran = [run_task(task, began + bench.budget_s, figures) for task in tasks(bench, engine, invocation.is_quick, on_cuda)]
    seconds, ceilings = time.monotonic() - began, ceilings_of(figures)
    settings = f"device {engine.device}, {seconds:.0f} s in all"
    if ceilings is not None:
        copy, product = ceilings.copy_gb_per_s.text(".0f"), ceilings.matmul_tflop_per_s.text(".3g")
        settings += f"; a copy on {ceilings.device} moves {copy} GB/s, a product of {ceilings.matmul} makes {product} TFLOP/s"
    runs = [(run.label, f"{run.seconds:.1f}", run.failure or MISSING) for run in ran]
    found: list[TitledTable] = [("What ran", [("task", "s", "not measured because"), *runs]), *tables(figures)]
    body: list[str] = []
    for title, table in found:
        body += invocation.style.section(title, table)
    invocation.publish(settings, STEADY, body, judge(figures), seconds=seconds, runs=ran, figures=figures)
    return 1 if any(run.failure for run in ran) else 0


def run_task(task: EngineTask, until: float, figures: list[Figure]) -> TaskRun:
    """Do a task; figures: gets what it finds. until: on the monotonic clock."""
    began = time.monotonic()
    left_s = min(task.limit_s, until - began)
    if left_s < LEAST_S:
        return TaskRun(label=task.label, seconds=0.0, failure="no time was left (--budget-s)")
    say(task.label)
    failure = ""
    try:
        for figure in figures_of(task, began + left_s):
            figures.append(figure)
    except TaskFailed as error:
        failure = str(error)
        say(f"{task.label} failed: {failure}")
    return TaskRun(label=task.label, seconds=time.monotonic() - began, failure=failure)


class TaskFailed(TandemError):
    """A task did not come to its end."""


def figures_of(task: EngineTask, until: float) -> Iterator[Figure]:
    """The figures of a task as its process finds them. until: on the monotonic clock. Raises TaskFailed."""
    ours, theirs = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=work, args=(task, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        while True:
            if not ours.poll(until - time.monotonic()):
                raise TaskFailed("it took too long and was stopped")
            found = ours.recv()
            if found is None:
                return
            if isinstance(found, str):
                raise TaskFailed(found)
            yield found
    except EOFError as error:
        process.join()
        raise TaskFailed(f"its process ended with exit status {process.exitcode}") from error
    finally:
        process.kill()
        process.join()


def work(task: EngineTask, parent: Connection) -> None:
    """A process that does a task: it sends each figure as soon as it has it, and at the end nothing, or why it failed."""
    from benchmarks.engine_steps import ACTS  # takes seconds, and the parent needs nothing of it

    try:
        for figure in ACTS[task.section](task, lambda text: say(f"  {task.label}: {text}")):
            parent.send(figure)
        parent.send(None)
    except (LookupError, OSError, RuntimeError, TandemError, ValueError) as error:
        traceback.print_exc()
        # CUDA's errors end in general advice: the reason is their first line.
        parent.send(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def main(arguments: Sequence[str] | None = None) -> int:
    explanation = "Build and time the engine on one device: decode steps, prefill, memory."
    return start("engine", explanation, run, EngineBench, EngineConfig, without=OF_TIMED, arguments=arguments)


if __name__ == "__main__":
    from benchmarks import engine  # what a child sends is of this module, and not of `__main__`

    sys.exit(engine.main())
