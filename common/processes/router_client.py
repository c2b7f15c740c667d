"""A router's HTTP API as Python calls: JSON answers, and answers that arrive event by event.

Owns the connection of each call. Does not know what the bodies mean. A call that is left early closes its connection: then the
router cancels the request.
"""

import http.client
import json
import ssl
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from common.errors import TandemError

ANSWER_S = 86_400.0
"""A longest answer. The router has a limit of its own."""


class RequestFailed(TandemError):
    """The router did not answer, or refused; the message says why. http_status: None when there was no answer."""

    def __init__(self, message: str, http_status: int | None = None) -> None:
        super().__init__(message)
        self.http_status = http_status


class RouterClient:
    """The router at `url` (http or https). api_key: sent as a bearer token, unless it is empty. timeout_s: of each wait for more
    of an answer. tls: whom it trusts behind https; None: whom this machine trusts. It keeps no connection, so several threads may
    use it at once."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = ANSWER_S, tls: ssl.SSLContext | None = None) -> None:
        try:
            parts = urlsplit(url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            is_url = False
        if not is_url:
            raise RequestFailed(f"{url!r} is not the URL of a router: write it as http://host:port")
        if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
            raise RequestFailed("the API key must be visible ASCII characters, on one line")
        self.url = url.rstrip("/")
        self._is_secure, self._netloc, self._path = parts.scheme == "https", parts.netloc, parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._timeout_s, self._tls = timeout_s, tls

    def get(self, path: str) -> Any:
        """The JSON of a page. Raises RequestFailed."""
        with closing(self._connection()) as connection:
            return self._read(self._asked(connection, "GET", path, None))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to a JSON body. Raises RequestFailed."""
        with closing(self._connection()) as connection:
            return self._read(self._asked(connection, "POST", path, body))

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[Any, None, None]:
        """The data of each event, decoded, up to [DONE]. Raises RequestFailed, also for an error that comes as an event."""
        with closing(self._connection()) as connection:
            response = self._asked(connection, "POST", path, body)
            while True:
                try:
                    line = response.readline()
                except (OSError, http.client.HTTPException) as error:
                    raise self._unreachable(error) from error
                if not line:
                    raise RequestFailed("the answer broke off: the router closed the connection")
                kind, _, data = line.strip().partition(b": ")
                if kind != b"data":
                    continue  # an empty line, or a comment that keeps the connection alive
                if data == b"[DONE]":
                    return
                event = _decoded(data)
                if isinstance(event, dict) and "error" in event:
                    raise RequestFailed(_message(event), response.status)
                yield event

    def _connection(self) -> http.client.HTTPConnection:
        if self._is_secure:
            return http.client.HTTPSConnection(self._netloc, timeout=self._timeout_s, context=self._tls)
        return http.client.HTTPConnection(self._netloc, timeout=self._timeout_s)

    def _asked(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, self._path + path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise RequestFailed(_message(_decoded(response.read())), response.status)
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # UnicodeError: no such name or path can be sent
            raise self._unreachable(error) from error
        return response

    def _read(self, response: http.client.HTTPResponse) -> Any:
        try:
            return _decoded(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> RequestFailed:
        return RequestFailed(f"{self.url} does not answer: {error or type(error).__name__}")


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise RequestFailed(f"the answer is not JSON: {data[:200]!r}") from error


def _message(body: Any) -> str:
    """What an error of the API says."""
    try:
        return str(body["error"]["message"])
    except (TypeError, KeyError):
        return f"the router answered with {body!r}"
