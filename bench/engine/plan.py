"""What `launch bench engine` measures: its flags, the shapes of the models, and the tasks in their order.

Owns names, defaults and limits. Imports nothing heavy, measures nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

from common.config import DEMO_MODEL, Dtype, EngineConfig
from common.options import option, parse_numbers, require, require_above_0, require_at_least
from common.processes.lines import JsonLine

Section = Literal["ceilings", "build", "host", "sampling", "checks", "steps", "floor", "offline", "ring", "push", "exposed"]
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
GOAL_MODEL, GOAL_BATCH, GOAL_CONTEXT = "Llama-3-8B", 32, 2048
SAMPLING_ROWS = 64
_LONGEST_SEQUENCE_PARTS = 2
"""A sequence of the offline section has at most so many times the longest prompt: the prompt, and an answer as long."""


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
    offline_models: str = option("Qwen3-0.6B", "offline: shapes, as --models")
    sequences: int = option(256, "offline: how many sequences")
    sequence_tokens: str = option("100,1024", "offline: fewest and most tokens of a prompt, and of an answer")
    rounds: int = option(20, "decode steps timed for each batch and context; fewer repeats elsewhere")
    only: str = option(
        "",
        f"sections, with commas between them, of {', '.join(SECTIONS)}; default: all; "
        "with --quick on CPU, no exposed and one ring of two",
    )
    budget_s: float = option(540.0, "seconds for everything; what does not fit is reported as not measured")
    json: str = option("", "write every figure to this file")

    def __post_init__(self) -> None:
        for flag, names in (("models", self.shapes), ("offline-models", self.offline_shapes)):
            require(len(names) > 0 and set(names) <= SHAPES.keys(), flag, f"of {', '.join(SHAPES)}", ", ".join(names))
        require(set(_parts(self.only)) <= set(SECTIONS), "only", f"of {', '.join(SECTIONS)}", self.only)
        for flag, numbers in (
            ("batches", self.batch_sizes),
            ("contexts", self.context_lengths),
            ("prompt-chunks", self.chunk_lengths),
            ("sequence-tokens", self.sequence_range),
        ):
            require(min(numbers) >= 1, flag, "at least 1 each", min(numbers))
        require(len(self.sequence_range) == 2, "sequence-tokens", "two numbers with a comma between them", self.sequence_tokens)
        require_at_least(self, prompt_tokens=1, sequences=1, rounds=2)
        require_above_0(self, "budget_s")

    @property
    def shapes(self) -> tuple[str, ...]:
        return _parts(self.models)

    @property
    def offline_shapes(self) -> tuple[str, ...]:
        return _parts(self.offline_models)

    @property
    def sections(self) -> tuple[Section, ...]:
        """In their order. The ceilings are always among them: other figures are shares of them."""
        asked = _parts(self.only) or SECTIONS
        return tuple(name for name in SECTIONS if name in asked or name == "ceilings")

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """In the order given, each once."""
        return tuple(dict.fromkeys(parse_numbers(self.batches, "batches", int)))

    @property
    def context_lengths(self) -> tuple[int, ...]:
        """In the order given, each once."""
        return tuple(dict.fromkeys(parse_numbers(self.contexts, "contexts", int)))

    @property
    def chunk_lengths(self) -> tuple[int, ...]:
        """No longer than the prompt, each once."""
        return tuple(
            sorted({min(self.prompt_tokens, chunk) for chunk in parse_numbers(self.prompt_chunks, "prompt-chunks", int)})
        )

    @property
    def sequence_range(self) -> tuple[int, ...]:
        return parse_numbers(self.sequence_tokens, "sequence-tokens", int)


Steps = TypeVar("Steps", bound="MeasureSteps")
QUICK: dict[str, Any] = {
    "models": "tiny", "batches": "1,4", "contexts": "32,96", "prompt_tokens": 96, "prompt_chunks": "32,96", "sequences": 6,
    "sequence_tokens": "5,24", "rounds": 3, "offline_models": "tiny",
}  # fmt: skip
QUICK_ENGINE: dict[str, Any] = {"max_running": 4, "chunk_tokens": 32, "page_size": 8, "kv_memory": "4MiB"}
"""What `--quick` measures."""


class Task(JsonLine, frozen=True, kw_only=True):
    """Something to measure or to check, in a process of this bench.

    limit_s: after this time it is stopped; what it has reported by then is kept. is_alone: it gets a process of its own, and so a
    device on which nothing else of this bench has memory.
    """

    limit_s: ClassVar[float] = 60.0
    is_alone: ClassVar[bool] = False
    engine: EngineConfig
    is_quick: bool

    @property
    def label(self) -> str:
        raise NotImplementedError


class MeasureCeilings(Task, frozen=True, kw_only=True):
    """What the device can do: bytes copied, and products of matrices."""

    label = "ceilings"


class MeasureHost(Task, frozen=True, kw_only=True):
    """The host's work for a decode step, with a model that computes nothing."""

    label = "host"
    rounds: int


