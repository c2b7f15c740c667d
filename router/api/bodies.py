"""Bodies: how one arrives, what reading it may cost, and for whom a large one is read.

Owns the limits of what a body may hold. They are checked before any of it becomes objects, because nobody else runs while one
call makes these. Does not know fields.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Coroutine
from itertools import accumulate
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from common.errors import BadRequest
from router.api.errors import BodyTooLarge, BodyTooSlow, UnsupportedBody, shown

BODY_TIMEOUT_S = 60.0
LARGE_BODY_BYTES = 256 * 1024
"""Larger bodies are read on another thread: 16 MiB of token ids take over half a second. Smaller ones need no limits here."""
MAX_PARTS = 2**18
"""Most strings, lists and objects in a body, with one more for each entry of an object: over ten thousand messages."""
MAX_PROMPTS = 64
LONG_LIST = 1_000
MAX_LEVELS = 200
"""Most lists and objects within each other. Readers, writers and chat templates call themselves for each level, so a body with
more would exhaust their stack somewhere."""

R = TypeVar("R")
_NO_OBJECT = "the body must be a JSON object"
_read_raw = msgspec.json.Decoder(dict[str, Raw]).decode


def object_in(body: bytes, context_tokens: int | None = None) -> dict[str, Any]:
    """The fields of the body. context_tokens: of each prompt that it may hold in token ids; None: it holds no such prompts.
    Raises BadRequest when it holds too much, and when it is no JSON object."""
    is_large = len(body) > LARGE_BODY_BYTES
    if is_large:
        _require_few_parts(body, MAX_PARTS + MAX_PROMPTS * (context_tokens or 0))
    _require_few_levels(body, "the body", None)
    try:
        fields = {name: _value(raw) for name, raw in _raw_fields(body).items()} if is_large else msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    _require_names_once(body, fields)
    if not isinstance(fields, dict):
        raise BadRequest(_NO_OBJECT)
    return fields


def names_in(body: bytes) -> Collection[str]:
    """The names of the body's fields, after little work. Raises BadRequest."""
    try:
        return _raw_fields(body).keys()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


def _raw_fields(body: bytes) -> dict[str, Raw]:
    try:
        return _read_raw(body)
    except msgspec.ValidationError as error:
        raise BadRequest(_NO_OBJECT) from error


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


def _require_names_once(body: bytes, value: Any) -> None:
    """Raises BadRequest when an object of the body has a name twice: msgspec keeps one of the two without a word. A colon outside
    of texts stands behind each name, so they are counted, and compared with the names that were kept. Lists may hold a million
    numbers, so long ones are looked through only when names are missing without them."""
    names, long_lists = _names_in([value])
    if names == body.count(b":"):  # there are none in texts either
        return
    colons = _colons_outside_texts(body)
    while names < colons and long_lists:
        more, long_lists = _names_in(long_lists)
        names += more
    if names == colons:
        return
    name = _repeated_name(body) if len(body) <= LARGE_BODY_BYTES else None
    what = "a name" if name is None else repr(shown(name))
    raise BadRequest(f"the body has {what} twice in one object: send it once", field=name, code="invalid_value")


def _colons_outside_texts(body: bytes) -> int:
    """Piece by piece, so that others run in between."""
    colons = begin = quotes = 0
    while begin < len(body):
        end = begin + LARGE_BODY_BYTES
        while body[end - 1 : end] == b"\\":  # what it escapes must be in the same piece
            end += 1
        parts = _without_escapes(body[begin:end]).split(b'"')
        colons += b"".join(parts[quotes % 2 :: 2]).count(b":")
        quotes += len(parts) - 1
        begin = end
    return colons


def _names_in(waiting: list[Any]) -> tuple[int, list[Any]]:
    """How many names the objects have that are in these or within them, and the long lists that were passed by."""
    names = 0
    long_lists: list[Any] = []
    while waiting:
        one = waiting.pop()
        if type(one) is dict:
            names += len(one)
            one = one.values()
        elif type(one) is not list:
            continue
        for part in one:
            if type(part) is dict:
                waiting.append(part)
            elif type(part) is list:
                (long_lists if len(part) > LONG_LIST else waiting).append(part)
    return names, long_lists


def _repeated_name(body: bytes) -> str | None:
    """The first name that an object has twice."""
    repeated: list[str] = []

    def note(pairs: list[tuple[str, object]]) -> None:
        repeated.extend(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)

    json.loads(body, object_pairs_hook=note, parse_int=len, parse_float=len, strict=False)
    return repeated[0] if repeated else None


_LEVELS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in _LEVELS)


def _without_escapes(text: bytes) -> bytes:
    """What is left has a quotation mark only where a string of the JSON begins or ends."""
    return text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text


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


async def body_of(request: Request, most_bytes: int | None) -> bytes:
    """The body, as it was sent. Raises UnsupportedBody, BodyTooLarge, BodyTooSlow."""
    if (encoding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise UnsupportedBody(f"the body is encoded ({shown(encoding)}): send it as it is, without Content-Encoding")
    too_large = f"the body is longer than {most_bytes} bytes: send less, or raise --max-body"
    length = request.headers.get("content-length", "")
    if most_bytes is not None and length.isdecimal() and int(length) > most_bytes:
        raise BodyTooLarge(too_large)
    parts: list[bytes] = []
    received = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                parts.append(part)
                received += len(part)
                if most_bytes is not None and received > most_bytes:
                    raise BodyTooLarge(too_large)
    except TimeoutError as error:
        raise BodyTooSlow(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
    return b"".join(parts)


async def unless_left(request: Request, work: Coroutine[Any, Any, R]) -> R:
    """Do the work for a request whose body is here. It stops when the client leaves. Raises ClientDisconnect, and what the work
    raises."""
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
