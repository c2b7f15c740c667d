"""How a real instance ends: drained, told twice, or because one of its threads failed. The test is its router and detokenizer.

Whatever happens, the router is told, the process is gone soon, and nothing is left of it.
"""

import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from common import messages
from common.ids import DETOKENIZER, ROUTER, Incarnation, InstanceId, Key, RequestId, pack_ids
from common.processes.child import Exited
from common.sampling_params import SamplingParams
from common.wire import Mailbox
from launch.instance_process import CLOSE_S
from launch.processes import Child, ChildEvent
from launch.reports import Broken
from tests.launch.failing_instance import NAME
from tests.shared_memory import left_behind, shared_files

HANG_S = 60.0
"""Ends a test that hangs. A drain may take ten times as long here, so an instance that ends within this did not wait for one."""


class Router:
    """The test's side of the wire, and of the instance's pipes."""

    def __init__(self, which: str) -> None:
        self.mailbox: Mailbox[messages.RouterInbox] = Mailbox(ROUTER, messages.RouterInbox, "tcp://127.0.0.1:0")
        self.detokenizer: Mailbox[messages.DetokenizerInbox] = Mailbox(
            DETOKENIZER, messages.DetokenizerInbox, "tcp://127.0.0.1:0"
        )
        self.events: queue.SimpleQueue[ChildEvent] = queue.SimpleQueue()
        self.shared_before = shared_files()
        command = [sys.executable, "-m", "tests.launch.failing_instance", which, self.mailbox.address]
        self.child = Child(NAME, command, self.events.put)
        self.heartbeats: list[messages.Heartbeat] = []
        self.goodbyes: list[messages.Goodbye] = []
        self.deltas: list[messages.TokenDelta] = []
        self.incarnation: Incarnation | None = None

    def turn(self) -> None:
        """Welcome whoever registers, answer heartbeats, and remember what was said."""
        self.mailbox.wait(0.05)
        for _, message in self.mailbox.receive():
            match message:
                case messages.Register():
                    self.incarnation = message.instance.incarnation
                    self.mailbox.route(message.instance.id, message.instance.inbox)
                    self._welcome(message.address)
                    self.mailbox.send(message.instance.id, messages.Peers(version=1))
                case messages.Heartbeat():
                    self.heartbeats.append(message)
                    self._welcome()
                case messages.Goodbye():
                    self.goodbyes.append(message)
                case _:
                    raise AssertionError(message)
        for _, tokens in self.detokenizer.receive():
            assert isinstance(tokens, messages.TokenBatch)
            self.deltas += tokens.deltas

    def until(self, holds: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}; {self.child.account()}"
            self.turn()

    def until_joined(self) -> None:
        self.until(lambda: bool(self.heartbeats), "it has joined", HANG_S)

    def generate(self, max_new_tokens: int) -> None:
        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
        key = Key(RequestId("r"), 0, ROUTER)
        self.mailbox.send(InstanceId(NAME), messages.Generate(key=key, prompt=pack_ids([5, 6, 7]), sampling=sampling))

    def until_running(self) -> None:
        self.until(lambda: len(self.deltas) > 3, "the request brings tokens", HANG_S)

    def end(self, timeout_s: float) -> Exited:
        """Its last event; by then the router has heard that it left, and nothing is left of it."""
        began = time.monotonic()
        self.until(lambda: self.child.status is not None, "it has ended", timeout_s)
        self.until(lambda: bool(self.goodbyes), "the router was told", max(1.0, began + timeout_s - time.monotonic()))
        assert [goodbye.incarnation for goodbye in self.goodbyes] == [self.incarnation]
        assert self.child.wait(HANG_S)
        assert not left_behind(self.shared_before)
        last = [self.events.get_nowait() for _ in range(self.events.qsize())][-1]
        assert isinstance(last, Exited)
        return last

    def _welcome(self, address: str = "") -> None:
        """address: of the registration that this answers."""
        welcome = messages.Welcome(router=ROUTER, address=address, detokenizers=(self.detokenizer.address,), heartbeat_s=0.1)
        self.mailbox.send(InstanceId(NAME), welcome)


@pytest.fixture
def join() -> Iterator[Callable[[str], Router]]:
    made: list[Router] = []

    def start(which: str) -> Router:
        made.append(Router(which))
        made[-1].until_joined()
        return made[-1]

    yield start
    for router in made:
        router.child.kill()
        assert router.child.wait(HANG_S)
        router.mailbox.close()
        router.detokenizer.close()


@pytest.mark.parametrize(("which", "what"), [("engine", "the device"), ("transfer", "the network card")])
def test_a_thread_that_fails_takes_its_instance_down_in_order(join: Callable[[str], Router], which: str, what: str) -> None:
    router = join(which)
    router.generate(20)
    ended = router.end(HANG_S)
    assert ended.status == 1
    assert f"{what} fell off the bus" in ended.account
    assert isinstance(router.child.last_report, Broken), "it could say why"


def test_what_cannot_be_closed_does_not_keep_the_process_alive_and_the_router_is_told_before(
    join: Callable[[str], Router],
) -> None:
    router = join("stuck")
    router.generate(20)
    router.until(lambda: bool(router.goodbyes), "the router is told", HANG_S)
    assert router.child.status is None
    ended = router.end(CLOSE_S + HANG_S)
    assert ended.status == 1
    assert "closing took longer" in ended.account and "the network card fell off the bus" in ended.account


def test_an_idle_instance_that_is_told_to_stop_is_drained_at_once(join: Callable[[str], Router]) -> None:
    router = join("nothing")
    router.child.terminate()
    assert router.end(HANG_S).status == 0


def test_an_instance_that_is_told_to_stop_finishes_what_runs_and_a_second_signal_ends_it_at_once(
    join: Callable[[str], Router],
) -> None:
    router = join("nothing")
    router.generate(1_800)
    router.until_running()
    router.child.terminate()
    router.until(lambda: router.heartbeats[-1].draining, "it says that it is draining", HANG_S)
    assert router.child.status is None and not router.goodbyes
    router.child.terminate()
    ended = router.end(HANG_S)
    assert ended.status == 1 and ended.account == "told again to stop, by SIGTERM"


def test_an_instance_that_is_told_to_stop_ends_in_order_when_what_ran_is_finished(join: Callable[[str], Router]) -> None:
    router = join("nothing")
    router.generate(300)
    router.until_running()
    os.kill(router.child.pid, signal.SIGINT)
    ended = router.end(HANG_S)
    assert ended.status == 0 and router.heartbeats[-1].draining
    router.until(lambda: router.deltas[-1].ending is not None, "the last token has arrived", HANG_S)
    assert router.deltas[-1].ending == messages.Finished(reason="length")
    assert sum(len(delta.token_ids) for delta in router.deltas) == 300


def test_an_instance_that_was_killed_leaves_nothing_behind_either(join: Callable[[str], Router]) -> None:
    router = join("nothing")
    router.generate(1_800)
    router.until_running()
    router.child.kill()
    assert router.child.wait(HANG_S) and router.child.status == -signal.SIGKILL
    assert not left_behind(router.shared_before)
