"""Web pages from elsewhere against a fleet without keys, in a real browser, and /docs without the internet.

    python -m tests.soak.browser --screenshot docs.png

Pages on another port, on another name of this host and on a name that was made to lead here try all that a browser lets a page
send. Then the fleet must be as it was. A page from an allowed origin chats, and /docs renders.

Owns the pages, what must hold, and a headless Chromium, which chromedriver drives by HTTP (https://www.w3.org/TR/webdriver2).
Needs Debian's chromium and chromium-driver, and says so where they are missing.
"""

import argparse
import base64
import contextlib
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from common.addresses import free_port
from common.processes.local_fleet import local_fleet
from tests.rig.pages import FleetPages, RunningFleet
from tests.rig.report import Check, key_flags, print_checks, say

START_S, ANSWER_S, SCRIPT_S = 60.0, 180.0, 120
LOOK_S = 0.2
REBOUND = "rebound.example"
"""A name that leads to this host, as a page's own name does after DNS rebinding."""
_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1300,1600",
    f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
)


class BrowserFailed(Exception):
    """The browser did not start, or a command failed in it."""


def is_installed() -> bool:
    return all(shutil.which(program) for program in ("chromium", "chromedriver"))


class Browser:
    """One window. Each command raises BrowserFailed."""

    def __init__(self, port: int, profile: str) -> None:
        self._port = port
        options = {"binary": shutil.which("chromium"), "args": [*_ARGUMENTS, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = ""
        opened = self._command("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{opened['sessionId']}"
        self._command("POST", "/timeouts", {"script": SCRIPT_S * 1000})

    def open(self, url: str) -> None:
        self._command("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """What the script of the open page gives to the function that is its last argument."""
        return self._command("POST", "/execute/async", {"script": script, "args": arguments})

    def screenshot(self) -> bytes:
        """PNG."""
        return base64.b64decode(self._command("GET", "/screenshot", None))

    def devtools(self, command: str, **parameters: object) -> None:
        """A command of the DevTools protocol, such as Emulation.setEmulatedMedia."""
        self._command("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def complaints(self) -> list[str]:
        """What the console has said since the last call."""
        return [entry["message"] for entry in self._command("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._command("DELETE", "", None)

    def _command(self, method: str, path: str, body: object) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body)
            connection.request(method, self._session + path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            value = json.loads(answer.read())["value"]
        if answer.status != http.HTTPStatus.OK:
            raise BrowserFailed(f"{method} {path}: {value['error']}: {value['message'].splitlines()[0]}")
        return value


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a new profile, ended at the end."""
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="tandem-browser-") as profile:
        driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            opened = _opened(port, profile)
            try:
                yield opened
            finally:
                opened.close()
        finally:
            driver.terminate()
            driver.wait()


def _opened(port: int, profile: str) -> Browser:
    until = time.monotonic() + START_S
    while True:
        try:
            return Browser(port, profile)
        except ConnectionRefusedError as error:
            if time.monotonic() > until:
                raise BrowserFailed(f"chromedriver does not listen after {START_S:g} s") from error
            time.sleep(LOOK_S)


SETTLE_S = 3.0
"""Beacons and forms say nothing of their end."""
RENDER_S = 60.0
KEY = "p" * 24
PROBED = ("/health", "/ready")
"""Pages that answer to any name of the host, for load balancers know none."""
READS = ("/cluster", "/v1/models", "/metrics", "/ready", "/health", "other")
"""Routes that change nothing, as metrics name them: others are /openapi.json and unknown ones."""
ATTACK, CHAT, LOOK, TRY = (
    (Path(__file__).parent / "pages" / f"{name}.js").read_text() for name in ("attack", "chat", "look", "try")
)


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"<!doctype html><title>a page</title><body>a page from elsewhere"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextlib.contextmanager
def pages() -> Iterator[int]:
    """An empty page at every URL of a port of this host."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def attacked(fleet: FleetPages, window: Browser, port: int) -> Iterator[Check]:
    """From each origin try everything, and compare the fleet with what it was."""
    prompt = "What is 3 + 4? " * 40
    fleet.complete(prompt, 2)
    before = effects(fleet)
    for origin in (f"http://127.0.0.1:{port}", f"http://localhost:{port}", f"http://{REBOUND}:{port}"):
        refused = refusals(fleet)
        window.open(origin)
        read = window.run(ATTACK, fleet.url)
        time.sleep(SETTLE_S)
        yield Check(holds=read == [], text=f"a page from {origin} read nothing; {read[:3]}")
        arrived = refusals(fleet) - refused
        yield Check(holds=arrived > 50, text=f"and {arrived:.0f} of its requests came here and were refused")
    rebound = fleet.url.replace("127.0.0.1", REBOUND)
    window.open(f"{rebound}/docs")
    read = window.run(ATTACK, rebound)
    answered = [line for line in read if " 403 " not in line and line.split()[1] not in PROBED]
    holds = len(read) > 50 and answered == []
    yield Check(holds=holds, text=f"a name that leads here: {len(read)} answers, each 403 but to probes; {answered[:3]}")
    after = effects(fleet)
    yield Check(holds=after == before, text=f"what has had an effect: {after}, before: {before}")
    states = {one["id"]: one["state"] for one in fleet.cluster()["instances"]}
    yield Check(holds=set(states.values()) == {"live"}, text=f"instances: {states}")
    yield Check(holds=fleet.get("/cluster/trace").status == 404, text="there is no trace")
    cached = fleet.complete(prompt, 2)["usage"]["prompt_tokens_details"]["cached_tokens"]
    yield Check(holds=cached > 0, text=f"the prefix cache is as it was: {cached} tokens of a prompt from before")


def effects(fleet: FleetPages) -> dict[str, float]:
    """Requests that had one, by URL, and requests that the fleet was given."""
    answered = {
        labels["path"]: value
        for labels, value in fleet.samples("tandem_http_responses_total")
        if labels["status"] < "400" and labels["path"] not in READS
    }
    return answered | {"ended": sum(value for _, value in fleet.samples("tandem_requests_ended_total"))}


def refusals(fleet: FleetPages) -> float:
    return sum(
        value
        for labels, value in fleet.samples("tandem_http_responses_total")
        if labels["status"] in ("403", "415", "405", "404")
    )


def invited(url: str, window: Browser, origin: str, key: str = "") -> Iterator[Check]:
    """A page that was let in."""
    window.open(origin)
    status, request_id, text = window.run(CHAT, url, key)
    holds = (status, request_id) == (200, "mine") and text.endswith("data: [DONE]\n\n")
    yield Check(holds=holds, text=f"a page from {origin}, which is allowed, chats: {status} {request_id} {len(text)} characters")
    if key:
        status, _, text = window.run(CHAT, url, "")
        yield Check(holds=status == 401 and "error" in text, text=f"without the key it reads why not: {status}")


def documented(url: str, window: Browser, screenshot: Path | None) -> Iterator[Check]:
    """/docs, with everything that it loads."""
    window.complaints()
    window.open(f"{url}/docs")
    until = time.monotonic() + RENDER_S
    while not (shown := window.run(LOOK))[0] and time.monotonic() < until:
        time.sleep(0.2)
    yield Check(holds=shown[0] >= 20 and shown[1] == [url], text=f"/docs shows {shown[0]} operations, all loaded from {shown[1]}")
    if screenshot is not None:
        screenshot.write_bytes(window.screenshot())
    tried = window.run(TRY)
    yield Check(holds=tried.startswith("200"), text=f'"Try it out" of /tokenize answers {tried!r}')
    complaints = window.complaints()
    yield Check(holds=not complaints, text=f"the console says nothing: {complaints}")


def checks(screenshot: Path | None) -> Iterator[Check]:
    with pages() as port, pages() as allowed, browser() as window:
        flags = ("--prefill=1", "--decode=1", f"--allow-origin=http://localhost:{allowed}")
        with local_fleet(*flags) as local:
            fleet = RunningFleet(local)
            yield from attacked(fleet, window, port)
            yield from invited(fleet.url, window, f"http://localhost:{allowed}")
            yield from documented(fleet.url, window, screenshot)
        with key_flags(page=KEY) as keys, local_fleet("--prefill=0", "--decode=1", "--allow-origin=*", *keys) as local:
            yield from invited(local.url, window, f"http://localhost:{port}", KEY)


def verdict(found: Iterator[Check]) -> int:
    """The exit status of checks that need a browser; without one, nothing is checked."""
    if not is_installed():
        say("skipped: there is no browser here; on Debian: apt install chromium chromium-driver")
        return 0
    return print_checks(found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.browser", description="Web pages in a real browser, and /docs.")
    parser.add_argument("--screenshot", type=Path, metavar="FILE", help="where to write a picture of /docs, as PNG")
    flags = parser.parse_args()
    return verdict(checks(flags.screenshot))


if __name__ == "__main__":
    sys.exit(main())
