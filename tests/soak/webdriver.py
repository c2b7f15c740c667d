"""A headless Chromium, driven by chromedriver's HTTP protocol (https://www.w3.org/TR/webdriver2).

Owns the two processes and the few commands that are used. Reaches no host but this one. Does not know what it is asked to show.
"""

import base64
import contextlib
import http.client
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from common.addresses import free_port

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
