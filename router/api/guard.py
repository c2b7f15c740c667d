"""The guard of the HTTP side: which URL needs which key, and whose key a request has.

Owns that rule and where a request carries its key. A path of which nobody has said that it needs the control key needs an API
key, so that a new route is never open by mistake. The keys are in `common.access`. Never says or logs a key, nor what was sent in
place of one. Owns also what a page in somebody's browser may do with a router that asks for no key.

Owns the form of ids of requests and sessions, too: a client's own, from headers. Every response carries its request's id in the
X-Request-Id header.

A browser lets every page send requests to every address, loopback too. It only hides the answers, and not even those when the
page's own name is made to lead to this host (DNS rebinding). Three things tell such requests from others: the name by which the
router was called, where the page is from, and the types of body that a page may send without asking first.

With API keys none of this is checked. Nobody sends a key but who has it: browsers add none to a page's requests on their own, as
they do with cookies.
"""

import re
from collections.abc import Collection
from enum import Enum
from functools import lru_cache

from starlette.datastructures import Headers
from starlette.types import Scope

from common.access import Access
from common.addresses import ANY, is_loopback
from common.errors import BadRequest
from router.api.errors import Unauthorized, UnsupportedBody, shown

EFFECTLESS_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_JSON, _FORM = "application/json", "multipart/form-data"
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^:\[\]]+)(?::\d*)?")


class NotAsked(BadRequest):
    """The request may come from a web page that nobody has let in."""

    status = 403


_PROBED_PATHS = ("/health", "/health_generate", "/ready", "/ping")
"""Load balancers ask here by whatever name they know, and learn nothing else."""
_EFFECTFUL_GETS = frozenset({"/flush_cache"})
"""SGLang's clients flush by GET. No page from elsewhere may."""


_FIX = "start the router with --allow-origin and the page's origin, such as https://chat.example.com, or with --api-keys"


def _host_in(origin: str) -> str:
    """Host and port of an origin such as http://localhost:3000; "" if it has none, as "null" has."""
    return origin.partition("://")[2].lower()


def _name_in(host: str) -> str:
    """The name in host:port, as it is; it may be no name at all."""
    match = _HOST.fullmatch(host)
    return host if match is None else match["name"].removesuffix(".")


@lru_cache(maxsize=256)
def _is_loopback_name(name: str) -> bool:
    """Whether browsers take it for this host, whatever a name server says (RFC 6761, 6.3)."""
    return name.endswith(".localhost") or is_loopback(f"tcp://{name.strip('[]')}:0")


OPEN_PATHS = frozenset({*_PROBED_PATHS, "/metrics", "/docs", "/openapi.json", "/"})
"""For load balancers, monitors, readers of the description, and pages that have no figures without a key."""
UPLOAD_PATH = "/v1/files"
DOCS_PREFIX, PAGE_PREFIX, CONTROL_PREFIX, REQUESTS_PREFIX = "/docs", "/page", "/cluster", "/requests"
EVERYBODY = "*"
"""In place of the name of an API key: whoever has the control key may see the requests of all. No key has this name."""


class NeededKey(Enum):
    """What a request must have where the router has keys of that kind."""

    NONE = "none"
    API = "ApiKey"
    CONTROL = "ControlKey"
    EITHER = "either of them"


_SPOKEN = {NeededKey.API: "API key", NeededKey.CONTROL: "control key", NeededKey.EITHER: "API key"}


def key_needed(path: str, control_paths: Collection[str]) -> NeededKey:
    """path: of the URL, or of a route. control_paths: those that need the control key, besides those with CONTROL_PREFIX."""
    if path in OPEN_PATHS or path.startswith((f"{DOCS_PREFIX}/", f"{PAGE_PREFIX}/")):
        return NeededKey.NONE
    if path in control_paths or path == CONTROL_PREFIX or path.startswith(f"{CONTROL_PREFIX}/"):
        return NeededKey.CONTROL
    return NeededKey.EITHER if path.startswith(f"{REQUESTS_PREFIX}/") else NeededKey.API


