"""The guard of the HTTP side: which URL needs which key, and whose key a request has.

Owns that table and where a request carries its key. What is not in the table needs an API key, so that a new route is never open
by mistake. The keys are in `common.access`; what is checked where there are none is in `web_pages`. Never says or logs a key,
nor what was sent in place of one.
"""

from collections.abc import Collection
from enum import Enum

from starlette.types import Scope

from common.access import Access
from router.api.errors import Unauthorized
from router.api.web_pages import WebPages

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/docs", "/openapi.json"})
"""For load balancers, monitors and readers of the description."""
DOCS_PREFIX, CONTROL_PREFIX, REQUESTS_PREFIX = "/docs", "/cluster", "/requests"
CONTROL_PATHS = frozenset({CONTROL_PREFIX, "/flush_cache"})
EVERYBODY = "*"
"""In place of the name of an API key: whoever has the control key may see the requests of all. No key has this name."""


class NeededKey(Enum):
    """What a request must have where the router has keys of that kind."""

    NONE = "none"
    API = "ApiKey"
    CONTROL = "ControlKey"
    EITHER = "either of them"


_SPOKEN = {NeededKey.API: "API key", NeededKey.CONTROL: "control key", NeededKey.EITHER: "API key"}


def key_needed(path: str) -> NeededKey:
    """path: of the URL, or of a route."""
    if path in OPEN_PATHS or path.startswith(f"{DOCS_PREFIX}/"):
        return NeededKey.NONE
    if path in CONTROL_PATHS or path.startswith(f"{CONTROL_PREFIX}/"):
        return NeededKey.CONTROL
    return NeededKey.EITHER if path.startswith(f"{REQUESTS_PREFIX}/") else NeededKey.API


class Guard:
    """Lets requests in by their keys. hosts: see `WebPages`."""

    def __init__(self, access: Access, hosts: Collection[str]) -> None:
        self._web_pages = WebPages(hosts, access.origins) if access.api_keys is None else None
        self._control = access.control_key
        self._rings = {
            NeededKey.API: access.api_keys,
            NeededKey.CONTROL: access.control_key,
            NeededKey.EITHER: access.api_keys,
        }

    def admit(self, scope: Scope) -> str:
        """Returns the name of the API key; "" where none is needed, and EVERYBODY for the control key where either will do.
        Raises Unauthorized, NotAsked, UnsupportedBody."""
        needed = key_needed(scope["path"])
        ring = self._rings.get(needed)
        if ring is None:
            if self._web_pages is not None:
                self._web_pages.require_asked(scope)
            return ""
        key = key_in(scope)
        if key is None:
            raise Unauthorized(
                f"the {_SPOKEN[needed]} is missing: send the header `Authorization: Bearer KEY`, or `x-api-key: KEY`"
            )
        name = ring.name_of(key)
        if name is None and needed is NeededKey.EITHER and self._control is not None and self._control.name_of(key) is not None:
            return EVERYBODY
        if name is None:
            raise Unauthorized(f"the {_SPOKEN[needed]} is incorrect: {scope['path']} is not for the key that was sent")
        return "" if needed is NeededKey.CONTROL else name


def key_in(scope: Scope) -> bytes | None:
    """The key that the request carries; of a bearer token and an x-api-key, the former."""
    headers = dict(reversed(scope["headers"]))
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    key: bytes = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    return key or None
