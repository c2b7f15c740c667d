"""The engines that are compared: what each needs, and how it is started so that all have the same threads, rows and KV memory.

Owns the table, and the flags and variables of each peer. Starts nothing and installs nothing.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.cpu_peers.environments import LLAMA, OPENVINO, TRANSFORMERS, VLLM, Environment, Recipe
from bench.cpu_peers.models import DRIVERS, checkpoint, gguf_model, openvino_model
from bench.cpu_peers.plan import PAGE, Shape
from bench.offline import OfflineSequence

SERVED_NAME = "model"
Precision = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True, kw_only=True)
class Room:
    """What every engine gets: threads, rows of a batch, and KV memory for all requests at once. context_tokens: of the longest
    request, prompt and answer together. workload: mean tokens of a prompt and of an answer, by which `launch local` shares out
    cores."""

    threads: int
    rows: int
    context_tokens: int
    kv_tokens: int
    kv_bytes: int
    workload: str

    @classmethod
    def for_requests(cls, asked: Sequence[OfflineSequence], shape: Shape, threads: int) -> "Room":
        """With a page to spare for each request."""
        lengths = [PAGE * math.ceil((len(each.prompt) + each.answer_tokens) / PAGE) + PAGE for each in asked]
        tokens = sum(lengths)
        return cls(
            threads=threads,
            rows=len(asked),
            context_tokens=max(lengths),
            kv_tokens=tokens,
            kv_bytes=tokens * shape.kv_token_bytes,
            workload=f"{sum(len(each.prompt) for each in asked) // len(asked)},"
            f"{sum(each.answer_tokens for each in asked) // len(asked)}",
        )

    @property
    def kv_gib(self) -> int:
        """For engines that take only whole GiB."""
        return math.ceil(self.kv_bytes / 2**30)


@dataclass(frozen=True, kw_only=True)
class Start:
    """A command line and the variables that it needs. port: where it will serve OpenAI's API; None where it is a driver."""

    command: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    port: int | None = None


@dataclass(frozen=True, kw_only=True)
class Peer:
    """An engine of others. model: makes its form of the model. start: of its environment, the model, the room and a free port."""

    name: str
    title: str
    precision: Precision
    recipe: Recipe
    model: Callable[[Shape, Path], Path]
    start: Callable[[Environment, Path, Room, int], Start]


@dataclass(frozen=True, kw_only=True)
class Tandem:
    """`launch local`, colocated or with separate prefill and decode. flags: beyond those of every layout."""

    name: str
    title: str
    precision: Precision
    separate: bool = False
    flags: tuple[str, ...] = ()

    def command(self, model: Path, room: Room) -> tuple[str, ...]:
        """The flags of `launch local`. A prefill instance holds a prompt until it is taken over: it has the same room."""
        cores = ("--workload", room.workload) if self.separate else ("--threads", str(room.threads))
        return (
            *("--prefill", "1" if self.separate else "0", "--decode", "1", *cores, "--model", str(model)),
            *("--max-running", str(room.rows), "--kv-memory", str(room.kv_bytes), "--prefix-cache", "off"),
            *("--served-name", SERVED_NAME, "--log-level", "warning", *self.flags),
        )


OFFLINE = {"HF_HUB_OFFLINE": "1"}


def _openmp(room: Room) -> dict[str, str]:
    return OFFLINE | {"OMP_NUM_THREADS": str(room.threads), "MKL_NUM_THREADS": str(room.threads)}


def _openvino(**properties: Any) -> Callable[[Environment, Path, Room, int], Start]:
    def start(environment: Environment, model: Path, room: Room, port: int) -> Start:
        settings = {
            "rows": room.rows,
            "kv_gib": room.kv_gib,
            "properties": {"INFERENCE_NUM_THREADS": room.threads, **properties},
        }
        driver = str(DRIVERS / "openvino_driver.py")
        return Start(command=(environment.python, "-E", driver, str(model), json.dumps(settings)), variables=_openmp(room))

    return start


