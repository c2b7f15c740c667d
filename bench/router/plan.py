"""What `launch bench router` measures: its flags and their limits.

Owns names, defaults and limits. Imports nothing heavy, starts nothing.
"""

from dataclasses import dataclass
from typing import Any

from common.options import option, parse_numbers, require, require_at_least


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


QUICK: dict[str, Any] = {"streams": "8", "rate": 2000.0, "seconds": 0.5, "requests": 40, "open": 0}
"""What `--quick` measures."""
