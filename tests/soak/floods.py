"""What floods have in common: a fleet with the keys of alice, who floods it, and of bob, who does not; and how long bob waits.

Owns the keys, bob's loop and its figures. Does not know what is asked.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from common.processes.local_fleet import local_fleet
from common.processes.router_client import RequestFailed, RouterClient
from tests.chaos.report import percentile

ALICE, BOB = "a" * 24, "b" * 24
WAIT_S = 600.0
"""Nobody waits longer for an answer."""


@contextlib.contextmanager
def keyed_fleet(*flags: str) -> Iterator[tuple[RouterClient, RouterClient]]:
    """A fleet on ports of its own, as alice and as bob reach it. Raises FleetFailed."""
    with tempfile.TemporaryDirectory() as folder:
        keys, control = Path(folder, "keys"), Path(folder, "control")
        for file, text in ((keys, f"alice {ALICE}\nbob {BOB}\n"), (control, "c" * 24)):
            file.touch(0o600)
            file.write_text(text)
        with local_fleet(f"--api-keys={keys}", f"--control-key={control}", "--log-level=warning", *flags) as fleet:
            yield RouterClient(fleet.url, ALICE, WAIT_S), RouterClient(fleet.url, BOB, WAIT_S)


def outcome(client: RouterClient, path: str, body: dict[str, Any]) -> str:
    """What became of a request, in a few words."""
    try:
        client.post(path, body)
    except RequestFailed as error:
        return f"{error.http_status}: {error}"[:120]
    return "200"


def while_pending(ask: Callable[[], str], pending: Sequence[Future[Any]], least: int) -> tuple[list[float], float]:
    """Ask again and again while one of these is not done, and at least so often. Returns the seconds of each answer, and of all.
    Raises RequestFailed for an answer that is none."""
    began_s, seconds = time.monotonic(), list[float]()
    while len(seconds) < least or not all(future.done() for future in pending):
        asked_s = time.monotonic()
        if (said := ask()) != "200":
            raise RequestFailed(said)
        seconds.append(time.monotonic() - asked_s)
    return seconds, time.monotonic() - began_s


def figures(seconds: Sequence[float]) -> str:
    p50, p99 = statistics.median(seconds), percentile(seconds, 0.99)
    return f"{len(seconds):5} answers, p50 {p50:7.3f} s, p99 {p99:7.3f} s, longest {max(seconds):7.3f} s"
