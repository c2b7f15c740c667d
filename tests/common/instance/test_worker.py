"""The worker's loop over ports: what happened is taken in, and the executor is kept two steps ahead."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest

from common.engine.executor import EngineDescription
from common.engine.plan import Plan, StepResult
from common.errors import PeerRefused
from common.ids import ROUTER, Incarnation, InstanceId, pack_ids
from common.instance.membership import HEARTBEATS_PER_REGISTER, Membership
from common.instance.ports import LinkChanged, Push, TransferEvent
from common.instance.worker import ROUTE_MEMORY_S, InstanceWorker
from common.messages import (
    AnyMessage,
    Generate,
    Heartbeat,
    InstanceInfo,
    LinkInfo,
    Peers,
    Refused,
    Reserve,
    TokenBatch,
    Welcome,
)
from prefill.scheduler import PrefillMessage, PrefillScheduler
from tests.builders import engine, instance, key, sampling

Inbox = PrefillMessage | Welcome | Refused
WELCOME = Welcome(router=Incarnation("r"), detokenizer="tcp://127.0.0.1:9", heartbeat_s=1.0)


class FakeMail:
    def __init__(self) -> None:
        self.arrived: list[tuple[InstanceId, Inbox]] = []
        self.sent: list[tuple[InstanceId, AnyMessage]] = []
        self.routes: dict[InstanceId, str | None] = {}
        self.frames_refused: dict[str, int] = {"body": 2, "magic": 1}
        self.messages_lost: dict[str, int] = {"full": 4}

    def send(self, to: InstanceId, message: AnyMessage) -> None:
        self.sent.append((to, message))

    def receive(self) -> list[tuple[InstanceId, Inbox]]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def route(self, to: InstanceId, address: str | None) -> None:
        self.routes[to] = address

    def names(self) -> list[str]:
        names = [type(message).__name__ for _, message in self.sent]
        self.sent.clear()
        return names


class FakeStep:
    ends_s: float | None = None

    def __init__(self) -> None:
        self.result: StepResult | None = None

    def poll(self) -> StepResult | None:
        return self.result


class FakeExecutor:
    def __init__(self) -> None:
        self.steps: deque[tuple[Plan, FakeStep]] = deque()

    @property
    def description(self) -> EngineDescription:
        return engine()

    def launch(self, plan: Plan) -> FakeStep:
        self.steps.append((plan, FakeStep()))
        return self.steps[-1][1]

    def finish_one(self) -> None:
        plan, step = self.steps.popleft()
        step.result = StepResult(plan, np.full(len(plan.sampled_rows), 42, dtype=np.int32), 0.0)

    def close(self) -> None:
        self.steps.clear()


class FakeTransfers:
    def __init__(self) -> None:
        self.events: list[TransferEvent] = []
        self.peers: list[InstanceId] = []
        self.pushes: list[Push] = []
        self.expected = 0

    def connect(self, peers: Sequence[InstanceInfo]) -> None:
        self.peers = [peer.id for peer in peers]

    def push(self, push: Push) -> None:
        self.pushes.append(push)

    def expect(self, open_reservations: int) -> None:
        self.expected = open_reservations

    def poll(self) -> list[TransferEvent]:
        events, self.events = self.events, []
        return events

    def close(self) -> None: ...


class Rig:
    def __init__(self) -> None:
        self.mail, self.executor, self.transfers = FakeMail(), FakeExecutor(), FakeTransfers()
        self.membership = Membership(instance("p", "prefill"), startup_timeout_s=5.0, now=0.0)
        scheduler = PrefillScheduler(InstanceId("p"), engine(), 4, 16, 60.0)
        self.worker: InstanceWorker[PrefillMessage] = InstanceWorker(
            self.membership, scheduler, self.executor, self.transfers, self.mail, pushes=True
        )

    def turn(self, now: float, *messages: Inbox) -> list[str]:
        self.mail.arrived += [(ROUTER, message) for message in messages]
        self.worker.turn(now)
        return self.mail.names()


def test_an_instance_registers_until_it_is_welcome_and_then_reports() -> None:
    rig = Rig()
    assert rig.turn(0.0) == ["Register"]
    assert rig.turn(0.1) == []
    assert rig.turn(0.25) == ["Register"]
    assert rig.turn(0.5, WELCOME) == ["Heartbeat"]
    joined = rig.worker.joined
    assert joined and rig.mail.routes == {"detokenizer": "tcp://127.0.0.1:9"}
    assert rig.turn(1.0) == []
    sent = [rig.turn(1.5 + beat) for beat in range(HEARTBEATS_PER_REGISTER)]
    assert sent.count(["Heartbeat", "Register"]) == 1, "a restarted router learns of its instances"


def test_a_refused_instance_says_why() -> None:
    rig = Rig()
    with pytest.raises(PeerRefused, match="page size differs"):
        rig.turn(0.0, Refused(reason="page size differs"))


def test_an_unanswered_registration_ends_at_the_deadline() -> None:
    rig = Rig()
    rig.turn(0.0)
    with pytest.raises(PeerRefused, match="--router"):
        rig.turn(5.0)


def test_two_steps_are_in_flight_before_the_first_is_read() -> None:
    rig = Rig()
    rig.turn(0.0, WELCOME, Peers(instances=(instance("d", "decode"),)))
    prompt = pack_ids([100 + i for i in range(12)])
    sent = rig.turn(0.1, Generate(key=key(), prompt=prompt, sampling=sampling(), decode=InstanceId("d")))
    assert Reserve.__name__ in sent and len(rig.executor.steps) == 2
    rig.executor.finish_one()
    rig.turn(0.2)
    assert len(rig.executor.steps) == 2
    rig.executor.finish_one()
    rig.executor.finish_one()
    assert TokenBatch.__name__ in rig.turn(0.3)
    assert rig.worker.idle


def test_links_are_reported_as_they_change() -> None:
    rig = Rig()
    rig.turn(0.0, WELCOME, Peers(instances=(instance("d", "decode"),)))
    assert rig.transfers.peers == ["d"]
    ready = LinkInfo(peer=InstanceId("d"), incarnation=Incarnation("1"), state="ready", detail="cma")
    rig.transfers.events.append(LinkChanged(ready))
    rig.worker.turn(0.1)
    beats = [message for _, message in rig.mail.sent if isinstance(message, Heartbeat)]
    assert beats and beats[-1].links == (ready,)
    assert (beats[-1].counters.frames_refused, beats[-1].counters.messages_lost) == (3, 4)
    rig.mail.sent.clear()
    assert rig.turn(0.2, Peers(instances=())) == ["Heartbeat"]
    assert rig.transfers.peers == []


def test_a_peer_that_left_can_be_written_to_for_a_while() -> None:
    """It may only have been silent, and wait for the word that brings its pages home."""
    rig = Rig()
    there, gone = Peers(instances=(instance("d", "decode"),)), Peers(instances=())
    rig.turn(0.0, WELCOME, there)
    rig.turn(1.0, gone)
    rig.turn(2.0, there)
    rig.turn(100.0, gone)
    assert rig.mail.routes[InstanceId("d")] is not None
    rig.worker.turn(100.0 + ROUTE_MEMORY_S)
    assert rig.mail.routes[InstanceId("d")] is None
