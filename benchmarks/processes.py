"""What other processes use of this machine, as the kernel tells it.

Owns the questions. Decides nothing.
"""

import time
from collections.abc import Iterator
from pathlib import Path


def cpu_s(pid: int) -> float:
    """The CPU time of a process so far: of all its threads, in user and system mode, without its children."""
    # The clock of another process, as https://man7.org/linux/man-pages/man3/clock_getcpuclockid.3.html makes its id.
    return time.clock_gettime((~pid << 3) | 2)


def resident_mb(pid: int) -> float:
    """The resident memory of a process, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS"))


def below(pid: int) -> Iterator[int]:
    """The process and all that it started, directly or not."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from below(int(child))


def command_of(pid: int) -> list[str]:
    """How it was started."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
