"""`python -m benchmarks.cpu_peers`: Tandem on a CPU beside the engines that people would otherwise run there.

Owns the options, the order of the rounds, the life of an engine in its turn (installed, started, warmed, measured, ended), the
figures and the table. An engine that fails in any of these is a row that says so, and the next one goes on. The engines are in
`benchmarks/cpu_engines.py`. Prints its progress on stderr.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import uvloop

from bench.client import COUNTED_STREAM, HttpClient, TimedAnswer, completion_of_ids
from bench.offline import OfflineSequence, sequences_of
from bench.options import OfflineOptions
from bench.report import BenchOutcome, Goal, Spread, say, this_hardware
from bench.serve import times_ms
from benchmarks.command import Invocation, start
from benchmarks.cpu_engines import (
    ENGINES,
    SERVED_NAME,
    SHAPES,
    PeerEngine,
    PeerFailed,
    PeerRoom,
    PeerShape,
    TandemLayout,
    checkpoint,
    last_lines,
)
from benchmarks.processes import below
from common.addresses import LOOPBACK, free_port
from common.errors import ConfigError, TandemError
from common.options import option, require_at_least
from common.processes.local_fleet import local_fleet

START_S = 600.0
STOP_S = 20.0
LOOK_S = 0.2
WARM_UP_TOKENS = 4
REASON_LETTERS = 150
AHEAD = {"openvino": 1.1, "transformers-cb": 4.0}
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
EXTRA = ("tandem-bf16", "openvino-bf16")
"""Engines that run only when they are named."""


@dataclass(frozen=True, kw_only=True)
class CpuPeersBench:
    """The model, the requests, the engines, and how often each runs."""

    shape: Literal["0.6b", "30m"] = option("0.6b", "the model: random weights in the shape of Qwen3-0.6B, or of 30 M parameters")
    engines: str = option(
        ",".join(name for name in ENGINES if name not in EXTRA),
        f"which engines take part, in this order; also known: {', '.join(EXTRA)}",
    )
    once: str = option("transformers,transformers-cb", "engines that take part in the first round alone, because they are slow")
    num_prompts: int = option(16, "requests, all sent at once")
    prompt_tokens: str = option("128,512", "fewest and most tokens of a prompt")
    answer_tokens: str = option("64,128", "fewest and most tokens of an answer")
    rounds: int = option(2, "how often each engine is started and measured: A B C, A B C and so on")
    threads: int = option(2, "cores of this machine that are used, by each engine in its turn with as many threads")
    limit_s: float = option(400.0, "longest time that a load may take")
    cache: str = option("~/.cache/tandem/cpu-peers", "the folder that keeps the peers' environments and the converted models")
    seed: int = option(0, "of lengths and token ids: equal seeds give equal requests")
    json: str = option("", "write the figures to this file")

    def __post_init__(self) -> None:
        require_at_least(self, num_prompts=1, rounds=1, threads=1, limit_s=1)
        if not self.names:
            raise ConfigError("--engines is empty: name at least one")
        for flag, names in (("engines", self.names), ("once", _names(self.once))):
            for name in names:
                if name not in ENGINES:
                    raise ConfigError(f"--{flag}: there is no {name!r}: known are {', '.join(ENGINES)}")
        _ = self.load  # refused here, and not in the middle of a run

    @property
    def names(self) -> tuple[str, ...]:
        return _names(self.engines)

    @property
    def load(self) -> OfflineOptions:
        """The lengths and token ids are drawn as in `launch bench offline`."""
        return OfflineOptions(
            num_prompts=self.num_prompts,
            prompt_tokens=self.prompt_tokens,
            answer_tokens=self.answer_tokens,
            temperature=0.0,
            seed=self.seed,
        )

    @property
    def cache_folder(self) -> Path:
        return Path(self.cache).expanduser()

    def turns(self) -> Iterator[tuple[int, str]]:
        """Round and engine: what changes slowly about the machine meets every engine."""
        once = _names(self.once)
        yield from (turn for turn in product(range(self.rounds), self.names) if turn[0] == 0 or turn[1] not in once)


def _names(text: str) -> tuple[str, ...]:
    """Each once, in order."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


QUICK: dict[str, Any] = {
    "shape": "30m",
    "num_prompts": 4,
    "prompt_tokens": "16,32",
    "answer_tokens": "8,16",
    "rounds": 1,
    "engines": "tandem,tandem-1p1d",
}
"""What `--quick` measures: it installs nothing, and shows that the command works."""


