"""What a router adds to a request and to a token, and how many streams it carries: fleets with the timed executor under load.

Owns the flags of the fleets, the load generator and the figures. The generator reads of an answer only what it counts, because a
client that understands HTTP would cost more than the router does: tokens are words of the timed executor, each of which begins
with a space, and no other spaces are in an answer but one in each event. Run it as `python -m benchmarks.router`.
"""

import asyncio
import contextlib
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import AsyncResult, Pool
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec
import uvloop

from bench.report import BenchOutcome, Goal, say, this_hardware
from benchmarks.command import Invocation, start
from benchmarks.processes import below, command_of, cpu_s, resident_mb
from common.addresses import LOOPBACK
from common.config import DEMO_MODEL
from common.host import allow_many_files
from common.options import option, parse_numbers, require, require_at_least
from common.processes.local_fleet import FleetFailed, local_fleet

LOAD_S, PATIENCE_S = 600.0, 120.0
CONNECTING = 128
"""So many connections are made at once."""
KEPT_REASONS, REASON_BYTES = 3, 300
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
    tokens: int = 0
    events: int = 0
    cpu_s: float = 0.0
    """CPU time of the routers."""

    def since(self, then: "Counted") -> "Counted":
        return Counted(self.s - then.s, self.tokens - then.tokens, self.events - then.events, self.cpu_s - then.cpu_s)


@dataclass(slots=True)
class LoadResult:
    ttft_s: list[float] = field(default_factory=list)
    """From sending a request to its first token, for each."""
    failed: int = 0
    """Requests without a whole answer."""
    reasons: list[str] = field(default_factory=list)
    total: Counted = Counted()
    window: Counted = Counted()
    """From the first token of the last of `parallel` streams to the end of the first that ends; nothing when the first had ended
    before the last began."""
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
        return self.window if self.window.tokens else self.total


class LoadRun:
    """A load under way. Make it in the loop's thread."""

    def __init__(self, load: RouterLoad) -> None:
        self.load, self.result = load, LoadResult(before_mb=sum(map(resident_mb, load.pids)))
        params = {"model": DEMO_MODEL, "prompt": "Tell me more.", "stream": True, "ignore_eos": True, "max_tokens": load.tokens}
        body = json.dumps(params).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent = self.tokens = self.events = 0
        self._open = self._ended = 0
        self._all_open: Counted | None = None
        self._began, self._own_s = self._count(), time.process_time()

    def began(self, ttft_s: float) -> None:
        """A stream has got its first token."""
        result = self.result
        result.ttft_s.append(ttft_s)
        self._open += 1
        result.most_open = max(result.most_open, self._open)
        if len(result.ttft_s) == self.load.parallel and not self._ended:
            result.open_mb = sum(map(resident_mb, self.load.pids))
            self._all_open = self._count()
            result.opening_s = self._all_open.s - self._began.s

    def ended(self, begun: bool, failure: str) -> None:
        """A stream is over. failure: empty for a whole answer."""
        if self._all_open is not None:
            self.result.window, self._all_open = self._count().since(self._all_open), None
        self._open -= begun
        self._ended += 1
        if failure:
            self._fail(1, failure)
        if self._ended == self.load.requests and not self.over.done():
            self.over.set_result(None)

    def finish(self) -> LoadResult:
        missing = self.load.requests - self._ended
        if missing:
            self._fail(missing, f"{missing} answers were not over after {PATIENCE_S:g} s")
        self.result.total = self._count().since(self._began)
        self.result.own_cpu_s = time.process_time() - self._own_s
        return self.result

    def _fail(self, requests: int, reason: str) -> None:
        self.result.failed += requests
        if len(self.result.reasons) < KEPT_REASONS:
            self.result.reasons.append(reason)

    def _count(self) -> Counted:
        return Counted(time.perf_counter(), self.tokens, self.events, sum(map(cpu_s, self.load.pids)))


