"""What `launch bench transfer` measures: its flags, and the grid of points that they span.

Owns names, defaults and limits. Imports nothing heavy, measures nothing.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from common.amounts import parse_bytes
from common.config import TransportName
from common.errors import ConfigError
from common.options import Switch, option, parse_numbers, require, require_above_0

Arrangement = Literal["contiguous", "scattered"]
Kind = Literal["transport", "thread", "socket", "memmove", "copy"]
ALONE: tuple[Kind, ...] = ("memmove", "copy")
"""Kinds that need one process only."""
ALL = "all"
SMALLEST_PAGE_BYTES = 512
_GPU = re.compile(r"cuda(:\d+)?")


class Point(msgspec.Struct, frozen=True):
    """What one push moves: `pages` pages of `page_bytes`, next to each other on both sides or anywhere in the pools."""

    page_bytes: int
    pages: int
    arrangement: Arrangement

    @property
    def push_bytes(self) -> int:
        return self.page_bytes * self.pages

    def pushes_in_turn(self, pool_bytes: int) -> int:
        """Each push takes other pages than the one before, and after so many they begin again."""
        return max(2, min(16, pool_bytes // self.push_bytes))


class Way(msgspec.Struct, frozen=True):
    """How bytes get from one process to the other.

    transport: through the port alone, polled without a pause. thread: through a TransferThread, as an instance does it.
    socket: one TCP connection. memmove: a loop in one process, which is the speed of the memory. copy: the same for GPUs, a copy
    of each run on one stream.
    """

    kind: Kind
    transport: TransportName | None = None

    @property
    def label(self) -> str:
        match self.kind:
            case "transport":
                return str(self.transport)
            case "thread":
                return f"{self.transport} thread"
            case "socket":
                return "tcp socket"
            case "memmove":
                return "memmove"
            case "copy":
                return "device copy"


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
    huge_pages: Switch = option("on", "ask the system for huge pages for the pools, as instances do for theirs on CPU")
    seconds: float = option(0.2, "how long to measure each point in each round, in seconds")
    repeat: int = option(5, "how many rounds over all points and transports")
    idle_s: float = option(3.0, "how long to measure the CPU time of idle pairs, in seconds")
    json: str = option("", "write every figure of every round to this file")

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
        is_device = self.devices == ("cpu", "cpu") or all(map(_GPU.fullmatch, self.devices))
        require(is_device, "device", "cpu, cuda, cuda:N or cuda:N,cuda:M", self.device)
        require(min(self.page_counts) >= 1, "pages", "at least 1 each", self.pages)

    @property
    def transports(self) -> tuple[TransportName, ...]:
        return tuple(name for name in get_args(TransportName) if self.transport in (ALL, name))

    @property
    def devices(self) -> tuple[str, str]:
        """Of the source's pool and the target's."""
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

    def points(self) -> Iterator[Point]:
        """The grid, each point once. One page has no arrangement."""
        for page_bytes in self.page_sizes:
            for pages in sorted({min(count, self.pool_bytes // page_bytes) for count in self.page_counts}):
                yield Point(page_bytes, pages, "contiguous")
                if pages > 1:
                    yield Point(page_bytes, pages, "scattered")


QUICK: dict[str, Any] = {"page_bytes": "64KiB", "pages": "1,16", "memory": "4MiB", "seconds": 0.02, "repeat": 1, "idle_s": 0.2}
"""What `--quick` measures."""


def _bytes_of(text: str, flag: str) -> int:
    """An amount of memory that must be said."""
    amount = parse_bytes(text.strip(), flag)
    if amount is None:
        raise ConfigError(f"--{flag} must be an amount such as 64KiB, is {text!r}")
    return amount
