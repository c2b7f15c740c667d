"""`python -m benchmarks.cpu_peers`: Tandem on a CPU beside OpenVINO GenAI and vLLM, which people would otherwise run there.

Owns the model that all read, the command lines, which give all engines the same threads, rows and KV memory, the order of the
rounds, the life of an engine in its turn (started, warmed, measured, ended), the figures and the table. An engine that fails is a
row that says so, and the next one goes on. The peers are installed apart from Tandem; what OpenVINO does in its environment is
`benchmarks/openvino_driver.py`. Servers get the load of `launch bench serve`. Prints its progress on stderr.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.client import TimedAnswer
from bench.offline import OfflineSequence, sequences_of
from bench.options import LoadOptions, OfflineOptions, ResultOptions, ServeOptions, TargetOptions, WorkloadOptions
from bench.report import Goal, Spread, ratios, say
from bench.serve import ServerRefuses, figures_of, measure
from benchmarks.command import Invocation, below, start
from benchmarks.engine import SHAPES
from common.addresses import LOOPBACK, free_port
from common.errors import ConfigError, TandemError
from common.options import option, require, require_at_least
from common.processes.child import ChildEnded, Respondent, stop_children
from common.processes.local_fleet import local_fleet

START_S, LOAD_S, CONVERT_S, STOP_S, LOOK_S = 600.0, 400.0, 3600.0, 20.0, 0.2
SERVED_NAME = "model"
MODELS = {"0.6b": "Qwen3-0.6B", "30m": "Qwen3-30M"}
"""The shapes that --shape takes."""
PAGE = 32
"""Room in the KV memory of every engine is counted in so many tokens, which is a multiple of all their pages."""
CONTEXT_TOKENS = 4096
WARM_UP_TOKENS = 4
END_TOKEN = "<|endoftext|>"
DRIVER = Path(__file__).with_name("openvino_driver.py")
OFFLINE = {"HF_HUB_OFFLINE": "1"}
RESULTS = ResultOptions(metric_percentiles="50,95")
REASON_LETTERS = 150
LEAST_LEAD = {"openvino": 1.1}
"""How many times a peer's output tokens/s Tandem must make. All others: more than once."""
HEAD = (
    *("engine", "precision", "output tokens/s", "TTFT p50, s", "inter-token p50, ms", "p95, ms", "memory, GB"),
    "Tandem is ahead",
)
STEADY = "Memory is not affected."
HOW = (
    "Medians of the rounds, and for output tokens/s the least and the most. “Tandem is ahead”: the output tokens/s of colocated "
    "Tandem of the same precision, in those of the engine, round by round."
)


class PeerFailed(TandemError):
    """An engine was not installed, converted or started, or did not answer as it should."""


