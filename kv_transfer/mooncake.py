"""The Mooncake transport: one-sided writes through its transfer engine, over TCP or RDMA.

Owns the engine, and threads for each link. Knows no pages. Measured behaviour that shapes this file:

- The state of a batch cannot be read without waiting for it, so each slice is a blocking call on a thread of its link.
- With more than 1024 ranges under way to one peer, a batch fails after a part of it was written. SLICE_RUNS times WINDOW stays
  within that.
- Every failure is the same -1. A timeout does not end a write: what was under way to a stopped receiver lands when it goes on.
  Only the death of the peer proves an end: the port that it holds while it lives then refuses a connection.
- The engine chooses TCP or RDMA by the devices that it finds, whatever protocol it is told.
- Where a pool lies need not be said: the engine asks CUDA for the device of each range ("*", its default for `location`).
- A process that exits during a call is aborted, so its exit waits for the threads, up to MC_TRANSFER_TIMEOUT seconds. A silent
  peer goes unnoticed for as long. Only the environment can set it.

Mooncake: https://github.com/kvcache-ai/Mooncake, transfer engine of 0.3.13.
"""

import ctypes
import importlib
import importlib.metadata
import json
import os
import socket
import time
import uuid
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Annotated, Any

import msgspec

from common.errors import TransferError
from common.ids import Int64Array
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion
from kv_transfer.cuda import check_can_be_mapped, use_device
from kv_transfer.pushes import SlicedTransport, SliceFailed

SLICE_BYTES = 16 * 2**20
SLICE_RUNS = 512
WINDOW = 2
"""Slices under way on a link, and threads per link."""
SILENCE_S = 8
"""A peer that acknowledges nothing for this long is lost, unless MC_TRANSFER_TIMEOUT says otherwise."""
CONNECT_S = 2.0
"""The longest wait for the peer's port. The engine waits for its answers for MC_TRANSFER_TIMEOUT."""
GREETINGS = 64
"""Most attempts to connect at once."""
DYING_S = 0.5
NAME_BYTES = 64
WHEEL_WITHOUT_CUDA = "mooncake-transfer-engine-non-cuda"
WHEELS = (
    "Install mooncake-transfer-engine-cuda13, mooncake-transfer-engine (CUDA 12) or mooncake-transfer-engine-non-cuda, "
    "and the system's libibverbs1, librdmacm1, libnuma1 and libcurl4"
)


class _MooncakeAddress(msgspec.Struct, frozen=True):
    """What a pool's descriptor says to other agents: where the engine listens."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    beacon: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    """The address of the agent's name, padded to NAME_BYTES."""

    @property
    def session(self) -> str:
        """The engine's name for it."""
        return f"{self.host}:{self.port}"


class _MooncakeLink:
    """Implements `kv_transfer.pushes.PushLink`. landing: where NAME_BYTES of registered memory are, until it is ready."""

    def __init__(
        self, engine: Any, detail: str, source: MemoryRegion, pool: PoolDescriptor, wire: _MooncakeAddress, landing: int
    ) -> None:
        self.detail = detail
        self._engine, self._source, self._pool, self._wire = engine, source, pool, wire
        self._threads = ThreadPoolExecutor(WINDOW, thread_name_prefix="mooncake")
        self.ready = self._threads.submit(self._greet, landing)

    def _greet(self, landing: int) -> None:
        """On a thread of the link: read the agent's name. This connects, and proves that the link leads to the right agent."""
        try:
            _reach(self._wire)
            if self._engine.transfer_sync_read(self._wire.session, landing, self._wire.beacon, NAME_BYTES) != 0:
                raise TransferError("its memory cannot be read")
            if ctypes.string_at(landing, NAME_BYTES) != _padded(self._pool.agent):
                raise TransferError("the descriptor belongs to another agent")
        except (OSError, ValueError, RuntimeError) as error:
            raise TransferError(str(error) or type(error).__name__) from error

    def write(self, runs: Int64Array) -> Future[None]:
        return self._threads.submit(self._write, runs)

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def _write(self, runs: Int64Array) -> None:
        """On a thread of the link."""
        ours, theirs = runs[:, 0] + self._source.address, runs[:, 1] + self._pool.address
        try:
            status = self._engine.batch_transfer_sync_write(
                self._wire.session, ours.tolist(), theirs.tolist(), runs[:, 2].tolist()
            )
        except RuntimeError as error:
            raise SliceFailed(f"Mooncake failed to write: {error}", quiescent=False) from error
        if status != 0:
            gone = _is_gone(self._wire)
            raise SliceFailed(
                f"Mooncake failed to write ({status}) to a peer that {'is gone' if gone else 'may live'}", quiescent=gone
            )


