"""Cross memory attach: who is written to, and what the kernel's answers become. The contract runs in `test_transports.py`."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from common.errors import TransferError
from common.ids import Ticket
from kv_transfer.cma import IOV_MAX, SLICE_BYTES, CmaTransport
from kv_transfer.transport import AgentLost, RunsDone, RunsFailed, TransportEvent
from tests.kv_transfer.local_agent import LocalAgent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Cross memory attach is a part of Linux")
POOL_BYTES = 3 * SLICE_BYTES


Agent = LocalAgent[CmaTransport]


def agent(device: str = "cpu") -> Agent:
    """In this process: it is another one to the kernel all the same."""
    return LocalAgent(CmaTransport(), POOL_BYTES, device)


@pytest.fixture
def target() -> Agent:
    return agent()


@pytest.fixture
def source(target: Agent) -> Agent:
    made = agent()
    made.fill(1)
    assert made.connect(target.pool) == "Linux CMA"
    return made


@pytest.fixture
def stranger() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that lives and is no agent."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_poll_writes_one_slice(source: Agent, target: Agent) -> None:
    source.push(1, target.pool.agent)
    for written in (1, 2):
        assert source.transport.poll() == []
        np.testing.assert_array_equal(target.bytes[: written * SLICE_BYTES], source.bytes[: written * SLICE_BYTES])
        assert not target.bytes[written * SLICE_BYTES :].any()
    assert source.transport.poll() == [RunsDone(Ticket(1))]
    np.testing.assert_array_equal(target.bytes, source.bytes)


@pytest.mark.parametrize("number", [IOV_MAX - 1, IOV_MAX, IOV_MAX + 1, 2 * IOV_MAX + 5])
def test_more_runs_than_one_call_takes_are_all_written(source: Agent, target: Agent, number: int) -> None:
    starts = np.arange(number, dtype=np.int64) * 64
    source.push(1, target.pool.agent, np.stack([starts, starts[::-1], np.full(number, 64)], axis=1))
    assert source.transport.poll() == [RunsDone(Ticket(1))]
    np.testing.assert_array_equal(target.bytes[: 64 * number].reshape(-1, 64), source.bytes[: 64 * number].reshape(-1, 64)[::-1])
    assert not target.bytes[64 * number :].any()


@pytest.mark.parametrize("lives", [True, False])
def test_a_process_that_is_not_the_agents_is_refused(
    source: Agent, target: Agent, stranger: "subprocess.Popen[bytes]", lives: bool
) -> None:
    if not lives:
        stranger.kill()
        stranger.wait()
    reason = f"could not connect to reused: process {stranger.pid}" if lives else "it is gone"
    with pytest.raises(TransferError, match=reason):
        source.connect(msgspec.structs.replace(target.pool, agent="reused", wire=target.wire_with(pid=stranger.pid)))


@pytest.mark.parametrize("change", [{"pid": 0}, {"pid": 2**40}, {"beacon": -1}, {"beacon": 2**64 - 1}, {"pid": "1"}])
def test_an_invalid_descriptor_is_refused(source: Agent, target: Agent, change: dict[str, object]) -> None:
    with pytest.raises(TransferError, match="could not connect to odd: Expected"):
        source.connect(msgspec.structs.replace(target.pool, agent="odd", wire=target.wire_with(**change)))


def test_a_process_that_became_another_agent_is_not_written_to(source: Agent, target: Agent) -> None:
    source.push(1, target.pool.agent)
    source.transport.poll()
    beacon = msgspec.msgpack.decode(target.pool.wire)["beacon"]
    ctypes.memmove(beacon, b"cma-another", 11)
    (lost, failed), before = source.transport.poll(), target.bytes.copy()
    assert isinstance(lost, AgentLost) and isinstance(failed, RunsFailed) and failed.quiescent
    assert "or has closed" in failed.reason
    np.testing.assert_array_equal(target.bytes, before)
    assert not target.bytes[SLICE_BYTES:].any()


def test_a_push_to_unmapped_memory_fails(target: Agent) -> None:
    other = agent()
    nowhere = msgspec.structs.replace(target.pool, address=4096)
    other.connect(nowhere)
    other.push(1, nowhere.agent)
    events: list[TransportEvent] = other.transport.poll()
    assert isinstance(events[1], RunsFailed) and events[1].quiescent
    assert events[1].reason == f"process {os.getpid()}: it has no memory at that address"


def test_memory_of_a_device_is_refused_on_either_side() -> None:
    with pytest.raises(TransferError, match="the pool is on cuda:0: choose another --transport"):
        agent(device="cuda:0")
    target = agent()
    with pytest.raises(TransferError, match="the pool is on cuda:1"):
        agent().connect(msgspec.structs.replace(target.pool, device="cuda:1"))
