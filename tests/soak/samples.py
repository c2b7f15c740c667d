"""Samples: what the kernel says of processes, and the pace that keeps a run within its share of a core.

Owns the reading of /proc. Knows no members and no transfers.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tests.kv_transfer.agents import open_files, running_threads

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SAVED_S = 0.25
"""CPU time that may be saved up: after a wait nothing is made up for at full speed."""


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a process holds. resident_bytes: of memory."""

    resident_bytes: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Footprint":
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return cls(resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"), files=open_files(pid), threads=running_threads(pid))


def cpu_s(pids: Iterable[int]) -> float:
    """CPU time of this process, of its children that have ended, and of these, which live."""
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system + sum(map(_cpu_of, pids))


def busy_s() -> float:
    """CPU time of the whole machine since it started."""
    user, nice, system, _idle, _iowait, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / TICKS_PER_S


class Pace:
    """Says when to wait, so that on average no more than `duty` of one core is used."""

    def __init__(self, duty: float, pids: Iterable[int]) -> None:
        self._duty = duty
        self._saved_s = 0.0
        self._at_s, self._spent_s = time.monotonic(), cpu_s(pids)

    def wait_s(self, pids: Iterable[int]) -> float:
        """How long what has been spent asks for nothing more to be spent; 0 when there is something left."""
        now, spent_s = time.monotonic(), cpu_s(pids)
        earned_s = self._duty * (now - self._at_s)
        self._saved_s = min(self._saved_s + earned_s, SAVED_S) - (spent_s - self._spent_s)
        self._at_s, self._spent_s = now, spent_s
        return max(0.0, -self._saved_s / self._duty)


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
