"""A running engine that is asked, in one of two ways: over HTTP, or as a driver that takes requests and tells of tokens on pipes.

Owns the clock: in both ways, a token's time is when this process learns of it. Does not know which engine it is.
"""

import asyncio
import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec
import uvloop

from bench.client import COUNTED_STREAM, HttpClient, TimedAnswer, completion_of_ids
from bench.cpu_peers.engines import SERVED_NAME
from bench.offline import OfflineSequence
from common.errors import TandemError
from common.processes.child import Child, ChildEvent, Exited, JsonLine

PATH = "/v1/completions"


class EngineFailed(TandemError):
    """An engine did not start, did not answer, or not as asked."""


class Asking(Protocol):
    """An engine that runs."""

    @property
    def pid(self) -> int:
        """The process that was started; others may be below it."""

    def ask(self, asked: Sequence[OfflineSequence], limit_s: float) -> list[TimedAnswer]:
        """Send all requests at once and wait for all answers, greedy and of the lengths asked for. Raises EngineFailed."""


class OverHttp:
    """A server with OpenAI's API."""

    def __init__(self, url: str, pid: int) -> None:
        self._url, self.pid = url, pid

    def ask(self, asked: Sequence[OfflineSequence], limit_s: float) -> list[TimedAnswer]:
        answers: list[TimedAnswer] = uvloop.run(self._ask(asked, limit_s))
        _check(answers)
        return answers

    async def _ask(self, asked: Sequence[OfflineSequence], limit_s: float) -> list[TimedAnswer]:
        client = HttpClient(self._url, PATH, {}, limit_s)
        answers, bodies = _answers(asked), [_body(each) for each in asked]
        for answer in answers:
            answer.begin(time.perf_counter())
        try:
            await asyncio.gather(*map(client.ask, answers, bodies))
        finally:
            client.close()
        return answers


class Ready(JsonLine, frozen=True):
    """A driver has loaded the model."""


class Arrived(JsonLine, frozen=True):
    """requests: those that got a token, each as often as it got one."""

    requests: list[int]


class Finished(JsonLine, frozen=True):
    """All requests of the load have been answered."""


class Request(msgspec.Struct, frozen=True):
    prompt: list[int]
    answer_tokens: int


class Requests(JsonLine, frozen=True):
    """A load."""

    requests: list[Request]


Report: TypeAlias = Ready | Arrived | Finished


class OverPipes:
    """A driver, see `drivers/talk.py`."""

    def __init__(self, name: str, command: Sequence[str], variables: dict[str, str], on_output: Callable[[str], object]) -> None:
        self._events: queue.SimpleQueue[tuple[float, ChildEvent[Report]]] = queue.SimpleQueue()
        self.child: Child[Requests, Report] = Child(
            name,
            command,
            msgspec.json.Decoder[Report](Report),
            lambda event: self._events.put((time.perf_counter(), event)),
            on_output,
            variables,
        )

    @property
    def pid(self) -> int:
        return self.child.pid

    def wait_ready(self, limit_s: float) -> None:
        """Raises EngineFailed."""
        _, report = self._next(time.perf_counter() + limit_s)
        assert isinstance(report, Ready)

    def ask(self, asked: Sequence[OfflineSequence], limit_s: float) -> list[TimedAnswer]:
        answers = _answers(asked)
        order = Requests([Request(each.prompt.tolist(), each.answer_tokens) for each in asked])
        began_s = time.perf_counter()
        for answer in answers:
            answer.begin(began_s)
        self.child.order(order)
        while True:
            now_s, report = self._next(began_s + limit_s)
            if isinstance(report, Finished):
                break
            assert isinstance(report, Arrived)
            for number, tokens in Counter(report.requests).items():
                answers[number].add(now_s, tokens)
        for answer in answers:
            answer.end(now_s)
        _check(answers)
        return answers

    def _next(self, until_s: float) -> tuple[float, Report]:
        try:
            at_s, event = self._events.get(timeout=max(0.0, until_s - time.perf_counter()))
        except queue.Empty:
            raise EngineFailed(f"{self.child.name} took too long") from None
        if isinstance(event, Exited):
            raise EngineFailed(f"{self.child.name} ended: {event.account}")
        return at_s, event.report


def _answers(asked: Sequence[OfflineSequence]) -> list[TimedAnswer]:
    return [TimedAnswer(0.0, each.answer_tokens, len(each.prompt)) for each in asked]


def _body(asked: OfflineSequence) -> bytes:
    return completion_of_ids(SERVED_NAME, asked.prompt.tolist(), asked.answer_tokens, **COUNTED_STREAM)


def _check(answers: Sequence[TimedAnswer]) -> None:
    """Raises EngineFailed unless each answer is whole."""
    for answer in answers:
        if answer.error:
            raise EngineFailed(f"a request failed: {answer.error}: {answer.message}")
        if answer.counted != answer.requested_tokens:
            raise EngineFailed(f"an answer has {answer.counted} tokens, and {answer.requested_tokens} were asked for")
