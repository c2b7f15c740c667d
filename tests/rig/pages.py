"""The pages of a running fleet, as tests ask for them: completions, /cluster, /metrics, who is whole and what is not home yet.

Owns the questions, how answers are read, and waiting for what they must say. Knows the HTTP endpoints, and nothing of the inside.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common.processes.local_fleet import FleetFailed, LocalFleet, local_fleet
from tests.rig.forks import forked

PATIENCE_S = 180.0
ANSWER_S = 300.0
LOOK_S = 0.05
HOME_S = 60.0
HEARTBEAT_S = 0.5
"""The default of --heartbeat-s."""
IDLE = ("waiting_requests", "running_requests", "reservations", "pushes_in_flight", "pages_quarantined")
"""Loads of an instance that are 0 when nothing runs there."""
_SAMPLE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the router answered."""

    status: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


class NotInTime(AssertionError):
    """Something that must happen did not; says what was lacking."""


def until_nothing_lacks(lacking: Callable[[], list[str]], limit_s: float) -> None:
    """Raises NotInTime."""
    until_s = time.monotonic() + limit_s
    while lacks := lacking():
        if time.monotonic() > until_s:
            raise NotInTime(f"not within {limit_s:g} s: {'; '.join(lacks)}")
        time.sleep(LOOK_S)


def until(holds: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
    """Wait until it holds. Raises NotInTime."""
    until_nothing_lacks(lambda: [] if holds() else [what], limit_s)


class FleetPages:
    """The router's pages at `url`. Every method raises FleetFailed when the router does not answer."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> Reply:
        return self._ask("GET", path, None)

    def delete(self, path: str) -> Reply:
        return self._ask("DELETE", path, None)

    def post(self, path: str, body: object) -> Reply:
        """body: encoded as JSON, unless it is bytes."""
        return self._ask("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())

    def cluster(self) -> Json:
        page: Json = self.get("/cluster").json()
        return page

    def members(self) -> dict[str, Json]:
        """The instances of /cluster, by name."""
        return {instance["id"]: instance for instance in self.cluster()["instances"]}

    def unready(self) -> str:
        """Why requests are not served by all that is there: what /ready says, or that it does not answer."""
        try:
            reply = self.get("/ready")
        except FleetFailed as error:
            return str(error)
        is_whole = reply.status == http.HTTPStatus.OK and not reply.json()["degraded"]
        return "" if is_whole else f"/ready says {reply.text}"

    def is_ready(self) -> bool:
        """False also when the router does not answer."""
        return not self.unready()

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

    def wait_until_home(self, names: Collection[str] = ()) -> Json:
        """Wait until these names are there, every page is home and every queue is empty. Returns /cluster. Raises NotInTime."""
        time.sleep(2 * HEARTBEAT_S)  # /cluster is as old as the last heartbeat
        until_nothing_lacks(lambda: not_home(self.cluster(), names), HOME_S)
        return self.cluster()

    def not_whole(self, names: Collection[str], former: Mapping[str, str]) -> list[str]:
        """What lacks until each of these is live, each link between them can be used, and the router is ready.

        former: incarnations that do not count, for they are gone.
        """
        if reason := self.unready():
            return [reason]
        members, lacks = self.members(), []
        for name in names:
            if name not in members or members[name]["incarnation"] == former.get(name):
                lacks.append(f"{name} is no member")
            elif members[name]["state"] != "live":
                lacks.append(f"{name} is {members[name]['state']}")
        decodes = sum(members[name]["role"] != "prefill" for name in names if name in members)
        for name in names if not lacks else ():
            if members[name]["role"] == "prefill" and members[name]["usable"] < decodes:
                lacks.append(f"{name} can use {members[name]['usable']} of {decodes} links")
        return lacks

    def wait_until_whole(self, *names: str) -> None:
        """Raises NotInTime."""
        until_nothing_lacks(lambda: self.not_whole(names, {}), PATIENCE_S)

    def _ask(self, method: str, path: str, body: bytes | None) -> Reply:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=ANSWER_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            with connection.getresponse() as response:
                return Reply(response.status, response.read().decode(errors="replace"))
        except (OSError, http.client.HTTPException) as error:
            raise FleetFailed(f"the router does not answer: {error!r}") from error
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


class RunningFleet(FleetPages):
    """`launch local` in a child process, with its pages."""

    def __init__(self, local: LocalFleet) -> None:
        super().__init__(local.url)
        self.local = local

    @property
    def output(self) -> str:
        return self.local.output

    def family(self) -> list[int]:
        """The processes below `launch local`."""
        processes = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pairs = [tuple(map(int, line.split())) for line in processes.splitlines()]
        found, edge = [], [self.local.pid]
        while edge:
            edge = [child for child, parent in pairs if parent in edge]
            found += edge
        return found

    def running(self, role: str) -> list[int]:
        """The processes of the fleet that run this role."""
        found = []
        for pid in self.family():
            with contextlib.suppress(OSError):  # the process has just ended
                process = Path(f"/proc/{pid}")
                words = [*(process / "cmdline").read_text().split("\0"), (process / "comm").read_text().strip()]
                found += [pid] if role in words else []
        return found


def kill(member: Json | None) -> None:
    """Kill an instance, or its first rank, if it is there. member: as /cluster has it."""
    if member is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member["ranks"][0]["pid"], signal.SIGKILL)


@contextlib.contextmanager
def running_fleet(*flags: str) -> Iterator[RunningFleet]:
    """A running fleet whose processes are forked, stopped at the end. Raises FleetFailed."""
    with ExitStack() as stack:
        with forked():
            fleet = stack.enter_context(local_fleet(*flags))
        yield RunningFleet(fleet)
