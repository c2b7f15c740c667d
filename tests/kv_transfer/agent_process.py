"""A process with a pool of bytes that takes part in pushes: through a transport, or through a transfer thread over one.

Owns the words between a test and this process. The test decides what happens and when. Run as
`python -m tests.kv_transfer.agent_process PLAN` it reports Started, and then answers each command with one Answer; events of the
transfers come in between. It ends when it is told to, or when its parent is gone.
"""

import os
import sys
import threading
import time
import zlib
from typing import Any, TypeAlias, assert_never

import msgspec
import numpy as np

from common.addresses import LOOPBACK
from common.config import TransportName
from common.errors import TransferError
from common.ids import Incarnation, InstanceId, Key, RequestId, Ticket
from common.instance.ports import Allow, Connect, LinkChanged, Push, PushDone, PushFailed, Settle, Settled
from common.messages import InstanceInfo, PoolDescriptor
from common.pages.layout import KVLayout, MemoryRegion
from common.processes.lines import JsonLine
from common.processes.parent import Parent
from kv_transfer.backends import make_transport
from kv_transfer.transfer_loop import TransferLoop
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transport import AgentLost, RunsDone, RunsFailed, Transport

POLL_S = 1e-3
START_S = 60.0
THREADS_S = 3.0
"""How long the threads of a transport that is closed may take to end."""
PERIOD_BYTES = 2**20 + 7
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=1, page_size=1, dtype="uint8")
"""A transport knows bytes only, but descriptors must have a layout: this one has pages of two bytes, the smallest."""
ANY_KEY = Key(RequestId("any"), 0)
Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """is_threaded: whether a transfer thread drives the transport, as in an instance. host: the address on which peers reach this
    process. silence_s: after which the transport calls a peer lost. seed: of the pool's bytes; None: all of them are 0."""

    transport: TransportName
    is_threaded: bool = False
    host: str = LOOPBACK
    silence_s: int
    total_pages: int
    page_bytes: int = LAYOUT.page_bytes
    seed: int | None = None


# --- what the test says ------------------------------------------------------------------------------------------------------


class Fill(JsonLine, frozen=True):
    """Fill the pool with `random_bytes` of this seed."""

    seed: int


class Wipe(JsonLine, frozen=True):
    """Set these pages to this value; without pages, the bytes from `start` to `end`, or to the end of the pool."""

    value: int
    pages: list[int] | None = None
    start: int = 0
    end: int | None = None


class Dump(JsonLine, frozen=True):
    """Write the pool into a file."""

    path: str


class DigestPages(JsonLine, frozen=True):
    """Answer with the CRC-32 of these pages, one after the other."""

    pages: list[int]


class End(JsonLine, frozen=True):
    """Close everything and exit. The answer names what is left that should not be."""


class ConnectPool(JsonLine, frozen=True):
    """Transport.connect."""

    pool: PoolDescriptor


class PushRuns(JsonLine, frozen=True):
    """Transport.push. runs: rows of (source offset, target offset, bytes)."""

    ticket: int
    agent: str
    runs: list[tuple[int, int, int]]


class Close(JsonLine, frozen=True):
    """Transport.close."""

    agent: str | None


class ConnectPeers(JsonLine, frozen=True):
    """Connect, to a transfer thread."""

    peers: tuple[InstanceInfo, ...]


class PushPages(JsonLine, frozen=True):
    """Push, to a transfer thread. lease_s: how long it may write to the peer."""

    ticket: int
    peer: InstanceId
    incarnation: Incarnation
    source_pages: list[int]
    target_pages: list[int]
    lease_s: float


class SettleWrites(JsonLine, frozen=True):
    """Settle, to a transfer thread; Settled follows."""


PoolCommand: TypeAlias = Fill | Wipe | Dump | DigestPages
PortCommand: TypeAlias = ConnectPool | PushRuns | Close
ThreadCommand: TypeAlias = ConnectPeers | PushPages | SettleWrites
Command: TypeAlias = PoolCommand | PortCommand | ThreadCommand | End


