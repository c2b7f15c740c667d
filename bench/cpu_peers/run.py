"""`launch bench cpu-peers`: starts each engine in its turn, sends it the same requests, and reports.

Owns the order, and the life of each engine: installed, started, warmed, measured, ended. An engine that fails in any of these
is a row that says so, and the next one goes on. Prints its progress on stderr.
"""

import contextlib
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

import msgspec

from bench.cpu_peers.asking import Asking, EngineFailed, OverHttp, OverPipes
from bench.cpu_peers.engines import ENGINES, Peer, Room, Start, Tandem
from bench.cpu_peers.environments import NotInstalled, environment_of
from bench.cpu_peers.figures import CpuPeersOutcome, Failure, Turn, judge
from bench.cpu_peers.models import NotConverted, checkpoint
from bench.cpu_peers.plan import CpuPeersBench
from bench.cpu_peers.report import report
from bench.offline import OfflineSequence, sequences_of
from bench.processes import below
from bench.report import publish, say, this_hardware
from common.addresses import LOOPBACK, free_port
from common.errors import ConfigError, TandemError
from common.processes.child import Child, ChildEvent, Progress, stop_children
from common.processes.local_fleet import local_fleet

START_S = 600.0
STOP_S = 20.0
LOOK_S = 0.2
WARM_UP_TOKENS = 4
REASON_LETTERS = 150


def run(bench: CpuPeersBench, command: str, markdown: bool) -> int:
    """Measure, print the report and write the file. Returns the exit status: 1 when an engine failed. Raises ConfigError."""
    signal.signal(signal.SIGTERM, _stop)
    hardware = this_hardware()
    if hardware.cores < bench.threads:
        raise ConfigError(f"--threads {bench.threads}: this machine has {hardware.cores} cores")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: bench.threads])  # of this process and all that it starts
    asked = sequences_of(bench.load, bench.model.vocab)
    ready, failures, versions = _prepare(bench)
    turns: list[Turn] = []
    room = Room.for_requests(asked, bench.model, bench.threads)
    for number, name in bench.turns():
        if name not in ready:
            continue
        say(f"round {number + 1} of {bench.rounds}: {name}")
        try:
            turns.append(_turn(bench, number, name, room, asked))
        except TandemError as error:
            say(f"{name} failed: {error}")
            failures.append(Failure(engine=name, round=number, reason=_short(error)))
        else:
            say(f"    {turns[-1].output_tokens_per_s:.1f} tokens/s, ready after {turns[-1].start_s:.0f} s")
    outcome = CpuPeersOutcome(
        command=command,
        hardware=hardware,
        goals=list(judge(bench.names, turns)),
        shape=bench.shape,
        requests=len(asked),
        prompt_tokens=sum(len(each.prompt) for each in asked),
        answer_tokens=sum(each.answer_tokens for each in asked),
        threads=bench.threads,
        rounds=bench.rounds,
        engines=list(bench.names),
        versions=versions,
        turns=turns,
        failures=failures,
    )
    publish(outcome, report(outcome, markdown), bench.json)
    return 1 if failures else 0


def _stop(number: int, frame: FrameType | None) -> None:
    """Leave through every `finally`, which ends the engine that runs."""
    raise SystemExit(128 + number)


def _prepare(bench: CpuPeersBench) -> tuple[set[str], list[Failure], dict[str, str]]:
    """Install and convert everything before anything is measured: which engines are there, which are not, and what versions."""
    ready: set[str] = set()
    failures: list[Failure] = []
    versions: dict[str, str] = {}
    checkpoint(bench.model, bench.cache_folder)
    for name in bench.names:
        engine = ENGINES[name]
        try:
            if isinstance(engine, Peer):
                versions |= environment_of(engine.recipe, bench.cache_folder).versions
                engine.model(bench.model, bench.cache_folder)
        except (NotInstalled, NotConverted) as error:
            say(str(error))
            failures.append(Failure(engine=name, round=0, reason=_short(error)))
        else:
            ready.add(name)
    return ready, failures, versions


def _turn(bench: CpuPeersBench, number: int, name: str, room: Room, asked: Sequence[OfflineSequence]) -> Turn:
    """Raises TandemError."""
    began_s = time.perf_counter()
    with _running(bench, name, room) as engine:
        start_s = time.perf_counter() - began_s
        # Prompts that are not measured: some engines keep the KV of an earlier one.
        engine.ask([OfflineSequence(each.prompt[::-1][:WARM_UP_TOKENS], WARM_UP_TOKENS) for each in asked], bench.limit_s)
        engine.ask([OfflineSequence(asked[0].prompt[::-1], WARM_UP_TOKENS)], bench.limit_s)
        answers = engine.ask(asked, bench.limit_s)
        memory_gb = sum(map(_proportional_gb, below(engine.pid)))
    return Turn.of(name, number, answers, memory_gb, start_s)


@contextlib.contextmanager
def _running(bench: CpuPeersBench, name: str, room: Room) -> Iterator[Asking]:
    engine = ENGINES[name]
    if isinstance(engine, Tandem):
        flags = engine.command(checkpoint(bench.model, bench.cache_folder), room)
        with local_fleet(*flags) as fleet:
            yield OverHttp(fleet.url, fleet.pid)
        return
    environment = environment_of(engine.recipe, bench.cache_folder)
    start = engine.start(environment, engine.model(bench.model, bench.cache_folder), room, free_port(LOOPBACK))
    kind = _driver if start.port is None else _server
    with (bench.cache_folder / f"{name}.log").open("w", encoding="utf-8") as log, kind(name, start, log) as asking:
        yield asking


@contextlib.contextmanager
def _driver(name: str, start: Start, log: TextIO) -> Iterator[Asking]:
    driver = OverPipes(name, start.command, start.variables, log.write)
    try:
        driver.wait_ready(START_S)
        yield driver
    finally:
        stop_children([driver.child], STOP_S)


@contextlib.contextmanager
def _server(name: str, start: Start, log: TextIO) -> Iterator[Asking]:
    decoder = msgspec.json.Decoder[Progress](Progress)
    child: Child[Progress, Progress] = Child(name, start.command, decoder, _ignore, log.write, start.variables)
    url = f"http://127.0.0.1:{start.port}"
    try:
        until_s = time.monotonic() + START_S
        while not _is_healthy(url):
            if child.wait(LOOK_S) or time.monotonic() > until_s:
                raise EngineFailed(f"{name} did not start: {child.account()}")
        yield OverHttp(url, child.pid)
    finally:
        stop_children([child], STOP_S)


def _ignore(event: ChildEvent[Progress]) -> None:
    """A server reports nothing."""


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