class Guard:
    """Lets requests in by their keys, or refuses those of web pages. hosts: names and addresses that the router was told to
    listen on. Pages from one of the access's origins may do everything, "*": all pages; a router that is reached by the name of
    one has that name too. control_paths: see `key_needed`."""

    def __init__(self, access: Access, hosts: Collection[str], control_paths: Collection[str]) -> None:
        self._control_paths = control_paths
        self._suspects_pages = access.api_keys is None
        self._origins = frozenset(access.origins)
        self._names = frozenset(host.lower() for host in hosts) | {_name_in(_host_in(origin)) for origin in access.origins}
        self._serves_every_name = ANY in hosts  # what this host is called elsewhere is not known here
        self._control = access.control_key
        self._rings = {
            NeededKey.API: access.api_keys,
            NeededKey.CONTROL: access.control_key,
            NeededKey.EITHER: access.api_keys,
        }

    def admit(self, scope: Scope) -> str:
        """Returns the name of the API key; "" where none is needed, and EVERYBODY for the control key where either will do.
        Raises Unauthorized, NotAsked, UnsupportedBody."""
        needed = key_needed(scope["path"], self._control_paths)
        if self._rings.get(needed) is None and self._suspects_pages:
            self._require_no_page(scope)
        return self.name_of_caller(scope, needed)

    def name_of_caller(self, scope: Scope, needed: NeededKey) -> str:
        """The same for a call that no web page can make, such as gRPC's: it has a `te`, which no page may set. Raises
        Unauthorized."""
        ring = self._rings.get(needed)
        if ring is None:
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

    def admit_batch(self, owner: str) -> str:
        """owner: the name of the key that sent a batch. Returns it. Raises Unauthorized when it is not known any more."""
        ring = self._rings[NeededKey.API]
        if ring is not None and owner not in ring.names():
            raise Unauthorized("the key that sent the batch is not known here any more")
        return owner

    def _require_no_page(self, scope: Scope) -> None:
        """Refuse what a web page sends that nobody has let in. Raises NotAsked, UnsupportedBody."""
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()  # "": a client of HTTP/1.0 that tells none, which is no browser
        name = _name_in(host)
        is_known = self._serves_every_name or name in self._names or scope["path"] in _PROBED_PATHS
        if host and not is_known and not _is_loopback_name(name):
            raise NotAsked(
                f"this router is not called {shown(name)!r}: without --api-keys it answers to localhost, 127.0.0.1 and what "
                "--host and --allow-origin say, so that no web page makes its own name lead here"
            )
        if scope["method"] in EFFECTLESS_METHODS and scope["path"] not in _EFFECTFUL_GETS:
            return
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        if origin is None:
            if site not in ("same-origin", "none"):
                raise NotAsked(f"a web page from elsewhere (Sec-Fetch-Site: {shown(site)}) may not do this: {_FIX}")
        elif origin not in self._origins and (not host or _host_in(origin) != host):
            raise NotAsked(f"a web page from {shown(origin)} may not do this: {_FIX}")
        # A page may send any other type without asking first, or none, and an old browser says nothing else of it: so an empty
        # body of another type is refused too. A body without a length comes in chunks.
        has_body = headers.get("content-length", "0").strip("0") != "" or "transfer-encoding" in headers
        given = headers.get("content-type", "" if has_body else _JSON)
        kind = given.partition(";")[0].strip().lower()
        is_upload = scope["path"] == UPLOAD_PATH and kind == _FORM
        if is_upload and "authorization" in headers:
            return  # no page sends this header elsewhere without asking first, and OpenAI's clients always send it
        if kind != _JSON:
            sent = f"is {shown(given)!r}" if given else "is missing"
            fix = f"send the header Content-Type: {_JSON} (curl -H 'Content-Type: {_JSON}')"
            if is_upload:
                fix = "send it with any key (curl -H 'Authorization: Bearer none')"
            raise UnsupportedBody(f"the body's type {sent}: {fix}")


def key_in(scope: Scope) -> bytes | None:
    """The key that the request carries; of a bearer token and an x-api-key, the former."""
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.encode("latin-1") or None


HEADER = b"x-request-id"
MAX_ID_CHARS = 128
_VISIBLE = re.compile(rf"^[!-~]{{1,{MAX_ID_CHARS}}}\Z")


def checked_id(request_id: str, field: str) -> str:
    """Raises BadRequest when it is no id."""
    if not _VISIBLE.match(request_id):
        raise BadRequest(f"{field} must have 1 to {MAX_ID_CHARS} visible ASCII characters", field=field)
    return request_id


def id_in(scope: Scope, header: str = "X-Request-Id") -> str:
    """The id in this header; empty if it is not there. Raises BadRequest."""
    found = Headers(scope=scope).get(header)
    return "" if found is None else checked_id(found, header)