class PeerTurn(msgspec.Struct, frozen=True, kw_only=True):
    """An engine in one round."""

    engine: str
    round: int
    seconds: float
    """The time from the first sending to the last token."""
    output_tokens_per_s: float
    ttft_p50_ms: float
    itl_p50_ms: float
    itl_p95_ms: float
    memory_gb: float
    """10^9 bytes of all its processes after the load; what several of them map is shared out among them."""
    start_s: float
    """The time until it was ready, with the model loaded."""

    @classmethod
    def of(cls, engine: str, number: int, answers: Sequence[TimedAnswer], memory_gb: float, start_s: float) -> "PeerTurn":
        """answers: whole."""
        seconds = max(answer.token_s for answer in answers) - min(answer.sent_s for answer in answers)
        times = times_ms(answers)
        itl_p50, itl_p95 = np.percentile(times["itl"], (50, 95)).tolist() if len(times["itl"]) else (0.0, 0.0)
        return cls(
            engine=engine,
            round=number,
            seconds=seconds,
            output_tokens_per_s=sum(answer.counted for answer in answers) / seconds,
            ttft_p50_ms=float(np.median(times["ttft"])),
            itl_p50_ms=itl_p50,
            itl_p95_ms=itl_p95,
            memory_gb=memory_gb,
            start_s=start_s,
        )


class PeerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A turn without figures."""

    engine: str
    round: int
    reason: str


class CpuPeersOutcome(BenchOutcome, frozen=True, kw_only=True):
    """All that is known at the end."""

    shape: str
    requests: int
    prompt_tokens: int
    answer_tokens: int
    threads: int
    rounds: int
    engines: list[str]
    """The engines in the order of the report."""
    versions: dict[str, str]
    """The versions of the peers' packages."""
    turns: list[PeerTurn]
    failures: list[PeerFailure]


def lead(turns: Sequence[PeerTurn], engine: str) -> Spread | None:
    """The output tokens/s of colocated Tandem in the engine's precision, in those of the engine, round by round: what changes
    about the machine between rounds cancels out. None where they have no round in common."""
    rates = {(turn.engine, turn.round): turn.output_tokens_per_s for turn in turns}
    own = _tandem_of(engine)
    shares = [rates[own, number] / rate for (name, number), rate in rates.items() if name == engine and (own, number) in rates]
    return Spread.of(shares) if shares else None


def judge(engines: Sequence[str], turns: Sequence[PeerTurn]) -> Iterator[Goal]:
    """One goal for each peer that took part beside Tandem of its precision."""
    for name in engines:
        if isinstance(ENGINES[name], TandemLayout) or _tandem_of(name) not in engines:
            continue
        least, found = AHEAD.get(name, 1.0), lead(turns, name)
        times = f"at least {least:g}" if least > 1 else "more than 1"
        yield Goal(
            rule=f"{_tandem_of(name)}: {times} times the output tokens/s of {name}",
            met=None if found is None else (found.median >= least if least > 1 else found.median > 1),
            figure="not measured" if found is None else f"{found.median:.2f} times",
        )


def _is_colocated(engine: TandemLayout | PeerEngine) -> bool:
    return isinstance(engine, TandemLayout) and not engine.is_separate


def _tandem_of(name: str) -> str:
    """The colocated layout of the same precision."""
    precision = ENGINES[name].precision
    return next(own for own, engine in ENGINES.items() if _is_colocated(engine) and engine.precision == precision)


def table(outcome: CpuPeersOutcome) -> list[tuple[str, ...]]:
    """A row for each engine, also for those that failed."""
    return [HEAD, *(_row(outcome, name) for name in outcome.engines)]


def _row(outcome: CpuPeersOutcome, name: str) -> tuple[str, ...]:
    engine, turns = ENGINES[name], [turn for turn in outcome.turns if turn.engine == name]
    if not turns:
        return engine.title, engine.precision, "failed", *[""] * (len(HEAD) - 3)

    def median(of: Callable[[PeerTurn], float]) -> float:
        return Spread.of(of(turn) for turn in turns).median

    ahead = None if _is_colocated(engine) else lead(outcome.turns, name)
    return (
        engine.title,
        engine.precision,
        Spread.of(turn.output_tokens_per_s for turn in turns).text(".1f"),
        f"{median(lambda turn: turn.ttft_p50_ms) / 1000:.1f}",
        f"{median(lambda turn: turn.itl_p50_ms):.0f}",
        f"{median(lambda turn: turn.itl_p95_ms):.0f}",
        f"{median(lambda turn: turn.memory_gb):.1f}",
        "" if ahead is None else f"{ahead.median:.2f}x",
    )


