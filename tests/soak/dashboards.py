"""Every query of the dashboards and alert rules, asked of a real Prometheus that scrapes a fleet with two routers under load.

    python -m tests.soak.dashboards --seconds 60

Owns the load, the events without which some panels have nothing to show (a death, a frame that is none), and what must hold: each
query has a figure, each rule evaluates, and two routers that tell of the same instances do not count them twice. Prometheus is
Debian's; without it, it says so and ends.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
import zmq

from common.addresses import free_port
from common.processes.local_fleet import local_fleet
from common.processes.router_client import RequestFailed, RouterClient
from tests.rig.pages import FleetPages, RunningFleet, until
from tests.rig.report import Check, print_checks, say

DEPLOY = Path(__file__).parents[2] / "deploy"
FLAGS = ("--routers=2", "--prefill=1", "--decode=2", "--log-level=warning")
OWN = re.compile(r"^router-\d .*own (http://\S+), control (tcp://\S+)$", re.MULTILINE)
CLIENTS, WINDOW_S, START_S, STEP_S = 12, 20, 60.0, 5
DEATHS, NOTICED_S = 3, 4.0
KINDS: tuple[dict[str, Any], ...] = ({}, {"n": 2}, {"max_tokens": 1}, {"max_tokens": 800}, {"temperature": -1}, {"timeout": 0.02})
"""The last two fail: one is refused, and one ends with 504."""
OF_ALL = re.compile(r"(\btandem_(?:instance|role)_\w+)(\{)?")
ADDS = re.compile(r"\b(?:sum|count)\b")
"""Only what is added up can be counted twice. Ages and queues differ between two scrapes, and need the same labels only."""
SILENT = "tandem_router_messages_lost_total"
"""Nothing is shown of it here: a message is lost to a peer that takes none for so long that its outbox is full."""
TWICE = "sum by (role) (rate(tandem_instance_prompt_tokens_computed_total[3m]))"
"""What counts an instance once for each router."""
NEARLY = 0.25
"""Scrapes of two routers are seconds apart, so their rates differ a little. To count twice would be 1."""


class Prometheus:
    """One that scrapes these URLs by the compose file's own configuration, ended at the end."""

    def __init__(self, urls: Sequence[str], folder: Path) -> None:
        config = yaml.safe_load((DEPLOY / "compose/prometheus.yaml").read_text())
        config["rule_files"] = [str(DEPLOY / "prometheus/rules.yaml")]
        (job,) = config["scrape_configs"]
        job["static_configs"] = [{"targets": [url.removeprefix("http://") for url in urls]}]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port('127.0.0.1')}"
        files = f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"
        words = ["prometheus", *files, f"--web.listen-address={address}", "--log.level=error"]
        self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL)
        self._url = f"http://{address}/api/v1"

    def ask(self, path: str, **fields: object) -> Any:
        """The `data` of an answer. Raises OSError."""
        query = urllib.parse.urlencode(fields)
        with urllib.request.urlopen(f"{self._url}/{path}?{query}", timeout=30) as answer:
            return json.load(answer)["data"]

    def is_up(self) -> bool:
        with contextlib.suppress(OSError):
            return [target["health"] for target in self.ask("targets")["activeTargets"]] == ["up", "up"]
        return False

    def figures(self, query: str, begin: float, end: float) -> list[float]:
        """All that it shows within this time, without what is no number."""
        found = self.ask("query_range", query=query, start=begin, end=end, step=STEP_S)["result"]
        values = (float(value) for series in found for _, value in series["values"])
        return [value for value in values if abs(value) < float("inf")]

    def shown(self, query: str, at: float) -> dict[str, float]:
        """Each series of one moment, by its labels."""
        found = self.ask("query", query=query, time=at)["result"]
        return {json.dumps(each["metric"], sort_keys=True): float(each["value"][1]) for each in found}

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextlib.contextmanager
def load(url: str) -> Iterator[None]:
    """Requests of every kind, until the end."""
    stop, router = threading.Event(), RouterClient(url)

    def client(number: int) -> None:
        sent = number
        while not stop.wait(0.2):
            sent += 1
            prompt = [10 + (number * 7 + place) % 2000 for place in range(100 + 50 * (sent % 4))] + [sent % 900 + 5] * 40
            body = {"model": "demo", "prompt": prompt, "max_tokens": 24, "ignore_eos": True, "stream": True}
            body |= KINDS[sent % len(KINDS)]
            with contextlib.suppress(RequestFailed):
                for received, _ in enumerate(router.stream("/v1/completions", body)):
                    if sent % 11 == 0 and received == 2:
                        break  # the client leaves

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        router.close()
        for thread in threads:
            thread.join()


