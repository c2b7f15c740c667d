"""A router's HTTP API (or another one like it) as Python calls: JSON answers, and answers that arrive event by event.

Owns the connection of each call. Does not know what the bodies mean. A call that is left early closes its connection: then the
router cancels the request.
"""

import contextlib
import http.client
import json
import secrets
import socket
import ssl
import threading
from collections.abc import Generator, Iterator, Mapping
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


class _HttpCall:
    """One connection to the router, which another thread may end."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.connection = connection
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._ended = False

    def connect(self) -> None:
        """Raises OSError."""
        self.connection.connect()
        with self._lock:
            self._socket = self.connection.sock  # the connection itself forgets it when the answer begins
        if self._ended:
            raise ConnectionAbortedError("the call was ended")

    def end(self) -> None:
        """Whoever waits for the answer gets an error. To close a socket would not wake a thread that reads from it."""
        with self._lock:
            self._ended = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class EventStreamReader(Iterator[Any]):
    """The events of one call. Reading raises RequestFailed."""

    def __init__(self, call: _HttpCall, events: Generator[Any, None, None]) -> None:
        self._call, self._events = call, events

    def __next__(self) -> Any:
        return next(self._events)

    def close(self) -> None:
        """End the call. Another thread that waits for an event gets RequestFailed. Idempotent."""
        self._call.end()
        with contextlib.suppress(ValueError):  # another thread is in it, and leaves it now
            self._events.close()


class RouterClient:
    """The router at `url` (http or https). api_key: sent as a bearer token, unless it is empty. timeout_s: of each wait for more
    of an answer. tls: whom it trusts behind https; None: whom this machine trusts. headers: sent with each call too.

    Each call has a connection of its own, so several threads may use it at once."""

    def __init__(
        self,
        url: str,
        api_key: str = "",
        timeout_s: float = ANSWER_S,
        tls: ssl.SSLContext | None = None,
        headers: Mapping[str, str] = {},
    ) -> None:
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
        key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._headers = {"Content-Type": "application/json", **key, **headers}
        self._timeout_s, self._tls = timeout_s, tls
        self._lock = threading.Lock()
        self._open: set[_HttpCall] = set()
        self._closed = False

    def close(self) -> None:
        """End all calls, of all threads: they raise RequestFailed, and so do further ones. Idempotent."""
        with self._lock:
            self._closed, calls = True, list(self._open)
        for call in calls:
            call.end()

    def get(self, path: str) -> Any:
        """The JSON of a page. Raises RequestFailed."""
        return _decoded(self.read(path))

    def read(self, path: str) -> bytes:
        """A page as it is. Raises RequestFailed."""
        with self._response(self._call(), "GET", path, None) as response:
            return response.read()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to a JSON body. Raises RequestFailed."""
        return self.send("POST", path, body)

    def send(self, method: str, path: str, body: Mapping[str, Any]) -> Any:
        """The same with another method, such as PUT. Raises RequestFailed."""
        with self._response(self._call(), method, path, body) as response:
            return _decoded(response.read())

    def upload(self, path: str, fields: Mapping[str, str], filename: str, content: bytes) -> Any:
        """The JSON answer to a form with these fields and a file. Raises RequestFailed."""
        mark = secrets.token_hex(16)
        parts = [f'--{mark}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{fields[name]}\r\n' for name in fields]
        parts.append(f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n\r\n')
        body = "".join(parts).encode() + content + f"\r\n--{mark}--\r\n".encode()
        kind = {"Content-Type": f"multipart/form-data; boundary={mark}"}
        with self._response(self._call(), "POST", path, body, kind) as response:
            return _decoded(response.read())

    def stream(self, path: str, body: Mapping[str, Any] | None) -> EventStreamReader:
        """The data of each event, decoded, up to [DONE]. An error that comes as an event is raised as RequestFailed, too. body:
        None: it is asked for by GET."""
        call = self._call()
        return EventStreamReader(call, self._events(call, path, body))

    def _events(self, call: _HttpCall, path: str, body: Mapping[str, Any] | None) -> Generator[Any, None, None]:
        with self._response(call, "GET" if body is None else "POST", path, body) as response:
            while True:
                line = response.readline()
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

    def _call(self) -> _HttpCall:
        if self._is_secure:
            return _HttpCall(http.client.HTTPSConnection(self._netloc, timeout=self._timeout_s, context=self._tls))
        return _HttpCall(http.client.HTTPConnection(self._netloc, timeout=self._timeout_s))

    @contextlib.contextmanager
    def _response(
        self,
        call: _HttpCall,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None,
        headers: Mapping[str, str] = {},
    ) -> Iterator[http.client.HTTPResponse]:
        """Its connection may have forgotten the answer, and then the socket stays open as long as the answer is: so both are
        closed. Raises RequestFailed."""
        with self._lock:
            if self._closed:
                raise RequestFailed(f"the client of {self.url} is closed")
            self._open.add(call)
        try:
            call.connect()
            sent = body if body is None or isinstance(body, bytes) else json.dumps(body)
            call.connection.request(method, self._path + path, sent, {**self._headers, **headers})
            with call.connection.getresponse() as response:
                if response.status >= 400:
                    raise RequestFailed(_message(_decoded(response.read())), response.status)
                yield response
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # UnicodeError: no such name or path can be sent
            raise RequestFailed(f"{self.url} does not answer: {error or type(error).__name__}") from error
        finally:
            with self._lock:
                self._open.discard(call)
            call.connection.close()


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise RequestFailed(f"the answer is not JSON: {data[:200]!r}") from error


def _message(body: Any) -> str:
    """What an error of the API says; one of Kubernetes says it one level higher."""
    try:
        return str(body.get("error", body)["message"])
    except (AttributeError, TypeError, KeyError):
        return f"the answer was {body!r}"