def run(invocation: Invocation) -> int:
    """Measure, and publish the report. Returns the exit status: 1 when an engine failed.

    The children get the variables that they would have outside: what `environment.prepare` sets is for processes of Tandem.
    """
    signal.signal(signal.SIGTERM, _stop)
    bench, hardware = invocation.config(CpuPeersBench, QUICK), this_hardware()
    if hardware.cores < bench.threads:
        raise ConfigError(f"--threads {bench.threads}: this machine has {hardware.cores} cores")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: bench.threads])  # of this process and all that it starts
    shape, turns = SHAPES[bench.shape], []
    requests = sequences_of(bench.load, shape.vocab)
    room = PeerRoom.for_requests(requests, shape, bench.threads)
    ready, failures, versions = _prepare(bench, shape)
    for number, name in bench.turns():
        if name not in ready:
            continue
        say(f"round {number + 1} of {bench.rounds}: {name}")
        try:
            turns.append(_turn(bench, number, name, room, requests))
        except TandemError as error:
            say(f"{name} failed: {error}")
            failures.append(PeerFailure(engine=name, round=number, reason=_short(error)))
        else:
            say(f"    {turns[-1].output_tokens_per_s:.1f} tokens/s, ready after {turns[-1].start_s:.0f} s")
    outcome = CpuPeersOutcome(
        command=invocation.command,
        hardware=hardware,
        goals=list(judge(bench.names, turns)),
        shape=bench.shape,
        requests=len(requests),
        prompt_tokens=sum(len(each.prompt) for each in requests),
        answer_tokens=sum(each.answer_tokens for each in requests),
        threads=bench.threads,
        rounds=bench.rounds,
        engines=list(bench.names),
        versions=versions,
        turns=turns,
        failures=failures,
    )
    failed = [(f"{each.engine}, round {each.round + 1}: {each.reason}",) for each in failures]
    body = [invocation.table(table(outcome)), HOW, *([invocation.table([("failed",), *failed])] if failed else [])]
    invocation.publish(outcome, settings_of(outcome), STEADY, body, bench.json)
    return 1 if failures else 0


def settings_of(outcome: CpuPeersOutcome) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in outcome.versions.items())
    return (
        f"shape {outcome.shape}, {outcome.requests} requests at once with {outcome.prompt_tokens:,} prompt and "
        f"{outcome.answer_tokens:,} new tokens together, {outcome.threads} threads, {outcome.rounds} rounds"
        f"{f'; peers: {versions}' if versions else ''}"
    )


def _stop(number: int, frame: FrameType | None) -> None:
    """Leave through every `finally`, which ends the engine that runs."""
    raise SystemExit(128 + number)


def _prepare(bench: CpuPeersBench, shape: PeerShape) -> tuple[set[str], list[PeerFailure], dict[str, str]]:
    """Install and convert everything before anything is measured: which engines are there, which are not, and what versions."""
    ready: set[str] = set()
    failures: list[PeerFailure] = []
    versions: dict[str, str] = {}
    checkpoint(shape, bench.cache_folder)
    for name in bench.names:
        engine = ENGINES[name]
        try:
            if isinstance(engine, PeerEngine):
                versions |= engine.environment.versions(engine.environment.installed(bench.cache_folder))
                engine.model(shape, bench.cache_folder)
        except PeerFailed as error:
            say(str(error))
            failures.append(PeerFailure(engine=name, round=0, reason=_short(error)))
        else:
            ready.add(name)
    return ready, failures, versions


def _turn(bench: CpuPeersBench, number: int, name: str, room: PeerRoom, requests: Sequence[OfflineSequence]) -> PeerTurn:
    """Raises TandemError."""
    began_s = time.perf_counter()
    with _running(bench, name, room) as (ask, pid):
        start_s = time.perf_counter() - began_s
        # Prompts that are not measured: some engines keep the KV of an earlier one.
        check(ask([OfflineSequence(each.prompt[::-1][:WARM_UP_TOKENS], WARM_UP_TOKENS) for each in requests]))
        check(ask([OfflineSequence(requests[0].prompt[::-1], WARM_UP_TOKENS)]))
        answers = ask(requests)
        check(answers)
        memory_gb = sum(map(_proportional_gb, below(pid)))
    return PeerTurn.of(name, number, answers, memory_gb, start_s)


def check(answers: Sequence[TimedAnswer]) -> None:
    """Raises PeerFailed unless each answer is whole."""
    for answer in answers:
        if answer.error:
            raise PeerFailed(f"a request failed: {answer.error}: {answer.message}")
        if answer.counted != answer.requested_tokens:
            raise PeerFailed(f"an answer has {answer.counted} tokens, and {answer.requested_tokens} were asked for")


