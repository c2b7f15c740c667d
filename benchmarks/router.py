"""What a router adds to a request and to a token, and how many streams it carries: fleets with the timed executor under load.

Owns the flags of the fleets, the phases, and what is made of a load's answers and of the CPU time of the routers meanwhile. The
load is that of `launch bench serve`, sent by processes of its own, so that its work does not count as the router's. Run it as
`python -m benchmarks.router`.
"""

import contextlib
import math
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult, Pool
from typing import Any, TypeAlias

import msgspec
import numpy as np

from bench.client import USAGE_FIELDS, TimedAnswer
from bench.options import LoadOptions, ServeOptions, TargetOptions, WorkloadOptions
from bench.report import Goal, say
from bench.serve import MeasuredLoad, measure
from benchmarks.command import Invocation, start
from benchmarks.processes import below, command_of, cpu_s, resident_mb
from common.config import DEMO_MODEL
from common.host import allow_many_files
from common.options import option, parse_numbers, require, require_at_least
from common.processes.local_fleet import FleetFailed, local_fleet

LOAD_S = 600.0
CONNECTIONS_PER_S = 6400.0
"""As fast as connections are made."""
LOOK_S = 0.02
"""How often the CPU time and the memory of the routers are looked at."""
PROMPT_TOKENS = 4
KEPT_REASONS = 3
LONGEST_ANSWER = 2000
"""Tokens of one answer at most: prompt and answer must fit the demo model's context."""
REQUESTS_AT_ONCE = BESIDE = 64
OTHERS_S = 3.0
"""Within this time the streams beside have begun."""
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
    """So many streams at once. Rates and CPU times of the router are of the time when all are open, where there is one."""

    streams: int
    most_open: int
    """Streams that had begun and not ended, at once."""
    failed: int
    opened_per_s: float
    """From the first connection until all are open; 0 when they never were."""
    tokens_per_s: float
    per_core_s: float
    router_us: float
    """The CPU time of the router for a token; `per_core_s` is its inverse."""
    tokens_per_event: float
    """1 when each token was sent alone."""
    kib_each: float
    """What the resident memory of the router has grown by, for each."""
    detokenizer_us: float
    load_us: float
    """The CPU time of the load generator for a token."""


# --- the load ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadedFleet:
    """A running fleet, and load generators before it, each in a process of its own."""

    url: str
    pids: tuple[int, ...]
    """The processes of its routers."""
    detokenizers: tuple[int, ...]
    generators: Pool

    def begin(self, requests: int, parallel: int, tokens: int) -> "AsyncResult[MeasuredLoad]":
        """So many requests, each for a stream of `tokens` tokens. The server says at the end how many tokens an answer has: to
        count them in each event would be more work for the router than is usual."""
        is_even = parallel == requests > 1
        load = ServeOptions(
            target=TargetOptions(base_url=self.url, model=DEMO_MODEL),
            workload=WorkloadOptions(num_prompts=requests, random_input_len=PROMPT_TOKENS, random_output_len=tokens),
            load=LoadOptions(
                max_concurrency=parallel,
                extra_body=msgspec.json.encode(USAGE_FIELDS["last"]).decode(),
                request_rate=CONNECTIONS_PER_S if is_even else math.inf,
                burstiness=math.inf if is_even else 1.0,
            ),
        )
        return self.generators.apply_async(measure, (load,))

    def send(self, requests: int, parallel: int, tokens: int) -> "WatchedLoad":
        """Send them and watch the routers until all is answered. Raises FleetFailed when no request had an answer."""
        load = self.begin(requests, parallel, tokens)
        looks: list[tuple[float, float, float]] = []
        while not load.ready():
            load.wait(LOOK_S)
            looks.append((time.perf_counter(), sum(map(cpu_s, self.pids)), sum(map(resident_mb, self.pids))))
        return WatchedLoad(ended(load), looks, parallel)


def ended(load: "AsyncResult[MeasuredLoad]") -> MeasuredLoad:
    """Raises FleetFailed when no request had an answer."""
    measured = load.get(LOAD_S)
    reasons = Counter(answer.message for answer in measured.answers if answer.error)
    if not measured.figures["completed"]:
        raise FleetFailed(f"the load came to nothing: {'; '.join(reasons)}")
    for reason, count in reasons.most_common(KEPT_REASONS):
        say(f"{count} failed: {reason}")
    return measured