def trouble(routers: Sequence[FleetPages], control: str) -> None:
    """A frame that is no message, and decode instances that die until one did while it served."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(control)
        stranger.send(b"no message")
        for _ in range(DEATHS):
            decodes = [one for one in routers[0].cluster()["instances"] if one["role"] == "decode"]
            busiest = max(decodes, key=lambda one: one["load"]["running_requests"])
            os.kill(busiest["ranks"][0]["pid"], signal.SIGKILL)
            time.sleep(NOTICED_S)
            if any(count for router in routers for _, count in router.samples("tandem_resumes_total")):
                return


def panels() -> Iterator[tuple[str, str]]:
    """The name and the query of each target of each panel."""
    for path in sorted((DEPLOY / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.stem}: {panel['title']}", target["expr"].replace("$__rate_interval", f"{WINDOW_S}s")


def of_rules() -> Iterator[tuple[str, str]]:
    """The name of each alert, and what it compares with its threshold."""
    for group in yaml.safe_load((DEPLOY / "prometheus/rules.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], re.sub(r"\s*(==|>)\s*[\d.]+\s*$", "", rule["expr"])


def answered(prometheus: Prometheus, begin: float, end: float) -> Iterator[Check]:
    """Each query, over the time of the load."""
    for name, query in [*panels(), *of_rules()]:
        figures = prometheus.figures(query, begin, end)
        yield Check(holds=bool(figures) or SILENT in query, text=f"{name}: {len(figures)} figures of {query}")
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    bad = [rule["name"] for rule in rules if rule["health"] != "ok"]
    firing = [rule["name"] for rule in rules if rule["state"] == "firing"]
    yield Check(holds=bool(rules) and not bad, text=f"{len(rules)} rules evaluate; not: {bad}; firing: {firing}")


def counted_once(prometheus: Prometheus, routers: Sequence[str], at: float) -> Iterator[Check]:
    """Each query of figures that all routers have, against the same query of one router alone."""
    one = routers[0].removeprefix("http://")

    def differs(query: str) -> float:
        alone = prometheus.shown(OF_ALL.sub(lambda of: f'{of[1]}{{router="{one}"' + (", " if of[2] else "}"), query), at)
        all_of_them = prometheus.shown(query, at)
        if alone.keys() != all_of_them.keys():
            return float("inf")
        return max((abs(all_of_them[key] / value - 1) for key, value in alone.items() if abs(value) > 0), default=0.0)

    doubled = differs(TWICE)
    yield Check(holds=doubled > 1 - NEARLY, text=f"a sum over both routers is {1 + doubled:.2f} times that of one: {TWICE}")
    for name, query in [*panels(), *of_rules()]:
        if OF_ALL.search(query):
            query = query.replace(f"[{WINDOW_S}s]", "[3m]")
            ratio, most = differs(query), NEARLY if ADDS.search(query) else float("inf")
            yield Check(holds=ratio < most, text=f"{name}: with both routers it differs by {ratio:.0%} from one")


def checks(seconds: float) -> Iterator[Check]:
    with tempfile.TemporaryDirectory(prefix="tandem-prometheus-") as folder, local_fleet(*FLAGS) as local:
        fleet, found = RunningFleet(local), OWN.findall(local.output)
        routers = [url for url, _ in found]
        prometheus = Prometheus(routers, Path(folder))
        try:
            until(prometheus.is_up, "it scrapes both routers", START_S)
            begin = time.time()
            with load(fleet.url):
                time.sleep(seconds / 2)
                trouble([FleetPages(url) for url in routers], found[0][1])
                time.sleep(seconds / 2)
            time.sleep(2 * STEP_S)
            yield from answered(prometheus, begin, time.time())
            for url in routers:  # who died is there again, at each of them
                FleetPages(url).wait_until_whole("prefill-0", "decode-0", "decode-1")
            time.sleep(2 * STEP_S)
            yield from counted_once(prometheus, routers, time.time() - 1)
        finally:
            prometheus.stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.dashboards", description="Dashboards and rules, in Prometheus.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the fleet has load")
    flags = parser.parse_args()
    if shutil.which("prometheus") is None:
        say("skipped: there is no Prometheus here; on Debian: apt install prometheus")
        return 0
    return print_checks(checks(flags.seconds))


if __name__ == "__main__":
    sys.exit(main())
