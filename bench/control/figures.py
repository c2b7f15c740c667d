"""The figures of `launch bench control`, and its goals.

Owns what is known of a fleet of one size. Measures and prints nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from bench.figures import Goal, Outcome

GOAL_INSTANCES = 1000


class ControlFigures(msgspec.Struct, kw_only=True):
    """A fleet of one size. None: not measured, and `trouble` says why. CPU figures are of the router's process.

    heartbeat_core_share: of one core, for a fleet at rest, beyond that of a router without instances. heartbeat_bytes_per_s:
    all messages in both directions, at rest. join_bytes: messages in both directions that one more instance causes.
    losses_bytes, losses_ms: messages and CPU time that `lost` deaths at once cause. restart_s: from the start of a router on
    the ports of a killed one until all instances are members with their links; start_s of it, nothing is listening. choose_us:
    CPU of the choice of instances for one request, by the default policy; choose_us_by: by each, and with conditional dispatch.
    router_mb: resident.
    longest_pause_ms: the slowest answer to a ping in any phase but the restart; pauses_ms: by phase.
    """

    instances: int
    heartbeat_core_share: float | None = None
    heartbeat_bytes_per_s: float | None = None
    join_bytes: int | None = None
    losses_bytes: int | None = None
    losses_ms: float | None = None
    restart_s: float | None = None
    choose_us: float | None = None
    metrics_ms: float | None = None
    cluster_ms: float | None = None
    router_mb: float | None = None
    longest_pause_ms: float | None = None
    lost: int = 0
    fill_s: float | None = None
    start_s: float | None = None
    metrics_bytes: int | None = None
    cluster_bytes: int | None = None
    choose_us_by: dict[str, float] = {}
    pauses_ms: dict[str, float] = {}
    trouble: str = ""


class ControlOutcome(Outcome, frozen=True, kw_only=True):
    """All that is known at the end of `launch bench control`."""

    seconds: float
    fleets: list[ControlFigures]


@dataclass(frozen=True, slots=True)
class Column:
    """A figure in a table: its head, and how a number of it is written."""

    name: str
    head: str
    write: Callable[[float], str]


def _number(digits: int, scale: float = 1.0) -> Callable[[float], str]:
    return lambda value: f"{value * scale:,.{digits}f}"


COLUMNS = (
    Column("instances", "instances", _number(0)),
    Column("heartbeat_core_share", "heartbeats, % of a core", _number(1, 100)),
    Column("heartbeat_bytes_per_s", "heartbeats, kB/s", _number(0, 1e-3)),
    Column("join_bytes", "a join, kB", _number(0, 1e-3)),
    Column("losses_bytes", "losses, kB", _number(0, 1e-3)),
    Column("losses_ms", "losses, ms of CPU", _number(0)),
    Column("restart_s", "restart, s", _number(1)),
    Column("choose_us", "choose, us", _number(0)),
    Column("metrics_ms", "/metrics, ms", _number(0)),
    Column("cluster_ms", "/cluster, ms", _number(0)),
    Column("router_mb", "memory, MB", _number(0)),
    Column("longest_pause_ms", "longest pause, ms", _number(0)),
)


def table(fleets: Sequence[ControlFigures]) -> list[tuple[str, ...]]:
    """A line for each size, below the heads."""
    lines = [tuple(column.head for column in COLUMNS)]
    for fleet in fleets:
        values = msgspec.structs.asdict(fleet)
        lines.append(tuple("" if values[column.name] is None else column.write(values[column.name]) for column in COLUMNS))
    return lines


def judge(fleets: Sequence[ControlFigures]) -> list[Goal]:
    """The goals for a fleet of a thousand."""
    fleet = next((each for each in fleets if each.instances == GOAL_INSTANCES), ControlFigures(instances=GOAL_INSTANCES))
    return list(_goals(fleet))


def _goals(fleet: ControlFigures) -> Iterator[Goal]:
    for what, value, limit, unit, scale in (
        ("heartbeats", fleet.heartbeat_core_share, 5, "% of a core", 100.0),
        ("heartbeats", fleet.heartbeat_bytes_per_s, 2, " MB/s", 1e-6),
        ("a join", fleet.join_bytes, 1, " MB", 1e-6),
        ("ten losses at once", fleet.losses_bytes, 2, " MB", 1e-6),
        ("ten losses at once", fleet.losses_ms, 50, " ms", 1.0),
        ("choose, by default", fleet.choose_us, 50, " us", 1.0),
        ("/metrics", fleet.metrics_ms, 50, " ms", 1.0),
        ("the longest pause", fleet.longest_pause_ms, 100, " ms", 1.0),
    ):
        met = None if value is None else value * scale <= limit
        figure = "not measured" if value is None else f"{float(f'{value * scale:.3g}'):g}{unit}"
        yield Goal(rule=f"{GOAL_INSTANCES} instances: {what}: at most {limit:g}{unit}", met=met, figure=figure)
