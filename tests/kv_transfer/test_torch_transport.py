"""The torch transport in one process: who is refused, how soon, and that threads end. The contract is in `test_transports.py`."""

import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from common.errors import TransferError
from common.ids import Ticket
from kv_transfer.torch_transport import CONNECT_S, TorchTransport
from kv_transfer.transport import RunsDone
from tests.kv_transfer.local_agent import WAIT_S, LocalAgent

POOL_BYTES = 4096


class Agent(LocalAgent[TorchTransport]):
    """While it is `attended`, a thread polls it, as its process would."""

    def __init__(self, device: str = "cpu", host: str = "127.0.0.1") -> None:
        super().__init__(TorchTransport(host, silence_s=1.0), POOL_BYTES, device)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="attendant")

    def attend(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self.transport.close()

    def _poll(self) -> None:
        while not self._over.wait(1e-3):
            self.transport.poll()


def an_agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.end()


source, target = pytest.fixture(an_agent, name="source"), pytest.fixture(an_agent, name="target")


def threads_of_links() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("torch-"))


def without_threads_within(seconds: float) -> bool:
    until = time.monotonic() + seconds
    while threads_of_links() and time.monotonic() < until:
        time.sleep(0.01)
    return not threads_of_links()


def test_each_end_of_a_link_has_a_thread_that_ends_with_it(source: Agent, target: Agent) -> None:
    target.attend()
    assert source.connect(target.pool) == "torch.distributed Gloo"
    source.bytes[:] = 7
    source.push(1, target.pool.agent)
    assert source.ended() == [RunsDone(Ticket(1))]
    assert (target.bytes == 7).all()
    assert threads_of_links() == ["torch-receiver", "torch-sender"]
    source.transport.close(target.pool.agent)
    assert without_threads_within(WAIT_S)


def test_a_receiver_that_closes_ends_both_threads(source: Agent, target: Agent) -> None:
    target.attend()
    source.connect(target.pool)
    target.end()
    source.transport.close()
    assert without_threads_within(WAIT_S)


def test_connecting_to_a_peer_that_does_not_answer_ends_in_bounded_time(source: Agent, target: Agent) -> None:
    began = time.monotonic()
    with pytest.raises(TransferError, match=f"could not connect to {target.pool.agent}"):
        source.connect(target.pool)
    assert time.monotonic() - began < CONNECT_S + WAIT_S


def test_a_peer_that_is_gone_is_refused_at_once(source: Agent, target: Agent) -> None:
    target.transport.close()
    began = time.monotonic()
    with pytest.raises(TransferError, match="refused"):
        source.connect(target.pool)
    assert time.monotonic() - began < WAIT_S


@pytest.mark.parametrize("change", [{"port": 0}, {"port": 65536}, {"host": 1}, {"host": "no such host"}, {"host": "." * 99}])
def test_an_invalid_descriptor_is_refused(source: Agent, target: Agent, change: dict[str, object]) -> None:
    with pytest.raises(TransferError, match=f"could not connect to {target.pool.agent}"):
        source.connect(msgspec.structs.replace(target.pool, wire=target.wire_with(**change)))


def test_a_pool_of_another_kind_of_device_is_refused(source: Agent, target: Agent) -> None:
    with pytest.raises(TransferError, match="its pool is on cuda:0 and ours on cpu"):
        source.connect(msgspec.structs.replace(target.pool, device="cuda:0"))


def test_a_pool_on_our_own_card_is_refused_at_once_whatever_number_it_has_there(source: Agent, target: Agent) -> None:
    """NCCL would wait in vain. The fix is named."""
    source.transport._card = "GPU-1"
    elsewhere = msgspec.structs.replace(target.pool, wire=target.wire_with(card="GPU-1"))
    with pytest.raises(TransferError, match=r"on the same GPU, GPU-1, .* use --transport nixl, or .* --device cuda:N"):
        source.connect(elsewhere)
    assert threads_of_links() == []


def test_a_device_for_which_this_torch_has_no_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.torch_transport.is_nccl_available", lambda: False)
    with pytest.raises(TransferError, match="no NCCL"):
        Agent(device="cuda:0")


def test_an_address_that_is_not_this_hosts_is_refused() -> None:
    with pytest.raises(TransferError, match=r"could not start on 192\.0\.2\.99"):
        Agent(host="192.0.2.99")
