"""The guard of the HTTP side: which URL needs which key, and whose key a request has.

Owns that table and where a request carries its key. What is not in the table needs an API key, so that a new route is never open
by mistake. The keys are in `common.access`. Never says or logs a key, nor what was sent in place of one.
"""

from enum import Enum

from starlette.types import Scope

from common.access import Access
from router.api.errors import Unauthorized

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/docs", "/openapi.json"})
"""For load balancers, monitors and readers of the description."""
CONTROL_PREFIX = "/cluster"
CONTROL_PATHS = frozenset({CONTROL_PREFIX, "/flush_cache"})


class NeededKey(Enum):
    """What a request must have where the router has keys of that kind."""

    NONE = "none"
    API = "ApiKey"
    CONTROL = "ControlKey"


_SPOKEN = {NeededKey.API: "API key", NeededKey.CONTROL: "control key"}


def key_needed(path: str) -> NeededKey:
    """path: of the URL, or of a route."""
    if path in OPEN_PATHS:
        return NeededKey.NONE
    return NeededKey.CONTROL if path in CONTROL_PATHS or path.startswith(f"{CONTROL_PREFIX}/") else NeededKey.API


class Guard:
    """Lets requests in by their keys."""

    def __init__(self, access: Access) -> None:
        self._rings = {NeededKey.API: access.api_keys, NeededKey.CONTROL: access.control_key}

    def admit(self, scope: Scope) -> str:
        """Returns the name of the API key; "" where none is needed. Raises Unauthorized."""
        needed = key_needed(scope["path"])
        ring = self._rings.get(needed)
        if ring is None:
            return ""
        key = _key_in(scope)
        if key is None:
            raise Unauthorized(
                f"the {_SPOKEN[needed]} is missing: send the header `Authorization: Bearer KEY`, or `x-api-key: KEY`"
            )
        name = ring.name_of(key)
        if name is None:
            raise Unauthorized(f"the {_SPOKEN[needed]} is incorrect: {scope['path']} is not for the key that was sent")
        return name if needed is NeededKey.API else ""


def _key_in(scope: Scope) -> bytes | None:
    """The key that the request carries; of a bearer token and an x-api-key, the former."""
    headers = dict(reversed(scope["headers"]))
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    key: bytes = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    return key or None
