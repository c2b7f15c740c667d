"""One of the two processes of a way to move KV pages: a pool and one end over it, which does what its parent orders.

Owns the memory, what a push is on each way, and the clock around pushes. Run as `python -m benchmarks.transfer_agent PLAN`, with
orders from its parent. It ends when an order fails, which it reports, or when its parent is gone. Does not know what is worth
measuring.
"""

import contextlib
import ctypes
import itertools
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from common.addresses import LOOPBACK
from common.config import TransportName
from common.errors import TransferError
from common.ids import ROUTER, AttemptId, Incarnation, InstanceId, Int32Array, Int64Array, RequestId, Ticket
from common.messages import InstanceInfo, ModelIdentity, PoolDescriptor
from common.messages.transfers import Allow, Connect, Expect, LinkChanged, Push, PushDone, PushFailed
from common.pages.host_memory import host_memory
from common.pages.layout import KVLayout, MemoryRegion
from common.processes.child import Broken, JsonLine, Parent
from kv_transfer.backends import make_transport
from kv_transfer.planner import PageSlice, plan_runs
from kv_transfer.transfer_loop import TransferLoop, TransferThread

PUSH_S = 60.0
"""A push that takes longer has failed."""
WRITE_LEASE_S = 86_400.0
TARGET = InstanceId("target")
LIFE = Incarnation("1")
NO_REQUEST = AttemptId(RequestId("bench"), 0, ROUTER)
PushOnce: TypeAlias = Callable[[], None]


