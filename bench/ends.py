"""The two ends of each way to move bytes: a KV transport, a transfer thread, a socket, memmove, a copy on a GPU.

Owns what a push is on each way. Knows pools and runs. Does not know what is measured, or who asks.
"""

import ctypes
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeAlias, assert_never

import numpy as np

from bench.lines import Address, AgentPlan
from bench.pools import DevicePool, HostPool, Pool
from common.addresses import LOOPBACK
from common.config import TransportName
from common.errors import TransferError
from common.ids import ROUTER, Incarnation, InstanceId, Int32Array, Int64Array, Key, RequestId, Ticket
from common.instance.ports import Allow, Expect, LinkChanged, PushDone, PushFailed
from common.instance.ports import Connect as ConnectPeers
from common.instance.ports import Push as PushPages
from common.messages import InstanceInfo, ModelIdentity, PoolDescriptor
from common.pages.layout import KVLayout
from kv_transfer.backends import make_transport
from kv_transfer.planner import PageSlice, plan_runs
from kv_transfer.transfer_loop import TransferLoop
from kv_transfer.transfer_thread import BUSY_S, EXPECT_S, IDLE_S, TransferThread
from kv_transfer.transport import AgentLost, Connected, ConnectFailed, RunsDone, RunsFailed

PUSH_S = 60.0
"""A push that takes longer has failed."""
WRITE_LEASE_S = 86_400.0
TARGET = InstanceId("target")
LIFE = Incarnation("1")
NO_REQUEST = Key(RequestId("bench"), 0, ROUTER)
PushOnce: TypeAlias = Callable[[], None]


class End:
    """One end of a way. address: how the other end reaches it. landing: the pool that pushes write into.

    Raises TransferError from any method for what cannot be done. An end that needs no turns and holds nothing inherits that.
    """

    address: Address
    landing: Pool
    layout: KVLayout

    def connect(self, address: Address) -> None:
        """Get ready to push there."""

    def prepare(self, source_pages: Int32Array, target_pages: Int32Array) -> PushOnce:
        """A call that writes our pages into the other end's, and returns when every byte is there."""
        raise NotImplementedError

    def expect(self, pushes: bool) -> None:
        """Whether pushes are on their way to this end."""

    def turn(self) -> float | None:
        """Make progress. Returns after how many seconds to call it again; None: never."""
        return None

    def close(self) -> None:
        """Give up what is held."""

    def runs(self, source_pages: Int32Array, target_pages: Int32Array) -> Int64Array:
        """[runs, 3] int64: source offset, target offset and length of each, in bytes."""
        return plan_runs(source_pages, target_pages, PageSlice(self.layout), PageSlice(self.layout))


def make_end(plan: AgentPlan, pool: Pool, spare: Callable[[], Pool]) -> End:
    """spare: makes a second pool in this process, on the other device."""
    layout = layout_of(plan.unit_bytes)
    match plan.way.kind:
        case "transport":
            return TransportEnd(_named(plan), plan.host, pool, layout)
        case "thread":
            return ThreadEnd(_named(plan), plan.host, pool, layout)
        case "socket":
            return SocketEnd(plan.host, _on_host(pool), layout)
        case "memmove":
            return MemmoveEnd(_on_host(pool), _on_host(spare()), layout)
        case "copy":
            return CopyEnd(_on_device(pool), _on_device(spare()), layout)
        case _:
            assert_never(plan.way.kind)


