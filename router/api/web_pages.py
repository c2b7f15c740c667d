"""Web pages: what a page in somebody's browser may do with a router that asks for no key.

A browser lets every page send requests to every address, loopback too. It only hides the answers, and not even those when the
page's own name is made to lead to this host (DNS rebinding). Three things tell such requests from others: the name by which the
router was called, where the page is from, and the types of body that a page may send without asking first.

With API keys none of this is checked. Nobody sends a key but who has it: browsers add none to a page's requests on their own, as
they do with cookies.
"""

import ipaddress
import re
from collections.abc import Collection
from functools import lru_cache

from starlette.types import Scope

from common.addresses import ANY
from common.errors import BadRequest
from router.api.errors import UnsupportedBody, shown

EFFECTLESS_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_JSON = "application/json"
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^:\[\]]+)(?::\d*)?")


class NotAsked(BadRequest):
    """The request may come from a web page that nobody has let in."""

    status = 403


_PROBED_PATHS = ("/health", "/ready")
"""Load balancers ask here by whatever name they know, and learn nothing else."""


class WebPages:
    """Refuses requests of web pages. hosts: names and addresses that the router was told to listen on. origins: pages from there
    may do everything, "*": all pages; a router that is reached by the name of one has that name too."""

    def __init__(self, hosts: Collection[str], origins: Collection[str] = ()) -> None:
        self._origins = frozenset(origins)
        self._names = frozenset(host.lower() for host in hosts) | {_name_in(_host_in(origin)) for origin in origins}
        self._serves_every_name = ANY in hosts  # what this host is called elsewhere is not known here

    def require_asked(self, scope: Scope) -> None:
        """Raises NotAsked, UnsupportedBody."""
        headers = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
        host = headers.get(b"host", "").lower()
        if scope["path"] not in _PROBED_PATHS:
            self._require_name(host)
        if scope["method"] in EFFECTLESS_METHODS:
            return
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site", "none")
        if origin is None:
            if site not in ("same-origin", "none"):
                raise NotAsked(f"a web page from elsewhere (Sec-Fetch-Site: {shown(site)}) may not do this: {_FIX}")
        elif origin not in self._origins and (not host or _host_in(origin) != host):
            raise NotAsked(f"a web page from {shown(origin)} may not do this: {_FIX}")
        _require_json(headers)

    def _require_name(self, host: str) -> None:
        """host: of the URL, with its port; "" for a client of HTTP/1.0 that tells none, which is no browser."""
        name = _name_in(host)
        if host and not self._serves_every_name and name not in self._names and not _is_loopback_name(name):
            raise NotAsked(
                f"this router is not called {shown(name)!r}: without --api-keys it answers to localhost, 127.0.0.1 and what "
                "--host and --allow-origin say, so that no web page makes its own name lead here"
            )


_FIX = "start the router with --allow-origin and the page's origin, such as https://chat.example.com, or with --api-keys"


def _require_json(headers: dict[bytes, str]) -> None:
    """A page may send any other type without asking first, or none, and an old browser says nothing else of it: so an empty body
    of another type is refused too. A body without a length comes in chunks."""
    has_body = headers.get(b"content-length", "0").strip("0") != "" or b"transfer-encoding" in headers
    given = headers.get(b"content-type", "" if has_body else _JSON)
    if given.partition(";")[0].strip().lower() != _JSON:
        sent = f"is {shown(given)!r}" if given else "is missing"
        raise UnsupportedBody(f"the body's type {sent}: send the header Content-Type: {_JSON} (curl -H 'Content-Type: {_JSON}')")


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
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
