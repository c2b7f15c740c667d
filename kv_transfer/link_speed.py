"""How fast a link is, and what carries it: measured when the link comes up, by writing into the spare page of the peer's pool.

Owns the measurement of a link, and the speed that this host should reach. Knows pools and wires. Posts nothing itself.
"""

import time
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from common.ids import Int64Array
from common.messages import PoolDescriptor
from kv_transfer.planner import PageSlice, plan_runs
from kv_transfer.wires import LOOPBACK_DEVICE, Wire, busiest, bytes_sent, fastest_bytes_per_s

FIRST_BYTES, MOST_BYTES = 2**20, 16 * 2**20
MOST_RUNS = 4096
PROBES = 5
"""Writes per measurement. The first one only brings the link up, because libraries connect on first use. Of the others the
fastest counts: another program may slow some of them down."""
SHORT_S = 0.01
"""A shorter write says little, so the next one is larger."""
SLOW_SHARE = 0.2
"""A link slower than this share of what the host can do is not on the path that it should be on."""
COPIED_BYTES = 64 * 2**20
GB = 1e9


class LinkProbe:
    """The measurement of one link, from the pool `ours` to the pool `theirs`. Both have a spare page."""

    def __init__(self, ours: PoolDescriptor, theirs: PoolDescriptor) -> None:
        source, target = (np.array([pool.total_pages], dtype=np.int32) for pool in (ours, theirs))
        self._page = plan_runs(source, target, PageSlice.of(ours), PageSlice.of(theirs))
        self._page_bytes = int(self._page[:, 2].sum())
        self._on_devices = ours.device != "cpu" and theirs.device != "cpu"
        self._wanted_bytes = FIRST_BYTES
        self._probes = self._counted_bytes = 0
        self._sent: Mapping[Wire, int] = {}
        self.bytes_per_s: float | None = None

    @property
    def done(self) -> bool:
        """True also when there is nothing to write, because the pools have no head in common."""
        return self._probes == PROBES or not self._page_bytes

    def next_runs(self) -> Int64Array:
        """What to write next, [runs, 3] int64 as for `Transport.push`: the spare page, many times over."""
        if self._probes == 1:
            self._sent = bytes_sent()
        pages = min(-(-self._wanted_bytes // self._page_bytes), MOST_RUNS // len(self._page))
        return np.tile(self._page, (max(1, pages), 1))

    def took(self, probe_bytes: int, seconds: float) -> None:
        """The write succeeded and took this long."""
        self._probes += 1
        if self._probes > 1 and seconds > 0:
            self._counted_bytes += probe_bytes
            self.bytes_per_s = max(self.bytes_per_s or 0.0, probe_bytes / seconds)
        if seconds < SHORT_S:
            self._wanted_bytes = min(4 * self._wanted_bytes, MOST_BYTES)

    def wire(self) -> Wire | None:
        """What carried the writes; None: no network device of this host."""
        return busiest(self._sent, bytes_sent(), self._counted_bytes) if self._counted_bytes else None

    def carrier(self, wire: Wire | None) -> str:
        """The name of the carrier, for people."""
        if wire is not None:
            return str(wire)
        return "GPU memory, NVLink or PCIe" if self._on_devices else "memory"

    def host_bytes_per_s(self, wire: Wire | None) -> float | None:
        """What this host should reach: the speed of a memory copy to a process on this host, the speed of the fastest wire to
        another host. Links between GPUs are faster, unless their bytes go through sockets. None: unknown."""
        if wire is not None and wire.name != LOOPBACK_DEVICE:
            return fastest_bytes_per_s()
        return memory_bytes_per_s()


def slowness(bytes_per_s: float | None, host_bytes_per_s: float | None, carrier: str) -> str:
    """A warning if the link is far slower than the host allows; otherwise empty."""
    if bytes_per_s is None or host_bytes_per_s is None or bytes_per_s >= SLOW_SHARE * host_bytes_per_s:
        return ""
    return f"slow: {bytes_per_s / GB:.2f} GB/s by {carrier}, where this host can do {host_bytes_per_s / GB:.1f}"


@lru_cache(maxsize=1)
def memory_bytes_per_s() -> float:
    """How fast this host copies memory, measured on more than its caches hold."""
    source, target = np.ones(COPIED_BYTES, dtype=np.uint8), np.zeros(COPIED_BYTES, dtype=np.uint8)
    fastest_s = float("inf")
    for _ in range(PROBES):
        began_s = time.perf_counter()
        np.copyto(target, source)
        fastest_s = min(fastest_s, time.perf_counter() - began_s)
    return COPIED_BYTES / fastest_s
