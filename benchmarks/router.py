"""What a router adds to a request and to a token, and how many streams it carries: fleets with the timed executor under load.

Owns the flags of the fleets, the phases of a load and the figures. `bench/client.py` is the client, in processes of its own, so
that its work does not count as the router's. Run it as `python -m benchmarks.router`.
"""

import asyncio
import contextlib
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import AsyncResult, Pool
from typing import Any, TypeAlias

import msgspec
import uvloop

from bench.client import USAGE_FIELDS, HttpClient, TimedAnswer
from bench.report import BenchOutcome, Goal, say, this_hardware
from benchmarks.command import Invocation, start
from benchmarks.processes import below, command_of, cpu_s, resident_mb
from common.config import DEMO_MODEL
from common.host import allow_many_files
from common.options import option, parse_numbers, require, require_at_least
from common.processes.local_fleet import FleetFailed, local_fleet

LOAD_S, PATIENCE_S = 600.0, 120.0
CONNECTING, CONNECT_S = 128, 0.02
"""So many connections are made at once, and then none for so long."""
LOOK_S = 0.02
"""How often the load generator looks whether all streams are open."""
KEPT_REASONS = 3
LONGEST_ANSWER = 2000
"""Tokens of one answer at most: prompt and answer must fit the demo model's context."""
REQUESTS_AT_ONCE = BESIDE = 64
BESIDE_STEP_S, OPEN_STEP_S = 0.01, 1.0
"""In which each of the streams beside, and each of those that are open at once, gets a token."""
LEAST_STEP_S = 0.0005
"""Steps that are shorter outrun the decode instance's own loop, and then tokens do not come one by one."""
MOST_ROWS = 4096
FLAGS = ("--executor=timed", "--transport=cma", "--dtype=bfloat16", "--log-level=warning")
SPAWN = multiprocessing.get_context("spawn")
STEADY = "CPU times per token and per request are affected least."
QUICK: dict[str, Any] = {"streams": "8", "rate": 2000.0, "seconds": 0.5, "requests": 40, "open": 0}


@dataclass(frozen=True, kw_only=True)
class RouterBench:
    """What is measured, and for how long."""

    streams: str = option("1,64,1024", "numbers of streams at once, one after the other")
    rate: float = option(
        20_000.0, "most tokens a second that the instances make for all streams together; a stream gets one in each step"
    )
    seconds: float = option(5.0, "about how long each number of streams lasts")
    requests: int = option(
        2000, "requests for the rate of requests; a quarter of them one by one, for the time to the first token"
    )
    open: int = option(10_000, "streams that are open at once, for the memory of each; 0: not measured")
    open_s: float = option(45.0, "about how long they are open; each gets a token a second")
    routers: int = option(1, "routers that share the port")
    json: str = option("", "write the figures to this file")

    def __post_init__(self) -> None:
        require(min(self.numbers) >= 1, "streams", "at least 1 each", self.streams)
        require_at_least(self, rate=1, seconds=0.1, requests=8, open=0, open_s=2, routers=1)

    @property
    def numbers(self) -> tuple[int, ...]:
        return parse_numbers(self.streams, "streams", int)


class FirstTokens(msgspec.Struct, frozen=True, kw_only=True):
    """What everything but the executor adds to the time to the first token, for requests that come one by one."""

    beside: int
    """So many other streams run meanwhile."""
    requests: int
    p50_ms: float
    p99_ms: float


