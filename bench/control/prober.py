"""The prober: a process that asks the router for `/health` all the time, and notes the slowest answer.

A process of its own, so that the work of playing instances does not count as a pause of the router. Owns its connections. Does
not know what goes on.
"""

import contextlib
import http.client
import threading
import time
from urllib.parse import urlsplit

import msgspec

from bench.control.lines import Get, Got, Pings, ProberOrder, ProberReport, Tell, Watch
from common.processes.parent import Parent

EVERY_S = 0.01
"""Between an answer and the next ping. A pause may seem shorter than it is by as much."""
ANSWER_S = 300.0


class Prober:
    """Pings on a thread of its own, so that a page that takes long can be asked for meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._url = ""
        self._pings, self._failed, self._longest_s = 0, 0, 0.0
        self._asked_s: float | None = None
        threading.Thread(target=self._run, name="pings", daemon=True).start()

    def act(self, order: ProberOrder) -> ProberReport:
        match order:
            case Watch():
                with self._lock:
                    self._url = order.url
                return self._tell()
            case Tell():
                return self._tell()
            case Get():
                return self._get(order.path)

    def _tell(self) -> Pings:
        """A ping that has no answer yet counts with its time so far."""
        with self._lock:
            waiting_s = 0.0 if self._asked_s is None else time.monotonic() - self._asked_s
            told = Pings(longest_s=max(self._longest_s, waiting_s), pings=self._pings, failed=self._failed)
            self._pings, self._failed, self._longest_s = 0, 0, 0.0
        return told

    def _get(self, path: str) -> Got:
        began = time.monotonic()
        with contextlib.closing(http.client.HTTPConnection(urlsplit(self._url).netloc, timeout=ANSWER_S)) as connection:
            connection.request("GET", path)
            page = connection.getresponse().read()
        return Got(took_s=time.monotonic() - began, page_bytes=len(page))

    def _run(self) -> None:
        connection: http.client.HTTPConnection | None = None
        url = ""
        while True:
            time.sleep(EVERY_S)
            with self._lock:
                if self._url != url or connection is None:
                    url = self._url
                    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_S) if url else None
                if connection is None:
                    continue
                asked_s = self._asked_s = time.monotonic()
            answered = True
            try:
                connection.request("GET", "/health")
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                answered = False
                connection.close()
                connection = None
            with self._lock:
                self._asked_s = None
                self._pings += answered
                self._failed += not answered
                if answered:
                    self._longest_s = max(self._longest_s, time.monotonic() - asked_s)


def main() -> None:
    parent: Parent[ProberOrder, ProberReport] = Parent(msgspec.json.Decoder[ProberOrder](ProberOrder))
    parent.obey(Prober().act)


if __name__ == "__main__":
    main()
