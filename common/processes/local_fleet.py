"""A fleet of real processes on this machine: `launch local` in a child process.

Owns the child process. Knows the command line, and nothing of the inside.
"""

import contextlib
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from common.errors import TandemError
from common.processes.child import Child, Progress

START_S = 180.0
STOP_S = 60.0
LOOK_S = 0.1
_CURL_LINE = re.compile(r"^curl (http://[^/]+)/.*? -d ", re.MULTILINE | re.DOTALL)


class FleetFailed(TandemError):
    """A fleet did not start, stop or answer as it should."""


class LocalFleet:
    """`launch local` with these flags, on ports that it chooses. on_output: called with each line that it writes."""

    def __init__(self, *flags: str, on_output: Callable[[str], object] = lambda line: None) -> None:
        self.url = ""
        self._lines: list[str] = []
        self._on_output = on_output
        self._changed = threading.Event()
        self._child: Child[Progress] = Child(
            "launch local",
            [sys.executable, "-P", "-m", "launch.main", "local", "--port=0", "--control-port=0", *flags],
            msgspec.json.Decoder[Progress](Progress),
            lambda event: self._changed.set(),
            self._keep_line,
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
            self._changed.clear()
            if self._child.status is not None or time.monotonic() > until:
                raise FleetFailed(f"the fleet did not start: {self._child.account()}")
            self._changed.wait(LOOK_S)
        self.url = printed[1]

    def stop(self) -> None:
        """Stop it as Ctrl-C does. Raises FleetFailed unless it ends in order."""
        self._child.signal(signal.SIGINT)
        if not self._child.wait(STOP_S):
            self._child.kill()
            raise FleetFailed(f"the fleet did not stop within {STOP_S:g} s: {self._child.account()}")
        if self._child.status != 0:
            raise FleetFailed(f"the fleet failed: {self._child.account()}")

    def _keep_line(self, line: str) -> None:
        self._lines.append(line)
        self._changed.set()
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