class MeasureSampling(Task, frozen=True, kw_only=True):
    """What sampling parameters cost in a decode step. vocab_size: of a shape's; the demo model has its own."""

    limit_s = 150.0
    is_alone = True
    model: str
    vocab_size: int
    rows: int
    rounds: int

    @property
    def label(self) -> str:
        return f"sampling {self.model}, vocabulary of {self.vocab_size or 'its own'}"


class Build(Task, frozen=True, kw_only=True):
    """Compile the kernels that a model needs, so that no measurement waits for a compiler."""

    limit_s = 240.0
    is_alone = True
    model: str

    @property
    def label(self) -> str:
        return f"build {self.model}" + (", FP8 pages" if self.engine.kv_dtype == "fp8_e4m3" else "")


class CheckOperations(Task, frozen=True, kw_only=True):
    """Triton's kernels and FlashInfer against plain torch."""

    limit_s = 90.0
    label = "check operations"


class CheckAnswers(Task, frozen=True, kw_only=True):
    """Tokens with and without graphs, and with FP8."""

    limit_s = 120.0
    is_alone = True
    label = "check answers"


class CheckRing(Task, frozen=True, kw_only=True):
    """Tokens of a prefill and a decode instance on one device, against those of one instance that does both."""

    limit_s = 100.0
    is_alone = True
    dtype: Dtype

    @property
    def label(self) -> str:
        return f"ring {self.dtype}"


class MeasureSteps(Task, frozen=True, kw_only=True):
    """Start-up, decode steps and prefill of a model."""

    limit_s = 100.0
    is_alone = True
    model: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompt_tokens: int
    chunks: tuple[int, ...]
    rounds: int

    @property
    def label(self) -> str:
        return f"steps {self.model}"


class MeasureFloor(MeasureSteps, frozen=True, kw_only=True):
    """Steps beside their floor, taking turns. A chunk is a whole prompt."""

    limit_s = 300.0

    @property
    def label(self) -> str:
        return f"floor {self.model}"


class MeasureOffline(Task, frozen=True, kw_only=True):
    """Many sequences at once through an executor. fewest, most: tokens of a prompt and of an answer. steps_in_flight: one run
    for each."""

    limit_s = 100.0
    is_alone = True
    model: str
    sequences: int
    fewest: int
    most: int
    steps_in_flight: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"offline {self.model}" + (", graphs off" if self.engine.graphs == "off" else "")


class MeasurePush(Task, frozen=True, kw_only=True):
    """`python -m benchmarks.transfer` on the device."""

    is_alone = True
    label = "push"


class MeasureExposed(Task, frozen=True, kw_only=True):
    """`python -m benchmarks.overlap` on the device."""

    limit_s = 150.0
    is_alone = True
    label = "exposed"


AnyTask: TypeAlias = (
    MeasureCeilings
    | MeasureHost
    | MeasureSampling
    | Build
    | CheckOperations
    | CheckAnswers
    | CheckRing
    | MeasureSteps
    | MeasureFloor
    | MeasureOffline
    | MeasurePush
    | MeasureExposed
)