class MooncakeTransport(SlicedTransport):
    """Implements `kv_transfer.transport.Transport`. host: the address of this host that peers can reach."""

    library = "Mooncake"

    def __init__(self, host: str) -> None:
        super().__init__(SLICE_BYTES, SLICE_RUNS, WINDOW)
        self._engine = _make_engine()
        self._name = f"mooncake-{uuid.uuid4().hex}"
        self._beacon = ctypes.create_string_buffer(_padded(self._name), (1 + GREETINGS) * NAME_BYTES)
        """Our name, and then places to which names of others are read."""
        beacon = ctypes.addressof(self._beacon)
        self._landings = deque(beacon + NAME_BYTES * place for place in range(1, 1 + GREETINGS))
        """Those that no read is under way to. Threads of links give them back."""
        self._accepted("start", self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""))
        self._host = host
        self._detail = f"Mooncake {_protocol(self._engine.get_local_topology())}"

    def register(self, region: MemoryRegion) -> tuple[str, bytes]:
        if region.device != "cpu":
            _check_wheel(region.device)
            use_device(region.device)
            check_can_be_mapped(region)  # nor can network cards register memory of expandable segments
        beacon = ctypes.addressof(self._beacon)
        self._accepted("register the pool", self._engine.register_memory(region.address, region.region_bytes))
        self._accepted("register its name", self._engine.register_memory(beacon, len(self._beacon)))
        self._region = region
        return self._name, msgspec.msgpack.encode(_MooncakeAddress(self._host, self._engine.get_rpc_port(), beacon))

    def close(self, agent: str | None = None) -> None:
        """With None, writes of peers are refused from then on (over TCP)."""
        super().close(agent)
        if agent is None and self._region is not None:
            self._engine.unregister_memory(self._region.address)
            self._engine.unregister_memory(ctypes.addressof(self._beacon))
            self._region = None

    def link_to(self, pool: PoolDescriptor) -> _MooncakeLink:
        wire = msgspec.msgpack.decode(pool.wire, type=_MooncakeAddress)
        if not self._landings:
            raise TransferError(f"{GREETINGS} attempts to connect are under way")
        landing = self._landings.popleft()
        link = _MooncakeLink(self._engine, self._detail, self.region, pool, wire, landing)
        link.ready.add_done_callback(lambda _: self._landings.append(landing))
        return link

    def _accepted(self, what: str, status: int) -> None:
        if status != 0:
            raise TransferError(f"Mooncake could not {what}: it says {status}")


def _make_engine() -> Any:
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(SILENCE_S))
    try:
        return importlib.import_module("mooncake.engine").TransferEngine()
    except ImportError as error:
        raise TransferError(f"Mooncake cannot be loaded: {error}. {WHEELS}") from error


def _check_wheel(device: str) -> None:
    """Raises TransferError for the wheel that takes a GPU's address for one of the CPU, which crashes."""
    with suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(WHEEL_WITHOUT_CUDA)
        raise TransferError(f"the pool is on {device}, and {WHEEL_WITHOUT_CUDA} knows no GPUs. {WHEELS}")


def _protocol(topology: str) -> str:
    """What the engine has chosen. topology: JSON with the preferred and the other network devices of each place in memory."""
    devices = sorted({device for places in json.loads(topology).values() for place in places for device in place})
    return f"RDMA on {', '.join(devices)}" if devices and "MC_FORCE_TCP" not in os.environ else "TCP"


def _padded(name: str) -> bytes:
    return name.encode().ljust(NAME_BYTES, b"\0")


def _reach(wire: _MooncakeAddress) -> None:
    """Raises OSError unless something answers there; ValueError for an invalid host name."""
    socket.create_connection((wire.host, wire.port), CONNECT_S).close()


def _is_gone(wire: _MooncakeAddress) -> bool:
    """Whether nobody holds the port. A peer that is stopped or cut off is not gone, and a dying one takes a moment."""
    until = time.monotonic() + DYING_S
    while time.monotonic() < until:
        try:
            _reach(wire)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        time.sleep(DYING_S / 10)
    return False
