"""What the bench and its prober say to each other, and what a router reports to it.

Owns the vocabulary. Opens nothing.
"""

from typing import TypeAlias

from common.processes.lines import Broken, IntakeClosed, JsonLine, Progress, Ready


class Watch(JsonLine, frozen=True):
    """Ping this router from now on, until the next order."""

    url: str


class Tell(JsonLine, frozen=True):
    """Report the pings since the last order, and go on."""


class Get(JsonLine, frozen=True):
    """Get this page once, beside the pings."""

    path: str


class Pings(JsonLine, frozen=True):
    """longest_s: how long the slowest answer took. failed: pings without an answer."""

    longest_s: float
    pings: int
    failed: int


class Got(JsonLine, frozen=True):
    """took_s: until the last byte had arrived."""

    took_s: float
    page_bytes: int


ProberOrder: TypeAlias = Watch | Tell | Get
ProberReport: TypeAlias = Pings | Got
RouterReport: TypeAlias = Progress | Ready | IntakeClosed | Broken
