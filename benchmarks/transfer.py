"""`python -m benchmarks.transfer`: every way to move KV pages between two processes of this machine.

Owns the grid of points, the order of measurements, the figures, the goals and the tables. Each round covers the whole grid, with
the ways in turn, so that other work of the machine affects all of them alike. The processes are `benchmarks/transfer_agent.py`.
Prints its progress on stderr.
"""

import contextlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar, get_args

import msgspec

from bench.report import Goal, Spread, bytes_text, ratios, say
from benchmarks.command import Invocation, start
from benchmarks.namespaces import Spot, two_namespaces
from benchmarks.transfer_agent import (
    AgentOrder,
    AgentPlan,
    AgentReport,
    ExpectOrder,
    LinkOrder,
    PushOrder,
    PushShape,
    TransferWay,
)
from common.addresses import LOOPBACK
from common.config import TransportName
from common.errors import ConfigError, TransferError
from common.options import Switch, option, parse_bytes, parse_numbers, require, require_above_0
from common.processes.child import Broken, ChildEnded, Respondent, stop_children
from launch import child

T = TypeVar("T")
ALL = "all"
SMALLEST_PAGE_BYTES = 512
GPU = re.compile(r"cuda(:\d+)?")
RESULT_S = 120.0
KILL_S = 5.0
LEAST_PUSHES = 3
LEAST_PUSHES_OF_ONE_PAGE = 200
"""Enough for a 99th percentile."""
SETTLE_S = 0.5
"""After this time, nothing that connecting started is still running."""
Spots: TypeAlias = tuple[Spot, Spot]
"""Where the source and the target are."""
ONE_HOST: Spots = (Spot((), LOOPBACK), Spot((), LOOPBACK))
CPUS = ("cpu", "cpu")
NETWORK_ENVIRONMENT = {"UCX_TLS": "tcp"}
"""Two namespaces of one kernel can still write into each other's memory; two hosts cannot."""
ONE_HOST_TRANSPORTS: tuple[TransportName, ...] = ("cma",)
"""Transports that cannot reach another host."""
LARGE_PAGE_BYTES = 64 * 2**10
NETWORK_PAGE_BYTES = 256 * 2**10
MEMMOVE, SOCKET, COPY = TransferWay("memmove"), TransferWay("socket"), TransferWay("copy")
NIXL = TransferWay("thread", "nixl")
STEADY = "CPU-s/GB is affected least."