class PushShape(msgspec.Struct, frozen=True):
    """What one push moves: `pages` pages of `page_bytes`, next to each other on both sides or anywhere in the pools."""

    page_bytes: int
    pages: int
    arrangement: Literal["contiguous", "scattered"]

    @property
    def push_bytes(self) -> int:
        return self.page_bytes * self.pages

    def pushes_in_turn(self, pool_bytes: int) -> int:
        """Each push takes other pages than the one before, and after so many they begin again."""
        return max(2, min(16, pool_bytes // self.push_bytes))


class TransferWay(msgspec.Struct, frozen=True):
    """How bytes get from one process to the other."""

    kind: Literal["thread", "socket", "memmove", "copy"]
    """thread: through a TransferThread, as an instance does it. socket: one TCP connection. memmove: a loop in one process, which
    is the speed of the memory. copy: the same for GPUs, a copy of each run on one stream."""
    transport: TransportName | None = None

    @property
    def is_local(self) -> bool:
        """Whether one process has both ends."""
        return self.kind in ("memmove", "copy")

    @property
    def label(self) -> str:
        names = {"thread": f"{self.transport} thread", "socket": "tcp socket", "memmove": "memmove", "copy": "device copy"}
        return names[self.kind]


class AgentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a way."""

    way: TransferWay
    host: str
    """The address to listen on."""
    unit_bytes: int
    """The size of a page of its pool."""
    pool_bytes: int
    device: str = "cpu"
    other_device: str = "cpu"
    """Where the other end's pool is."""


class LinkOrder(JsonLine, frozen=True):
    """Get ready to push there."""

    pool: PoolDescriptor


class ExpectOrder(JsonLine, frozen=True):
    """Report the CPU time of the process so far, and be ready for what comes."""

    pushes: bool
    """Whether pushes come to this end from here on."""


class PushOrder(JsonLine, frozen=True):
    """Push again and again, for this many seconds and at least this many times, and report the seconds of each push."""

    shape: PushShape
    seed: int
    seconds: float
    least_pushes: int


AgentOrder: TypeAlias = LinkOrder | ExpectOrder | PushOrder


class AgentReport(JsonLine, frozen=True, kw_only=True):
    """What an order has led to. The first report says that the agent is there."""

    pool: PoolDescriptor | None = None
    """What the other end must know of the pool, in the first report."""
    cpu_s: float = 0.0
    """User and system time of all threads."""
    pushes_s: tuple[float, ...] = ()


class BenchPool:
    """Memory like that of an instance's pool, on the CPU. Every page of the system is already touched."""

    bytes: Any
    """[pool_bytes] uint8: an array, or a tensor on a GPU."""

    def __init__(self, pool_bytes: int) -> None:
        self.bytes = host_memory(pool_bytes, huge_pages=True)
        self.bytes[:] = 0
        self.region = MemoryRegion(address=self.bytes.ctypes.data, region_bytes=pool_bytes, device="cpu")

    def copies(self, landing: "BenchPool", runs: Int64Array) -> PushOnce:
        """A loop that copies the runs with one core. landing: a pool of the same kind."""
        to_address, from_address = landing.region.address, self.region.address
        moves = [(to_address + there, from_address + here, length) for here, there, length in runs.tolist()]

        def push() -> None:
            for to, start, length in moves:
                ctypes.memmove(to, start, length)

        return push


class DevicePool(BenchPool):
    """The same on a GPU: a copy is one of each run on one stream, and a wait for the stream."""

    def __init__(self, pool_bytes: int, device: str) -> None:
        """device: cuda or cuda:N. Raises TransferError when the memory cannot be had."""
        import torch  # takes a second, and only pools on a GPU need it

        try:
            self.bytes = torch.zeros(pool_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, AssertionError) as error:
            raise TransferError(f"no pool of {pool_bytes} bytes on {device}: {str(error).splitlines()[0]}") from error
        self.region = MemoryRegion(address=self.bytes.data_ptr(), region_bytes=pool_bytes, device=str(self.bytes.device))
        # A push is no work of torch's stream, so nothing of it may still run.
        self._wait = torch.cuda.current_stream(self.bytes.device).synchronize if self.bytes.is_cuda else lambda: None
        self._wait()

    def copies(self, landing: BenchPool, runs: Int64Array) -> PushOnce:
        parts = [(landing.bytes[to : to + length], self.bytes[at : at + length]) for at, to, length in runs.tolist()]

        def push() -> None:
            for target_run, source_run in parts:
                target_run.copy_(source_run, non_blocking=True)
            self._wait()

        return push


def make_pool(device: str, pool_bytes: int) -> BenchPool:
    """device: cpu, cuda or cuda:N. Raises TransferError."""
    return BenchPool(pool_bytes) if device == "cpu" else DevicePool(pool_bytes, device)


class TransferAgent:
    """A pool and one end of a way over it. Raises TransferError from any method for what cannot be done."""

    def __init__(self, plan: AgentPlan) -> None:
        self.plan = plan
        self.pool = self.landing = make_pool(plan.device, plan.pool_bytes)
        """`landing` is what pushes write into."""
        self.layout = layout_of(plan.unit_bytes)
        self.is_distant = plan.host != LOOPBACK  # the other process is on another host, or stands for one that is
        self.descriptor = self.describe()

    def describe(self, backend: str = "", agent: str = "", wire: bytes = b"") -> PoolDescriptor:
        """What the other end must know of the pool."""
        return PoolDescriptor(
            backend=backend,
            agent=agent,
            address=self.pool.region.address,
            total_pages=self.plan.pool_bytes // self.plan.unit_bytes,
            device=self.pool.region.device,
            layout=self.layout,
            wire=wire,
        )

    def connect(self, pool: PoolDescriptor) -> None:
        """Get ready to push there."""

    def prepare(self, source_pages: Int32Array, target_pages: Int32Array) -> PushOnce:
        """A call that writes our pages into the other end's, and returns when every byte is there."""
        raise NotImplementedError

    def expect(self, pushes: bool) -> None:
        """Whether pushes are on their way to this end."""

    def close(self) -> None:
        """Give up what is held."""

    def runs(self, source_pages: Int32Array, target_pages: Int32Array) -> Int64Array:
        """[runs, 3] int64: source offset, target offset and length of each, in bytes."""
        return plan_runs(source_pages, target_pages, PageSlice(self.layout), PageSlice(self.layout))

    def obey(self, order: AgentOrder) -> AgentReport:
        match order:
            case LinkOrder():
                self.connect(order.pool)
                return AgentReport()
            case ExpectOrder():
                self.expect(order.pushes)
                return AgentReport(cpu_s=time.process_time())
            case PushOrder():
                return AgentReport(pushes_s=tuple(self.push(order)))

    def push(self, order: PushOrder) -> list[float]:
        pages = pages_of(order.shape, self.plan.unit_bytes, self.plan.pool_bytes, order.seed)
        pushes = [self.prepare(source, target) for source, target in pages]
        taken: list[float] = []
        began = before = time.perf_counter()
        while len(taken) < order.least_pushes or before - began < order.seconds:
            pushes[len(taken) % len(pushes)]()
            now = time.perf_counter()
            taken.append(now - before)
            before = now
        return taken


def pages_of(shape: PushShape, unit_bytes: int, pool_bytes: int, seed: int) -> list[tuple[Int32Array, Int32Array]]:
    """The pages of each push of a turn, as units of the pool: (source, target), [units] int32 each. Equal in all processes."""
    random = np.random.default_rng([seed, shape.page_bytes, shape.pages])
    total, units = pool_bytes // shape.page_bytes, shape.page_bytes // unit_bytes

    def side() -> Int32Array:
        if shape.arrangement == "contiguous":
            pages = random.integers(total - shape.pages + 1) + np.arange(shape.pages)
        else:
            pages = random.permutation(total)[: shape.pages]
        return (pages[:, None] * units + np.arange(units)).reshape(-1).astype(np.int32)

    return [(side(), side()) for _ in range(shape.pushes_in_turn(pool_bytes))]


def layout_of(page_bytes: int) -> KVLayout:
    """A layout whose pages have this size."""
    return KVLayout(layers=1, kv_heads=1, head_dim=page_bytes // 2, page_size=1, dtype="uint8")


class ThreadAgent(TransferAgent):
    """A transfer thread with its pace, links and leases: what an instance uses."""

    def __init__(self, plan: AgentPlan) -> None:
        super().__init__(plan)
        name, total_pages = plan.way.transport, self.descriptor.total_pages
        assert name is not None

        def make_loop() -> TransferLoop:
            return TransferLoop(make_transport(name, plan.host), name, self.pool.region, self.layout, total_pages, time.monotonic)

        self._events = threading.Event()
        self._thread = TransferThread(make_loop, self._events.set)
        self._tickets = map(Ticket, itertools.count())
        self.descriptor = self._thread.start(PUSH_S)

    def connect(self, pool: PoolDescriptor) -> None:
        self._thread.submit(Connect((_instance_of(pool),)))
        self._wait(lambda event: isinstance(event, LinkChanged) and event.link.state == "ready")
        self._thread.submit(Allow(TARGET, LIFE, time.monotonic() + WRITE_LEASE_S))

    def prepare(self, source_pages: Int32Array, target_pages: Int32Array) -> PushOnce:
        def push() -> None:
            self._thread.submit(Push(next(self._tickets), TARGET, LIFE, source_pages, target_pages, NO_REQUEST))
            self._wait(lambda event: isinstance(event, PushDone))

        return push

    def expect(self, pushes: bool) -> None:
        self._thread.submit(Expect(int(pushes), distant=self.is_distant))

    def close(self) -> None:
        self._thread.close()

    def _wait(self, is_awaited: Callable[[object], bool]) -> None:
        """Wait for this event. One push or connection is under way at a time, so none is of another one."""
        until = time.monotonic() + PUSH_S
        while True:
            for event in self._thread.poll():
                match event:
                    case PushFailed():
                        raise TransferError(event.reason)
                    case LinkChanged() if event.link.state == "lost":
                        raise TransferError(event.link.detail)
                if is_awaited(event):
                    return
            if time.monotonic() > until:
                raise TransferError(f"nothing happened for {PUSH_S:g} s")
            self._events.wait(PUSH_S)
            self._events.clear()


def _instance_of(pool: PoolDescriptor) -> InstanceInfo:
    """The owner of a pool, as a transfer loop needs it."""
    model = ModelIdentity(name="bench", fingerprint="", architecture="", dtype="uint8", vocab_size=1, context_tokens=1)
    return InstanceInfo(id=TARGET, incarnation=LIFE, role="decode", inbox="", ranks=(), model=model, pools=(pool,), max_running=1)


class SocketAgent(TransferAgent):
    """One TCP connection. A push sends where its runs go, then their bytes; one byte comes back when all have arrived."""

    def __init__(self, plan: AgentPlan) -> None:
        super().__init__(plan)
        self._bytes = memoryview(self.pool.bytes)
        try:
            self._listener = socket.create_server((plan.host, 0))
        except OSError as error:
            raise TransferError(f"nothing can listen on {plan.host}: {error}") from error
        self._connection: socket.socket | None = None
        threading.Thread(target=self._receive, name="receiver", daemon=True).start()
        self.descriptor = self.describe(agent=plan.host, wire=str(self._listener.getsockname()[1]).encode())

    def connect(self, pool: PoolDescriptor) -> None:
        address = pool.agent, int(pool.wire)
        try:
            self._connection = socket.create_connection(address, PUSH_S)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise TransferError(f"no connection to {address}: {error}") from error

    def prepare(self, source_pages: Int32Array, target_pages: Int32Array) -> PushOnce:
        runs = self.runs(source_pages, target_pages)
        head = np.int64(len(runs)).tobytes() + np.ascontiguousarray(runs[:, 1:]).tobytes()
        pieces = [self._bytes[start : start + length] for start, _, length in runs.tolist()]
        connection = self._connection
        assert connection is not None, "connect comes before prepare"

        def push() -> None:
            try:
                connection.sendall(head)
                for piece in pieces:
                    connection.sendall(piece)
                if not connection.recv(1):
                    raise TransferError("the connection was closed")
            except OSError as error:
                raise TransferError(f"the connection failed: {error}") from error

        return push

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._listener.close()

    def _receive(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # closed before anybody connected
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            while head := connection.recv(8, socket.MSG_WAITALL):
                table = bytearray(16 * int.from_bytes(head, "little"))
                connection.recv_into(table, len(table), socket.MSG_WAITALL)
                for start, length in np.frombuffer(table, dtype="<i8").reshape(-1, 2).tolist():
                    connection.recv_into(self._bytes[start : start + length], length, socket.MSG_WAITALL)
                connection.sendall(b"!")


class LocalAgent(TransferAgent):
    """Both pools in one process: the speed of the memory."""

    def __init__(self, plan: AgentPlan) -> None:
        super().__init__(plan)
        self.landing = make_pool(plan.other_device, plan.pool_bytes)

    def prepare(self, source_pages: Int32Array, target_pages: Int32Array) -> PushOnce:
        return self.pool.copies(self.landing, self.runs(source_pages, target_pages))


AGENTS: dict[str, type[TransferAgent]] = {
    "thread": ThreadAgent,
    "socket": SocketAgent,
    "memmove": LocalAgent,
    "copy": LocalAgent,
}


def main() -> None:
    """Make the agent of the plan, and obey."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())  # so that the agent is closed
    parent: Parent[AgentOrder] = Parent(msgspec.json.Decoder(AgentOrder))
    try:
        plan = msgspec.json.decode(sys.argv[1], type=AgentPlan)
        with contextlib.closing(AGENTS[plan.way.kind](plan)) as agent:
            parent.report(AgentReport(pool=agent.descriptor))
            while (orders := parent.read_orders()) is not None:
                for order in orders:
                    parent.report(agent.obey(order))
    except TransferError as error:
        parent.report(Broken(reason=str(error)))


if __name__ == "__main__":
    main()