class RequestRate(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one token."""

    requests: int
    parallel: int
    failed: int
    per_s: float
    per_core_s: float
    """As many as one core of the router would serve if it had nothing else to do."""
    router_ms: float


class StreamRate(msgspec.Struct, frozen=True, kw_only=True):
    """So many streams at once."""

    streams: int
    failed: int
    tokens_per_s: float
    per_core_s: float
    router_us: float
    """The CPU time of the router for a token; `per_core_s` is its inverse."""
    tokens_per_event: float
    """1 when each token was sent alone."""
    detokenizer_us: float
    load_us: float
    """The CPU time of the load generator for a token."""


class OpenStreams(msgspec.Struct, frozen=True, kw_only=True):
    """Streams that were open at once."""

    streams: int
    most_open: int
    failed: int
    reasons: tuple[str, ...]
    kib_each: float
    """Resident memory of the router for each."""
    opened_per_s: float
    """From the first connection until all are open; 0 when they never were."""
    tokens_per_s: float
    router_us: float


class RouterOutcome(BenchOutcome, frozen=True, kw_only=True):
    """All that is known at the end."""

    routers: int
    first_token: list[FirstTokens]
    requests: RequestRate
    streams: list[StreamRate]
    open: OpenStreams | None


# --- the load ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """So many requests, each for an answer of `tokens` tokens as a stream."""

    url: str
    requests: int
    parallel: int
    tokens: int
    pids: tuple[int, ...]
    """The processes of the routers."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What was counted in a part of the time."""

    s: float = 0.0
    events: int = 0
    """Those with tokens."""
    cpu_s: float = 0.0
    """CPU time of the routers."""

    def since(self, then: "Counted") -> "Counted":
        return Counted(self.s - then.s, self.events - then.events, self.cpu_s - then.cpu_s)


@dataclass(slots=True)
class LoadResult:
    """What came of a load."""

    ttft_s: list[float] = field(default_factory=list)
    """From sending a request to its first token, for each."""
    failed: int = 0
    """Requests without a whole answer."""
    reasons: list[str] = field(default_factory=list)
    tokens_per_event: float = 1.0
    total: Counted = Counted()
    window: Counted = Counted()
    """The time in which all `parallel` streams were open; nothing when the first had ended before the last began."""
    own_cpu_s: float = 0.0
    """CPU time of the load generator."""
    opening_s: float = 0.0
    """From before the first connection is made to the first token of the last of `parallel` streams; 0 as for `window`."""
    most_open: int = 0
    """Streams that had begun and not ended, at once."""
    before_mb: float = 0.0
    open_mb: float = 0.0
    """Resident memory of the routers when the last of `parallel` streams had begun."""

    @property
    def steady(self) -> Counted:
        """The time when all streams are open, where there is one; else all of it."""
        return self.window if self.window.events else self.total


class LoadRun:
    """A load under way. The server says at the end how many tokens an answer has: to count them in each event would be more work
    for the router than is usual."""

    def __init__(self, load: RouterLoad) -> None:
        self._load, self._result = load, LoadResult(before_mb=sum(map(resident_mb, load.pids)))
        params = {"model": DEMO_MODEL, "prompt": "Tell me more.", "stream": True, "ignore_eos": True, "max_tokens": load.tokens}
        self._body = msgspec.json.encode(params | USAGE_FIELDS["last"])
        self._left = iter(range(load.requests))
        self._answers: list[TimedAnswer] = []

    async def carry_out(self) -> LoadResult:
        load, result = self._load, self._result
        client = HttpClient(load.url, "/v1/completions", {}, PATIENCE_S)
        began, own_s = self._count(), time.process_time()
        watch = asyncio.create_task(self._watch(began))
        async with asyncio.TaskGroup() as group:
            for number in range(load.parallel):
                group.create_task(self._ask_one_after_the_other(client))
                if number % CONNECTING == CONNECTING - 1:
                    await asyncio.sleep(CONNECT_S)
        watch.cancel()
        client.close()
        result.total, result.own_cpu_s = self._count().since(began), time.process_time() - own_s
        result.ttft_s = [answer.ttft_s for answer in self._answers if answer.counted]
        result.tokens_per_event = sum(answer.output_tokens for answer in self._answers) / max(1, result.total.events)
        return result

    async def _ask_one_after_the_other(self, client: HttpClient) -> None:
        for _ in self._left:
            answer = TimedAnswer(0.0, self._load.tokens)
            self._answers.append(answer)
            answer.begin(time.perf_counter())
            await client.ask(answer, self._body)
            missing = self._load.tokens - answer.output_tokens
            if answer.error or missing:
                self._result.failed += 1
                reason = answer.message or f"{missing} tokens are missing"
                self._result.reasons = [*self._result.reasons, reason][:KEPT_REASONS]

    async def _watch(self, began: Counted) -> None:
        """Find the time in which all streams are open."""
        load, result = self._load, self._result
        all_open: Counted | None = None
        while True:
            await asyncio.sleep(LOOK_S)
            now_open = sum(1 for answer in self._answers if answer.counted and not answer.ended_s)
            result.most_open = max(result.most_open, now_open)
            if now_open == load.parallel:
                now = self._count()
                if all_open is None:
                    all_open, result.opening_s = now, now.s - began.s
                    result.open_mb = sum(map(resident_mb, load.pids))
                result.window = now.since(all_open)

    def _count(self) -> Counted:
        events = sum(answer.counted for answer in self._answers)
        return Counted(time.perf_counter(), events, sum(map(cpu_s, self._load.pids)))


def generate(load: RouterLoad) -> LoadResult:
    """The work of the load generator's process."""
    result: LoadResult = uvloop.run(LoadRun(load).carry_out())
    return result


# --- what is measured --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadedFleet:
    """A running fleet, and load generators before it, each in a process of its own."""

    url: str
    pids: tuple[int, ...]
    """The processes of its routers."""
    detokenizers: tuple[int, ...]
    generators: Pool

    def begin(self, requests: int, parallel: int, tokens: int) -> "AsyncResult[LoadResult]":
        return self.generators.apply_async(generate, (RouterLoad(self.url, requests, parallel, tokens, self.pids),))

    def send(self, requests: int, parallel: int, tokens: int) -> LoadResult:
        return ended(self.begin(requests, parallel, tokens))


def ended(load: "AsyncResult[LoadResult]") -> LoadResult:
    """Raises FleetFailed when no request had an answer."""
    result = load.get(LOAD_S)
    if not result.ttft_s:
        raise FleetFailed(f"the load came to nothing: {'; '.join(result.reasons)}")
    for reason in result.reasons:
        say(f"failed: {reason}")
    return result


@contextlib.contextmanager
def loaded_fleet(bench: RouterBench, cost: str, streams: int = 256, *flags: str) -> Iterator[LoadedFleet]:
    """cost: of each step, as --step-cost takes it. streams: as many as may be open. Raises FleetFailed."""
    own = (
        f"--step-cost={cost}",
        f"--max-running={min(MOST_ROWS, max(REQUESTS_AT_ONCE, streams))}",
        f"--max-waiting={2 * max(streams, 1024)}",
        f"--max-requests={2 * max(streams, 1024)}",
        f"--routers={bench.routers}",
    )
    with local_fleet(*FLAGS, *own, *flags) as fleet, SPAWN.Pool(2, allow_many_files) as generators:
        commands = {pid: command_of(pid) for pid in below(fleet.pid)}
        routers, detokenizers = (
            tuple(pid for pid, words in commands.items() if role in words) for role in ("router", "detokenizer")
        )
        if len(routers) != bench.routers:
            raise FleetFailed(f"{len(routers)} processes of this fleet are routers, not {bench.routers}")
        yield LoadedFleet(fleet.url, routers, detokenizers, generators)


def run(invocation: Invocation) -> int:
    """Returns the exit status: 0 also when a goal is not met. Raises FleetFailed."""
    bench, hardware = invocation.config(RouterBench, QUICK), this_hardware()
    first_token, requests = measure_requests(bench)
    streams = [measure_streams(bench, number) for number in bench.numbers]
    opened = measure_open(bench) if bench.open else None
    outcome = RouterOutcome(
        command=invocation.command,
        hardware=hardware,
        goals=list(goals(first_token[0], requests, streams, opened)),
        routers=bench.routers,
        first_token=first_token,
        requests=requests,
        streams=streams,
        open=opened,
    )
    settings = f"{bench.routers} router{'s' * (bench.routers > 1)}, instances without a model, all processes on these cores"
    invocation.publish(outcome, settings, STEADY, [invocation.style.table(lines) for lines in tables(outcome)], bench.json)
    return 0


def measure_requests(bench: RouterBench) -> tuple[list[FirstTokens], RequestRate]:
    """Prompts take no time, so all that the first token takes is added to the executor's time."""
    few = max(4, bench.requests // 4)
    say(f"requests: one by one, many at once, and beside {BESIDE} streams")
    with loaded_fleet(bench, f"0,0,{BESIDE_STEP_S / BESIDE}") as fleet:
        fleet.send(20, 4, 8)  # what is made at the first use is made
        alone = first_tokens(fleet.send(few, 1, 1), 0)
        many = fleet.send(bench.requests, REQUESTS_AT_ONCE, 1)
        others = fleet.begin(BESIDE, BESIDE, min(LONGEST_ANSWER, 4 * few))
        beside = first_tokens(fleet.send(few, 1, 1), BESIDE)
        ended(others)
    done, used_s = len(many.ttft_s), many.total.cpu_s
    requests = RequestRate(
        requests=done,
        parallel=REQUESTS_AT_ONCE,
        failed=many.failed,
        per_s=done / many.total.s,
        per_core_s=done / used_s,
        router_ms=1e3 * used_s / done,
    )
    return [alone, beside], requests


def first_tokens(result: LoadResult, beside: int) -> FirstTokens:
    ordered = sorted(1e3 * each for each in result.ttft_s)
    p50_ms, p99_ms = ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))]
    return FirstTokens(beside=beside, requests=len(ordered), p50_ms=p50_ms, p99_ms=p99_ms)