@dataclass(frozen=True, kw_only=True)
class CpuPeersBench:
    """The model, the requests, the engines, and how often each runs."""

    shape: Literal["0.6b", "30m"] = option("0.6b", "the model: random weights in the shape of Qwen3-0.6B, or of 30 M parameters")
    engines: str = option(
        "", "which engines take part, in this order; default: all, and of the peers those whose Python is given"
    )
    openvino: str = option("", "the Python of an environment with OpenVINO GenAI and optimum-intel")
    vllm: str = option("", "the Python of an environment with vLLM for CPUs")
    num_prompts: int = option(16, "requests, all sent at once")
    prompt_tokens: str = option("128,512", "fewest and most tokens of a prompt")
    answer_tokens: str = option("64,128", "fewest and most tokens of an answer")
    rounds: int = option(2, "how often each engine is started and measured: A B C, A B C and so on")
    threads: int = option(2, "cores of this machine that are used, by each engine in its turn with as many threads")
    cache: str = option("~/.cache/tandem/cpu-peers", "the folder that keeps the model, and what it was converted to")
    seed: int = option(0, "of lengths and token ids: equal seeds give equal requests")

    def __post_init__(self) -> None:
        require_at_least(self, num_prompts=1, rounds=1, threads=1)
        for name in self.names:
            if name not in ENGINES:
                raise ConfigError(f"--engines: there is no {name!r}: known are {', '.join(ENGINES)}")
            peer = ENGINES[name].peer
            require(not peer or vars(self)[peer] != "", peer, f"a Python for {name}", "")
        _ = self.load  # refused here, and not in the middle of a run

    @property
    def names(self) -> tuple[str, ...]:
        """The engines, each once."""
        given = dict.fromkeys(name.strip() for name in self.engines.split(",") if name.strip())
        return tuple(given or (name for name, each in ENGINES.items() if not each.peer or vars(self)[each.peer]))

    @property
    def load(self) -> OfflineOptions:
        """The lengths and token ids are drawn as in `launch bench offline`."""
        return OfflineOptions(
            num_prompts=self.num_prompts, prompt_tokens=self.prompt_tokens, answer_tokens=self.answer_tokens, seed=self.seed
        )

    @property
    def requests(self) -> list[OfflineSequence]:
        return sequences_of(self.load, SHAPES[MODELS[self.shape]]["vocab_size"])


QUICK: dict[str, Any] = {
    "shape": "30m",
    "num_prompts": 4,
    "prompt_tokens": "16,32",
    "answer_tokens": "8,16",
    "rounds": 1,
    "engines": "tandem,tandem-1p1d",
}
"""What `--quick` measures: no peer, to show that the command works."""


class PeerTurn(msgspec.Struct, frozen=True, kw_only=True):
    """An engine in one round. figures: with the keys of `vllm bench serve`."""

    engine: str
    round: int
    figures: dict[str, Any]
    memory_gb: float
    """10^9 bytes of all its processes after the load; what several of them map is shared out among them."""

    @property
    def rate(self) -> float:
        return float(self.figures["output_throughput"])


class PeerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A turn without figures."""

    engine: str
    round: int
    reason: str


# --- what every engine gets --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PeerRoom:
    """The model, the requests, and room for all of them at once. folder: gets the files of the loads."""

    bench: CpuPeersBench
    requests: Sequence[OfflineSequence]
    folder: Path

    def write_loads(self) -> None:
        """Each has a line for each request, as a prompt file of `launch bench serve`. Of those that warm up, one has a long
        prompt."""
        first, *others = (each.prompt[::-1] for each in self.requests)
        short = [OfflineSequence(prompt, WARM_UP_TOKENS) for prompt in (first, *(each[:WARM_UP_TOKENS] for each in others))]
        for path, requests in zip(self.loads, (short, self.requests), strict=True):
            lines = ({"prompt": each.prompt.tolist(), "output_tokens": each.answer_tokens} for each in requests)
            path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    @property
    def loads(self) -> tuple[Path, Path]:
        """The short requests that warm an engine up, and those that are measured."""
        return self.folder / "short.jsonl", self.folder / "requests.jsonl"

    @property
    def lengths(self) -> list[int]:
        """Tokens that each request needs room for, with a page to spare."""
        return [PAGE * math.ceil((len(each.prompt) + each.answer_tokens) / PAGE) + PAGE for each in self.requests]

    @property
    def kv_bytes(self) -> int:
        """KV of all requests, in float32."""
        sizes = SHAPES[MODELS[self.bench.shape]]
        token_bytes = 2 * 4 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]
        return int(sum(self.lengths) * token_bytes)

    @property
    def kv_gib(self) -> int:
        """For engines that take only whole GiB."""
        return math.ceil(self.kv_bytes / 2**30)

    @cached_property
    def checkpoint(self) -> Path:
        """The folder of a Qwen3 checkpoint with random weights."""

        def make(folder: Path) -> None:
            import torch
            from transformers import Qwen3Config, Qwen3ForCausalLM  # takes seconds

            torch.manual_seed(0)
            sizes = SHAPES[MODELS[self.bench.shape]]
            special = {"bos_token_id": None, "eos_token_id": sizes["vocab_size"] - 1, "max_position_embeddings": CONTEXT_TOKENS}
            Qwen3ForCausalLM(Qwen3Config(**sizes | special)).save_pretrained(folder)
            _write_tokenizer(sizes["vocab_size"], folder)

        return self._made_once("checkpoint", make)

    def openvino_model(self, weights: str) -> Path:
        """The folder of its OpenVINO IR. weights: fp32 or int8, as `optimum-cli export openvino` names them."""

        def make(folder: Path) -> None:
            program = Path(self.bench.openvino).with_name("optimum-cli")
            task = ("--task", "text-generation-with-past", "--weight-format", weights)
            _run(str(program), "export", "openvino", "--model", str(self.checkpoint), *task, str(folder))

        return self._made_once(f"openvino-{weights}", make)

    def _made_once(self, name: str, make: Callable[[Path], None]) -> Path:
        """A folder of the cache, which `make` writes unless it is there. It is whole when it has its final name."""
        path = Path(self.bench.cache).expanduser() / "models" / self.bench.shape / name
        if not path.exists():
            say(f"making {path}")
            unfinished = path.with_name(f"{path.name}.partial")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            make(unfinished)
            unfinished.rename(path)
        return path


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


def _run(*command: str) -> str:
    """What the command prints. Raises PeerFailed with what it says when it fails."""
    environment = {**os.environ, **OFFLINE}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=CONVERT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerFailed(f"{Path(command[0]).name} failed: {error}") from error
    if done.returncode != 0:
        raise PeerFailed(f"{Path(command[0]).name} failed: {done.stdout}{done.stderr}")
    return done.stdout


# --- engines -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CpuEngine:
    """An engine that takes part."""

    title: str
    precision: Literal["float32", "int8"]
    measure: Callable[[PeerRoom], tuple[dict[str, Any], float]]
    """Starts it, warms it up, measures, and ends it: its figures, and its memory in GB. Raises TandemError."""
    peer: str = ""
    """The flag that names its Python; none for Tandem."""
    packages: tuple[str, ...] = ()
    """The packages of a peer whose versions the report names."""
    weights: str = ""
    """The weights that the model is converted to."""
    is_colocated: bool = False
    """The layout of Tandem that peers are compared with."""


def tandem_flags(room: PeerRoom, model: Path, flags: Sequence[str], is_separate: bool) -> tuple[str, ...]:
    """The flags of `launch local`. A prefill instance holds a prompt until it is taken over: it has the same room."""
    rows = len(room.requests)
    means = sum(len(each.prompt) for each in room.requests) // rows, sum(each.answer_tokens for each in room.requests) // rows
    cores = ("--workload", "{},{}".format(*means)) if is_separate else ("--threads", str(room.bench.threads))
    return (
        *("--prefill", "1" if is_separate else "0", "--decode", "1", *cores, "--model", str(model)),
        *("--max-running", str(rows), "--kv-memory", str(room.kv_bytes), "--prefix-cache", "off"),
        *("--served-name", SERVED_NAME, "--log-level", "warning", *flags),
    )


def tandem(precision: Literal["float32", "int8"], *flags: str, is_separate: bool = False) -> CpuEngine:
    def measured(room: PeerRoom) -> tuple[dict[str, Any], float]:
        with local_fleet(*tandem_flags(room, room.checkpoint, flags, is_separate)) as fleet:
            for load in room.loads:
                figures = ask_server(fleet.url, load)
            return figures, memory_gb(fleet.pid)

    title = "**Tandem** 1 prefill + 1 decode" if is_separate else "**Tandem** colocated"
    return CpuEngine(title=title, precision=precision, measure=measured, is_colocated=not is_separate)


class DrivenLoad(msgspec.Struct, frozen=True):
    """What the driver reports of a load."""

    began_s: float
    tokens_s: list[list[float]]
    """When each token of each request came, by the clock of this machine."""


@contextlib.contextmanager
def peer_process(*command: str, **variables: str) -> Iterator[Respondent[DrivenLoad]]:
    """A process and all that it starts, ended at the end."""
    peer = Respondent("the engine", command, msgspec.json.Decoder(DrivenLoad), OFFLINE | variables)
    try:
        yield peer
    finally:
        stop_children([peer], STOP_S)


def openvino(precision: Literal["float32", "int8"], weights: str, **hints: str) -> CpuEngine:
    def measured(room: PeerRoom) -> tuple[dict[str, Any], float]:
        properties, threads = {"INFERENCE_NUM_THREADS": room.bench.threads, **hints}, str(room.bench.threads)
        settings = json.dumps({"rows": len(room.requests), "kv_gib": room.kv_gib, "properties": properties})
        command = (room.bench.openvino, "-E", str(DRIVER), str(room.openvino_model(weights)), settings, *map(str, room.loads))
        with peer_process(*command, OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads) as driver:
            driven(driver, START_S)
            return figures_of_driver(room.requests, driven(driver, LOAD_S)), memory_gb(driver.pid)

    return CpuEngine(
        title="OpenVINO GenAI",
        precision=precision,
        measure=measured,
        peer="openvino",
        packages=("openvino-genai",),
        weights=weights,
    )


def driven(driver: Respondent[DrivenLoad], limit_s: float) -> DrivenLoad:
    """Its next load. Raises PeerFailed when it ends, or takes too long."""
    try:
        report = driver.next_report(limit_s)
    except ChildEnded as error:
        raise PeerFailed(str(error)) from error
    if report is None:
        raise PeerFailed(f"the driver was not done within {limit_s:g} s: {driver.account()}")
    return report


def figures_of_driver(requests: Sequence[OfflineSequence], load: DrivenLoad) -> dict[str, Any]:
    """Raises PeerFailed unless each answer is whole."""
    answers = [TimedAnswer(load.began_s, each.answer_tokens, len(each.prompt)) for each in requests]
    for answer, times in zip(answers, load.tokens_s, strict=True):
        answer.begin(load.began_s)
        for token_s in times:
            answer.add(token_s, 1)
        answer.end(answer.token_s)
    return whole(figures_of(answers, max(answer.ended_s for answer in answers) - load.began_s, RESULTS))


def vllm(room: PeerRoom) -> tuple[dict[str, Any], float]:
    port = free_port(LOOPBACK)
    command = (
        *(room.bench.vllm, "-E", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(room.checkpoint), "--host", LOOPBACK, "--port", str(port)),
        *("--served-model-name", SERVED_NAME, "--no-enable-prefix-caching", "--dtype", "float32"),
        *("--max-model-len", str(max(room.lengths)), "--max-num-seqs", str(len(room.requests))),
    )
    # It binds a thread to each of the cores, and warns of OMP_NUM_THREADS: other threads would then compete with these.
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(room.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: room.bench.threads]),
        "VLLM_NO_USAGE_STATS": "1",
    }
    url, (short, requests) = f"http://{LOOPBACK}:{port}", room.loads
    with peer_process(*command, **variables) as server:
        until_s, is_up = time.monotonic() + START_S, False
        while not is_up:
            try:
                ask_server(url, short)
                is_up = True
            except ServerRefuses as error:
                if server.status is not None or time.monotonic() > until_s:
                    raise PeerFailed(f"vLLM did not start: {error}: {server.account()}") from error
                time.sleep(LOOK_S)
        return ask_server(url, requests), memory_gb(server.pid)


def ask_server(url: str, load: Path) -> dict[str, Any]:
    """Send a load to a server, all at once behind its first request. Raises PeerFailed, ServerRefuses."""
    target = TargetOptions(base_url=url, model=SERVED_NAME, request_timeout_s=LOAD_S)
    workload = WorkloadOptions(dataset_name="custom", dataset_path=str(load))
    asked = ServeOptions(target=target, workload=workload, load=LoadOptions(ignore_eos="on"), results=RESULTS)
    return whole(measure(asked).figures)


def whole(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures. Raises PeerFailed unless each answer is whole."""
    if figures["failed"] or figures["shorter_than_asked"]:
        raise PeerFailed(f"answers failed: {figures['errors_by_kind']}; too short: {figures['shorter_than_asked']}")
    return figures


