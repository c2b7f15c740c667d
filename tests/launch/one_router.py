"""A router and a detokenizer for one real instance, which it starts: the test's side of the wire and of the pipes.

Owns the instance's process. Knows no test.
"""

import queue
import time
from collections.abc import Callable

from common import messages
from common.ids import DETOKENIZER, ROUTER, AttemptId, Incarnation, InstanceId, RequestId, pack_ids
from common.mail import Mailbox
from common.processes.child import Exited
from common.sampling_params import SamplingParams
from launch.child import RoleEvent, RoleProcess
from tests.rig.forks import forked
from tests.rig.shared_memory import left_behind, shared_files

HANG_S = 60.0
"""Ends a test that hangs. A drain may take ten times as long here, so an instance that ends within this did not wait for one."""


class Router:
    """The test's side of the wire, and of the instance's pipes."""

    def __init__(self, name: str, command: Callable[[str], list[str]]) -> None:
        """name: of the instance. command: the router's address → how it is started."""
        self._name = InstanceId(name)
        self.mailbox: Mailbox[messages.RouterInbox] = Mailbox(ROUTER, messages.RouterInbox, "tcp://127.0.0.1:0")
        self.detokenizer: Mailbox[messages.DetokenizerInbox] = Mailbox(
            DETOKENIZER, messages.DetokenizerInbox, "tcp://127.0.0.1:0"
        )
        self.events: queue.SimpleQueue[RoleEvent] = queue.SimpleQueue()
        self.shared_before = shared_files()
        with forked():
            self.child = RoleProcess(name, command(self.mailbox.address), self.events.put)
        self.heartbeats: list[messages.Heartbeat] = []
        self.goodbyes: list[messages.Goodbye] = []
        self.deltas: list[messages.TokenDelta] = []
        self.info: messages.InstanceInfo | None = None
        self.incarnation: Incarnation | None = None

    def turn(self) -> None:
        """Welcome whoever registers, answer heartbeats, and remember what was said."""
        self.mailbox.wait(0.05)
        for _, message in self.mailbox.receive():
            match message:
                case messages.Register():
                    self.info, self.incarnation = message.instance, message.instance.incarnation
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
        key = AttemptId(RequestId("r"), 0, ROUTER)
        self.mailbox.send(self._name, messages.Generate(key=key, prompt=pack_ids([5, 6, 7]), sampling=sampling))

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

    def close(self) -> None:
        self.child.kill()
        assert self.child.wait(HANG_S)
        self.mailbox.close()
        self.detokenizer.close()

    def _welcome(self, address: str = "") -> None:
        """address: of the registration that this answers."""
        welcome = messages.Welcome(router=ROUTER, address=address, detokenizers=(self.detokenizer.address,), heartbeat_s=0.1)
        self.mailbox.send(self._name, welcome)
