"""The first hour on a card as one command, `launch bench engine`: the engine on one device, built, checked and timed in processes
of its own, beside what was predicted for it without a card.

Owns the shapes, the flags, the tasks in their order and the report. A task that fails or takes too long is
reported in its place, with what it had found by then, and the next goes on. Uses no device: tasks are done by
`benchmarks/engine_tasks.py` and `benchmarks/pushes.py`.
"""

import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal, get_args

import msgspec

from bench.report import ReportStyle, say, table_of
from benchmarks.command import Invocation, start
from benchmarks.engine_figures import (
    MISSING,
    OFFLINE_MODEL,
    PREDICTIONS,
    Ceilings,
    Comparison,
    Figure,
    Predictions,
    TaskRun,
    TitledTable,
    ceilings_of,
    compare,
    first_looks,
    judge,
    tables,
)
from common.config import EngineConfig
from common.errors import TandemError
from common.options import option, parse_numbers, require, require_above_0, require_at_least
from launch import child

Section = Literal["environment", "ceilings", "checks", "steps", "eager", "offline", "pushes"]
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
    "Llama-3-70B": _COMMON | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rope_theta": 5e5,
        "max_position_embeddings": 8192, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    },
    "Qwen3-30B-A3B": _COMMON | _QWEN3 | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "tiny": _COMMON | _QWEN3 | {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""config.json of each model, as far as its speed depends on it. tiny: to show that everything works."""
LEAST_S = 5.0
"""A task is not begun with less time than this."""
STEADY = "Shares are of what the device did in the same run."
OF_TIMED = ("executor", "step_cost")
"""Fields of the engine that are no flags here: what is measured computes."""
SPAWN = multiprocessing.get_context("spawn")
FORKED = multiprocessing.get_context("forkserver")
"""Tasks are forked from a process that has imported what they need, and has used no device."""
FORKED.set_forkserver_preload(["benchmarks.engine_tasks", "tests.engine.exact", "tests.engine.checkpoints"])


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
    page: str = option("", "write the report to this file too, in Markdown")

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
    is_quick: bool = False
    ceilings: Ceilings | None = None
    """Those of this run, once they are known."""


def tasks(bench: EngineBench, engine: EngineConfig, is_quick: bool) -> Iterator[EngineTask]:
    """In their order: what matters most comes first, because the time may not be enough for all."""
    room = replace(
        engine,
        chunk_tokens=max(*bench.chunk_lengths, engine.chunk_tokens),
        context_tokens=max(*bench.context_lengths, bench.prompt_tokens),
        max_running=max(*bench.batch_sizes, engine.max_running),
    )
    for section in bench.sections:
        make = partial(EngineTask, section=section, bench=bench, engine=engine, is_quick=is_quick)
        match section:
            case "environment" | "ceilings":
                yield make(label=section, limit_s=60.0)
            case "checks" | "pushes":
                yield make(label=section, limit_s=90.0)
            case "offline":
                served = replace(room, max_running=engine.max_running if is_quick else 256)
                yield make(label=section, limit_s=120.0, engine=served, model="tiny" if is_quick else OFFLINE_MODEL)
            case "steps" | "eager":
                served = replace(room, graphs="off") if section == "eager" else room
                for name in bench.shapes:
                    yield make(label=f"{section} {name}", limit_s=240.0, engine=served, model=name)


# --- running -----------------------------------------------------------------------------------------------------------------


def run(invocation: Invocation) -> int:
    """Returns the exit status: 1 if a task failed, else 0, goals met or not."""
    bench, engine = invocation.config(EngineBench, QUICK), invocation.config(EngineConfig, QUICK_ENGINE)
    child.prepare(engine.threads)
    began = time.monotonic()
    figures: list[Figure] = []
    ran = [
        run_task(replace(task, ceilings=ceilings_of(figures)), began + bench.budget_s, figures)
        for task in tasks(bench, engine, invocation.is_quick)
    ]
    seconds, ceilings = time.monotonic() - began, ceilings_of(figures)
    settings = f"device {engine.device}, {seconds:.0f} s in all"
    if ceilings is not None:
        copy, product = ceilings.copy_gb_per_s.text(".0f"), ceilings.matmul_tflop_per_s.text(".3g")
        settings += f"; a copy on {ceilings.device} moves {copy} GB/s, a product of {ceilings.matmul} makes {product} TFLOP/s"
    runs = [(run.label, f"{run.seconds:.1f}", run.failure or MISSING) for run in ran]
    predictions = msgspec.json.decode(PREDICTIONS.read_bytes(), type=Predictions)
    cards = predictions.steps[0].share
    found_card = next((card for card in cards for gpu in invocation.hardware.gpus if re.search(rf"\b{card}\b", gpu)), "")
    card = found_card or (next(iter(cards)) if invocation.is_quick else "")  # a rehearsal shows how they are compared
    compared = list(compare(figures, predictions, card, engine.quantization)) if card else []
    fine = "nothing: what was predicted is so" if card else "nothing was predicted for this machine"
    looks = list(first_looks(figures, ran, compared)) or [fine]
    found: list[TitledTable] = [("What ran", [("task", "s", "not measured because"), *runs]), *tables(figures)]
    if card:
        found.append((f"Predicted for one {card} and measured, ms", table_of(Comparison, compared)))
    found.append(("What to look at first", [("",), *((look,) for look in looks)]))

    def body(style: ReportStyle) -> list[str]:
        return [part for title, table in found for part in style.section(title, table)]

    invocation.publish(
        *(settings, STEADY, body(invocation.style), list(judge(figures))),
        page=(bench.page, body(ReportStyle(True))),
        seconds=seconds, runs=ran, figures=figures, card=found_card, compared=compared, looks=looks,
    )  # fmt: skip
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
    ours, theirs = FORKED.Pipe(duplex=False)
    process = FORKED.Process(target=work, args=(task, theirs), daemon=True)
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
        assert process.pid is not None
        with suppress(ProcessLookupError):  # with what it has started, which would run beside the next task
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def work(task: EngineTask, parent: Connection) -> None:
    """A process that does a task: it sends each figure as soon as it has it, and at the end nothing, or why it failed."""
    os.setsid()
    from benchmarks.engine_tasks import ACTS  # takes seconds, and the parent needs nothing of it

    try:
        for figure in ACTS[task.section](task, lambda text: say(f"  {task.label}: {text}")):
            parent.send(figure)
        parent.send(None)
    except (LookupError, OSError, RuntimeError, TandemError, ValueError) as error:
        traceback.print_exc()
        # CUDA's errors end in general advice: the reason is their first line.
        parent.send(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def main(arguments: Sequence[str] | None = None) -> int:
    explanation = "Build, check and time the engine on one device, beside what was predicted for it."
    return start("engine", explanation, run, EngineBench, EngineConfig, without=OF_TIMED, arguments=arguments)


if __name__ == "__main__":
    from benchmarks import engine  # what a child sends is of this module, and not of `__main__`

    sys.exit(engine.main())