# --- what the process says ---------------------------------------------------------------------------------------------------


class Started(JsonLine, frozen=True):
    """The process does its work now."""

    pool: PoolDescriptor


class Answer(JsonLine, frozen=True):
    """A command is done, or `refused` says why it could not be done."""

    refused: str | None = None
    digest: int = 0


class Happened(JsonLine, frozen=True):
    """An event of the transport or of the transfer thread: one of the fields is set."""

    runs_done: RunsDone | None = None
    runs_failed: RunsFailed | None = None
    agent_lost: AgentLost | None = None
    push_done: PushDone | None = None
    push_failed: PushFailed | None = None
    link_changed: LinkChanged | None = None
    settled: Settled | None = None


Event: TypeAlias = RunsDone | RunsFailed | AgentLost | PushDone | PushFailed | LinkChanged | Settled
Report: TypeAlias = Started | Answer | Happened
FIELDS: dict[type[Event], str] = {
    RunsDone: "runs_done",
    RunsFailed: "runs_failed",
    AgentLost: "agent_lost",
    PushDone: "push_done",
    PushFailed: "push_failed",
    LinkChanged: "link_changed",
    Settled: "settled",
}


def event_in(happened: Happened) -> Event:
    (event,) = (each for each in msgspec.structs.astuple(happened) if each is not None)
    found: Event = event
    return found


