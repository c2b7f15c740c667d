"""What the two processes of a measurement and the one that measures say to each other: JSON lines over pipes.

Owns the vocabulary. Opens nothing.
"""

from typing import TypeAlias

import msgspec

from bench.plan import Point, Way
from common.messages import PoolDescriptor


class Line(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of every line; the tag is the class name."""


class AgentPlan(Line, frozen=True):
    """What an agent is: one end of a way. host: the address that it may listen on. unit_bytes: the page of its pool."""

    way: Way
    host: str
    unit_bytes: int
    pool_bytes: int
    huge_pages: bool


class Address(Line, frozen=True):
    """Where the other end is reached: its pool, or a host and port."""

    pool: PoolDescriptor | None = None
    host: str = ""
    port: int = 0


class Connect(Line, frozen=True):
    """Get ready to push to the other end."""

    address: Address


class Push(Line, frozen=True):
    """Push again and again for so long, and so many times at least. seed: which pages."""

    point: Point
    seed: int
    seconds: float
    least_pushes: int


class Expect(Line, frozen=True):
    """Whether pushes are on their way to this end."""

    pushes: bool


class Digest(Line, frozen=True):
    """A checksum of what the pushes of a point read on this end, or wrote."""

    point: Point
    seed: int
    landed: bool


class End(Line, frozen=True):
    """Close everything and exit."""


Command: TypeAlias = Connect | Push | Expect | Digest | End


class Started(Line, frozen=True):
    """The agent is there."""

    address: Address


class Answer(Line, frozen=True):
    """A command is done. cpu_s: CPU time of this process so far, user and system. pushes: how long each took, in seconds.
    elapsed_s: from the first push to the end of the last."""

    cpu_s: float
    elapsed_s: float = 0.0
    pushes: list[float] = []
    digest: int = 0


class Refused(Line, frozen=True):
    """The command, or the start, failed."""

    reason: str


Report: TypeAlias = Started | Answer | Refused