class LoadConnection(asyncio.Protocol):
    """One connection, and one request after another on it."""

    def __init__(self, run: LoadRun) -> None:
        self._run = run
        self._transport: asyncio.Transport
        self._sent_s = 0.0
        self._tokens = 0
        self._is_waiting = self._is_accepted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        if not self._is_waiting:
            return
        run, body = self._run, data
        if not self._is_accepted:
            head, _, body = data.partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                self._finish(data[:REASON_BYTES].decode(errors="replace"))
                return
            self._is_accepted = True
        events = body.count(b"data: ")
        tokens = body.count(b" ") - events
        if tokens and not self._tokens:
            run.began(time.perf_counter() - self._sent_s)
        self._tokens += tokens
        run.tokens += tokens
        run.events += events
        if data.endswith(b"0\r\n\r\n"):
            missing = run.load.tokens - self._tokens
            self._finish(f"{missing} tokens are missing" if missing else "")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_waiting:
            self._finish(f"the connection was lost: {exc!r}")

    def _send(self) -> None:
        run = self._run
        if run.sent == run.load.requests or self._transport.is_closing():
            self._transport.close()
            return
        run.sent += 1
        self._is_waiting, self._is_accepted, self._tokens = True, False, 0
        self._sent_s = time.perf_counter()
        self._transport.write(run.request)

    def _finish(self, failure: str) -> None:
        self._is_waiting = False
        self._run.ended(self._tokens > 0, failure)
        if failure:
            self._transport.close()
        else:
            self._send()


async def carry_out(load: RouterLoad) -> LoadResult:
    loop, url, run = asyncio.get_running_loop(), urlsplit(load.url), LoadRun(load)
    for first in range(0, load.parallel, CONNECTING):
        count = min(CONNECTING, load.parallel - first)
        connections = (
            loop.create_connection(lambda: LoadConnection(run), url.hostname or LOOPBACK, url.port or 80) for _ in range(count)
        )
        for connection in await asyncio.gather(*connections, return_exceptions=True):
            if isinstance(connection, BaseException):
                run.sent += 1
                run.ended(False, f"no connection: {connection!r}")
    await asyncio.wait((run.over,), timeout=PATIENCE_S)
    return run.finish()


def generate(load: RouterLoad) -> LoadResult:
    """The work of the load generator's process."""
    result: LoadResult = uvloop.run(carry_out(load))
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
    invocation.publish(outcome, settings, STEADY, [invocation.table(lines) for lines in tables(outcome)], bench.json)
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
    steady = result.steady
    return StreamRate(
        streams=streams,
        failed=result.failed,
        tokens_per_s=steady.tokens / steady.s,
        per_core_s=steady.tokens / steady.cpu_s,
        router_us=1e6 * steady.cpu_s / steady.tokens,
        tokens_per_event=steady.tokens / max(1, steady.events),
        detokenizer_us=1e6 * detokenizer_s / result.total.tokens,
        load_us=1e6 * result.own_cpu_s / result.total.tokens,
    )


def measure_open(bench: RouterBench) -> OpenStreams:
    say(f"{bench.open} streams open at once")
    flags = f"--decode={math.ceil(bench.open / MOST_ROWS)}", "--chunk-tokens=8192"
    with loaded_fleet(bench, f"{OPEN_STEP_S},0,0", bench.open, *flags) as fleet:
        fleet.send(4, 4, 2)
        return open_streams(fleet.send(bench.open, bench.open, int(bench.open_s / OPEN_STEP_S)), bench.open)


def open_streams(result: LoadResult, streams: int) -> OpenStreams:
    steady = result.steady
    return OpenStreams(
        streams=streams,
        most_open=result.most_open,
        failed=result.failed,
        reasons=tuple(result.reasons),
        kib_each=1024 * (result.open_mb - result.before_mb) / max(1, result.most_open),
        opened_per_s=streams / result.opening_s if result.opening_s else 0.0,
        tokens_per_s=steady.tokens / steady.s,
        router_us=1e6 * steady.cpu_s / steady.tokens,
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