def random_bytes(seed: int, pool_bytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """The same bytes for the same seed, in any process. They repeat with a period that divides no page or slice."""
    return np.resize(np.frombuffer(np.random.default_rng(seed).bytes(PERIOD_BYTES), dtype=np.uint8), pool_bytes)


def pool_descriptor(agent: str, address: int, pool_bytes: int, wire: bytes, backend: str) -> PoolDescriptor:
    """A pool of bytes: each page has two bytes, the smallest size there is."""
    return PoolDescriptor(
        backend=backend,
        agent=agent,
        address=address,
        total_pages=pool_bytes // LAYOUT.page_bytes,
        device="cpu",
        layout=LAYOUT,
        wire=wire,
    )


# --- the two ends ------------------------------------------------------------------------------------------------------------


class PortEnd:
    """A transport. This thread makes every call to it."""

    wake = None

    def __init__(self, plan: Plan, pool: Bytes) -> None:
        self._transport = transport_of(plan.transport, plan.silence_s, plan.host)
        agent, wire = self._transport.register(region_of(pool))
        self.pool = pool_descriptor(agent, pool.ctypes.data, pool.nbytes, wire, plan.transport)

    def obey(self, command: PortCommand | ThreadCommand) -> None:
        """Raises TransferError."""
        match command:
            case ConnectPool():
                self._transport.connect(command.pool)
            case PushRuns():
                runs = np.array(command.runs, dtype=np.int64).reshape(-1, 3)
                self._transport.push(Ticket(command.ticket), command.agent, runs)
            case Close():
                self._transport.close(command.agent)
            case _:
                raise AssertionError(f"{command} is for a transfer thread")

    def events(self) -> tuple[list[RunsDone | RunsFailed | AgentLost], float]:
        """What has happened, and how long to wait before the next call."""
        return self._transport.poll(), POLL_S

    def close(self) -> None:
        self._transport.close()


class ThreadEnd:
    """A transfer thread over a transport."""

    def __init__(self, plan: Plan, pool: Bytes) -> None:
        layout = KVLayout(layers=1, kv_heads=1, head_dim=plan.page_bytes // 2, page_size=1, dtype="uint8")

        def make_loop() -> TransferLoop:
            transport = transport_of(plan.transport, plan.silence_s, plan.host)
            return TransferLoop(transport, plan.transport, region_of(pool), layout, plan.total_pages, time.monotonic)

        self.wake = os.eventfd(0)
        self._thread = TransferThread(make_loop, lambda: os.eventfd_write(self.wake, 1))
        self.pool = self._thread.start(START_S)

    def obey(self, command: PortCommand | ThreadCommand) -> None:
        match command:
            case ConnectPeers():
                self._thread.submit(Connect(command.peers))
            case PushPages():
                source, target = (np.array(pages, dtype=np.int32) for pages in (command.source_pages, command.target_pages))
                self._thread.submit(Allow(command.peer, command.incarnation, time.monotonic() + command.lease_s))
                self._thread.submit(Push(Ticket(command.ticket), command.peer, command.incarnation, source, target))
            case SettleWrites():
                self._thread.submit(Settle(ANY_KEY))
            case _:
                raise AssertionError(f"{command} is for a transport")

    def events(self) -> tuple[list[PushDone | PushFailed | LinkChanged | Settled], None]:
        """What has happened. `wake` tells when to call again. Raises TransferError when the thread has failed."""
        return self._thread.poll(), None

    def close(self) -> None:
        self._thread.close()


class AgentProcess:
    """The pool, and one of the two ends over it."""

    def __init__(self, plan: Plan, parent: "Parent[Command, Report]") -> None:
        self._parent = parent
        pool_bytes = plan.total_pages * plan.page_bytes
        self._bytes: Bytes = np.zeros(pool_bytes, dtype=np.uint8) if plan.seed is None else random_bytes(plan.seed, pool_bytes)
        self._pages = self._bytes.reshape(plan.total_pages, plan.page_bytes)
        self._end = (ThreadEnd if plan.is_threaded else PortEnd)(plan, self._bytes)
        parent.report(Started(pool=self._end.pool))
        parent.obey(self._act, self._turn, self._end.wake)

    def _turn(self) -> float | None:
        events, wait_s = self._end.events()
        for event in events:
            self._parent.report(Happened(**{FIELDS[type(event)]: event}))  # type: ignore[arg-type]
        return wait_s

    def _act(self, command: Command) -> Answer | None:
        match command:
            case End():
                self._end.close()
                left = threads_left()
                self._parent.report(Answer(refused=f"threads are left: {left}" if left else None))
                return None
            case Fill() | Wipe() | Dump() | DigestPages():
                return Answer(digest=self._with_pool(command))
            case _:
                try:
                    self._end.obey(command)
                except TransferError as error:
                    return Answer(refused=str(error))
                return Answer()

    def _with_pool(self, command: PoolCommand) -> int:
        """Returns the digest that was asked for, else 0."""
        match command:
            case Fill():
                self._bytes[:] = random_bytes(command.seed, len(self._bytes))
            case Wipe(pages=None):
                self._bytes[command.start : command.end] = command.value
            case Wipe():
                self._pages[command.pages] = command.value
            case Dump():
                self._bytes.tofile(command.path)
            case DigestPages():
                digest = 0
                for page in command.pages:  # one by one: copies of many megabytes would count as memory for long
                    digest = zlib.crc32(self._pages[page].data, digest)
                return digest
            case _:
                assert_never(command)
        return 0


def region_of(pool: Bytes) -> MemoryRegion:
    return MemoryRegion(address=pool.ctypes.data, region_bytes=pool.nbytes, device="cpu")


def transport_of(name: TransportName, silence_s: int, host: str = LOOPBACK) -> Transport:
    """A transport that calls a peer lost after this silence, where it can be told; for others the environment says it."""
    match name:
        case "nixl":
            from kv_transfer.nixl import NixlTransport

            sys.modules["torch"] = None  # type: ignore[assignment]  # NIXL would import it to ask for CUDA, which takes seconds
            return NixlTransport(silence_s)
        case "torch":
            from kv_transfer.distributed import TorchTransport

            return TorchTransport(host, silence_s)
        case "mooncake" | "cma":
            return make_transport(name, host)
        case _:
            assert_never(name)


def threads_left() -> list[str]:
    """The names of the threads that have not ended, beside this one."""
    until = time.monotonic() + THREADS_S
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        thread.join(max(0.0, until - time.monotonic()))
    return [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]


if __name__ == "__main__":
    AgentProcess(msgspec.json.decode(sys.argv[1], type=Plan), Parent(msgspec.json.Decoder[Command](Command)))
