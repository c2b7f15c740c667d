"""What a fleet's processes spend on a request and on a token beside the computing, and how many streams a router carries: fleets
with the timed executor under load.

Owns the flags of the fleets, the phases, and what is made of a load's answers and of the CPU time of the processes meanwhile. The
load is that of `launch bench serve`, sent by processes of its own, so that its work does not count. Run it as `python -m
benchmarks.router`.
"""

import contextlib
import math
import multiprocessing
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult, Pool
from typing import Annotated, Any

import msgspec
import numpy as np

from bench.client import USAGE_FIELDS, TimedAnswer
from bench.options import LoadOptions, ServeOptions, TargetOptions, WorkloadOptions
from bench.report import Column, Goal, say, table_of
from bench.serve import MeasuredLoad, measure
from benchmarks.command import Invocation, below, command_of, cpu_s, resident_mb, start
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
KINDS = ("router", "detokenizer", "leader", "follower")
"""Processes that are told apart: routers, detokenizers, the first ranks of decode instances, and their others."""
GENERATORS = multiprocessing.get_context("forkserver")
"""Makes the processes of a load, each forked from one that has loaded what they run."""
GENERATORS.set_forkserver_preload(["bench.serve"])
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
    tp: int = option(1, "ranks of each instance, each a process")
    more: str = option("", "further flags of the fleets, such as '--access-log on'")
    rest_s: float = option(0.0, "seconds after a load whose CPU time counts for its requests too: spans are made after them")

    def __post_init__(self) -> None:
        require(min(self.numbers) >= 1, "streams", "at least 1 each", self.streams)
        require_at_least(self, rate=1, seconds=0.1, requests=8, open=0, open_s=2, routers=1, tp=1, rest_s=0)

    @property
    def numbers(self) -> tuple[int, ...]:
        return parse_numbers(self.streams, "streams", int)


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a load took. Rates of tokens and their CPU times are of the time when all streams are open, where there is one."""

    load: Annotated[str, Column("load")]
    streams: Annotated[int, Column("streams", ",")]
    """Streams at once."""
    requests: Annotated[int, Column("requests", ",")]
    """Those with a whole answer."""
    failed: Annotated[int, Column("failed")]
    most_open: int
    """Streams that had begun and not ended, at once."""
    ttft_p50_ms: Annotated[float, Column("first token, ms: p50", ".2f")]
    ttft_p99_ms: Annotated[float, Column("p99", ".2f")]
    requests_per_s: Annotated[float, Column("requests/s", ",.0f")]
    router_ms: Annotated[float, Column("router, ms of CPU each", ".3f")]
    """The CPU time of the routers for a request with all its tokens."""
    tokens_per_s: Annotated[float, Column("tokens/s", ",.0f")]
    tokens_per_event: Annotated[float, Column("in an event", ".2f")]
    """1 when each token was sent alone."""
    router_us: Annotated[float, Column("router, us of CPU a token", ".1f")]
    """The CPU time of the routers for a token."""
    opened_per_s: Annotated[float, Column("opened/s", ",.0f")]
    """From the first connection until all are open; 0 when they never were."""
    kib_each: Annotated[float, Column("KiB each", ".0f")]
    """What the resident memory of the routers has grown by, for each stream."""
    detokenizer_us: Annotated[float, Column("detokenizer, us a token", ".1f")]
    load_us: Annotated[float, Column("load generator, us", ".1f")]
    """The CPU time of the load generator for a token."""
    leader_us: Annotated[float | None, Column("decode instance, us of CPU a step", ",.0f")]
    """The CPU time of a decode instance, or of its first rank, for a step that gives each stream a token. None when the streams
    were never all open."""
    follower_us: Annotated[float | None, Column("each other rank, us", ",.0f")]
    """The same of each further rank."""


# --- the load ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadedFleet:
    """A running fleet, and load generators before it, each in a process of its own."""

    url: str
    pids: Mapping[str, Sequence[int]]
    """The processes of each of KINDS."""
    generators: Pool
    rest_s: float = 0.0

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
        """Send them and watch the fleet until all is answered. Raises FleetFailed when no request had an answer."""
        looks, load = [self._look()], self.begin(requests, parallel, tokens)
        while not load.ready():
            load.wait(LOOK_S)
            looks.append(self._look())
        time.sleep(self.rest_s)
        looks.append(self._look())
        return WatchedLoad(ended(load), looks, parallel, self.rest_s)

    def _look(self) -> tuple[float, ...]:
        """The time, the resident memory of the routers in MiB, and the CPU time of each of KINDS: of all its processes, and for
        ranks their mean."""
        spent_s = {kind: sum(map(cpu_s, pids)) for kind, pids in self.pids.items()}
        means = {kind: spent_s[kind] / max(1, len(self.pids[kind])) for kind in ("leader", "follower")}
        return (time.perf_counter(), sum(map(resident_mb, self.pids["router"])), *(spent_s | means).values())


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
    """What came of a load, and of the fleet meanwhile. Clocks of all processes of a machine are one clock.

    looks: [looks, 2 + KINDS], as `LoadedFleet` makes them.
    """

    def __init__(self, load: MeasuredLoad, looks: Sequence[tuple[float, ...]], parallel: int, rest_s: float = 0.0) -> None:
        self.load, self.parallel, self._rest_s = load, parallel, rest_s
        self.whole = [answer for answer in load.answers if not answer.error and answer.output_tokens >= answer.requested_tokens]
        self._at_s, self._mb, *spent_s = np.array(looks).T
        self._spent_s = dict(zip(KINDS, spent_s, strict=True))

    def spent_s(self, kind: str, between: tuple[float, float]) -> float:
        """The CPU time of this kind meanwhile."""
        begin, end = np.interp(between, self._at_s, self._spent_s[kind])
        return float(end - begin)

    def all_open_s(self) -> tuple[float, float] | None:
        """The time in which all `parallel` streams are open; None when the first has ended before the last begins."""
        begin = max((answer.first_s for answer in self.whole), default=0.0)
        end = min((answer.last_s for answer in self.whole), default=0.0)
        return (begin, end) if begin < end and len(self.whole) == self.parallel else None

    def figures(self, name: str) -> LoadFigures:
        """name: what the load is called. Raises FleetFailed when no answer is whole."""
        counted, whole, open_s = self.load.figures, self.whole, self.all_open_s()
        if not whole:
            short = sum(not answer.error for answer in self.load.answers)
            raise FleetFailed(f"the load came to nothing: {short} of {len(self.load.answers)} answers ended too short")
        all_s = self.load.began_s, self.load.began_s + counted["duration"]
        begin_s, end_s = counted_s = open_s or all_s
        tokens = sum(answer.output_tokens for answer in whole)
        per_event = tokens / max(1, sum(answer.counted for answer in whole))
        tokens_then = per_event * sum(_events_in(answer, begin_s, end_s) for answer in whole)
        steps = tokens_then / self.parallel if open_s else 0.0
        leader_us, follower_us = (
            1e6 * self.spent_s(kind, counted_s) / steps if steps else None for kind in ("leader", "follower")
        )
        p50_ms, p99_ms = np.percentile([1e3 * answer.ttft_s for answer in whole], (50, 99)).tolist()
        return LoadFigures(
            load=name,
            streams=self.parallel,
            requests=len(whole),
            failed=len(self.load.answers) - len(whole),
            most_open=counted["max_concurrent_requests"],
            ttft_p50_ms=p50_ms,
            ttft_p99_ms=p99_ms,
            requests_per_s=len(whole) / counted["duration"],
            router_ms=1e3 * self.spent_s("router", (all_s[0], all_s[1] + self._rest_s)) / len(whole),
            tokens_per_s=tokens_then / (end_s - begin_s),
            router_us=1e6 * self.spent_s("router", counted_s) / max(1.0, tokens_then),
            tokens_per_event=per_event,
            opened_per_s=0.0 if open_s is None else self.parallel / (begin_s - self.load.began_s),
            kib_each=1024 * float(self._mb.max() - self._mb[0]) / max(1, counted["max_concurrent_requests"]),
            detokenizer_us=1e6 * self.spent_s("detokenizer", all_s) / tokens,
            load_us=1e6 * self.load.cpu_s / tokens,
            leader_us=leader_us,
            follower_us=follower_us,
        )


def _events_in(answer: TimedAnswer, begin_s: float, end_s: float) -> int:
    at_s = answer.first_s + np.cumsum([0.0, *answer.gaps_s])
    return int(((at_s > begin_s) & (at_s <= end_s)).sum())


# --- what is measured --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def loaded_fleet(bench: RouterBench, cost: str, streams: int, *flags: str) -> Iterator[LoadedFleet]:
    """cost: of each step, as --step-cost takes it. streams: as many as may be open. Raises FleetFailed."""
    own = (
        f"--step-cost={cost}",
        f"--max-running={min(MOST_ROWS, max(REQUESTS_AT_ONCE, streams))}",
        f"--max-waiting={2 * max(streams, 1024)}",
        f"--max-requests={2 * max(streams, 1024)}",
        f"--routers={bench.routers}",
        f"--tp={bench.tp}",
    )
    with local_fleet(*FLAGS, *own, *flags, *shlex.split(bench.more)) as fleet, GENERATORS.Pool(2, allow_many_files) as generators:
        pids: dict[str, list[int]] = {kind: [] for kind in KINDS}
        for pid in below(fleet.pid):
            words = command_of(pid)
            role = next((word for word in words if word in ("router", "detokenizer", "decode")), "")
            if role:
                pids[("follower" if "--rank=" in " ".join(words) else "leader") if role == "decode" else role].append(pid)
        if len(pids["router"]) != bench.routers:
            raise FleetFailed(f"{len(pids['router'])} processes of this fleet are routers, not {bench.routers}")
        yield LoadedFleet(fleet.url, pids, generators, bench.rest_s)


Starter = Callable[..., contextlib.AbstractContextManager[LoadedFleet]]
"""As `loaded_fleet`: a server under load, of which the same is measured."""


def run(invocation: Invocation) -> int:
    """Returns the exit status: 0 also when a goal is not met. Raises FleetFailed."""
    bench = invocation.config(RouterBench, QUICK)
    alone, beside, many = measure_requests(bench)
    streams = [measure_streams(bench, number) for number in bench.numbers]
    opened = [measure_open(bench)] if bench.open else []
    loads = [alone, beside, many, *streams, *opened]
    settings = (
        f"{bench.routers} router{'s' * (bench.routers > 1)}, instances of {bench.tp} rank{'s' * (bench.tp > 1)} without a model, "
        "all processes on these cores"
    )
    body = [invocation.style.table(table_of(LoadFigures, loads))]
    invocation.publish(settings, STEADY, body, goals(alone, many, streams, opened), routers=bench.routers, loads=loads)
    return 0


def measure_requests(bench: RouterBench, started: Starter = loaded_fleet) -> tuple[LoadFigures, LoadFigures, LoadFigures]:
    """Requests of one token: one by one, the same beside other streams, and many at once. Prompts take no time, so all that the
    first token takes is added to the executor's time."""
    few = max(4, bench.requests // 4)
    say(f"requests: one by one, many at once, and beside {BESIDE} streams")
    with started(bench, f"0,0,{BESIDE_STEP_S / BESIDE}", 4 * BESIDE) as fleet:
        fleet.send(20, 4, 8)  # what is made at the first use is made
        alone = fleet.send(few, 1, 1)
        many = fleet.send(bench.requests, REQUESTS_AT_ONCE, 1)
        # They outlast the requests beside them, if none of these takes more than 16 steps.
        others = fleet.begin(BESIDE, BESIDE, min(LONGEST_ANSWER, 16 * few + int(OTHERS_S / BESIDE_STEP_S)))
        time.sleep(OTHERS_S)
        beside = fleet.send(few, 1, 1)
        ended(others)
    return (
        alone.figures("one by one"),
        beside.figures(f"one by one, beside {BESIDE} streams"),
        many.figures("many at once"),
    )


def measure_streams(bench: RouterBench, streams: int, started: Starter = loaded_fleet) -> LoadFigures:
    tokens = max(2, min(LONGEST_ANSWER, int(bench.rate * bench.seconds / streams)))
    return _measure(bench, started, "streams", f"{max(LEAST_STEP_S, streams / bench.rate)},0,0", streams, tokens)


def measure_open(bench: RouterBench, started: Starter = loaded_fleet) -> LoadFigures:
    flags = f"--decode={math.ceil(bench.open / MOST_ROWS)}", "--chunk-tokens=8192"
    return _measure(bench, started, "open at once", f"{OPEN_STEP_S},0,0", bench.open, int(bench.open_s / OPEN_STEP_S), *flags)


def _measure(bench: RouterBench, started: Starter, name: str, cost: str, streams: int, tokens: int, *flags: str) -> LoadFigures:
    say(f"{streams} streams at once")
    with started(bench, cost, streams, *flags) as fleet:
        fleet.send(4, 4, 2)
        return fleet.send(streams, streams, tokens).figures(name)


def goals(alone: LoadFigures, many: LoadFigures, streams: Sequence[LoadFigures], opened: Sequence[LoadFigures]) -> Iterator[Goal]:
    """The goals for one router process on one core."""
    for name, value in (("median", alone.ttft_p50_ms), ("99th percentile", alone.ttft_p99_ms)):
        yield Goal.of(f"added time to the first token, {name}: under 3 ms", value, ".2f", most=3, unit=" ms")
    here = f"/s of a core; {many.requests_per_s:,.0f}/s on this machine"
    yield Goal.of("requests: 1,000/s", 1e3 / many.router_ms, ",.0f", least=1000, unit=here)
    for each in streams:
        if each.streams > 1:
            here = f"/s of a core; {each.tokens_per_s:,.0f}/s on this machine"
            yield Goal.of(f"tokens, {each.streams:,} streams: 50,000/s", 1e6 / each.router_us, ",.0f", least=50_000, unit=here)
    for each in opened:
        met = each.most_open >= 10_000 and not each.failed
        figure = f"{each.most_open:,} open, {each.failed} failed"
        yield Goal(rule="10,000 streams open at once without a failure", met=met, figure=figure)


EXPLANATION = "Measure what a router and several ranks add to requests and tokens, and how many streams a router carries."

if __name__ == "__main__":
    sys.exit(start("router", EXPLANATION, run, RouterBench))
