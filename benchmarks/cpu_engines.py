"""The engines of `benchmarks/cpu_peers.py`: the models that they read, how each is started, and how it is asked.

Owns the cache of models, and the command lines, which give all engines the same threads, rows and KV memory. What OpenVINO does
in its environment is `benchmarks/openvino_driver.py`. Measures nothing.
"""

import asyncio
import contextlib
import json
import math
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import uvloop

from bench.client import COUNTED_STREAM, HttpClient, TimedAnswer, completion_of_ids
from bench.offline import OfflineSequence
from bench.report import say
from benchmarks.engine import SHAPES
from common.addresses import LOOPBACK, free_port
from common.errors import TandemError
from common.processes.child import ChildEnded, Respondent, stop_children
from common.processes.local_fleet import local_fleet

START_S, STOP_S, LOOK_S = 600.0, 20.0, 0.2
CONVERT_S = 3600.0
SERVED_NAME = "model"
MODELS = {"0.6b": "Qwen3-0.6B", "30m": "Qwen3-30M"}
"""The shapes that --shape takes."""
PAGE = 32
"""Room in the KV memory of every engine is counted in so many tokens, which is a multiple of all their pages."""
CONTEXT_TOKENS = 4096
END_TOKEN = "<|endoftext|>"
DRIVER = Path(__file__).with_name("openvino_driver.py")
OFFLINE = {"HF_HUB_OFFLINE": "1"}
Precision = Literal["float32", "bfloat16", "int8"]
Ask: TypeAlias = Callable[[Sequence[OfflineSequence]], list[TimedAnswer]]
"""Sends all requests at once and waits for all answers, greedy and of the lengths asked for. In all ways, a token's time is when
this process learns of it."""


class PeerFailed(TandemError):
    """An engine was not installed, converted or started, or did not answer as it should."""


# --- models ------------------------------------------------------------------------------------------------------------------


