"""`python -m benchmarks.cpu_peers`: Tandem on a CPU beside OpenVINO GenAI and vLLM, which people would otherwise run there.

Owns the options, the order of the rounds, the life of an engine in its turn (started, warmed, measured, ended), the figures and
the table. An engine that fails is a row that says so, and the next one goes on. The peers are installed apart from Tandem;
`benchmarks/cpu_engines.py` starts them. Prints its progress on stderr.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import msgspec
import numpy as np

from bench.client import TimedAnswer
from bench.offline import OfflineSequence, sequences_of
from bench.options import OfflineOptions
from bench.report import BenchOutcome, Goal, Spread, ratios, say, this_hardware
from bench.serve import times_ms
from benchmarks.command import Invocation, start
from benchmarks.cpu_engines import ENGINES, MODELS, PeerFailed, PeerRoom, check, checkpoint
from benchmarks.engine import SHAPES
from benchmarks.processes import below
from common.errors import ConfigError, TandemError
from common.options import option, require, require_at_least

WARM_UP_TOKENS = 4
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


@dataclass(frozen=True, kw_only=True)
class CpuPeersBench:
    """The model, the requests, the engines, and how often each runs."""

    shape: Literal["0.6b", "30m"] = option("0.6b", "the model: random weights in the shape of Qwen3-0.6B, or of 30 M parameters")
    engines: str = option(
        "",
        f"which engines take part, in this order, of {', '.join(ENGINES)}; default: all but those in bfloat16, and of the peers "
        "those whose Python is given",
    )
    openvino: str = option("", "the Python of an environment with OpenVINO GenAI and optimum-intel")
    vllm: str = option("", "the Python of an environment with vLLM for CPUs")
    num_prompts: int = option(16, "requests, all sent at once")
    prompt_tokens: str = option("128,512", "fewest and most tokens of a prompt")
    answer_tokens: str = option("64,128", "fewest and most tokens of an answer")
    rounds: int = option(2, "how often each engine is started and measured: A B C, A B C and so on")
    threads: int = option(2, "cores of this machine that are used, by each engine in its turn with as many threads")
    limit_s: float = option(400.0, "longest time that a load may take")
    cache: str = option("~/.cache/tandem/cpu-peers", "the folder that keeps the model, and what it was converted to")
    seed: int = option(0, "of lengths and token ids: equal seeds give equal requests")
    json: str = option("", "write the figures to this file")

    def __post_init__(self) -> None:
        require_at_least(self, num_prompts=1, rounds=1, threads=1, limit_s=1)
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
        usual = (
            name for name, each in ENGINES.items() if each.precision != "bfloat16" and (not each.peer or vars(self)[each.peer])
        )
        return tuple(given or usual)

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

    def room(self, requests: Sequence[OfflineSequence]) -> PeerRoom:
        """What every engine gets for these requests."""
        return PeerRoom.for_requests(
            requests,
            self.shape,
            cache=Path(self.cache).expanduser(),
            openvino=self.openvino,
            vllm=self.vllm,
            threads=self.threads,
            limit_s=self.limit_s,
        )


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
    """The output tokens/s of colocated Tandem in the engine's precision, in those of the engine, round by round. None where they
    have no round in common."""

    def rates(name: str) -> dict[int, float]:
        return {turn.round: turn.output_tokens_per_s for turn in turns if turn.engine == name}

    return ratios(rates(_tandem_of(engine)), rates(engine))


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


def table(outcome: CpuPeersOutcome) -> list[tuple[str, ...]]:
    """A row for each engine, also for those that failed."""
    lines: list[tuple[str, ...]] = [HEAD]
    for name in outcome.engines:
        engine, turns = ENGINES[name], [turn for turn in outcome.turns if turn.engine == name]
        if not turns:
            lines.append((engine.title, engine.precision, "failed", *[""] * (len(HEAD) - 3)))
            continue
        rates = Spread.of(turn.output_tokens_per_s for turn in turns)
        others = [(turn.ttft_p50_ms / 1000, turn.itl_p50_ms, turn.itl_p95_ms, turn.memory_gb) for turn in turns]
        medians = [
            format(value, form) for value, form in zip(np.median(others, axis=0), (".1f", ".0f", ".0f", ".1f"), strict=True)
        ]
        ahead = None if engine.is_colocated else lead(outcome.turns, name)
        lines.append(
            (engine.title, engine.precision, rates.text(".1f"), *medians, "" if ahead is None else f"{ahead.median:.2f}x")
        )
    return lines


def run(invocation: Invocation) -> int:
    """Measure, and publish the report. Returns the exit status: 1 when an engine failed.

    The children get the variables that they would have outside: what `environment.prepare` sets is for processes of Tandem.
    """
    signal.signal(signal.SIGTERM, _stop)
    bench, hardware = invocation.config(CpuPeersBench, QUICK), this_hardware()
    if hardware.cores < bench.threads:
        raise ConfigError(f"--threads {bench.threads}: this machine has {hardware.cores} cores")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: bench.threads])  # of this process and all that it starts
    requests = sequences_of(bench.load, SHAPES[MODELS[bench.shape]]["vocab_size"])
    room = bench.room(requests)
    turns: list[PeerTurn] = []
    failures: list[PeerFailure] = []
    versions: dict[str, str] = {}

    def fail(name: str, number: int, error: Exception) -> None:
        say(f"{name} failed: {error}")
        failures.append(PeerFailure(engine=name, round=number, reason=_short(error)))

    checkpoint(room.shape, room.cache)
    ready = []
    for name in bench.names:  # all is converted before anything is measured
        try:
            versions |= ENGINES[name].prepare(room)
            ready.append(name)
        except PeerFailed as error:
            fail(name, 0, error)
    for number, name in product(range(bench.rounds), ready):  # what changes slowly about the machine meets every engine
        say(f"round {number + 1} of {bench.rounds}: {name}")
        try:
            turns.append(_turn(number, name, room, requests))
            say(f"    {turns[-1].output_tokens_per_s:.1f} tokens/s, ready after {turns[-1].start_s:.0f} s")
        except TandemError as error:
            fail(name, number, error)
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
    body = [invocation.style.table(table(outcome)), HOW, *([invocation.style.table([("failed",), *failed])] if failed else [])]
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


def _turn(number: int, name: str, room: PeerRoom, requests: Sequence[OfflineSequence]) -> PeerTurn:
    """Raises TandemError."""
    began_s = time.perf_counter()
    with ENGINES[name].running(room) as (ask, pid):
        start_s = time.perf_counter() - began_s
        # Prompts that are not measured: some engines keep the KV of an earlier one.
        check(ask([OfflineSequence(each.prompt[::-1][:WARM_UP_TOKENS], WARM_UP_TOKENS) for each in requests]))
        check(ask([OfflineSequence(requests[0].prompt[::-1], WARM_UP_TOKENS)]))
        answers = ask(requests)
        check(answers)
        memory_gb = sum(map(_proportional_gb, below(pid)))
    return PeerTurn.of(name, number, answers, memory_gb, start_s)


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
    explanation = "Measure this engine on a CPU beside OpenVINO and vLLM."
    return start("cpu_peers", explanation, run, CpuPeersBench, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