Ask: TypeAlias = Callable[[Sequence[OfflineSequence]], list[TimedAnswer]]
"""Sends all requests at once and waits for all answers, greedy and of the lengths asked for. Raises PeerFailed. In all ways, a
token's time is when this process learns of it."""


@contextlib.contextmanager
def _running(bench: CpuPeersBench, name: str, room: PeerRoom) -> Iterator[tuple[Ask, int]]:
    """An engine that runs, and the process that was started; others may be below it."""
    engine, shape, cache = ENGINES[name], SHAPES[bench.shape], bench.cache_folder
    if isinstance(engine, TandemLayout):
        with local_fleet(*engine.command(checkpoint(shape, cache), room)) as fleet:
            yield partial(ask_server, fleet.url, limit_s=bench.limit_s), fleet.pid
        return
    port = free_port(LOOPBACK)
    programs = engine.environment.installed(cache) / "bin"
    command, variables = engine.command(programs, engine.model(shape, cache), room, port)
    log = cache / f"{name}.log"
    with peer_process(command, variables, log, is_server=engine.is_server) as process:
        if engine.is_server:
            url = f"http://{LOOPBACK}:{port}"
            until_s = time.monotonic() + START_S
            while not _is_healthy(url):
                if process.poll() is not None or time.monotonic() > until_s:
                    raise PeerFailed(f"{name} did not start: {last_lines(log)}")
                time.sleep(LOOK_S)
            yield partial(ask_server, url, limit_s=bench.limit_s), process.pid
        else:
            driver = PeerDriver(process, log)
            driver.wait(START_S)
            yield partial(driver.ask, limit_s=bench.limit_s), process.pid


@contextlib.contextmanager
def peer_process(
    command: Sequence[str], variables: dict[str, str], log: Path, *, is_server: bool
) -> Iterator[subprocess.Popen[str]]:
    """A process and all that it starts, ended at the end. A driver has pipes; what it prints besides is in the log."""
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if is_server else subprocess.PIPE,
            stdout=output if is_server else subprocess.PIPE,
            stderr=output,
            env={**os.environ, **variables},
            text=True,
            start_new_session=True,
        )
    with contextlib.suppress(BrokenPipeError), process:  # it closes the pipes, also one that nobody has read to its end
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
                os.killpg(process.pid, signal.SIGKILL)


def ask_server(url: str, requests: Sequence[OfflineSequence], limit_s: float) -> list[TimedAnswer]:
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


class PeerDriver:
    """A driver that runs: a load is a line of JSON, and so are the tokens that arrive (`cpu_drivers/talk.py`)."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def ask(self, requests: Sequence[OfflineSequence], limit_s: float) -> list[TimedAnswer]:
        answers = _answers(requests)
        load = [{"prompt": each.prompt.tolist(), "answer_tokens": each.answer_tokens} for each in requests]
        for answer in answers:
            answer.begin(time.perf_counter())
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: the wait says why
            print(json.dumps(load), file=self._process.stdin, flush=True)
        self.wait(limit_s, answers)
        for answer in answers:
            answer.end(time.perf_counter())
        return answers

    def wait(self, limit_s: float, answers: Sequence[TimedAnswer] = ()) -> None:
        """Wait until it is ready for the next load, and record tokens that arrive. Raises PeerFailed when it ends, or takes too
        long and so is ended."""
        assert self._process.stdout is not None
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                now_s, arrived = time.perf_counter(), json.loads(line)
                if not arrived:
                    return
                for number, tokens in Counter(arrived).items():
                    answers[number].add(now_s, tokens)
        finally:
            timer.cancel()
        raise PeerFailed(f"the driver ended, or was not done within {limit_s:g} s: {last_lines(self._log)}")


def _answers(requests: Sequence[OfflineSequence]) -> list[TimedAnswer]:
    return [TimedAnswer(0.0, each.answer_tokens, len(each.prompt)) for each in requests]


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health", timeout=LOOK_S) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _proportional_gb(pid: int) -> float:
    """The memory of a process, what it shares with others in proportion; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith("Pss:"))


def _short(error: Exception) -> str:
    """Its beginning and its end: a traceback's last line says most."""
    text = " ".join(str(error).split())
    return text if len(text) <= 2 * REASON_LETTERS else f"{text[:REASON_LETTERS]} ... {text[-REASON_LETTERS:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    explanation = "Measure this engine on a CPU beside OpenVINO, vLLM, llama.cpp and transformers."
    return start("cpu_peers", explanation, run, CpuPeersBench, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
