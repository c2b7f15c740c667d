"""/v1/batches: files of requests, computed when there is room, over hours if need be.

Owns the form of a batch and of its lines, and the work on it. Each line goes through the router's own application, in process, as
a request of the key that sent the batch: so every endpoint that answers with a completion takes part, with its own refusals, and
a line counts against the key's places and --max-requests, takes its key's turns, and is cancelled as a request is whose client
leaves. What differs: no key is presented, it comes after everything else that waits, it leaves a quarter of
--max-requests to others, and it has as long as its batch.

    validating ─► in_progress ─► completed, expired (with what had been computed)
         └─► failed    └─► cancelling ─► cancelled

What each line brought is stored at once, under the number of its line. So whichever router goes on with a batch, after a restart
or in place of one that died, computes only the lines that have brought nothing yet.

Fields: https://platform.openai.com/docs/api-reference/batch.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from fastapi import Request
from msgspec import Meta
from msgspec.structs import replace
from starlette.types import Message

from common.errors import BadRequest, NotFound, TandemError
from router.api.admission import BATCH_OWNER, visit_of
from router.api.description import Described, DescribedApp
from router.api.errors import shown
from router.api.fields import Labels
from router.api.files import FILE, USUALLY_LISTED, ListBody, StoreApi, list_body, new_file, number_in
from router.api.guard import HEADER
from router.api.store import IN_USE, OBJECT_BYTES, WAITING, Store, StoredObject
from router.api.threads import Turns
from router.core import Gateway

BATCH = "batch"
WINDOW_S = 24 * 3600
MOST_LINES = 50_000
MOST_ERRORS = 100
"""Shown of the errors of a file."""
MOST_RUNNING = 8
"""Batches that one router works on, each of another key; others wait."""
RETRIED = (429, 503)
LONGEST_RETRY_S = 60
_log = logging.getLogger(__name__)
_encode, _decode = msgspec.json.encode, msgspec.json.decode

BatchStatus: TypeAlias = Literal["validating", "failed", "in_progress", "completed", "expired", "cancelling", "cancelled"]
BatchEnding: TypeAlias = Literal["failed", "completed", "expired", "cancelled"]


class BatchFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    """A file of POST /v1/files."""
    endpoint: str
    """The URL of every line, such as /v1/chat/completions."""
    completion_window: Literal["24h"]
    """After this time the batch ends with what it has."""
    metadata: Labels = {}
    """Labels, which the batch repeats."""


class LineError(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    data: Sequence[LineError]
    object: str = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchBody(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are in seconds since 1970."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str]


class BatchLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _LineBody(msgspec.Struct):
    """What a line may not ask for."""

    stream: bool | None = False
    background: bool | None = False


class LineResponse(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineOutput(msgspec.Struct, frozen=True):
    """What a line has brought."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None = None


def read_lines(content: bytes, endpoint: str) -> tuple[dict[int, BatchLine], list[LineError]]:
    """The lines of an input file by number, from 1, and what is wrong with it."""
    lines: dict[int, BatchLine] = {}
    errors: list[LineError] = []
    seen: set[str] = set()
    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = lines[number] = _decode(text, type=BatchLine)
            asked = _decode(line.body, type=_LineBody)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            errors.append(LineError("invalid_json_line", f"the line is no request: {error}"[:300], number))
            continue
        if line.url != endpoint:
            errors.append(LineError("mismatched_url", f"url must be {endpoint}, as the batch says", number))
        if line.custom_id in seen:
            errors.append(LineError("duplicate_custom_id", "an earlier line has this custom_id", number))
        if asked.stream or asked.background:
            errors.append(LineError("invalid_request", "a line gets a whole answer: leave out stream and background", number))
        seen.add(line.custom_id)
    if not errors and not 1 <= len(lines) <= MOST_LINES:
        errors.append(LineError("invalid_file", f"the file has {len(lines)} lines: send 1 to {MOST_LINES}"))
    return lines, errors[:MOST_ERRORS]


