"""The Mooncake transport over an engine that does what was measured of the real one: it refuses long batches, and its failures
are all alike. The real engine runs in `test_transports.py` where it is installed.
"""

import ctypes
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType

import msgspec
import numpy as np
import pytest

from common.errors import TransferError
from common.ids import Int64Array, Ticket
from kv_transfer.mooncake import MooncakeTransport
from kv_transfer.transport import AgentLost, RunsDone, RunsFailed
from tests.kv_transfer.local_agent import WAIT_S, LocalAgent

QUEUE_RUNS = 1024
POOL_BYTES = 2**20
NO_DEVICES = '{"cpu:0": [[], []]}'


@dataclass(slots=True, eq=False)
class Network:
    """What the engines of one test share. under_way: ranges of calls that have not returned; stopped: no write is answered."""

    under_way: int = 0
    most_under_way: int = 0
    stopped: bool = False
    topology: str = NO_DEVICES
    lock: threading.Lock = field(default_factory=threading.Lock)


class FakeEngine:
    """`mooncake.engine.TransferEngine`: a listening port, and memmove. The network is the test's."""

    network: Network

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        assert (metadata, devices) == ("P2PHANDSHAKE", "")
        self.listener = socket.create_server((host, 0))
        return 0

    def get_rpc_port(self) -> int:
        return int(self.listener.getsockname()[1])

    def get_local_topology(self) -> str:
        return self.network.topology

    def register_memory(self, address: int, length: int) -> int:
        return 0

    def unregister_memory(self, address: int) -> int:
        self.listener.close()
        return 0

    def transfer_sync_read(self, session: str, ours: int, theirs: int, length: int) -> int:
        ctypes.memmove(ours, theirs, length)
        return 0

    def batch_transfer_sync_write(self, session: str, ours: list[int], theirs: list[int], lengths: list[int]) -> int:
        with self.network.lock:
            self.network.under_way += len(ours)
            self.network.most_under_way = max(self.network.most_under_way, self.network.under_way)
            refused = self.network.under_way > QUEUE_RUNS
        time.sleep(1e-3)
        if not refused and not self.network.stopped:
            for source, target, length in zip(ours, theirs, lengths, strict=True):
                ctypes.memmove(target, source, length)
        with self.network.lock:
            self.network.under_way -= len(ours)
        return -1 if refused or self.network.stopped else 0


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    made = Network()
    monkeypatch.setattr(FakeEngine, "network", made, raising=False)
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "5")
    module = ModuleType("mooncake.engine")
    module.__dict__["TransferEngine"] = FakeEngine
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    yield made
    for thread in threading.enumerate():
        if thread.name.startswith("mooncake"):
            thread.join(WAIT_S)


Agent = LocalAgent[MooncakeTransport]


def agent() -> Agent:
    return LocalAgent(MooncakeTransport("127.0.0.1"), POOL_BYTES)


@pytest.fixture
def target(network: Network) -> Iterator[Agent]:
    made = agent()
    yield made
    made.transport.close()


@pytest.fixture
def source(target: Agent) -> Iterator[Agent]:
    made = agent()
    made.fill(1)
    made.connect(target.pool)
    yield made
    made.transport.close()


def reversed_runs(number: int, run_bytes: int) -> Int64Array:
    starts = np.arange(number, dtype=np.int64) * run_bytes
    return np.stack([starts, starts[::-1], np.full(number, run_bytes)], axis=1)


def test_thousands_of_runs_in_several_pushes_never_fill_the_engines_queue(network: Network, source: Agent, target: Agent) -> None:
    runs = reversed_runs(4096, 256)
    for ticket, part in enumerate(np.split(runs, 2)):
        source.push(ticket, target.pool.agent, part)
    assert set(source.ended(2)) == {RunsDone(Ticket(0)), RunsDone(Ticket(1))}, "in whichever order the engine finished them"
    np.testing.assert_array_equal(target.bytes.reshape(-1, 256), source.bytes.reshape(-1, 256)[::-1])
    assert network.most_under_way == QUEUE_RUNS


def test_a_failed_write_to_a_living_peer_is_not_quiescent(network: Network, source: Agent, target: Agent) -> None:
    network.stopped = True
    source.push(1, target.pool.agent)
    lost, failed = source.ended()
    assert isinstance(lost, AgentLost) and lost.agent == target.pool.agent
    assert isinstance(failed, RunsFailed) and not failed.quiescent
    network.stopped = False
    source.connect(target.pool)
    source.push(2, target.pool.agent)
    assert source.ended() == [RunsDone(Ticket(2))]


def test_a_failed_write_to_an_unreachable_peer_is_not_quiescent(
    network: Network, source: Agent, target: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(address: tuple[str, int], timeout: float) -> socket.socket:
        raise TimeoutError("timed out")

    network.stopped = True
    monkeypatch.setattr(socket, "create_connection", cut_off)
    source.push(1, target.pool.agent)
    _, failed = source.ended()
    assert isinstance(failed, RunsFailed) and not failed.quiescent


def test_a_failed_write_to_a_dead_peer_is_quiescent(network: Network, source: Agent, target: Agent) -> None:
    target.transport.close()
    network.stopped = True
    source.push(1, target.pool.agent)
    _, failed = source.ended()
    assert isinstance(failed, RunsFailed) and failed.quiescent and "is gone" in failed.reason
    with pytest.raises(TransferError, match="refused"):
        source.connect(target.pool)


def test_a_descriptor_that_leads_to_another_agent_is_refused(source: Agent, target: Agent) -> None:
    with pytest.raises(TransferError, match="could not connect to impostor: the descriptor belongs to another agent"):
        source.connect(msgspec.structs.replace(target.pool, agent="impostor"))


@pytest.mark.parametrize("change", [{"port": 0}, {"port": 65536}, {"beacon": -1}, {"host": "no such host"}, {"host": "." * 99}])
def test_an_invalid_descriptor_is_refused(source: Agent, target: Agent, change: dict[str, object]) -> None:
    with pytest.raises(TransferError, match="could not connect to odd: "):
        source.connect(msgspec.structs.replace(target.pool, agent="odd", wire=target.wire_with(**change)))


@pytest.mark.parametrize(
    ("topology", "forced", "detail"),
    [
        (NO_DEVICES, False, "Mooncake TCP"),
        ('{"cpu:0": [["mlx5_1"], ["mlx5_0"]], "cuda:0": [["mlx5_0"], []]}', False, "Mooncake RDMA on mlx5_0, mlx5_1"),
        ('{"cpu:0": [["mlx5_0"], []]}', True, "Mooncake TCP"),
    ],
)
def test_the_link_names_the_protocol_that_the_engine_chose(
    network: Network, monkeypatch: pytest.MonkeyPatch, topology: str, forced: bool, detail: str
) -> None:
    network.topology = topology
    if forced:
        monkeypatch.setenv("MC_FORCE_TCP", "1")
    source, target = agent(), agent()
    assert source.connect(target.pool) == detail
    for each in (source, target):
        each.transport.close()


def test_an_engine_that_cannot_be_loaded_is_refused_with_the_names_of_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransferError) as refused:
        MooncakeTransport("127.0.0.1")
    for name in ("-engine-cuda13", "-engine ", "-engine-non-cuda", "libibverbs1", "librdmacm1", "libnuma1", "libcurl4"):
        assert name in str(refused.value)