def measure_streams(bench: RouterBench, streams: int) -> StreamRate:
    say(f"{streams} streams")
    tokens = max(2, min(LONGEST_ANSWER, int(bench.rate * bench.seconds / streams)))
    with loaded_fleet(bench, f"{max(LEAST_STEP_S, streams / bench.rate)},0,0", streams) as fleet:
        fleet.send(20, 4, 8)
        before_s = sum(map(cpu_s, fleet.detokenizers))
        result = fleet.send(streams, streams, tokens)
        detokenizer_s = sum(map(cpu_s, fleet.detokenizers)) - before_s
    steady, all_tokens = result.steady, result.tokens_per_event * result.total.events
    steady_tokens = result.tokens_per_event * steady.events
    return StreamRate(
        streams=streams,
        failed=result.failed,
        tokens_per_s=steady_tokens / steady.s,
        per_core_s=steady_tokens / steady.cpu_s,
        router_us=1e6 * steady.cpu_s / steady_tokens,
        tokens_per_event=result.tokens_per_event,
        detokenizer_us=1e6 * detokenizer_s / all_tokens,
        load_us=1e6 * result.own_cpu_s / all_tokens,
    )


def measure_open(bench: RouterBench) -> OpenStreams:
    say(f"{bench.open} streams open at once")
    flags = f"--decode={math.ceil(bench.open / MOST_ROWS)}", "--chunk-tokens=8192"
    with loaded_fleet(bench, f"{OPEN_STEP_S},0,0", bench.open, *flags) as fleet:
        fleet.send(4, 4, 2)
        result = fleet.send(bench.open, bench.open, int(bench.open_s / OPEN_STEP_S))
    steady = result.steady
    steady_tokens = result.tokens_per_event * steady.events
    return OpenStreams(
        streams=bench.open,
        most_open=result.most_open,
        failed=result.failed,
        reasons=tuple(result.reasons),
        kib_each=1024 * (result.open_mb - result.before_mb) / max(1, result.most_open),
        opened_per_s=bench.open / result.opening_s if result.opening_s else 0.0,
        tokens_per_s=steady_tokens / steady.s,
        router_us=1e6 * steady.cpu_s / steady_tokens,
    )