def tasks(bench: EngineBench, engine: EngineConfig, is_quick: bool, on_cuda: bool) -> Iterator[AnyTask]:
    """In their order: what matters most comes first, because the time may not be enough for all. on_cuda: there are graphs, and
    kernels to compile."""
    for section in bench.sections:
        yield from _tasks_of(section, bench, engine, is_quick, on_cuda)


def _tasks_of(section: Section, bench: EngineBench, engine: EngineConfig, is_quick: bool, on_cuda: bool) -> Iterator[AnyTask]:
    is_short = is_quick and not on_cuda and not bench.only  # most of its time would go into starting fleets
    match section:
        case "ceilings":
            yield MeasureCeilings(engine=engine, is_quick=is_quick)
        case "host":
            yield MeasureHost(engine=engine, is_quick=is_quick, rounds=min(10 * bench.rounds, 500))
        case "sampling":
            cases = [("tiny", 512)] if is_quick else [(DEMO_MODEL, 0), ("tiny", 32_000), ("tiny", 151_936)]
            rows = 4 if is_quick else SAMPLING_ROWS
            yield from (
                MeasureSampling(engine=engine, is_quick=is_quick, model=name, vocab_size=size, rows=rows, rounds=bench.rounds)
                for name, size in cases
            )
        case "build":
            if on_cuda:
                fp8 = replace(engine, kv_dtype="fp8_e4m3")
                yield from (Build(engine=engine, is_quick=is_quick, model=name) for name in (DEMO_MODEL, *bench.shapes))
                yield from (Build(engine=fp8, is_quick=is_quick, model=name) for name in (DEMO_MODEL, bench.shapes[0]))
        case "checks":
            yield CheckOperations(engine=engine, is_quick=is_quick)
            yield CheckAnswers(engine=engine, is_quick=is_quick)
        case "steps":
            yield from (_steps(MeasureSteps, bench, engine, is_quick, name) for name in bench.shapes)
        case "floor":
            if not on_cuda:
                yield from (_steps(MeasureFloor, bench, engine, is_quick, name) for name in bench.shapes)
        case "offline":
            yield from (task for name in bench.offline_shapes for task in _offline(bench, engine, is_quick, on_cuda, name))
        case "ring":
            yield CheckRing(engine=engine, is_quick=is_quick, dtype="float32")
            if not is_short:
                yield CheckRing(engine=engine, is_quick=is_quick, dtype="bfloat16")
        case "push":
            yield MeasurePush(engine=engine, is_quick=is_quick)
        case "exposed":
            if not is_short:
                yield MeasureExposed(engine=engine, is_quick=is_quick)


def _steps(kind: type[Steps], bench: EngineBench, engine: EngineConfig, is_quick: bool, model: str) -> Steps:
    """With room for the longest context and for the longest chunk."""
    chunks, longest = bench.chunk_lengths, max(*bench.context_lengths, bench.prompt_tokens)
    room = replace(
        engine,
        chunk_tokens=max(*chunks, engine.chunk_tokens),
        context_tokens=longest,
        max_running=max(*bench.batch_sizes, engine.max_running),
    )
    return kind(
        engine=room,
        is_quick=is_quick,
        model=model,
        batches=bench.batch_sizes,
        contexts=bench.context_lengths,
        prompt_tokens=bench.prompt_tokens,
        chunks=chunks,
        rounds=bench.rounds,
    )


def _offline(bench: EngineBench, engine: EngineConfig, is_quick: bool, on_cuda: bool, model: str) -> Iterator[MeasureOffline]:
    """With two steps in flight, as served, and with one; without graphs, where there are graphs."""
    fewest, most = bench.sequence_range
    served = replace(engine, context_tokens=_LONGEST_SEQUENCE_PARTS * most)
    for config, in_flight in ((served, (2, 1)), (replace(served, graphs="off"), (2,))):
        if config is served or on_cuda:
            yield MeasureOffline(
                engine=config,
                is_quick=is_quick,
                model=model,
                sequences=bench.sequences,
                fewest=fewest,
                most=most,
                steps_in_flight=in_flight,
            )


def _parts(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
