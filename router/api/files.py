"""/v1/files: what batches read and write. And what all that is stored has in common: its owner alone finds it, page by page.

Owns the form of an upload and of a file. Does not know what a file says. Fields: https://platform.openai.com/docs/api-reference/files.
"""

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import Response, StreamingResponse

from common.errors import BadRequest, Conflict, NotFound
from router.api.admission import visit_of
from router.api.description import ApiPart, Described
from router.api.errors import UnsupportedBody, require_one_of, shown
from router.api.guard import UPLOAD_PATH
from router.api.store import Store, StoredObject
from router.core import Gateway

FILE = "file"
PIECE_BYTES, PIECES = 2**18, 16
"""A file is stored in pieces of this size, and so many are sent together."""
MOST_LISTED, USUALLY_LISTED = 10_000, 20

R = TypeVar("R")


class ListBody(msgspec.Struct, frozen=True):
    """A page of a list."""

    data: Sequence[Any]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


def list_body(found: Sequence[Any], limit: int) -> ListBody:
    """The first ones of these: one more than the limit if there are more."""
    data = found[:limit]
    ids = [one["id"] for one in data]
    return ListBody(data, len(found) > limit, ids[0] if ids else None, ids[-1] if ids else None)


def number_in(text: str, field: str, usual: int, least: int, most: int) -> int:
    """What a parameter of the URL says. Raises BadRequest."""
    if text and not (text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise BadRequest(f"{field} must be between {least} and {most}, is {shown(text)!r}", field=field)
    return int(text or usual)


def is_ascending(order: str) -> bool:
    """Raises BadRequest."""
    require_one_of("order", order, ("", "asc", "desc"), None)
    return order == "asc"


class StoreApi(ApiPart):
    """Endpoints for what is stored."""

    def __init__(self, gateway: Gateway, model: str, store: Store | None) -> None:
        super().__init__(gateway, model)
        self._store = store

    @property
    def store(self) -> Store:
        """Raises BadRequest where there is none."""
        if self._store is None:
            raise BadRequest("this router stores nothing: start it with --store PATH", code="unsupported_endpoint")
        return self._store

    async def call(self, request: Request, work: Callable[[], R]) -> R:
        """Do this in the store for a client."""
        return await self.store.do(work, visit_of(request).owner)

    async def find(self, request: Request, kind: str, id: str) -> StoredObject:
        """Raises NotFound, also when another key has it."""
        found = await self.call(request, partial(self.store.find, visit_of(request).owner, kind, id))
        if found is None:
            raise NotFound(f"no {kind} {shown(id)!r} is stored for your key: it may have been deleted, or have become too old")
        return found


class FileBody(msgspec.Struct, frozen=True, kw_only=True):
    """A file, without its content."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"


class DeletedBody(msgspec.Struct, frozen=True):
    id: str
    object: str
    deleted: bool = True


class UploadFields(msgspec.Struct, frozen=True):
    """The parts of POST /v1/files."""

    purpose: str
    """batch: files are for nothing else here."""
    file: str
    """The file, with a name. With all else it has at most `--max-body`."""


def new_file(filename: str, purpose: str, content_bytes: int, age_s: float) -> FileBody:
    """age_s: how long the store keeps it."""
    now, id = int(time.time()), f"file-{secrets.token_hex(12)}"
    return FileBody(
        id=id, bytes=content_bytes, created_at=now, expires_at=now + int(age_s), filename=filename[:255], purpose=purpose
    )


class FilesApi(StoreApi):
    """The handlers."""

    @Described(f"POST {UPLOAD_PATH}", "OpenAI", "Upload a file", body=UploadFields, body_type="multipart/form-data")
    async def upload(self, request: Request) -> FileBody:
        """Store a file for a batch: in each line a JSON object with `custom_id`, `method`, `url` and `body`."""
        visit = visit_of(request)
        body = await visit.read(request, lambda body, _: body)
        store = self.store

        async def pieces() -> Any:
            for begin in range(0, len(body), PIECE_BYTES):
                yield body[begin : begin + PIECE_BYTES]

        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise UnsupportedBody("the body must be multipart/form-data, with the parts purpose and file")
        try:
            form = await MultiPartParser(request.headers, pieces(), max_files=1, max_fields=2).parse()
            content = [await each.read() for each in form.values() if isinstance(each, UploadFile)]
            await form.close()
        except MultiPartException as error:
            raise BadRequest(f"the body is not as multipart/form-data should be: {error.message}") from error
        except ValueError as error:  # of the charset that the client names, which may be any codec of Python
            raise BadRequest("the body is not in the charset that it names: send UTF-8") from error
        for name in form.keys() - {"purpose", "file"}:
            raise BadRequest(f"{shown(name)} is not a known field: leave it out", shown(name), "unknown_parameter")
        file = form.get("file")
        if form.get("purpose") != "batch":
            raise BadRequest("purpose must be batch: files are for nothing else here", "purpose")
        if not isinstance(file, UploadFile):
            raise BadRequest("file is missing: send the content of a file, with its name", "file", "missing_required_parameter")
        made = new_file((file.filename or "").encode(errors="replace").decode(), "batch", file.size or 0, store.age_s)
        parts = [(begin, content[0][begin : begin + PIECE_BYTES]) for begin in range(0, made.bytes, PIECE_BYTES)]
        await self.call(request, partial(store.add, visit.owner, FILE, made.id, msgspec.json.encode(made), parts))
        return made

    @Described(f"GET {UPLOAD_PATH}", "OpenAI", "Files")
    async def files(self, request: Request, limit: str = "", order: str = "", after: str = "") -> ListBody:
        """List the files of your key, the latest first."""
        most = number_in(limit, "limit", MOST_LISTED, 1, MOST_LISTED)
        ask = partial(self.store.page, visit_of(request).owner, FILE, after, most + 1, is_ascending(order))
        return list_body([msgspec.json.decode(each.body) for each in await self.call(request, ask)], most)

    @Described(f"GET {UPLOAD_PATH}/{{id}}", "OpenAI", "A file", answer_type=FileBody, refusals=(404,))
    async def file(self, request: Request, id: str) -> Response:
        """Describe a file."""
        return Response((await self.find(request, FILE, id)).body, media_type="application/json")

    @Described(
        f"GET {UPLOAD_PATH}/{{id}}/content", "OpenAI", "The content of a file", media_types=("text/plain",), refusals=(404,)
    )
    async def content(self, request: Request, id: str) -> Response:
        """Send a file as it is."""
        visit_of(request).take_place()  # the client may read slowly
        stored = await self.find(request, FILE, id)
        # It may go while it is sent: its client must see that the rest is missing.
        length = {"content-length": str(msgspec.json.decode(stored.body, type=FileBody).bytes)}
        return StreamingResponse(self._pieces(stored), headers=length, media_type="application/octet-stream")

    async def _pieces(self, stored: StoredObject) -> AsyncIterator[bytes]:
        after = -1
        while parts := await self.store.do(partial(self.store.parts, stored.number, after, PIECES), stored.owner):
            yield b"".join(piece for _, piece in parts)
            after = parts[-1][0]

    @Described(f"DELETE {UPLOAD_PATH}/{{id}}", "OpenAI", "Delete a file", refusals=(404, 409))
    async def delete(self, request: Request, id: str) -> DeletedBody:
        """Forget a file. One that an unfinished batch reads or writes stays."""
        stored = await self.find(request, FILE, id)
        if not await self.call(request, partial(self.store.remove, stored.number)):
            raise Conflict(f"{shown(id)} is in use by an unfinished batch: cancel the batch, or wait for its end")
        return DeletedBody(id, FILE)
