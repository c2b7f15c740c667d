"""Shared memory: which files in /dev/shm a test has left behind, while other processes of this machine use it too.

Owns the reading of /dev/shm. Knows no processes of Tandem.
"""

import os
import time
from collections.abc import Set
from pathlib import Path

FOLDER = Path("/dev/shm")
PATIENCE_S = 60.0
LOOK_S = 0.1


def shared_files() -> frozenset[str]:
    return frozenset(os.listdir(FOLDER))


def left_behind(before: Set[str], patience_s: float = PATIENCE_S) -> set[str]:
    """Files that are not of `before` and that no process uses. Waits for files that a process is just making or removing."""
    until_s = time.monotonic() + patience_s
    while left := abandoned(before):
        if time.monotonic() >= until_s:
            return left
        time.sleep(LOOK_S)
    return set()


def abandoned(before: Set[str]) -> set[str]:
    """Files that are not of `before` and that no process uses at this moment."""
    new = shared_files() - before
    if not new:
        return set()
    used = _used()
    return {name for name in new if str(FOLDER / name) not in used}


def _used() -> set[str]:
    """Paths in /dev/shm that a process has mapped or open."""
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            used |= {word for word in (process / "maps").read_text().split() if word.startswith(str(FOLDER))}
            used |= {os.readlink(link) for link in (process / "fd").iterdir()}
        except OSError:
            continue  # it has just ended, or belongs to another user
    return used