def goals(alone: FirstTokens, requests: RequestRate, streams: Sequence[StreamRate], opened: OpenStreams | None) -> Iterator[Goal]:
    """The goals for one router process on one core. alone: beside no other streams."""
    for name, value in (("median", alone.p50_ms), ("99th percentile", alone.p99_ms)):
        yield Goal(rule=f"added time to the first token, {name}: under 3 ms", met=value < 3, figure=f"{value:.2f} ms")
    figure = f"{requests.per_core_s:,.0f}/s of a core; {requests.per_s:,.0f}/s on this machine"
    yield Goal(rule="requests: 1,000/s", met=requests.per_core_s >= 1000, figure=figure)
    for each in streams:
        if each.streams > 1:
            figure = f"{each.per_core_s:,.0f}/s of a core; {each.tokens_per_s:,.0f}/s on this machine"
            yield Goal(rule=f"tokens, {each.streams:,} streams: 50,000/s", met=each.per_core_s >= 50_000, figure=figure)
    if opened is not None:
        met = opened.most_open >= 10_000 and not opened.failed
        figure = f"{opened.most_open:,} open, {opened.failed} failed"
        yield Goal(rule="10,000 streams open at once without a failure", met=met, figure=figure)


Lines: TypeAlias = list[tuple[str, ...]]


def tables(outcome: RouterOutcome) -> Iterator[Lines]:
    """Each begins with its heads."""
    head: tuple[str, ...] = ("other streams", "requests", "added to the first token, ms: median", "99th percentile")
    yield [head, *((f"{at.beside}", f"{at.requests}", f"{at.p50_ms:.2f}", f"{at.p99_ms:.2f}") for at in outcome.first_token)]
    of = outcome.requests
    head = ("requests", "at once", "failed", "requests/s", "router, ms of CPU each", "1/that")
    rates = f"{of.per_s:,.0f}", f"{of.router_ms:.3f}", f"{of.per_core_s:,.0f}"
    yield [head, (f"{of.requests:,}", f"{of.parallel}", f"{of.failed}", *rates)]
    head = ("streams", "failed", "tokens/s", "tokens in an event", "router, us of CPU a token", "1/that")
    lines: Lines = [(*head, "detokenizer, us a token", "load generator, us a token")]
    for each in outcome.streams:
        rates = f"{each.tokens_per_s:,.0f}", f"{each.tokens_per_event:.2f}", f"{each.router_us:.1f}"
        others = f"{each.per_core_s:,.0f}", f"{each.detokenizer_us:.1f}", f"{each.load_us:.1f}"
        lines.append((f"{each.streams:,}", f"{each.failed}", *rates, *others))
    yield lines
    if outcome.open is not None:
        opened = outcome.open
        head = ("streams", "open at once", "failed", "opened/s", "router, KiB each", "tokens/s", "router, us of CPU a token")
        rates = f"{opened.opened_per_s:,.0f}", f"{opened.kib_each:.0f}", f"{opened.tokens_per_s:,.0f}"
        counts = f"{opened.streams:,}", f"{opened.most_open:,}", f"{opened.failed}"
        yield [head, (*counts, *rates, f"{opened.router_us:.1f}")]


def main(arguments: Sequence[str] | None = None) -> int:
    explanation = "Measure what a router adds to requests and tokens, and how many streams it carries."
    return start("router", explanation, run, RouterBench, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