def _made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """A folder of the cache, which `make` writes unless it is there. It is whole when it has its final name."""
    if not path.exists():
        say(f"making {path}")
        unfinished = path.with_name(f"{path.name}.partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        make(unfinished)
        unfinished.rename(path)
    return path


def checkpoint(shape: str, cache: Path) -> Path:
    """The folder of a Qwen3 checkpoint with random weights."""

    def make(folder: Path) -> None:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM  # takes seconds

        torch.manual_seed(0)
        sizes = SHAPES[MODELS[shape]]
        special = {"bos_token_id": None, "eos_token_id": sizes["vocab_size"] - 1, "max_position_embeddings": CONTEXT_TOKENS}
        Qwen3ForCausalLM(Qwen3Config(**sizes | special)).save_pretrained(folder)
        _write_tokenizer(sizes["vocab_size"], folder)

    return _made_once(cache / "models" / shape / "checkpoint", make)


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    """Every id has a text of its own in plain ASCII, so that no server waits for the rest of a character before it sends a token.
    The first 256 are the bytes that byte-level tokenizers are made of."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts += [f"Ġ{number}" for number in range(len(texts), vocab_size - 1)]
    tokenizer = Tokenizer(models.BPE({text: id for id, text in enumerate(texts)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TOKEN)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TOKEN, pad_token=END_TOKEN).save_pretrained(folder)


# --- engines -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PeerRoom:
    """What every engine gets: the model, threads, rows of a batch, and KV memory for all requests at once."""

    shape: str
    cache: Path
    openvino: str
    vllm: str
    """The Pythons of the peers."""
    threads: int
    limit_s: float
    """The longest time that a load may take."""
    rows: int
    context_tokens: int
    """The length of the longest request, prompt and answer together."""
    kv_bytes: int
    workload: str
    """The mean tokens of a prompt and of an answer, by which `launch local` shares out cores."""

    @classmethod
    def for_requests(cls, requests: Sequence[OfflineSequence], shape: str, **others: Any) -> "PeerRoom":
        """With a page to spare for each request. KV is in float32. others: fields that do not depend on the requests."""
        sizes = SHAPES[MODELS[shape]]
        kv_token_bytes = 2 * 4 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]
        lengths = [PAGE * math.ceil((len(each.prompt) + each.answer_tokens) / PAGE) + PAGE for each in requests]
        means = (sum(len(each.prompt) for each in requests), sum(each.answer_tokens for each in requests))
        return cls(
            shape=shape,
            **others,
            rows=len(requests),
            context_tokens=max(lengths),
            kv_bytes=sum(lengths) * kv_token_bytes,
            workload=",".join(str(total // len(requests)) for total in means),
        )

    @property
    def kv_gib(self) -> int:
        """For engines that take only whole GiB."""
        return math.ceil(self.kv_bytes / 2**30)


@dataclass(frozen=True, kw_only=True)
class CpuEngine:
    """An engine that takes part."""

    title: str
    precision: Precision
    running: Callable[[PeerRoom], AbstractContextManager[tuple[Ask, int]]]
    """Starts it, and ends it afterwards: how it is asked, and the process that was started; others may be below it."""
    prepare: Callable[[PeerRoom], dict[str, str]] = lambda room: {}
    """Converts the model, where it needs that, and returns the versions of its packages."""
    peer: str = ""
    """The flag that names its Python; none for Tandem."""
    is_colocated: bool = False
    """The layout of Tandem that peers are compared with."""


def tandem_flags(room: PeerRoom, model: Path, flags: Sequence[str], is_separate: bool) -> tuple[str, ...]:
    """The flags of `launch local`. A prefill instance holds a prompt until it is taken over: it has the same room."""
    cores = ("--workload", room.workload) if is_separate else ("--threads", str(room.threads))
    return (
        *("--prefill", "1" if is_separate else "0", "--decode", "1", *cores, "--model", str(model)),
        *("--max-running", str(room.rows), "--kv-memory", str(room.kv_bytes), "--prefix-cache", "off"),
        *("--served-name", SERVED_NAME, "--log-level", "warning", *flags),
    )


def tandem(precision: Precision, *flags: str, is_separate: bool = False) -> CpuEngine:
    @contextlib.contextmanager
    def running(room: PeerRoom) -> Iterator[tuple[Ask, int]]:
        with local_fleet(*tandem_flags(room, checkpoint(room.shape, room.cache), flags, is_separate)) as fleet:
            yield partial(ask_server, fleet.url, room.limit_s), fleet.pid

    title = "**Tandem** 1 prefill + 1 decode" if is_separate else "**Tandem** colocated"
    return CpuEngine(title=title, precision=precision, running=running, is_colocated=not is_separate)


class Arrived(msgspec.Struct, frozen=True):
    """A line of the driver."""

    requests: list[int]
    """A token came for each of these; of none: it is ready for the next load."""


class DrivenLoad(msgspec.Struct, frozen=True):
    """A load for the driver."""

    prompts: list[list[int]]
    answer_tokens: list[int]
    """The length of each answer."""


Peer: TypeAlias = Respondent[Arrived]


@contextlib.contextmanager
def peer_process(*command: str, **variables: str) -> Iterator[Peer]:
    """A process and all that it starts, ended at the end."""
    peer = Peer("the engine", command, msgspec.json.Decoder(Arrived), variables)
    try:
        yield peer
    finally:
        stop_children([peer], STOP_S)


def versions(python: str, *packages: str) -> dict[str, str]:
    """The versions of these packages in an environment. Raises PeerFailed."""
    program = "import importlib.metadata as m, sys; print('\\n'.join(m.version(each) for each in sys.argv[1:]))"
    return dict(zip(packages, _run(python, "-P", "-c", program, *packages).split(), strict=True))


def _run(*command: str, **variables: str) -> str:
    """What the command prints. Raises PeerFailed with what it says when it fails."""
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=CONVERT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerFailed(f"{Path(command[0]).name} failed: {error}") from error
    if done.returncode != 0:
        raise PeerFailed(f"{Path(command[0]).name} failed: {done.stdout}{done.stderr}")
    return done.stdout


def openvino_model(room: PeerRoom, weights: str) -> Path:
    """The folder of its OpenVINO IR. weights: fp32 or int8, as `optimum-cli export openvino` names them. Raises PeerFailed."""

    def make(folder: Path) -> None:
        model, program = checkpoint(room.shape, room.cache), Path(room.openvino).with_name("optimum-cli")
        task = ("--task", "text-generation-with-past", "--weight-format", weights)
        _run(str(program), "export", "openvino", "--model", str(model), *task, str(folder), **OFFLINE)

    return _made_once(room.cache / "models" / room.shape / f"openvino-{weights}", make)


def openvino(precision: Precision, weights: str, **hints: str) -> CpuEngine:
    def prepare(room: PeerRoom) -> dict[str, str]:
        openvino_model(room, weights)
        return versions(room.openvino, "openvino-genai")

    @contextlib.contextmanager
    def running(room: PeerRoom) -> Iterator[tuple[Ask, int]]:
        properties = {"INFERENCE_NUM_THREADS": room.threads, **hints}
        settings = json.dumps({"rows": room.rows, "kv_gib": room.kv_gib, "properties": properties})
        command, threads = (room.openvino, "-E", str(DRIVER), str(openvino_model(room, weights)), settings), str(room.threads)
        with peer_process(*command, **OFFLINE, OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads) as driver:
            await_tokens(driver, START_S)
            yield partial(ask_driver, driver, room.limit_s), driver.pid

    return CpuEngine(title="OpenVINO GenAI", precision=precision, running=running, prepare=prepare, peer="openvino")


@contextlib.contextmanager
def vllm_running(room: PeerRoom) -> Iterator[tuple[Ask, int]]:
    port = free_port(LOOPBACK)
    url = f"http://{LOOPBACK}:{port}"
    command = (
        *(room.vllm, "-E", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(checkpoint(room.shape, room.cache)), "--host", LOOPBACK, "--port", str(port)),
        *("--served-model-name", SERVED_NAME, "--no-enable-prefix-caching", "--dtype", "float32"),
        *("--max-model-len", str(room.context_tokens), "--max-num-seqs", str(room.rows)),
    )
    # It binds a thread to each of the cores, and warns of OMP_NUM_THREADS: other threads would then compete with these.
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(room.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: room.threads]),
        "VLLM_NO_USAGE_STATS": "1",
    }
    with peer_process(*command, **OFFLINE, **variables) as server:
        until_s = time.monotonic() + START_S
        while not _is_healthy(url):
            if server.status is not None or time.monotonic() > until_s:
                raise PeerFailed(f"vLLM did not start: {server.account()}")
            time.sleep(LOOK_S)
        yield partial(ask_server, url, room.limit_s), server.pid


ENGINES: dict[str, CpuEngine] = {
    "tandem": tandem("float32"),
    "tandem-1p1d": tandem("float32", is_separate=True),
    "tandem-int8": tandem("int8", "--quantization", "int8"),
    "tandem-int8-1p1d": tandem("int8", "--quantization", "int8", is_separate=True),
    "tandem-bf16": tandem("bfloat16", "--dtype", "bfloat16"),
    # Without these it computes in bfloat16 where the processor can, and keeps KV in 8 bits.
    "openvino": openvino("float32", "fp32", INFERENCE_PRECISION_HINT="f32", KV_CACHE_PRECISION="f32"),
    "openvino-bf16": openvino("bfloat16", "fp32", INFERENCE_PRECISION_HINT="bf16", KV_CACHE_PRECISION="bf16"),
    "openvino-int8": openvino("int8", "int8"),
    "vllm": CpuEngine(
        title="vLLM CPU",
        precision="float32",
        running=vllm_running,
        prepare=lambda room: versions(room.vllm, "vllm-cpu", "torch"),
        peer="vllm",
    ),
}


# --- requests ----------------------------------------------------------------------------------------------------------------


def ask_server(url: str, limit_s: float, requests: Sequence[OfflineSequence]) -> list[TimedAnswer]:
    """Ask a server with OpenAI's API."""
    answers = _answers(requests)

    async def ask() -> None:
        client = HttpClient(url, "/v1/completions", {}, limit_s)
        bodies = [completion_of_ids(SERVED_NAME, each.prompt.tolist(), each.answer_tokens, **COUNTED_STREAM) for each in requests]
        for answer in answers:
            answer.begin(time.perf_counter())
        try:
            await asyncio.gather(*map(client.ask, answers, bodies))
        finally:
            client.close()

    uvloop.run(ask())
    return answers


def ask_driver(driver: Peer, limit_s: float, requests: Sequence[OfflineSequence]) -> list[TimedAnswer]:
    """Ask a driver. Raises PeerFailed."""
    answers = _answers(requests)
    load = DrivenLoad([each.prompt.tolist() for each in requests], [each.answer_tokens for each in requests])
    for answer in answers:
        answer.begin(time.perf_counter())
    driver.order(load)
    await_tokens(driver, limit_s, answers)
    for answer in answers:
        answer.end(time.perf_counter())
    return answers


def await_tokens(driver: Peer, limit_s: float, answers: Sequence[TimedAnswer] = ()) -> None:
    """Wait until the driver is ready for the next load, and record tokens that arrive. Raises PeerFailed when it ends, or takes
    too long."""
    until_s = time.monotonic() + limit_s
    try:
        while (report := driver.next_report(until_s - time.monotonic())) is not None:
            if not report.requests:
                return
            now_s = time.perf_counter()
            for number, tokens in Counter(report.requests).items():
                answers[number].add(now_s, tokens)
    except ChildEnded as error:
        raise PeerFailed(str(error)) from error
    raise PeerFailed(f"the driver was not done within {limit_s:g} s: {driver.account()}")


def _answers(requests: Sequence[OfflineSequence]) -> list[TimedAnswer]:
    return [TimedAnswer(0.0, each.answer_tokens, len(each.prompt)) for each in requests]


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health", timeout=LOOK_S) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def check(answers: Sequence[TimedAnswer]) -> None:
    """Raises PeerFailed unless each answer is whole."""
    for answer in answers:
        if answer.error:
            raise PeerFailed(f"a request failed: {answer.error}: {answer.message}")
        if answer.counted != answer.requested_tokens:
            raise PeerFailed(f"an answer has {answer.counted} tokens, and {answer.requested_tokens} were asked for")