@dataclass(slots=True, eq=False)
class RunningBatch:
    """A batch that this router works on."""

    stored: StoredObject
    lines: dict[int, BatchLine] = field(default_factory=dict)
    """All of the file, by number."""
    left: deque[int] = field(default_factory=deque)
    """Those that nobody has begun."""
    files: Sequence[int] = ()
    """The numbers of the files of answers and of errors."""
    computing: "asyncio.Task[None] | None" = None
    failure: TandemError | None = None
    """Why nothing more can be stored."""


class BatchesApi(StoreApi):
    """The handlers and the work. most_open: so many lines are open at once."""

    def __init__(self, gateway: Gateway, model: str, store: Store | None, most_open: int) -> None:
        super().__init__(gateway, model, store)
        self.app: DescribedApp | None = None
        """The router's application."""
        self.news = asyncio.Event()
        """Set when a batch waits, or is to end."""
        self._most_open = most_open
        self._slots = Turns(most_open)
        """One for each open line. Keys take turns, and lines of one key that do not get on leave some to others."""
        self._running: dict[int, RunningBatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- endpoints -------------------------------------------------------------------------------------------------------

    @Described("POST /v1/batches", "OpenAI", "Create a batch")
    async def create(self, request: Request, asked: BatchFields) -> BatchBody:
        """Have the lines of a file computed when there is room."""
        store, owner, now = self.store, visit_of(request).owner, int(time.time())
        assert self.app is not None
        if asked.endpoint not in self.app.completion_paths:
            raise BadRequest(f"endpoint must be one of {', '.join(self.app.completion_paths)}", field="endpoint")
        id = f"batch_{secrets.token_hex(12)}"
        files = [new_file(f"{id}_{what}.jsonl", "batch_output", 0, store.age_s) for what in ("output", "error")]
        body = BatchBody(
            **msgspec.structs.asdict(asked),
            id=id,
            output_file_id=files[0].id,
            error_file_id=files[1].id,
            created_at=now,
            expires_at=now + WINDOW_S,
        )

        def add() -> None:
            if store.find(owner, FILE, asked.input_file_id) is None:
                raise NotFound(f"input_file_id: no file {shown(asked.input_file_id)!r} is stored for your key", "input_file_id")
            store.add(owner, BATCH, id, _encode(body), holder=WAITING, needs=asked.input_file_id)
            for file in files:
                store.add(owner, FILE, file.id, _encode(file), holder=IN_USE)

        await self.call(request, add)
        self.news.set()
        return replace(body, output_file_id=None, error_file_id=None)

    @Described("GET /v1/batches", "OpenAI", "Batches")
    async def batches(self, request: Request, limit: str = "", after: str = "") -> ListBody:
        """List the batches of your key, the latest first."""
        owner, most = visit_of(request).owner, number_in(limit, "limit", USUALLY_LISTED, 1, 100)

        def read() -> list[Any]:
            return [msgspec.to_builtins(self._shown(each)) for each in self.store.page(owner, BATCH, after, most + 1, False)]

        return list_body(await self.call(request, read), most)

    @Described("GET /v1/batches/{id}", "OpenAI", "A batch", refusals=(404,))
    async def batch(self, request: Request, id: str) -> BatchBody:
        """Describe a batch as it is now. Its files can be read when it has ended."""
        stored = await self.find(request, BATCH, id)
        return await self.call(request, partial(self._shown, stored))

    @Described("POST /v1/batches/{id}/cancel", "OpenAI", "Cancel a batch", refusals=(404,))
    async def cancel(self, request: Request, id: str) -> BatchBody:
        """End a batch: its open lines are cancelled, and what the others brought stays. One that has ended stays as it is."""
        stored = await self.find(request, BATCH, id)

        def cancel() -> BatchBody:
            now = self.store.now(stored.number)
            if now.holder and not now.is_cancelled:
                self.store.change(now, _encode(replace(_body_of(now), cancelling_at=int(time.time()))))
                self.store.cancel(now.number)
            return self._shown(self.store.now(now.number))

        shown_now = await self.call(request, cancel)
        self.news.set()
        return shown_now

    def _shown(self, stored: StoredObject) -> BatchBody:
        """As clients see it. Runs within the store."""
        body = _body_of(stored)
        if not stored.holder:
            return body
        status: BatchStatus = "cancelling" if stored.is_cancelled else body.status
        return replace(self._counted(stored.owner, body), status=status, output_file_id=None, error_file_id=None)

    def _counted(self, owner: str, body: BatchBody) -> BatchBody:
        """With the lines that have brought something until now. Runs within the store."""
        files = [self.store.find(owner, FILE, name or "") for name in (body.output_file_id, body.error_file_id)]
        completed, failed = (0 if file is None else len(self.store.part_numbers(file.number)) for file in files)
        return replace(body, request_counts=RequestCounts(body.request_counts.total, completed, failed))

    # --- work ------------------------------------------------------------------------------------------------------------

    async def beat(self) -> None:
        """Begin what waits, heed cancels from everywhere, and let go of what nobody works on any more."""
        store = self.store
        for stored in await store.do(partial(store.work, BATCH)):
            running = self._running.get(stored.number)
            if running is None:
                await store.do(partial(store.change, stored, stored.body, WAITING))
            elif stored.is_cancelled and running.computing is not None:
                running.computing.cancel()
        while len(self._running) < MOST_RUNNING and not self._drains():
            owners = {running.stored.owner for running in self._running.values()}
            claimed = await store.do(partial(store.claim, BATCH, owners))
            if claimed is None:
                break
            self._running[claimed.number] = RunningBatch(claimed)
            task = asyncio.create_task(self._work(self._running[claimed.number]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Break off. Lines that have brought nothing yet are computed by whoever goes on."""
        for task in self._tasks | {each.computing for each in self._running.values() if each.computing is not None}:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _drains(self) -> bool:
        return self._gateway.core.requests.is_draining

    async def _work(self, running: RunningBatch) -> None:
        try:
            errors = await self._begin(running)
            ended: BatchEnding | None = "failed" if errors else await self._compute(running)
            if running.failure is not None:
                ended, errors = "failed", [LineError("store_failed", str(running.failure))]
            await self.store.do(partial(self._end, running, ended, errors))
            self.news.set()
        except TandemError as error:  # the next beat lets go of it, so that it is tried again
            _log.error("batch %s: %s", running.stored.id, error)
        except Exception:  # noqa: BLE001  it would meet the bug again with each beat, and could not even be cancelled
            _log.exception("batch %s met a bug", running.stored.id)
            bug = LineError("internal_error", "internal error: see the router's log")
            await self.store.do(partial(self._end, running, "failed", [bug]))
        finally:
            del self._running[running.stored.number]

    async def _begin(self, running: RunningBatch) -> Sequence[LineError]:
        """Read the lines, and find those that have brought something. Returns what is wrong with them."""
        store, stored, body = self.store, running.stored, _body_of(running.stored)

        def read() -> tuple[bytes, set[int]]:
            names = body.input_file_id, body.output_file_id, body.error_file_id
            asked, *running.files = [file.number for name in names if (file := store.find(stored.owner, FILE, name or ""))]
            done = set[int]().union(*map(store.part_numbers, running.files))
            return b"".join(piece for _, piece in store.parts(asked)), done

        content, done = await store.do(read)
        running.lines, errors = await asyncio.to_thread(read_lines, content, body.endpoint)
        running.left.extend(number for number in running.lines if number not in done)
        counts, at = RequestCounts(len(running.lines)), body.in_progress_at or int(time.time())

        def begin() -> None:
            now = store.now(stored.number)
            store.change(now, _encode(replace(_body_of(now), status="in_progress", in_progress_at=at, request_counts=counts)))

        await store.do(begin)
        return errors

    async def _compute(self, running: RunningBatch) -> BatchEnding | None:
        """Compute the lines that have brought nothing yet. Returns how the batch ends; None: the router drains."""
        if running.stored.is_cancelled:
            return "cancelled"
        computing = running.computing = asyncio.create_task(self._workers(running))
        await asyncio.wait({computing}, timeout=max(0, _body_of(running.stored).expires_at - time.time()))
        if computing.done():
            return "cancelled" if computing.cancelled() else None if running.left else "completed"
        computing.cancel()
        await asyncio.wait({computing})
        return "expired"

    async def _workers(self, running: RunningBatch) -> None:
        await asyncio.gather(*(self._worker(running) for _ in range(min(self._most_open, len(running.left)))))

    async def _worker(self, running: RunningBatch) -> None:
        """Compute one line after the other."""
        while running.left and not self._drains():
            number = running.left.popleft()
            line = running.lines[number]
            while (response := await self._response(running.stored.owner, line)) is None:
                if self._drains():
                    running.left.append(number)
                    return
            output = _encode(LineOutput(f"batch_req_{secrets.token_hex(12)}", line.custom_id, response)) + b"\n"
            file = running.files[0 if response.status_code < 400 else 1]
            try:
                await self.store.do(partial(self.store.append, file, [(number, output)]))
            except TandemError as error:
                running.failure = error
                running.left.clear()

    async def _response(self, owner: str, line: BatchLine) -> LineResponse | None:
        """What the router's own application answers; None when it had no room, and may have some now."""
        answer: dict[str, Any] = {}
        parts: list[bytes] = []
        unread = [{"type": "http.request", "body": bytes(line.body), "more_body": False}]

        async def receive() -> Message:
            return unread.pop() if unread else await asyncio.get_running_loop().create_future()  # its client does not leave

        async def send(message: Message) -> None:
            answer.update(message)
            parts.append(message.get("body", b""))

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": line.url, "query_string": b"", "headers": headers, BATCH_OWNER: owner}
        assert self.app is not None
        async with self._slots.held(owner):
            try:
                await self.app(scope, receive, send)
            except Exception:  # noqa: BLE001  the application has answered 500 before it raises, and the other lines go on
                _log.exception("a line of a batch met a bug")
        told = dict(answer["headers"])
        if answer["status"] in RETRIED:
            await asyncio.sleep(min(int(told.get(b"retry-after", b"1")), LONGEST_RETRY_S))
            return None
        return LineResponse(answer["status"], told[HEADER].decode(), msgspec.Raw(b"".join(parts)))

    def _end(self, running: RunningBatch, ended: BatchEnding | None, errors: Sequence[LineError]) -> None:
        """Runs within the store. ended: None when another life is to go on."""
        store, now, at = self.store, self.store.now(running.stored.number), int(time.time())
        if ended is None:
            store.change(now, now.body, WAITING)
            return
        if ended == "expired":
            done = set[int]().union(*map(store.part_numbers, running.files))
            error = LineError("batch_expired", "the time of the batch was over before this line was computed")
            late = ((number, LineOutput("", line.custom_id, None, error)) for number, line in running.lines.items())
            store.append(running.files[1], [(number, _encode(each) + b"\n") for number, each in late if number not in done])
        body = self._counted(now.owner, _body_of(now))
        names: list[str | None] = []
        for file in map(store.now, running.files):
            content_bytes = file.bytes - OBJECT_BYTES - len(file.body)
            store.change(file, _encode(_decode(file.body) | {"bytes": content_bytes}), "")
            names.append(file.id if content_bytes else None)
            if not content_bytes:
                store.remove(file.number)
        body = replace(body, status=ended, output_file_id=names[0], error_file_id=names[1], **{f"{ended}_at": at})
        body = replace(body, finalizing_at=at, errors=BatchErrors(errors) if errors else None)
        store.change(now, _encode(body), "")


def _body_of(stored: StoredObject) -> BatchBody:
    return _decode(stored.body, type=BatchBody)
