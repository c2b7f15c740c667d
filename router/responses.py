"""The two ways to answer: a stream of server-sent events, and one JSON body.

Owns the order of what is sent. Nothing is sent before the first news of the request, so an early failure still gets its proper
status; a later one becomes an error event. Does not know the fleet.

Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from common.errors import TandemError
from common.messages import Failed, Finished
from router.answer import Answer, ClientGone
from router.openai_answers import AnswerShape, OpenAIFinish, TokenIds, Usage, WholeChoice
from router.openai_errors import detail_of_failure, error_json, response_to, response_to_failure
from router.outbox import ChoiceDelta

DONE = b"data: [DONE]\n\n"
SEND_TIMEOUT_S = 60.0


async def _send_in_time(send: Send, message: Message) -> None:
    """Raises ClientGone when the client's side has taken nothing for `SEND_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send(message)
    except TimeoutError as error:
        raise ClientGone from error


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the client asked for, as far as writing the answer needs it."""

    shape: AnswerShape
    choices: int
    prompt_tokens: int
    include_usage: bool
    return_token_ids: bool

    def token_ids(self, ids: Sequence[int]) -> TokenIds:
        """As they go into the answer: only when they were asked for."""
        return tuple(ids) if self.return_token_ids else msgspec.UNSET

    def usage(self, completion_tokens: int) -> Usage:
        return Usage(self.prompt_tokens, completion_tokens, self.prompt_tokens + completion_tokens)


class _CompletionResponse(Response, ABC):
    """Dispatches the request when it is sent, and cancels it when sending ends early."""

    def __init__(self, asked: Asked, open_answer: Callable[[Receive], Answer]) -> None:
        super().__init__()
        self._asked = asked
        self._open_answer = open_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._open_answer(receive) as answer:
                refusal = await self._answer(answer, partial(_send_in_time, send))
        except (ClientGone, OSError):
            return  # OSError is what ASGI servers raise when they send to a client that has gone
        except TandemError as error:
            refusal = response_to(error)
        if refusal is not None:
            await refusal(scope, receive, send)

    @abstractmethod
    async def _answer(self, answer: Answer, send: Send) -> Response | None:
        """Send the answer, or send nothing and return the response that says why there is none."""


class WholeResponse(_CompletionResponse):
    """One JSON body with every choice."""

    async def _answer(self, answer: Answer, send: Send) -> Response | None:
        texts: list[list[str]] = [[] for _ in range(self._asked.choices)]
        token_ids: list[list[int]] = [[] for _ in range(self._asked.choices)]
        reasons: list[OpenAIFinish] = ["stop"] * self._asked.choices
        while deltas := await answer.read():
            for delta in deltas:
                if (failed := _failure(delta)) is not None:
                    return response_to_failure(failed)
                texts[delta.index].append(delta.text)
                token_ids[delta.index] += delta.token_ids
                if delta.ending is not None:
                    reasons[delta.index] = _finish_reason(delta)
        choices = [
            WholeChoice(index, "".join(text), reason, self._asked.token_ids(ids))
            for index, (text, reason, ids) in enumerate(zip(texts, reasons, token_ids, strict=True))
        ]
        body = self._asked.shape.whole(choices, self._asked.usage(sum(map(len, token_ids))))
        await send(_start(b"application/json", self._asked, len(body)))
        await send({"type": "http.response.body", "body": body})
        return None


class StreamResponse(_CompletionResponse):
    """A chunk for each piece of text; pieces that wait for a slow client are sent as one."""

    async def _answer(self, answer: Answer, send: Send) -> Response | None:
        shape = self._asked.shape
        opened = [False] * self._asked.choices
        tokens, started = 0, False
        while deltas := await answer.read():
            failed = next((failed for delta in deltas if (failed := _failure(delta)) is not None), None)
            if failed is not None and not started:
                return response_to_failure(failed)
            tokens += sum(len(delta.token_ids) for delta in deltas)
            events = self._events(deltas, opened)
            if failed is not None:
                events.append(event(error_json(detail_of_failure(failed))))
            if events and not started:
                await send(_start(b"text/event-stream; charset=utf-8", self._asked, None))
                started = True
            if events:
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
            if failed is not None:
                await send({"type": "http.response.body", "body": b""})
                return None
        usage = event(shape.usage(self._asked.usage(tokens))) if self._asked.include_usage else b""
        await send({"type": "http.response.body", "body": usage + DONE})
        return None

    def _events(self, deltas: Sequence[ChoiceDelta], opened: list[bool]) -> list[bytes]:
        shape = self._asked.shape
        events: list[bytes] = []
        for delta in _joined(deltas):
            if not opened[delta.index]:
                opened[delta.index] = True
                opening = shape.opening(delta.index)
                if opening is not None:
                    events.append(event(opening))
            if delta.text or (self._asked.return_token_ids and delta.token_ids):
                events.append(event(shape.text(delta.index, delta.text, self._asked.token_ids(delta.token_ids))))
            if isinstance(delta.ending, Finished):
                events.append(event(shape.closing(delta.index, _finish_reason(delta))))
        return events


def _joined(deltas: Sequence[ChoiceDelta]) -> Sequence[ChoiceDelta]:
    """One delta for each choice that has news."""
    if len(deltas) == 1:
        return deltas
    joined: dict[int, ChoiceDelta] = {}
    for delta in deltas:
        before = joined.get(delta.index)
        if before is not None:
            delta = ChoiceDelta(delta.index, before.text + delta.text, before.token_ids + delta.token_ids, delta.ending)
        joined[delta.index] = delta
    return list(joined.values())


def _failure(delta: ChoiceDelta) -> Failed | None:
    """How the choice failed. That an instance gave it up is a failure too: the client did not cancel it."""
    if isinstance(delta.ending, Finished) and delta.ending.reason == "cancelled":
        return Failed(message="the request was cancelled by the instance that served it")
    return delta.ending if isinstance(delta.ending, Failed) else None


def _finish_reason(delta: ChoiceDelta) -> OpenAIFinish:
    return "length" if isinstance(delta.ending, Finished) and delta.ending.reason == "length" else "stop"


def _start(media_type: bytes, asked: Asked, length: int | None) -> dict[str, object]:
    headers = [(b"content-type", media_type), (b"x-request-id", asked.shape.id.encode())]
    if length is None:
        headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    else:
        headers.append((b"content-length", str(length).encode()))
    return {"type": "http.response.start", "status": 200, "headers": headers}
