"""The ids of requests: a client's own from the X-Request-Id header, or one that is made here.

Owns their form, and that of the ids of sessions, which come in a header too. Every response carries its request's id in that
header. Does not know what a request asks for.
"""

import re
import secrets
from dataclasses import dataclass
from typing import Final

from starlette.types import Scope

from common.errors import BadRequest

HEADER: Final = b"x-request-id"
REQUEST_ID = "tandem.request_id"
"""Where a request's scope holds its id."""
OWNER = "tandem.owner"
"""Where it holds the name of the client's API key."""
MAX_CHARS = 128
_VISIBLE = re.compile(rf"^[!-~]{{1,{MAX_CHARS}}}\Z")


@dataclass(frozen=True, slots=True)
class AnswerId:
    """shown: the id that the client sees. unique: no other request ever has it, whatever ids clients choose. owner: name of the
    client's API key; "": it has none. session: see `Ask`."""

    shown: str
    unique: str
    owner: str = ""
    session: str = ""


def answer_id(scope: Scope, prefix: str = "", session_header: str = "") -> AnswerId:
    """The id of the answer to the request of this scope. session_header: which header names its session; "": none does. Raises
    BadRequest when that header holds no id."""
    shown = prefix + scope[REQUEST_ID]
    session = _header_in(scope, session_header.lower().encode(), session_header) if session_header else None
    return AnswerId(shown, f"{shown}.{secrets.token_hex(8)}", scope[OWNER], session or "")


def new_id() -> str:
    return secrets.token_hex(12)


def checked_id(request_id: str, field: str) -> str:
    """Raises BadRequest when it is no id."""
    if not _VISIBLE.match(request_id):
        raise BadRequest(f"{field} must have 1 to {MAX_CHARS} visible ASCII characters", field=field)
    return request_id


def id_in(scope: Scope) -> str:
    """The client's id, or a new one. Raises BadRequest."""
    return _header_in(scope, HEADER, "X-Request-Id") or new_id()


def _header_in(scope: Scope, header: bytes, shown: str) -> str | None:
    """The id in this header, if it is there. shown: its name in messages. Raises BadRequest."""
    for name, value in scope["headers"]:
        if name == header:
            return checked_id(value.decode("latin-1"), shown)
    return None
