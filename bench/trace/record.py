"""The recording of a trace: one connection to a router, which has its fleet record.

Owns the words of /cluster/trace. Several routers may share a port, so everything goes over one connection. Does not know what
becomes of the spans.
"""

import http.client
import time
from collections.abc import Iterator, Mapping
from typing import Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from bench.serve.client import tls_of
from common.errors import TandemError

PATH = "/cluster/trace"
LOOK_S = 1.0
ANSWER_S = 60.0
T = TypeVar("T")


class TraceFailed(TandemError):
    """The router does not record, or says nothing of it."""


class Process(msgspec.Struct, kw_only=True):
    """A process of the fleet, as the router tells of it."""

    id: str
    role: Literal["router", "detokenizer", "prefill", "decode"]
    incarnation: str = ""
    host: str = ""
    pid: int = 0
    device: str = ""
    spans: int = 0
    dropped: int = 0
    over: bool = False


class Status(msgspec.Struct, kw_only=True):
    """The first line of a trace."""

    state: Literal["running", "over"]
    began_s: float
    seconds: float
    processes: list[Process]
    spans_refused: int = 0


class Line(msgspec.Struct, kw_only=True):
    """A span. process: the place of its process. Times are UNIX seconds."""

    process: int
    track: str
    name: str
    begin_s: float
    end_s: float
    request: str = ""
    args: dict[str, int | float | str] = {}


class Recording:
    """A router's connection. Raises TraceFailed wherever it fails."""

    def __init__(self, url: str, control_key: str = "", *, verify: bool = True) -> None:
        place = urlsplit(url)
        self._headers: Mapping[str, str] = {"Authorization": f"Bearer {control_key}"} if control_key else {}
        self._path = place.path.rstrip("/") + PATH
        self._connection: http.client.HTTPConnection
        if place.scheme == "https":
            self._connection = http.client.HTTPSConnection(place.netloc, timeout=ANSWER_S, context=tls_of(verify))
        else:
            self._connection = http.client.HTTPConnection(place.netloc, timeout=ANSWER_S)

    def begin(self, seconds: float) -> None:
        self._ask("POST", f"?seconds={seconds:g}").read()

    def spans(self) -> tuple[Status, Iterator[Line]]:
        """Wait until the time is over. Returns how the trace ended, and its spans, which are read as they are taken."""
        while True:
            answer = self._ask("GET")
            status = _decoded(answer.readline(), Status)
            if status.state == "over":
                return status, (_decoded(line, Line) for line in answer)
            answer.read()
            time.sleep(LOOK_S)

    def forget(self) -> None:
        self._ask("DELETE").read()

    def close(self) -> None:
        self._connection.close()

    def _ask(self, method: str, query: str = "") -> http.client.HTTPResponse:
        try:
            self._connection.request(method, self._path + query, headers=self._headers)
            answer = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise TraceFailed(f"the router does not answer: {error!r}") from error
        if answer.status >= http.HTTPStatus.MULTIPLE_CHOICES:
            raise TraceFailed(f"{method} {self._path}: HTTP {answer.status}: {answer.read().decode(errors='replace')}")
        return answer


def _decoded(line: bytes, shape: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=shape)
    except msgspec.DecodeError as error:
        raise TraceFailed(f"the router's trace cannot be read: {error}") from error
