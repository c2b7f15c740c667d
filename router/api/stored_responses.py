"""Responses that are stored: how a conversation goes on from one, and how one is computed without its client.

Owns what is kept of a response (its body, the items of its conversation, and the events of a stream in the background), and the
work on those in the background. Does not know how an answer is written, nor where it is stored.

    POST, store        the answer is stored when it has ended, before its client has the last of it; a client that leaves ends it
    POST, background   stored at once as `queued`; its work has taken over what its request had taken of the router
    GET, stream        events come out of the store, so any router of the host has them, and again after a broken connection
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

import msgspec
from msgspec.structs import replace as replace_fields
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Send

from common.errors import BadRequest, Conflict, DeadlinePassed, NotFound, TandemError, Unavailable
from router.api.admission import Visit, visit_of
from router.api.answers import BEGIN, END, KEEP_ALIVE, named_event
from router.api.description import Described
from router.api.errors import ErrorDetail, error_json, require_one_of, shown
from router.api.files import USUALLY_LISTED, DeletedBody, ListBody, StoreApi, is_ascending, list_body, number_in
from router.api.responses import Item, MessageItem, ResponseBody, ResponseError, ResponseRequest, ResponseShape, response_request
from router.api.sending import HEADERS_AS_TEXT, AnswerFailed, news_of
from router.api.store import Store, StoredObject
from router.core import Gateway

RESPONSE = "response"
ITEMS_PART = -1
"""The number of the part that holds the items of the conversation. Those of events begin at 0."""
ITEMS_PATH = "/input_items"
MOST_EVENTS = 1_000
"""Read from the store at once."""
ELSEWHERE_S = 0.5
"""How often the store is asked about a response that another router computes."""
STOPPED = "the router stopped while it computed this response: send it again"
CANCEL_S = 30.0
"""How long a response that was cancelled may take to end."""
_ID_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}
_log = logging.getLogger(__name__)
_encode, _decode = msgspec.json.encode, msgspec.json.decode


class _Answered(msgspec.Struct):
    """What is read of a stored body."""

    background: bool
    output: list[Item]


def kept_items(asked: ResponseRequest) -> list[dict[str, Any]]:
    """The items of the conversation that a request asks to answer, each with an id."""
    told = asked.body.input
    items = [MessageItem(role="user", content=told)] if isinstance(told, str) else told
    kept: list[dict[str, Any]] = []
    for item in items:
        fields = {name: value for name, value in msgspec.to_builtins(item).items() if value is not None}
        if isinstance(text := fields.get("content"), str):
            kind = "output_text" if fields["role"] == "assistant" else "input_text"
            fields["content"] = [{"type": kind, "text": text}]
        kept.append({"id": _ID_PREFIXES[fields["type"]] + secrets.token_hex(12), "status": "completed"} | fields)
    return kept


def with_status(body: bytes, status: Literal["cancelled", "failed"], message: str = "") -> bytes:
    """The body of a response that ended otherwise. message: why it failed."""
    error = {"error": {"code": "server_error", "message": message}} if message else {}
    return _encode(_decode(body) | {"status": status} | error)


def failed_response(stored: StoredObject, message: str, number: int) -> tuple[bytes, bytes]:
    """The body of a response that nobody computes any more, and the event of this number that says so."""
    body = with_status(stored.body, "failed", message)
    event = named_event("response.failed", {"sequence_number": number, "response": msgspec.Raw(body)})
    return body, event


class BackgroundResponse:
    """A response that is computed without its client."""

    def __init__(self, store: Store, shape: ResponseShape) -> None:
        self._store, self._shape = store, shape
        self.events = shape.first_events() if shape.request.fields.stream else []
        """Those that are stored with it."""
        self._events_written = len(self.events)
        self.news = asyncio.Event()
        """Set, and replaced, when there is something new in the store."""

    async def run(self, visit: Visit, stored: StoredObject) -> None:
        """Compute it, and store what comes of it. visit: what its request had taken, which this gives back."""
        shape, opens, failed = self._shape, True, None
        try:
            async for delta in news_of(visit.client):
                events = shape.events(delta, opens=opens)
                if self.events or opens:
                    await self._write(stored, events, _encode(shape.body_as("in_progress")) if opens else None)
                opens = False
        except AnswerFailed as error:
            failed = ResponseError("server_error", str(error))
        finally:
            visit.close(HTTPStatus.OK)
        if failed is not None:
            await self._write(stored, shape.failed_event(failed), _encode(shape.body_as("failed", failed)), "")
        else:
            body = _encode(shape.body())
            await self._write(stored, shape.last_events(), with_status(body, "cancelled") if shape.was_aborted else body, "")

    async def _write(self, stored: StoredObject, events: bytes, body: bytes | None, holder: str | None = None) -> None:
        each = [event + END for event in events.split(END) if event] if self.events else []
        numbered = list(enumerate(each, self._events_written))
        self._events_written += len(each)

        def write() -> None:
            self._store.append(stored.number, numbered)
            if body is not None:
                self._store.change(stored, body, holder)

        await self._store.do(write)
        self.news.set()
        self.news = asyncio.Event()


class StoredResponses(StoreApi):
    """The handlers, and the work in the background. keep_alive_s: see `EventStream`."""

    def __init__(self, gateway: Gateway, model: str, store: Store | None, keep_alive_s: float) -> None:
        super().__init__(gateway, model, store)
        self._keep_alive_s = keep_alive_s
        self._runs: dict[tuple[str, str], BackgroundResponse] = {}
        """By owner and id."""
        self._unstored: dict[int, str] = {}
        """By number, why the work on a response has ended, until the store takes it."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def continued(self, asked: ResponseRequest, visit: Visit) -> ResponseRequest:
        """The request with the conversation that it goes on from, and with its answer to `store`. Raises BadRequest, NotFound,
        Conflict."""
        body = asked.body
        wanted = next((name for name in ("previous_response_id", "background", "store") if getattr(body, name)), None)
        if self._store is None and wanted is not None:
            fix = "leave it out, or start the router with --store PATH"
            raise BadRequest(f"{wanted}: this router stores no responses: {fix}", wanted, "unsupported_parameter")
        body = replace_fields(
            body, store=self._store is not None and not visit.is_from_batch if body.store is None else body.store
        )
        if body.store and visit.id.endswith(ITEMS_PATH):
            raise BadRequest(f"X-Request-Id may not end with {ITEMS_PATH} where the response is stored: its URL is taken")
        if body.background and not body.store:
            raise BadRequest("background needs store: leave out store=false, or background", "background")
        if body.previous_response_id:
            earlier = await self._conversation(visit, body.previous_response_id)
            own = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
            return response_request(replace_fields(body, input=[*earlier, *own]))
        return replace(asked, body=body)

    async def _conversation(self, visit: Visit, name: str) -> list[Item]:
        """The items of a stored response, and of its answer. They grow from one to the next, so they are bounded as a body is.
        Raises BadRequest, NotFound, Conflict, StoreFailed."""

        def read() -> tuple[StoredObject | None, bytes]:
            found = self.store.find(visit.owner, RESPONSE, name)
            return found, b"" if found is None else self.store.parts(found.number, ITEMS_PART - 1, 1)[0][1]

        found, items = await self.store.do(read, visit.owner)
        field = "previous_response_id"
        if found is None:
            raise NotFound(f"{field}: no response {shown(name)!r} is stored for your key", field, "previous_response_not_found")
        if found.holder:
            raise Conflict(f"{field}: {shown(name)!r} has not ended: wait for its end", field)
        most, length = visit.max_body_bytes, len(items) + len(found.body)
        if most is not None and length > most:
            raise BadRequest(
                f"{field}: the conversation has {length} bytes, more than --max-body {most}: begin another one", field
            )
        earlier = await visit.parse(items, lambda body, _: _decode(body, type=list[Item]))
        return [*earlier, *await visit.parse(found.body, lambda body, _: _decode(body, type=_Answered).output)]

    async def answer(
        self, visit: Visit, shape: ResponseShape, usual: Callable[[Send], Coroutine[Any, Any, Response]]
    ) -> Response:
        """Send an answer, and store it if that is asked for. usual: sends it, the events of a stream with what it is given."""
        fields = shape.request.body
        if fields.background:
            return await self._begin(visit, shape)
        if not fields.store:
            return await usual(visit.send)

        async def send(message: Message) -> None:
            try:
                if message["body"] and not message.get("more_body"):  # the last event of an answer that ended as it should
                    await self._keep(visit, shape, _encode(shape.body()))
            except TandemError as error:  # its client must not take it for stored
                message = {**message, "body": _failed(error)}
            await visit.send(message)

        response = await usual(send)
        if not fields.stream and response.status_code < 400:
            await self._keep(visit, shape, bytes(response.body))
        return response

    async def _keep(
        self, visit: Visit, shape: ResponseShape, body: bytes, events: Iterable[bytes] = (), holder: str = ""
    ) -> StoredObject:
        parts = [(ITEMS_PART, _encode(kept_items(shape.request))), *enumerate(events)]
        add = partial(self.store.add, visit.owner, RESPONSE, shape.id, body, parts, holder=holder)
        return await self.store.do(add, visit.owner)

    # --- in the background -----------------------------------------------------------------------------------------------

    async def _begin(self, visit: Visit, shape: ResponseShape) -> Response:
        """Have an answer computed without its client."""
        name, body = (visit.owner, shape.id), _encode(shape.body_as("queued"))
        if name in self._runs:
            raise Conflict(f"{shape.id} is being computed: send the request with another X-Request-Id")
        run = self._runs[name] = BackgroundResponse(self.store, shape)
        computing = visit.hand_over()
        try:
            if shape.request.fields.stream:
                visit.take_place()  # whoever reads the events is open beside the work
            stored = await self._keep(visit, shape, body, run.events, self.store.life)
        except BaseException as error:
            del self._runs[name]
            computing.close(error.status if isinstance(error, TandemError) else HTTPStatus.INTERNAL_SERVER_ERROR)
            raise
        task = asyncio.create_task(self._work(run, computing, stored))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if shape.request.fields.stream:
            return self._stream(stored, -1)
        return Response(body, media_type="application/json")

    async def _work(self, run: BackgroundResponse, visit: Visit, stored: StoredObject) -> None:
        try:
            await run.run(visit, stored)
        except TandemError as error:
            _log.error("the answer of %s could not be stored: %s", stored.id, error)
            self._unstored[stored.number] = str(error)
        finally:
            del self._runs[stored.owner, stored.id]
            run.news.set()

    async def beat(self) -> None:
        """Heed cancels from everywhere, and fail what nobody computes any more."""
        for stored in await self.store.do(partial(self.store.work, RESPONSE)):
            run = self._runs.get((stored.owner, stored.id))
            if run is None:
                await self.store.do(partial(self._fail, stored, self._unstored.get(stored.number, STOPPED)))
                self._unstored.pop(stored.number, None)
            elif stored.is_cancelled:
                self._gateway.abort(stored.owner, stored.id)

    def _fail(self, stored: StoredObject, message: str) -> None:
        """Nobody computes it any more. Runs within the store."""
        if self.store.now(stored.number).holder != stored.holder:
            return  # another router was faster
        last = max(self.store.part_numbers(stored.number), default=ITEMS_PART)
        body, event = failed_response(stored, message, last + 1)
        if last > ITEMS_PART:
            self.store.append(stored.number, [(last + 1, event)], may_exceed=True)
        self.store.change(stored, body, "")

    async def close(self, within_s: float) -> None:
        """Wait for the ends of what has been told to end."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)
        for task in self._tasks:
            task.cancel()

    def _stream(self, stored: StoredObject, after: int) -> Response:
        return StreamingResponse(self._events(stored, after), headers=HEADERS_AS_TEXT)

    async def _events(self, stored: StoredObject, after: int) -> AsyncIterator[bytes]:
        """The events behind the one of this number, up to the last one of the answer."""
        told_s = time.monotonic()
        while True:
            news = self._news(stored)
            is_here = (stored.owner, stored.id) in self._runs
            try:
                parts, is_open = await self.store.do(partial(self._since, stored.number, after))
            except TandemError as error:  # it was deleted as soon as it had ended, or the store cannot be used
                yield _failed(error)
                return
            if parts:
                after = parts[-1][0]
                yield b"".join(event for _, event in parts)
                told_s = time.monotonic()
            elif not is_open:
                return
            elif stored.number in self._unstored:
                yield failed_response(stored, self._unstored[stored.number], after + 1)[1]
                return
            elif self._gateway.core.requests.is_draining and not is_here:
                yield _failed(Unavailable(f"the router stops: read on with starting_after={after} at another one"))
                return
            else:
                await _heard(news)
            if self._keep_alive_s and time.monotonic() - told_s >= self._keep_alive_s:
                yield KEEP_ALIVE
                told_s = time.monotonic()

    def _since(self, number: int, after: int) -> tuple[list[tuple[int, bytes]], bool]:
        return self.store.parts(number, after, MOST_EVENTS), bool(self.store.now(number).holder)

    def _news(self, stored: StoredObject) -> asyncio.Event:
        """Set when there is something new; never if another router computes it."""
        run = self._runs.get((stored.owner, stored.id))
        return asyncio.Event() if run is None else run.news

    # --- endpoints -------------------------------------------------------------------------------------------------------

    # An id may hold slashes, as its client chose it: the longer URL is looked for first.
    @Described(f"GET /v1/responses/{{id:path}}{ITEMS_PATH}", "OpenAI", "The conversation of a response", refusals=(404,))
    async def input_items(self, request: Request, id: str, limit: str = "", order: str = "", after: str = "") -> ListBody:
        """List the items that a response answers, those of earlier responses included, the latest first."""
        most, step = number_in(limit, "limit", USUALLY_LISTED, 1, 100), 1 if is_ascending(order) else -1
        stored = await self.find(request, RESPONSE, id)
        ((_, packed),) = await self.call(request, partial(self.store.parts, stored.number, ITEMS_PART - 1, 1))
        items = _decode(packed)[::step]
        ids = [item["id"] for item in items]
        if after and after not in ids:
            raise BadRequest(f"after: {shown(after)!r} is not among the items", field="after")
        return list_body(items[ids.index(after) + 1 if after else 0 :], most)

    @Described("GET /v1/responses/{id:path}", "OpenAI", "A stored response", answer_type=ResponseBody, refusals=(404,))
    async def read(self, request: Request, id: str, stream: str = "", starting_after: str = "") -> Response:
        """Send a response of your key as it is now. stream=true, if it was made with `background` and `stream`: its events, all
        or those behind the number `starting_after`, and those that are still to come."""
        require_one_of("stream", stream, ("", "true", "false"), None)
        if starting_after and stream != "true":
            raise BadRequest("starting_after is for streams only: send stream=true with it", field="starting_after")
        after = number_in(starting_after, "starting_after", ITEMS_PART, 0, 2**30)
        stored = await self.find(request, RESPONSE, id)
        if stream != "true":
            body = stored.body
            if stored.number in self._unstored:
                body, _ = failed_response(stored, self._unstored[stored.number], 0)
            return Response(body, media_type="application/json")
        if not await self.call(request, partial(self.store.parts, stored.number, ITEMS_PART, 1)):
            raise BadRequest(f"{shown(id)} has no events: it was not made with background and stream", field="stream")
        visit_of(request).take_place()
        return self._stream(stored, after)

    @Described("DELETE /v1/responses/{id:path}", "OpenAI", "Delete a stored response", refusals=(404, 409))
    async def delete(self, request: Request, id: str) -> DeletedBody:
        """Forget a response. What later responses have of its conversation stays with them."""
        stored = await self.find(request, RESPONSE, id)
        if not await self.call(request, partial(self.store.remove, stored.number)):
            raise Conflict(f"{shown(id)} is being computed: cancel it first, or wait for its end")
        return DeletedBody(id, RESPONSE)

    @Described(
        "POST /v1/responses/{id:path}/cancel", "OpenAI", "Cancel a response", answer_type=ResponseBody, refusals=(400, 404)
    )
    async def cancel(self, request: Request, id: str) -> Response:
        """End a response in the background. It keeps the text that it has got. One that has ended stays as it is."""
        stored = await self.find(request, RESPONSE, id)
        if not _decode(stored.body, type=_Answered).background:
            raise BadRequest(f"{shown(id)} was not made with background: end such a one by closing its connection")
        visit_of(request).take_place()
        try:
            async with asyncio.timeout(CANCEL_S):
                while stored.holder:
                    news = self._news(stored)
                    await self.call(request, partial(self.store.cancel, stored.number))
                    await self.beat()
                    await _heard(news)
                    stored = await self.call(request, partial(self.store.now, stored.number))
        except TimeoutError as error:
            raise DeadlinePassed(f"{shown(id)} has not ended within {CANCEL_S:g} s: ask for it again") from error
        return Response(stored.body, media_type="application/json")


async def _heard(news: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(news.wait(), ELSEWHERE_S)


def _failed(error: TandemError) -> bytes:
    """The event that ends a stream whose rest cannot be had."""
    return BEGIN + error_json(ErrorDetail(str(error), error.kind)) + END
