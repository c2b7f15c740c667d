"""The ids of requests: a client's own from the X-Request-Id header, or one that is made here.

Owns their form, and that of the ids of sessions, which come in a header too. Every response carries its request's id in that
header. Does not know what a request asks for.
"""

import re
from typing import Final

from starlette.types import Scope

from common.errors import BadRequest

HEADER: Final = b"x-request-id"
MAX_CHARS = 128
_VISIBLE = re.compile(rf"^[!-~]{{1,{MAX_CHARS}}}\Z")


def checked_id(request_id: str, field: str) -> str:
    """Raises BadRequest when it is no id."""
    if not _VISIBLE.match(request_id):
        raise BadRequest(f"{field} must have 1 to {MAX_CHARS} visible ASCII characters", field=field)
    return request_id


def id_in(scope: Scope, header: str = "X-Request-Id") -> str:
    """The id in this header; empty if it is not there. Raises BadRequest."""
    wanted = header.lower().encode()
    for name, value in scope["headers"]:
        if name == wanted:
            return checked_id(value.decode("latin-1"), header)
    return ""
