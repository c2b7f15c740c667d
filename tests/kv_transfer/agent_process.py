"""A process with a pool of bytes that takes part in pushes: through a transport, or through a transfer thread over one.

Owns the words between a test and this process. The test decides what happens and when. Run as
`python -m tests.kv_transfer.agent_process PLAN` it reports Started, and then answers each Call with one Answer; events of the
transfers come in between. It ends when it is told to, or when its parent is gone.
"""

import os
import select
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias, assert_never

import msgspec
import numpy as np

from common.addresses import LOOPBACK
from common.config import TransportName
from common.errors import TransferError
from common.ids import ROUTER, AttemptId, Incarnation, InstanceId, RequestId, Ticket
from common.messages import InstanceInfo, PoolDescriptor
from common.messages.transfers import Allow, Connect, LinkChanged, Push, PushDone, PushFailed, Settle, Settled
from common.pages.layout import KVLayout
from common.processes.child import JsonLine, Parent
from kv_transfer.backends import make_transport
from kv_transfer.transfer_loop import TransferLoop, TransferThread
from kv_transfer.transport import AgentLost, Connected, ConnectFailed, RunsDone, RunsFailed, Transport, TransportEvent
from tests.kv_transfer.local_agent import LAYOUT, LocalAgent, random_bytes
from tests.kv_transfer.pools import make_pool
from tests.rig.namespaces import enter

POLL_S = 10e-3
START_S = 60.0
THREADS_S = 3.0
"""How long the threads of a closed transport may take to end, beyond its silence: Gloo does not fail a receive that has half
arrived when the sender dies."""
ANY_KEY = AttemptId(RequestId("any"), 0, ROUTER)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """is_threaded: whether a transfer thread drives the transport, as in an instance. host: the address on which peers reach this
    process. namespace: of the network, which it enters. device: of its pool. silence_s: after which the transport calls a peer
    lost. seed: of a member's bytes; an agent's are all 0."""

    transport: TransportName
    is_threaded: bool = False
    host: str = LOOPBACK
    namespace: str = ""
    device: str = "cpu"
    silence_s: int
    total_pages: int
    page_bytes: int = LAYOUT.page_bytes
    seed: int = 0


class Call(JsonLine, frozen=True):
    """Call this method of PortEnd or ThreadEnd. `end` is the last call: the answer names what is left that should not be."""

    method: str
    arguments: dict[str, Any]


class Started(JsonLine, frozen=True):
    """The process does its work now."""

    pool: PoolDescriptor


class Answer(JsonLine, frozen=True):
    """A call is done, or `refused` says why it could not be done."""

    refused: str | None = None
    digest: int | None = None


class Happened(JsonLine, frozen=True):
    """An event of the transport or of the transfer thread, and the name of its class."""

    kind: str
    event: Any


Event: TypeAlias = Connected | ConnectFailed | RunsDone | RunsFailed | AgentLost | PushDone | PushFailed | LinkChanged | Settled
Report: TypeAlias = Started | Answer | Happened
KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (Connected, ConnectFailed, RunsDone, RunsFailed, AgentLost, PushDone, PushFailed, LinkChanged, Settled)
}


def event_in(happened: Happened) -> Event:
    return msgspec.convert(happened.event, KINDS[happened.kind])


class PortEnd(LocalAgent[Transport]):
    """A transport. This thread makes every call to it."""

    wake = None

    def __init__(self, plan: Plan) -> None:
        pool_bytes = plan.total_pages * plan.page_bytes
        super().__init__(transport_of(plan), pool_bytes, memory=make_pool(pool_bytes, plan.device))

    def connect_to(self, pool: Any) -> None:
        """pool: as JSON. Raises TransferError."""
        self.connect(msgspec.convert(pool, PoolDescriptor))

    def begin_connect_to(self, pool: Any) -> None:
        """pool: as JSON."""
        self.begin_connect(msgspec.convert(pool, PoolDescriptor))

    def push_rows(self, ticket: int, agent: str, runs: list[tuple[int, int, int]]) -> None:
        self.push(ticket, agent, np.array(runs, dtype=np.int64).reshape(-1, 3))

    def dump(self, path: str) -> None:
        """Write the pool into a file."""
        self.memory().tofile(path)

    def turn(self) -> tuple[list[TransportEvent], float]:
        """What has happened, and how long to wait before the next call."""
        return self.events(0.0), POLL_S