class WatchedLoad:
    """What came of a load, and of the routers meanwhile. Clocks of all processes of a machine are one clock.

    looks: [looks, 3]: when the routers were looked at, their CPU time, and their resident memory in MiB.
    """

    def __init__(self, load: MeasuredLoad, looks: Sequence[tuple[float, float, float]], parallel: int) -> None:
        self.load, self.parallel = load, parallel
        self.whole = [answer for answer in load.answers if not answer.error and answer.output_tokens >= answer.requested_tokens]
        self.failed = len(load.answers) - len(self.whole)
        self.tokens = sum(answer.output_tokens for answer in self.whole)
        self.tokens_per_event = self.tokens / max(1, sum(answer.counted for answer in self.whole))
        self._at_s, self._cpu_s, self._mb = np.array(looks).T

    def router_s(self, begin_s: float, end_s: float) -> float:
        """The CPU time of the routers meanwhile."""
        begin, end = np.interp((begin_s, end_s), self._at_s, self._cpu_s)
        return float(end - begin)

    def grown_mb(self) -> float:
        """The most that the memory of the routers has grown by."""
        return float(self._mb.max() - self._mb[0])

    def all_s(self) -> tuple[float, float]:
        """From the beginning to the end of the load."""
        return self.load.began_s, self.load.began_s + self.load.figures["duration"]

    def all_open_s(self) -> tuple[float, float] | None:
        """The time in which all `parallel` streams are open; None when the first has ended before the last begins."""
        begin = max((answer.first_s for answer in self.whole), default=0.0)
        end = min((answer.last_s for answer in self.whole), default=0.0)
        return (begin, end) if begin < end and len(self.whole) == self.parallel else None

    def tokens_in(self, begin_s: float, end_s: float) -> float:
        """Tokens that came in this time."""
        counts = [_events_in(answer, begin_s, end_s) for answer in self.whole]
        return self.tokens_per_event * sum(counts)

    def first_tokens(self, beside: int) -> FirstTokens:
        p50_ms, p99_ms = np.percentile([1e3 * answer.ttft_s for answer in self.whole], (50, 99)).tolist()
        return FirstTokens(beside=beside, requests=len(self.whole), p50_ms=p50_ms, p99_ms=p99_ms)

    def rate(self, detokenizer_s: float) -> StreamRate:
        """The figures of streams that began at once. detokenizer_s: the CPU time of the detokenizers."""
        open_s, began_s = self.all_open_s(), self.load.began_s
        begin_s, end_s = open_s or self.all_s()
        tokens, used_s = self.tokens_in(begin_s, end_s), self.router_s(begin_s, end_s)
        most_open = self.load.figures["max_concurrent_requests"]
        return StreamRate(
            streams=self.parallel,
            most_open=most_open,
            failed=self.failed,
            opened_per_s=0.0 if open_s is None else self.parallel / (begin_s - began_s),
            tokens_per_s=tokens / (end_s - begin_s),
            per_core_s=tokens / used_s,
            router_us=1e6 * used_s / tokens,
            tokens_per_event=self.tokens_per_event,
            kib_each=1024 * self.grown_mb() / max(1, most_open),
            detokenizer_us=1e6 * detokenizer_s / self.tokens,
            load_us=1e6 * self.load.cpu_s / self.tokens,
        )


def _events_in(answer: TimedAnswer, begin_s: float, end_s: float) -> int:
    at_s = answer.first_s + np.cumsum([0.0, *answer.gaps_s])
    return int(((at_s > begin_s) & (at_s <= end_s)).sum())


# --- what is measured --------------------------------------------------------------------------------------------------------


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
    bench = invocation.config(RouterBench, QUICK)
    first_token, requests = measure_requests(bench)
    streams = [measure_streams(bench, number) for number in bench.numbers]
    opened = [measure_open(bench)] if bench.open else []
    settings = f"{bench.routers} router{'s' * (bench.routers > 1)}, instances without a model, all processes on these cores"
    invocation.publish(
        settings,
        STEADY,
        [invocation.style.table(lines) for lines in tables(first_token, requests, [*streams, *opened])],
        goals(first_token[0], requests, streams, opened),
        first_token=first_token,
        requests=requests,
        streams=streams,
        open=opened,
    )
    return 0


