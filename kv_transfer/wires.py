"""The wires of this host: how many bytes each of its network devices has sent, and how fast it is.

Owns what Linux reports about them (`/proc/net/dev`, `/sys/class/net`, `/sys/class/infiniband`). Knows no transport: the
byte counts show which device a library really uses, whatever it was told to use.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

RDMA = "RDMA"
TCP = "TCP"
LOOPBACK_DEVICE = "lo"
_WORD_BYTES = 4
"""InfiniBand counts words (Linux, Documentation/ABI/stable/sysfs-class-infiniband: port_xmit_data)."""


@dataclass(frozen=True, slots=True)
class Wire:
    """kind: RDMA or TCP. name: of the device, and its port for RDMA."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} over {self.name}"


def bytes_sent(root: Path = Path("/")) -> dict[Wire, int]:
    """How many bytes each device has sent since it came up. Devices without counters are left out."""
    sent: dict[Wire, int] = {}
    for name, words in _devices(root / "proc/self/net/dev"):
        sent[Wire(TCP, name)] = int(words[8])
    for port in _ports(root):
        with suppress(OSError, ValueError):
            words_sent = int((port / "counters/port_xmit_data").read_text())
            sent[Wire(RDMA, f"{port.parent.parent.name}:{port.name}")] = _WORD_BYTES * words_sent
    return sent


def busiest(before: Mapping[Wire, int], after: Mapping[Wire, int], pushed_bytes: int) -> Wire | None:
    """The wire that carried this many bytes between the two counts. RDMA comes first, because no other device counts its bytes.
    None: memory carried them, or a device without counters."""
    carried = {wire: sent - before.get(wire, 0) for wire, sent in after.items()}
    candidates = (wire for wire, sent in carried.items() if sent >= pushed_bytes)
    return max(candidates, key=lambda wire: (wire.kind == RDMA, carried[wire]), default=None)


def fastest_bytes_per_s(root: Path = Path("/")) -> float | None:
    """The fastest wire to other hosts that is up and reports its speed (a virtual device reports none)."""
    speeds = [speed for port in _ports(root) if (speed := _rdma_speed(port)) is not None]
    for name, _ in _devices(root / "proc/self/net/dev"):
        with suppress(OSError, ValueError):
            megabits = int((root / "sys/class/net" / name / "speed").read_text())
            if name != LOOPBACK_DEVICE and megabits > 0:
                speeds.append(megabits * 1e6 / 8)
    return max(speeds, default=None)


def _devices(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The name and the columns of each network device. The file begins with two heading lines."""
    with suppress(OSError):
        for line in path.read_text().splitlines()[2:]:
            name, _, columns = line.partition(":")
            yield name.strip(), columns.split()


def _ports(root: Path) -> list[Path]:
    return sorted((root / "sys/class/infiniband").glob("*/ports/*"))


def _rdma_speed(port: Path) -> float | None:
    """ "400 Gb/sec (4X NDR)" in bytes per second, of a port that is active."""
    try:
        if "ACTIVE" not in (port / "state").read_text():
            return None
        return float((port / "rate").read_text().split()[0]) * 1e9 / 8
    except (OSError, ValueError, IndexError):
        return None
