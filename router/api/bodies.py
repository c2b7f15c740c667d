"""Bodies: what reading one may cost, and for whom a large one is read.

Owns the limits of what a body may hold. They are checked before any of it becomes objects, because nobody else runs while one
call makes these. Does not know fields.
"""

import asyncio
from collections.abc import Coroutine
from itertools import accumulate
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from common.errors import BadRequest

LARGE_BODY_BYTES = 256 * 1024
"""Larger bodies are read on another thread: 16 MiB of token ids take over half a second. Smaller ones need no limits here."""
MAX_PARTS = 2**18
"""Most strings, lists and objects in a body, with one more for each entry of an object: over ten thousand messages."""
MAX_PROMPTS = 64
MAX_LEVELS = 200
"""Most lists and objects within each other. Readers, writers and chat templates call themselves for each level, so a body with
more would exhaust their stack somewhere."""

IS_LARGE: Final = "tandem.large_body"
"""Where a request's scope tells whether its body is large."""

R = TypeVar("R")


def decoded(body: bytes, context_tokens: int | None) -> Any:
    """The body's JSON. context_tokens: of each prompt that it may hold in token ids; None: it holds no such prompts. Raises
    BadRequest when it holds too much or is no object, and what msgspec raises for what is not JSON."""
    if len(body) > LARGE_BODY_BYTES:
        _require_few_parts(body, MAX_PARTS + MAX_PROMPTS * (context_tokens or 0))
    _require_few_levels(body, "the body", None)
    if len(body) <= LARGE_BODY_BYTES:
        return msgspec.json.decode(body)
    try:
        fields = msgspec.json.decode(body, type=dict[str, Raw])
    except msgspec.ValidationError as error:
        raise BadRequest("the body must be a JSON object") from error
    return {name: _value(raw) for name, raw in fields.items()}


def json_in(text: str, field: str) -> Any:
    """The JSON that is a field's text. Raises BadRequest."""
    try:
        encoded = text.encode()
        _require_few_levels(encoded, field, field)
        return msgspec.json.decode(encoded)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise BadRequest(f"{field} is not JSON: {error}", field=field, code="invalid_value") from error


def _require_few_levels(text: bytes, name: str, field: str | None) -> None:
    if text.count(b"[") + text.count(b"{") <= MAX_LEVELS:
        return
    brackets = b"".join(_without_escapes(text).split(b'"')[::2]).translate(None, _NO_BRACKETS)
    if max(accumulate(map(_LEVELS.__getitem__, brackets)), default=0) > MAX_LEVELS:
        raise BadRequest(f"{name} has more than {MAX_LEVELS} lists and objects within each other: send fewer", field=field)


_LEVELS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in _LEVELS)


def _without_escapes(text: bytes) -> bytes:
    """What is left has a quotation mark only where a string of the JSON begins or ends."""
    return text.replace(b"\\\\", b"").replace(b'\\"', b"")


def _require_few_parts(body: bytes, most_values: int) -> None:
    """most_values: so many commas may separate values. Raises BadRequest. What stands in texts does not count, but to count it is
    faster, and mostly enough."""
    parts, commas = _parts(body), body.count(b",")
    if parts > MAX_PARTS or commas > most_values:
        bare = _without_escapes(body)
        parts = bare.count(b'"')
        if parts // 2 <= MAX_PARTS:
            bare = b'""'.join(bare.split(b'"')[::2])
            parts, commas = _parts(bare) - bare.count(b'"') // 2, bare.count(b",")
    if parts > MAX_PARTS:
        raise BadRequest(f"the body has more than {MAX_PARTS} strings, lists and objects: send fewer")
    if commas > most_values:
        raise BadRequest(f"the body has more than {most_values} values: send fewer")


def _parts(text: bytes) -> int:
    return len(text) - len(text.translate(None, b'[{:"'))


_Pieces = msgspec.defstruct(
    "_Pieces",
    [(f"piece_{number}", Raw | UnsetType, UNSET) for number in range(MAX_PROMPTS)],
    array_like=True,
    forbid_unknown_fields=True,
)


def _value(raw: Raw) -> Any:
    """Decode it: lists in a long list one by one, such as prompts in token ids, so that others run in between."""
    view = memoryview(raw)
    if len(view) > LARGE_BODY_BYTES and bytes(view[:1]) == b"[" and bytes(view[1:64]).lstrip()[:1] == b"[":
        try:
            pieces = msgspec.structs.astuple(msgspec.json.decode(raw, type=_Pieces))
        except msgspec.ValidationError:  # there are more
            return msgspec.json.decode(raw)
        return [msgspec.json.decode(piece) for piece in pieces if piece is not UNSET]
    return msgspec.json.decode(raw)


async def unless_left(request: Request, work: Coroutine[Any, Any, R]) -> R:
    """Do the work for a request whose body was read. That for a large body takes long, so it stops when the client leaves. Raises
    ClientDisconnect, and what the work raises."""
    if not request.scope[IS_LARGE]:
        return await work
    working, watching = asyncio.create_task(work), asyncio.create_task(_left(request.receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