def _vllm(environment: Environment, model: Path, room: Room, port: int) -> Start:
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: room.threads])
    return Start(
        command=(
            *(environment.python, "-E", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", str(room.context_tokens), "--max-num-seqs", str(room.rows)),
            *("--no-enable-prefix-caching", "--served-model-name", SERVED_NAME),
        ),
        # It binds a thread to each of the cores, and warns of OMP_NUM_THREADS: other threads would then compete with these.
        variables={
            **OFFLINE,
            "VLLM_CPU_KVCACHE_SPACE": str(room.kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_NO_USAGE_STATS": "1",
        },
        port=port,
    )


def _llama(environment: Environment, model: Path, room: Room, port: int) -> Start:
    """Without repacked weights: among the code for these is that for AMX, which ends this version with SIGILL or SIGSEGV on a
    Sapphire Rapids host (`ldtilecfg` in `ggml_backend_amx_mul_mat`). It has none for float32."""
    threads = str(room.threads)
    return Start(
        command=(
            *(environment.python, "-E", environment.program("llama-cpp-server"), "-m", str(model)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--", "-t", threads, "-tb", threads, "-c", str(room.kv_tokens), "--parallel", str(room.rows), "--kv-unified"),
            *("--cache-ram", "0", "--no-context-shift", "--no-repack", "--alias", SERVED_NAME),
        ),
        variables=_openmp(room),
        port=port,
    )


def _transformers(mode: str) -> Callable[[Environment, Path, Room, int], Start]:
    def start(environment: Environment, model: Path, room: Room, port: int) -> Start:
        driver = str(DRIVERS / "transformers_driver.py")
        return Start(
            command=(environment.python, "-E", driver, str(model), mode, str(room.threads), str(room.kv_tokens)),
            variables=_openmp(room),
        )

    return start


ENGINES: dict[str, Tandem | Peer] = {
    engine.name: engine
    for engine in (
        Tandem(name="tandem", title="**Tandem** colocated", precision="float32"),
        Tandem(name="tandem-1p1d", title="**Tandem** 1 prefill + 1 decode", precision="float32", separate=True),
        Tandem(name="tandem-int8", title="**Tandem** colocated", precision="int8", flags=("--quantization", "int8")),
        Tandem(
            name="tandem-int8-1p1d",
            title="**Tandem** 1 prefill + 1 decode",
            precision="int8",
            separate=True,
            flags=("--quantization", "int8"),
        ),
        Tandem(name="tandem-bf16", title="**Tandem** colocated", precision="bfloat16", flags=("--dtype", "bfloat16")),
        Peer(
            name="openvino",
            title="OpenVINO GenAI",
            precision="float32",
            recipe=OPENVINO,
            model=lambda shape, cache: openvino_model(shape, cache, "fp32"),
            # Without these it computes in bfloat16 where the processor can, and keeps KV in 8 bits.
            start=_openvino(INFERENCE_PRECISION_HINT="f32", KV_CACHE_PRECISION="f32"),
        ),
        Peer(
            name="openvino-bf16",
            title="OpenVINO GenAI",
            precision="bfloat16",
            recipe=OPENVINO,
            model=lambda shape, cache: openvino_model(shape, cache, "fp32"),
            start=_openvino(INFERENCE_PRECISION_HINT="bf16", KV_CACHE_PRECISION="bf16"),
        ),
        Peer(
            name="openvino-int8",
            title="OpenVINO GenAI",
            precision="int8",
            recipe=OPENVINO,
            model=lambda shape, cache: openvino_model(shape, cache, "int8"),
            start=_openvino(),
        ),
        Peer(
            name="vllm",
            title="vLLM CPU",
            precision="float32",
            recipe=VLLM,
            model=checkpoint,
            start=_vllm,
        ),
        Peer(
            name="llama.cpp",
            title="llama.cpp",
            precision="float32",
            recipe=LLAMA,
            model=lambda shape, cache: gguf_model(shape, cache, "f32"),
            start=_llama,
        ),
        Peer(
            name="llama.cpp-q8_0",
            title="llama.cpp q8_0",
            precision="int8",
            recipe=LLAMA,
            model=lambda shape, cache: gguf_model(shape, cache, "q8_0"),
            start=_llama,
        ),
        Peer(
            name="transformers",
            title="transformers generate",
            precision="float32",
            recipe=TRANSFORMERS,
            model=checkpoint,
            start=_transformers("generate"),
        ),
        Peer(
            name="transformers-cb",
            title="transformers continuous batching",
            precision="float32",
            recipe=TRANSFORMERS,
            model=checkpoint,
            start=_transformers("continuous"),
        ),
    )
}
