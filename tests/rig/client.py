"""What a client sees of a streamed answer: tokens and when they came, the ending, usage, and everything that is wrong.

Owns requests, and the reading of server-sent events. Knows the public API only.
"""

import asyncio
import itertools
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.rig.pages import until

ANSWER_S = 240.0
"""An answer that takes longer has hung."""
BEGUN_TOKENS = 5
"""A stream that has more of them has begun."""
EVENT = "data: "
DONE = "[DONE]"


def completion_of_ids(model: str, prompt: Sequence[int], answer_tokens: int, **others: Any) -> bytes:
    """The body of a greedy completion of exactly this length. prompt: token ids. others: more fields."""
    length = {"max_tokens": answer_tokens, "ignore_eos": True}
    return json.dumps({"model": model, "prompt": list(prompt), "temperature": 0, **length, **others}).encode()


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the API, whose answer is streamed."""

    path: str
    body: dict[str, Any]
    """All fields; the client's model, unless they name another."""
    number: int = 0
    prompt: tuple[int, ...] = ()
    """The prompt as the server must tokenize it, where that is checked."""

    @classmethod
    def completion(cls, prompt: str, max_tokens: int, **fields: object) -> "Request":
        """A greedy completion."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, "return_token_ids": True}
        return cls("/v1/completions", body | {"stream_options": {"include_usage": True}} | fields)

    @property
    def choices(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def max_tokens(self) -> int:
        return int(self.body["max_tokens"])

    @property
    def is_greedy(self) -> bool:
        return bool(self.body["temperature"] == 0)

    @property
    def stop(self) -> str | None:
        return self.body.get("stop")


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which nothing came, in seconds of the loop's clock."""

    start_s: float
    end_s: float
    is_first: bool
    """Whether it ended with the answer's first token."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def overlaps(self, start_s: float, end_s: float) -> bool:
        return self.start_s < end_s and start_s < self.end_s


@dataclass(slots=True)
class Choice:
    """One choice of an answer."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    arrivals: list[float] = field(default_factory=list)
    """The times at which tokens came, in seconds of the loop's clock."""


@dataclass(slots=True)
class Answer:
    """What a client has read so far."""

    request: Request
    choices: list[Choice]
    sent_s: float = 0.0
    usage: dict[str, int] | None = None
    is_done: bool = False
    errors: list[str] = field(default_factory=list)
    """Everything that no client should see."""
    id: str = ""
    """By which the router knows its timeline."""

    @classmethod
    def to(cls, request: Request) -> "Answer":
        return cls(request, [Choice() for _ in range(request.choices)])

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
        answer = Answer.to(request)
        await self.read(answer)
        return answer

    async def read(self, answer: Answer) -> None:
        """Send the request of this answer, and fill the answer while it comes."""
        answer.sent_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._read(answer.request, answer)
        except TimeoutError:
            answer.errors.append(f"no end within {ANSWER_S:g} s")
        except httpx.HTTPError as error:
            answer.errors.append(f"the stream broke off: {type(error).__name__} {error}")
        answer.errors += _unfinished(answer)

    async def _read(self, request: Request, answer: Answer) -> None:
        body = {"model": self._model} | request.body
        async with self.stream("POST", request.path, json=body) as response:
            if response.status_code != 200:
                answer.errors.append(f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')}")
                return
            async for line in response.aiter_lines():
                if line.startswith(EVENT):
                    _take(answer, line.removeprefix(EVENT), asyncio.get_running_loop().time())
                elif line and not line.startswith(":"):
                    answer.errors.append(f"a line that is no event: {line[:80]!r}")


class Streams:
    """Answers that are streamed at the same time, read by a thread of their own."""

    def __init__(self, url: str, model: str, requests: Sequence[Request]) -> None:
        self.answers = [Answer.to(request) for request in requests]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._read(url, model)), daemon=True)
        self._thread.start()

    async def _read(self, url: str, model: str) -> None:
        async with Client(url, model) as client:
            await asyncio.gather(*map(client.read, self.answers))

    def wait_until_begun(self) -> None:
        """Every stream has brought a few tokens, and none has ended: a fault will hit them all."""
        until(lambda: all(answer.tokens > BEGUN_TOKENS or answer.errors for answer in self.answers), "every stream has begun")
        assert not any(answer.is_done or answer.errors for answer in self.answers), "the streams are too short for a fault"

    def wait_until_over(self) -> list[Answer]:
        """Whatever has become of them."""
        self._thread.join(ANSWER_S)
        assert not self._thread.is_alive(), "the streams go on and on"
        return self.answers

    def end(self) -> list[list[int]]:
        """Wait until all have ended as they should: with as many tokens as were asked for. Returns the tokens of each."""
        answers = self.wait_until_over()
        assert [answer.errors for answer in answers] == [[]] * len(answers)
        choices = [choice for answer in answers for choice in answer.choices]
        assert {choice.finish_reason for choice in choices} == {"length"}
        return [choice.token_ids for choice in choices]


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
        answer.id = event.get("id", "")
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
