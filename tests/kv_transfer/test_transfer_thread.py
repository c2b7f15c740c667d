"""The transfer thread: it starts or says why not, wakes whoever waits for news, and ends what it began."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from common.errors import TransferError
from common.ids import Incarnation, InstanceId, Int64Array, Ticket
from common.messages.transfers import Allow, Connect, LinkChanged, Push, PushDone, PushFailed, Settle, Settled, TransferEvent
from kv_transfer.transfer_loop import LeaseOverrun, TransferLoop, TransferThread
from tests.builders import LAYOUT, instance, key
from tests.kv_transfer.local_agent import WAIT_S, region_of
from tests.kv_transfer.memory import MemoryNetwork, MemoryTransport

PEER = InstanceId("d")


class BrokenTransport(MemoryTransport):
    """Fails at the first push, with an error that no backend should raise."""

    def push(self, ticket: Ticket, agent: str, runs: Int64Array) -> None:
        raise ZeroDivisionError("a bug")


@dataclass(slots=True, eq=False)
class Home:
    """A transfer thread over one's own pool: it pushes into itself."""

    network: MemoryNetwork
    thread: TransferThread
    awake: threading.Event
    memory: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]"
    seen: list[TransferEvent] = field(default_factory=list)

    def connect(self, lease_s: float = 1000.0) -> None:
        descriptor = self.thread.start(WAIT_S)
        self.thread.submit(Connect((msgspec.structs.replace(instance(PEER, "decode"), pools=(descriptor,)),)))
        self.thread.submit(Allow(PEER, Incarnation("1"), time.monotonic() + lease_s))
        assert isinstance(self.next_event(), LinkChanged)

    def push(self, ticket: int) -> None:
        zero, one = np.array([0], dtype=np.int32), np.array([1], dtype=np.int32)
        self.thread.submit(Push(Ticket(ticket), PEER, Incarnation("1"), zero, one, key()))

    def next_event(self) -> TransferEvent:
        """Wait to be woken until there is an event."""
        until = time.monotonic() + WAIT_S
        while True:
            self.seen += self.thread.poll()
            if self.seen:
                return self.seen.pop(0)
            assert self.awake.wait(until - time.monotonic()), "nobody was woken"
            self.awake.clear()


def home(make_transport: Callable[[MemoryNetwork], MemoryTransport] = MemoryTransport) -> Home:
    network, awake = MemoryNetwork(), threading.Event()
    transport = make_transport(network)
    memory = np.arange(2 * LAYOUT.page_bytes, dtype=np.int64).astype(np.uint8).reshape(2, -1)
    memory[1] = 255

    def make_loop() -> TransferLoop:
        return TransferLoop(transport, "memory", region_of(memory), LAYOUT, 2, time.monotonic)

    return Home(network, TransferThread(make_loop, awake.set), awake, memory)


@pytest.fixture
def one() -> Iterator[Home]:
    """Connected; its thread ends after the test."""
    made = home()
    made.connect()
    yield made
    made.thread.close()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def test_a_push_is_made_and_whoever_waits_is_woken(one: Home) -> None:
    one.push(1)
    done = one.next_event()
    assert isinstance(done, PushDone) and done.pushed_bytes == LAYOUT.page_bytes
    assert (one.memory[1] == one.memory[0]).all()


def test_a_transport_that_cannot_start_is_an_error_with_its_reason() -> None:
    woken = threading.Event()

    def make_loop() -> TransferLoop:
        raise TransferError("NIXL cannot be loaded: no such library")

    thread = TransferThread(make_loop, woken.set)
    with pytest.raises(TransferError, match="NIXL cannot be loaded: no such library"):
        thread.start(WAIT_S)
    assert woken.wait(WAIT_S)
    thread.close()


def test_a_transport_that_hangs_at_the_start_is_an_error_with_the_time() -> None:
    go_on = threading.Event()

    def make_loop() -> TransferLoop:
        assert go_on.wait(WAIT_S)
        raise TransferError("too late")

    thread = TransferThread(make_loop, lambda: None)
    with pytest.raises(TransferError, match=r"did not start within 0\.05 s"):
        thread.start(0.05)
    go_on.set()
    thread.close()


def test_a_thread_that_was_not_started_says_so() -> None:
    with pytest.raises(TransferError, match="not running"):
        home().thread.poll()


def test_a_bug_on_the_thread_wakes_and_is_raised_by_the_next_call() -> None:
    one = home(BrokenTransport)
    one.connect()
    one.push(1)
    with pytest.raises(TransferError, match="the transfer thread failed: a bug") as raised:
        one.next_event()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    one.thread.close()


def test_a_write_that_outlives_its_lease_ends_the_thread_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.transfer_loop.OVERRUN_S", 0.0)
    one = home()
    one.network.hold = True
    one.connect(lease_s=0.5)
    one.push(1)
    with pytest.raises(TransferError, match="its lease had ended: was this process stopped") as raised:
        one.next_event()
    assert isinstance(raised.value.__cause__, LeaseOverrun)
    assert (one.memory[1] == 255).all(), "nothing was written"
    one.thread.close()


def test_the_thread_reports_the_time_of_the_last_progress(one: Home) -> None:
    one.network.hold = True
    began_s = time.monotonic()
    one.push(1)
    one.thread.submit(Settle(key()))
    assert one.next_event() == Settled(key())
    assert began_s <= one.thread.progress_s <= time.monotonic()
    since_s = one.thread.progress_s
    one.thread.submit(Settle(key()))
    assert one.next_event() == Settled(key())
    assert one.thread.progress_s == since_s, "the push stands still"
    one.network.hold = False
    assert isinstance(one.next_event(), PushDone)


def test_closing_waits_for_what_is_in_flight(one: Home) -> None:
    one.network.hold = True
    one.push(1)
    closing = threading.Thread(target=one.thread.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive(), "it does not leave a push behind"
    one.network.hold = False
    one.push(2)  # whose turn releases both
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert [type(event) for event in one.thread.poll()] == [PushDone, PushDone]
    assert one.network.regions == {}, "the transport is closed"


def test_closing_gives_up_on_what_does_not_end(one: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.transfer_loop.DRAIN_S", 0.05)
    one.network.hold = True
    one.push(1)
    one.thread.close()
    assert one.thread.poll() == [PushFailed(Ticket(1), "the transfers were closed", quiescent=False)]


def test_closing_again_changes_nothing() -> None:
    one = home()
    one.thread.start(WAIT_S)
    one.thread.close()
    one.thread.close()
    assert one.network.regions == {}