def measure_requests(bench: RouterBench) -> tuple[list[FirstTokens], RequestRate]:
    """Prompts take no time, so all that the first token takes is added to the executor's time."""
    few = max(4, bench.requests // 4)
    say(f"requests: one by one, many at once, and beside {BESIDE} streams")
    with loaded_fleet(bench, f"0,0,{BESIDE_STEP_S / BESIDE}") as fleet:
        fleet.send(20, 4, 8)  # what is made at the first use is made
        alone = fleet.send(few, 1, 1).first_tokens(0)
        many = fleet.send(bench.requests, REQUESTS_AT_ONCE, 1)
        others = fleet.begin(BESIDE, BESIDE, min(LONGEST_ANSWER, 4 * few + int(OTHERS_S / BESIDE_STEP_S)))
        time.sleep(OTHERS_S)
        beside = fleet.send(few, 1, 1).first_tokens(BESIDE)
        ended(others)
    done, used_s = len(many.whole), many.router_s(*many.all_s())
    requests = RequestRate(
        requests=done,
        parallel=REQUESTS_AT_ONCE,
        failed=many.failed,
        per_s=done / many.load.figures["duration"],
        per_core_s=done / used_s,
        router_ms=1e3 * used_s / done,
    )
    return [alone, beside], requests


def measure_streams(bench: RouterBench, streams: int) -> StreamRate:
    tokens = max(2, min(LONGEST_ANSWER, int(bench.rate * bench.seconds / streams)))
    return _measure(bench, f"{max(LEAST_STEP_S, streams / bench.rate)},0,0", streams, tokens)


def measure_open(bench: RouterBench) -> StreamRate:
    flags = f"--decode={math.ceil(bench.open / MOST_ROWS)}", "--chunk-tokens=8192"
    return _measure(bench, f"{OPEN_STEP_S},0,0", bench.open, int(bench.open_s / OPEN_STEP_S), *flags)


def _measure(bench: RouterBench, cost: str, streams: int, tokens: int, *flags: str) -> StreamRate:
    say(f"{streams} streams at once")
    with loaded_fleet(bench, cost, streams, *flags) as fleet:
        fleet.send(4, 4, 2)
        before_s = sum(map(cpu_s, fleet.detokenizers))
        watched = fleet.send(streams, streams, tokens)
        return watched.rate(sum(map(cpu_s, fleet.detokenizers)) - before_s)


def goals(
    alone: FirstTokens, requests: RequestRate, streams: Sequence[StreamRate], opened: Sequence[StreamRate]
) -> Iterator[Goal]:
    """The goals for one router process on one core. alone: beside no other streams."""
    for name, value in (("median", alone.p50_ms), ("99th percentile", alone.p99_ms)):
        yield Goal.of(f"added time to the first token, {name}: under 3 ms", value, ".2f", most=3, unit=" ms")
    here = f"/s of a core; {requests.per_s:,.0f}/s on this machine"
    yield Goal.of("requests: 1,000/s", requests.per_core_s, ",.0f", least=1000, unit=here)
    for each in streams:
        if each.streams > 1:
            here = f"/s of a core; {each.tokens_per_s:,.0f}/s on this machine"
            yield Goal.of(f"tokens, {each.streams:,} streams: 50,000/s", each.per_core_s, ",.0f", least=50_000, unit=here)
    for each in opened:
        met = each.most_open >= 10_000 and not each.failed
        figure = f"{each.most_open:,} open, {each.failed} failed"
        yield Goal(rule="10,000 streams open at once without a failure", met=met, figure=figure)


Lines: TypeAlias = list[tuple[str, ...]]
STREAM_COLUMNS = {
    "streams": ("streams", ","),
    "open at once": ("most_open", ","),
    "failed": ("failed", ""),
    "opened/s": ("opened_per_s", ",.0f"),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "tokens in an event": ("tokens_per_event", ".2f"),
    "router, us of CPU a token": ("router_us", ".1f"),
    "1/that": ("per_core_s", ",.0f"),
    "router, KiB each": ("kib_each", ".0f"),
    "detokenizer, us a token": ("detokenizer_us", ".1f"),
    "load generator, us a token": ("load_us", ".1f"),
}
"""The figure of each column, and its format."""


def tables(first_token: Sequence[FirstTokens], of: RequestRate, streams: Sequence[StreamRate]) -> Iterator[Lines]:
    """Each begins with its heads."""
    head: tuple[str, ...] = ("other streams", "requests", "added to the first token, ms: median", "99th percentile")
    yield [head, *((f"{at.beside}", f"{at.requests}", f"{at.p50_ms:.2f}", f"{at.p99_ms:.2f}") for at in first_token)]
    head = ("requests", "at once", "failed", "requests/s", "router, ms of CPU each", "1/that")
    rates = f"{of.per_s:,.0f}", f"{of.router_ms:.3f}", f"{of.per_core_s:,.0f}"
    yield [head, (f"{of.requests:,}", f"{of.parallel}", f"{of.failed}", *rates)]
    rows = [msgspec.structs.asdict(each) for each in streams]
    lines = (tuple(format(row[name], form) for name, form in STREAM_COLUMNS.values()) for row in rows)
    yield [tuple(STREAM_COLUMNS), *lines]


def main(arguments: Sequence[str] | None = None) -> int:
    explanation = "Measure what a router adds to requests and tokens, and how many streams it carries."
    return start("router", explanation, run, RouterBench, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
