"""The report: what the kernel says of processes, a line for each period of a soak, and what the periods say together.

Owns the reading of /proc, the pace that keeps a run within its share of a core, the table, the verdict and their bounds. Knows no
members and no transfers.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from tests.kv_transfer.agents import open_files, running_threads
from tests.rig.report import Check

MIB = 2**20
GROWTH_BYTES = 2 * MIB
"""Heaps settle within 0.5 MiB. In an hour at the default pace, 60 bytes that each push leaves behind, or 11 KiB that each strike
does, are more than this."""
NOISE_LEAST = 0.10
LISTED = 10
"""Problems that are named."""
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


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """What a period brought. Speeds are bytes per second of the first sender's pushes."""

    minute: float
    """The end of the period, counted from the beginning of the run."""
    sender: Footprint
    receiver: Footprint
    slow: float
    """The border of the slowest tenth."""
    median: float
    fast: float
    """The border of the fastest tenth."""
    counts: dict[str, int]
    duty: float
    """CPU time of the run, as a share of one core."""
    busy: float
    """CPU time of the whole machine, as a share of one core."""


COLUMNS: dict[str, Callable[[Period], str]] = {
    "minute": lambda period: f"{period.minute:.1f}",
    "sender MiB": lambda period: f"{period.sender.resident_bytes / MIB:.2f}",
    "files": lambda period: str(period.sender.files),
    "threads": lambda period: str(period.sender.threads),
    "receiver MiB": lambda period: f"{period.receiver.resident_bytes / MIB:.2f}",
    "files ": lambda period: str(period.receiver.files),
    "threads ": lambda period: str(period.receiver.threads),
    "GB/s: 10 %": lambda period: f"{period.slow / 1e9:.2f}",
    "50 %": lambda period: f"{period.median / 1e9:.2f}",
    "90 %": lambda period: f"{period.fast / 1e9:.2f}",
    "done": lambda period: _count(period, "done"),
    "failed": lambda period: _count(period, "failed"),
    "checked": lambda period: _count(period, "checked"),
    "joins": lambda period: _count(period, "joins"),
    "leaves": lambda period: _count(period, "receiver leaves", "sender leaves"),
    "kills": lambda period: _count(period, "kill receiver", "kill sender"),
    "reconnects": lambda period: _count(period, "reconnect"),
    "duty": lambda period: f"{period.duty:.2f}",
    "busy": lambda period: f"{period.busy:.2f}",
}
HEADER = " ".join(f"{name:>5}" for name in COLUMNS)


def line(period: Period) -> str:
    return " ".join(f"{text(period):>{max(5, len(name))}}" for name, text in COLUMNS.items())


def _count(period: Period, *what: str) -> str:
    return str(sum(period.counts.get(name, 0) for name in what))


def verdict(periods: Sequence[Period], problems: Sequence[str]) -> Iterator[Check]:
    """What holds of a whole run, sentence by sentence. Its second tenth is compared with its last: by then all is warm."""
    yield Check(holds=not problems, text="; ".join(problems[:LISTED]) or "every push became what it should")
    tenth, third = max(1, len(periods) // 10), max(1, len(periods) // 3)
    early, late = periods[tenth : 2 * tenth], periods[-tenth:]
    footprints: dict[str, Callable[[Period], Footprint]] = {
        "sender": lambda period: period.sender,
        "receiver": lambda period: period.receiver,
    }
    for name, footprint_of in footprints.items():
        then, now = ([footprint_of(period) for period in part] for part in (early, late))
        yield _flat(f"{name}: open files", [each.files for each in then], [each.files for each in now])
        yield _flat(f"{name}: threads", [each.threads for each in then], [each.threads for each in now])
        yield _grown(name, [each.resident_bytes for each in then], [each.resident_bytes for each in now])
    yield _speeds(periods[:third], periods[-third:])


def _flat(what: str, then: Sequence[int], now: Sequence[int]) -> Check:
    """It has not grown. The least of each counts, for a connection that is just being closed has its file for a moment more."""
    return Check(holds=min(now) <= min(then), text=f"{what} {min(then)} in the second tenth, {min(now)} in the last")


def _grown(name: str, then: Sequence[int], now: Sequence[int]) -> Check:
    growth = statistics.median(now) - statistics.median(then)
    return Check(
        holds=growth <= GROWTH_BYTES,
        text=f"{name}: resident memory {growth / MIB:+.2f} MiB from the second tenth to the last, at most {GROWTH_BYTES / MIB:g}",
    )


def _speeds(then: Sequence[Period], now: Sequence[Period]) -> Check:
    """For people, and not judged: speed depends on what else the machine does. Noise: how far the first third's
    medians lie apart."""
    first, last, medians = _typical(then), _typical(now), [period.median for period in then]
    noise = max(NOISE_LEAST, (max(medians) - min(medians)) / first)
    return Check(holds=True, text=f"{first / 1e9:.2f} GB/s in the first third, {last / 1e9:.2f} in the last, noise {noise:.0%}")


def _typical(periods: Sequence[Period]) -> float:
    """The median of the medians, in which a period counts for as much as it has pushes."""
    return statistics.median(period.median for period in periods for _ in range(period.counts["done"]))


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