class ThreadEnd:
    """A transfer thread over a transport."""

    def __init__(self, plan: Plan) -> None:
        layout = KVLayout(layers=1, kv_heads=1, head_dim=plan.page_bytes // 2, page_size=1, dtype="uint8")
        self._page_bytes = plan.page_bytes
        self._memory = make_pool(plan.total_pages * plan.page_bytes, plan.device)
        self._memory.write(random_bytes(plan.seed, plan.total_pages * plan.page_bytes))
        region = self._memory.region

        def make_loop() -> TransferLoop:
            return TransferLoop(transport_of(plan), plan.transport, region, layout, plan.total_pages, time.monotonic)

        self._peers: set[InstanceId] = set()
        self.wake = os.eventfd(0)
        self._thread = TransferThread(make_loop, lambda: os.eventfd_write(self.wake, 1))
        self.pool = self._thread.start(START_S)

    def wipe(self, pages: list[int], value: int) -> None:
        for start, end in self._ranges(pages):
            self._memory.wipe(value, start, end)

    def dump(self, path: str) -> None:
        """Write the pool into a file."""
        self._memory.read().tofile(path)

    def digest(self, pages: list[int]) -> int:
        """The CRC-32 of these pages, one after the other."""
        digest = 0
        for start, end in self._ranges(pages):  # one by one: copies of many megabytes would count as memory for long
            digest = zlib.crc32(self._memory.read(start, end).data, digest)
        return digest

    def connect(self, peers: list[Any]) -> None:
        """peers: all that there are now, of each the InstanceInfo, as JSON."""
        there = msgspec.convert(peers, tuple[InstanceInfo, ...])
        names = {peer.id for peer in there}
        self._thread.submit(Connect(there, tuple(self._peers - names)))
        self._peers = names

    def push(
        self, ticket: int, peer: str, incarnation: str, source_pages: list[int], target_pages: list[int], lease_s: float
    ) -> None:
        """lease_s: how long it may write to the peer."""
        source, target = (np.array(pages, dtype=np.int32) for pages in (source_pages, target_pages))
        self._thread.submit(Allow(InstanceId(peer), Incarnation(incarnation), time.monotonic() + lease_s))
        self._thread.submit(Push(Ticket(ticket), InstanceId(peer), Incarnation(incarnation), source, target, ANY_KEY))

    def _ranges(self, pages: list[int]) -> list[tuple[int, int]]:
        return [(page * self._page_bytes, (page + 1) * self._page_bytes) for page in pages]

    def settle(self) -> None:
        """Settled follows."""
        self._thread.submit(Settle(ANY_KEY))

    def turn(self) -> tuple[Sequence[Event], None]:
        """What has happened. `wake` tells when to call again. Raises TransferError when the thread has failed."""
        return self._thread.poll(), None

    def end(self) -> None:
        self._thread.close()


def main(plan: Plan, parent: "Parent[Call]") -> None:
    if plan.namespace:
        enter(plan.namespace)
    end = (ThreadEnd if plan.is_threaded else PortEnd)(plan)
    parent.report(Started(pool=end.pool))

    def turn() -> float | None:
        events, wait_s = end.turn()
        for event in events:
            parent.report(Happened(kind=type(event).__name__, event=event))
        return wait_s

    def act(call: Call) -> Answer | None:
        try:
            answer = Answer(digest=getattr(end, call.method)(**call.arguments))
        except TransferError as error:
            return Answer(refused=str(error))
        if call.method != "end":
            return answer
        left = threads_left(plan.silence_s + THREADS_S)
        parent.report(Answer(refused=f"threads are left: {left}" if left else None))
        return None

    assert parent.order_fd is not None
    watched = [parent.order_fd] if end.wake is None else [parent.order_fd, end.wake]
    while True:
        ready, _, _ = select.select(watched, [], [], turn())
        if end.wake is not None and end.wake in ready:
            os.eventfd_read(end.wake)
        if parent.order_fd not in ready:
            continue
        calls = parent.read_orders()
        if calls is None:
            return
        for call in calls:
            answer = act(call)
            if answer is None:
                return
            parent.report(answer)


def transport_of(plan: Plan) -> Transport:
    """A transport that calls a peer lost after the silence, where it can be told; for others the environment says it."""
    match plan.transport:
        case "nixl":
            from kv_transfer.nixl import NixlTransport

            if plan.device == "cpu":
                sys.modules["torch"] = None  # type: ignore[assignment]  # NIXL would import it to ask for CUDA, which takes seconds
            return NixlTransport(plan.silence_s)
        case "torch":
            from kv_transfer.torch_transport import TorchTransport

            return TorchTransport(plan.host, plan.silence_s)
        case "mooncake" | "cma":
            return make_transport(plan.transport, plan.host)
        case _:
            assert_never(plan.transport)


def threads_left(timeout_s: float) -> list[str]:
    """The names of the threads that have not ended by then, beside this one."""
    until = time.monotonic() + timeout_s
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        thread.join(max(0.0, until - time.monotonic()))
    return [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Plan), Parent(msgspec.json.Decoder[Call](Call)))
