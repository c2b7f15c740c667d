"""`launch bench transfer`: measures every way to move KV pages between two processes of this machine.

Owns the order of measurements: each round covers the whole grid, with the ways in turn, so that other work of the machine affects
all of them alike. Knows no transport. Prints only its progress, on stderr.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from bench import report
from bench.figures import Place, Row, Sample, TransferOutcome, judge
from bench.hardware import this_hardware
from bench.namespaces import two_namespaces
from bench.pair import Pair, Spot, Spots
from bench.plan import Point, TransferBench, Way
from bench.tables import publish, say
from common.addresses import LOOPBACK
from common.config import TransportName
from common.errors import ConfigError, TransferError

T = TypeVar("T")
SETTLE_S = 0.5
"""After this time, nothing that connecting started is still running."""
ONE_HOST: Spots = (Spot((), LOOPBACK), Spot((), LOOPBACK))
CPUS = ("cpu", "cpu")
NETWORK_ENVIRONMENT = {"UCX_TLS": "tcp"}
"""Two namespaces of one kernel can still write into each other's memory; two hosts cannot."""
ONE_HOST_TRANSPORTS: tuple[TransportName, ...] = ("cma",)
"""Transports that cannot reach another host."""


def run(bench: TransferBench, command: str, namespaces: bool, markdown: bool) -> int:
    """Measure, print the report and write the file. Returns the exit status: 0 also when a goal is not met.

    Raises ConfigError."""
    if namespaces and bench.devices != CPUS:
        raise ConfigError(f"--namespaces measures pools on the CPU only, and --device is {bench.device}")
    hardware = this_hardware()
    host = measure_host(bench)
    network = (
        measure_network(bench) if namespaces else Place(name="network", skipped={"namespaces": "--namespaces was not given"})
    )
    goals, pool_bytes = judge(host, network), bench.pool_bytes
    outcome = TransferOutcome(command=command, hardware=hardware, goals=goals, pool_bytes=pool_bytes, host=host, network=network)
    publish(outcome, report.markdown(outcome) if markdown else report.text(outcome), bench.json)
    return 0


def measure_host(bench: TransferBench) -> Place:
    """Every way on this host."""
    through = [Way(kind, name) for name in bench.transports for kind in ("transport", "thread")]
    yardsticks = [Way("memmove"), Way("socket")] if bench.devices == CPUS else [Way("copy")]
    return _measure(bench, "host", [*yardsticks, *through], ONE_HOST, {})


def measure_network(bench: TransferBench) -> Place:
    """Every way that works over a network, between two network namespaces; or why namespaces cannot be made."""
    names = [name for name in bench.transports if name not in ONE_HOST_TRANSPORTS]
    ways = [Way("socket"), *(Way(kind, name) for name in names for kind in ("transport", "thread"))]
    try:
        with two_namespaces() as spots:
            return _measure(bench, "network", ways, spots, NETWORK_ENVIRONMENT)
    except TransferError as error:
        return Place(name="network", skipped={"namespaces": str(error)})


def _measure(bench: TransferBench, name: str, ways: Sequence[Way], spots: Spots, environment: Mapping[str, str]) -> Place:
    points = list(bench.points())
    samples: dict[tuple[Way, Point], list[Sample]] = {}
    with contextlib.ExitStack() as stack:
        alive = _Alive([stack.enter_context(Pair(bench, way, spots, environment)) for way in ways])
        alive.each(Pair.connect)
        idle_cores = _watch_idle(alive.pairs, bench.idle_s)
        say(f"{name}: the first pushes")
        for point in points:
            alive.each(partial(Pair.check, point=point, seed=0))
        for number in range(1, bench.repeat + 1):
            for point in points:
                say(f"{name}, round {number} of {bench.repeat}: {point.pages} {point.arrangement} pages of {point.page_bytes} B")
                for way, sample in alive.each(partial(Pair.measure, point=point, seed=number, seconds=bench.seconds)):
                    samples.setdefault((way, point), []).append(sample)
    measured = [pair.way for pair in alive.pairs]
    rows = [Row(way=way, point=point, samples=samples[way, point]) for point in points for way in measured]
    return Place(name=name, rows=rows, idle_cores=idle_cores, skipped=alive.skipped)


class _Alive:
    """The pairs that have not failed. skipped: why the others have."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = list(pairs)
        self.skipped: dict[str, str] = {}

    def each(self, act: Callable[[Pair], T]) -> list[tuple[Way, T]]:
        """Act on one pair after the other, so that each has the machine to itself. A pair that fails is not used again."""
        results = []
        for pair in list(self.pairs):
            try:
                results.append((pair.way, act(pair)))
            except TransferError as error:
                self.pairs.remove(pair)
                self.skipped[pair.way.label] = str(error)
                say(f"{pair.way.label} is skipped: {error}")
        return results


def _watch_idle(pairs: Sequence[Pair], idle_s: float) -> dict[str, float]:
    """The share of a core that the two processes of each pair use while they are idle."""
    time.sleep(SETTLE_S)
    began, before = time.monotonic(), [pair.idle_cpu_s() for pair in pairs]
    time.sleep(idle_s)
    after, elapsed_s = [pair.idle_cpu_s() for pair in pairs], time.monotonic() - began
    return {pair.way.label: (end - start) / elapsed_s for pair, start, end in zip(pairs, before, after, strict=True)}
