"""What the process that measures says to the two processes of a measurement, and what they answer.

Owns the vocabulary. Opens nothing.
"""

from typing import TypeAlias

from bench.plan import Point, Way
from common.messages import PoolDescriptor
from common.processes.lines import Broken, JsonLine


class AgentPlan(JsonLine, frozen=True):
    """One end of a way. host: the address to listen on. unit_bytes: size of a page of its pool. device: of its pool.
    other_device: of the other end's."""

    way: Way
    host: str
    unit_bytes: int
    pool_bytes: int
    huge_pages: bool
    device: str = "cpu"
    other_device: str = "cpu"


class Address(JsonLine, frozen=True):
    """How to reach an end: its pool, or a host and port."""

    pool: PoolDescriptor | None = None
    host: str = ""
    port: int = 0


class Connect(JsonLine, frozen=True):
    """Get ready to push to the other end."""

    address: Address


class Push(JsonLine, frozen=True):
    """Push again and again, for this many seconds and at least this many times. seed: chooses the pages."""

    point: Point
    seed: int
    seconds: float
    least_pushes: int


class Expect(JsonLine, frozen=True):
    """Whether pushes are on their way to this end."""

    pushes: bool


class Digest(JsonLine, frozen=True):
    """Compute a checksum of what the pushes of a point read on this end or, if `landed`, wrote there."""

    point: Point
    seed: int
    landed: bool


class Stop(JsonLine, frozen=True):
    """Close everything and exit."""


Command: TypeAlias = Connect | Push | Expect | Digest | Stop


class Answer(JsonLine, frozen=True):
    """The agent has started, or a command is done. cpu_s: CPU time of this process so far, user and system. address: of its end.
    pushes: seconds that each one took. elapsed_s: from the start of the first push to the end of the last."""

    cpu_s: float
    address: Address
    elapsed_s: float = 0.0
    pushes: tuple[float, ...] = ()
    digest: int = 0


Report: TypeAlias = Answer | Broken