def layout_of(page_bytes: int) -> KVLayout:
    """A layout whose pages have this size."""
    return KVLayout(layers=1, kv_heads=1, head_dim=page_bytes // 2, page_size=1, dtype="uint8")


class TransportEnd(End):
    """The port alone: every call comes from this thread, which polls without a pause after a push."""

    def __init__(self, name: TransportName, host: str, pool: Pool, layout: KVLayout) -> None:
        self._transport = make_transport(name, host)
        self.layout = layout
        self._peer, self._connected = "", False
        self._tickets = 0
        self._expecting = False
        self._expect_s = BUSY_S if _is_distant(host) else EXPECT_S
        region = pool.region
        agent, wire = self._transport.register(region)
        descriptor = PoolDescriptor(
            backend=name,
            agent=agent,
            address=region.address,
            total_pages=region.region_bytes // layout.page_bytes,
            device=region.device,
            layout=layout,
            wire=wire,
        )
        self.address = Address(pool=descriptor)
        self.landing = pool

    def connect(self, address: Address) -> None:
        pool = _pool_at(address)
        self._peer, self._connected = pool.agent, False
        self._transport.connect(pool)
        until = time.monotonic() + PUSH_S
        while not self._connected:
            if time.monotonic() > until:
                raise TransferError(f"the peer did not answer within {PUSH_S:g} s")
            self._has_ended(Ticket(-1))
            time.sleep(BUSY_S)

    def prepare(self, source_pages: Int32Array, target_pages: Int32Array) -> PushOnce:
        runs = self.runs(source_pages, target_pages)
        return lambda: self._push(runs)

    def expect(self, pushes: bool) -> None:
        self._expecting = pushes

    def turn(self) -> float:
        self._has_ended(Ticket(-1))
        return self._expect_s if self._expecting else IDLE_S

    def close(self) -> None:
        self._transport.close()

    def _push(self, runs: Int64Array) -> None:
        self._tickets += 1
        ticket = Ticket(self._tickets)
        self._transport.push(ticket, self._peer, runs)
        until = time.monotonic() + PUSH_S
        while not self._has_ended(ticket):
            if time.monotonic() > until:
                raise TransferError(f"a push took longer than {PUSH_S:g} s")

    def _has_ended(self, ticket: Ticket) -> bool:
        done = False
        for event in self._transport.poll():
            match event:
                case RunsDone():
                    done = done or event.ticket == ticket
                case Connected():
                    self._connected = True
                case RunsFailed() | AgentLost() | ConnectFailed():
                    raise TransferError(event.reason)
                case _:
                    assert_never(event)
        return done


class ThreadEnd(End):
    """A transfer thread with its pace, links and leases: what an instance uses."""

    def __init__(self, name: TransportName, host: str, pool: Pool, layout: KVLayout) -> None:
        self.layout = layout
        self._is_distant = _is_distant(host)

        def make_loop() -> TransferLoop:
            total_pages = pool.region.region_bytes // layout.page_bytes
            return TransferLoop(make_transport(name, host), name, pool.region, layout, total_pages, time.monotonic)

        self._news = threading.Event()
        self._thread = TransferThread(make_loop, self._news.set)
        self._tickets = 0
        self.address = Address(pool=self._thread.start(PUSH_S))
        self.landing = pool

    def connect(self, address: Address) -> None:
        self._thread.submit(ConnectPeers((_instance_of(_pool_at(address)),)))
        self._wait(lambda event: isinstance(event, LinkChanged) and event.link.state == "ready")
        self._thread.submit(Allow(TARGET, LIFE, time.monotonic() + WRITE_LEASE_S))

    def prepare(self, source_pages: Int32Array, target_pages: Int32Array) -> PushOnce:
        return lambda: self._push(source_pages, target_pages)

    def expect(self, pushes: bool) -> None:
        self._thread.submit(Expect(int(pushes), distant=self._is_distant))

    def close(self) -> None:
        self._thread.close()

    def _push(self, source_pages: Int32Array, target_pages: Int32Array) -> None:
        self._tickets += 1
        ticket = Ticket(self._tickets)
        self._thread.submit(PushPages(ticket, TARGET, LIFE, source_pages, target_pages, NO_REQUEST))
        self._wait(lambda event: isinstance(event, PushDone) and event.ticket == ticket)

    def _wait(self, is_awaited: Callable[[object], bool]) -> None:
        until = time.monotonic() + PUSH_S
        while True:
            if not self._news.wait(max(0.0, until - time.monotonic())):
                raise TransferError(f"nothing happened for {PUSH_S:g} s")
            self._news.clear()
            for event in self._thread.poll():
                if isinstance(event, PushFailed):
                    raise TransferError(event.reason)
                if isinstance(event, LinkChanged) and event.link.state == "lost":
                    raise TransferError(event.link.detail)
                if is_awaited(event):
                    return


class SocketEnd(End):
    """One TCP connection. A push sends where its runs go, then their bytes; one byte comes back when all have arrived."""

    def __init__(self, host: str, pool: HostPool, layout: KVLayout) -> None:
        self._pool, self.layout = pool.bytes.data, layout
        try:
            self._listener = socket.create_server((host, 0))
        except OSError as error:
            raise TransferError(f"nothing can listen on {host}: {error}") from error
        self._connection: socket.socket | None = None
        self._receiver = threading.Thread(target=self._receive, name="receiver", daemon=True)
        self._receiver.start()
        self.address = Address(host=host, port=self._listener.getsockname()[1])
        self.landing = pool

    def connect(self, address: Address) -> None:
        try:
            self._connection = socket.create_connection((address.host, address.port), PUSH_S)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise TransferError(f"no connection to {address.host}:{address.port}: {error}") from error

    def prepare(self, source_pages: Int32Array, target_pages: Int32Array) -> PushOnce:
        runs = self.runs(source_pages, target_pages)
        head = np.int64(len(runs)).tobytes() + np.ascontiguousarray(runs[:, 1:]).tobytes()
        pieces = [self._pool[start : start + length] for start, _, length in runs.tolist()]
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
                    connection.recv_into(self._pool[start : start + length], length, socket.MSG_WAITALL)
                connection.sendall(b"!")


class MemmoveEnd(End):
    """Both pools in one process, and a loop that copies the runs with one core."""

    def __init__(self, pool: HostPool, landing: HostPool, layout: KVLayout) -> None:
        self.layout = layout
        self.address = Address()
        self.landing = landing
        self._addresses = pool.region.address, landing.region.address

    def prepare(self, source_pages: Int32Array, target_pages: Int32Array) -> PushOnce:
        from_address, to_address = self._addresses
        runs = self.runs(source_pages, target_pages).tolist()
        moves = [(to_address + there, from_address + here, length) for here, there, length in runs]

        def push() -> None:
            for to, start, length in moves:
                ctypes.memmove(to, start, length)

        return push


class CopyEnd(End):
    """Both pools in one process, on GPUs: a copy of each run on one stream, and a wait for the stream."""

    def __init__(self, pool: DevicePool, landing: DevicePool, layout: KVLayout) -> None:
        self.layout = layout
        self.address = Address()
        self.landing = landing
        self._from, self._to = pool.tensor, landing.tensor

    def prepare(self, source_pages: Int32Array, target_pages: Int32Array) -> PushOnce:
        runs = self.runs(source_pages, target_pages).tolist()
        copies = [(self._to[there : there + size], self._from[here : here + size]) for here, there, size in runs]

        def push() -> None:
            for to, source in copies:
                to.copy_(source, non_blocking=True)
            self._wait()

        return push

    def _wait(self) -> None:
        import torch

        if self._from.is_cuda:
            torch.cuda.current_stream(self._from.device).synchronize()


def _on_host(pool: Pool) -> HostPool:
    assert isinstance(pool, HostPool), "this way is for pools on the CPU"
    return pool


def _on_device(pool: Pool) -> DevicePool:
    assert isinstance(pool, DevicePool), "this way is for pools on GPUs"
    return pool


def _named(plan: AgentPlan) -> TransportName:
    assert plan.way.transport is not None, f"{plan.way.kind} goes through a transport"
    return plan.way.transport


def _pool_at(address: Address) -> PoolDescriptor:
    assert address.pool is not None, "the other end has registered a pool"
    return address.pool


def _is_distant(host: str) -> bool:
    """Whether the other process is on another host, or stands for one that is."""
    return host != LOOPBACK


def _instance_of(pool: PoolDescriptor) -> InstanceInfo:
    """The owner of a pool, as a transfer loop needs it."""
    model = ModelIdentity(name="bench", fingerprint="", architecture="", dtype="uint8", vocab_size=1, context_tokens=1)
    return InstanceInfo(id=TARGET, incarnation=LIFE, role="decode", inbox="", ranks=(), model=model, pools=(pool,), max_running=1)