def memory_gb(pid: int) -> float:
    """The memory of a process and all that it started, what they share with others in proportion."""
    kilobytes = 0
    for each in below(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kilobytes * 1024 / 1e9


ENGINES: dict[str, CpuEngine] = {
    "tandem": tandem("float32"),
    "tandem-1p1d": tandem("float32", is_separate=True),
    "tandem-int8": tandem("int8", "--quantization", "int8"),
    "tandem-int8-1p1d": tandem("int8", "--quantization", "int8", is_separate=True),
    # Without these it computes in bfloat16 where the processor can, and keeps KV in 8 bits.
    "openvino": openvino("float32", "fp32", INFERENCE_PRECISION_HINT="f32", KV_CACHE_PRECISION="f32"),
    "openvino-int8": openvino("int8", "int8"),
    "vllm": CpuEngine(title="vLLM CPU", precision="float32", measure=vllm, peer="vllm", packages=("vllm-cpu", "torch")),
}


# --- the figures and the rounds ----------------------------------------------------------------------------------------------


def lead(turns: Sequence[PeerTurn], engine: str) -> Spread | None:
    """The output tokens/s of colocated Tandem in the engine's precision, in those of the engine, round by round. None where they
    have no round in common."""
    ours, theirs = ({turn.round: turn.rate for turn in turns if turn.engine == name} for name in (_tandem_of(engine), engine))
    return ratios(ours, theirs)


def judge(engines: Sequence[str], turns: Sequence[PeerTurn]) -> Iterator[Goal]:
    """One goal for each peer that took part beside Tandem of its precision."""
    for name in engines:
        if not ENGINES[name].peer or _tandem_of(name) not in engines:
            continue
        least, found = LEAST_LEAD.get(name, 1.0), lead(turns, name)
        times = f"at least {least:g}" if least > 1 else "more than 1"
        yield Goal(
            rule=f"{_tandem_of(name)}: {times} times the output tokens/s of {name}",
            met=None if found is None else (found.median >= least if least > 1 else found.median > 1),
            figure="not measured" if found is None else f"{found.median:.2f} times",
        )


def _tandem_of(name: str) -> str:
    """The colocated layout of the same precision."""
    precision = ENGINES[name].precision
    return next(own for own, engine in ENGINES.items() if engine.is_colocated and engine.precision == precision)


def table(engines: Sequence[str], all_turns: Sequence[PeerTurn]) -> list[tuple[str, ...]]:
    """A row for each engine, also for those that failed."""
    lines: list[tuple[str, ...]] = [HEAD]
    for name in engines:
        engine, turns = ENGINES[name], [turn for turn in all_turns if turn.engine == name]
        if not turns:
            lines.append((engine.title, engine.precision, "failed", *[""] * (len(HEAD) - 3)))
            continue
        first_s = Spread.of(turn.figures["p50_ttft_ms"] / 1000 for turn in turns).median
        p50_ms, p95_ms = (Spread.of(turn.figures[f"{each}_itl_ms"] for turn in turns).median for each in ("p50", "p95"))
        memory_gb = Spread.of(turn.memory_gb for turn in turns).median
        medians = f"{first_s:.1f}", f"{p50_ms:.0f}", f"{p95_ms:.0f}", f"{memory_gb:.1f}"
        ahead = None if engine.is_colocated else lead(all_turns, name)
        rates = Spread.of(turn.rate for turn in turns).text(".1f")
        lines.append((engine.title, engine.precision, rates, *medians, "" if ahead is None else f"{ahead.median:.2f}x"))
    return lines


def run(invocation: Invocation) -> int:
    """Measure, and publish the report. Returns the exit status: 1 when an engine failed.

    The children get the variables that they would have outside: what `environment.prepare` sets is for processes of Tandem.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leaves through every `finally`
    bench, cores = invocation.config(CpuPeersBench, QUICK), invocation.hardware.cores
    if cores < bench.threads:
        raise ConfigError(f"--threads {bench.threads}: this machine has {cores} cores")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: bench.threads])  # of this process and all that it starts
    requests, turns, failures, versions = bench.requests, list[PeerTurn](), list[PeerFailure](), dict[str, str]()

    def attempt(name: str, number: int, act: Callable[[], object]) -> bool:
        """Whether it worked."""
        try:
            act()
            return True
        except TandemError as error:
            say(f"{name} failed: {error}")
            failures.append(PeerFailure(engine=name, round=number, reason=_short(error)))
            return False

    def take_turn(name: str, number: int) -> None:
        figures, gigabytes = ENGINES[name].measure(room)
        turns.append(PeerTurn(engine=name, round=number, figures=figures, memory_gb=gigabytes))
        say(f"    {turns[-1].rate:.1f} tokens/s")

    with tempfile.TemporaryDirectory() as folder:
        room = PeerRoom(bench, requests, Path(folder))
        room.write_loads()
        # All is converted before anything is measured.
        ready = [name for name in bench.names if attempt(name, 0, partial(prepare, name, room, versions))]
        for number, name in product(range(bench.rounds), ready):  # what changes slowly about the machine meets every engine
            say(f"round {number + 1} of {bench.rounds}: {name}")
            attempt(name, number, partial(take_turn, name, number))
    prompts, answers = sum(len(each.prompt) for each in requests), sum(each.answer_tokens for each in requests)
    settings = (
        f"shape {bench.shape}, {len(requests)} requests at once with {prompts:,} prompt and {answers:,} new tokens together, "
        f"{bench.threads} threads, {bench.rounds} rounds"
    )
    if versions:
        settings += f"; peers: {', '.join(f'{name} {version}' for name, version in versions.items())}"
    failed = [(f"{each.engine}, round {each.round + 1}: {each.reason}",) for each in failures]
    body = [
        invocation.style.table(table(bench.names, turns)),
        HOW,
        *([invocation.style.table([("failed",), *failed])] if failed else []),
    ]
    goals = judge(bench.names, turns)
    invocation.publish(settings, STEADY, body, goals, engines=bench.names, turns=turns, failures=failures)
    return 1 if failures else 0


def prepare(name: str, room: PeerRoom, versions: dict[str, str]) -> None:
    """Make and convert the model, and learn the versions of a peer's packages. Raises PeerFailed."""
    engine = ENGINES[name]
    _ = room.checkpoint
    if engine.weights:
        room.openvino_model(engine.weights)
    if engine.peer:
        program = "import importlib.metadata as m, sys; print('\\n'.join(m.version(each) for each in sys.argv[1:]))"
        found = _run(vars(room.bench)[engine.peer], "-P", "-c", program, *engine.packages).split()
        versions |= zip(engine.packages, found, strict=True)


def _short(error: Exception) -> str:
    """Its beginning and its end: a traceback's last line says most."""
    text = " ".join(str(error).split())
    return text if len(text) <= 2 * REASON_LETTERS else f"{text[:REASON_LETTERS]} ... {text[-REASON_LETTERS:]}"


EXPLANATION = "Measure this engine on a CPU beside OpenVINO and vLLM."

if __name__ == "__main__":
    sys.exit(start("cpu_peers", EXPLANATION, run, CpuPeersBench))
