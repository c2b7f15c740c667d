"""Waiting for what another process does: always with a deadline.

Owns the patience of the tests of `launch`. Knows process ids only.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 60.0


def wait_for(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, f"never happened: {what}"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False