@dataclass(frozen=True, kw_only=True)
class TransferBench:
    """What is measured, and how long."""

    transport: str = option(ALL, f"which KV transport: {ALL}, or one of {', '.join(get_args(TransportName))}")
    page_bytes: str = option(
        "16KiB,64KiB,256KiB,1MiB,2MiB", "page sizes, with commas between them; each must be a multiple of the smallest"
    )
    pages: str = option("1,32,1024", "pages in one push, with commas between them; --memory sets the most")
    device: str = option("cpu", "where the pools are: cpu, cuda, cuda:N, or cuda:N,cuda:M for source and target")
    memory: str = option("256MiB", "size of each pool; each pair of processes has two")
    seconds: float = option(0.2, "how long to measure each point in each round, in seconds")
    repeat: int = option(5, "how many rounds over all points and transports")
    idle_s: float = option(3.0, "how long to measure the CPU time of idle pairs, in seconds")
    namespaces: Switch = option("off", "also measure between two network namespaces, which stand for two hosts (needs root)")

    def __post_init__(self) -> None:
        known = get_args(TransportName)
        require(self.transport in (ALL, *known), "transport", f"{ALL} or one of {', '.join(known)}", self.transport)
        require_above_0(self, "seconds", "idle_s", "repeat")
        for page_bytes in self.page_sizes:
            if page_bytes % self.unit_bytes or page_bytes > self.pool_bytes:
                raise ConfigError(f"--page-bytes {page_bytes} must be a multiple of the smallest and no more than --memory")
        if self.unit_bytes < SMALLEST_PAGE_BYTES or self.unit_bytes % 8:
            raise ConfigError(
                f"--page-bytes must be multiples of 8 from {SMALLEST_PAGE_BYTES}, the smallest is {self.unit_bytes}"
            )
        is_device = self.devices == CPUS or all(map(GPU.fullmatch, self.devices))
        require(is_device, "device", "cpu, cuda, cuda:N or cuda:N,cuda:M", self.device)
        require(min(self.page_counts) >= 1, "pages", "at least 1 each", self.pages)
        if self.namespaces == "on" and self.devices != CPUS:
            raise ConfigError(f"--namespaces measures pools on the CPU only, and --device is {self.device}")

    @property
    def transports(self) -> tuple[TransportName, ...]:
        return tuple(name for name in get_args(TransportName) if self.transport in (ALL, name))

    @property
    def devices(self) -> tuple[str, str]:
        """Where the source's pool is, and the target's."""
        source, comma, target = self.device.partition(",")
        return source, target if comma else source

    @property
    def page_sizes(self) -> tuple[int, ...]:
        return tuple(sorted({_bytes_of(part, "page-bytes") for part in self.page_bytes.split(",")}))

    @property
    def page_counts(self) -> tuple[int, ...]:
        return tuple(sorted(set(parse_numbers(self.pages, "pages", int))))

    @property
    def unit_bytes(self) -> int:
        """The smallest page: pools are registered in pages of this size, and a larger one is several in a row."""
        return self.page_sizes[0]

    @property
    def pool_bytes(self) -> int:
        """A whole number of the largest pages."""
        return _bytes_of(self.memory, "memory") // self.page_sizes[-1] * self.page_sizes[-1]

    def points(self) -> Iterator[PushShape]:
        """The grid, each point once. One page has no arrangement."""
        for page_bytes in self.page_sizes:
            for pages in sorted({min(count, self.pool_bytes // page_bytes) for count in self.page_counts}):
                yield PushShape(page_bytes, pages, "contiguous")
                if pages > 1:
                    yield PushShape(page_bytes, pages, "scattered")


QUICK: dict[str, Any] = {"page_bytes": "64KiB", "pages": "1,16", "memory": "4MiB", "seconds": 0.02, "repeat": 1, "idle_s": 0.2}


def _bytes_of(text: str, flag: str) -> int:
    """An amount of memory; there is none of its own to fall back on, so `auto` is refused."""
    amount = parse_bytes(text.strip(), flag)
    if amount is None:
        raise ConfigError(f"--{flag} must be an amount such as 64KiB, is {text!r}")
    return amount


class PushSample(msgspec.Struct, frozen=True, kw_only=True):
    """A way at a point in one round. GB: 10^9 bytes."""

    pushes: int
    gb_per_s: float
    median_s: float
    p99_s: float
    cpu_s_per_gb: float
    """User and system time of both processes."""

    @classmethod
    def of(cls, shape: PushShape, pushes: Sequence[float], cpu_s: float) -> "PushSample":
        """pushes: how long each took, one after the other, in seconds."""
        gigabytes = len(pushes) * shape.push_bytes / 1e9
        ordered = sorted(pushes)
        return cls(
            pushes=len(pushes),
            gb_per_s=gigabytes / sum(pushes),
            median_s=statistics.median(ordered),
            p99_s=ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
            cpu_s_per_gb=cpu_s / gigabytes,
        )


class TransferRow(msgspec.Struct, frozen=True, kw_only=True):
    """A way at a point: one sample for each round."""

    way: TransferWay
    point: PushShape
    samples: list[PushSample]

    def spread(self, of: Callable[[PushSample], float]) -> Spread:
        return Spread.of(of(sample) for sample in self.samples)

    @property
    def speeds(self) -> dict[int, float]:
        """GB/s of each round."""
        return {number: sample.gb_per_s for number, sample in enumerate(self.samples)}


class TransferPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything measured in one place, such as one host."""

    name: str
    rows: list[TransferRow] = []
    idle_cores: dict[str, float] = {}
    """The share of a core that each connected pair uses while it is idle."""
    skipped: dict[str, str] = {}
    """What could not be measured, and why."""

    def lead(self, row: TransferRow, way: TransferWay) -> list[float]:
        """The speed of a row in that of this way at the same point: the median of the rounds, if any."""
        theirs = (other for other in self.rows if (other.way, other.point) == (way, row.point))
        return [found.median for other in theirs if (found := ratios(row.speeds, other.speeds)) is not None]


def run(invocation: Invocation) -> int:
    """Measure, and publish the report. Returns the exit status: 0 also when a goal is not met."""
    child.prepare(1)
    bench = invocation.config(TransferBench, QUICK)
    host = measure_host(bench)
    skipped = TransferPlace(name="network", skipped={"namespaces": "--namespaces was not given"})
    network = measure_network(bench) if bench.namespaces == "on" else skipped
    body = [part for place in (host, network) for part in report(place, invocation)]
    settings = f"pools of {bytes_text(bench.pool_bytes)}"
    invocation.publish(settings, STEADY, body, judge(host, network), host=host, network=network)
    return 0


AgentProcess: TypeAlias = Respondent[AgentReport | Broken]


class AgentPair(contextlib.AbstractContextManager["AgentPair"]):
    """The processes of one way: the source pushes, the target is written to. For the speed of the memory one is both."""

    def __init__(self, bench: TransferBench, way: TransferWay, spots: Spots, variables: Mapping[str, str]) -> None:
        self.way = way
        self._pool_bytes = bench.pool_bytes
        source, target = bench.devices
        ends = list(zip(spots, ((source, target), (target, source)), strict=True))
        self._agents: list[AgentProcess] = []
        for spot, (device, other_device) in ends[:1] if way.is_local else ends:
            plan = AgentPlan(
                way=way,
                host=spot.host,
                unit_bytes=bench.unit_bytes,
                pool_bytes=bench.pool_bytes,
                device=device,
                other_device=other_device,
            )
            command = [*spot.prefix, sys.executable, "-m", "benchmarks.transfer_agent", msgspec.json.encode(plan).decode()]
            decoder = msgspec.json.Decoder[AgentReport | Broken](AgentReport | Broken)
            self._agents.append(AgentProcess("an agent", command, decoder, variables))
        self._source, self._target = self._agents[0], self._agents[-1]

    def __exit__(self, *_: object) -> None:
        stop_children(self._agents, KILL_S)

    def connect(self) -> None:
        """Wait until both have started, and link them. Raises TransferError."""
        *_, pool = [_next_report(agent).pool for agent in self._agents]
        assert pool is not None, "the first report names the pool"
        self._order(LinkOrder(pool))

    def warm_up(self, point: PushShape) -> None:
        """Push one turn. Raises TransferError."""
        self._order(PushOrder(point, 0, seconds=0.0, least_pushes=point.pushes_in_turn(self._pool_bytes)))

    def measure(self, point: PushShape, seed: int, seconds: float) -> PushSample:
        """Push for this many seconds. CPU time is that of all threads of both processes. Raises TransferError."""
        least = LEAST_PUSHES_OF_ONE_PAGE if point.pages == 1 else LEAST_PUSHES
        return PushSample.of(point, *self._order(PushOrder(point, seed, seconds, least)))

    def _order(self, order: LinkOrder | PushOrder) -> tuple[tuple[float, ...], float]:
        """What the source does while the target expects it: the seconds of each push, and of CPU of both processes."""
        before_s = self.expect(True)
        pushes_s = _obeyed(self._source, order).pushes_s
        return pushes_s, self.expect(False) - before_s

    def expect(self, pushes: bool) -> float:
        """Returns the CPU time of both processes so far. pushes: whether some will come to the target from here on. Raises
        TransferError."""
        return sum(_obeyed(agent, ExpectOrder(pushes and agent is self._target)).cpu_s for agent in self._agents)


def _obeyed(agent: AgentProcess, order: AgentOrder) -> AgentReport:
    """What the order has led to. Raises TransferError with the reason when it fails."""
    agent.order(order)
    return _next_report(agent)


def _next_report(agent: AgentProcess) -> AgentReport:
    try:
        report = agent.next_report(RESULT_S)
    except ChildEnded as error:
        raise TransferError(str(error)) from error
    if report is None:
        raise TransferError(f"an agent did not answer for {RESULT_S:g} s")
    if isinstance(report, Broken):
        raise TransferError(report.reason)
    return report


def measure_host(bench: TransferBench) -> TransferPlace:
    """Every way on this host."""
    through = [TransferWay("thread", name) for name in bench.transports]
    yardsticks = [MEMMOVE, SOCKET] if bench.devices == CPUS else [COPY]
    return _measure(bench, "host", [*yardsticks, *through], ONE_HOST, {})


def measure_network(bench: TransferBench) -> TransferPlace:
    """Every way that works over a network, between two network namespaces; or why namespaces cannot be made."""
    names = [name for name in bench.transports if name not in ONE_HOST_TRANSPORTS]
    ways = [SOCKET, *(TransferWay("thread", name) for name in names)]
    try:
        with two_namespaces() as spots:
            return _measure(bench, "network", ways, spots, NETWORK_ENVIRONMENT)
    except TransferError as error:
        return TransferPlace(name="network", skipped={"namespaces": str(error)})


def _measure(
    bench: TransferBench, name: str, ways: Sequence[TransferWay], spots: Spots, variables: Mapping[str, str]
) -> TransferPlace:
    points, skipped = list(bench.points()), dict[str, str]()
    samples: dict[tuple[TransferWay, PushShape], list[PushSample]] = {}

    def each(act: Callable[[AgentPair], T]) -> list[tuple[TransferWay, T]]:
        """Act on one pair after the other, so that each has the machine to itself. A pair that fails is not used again."""
        results = []
        for pair in list(pairs):
            try:
                results.append((pair.way, act(pair)))
            except TransferError as error:
                pairs.remove(pair)
                skipped[pair.way.label] = str(error)
                say(f"{pair.way.label} is skipped: {error}")
        return results

    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(AgentPair(bench, way, spots, variables)) for way in ways]
        each(AgentPair.connect)
        idle_cores = _watch_idle(pairs, bench.idle_s)
        say(f"{name}: the first pushes")
        for point in points:
            each(partial(AgentPair.warm_up, point=point))
        for number in range(1, bench.repeat + 1):
            for point in points:
                say(f"{name}, round {number} of {bench.repeat}: {point.pages} {point.arrangement} pages of {point.page_bytes} B")
                for way, sample in each(partial(AgentPair.measure, point=point, seed=number, seconds=bench.seconds)):
                    samples.setdefault((way, point), []).append(sample)
    rows = [TransferRow(way=pair.way, point=point, samples=samples[pair.way, point]) for point in points for pair in pairs]
    return TransferPlace(name=name, rows=rows, idle_cores=idle_cores, skipped=skipped)


def _watch_idle(pairs: Sequence[AgentPair], idle_s: float) -> dict[str, float]:
    """The share of a core that the two processes of each pair use while they are idle."""
    time.sleep(SETTLE_S)
    began, before = time.monotonic(), [pair.expect(False) for pair in pairs]
    time.sleep(idle_s)
    after, elapsed_s = [pair.expect(False) for pair in pairs], time.monotonic() - began
    return {pair.way.label: (end - start) / elapsed_s for pair, start, end in zip(pairs, before, after, strict=True)}


def judge(host: TransferPlace, network: TransferPlace) -> Iterator[Goal]:
    """The goals of NIXL, as an instance uses it."""
    way = NIXL
    large = [row for row in _fullest(host) if row.way == way and row.point.page_bytes >= LARGE_PAGE_BYTES]
    one_page = [row for row in host.rows if row.way == way and row.point.pages == 1 and row.point.page_bytes <= LARGE_PAGE_BYTES]
    far = [row for row in _fullest(network) if row.way == way and row.point.page_bytes == NETWORK_PAGE_BYTES]
    shares = [100 * share for row in large for share in host.lead(row, MEMMOVE)]
    leads = [lead for row in far for lead in network.lead(row, SOCKET)]
    latencies = [1e6 * row.spread(lambda sample: sample.median_s).median for row in one_page]
    costs = [row.spread(lambda sample: sample.cpu_s_per_gb).median for row in large]
    idle = [100 * host.idle_cores[way.label]] if way.label in host.idle_cores else []
    for which, limit, unit, what, values in (
        ("least", 75, " %", "of a scattered memmove, pages of 64 KiB and more", shares),
        ("most", 50, " us", "for one page of up to 64 KiB", latencies),
        ("most", 0.4, " CPU-s/GB", "for scattered pages of 64 KiB and more", costs),
        ("most", 0.5, " %", "of a core for a pair that is idle", idle),
        ("least", 1, " times", "the speed of a TCP socket between network namespaces, pages of 256 KiB", leads),
    ):
        worst = min(values, default=None) if which == "least" else max(values, default=None)
        rule = f"{way.label}: at {which} {limit:g}{unit} {what}"
        yield Goal.of(rule, worst, ".3g", **{which: limit}, unit=unit)


def _fullest(place: TransferPlace) -> list[TransferRow]:
    """The rows with the most scattered pages, for each way and page size."""
    scattered = [row for row in place.rows if row.point.arrangement == "scattered"]
    in_order = sorted(scattered, key=lambda row: row.point.pages)
    return list({(row.way, row.point.page_bytes): row for row in in_order}.values())


def report(place: TransferPlace, invocation: Invocation) -> Iterator[str]:
    """A table for each figure, with the ways side by side."""
    if place.rows:
        for title, cell in TABLES.items():
            yield from invocation.style.section(f"{place.name.capitalize()}: {title}", side_by_side(place, cell))
    if place.idle_cores:
        yield f"- an idle pair uses of one core: {', '.join(f'{label} {cores:.2%}' for label, cores in place.idle_cores.items())}"
    yield from (f"- {label} was skipped: {reason}" for label, reason in place.skipped.items())


def side_by_side(place: TransferPlace, cell: Callable[[TransferRow], str]) -> list[tuple[str, ...]]:
    """A line for each point, a column for each way."""
    labels = list(dict.fromkeys(row.way.label for row in place.rows))
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in place.rows:
        point = bytes_text(row.point.page_bytes), str(row.point.pages), row.point.arrangement
        cells.setdefault(point, {})[row.way.label] = cell(row)
    lines = [(*point, *(by_label[label] for label in labels)) for point, by_label in cells.items()]
    return [("page", "pages", "", *labels), *lines]


def _latency(row: TransferRow) -> str:
    median, p99 = row.spread(lambda sample: 1e6 * sample.median_s), row.spread(lambda sample: 1e6 * sample.p99_s)
    return f"{median.median:.0f} / {p99.median:.0f}"


TABLES: dict[str, Callable[[TransferRow], str]] = {
    "GB/s, median (least … most of the rounds)": lambda row: row.spread(lambda sample: sample.gb_per_s).text(".2f"),
    "microseconds of a push, median / p99": _latency,
    "CPU-s/GB, both processes": lambda row: f"{row.spread(lambda sample: sample.cpu_s_per_gb).median:.2f}",
}


EXPLANATION = "Measure how fast each transport moves KV pages between two processes."

if __name__ == "__main__":
    sys.exit(start("transfer", EXPLANATION, run, TransferBench))
