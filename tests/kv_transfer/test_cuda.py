"""What transports ask of CUDA, against doubles of torch, the driver and NIXL.

The device of a thread, whether a pool can be mapped, the order of NIXL's start, and what a write names.
"""

import ctypes
import importlib.metadata
import sys
from typing import Any

import pytest
import torch

from common.errors import TransferError
from common.pages.layout import MemoryRegion
from kv_transfer import mooncake
from kv_transfer.cuda import card_of, check_can_be_mapped, has_drained, use_device
from kv_transfer.nixl import NixlTransport, _NixlLink
from kv_transfer.pushes import SliceFailed
from tests.kv_transfer.local_agent import pool_descriptor

BASE, GIB = 0x7F00_0000_0000, 2**30
POOL = MemoryRegion(address=BASE, region_bytes=GIB, device="cuda:1")
IPC, START, SIZE = 10, 11, 12
"""The driver's numbers of what is asked (cuda.h)."""


class Driver:
    """In place of libcuda: one allocation, as `cuPointerGetAttribute` describes it. status: what the call returns."""

    def __init__(self, ipc: int = 1, start: int = BASE, size: int = GIB, status: int = 0) -> None:
        self._values, self._status = {IPC: ipc, START: start, SIZE: size}, status

    def cuPointerGetAttribute(self, value: Any, number: ctypes.c_int, address: ctypes.c_uint64) -> int:
        assert address.value == POOL.address
        value._obj.value = self._values[number.value]
        return self._status


@pytest.mark.parametrize("driver", [Driver(), Driver(start=BASE - 512, size=GIB + 4096)])
def test_memory_of_one_allocation_can_be_mapped(driver: Driver) -> None:
    check_can_be_mapped(POOL, driver)


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (Driver(ipc=0), r"expandable_segments .* \(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\)"),
        (Driver(size=GIB - 1), "more than one allocation"),
        (Driver(start=BASE - 512), "more than one allocation"),
        (Driver(status=1), "is not memory of cuda:1: the driver says 1"),
    ],
)
def test_memory_that_cannot_be_mapped_is_refused_with_the_setting_to_change(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, reason: str
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(TransferError, match=reason):
        check_can_be_mapped(POOL, driver)


def test_a_host_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cuda(*_: object) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    for name in ("set_device", "get_device_properties", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, no_cuda)
    for ask in (use_device, card_of):
        with pytest.raises(TransferError, match="cuda:1 cannot be used: Torch not compiled with CUDA"):
            ask("cuda:1")
    assert not has_drained("cuda:1"), "nothing is proven"


def test_the_device_is_current_before_the_context_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.append(("current", index)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: calls.append(("context", index)))
    use_device("cuda:1")
    assert calls == [("current", 1), ("context", 1)]


# --- NIXL --------------------------------------------------------------------------------------------------------------------


class Agent:
    """In place of NIXL's agent: keeps what it is given. state: what a write does."""

    def __init__(self, order: list[str]) -> None:
        self._order, self.registered, self.written = order, [], []  # type: ignore[var-annotated]

    def create_backend(self, name: str, options: dict[str, str]) -> None:
        self._order.append(name)

    def register_memory(self, rows: list[tuple[int, int, int, str]], memory: str) -> None:
        self._order.append("registered")
        self.registered = [(memory, *row) for row in rows]

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def get_xfer_descs(self, rows: Any, memory: str) -> tuple[str, Any]:
        return memory, rows.tolist()

    def initialize_xfer(self, operation: str, ours: Any, theirs: Any, agent: str) -> str:
        self.written = [ours, theirs, agent]
        return operation

    def transfer(self, handle: str) -> str:
        raise nixlRemoteDisconnectError

    def release_xfer_handle(self, handle: str) -> None:
        return


class nixlRemoteDisconnectError(Exception):
    """Has the name of NIXL's error."""


@pytest.mark.skipif(sys.platform != "linux", reason="nixl is for Linux only")
def test_nixl_finds_the_device_current_and_the_pool_checked_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    agent = Agent(order)
    monkeypatch.setattr("kv_transfer.nixl.use_device", order.append)
    monkeypatch.setattr("kv_transfer.nixl.check_can_be_mapped", lambda region: order.append("checked"))
    transport = NixlTransport()
    transport._agent_class = lambda name, config: agent
    transport.register(POOL)
    assert order == ["cuda:1", "checked", "UCX", "registered"]
    assert agent.registered == [("VRAM", BASE, GIB, 1, "")]


@pytest.mark.skipif(sys.platform != "linux", reason="nixl is for Linux only")
def test_what_ucx_does_not_take_for_a_cards_memory_is_refused_with_the_setting_that_may_be_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real NIXL: here it knows no card."""
    monkeypatch.setattr("kv_transfer.nixl.use_device", lambda device: None)
    monkeypatch.setattr("kv_transfer.nixl.check_can_be_mapped", lambda region: None)
    monkeypatch.setenv("UCX_TLS", "tcp")
    with pytest.raises(TransferError, match=r"could not register the pool on cuda:1 \(UCX_TLS is tcp: it must admit cuda_copy"):
        NixlTransport().register(POOL)


@pytest.mark.parametrize("drains", [True, False])
def test_a_write_names_each_card_by_its_number_in_its_own_process_and_ends_when_the_device_has(
    monkeypatch: pytest.MonkeyPatch, drains: bool
) -> None:
    monkeypatch.setattr("kv_transfer.nixl.has_drained", lambda device: drains and device == "cuda:1")
    agent = Agent([])
    target = pool_descriptor("peer", 2 * BASE, GIB, b"", device="cuda:0")
    link = _NixlLink(agent, (nixlRemoteDisconnectError,), POOL, target)
    ended = link.write(torch.tensor([[16, 32, 64]]).numpy())
    assert agent.written == [("VRAM", [[BASE + 16, 64, 1]]), ("VRAM", [[2 * BASE + 32, 64, 0]]), "peer"]
    with pytest.raises(SliceFailed) as failed:
        ended.result()
    assert link.is_dead and failed.value.quiescent == drains


# --- Mooncake ----------------------------------------------------------------------------------------------------------------


def test_the_wheel_of_mooncake_that_knows_no_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.3.13")
    with pytest.raises(
        TransferError, match=r"mooncake-transfer-engine-non-cuda knows no GPUs. Install mooncake-transfer-engine-cuda13"
    ):
        mooncake._check_wheel("cuda:0")
    monkeypatch.undo()
    monkeypatch.setattr(mooncake, "WHEEL_WITHOUT_CUDA", "no-such-wheel")
    mooncake._check_wheel("cuda:0")
