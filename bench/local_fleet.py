"""A fleet of real processes on this machine: `launch local` in a child process, and the pages of its router.

Owns the child process. Knows the command line, the HTTP endpoints and their pages, and nothing of the inside.
"""

import contextlib
import http.client
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from common.errors import TandemError
from common.processes.child import Child
from common.processes.lines import Progress

START_S = 180.0
STOP_S = 60.0
HOME_S = 60.0
ANSWER_S = 300.0
LOOK_S = 0.1
HEARTBEAT_S = 0.5
"""The default of --heartbeat-s."""
IDLE = ("waiting_requests", "running_requests", "reservations", "pushes_in_flight", "pages_quarantined")
"""Loads of an instance that are 0 when nothing runs there."""
_CURL_LINE = re.compile(r"^curl (http://[^/]+)/.*? -d ", re.MULTILINE | re.DOTALL)
_SAMPLE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Json = dict[str, Any]


class FleetFailed(TandemError):
    """A fleet did not start, stop or answer as it should."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the router answered."""

    status: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


class FleetPages:
    """The router's pages at `url`. Every method raises FleetFailed when the router does not answer."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> Reply:
        return self._ask("GET", path, None)

    def post(self, path: str, body: object) -> Reply:
        """body: encoded as JSON, unless it is bytes."""
        return self._ask("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())

    def cluster(self) -> Json:
        page: Json = self.get("/cluster").json()
        return page

    def is_ready(self) -> bool:
        """False also when the router does not answer."""
        with contextlib.suppress(FleetFailed):
            return self.get("/ready").status == http.HTTPStatus.OK
        return False

    def model(self) -> str:
        name: str = self.get("/v1/models").json()["data"][0]["id"]
        return name

    def samples(self, metric: str) -> list[tuple[Mapping[str, str], float]]:
        """Labels and values of one metric."""
        lines = self.get("/metrics").text.splitlines()
        found = [match for line in lines if (match := _SAMPLE.fullmatch(line)) and match["name"] == metric]
        return [(dict(_LABEL.findall(match["labels"] or "")), float(match["value"])) for match in found]

    def complete(self, prompt: list[int] | str, max_tokens: int, **fields: object) -> Json:
        body = {"model": self.model(), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        reply = self.post("/v1/completions", body)
        if reply.status != http.HTTPStatus.OK:
            raise FleetFailed(f"HTTP {reply.status}: {reply.text}")
        completion: Json = reply.json()
        return completion

    def _ask(self, method: str, path: str, body: bytes | None) -> Reply:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=ANSWER_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            return Reply(response.status, response.read().decode(errors="replace"))
        except (OSError, http.client.HTTPException) as error:
            raise FleetFailed(f"the router does not answer {method} {path}: {error!r}") from error
        finally:
            connection.close()


def not_home(cluster: Json, names: Collection[str] = ()) -> list[str]:
    """What is still in use, by /cluster: pages that are out, queues that are not empty; and which of the names are missing."""
    members = {instance["id"]: instance["load"] for instance in cluster["instances"]}
    lacks = [f"{name} is no member" for name in names if name not in members]
    for name, load in members.items():
        if load["pages_free"] != load["pages_total"]:
            lacks.append(f"{name} has {load['pages_total'] - load['pages_free']} of {load['pages_total']} pages out")
        lacks += [f"{name} has {field} {load[field]}" for field in IDLE if load[field]]
    if cluster["router"]["requests_open"]:
        lacks.append(f"the router has {cluster['router']['requests_open']} requests open")
    return lacks


class LocalFleet(FleetPages):
    """`launch local` with these flags, on ports that it chooses. on_output: called with each line that it writes."""

    def __init__(self, *flags: str, on_output: Callable[[str], object] = lambda line: None) -> None:
        super().__init__("")
        self._lines: list[str] = []
        self._on_output = on_output
        self._heard = threading.Event()
        self._child: Child[Progress, Progress] = Child(
            "launch local",
            [sys.executable, "-P", "-m", "launch.main", "local", "--port=0", "--control-port=0", *flags],
            msgspec.json.Decoder[Progress](Progress),
            lambda event: self._heard.set(),
            self._hear,
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def output(self) -> str:
        """All that the fleet has written so far, to stdout and stderr."""
        return "".join(self._lines)

    def start(self) -> None:
        """Wait until it is complete, and printed a first request. Raises FleetFailed."""
        until = time.monotonic() + START_S
        while not (printed := _CURL_LINE.search(self.output)):
            self._heard.clear()
            if self._child.status is not None or time.monotonic() > until:
                raise FleetFailed(f"the fleet did not start: {self._child.account()}")
            self._heard.wait(LOOK_S)
        self.url = printed[1]

    def wait_until_home(self) -> Json:
        """Wait until every page is home and every queue is empty. Returns /cluster. Raises FleetFailed."""
        until = time.monotonic() + HOME_S
        time.sleep(2 * HEARTBEAT_S)  # /cluster is as old as the last heartbeat
        while lacks := not_home(cluster := self.cluster()):
            if time.monotonic() > until:
                raise FleetFailed(f"not home after {HOME_S:g} s: {'; '.join(lacks)}")
            time.sleep(LOOK_S)
        return cluster

    def stop(self) -> None:
        """Stop it as Ctrl-C does. Raises FleetFailed unless it ends in order."""
        self._child.signal(signal.SIGINT)
        if not self._child.wait(STOP_S):
            self._child.kill()
            raise FleetFailed(f"the fleet did not stop within {STOP_S:g} s: {self._child.account()}")
        if self._child.status != 0:
            raise FleetFailed(f"the fleet failed: {self._child.account()}")

    def _hear(self, line: str) -> None:
        self._lines.append(line)
        self._heard.set()
        self._on_output(line)


@contextlib.contextmanager
def local_fleet(*flags: str, on_output: Callable[[str], object] = lambda line: None) -> Iterator[LocalFleet]:
    """A running fleet, stopped at the end. Raises FleetFailed."""
    fleet = LocalFleet(*flags, on_output=on_output)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()
