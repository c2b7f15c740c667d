"""What a client sees of a streamed answer: tokens and when they came, the ending, usage, and everything that is wrong.

Owns the reading of server-sent events. Knows the public API only.
"""

import asyncio
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.workload import Request

ANSWER_S = 240.0
"""An answer that takes longer has hung."""
EVENT = "data: "
DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which nothing came, in seconds of the loop's clock. is_first: it ended with the answer's first token."""

    start_s: float
    end_s: float
    is_first: bool

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def overlaps(self, start_s: float, end_s: float) -> bool:
        return self.start_s < end_s and start_s < self.end_s


@dataclass(slots=True)
class Choice:
    """One choice of an answer. arrivals: when tokens came, in seconds of the loop's clock."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    arrivals: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """errors: what no client should see."""

    request: Request
    sent_s: float
    choices: list[Choice]
    usage: dict[str, int] | None = None
    is_done: bool = False
    errors: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    def gaps(self) -> list[list[Gap]]:
        """For each choice: the time before its first tokens came, and every time between two arrivals."""
        starts = ([self.sent_s, *choice.arrivals] for choice in self.choices)
        return [
            [Gap(start, end, number == 0) for number, (start, end) in enumerate(itertools.pairwise(times))] for times in starts
        ]


class Client(httpx.AsyncClient):
    """A client of one model at one URL. Use as `async with`."""

    def __init__(self, url: str, model: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        super().__init__(base_url=url, timeout=ANSWER_S, limits=limits)
        self._model = model

    async def ask(self, request: Request) -> Answer:
        """The answer, whatever happened to it."""
        answer = Answer(request, asyncio.get_running_loop().time(), [Choice() for _ in range(request.choices)])
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._read(request, answer)
        except TimeoutError:
            answer.errors.append(f"no end within {ANSWER_S:g} s")
        except httpx.HTTPError as error:
            answer.errors.append(f"the stream broke off: {type(error).__name__} {error}")
        answer.errors += _unfinished(answer)
        return answer

    async def _read(self, request: Request, answer: Answer) -> None:
        body = request.body | {"model": self._model}
        async with self.stream("POST", request.path, json=body) as response:
            if response.status_code != 200:
                answer.errors.append(f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')}")
                return
            async for line in response.aiter_lines():
                if line.startswith(EVENT):
                    _take(answer, line.removeprefix(EVENT), asyncio.get_running_loop().time())
                elif line and not line.startswith(":"):
                    answer.errors.append(f"a line that is no event: {line[:80]!r}")


def _take(answer: Answer, data: str, now: float) -> None:
    """One event."""
    if answer.is_done:
        answer.errors.append(f"an event after {DONE}: {data[:200]}")
    elif data == DONE:
        answer.is_done = True
    else:
        event = json.loads(data)
        if "error" in event:
            answer.errors.append(f"error event: {event['error']}")
            return
        answer.usage = event.get("usage") or answer.usage
        for part in event["choices"]:
            _take_part(answer, answer.choices[part["index"]], part, now)


def _take_part(answer: Answer, choice: Choice, part: dict[str, Any], now: float) -> None:
    """What one event brings for one choice."""
    text = part["delta"].get("content", "") if "delta" in part else part["text"]
    token_ids = part.get("token_ids", [])
    if choice.finish_reason is not None:
        answer.errors.append(f"choice {part['index']} goes on after its ending: {part}")
    choice.text += text
    choice.token_ids += token_ids
    choice.finish_reason = part["finish_reason"]
    if token_ids:
        choice.arrivals.append(now)


def _unfinished(answer: Answer) -> list[str]:
    """What lacks at the end of a stream that said of no error."""
    if answer.errors:
        return []
    lacks = [
        f"choice {index} has no finish_reason" for index, choice in enumerate(answer.choices) if choice.finish_reason is None
    ]
    if not answer.is_done:
        lacks.append(f"no {DONE}")
    if answer.usage is None:
        lacks.append("no usage")
    return lacks
