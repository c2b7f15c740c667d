"""The gateway: routes are learnt before anything is sent along them, and deadlines pass without traffic."""

import asyncio

import msgspec
import pytest

from common.config import RouterConfig
from common.ids import DETOKENIZER, Incarnation, InstanceId, RequestId, pack_ids
from common.messages import AnyMessage, Goodbye, Register, RouterInbox
from common.sampling_params import SamplingParams
from router.core import RouterCore
from router.gateway import Gateway
from router.outbox import Outbox
from router.requests import RequestSpec
from tests.builders import instance
from tests.router.calls import until
from tests.router.fakes import Unobserved, beat

pytestmark = pytest.mark.anyio
D0 = instance("d0", "decode")


class RecordingMail:
    """Implements `Mail[RouterInbox]`; keeps the order of what was asked of it."""

    def __init__(self) -> None:
        self.arriving: list[tuple[InstanceId, RouterInbox]] = []
        self.asked: list[str] = []
        self.frames_refused: dict[str, int] = {}
        self.messages_lost: dict[str, int] = {}

    def send(self, to: InstanceId, message: AnyMessage) -> None:
        self.asked.append(f"send {type(message).__name__} to {to}")

    def receive(self) -> list[tuple[InstanceId, RouterInbox]]:
        arrived, self.arriving = self.arriving, []
        return arrived

    def route(self, to: InstanceId, address: str | None) -> None:
        self.asked.append(f"route {to} to {address}")


class Clock:
    """Turned by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def new_gateway(mail: RecordingMail, clock: Clock, config: RouterConfig | None = None) -> Gateway:
    core = RouterCore(Incarnation("r"), "tcp://detokenizer:1", config or RouterConfig(), Unobserved())
    return Gateway(core, mail, clock)


async def test_a_route_is_learnt_before_the_first_message_along_it_and_only_once() -> None:
    mail = RecordingMail()
    gateway = new_gateway(mail, Clock())
    mail.arriving = [(D0.id, Register(instance=D0)), (D0.id, Register(instance=D0))]
    gateway.pump()
    greeting = ["send Welcome to d0", "send Peers to d0"]
    assert mail.asked == [f"route d0 to {D0.inbox}", *greeting, *greeting]
    gateway.close()


async def test_a_new_incarnation_is_reached_at_its_new_address() -> None:
    mail = RecordingMail()
    gateway = new_gateway(mail, Clock())
    successor = instance("d0", "decode", incarnation="2")
    mail.arriving = [(D0.id, Register(instance=D0)), (D0.id, Register(instance=successor))]
    gateway.pump()
    assert [ask for ask in mail.asked if ask.startswith("route")] == [f"route d0 to {D0.inbox}", f"route d0 to {successor.inbox}"]
    gateway.close()


async def test_an_instance_under_the_detokenizers_name_is_refused_and_gets_no_route_of_that_name() -> None:
    mail = RecordingMail()
    gateway = new_gateway(mail, Clock())
    mail.arriving = [(DETOKENIZER, Register(instance=msgspec.structs.replace(D0, id=DETOKENIZER)))]
    gateway.pump()
    assert mail.asked == [f"route detokenizer#1 to {D0.inbox}", "send Refused to detokenizer#1"]
    gateway.close()


async def test_whatever_the_core_says_the_detokenizers_route_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mail = RecordingMail()
    gateway = new_gateway(mail, Clock())
    fleet = gateway.core.fleet
    monkeypatch.setattr(fleet, "addresses", lambda: {DETOKENIZER: "tcp://elsewhere:1"} if any(fleet.members()) else {})
    mail.arriving = [(D0.id, Register(instance=D0)), (D0.id, Goodbye(id=D0.id, incarnation=D0.incarnation))]
    gateway.pump()
    assert not [ask for ask in mail.asked if ask.startswith("route detokenizer")]
    gateway.close()


async def test_a_new_detokenizer_gets_its_route_before_any_message_and_nothing_after_the_gateway_closed() -> None:
    mail = RecordingMail()
    gateway = new_gateway(mail, Clock())
    mail.arriving = [(D0.id, Register(instance=D0))]
    gateway.pump()
    spec = RequestSpec(RequestId("r"), 0, pack_ids([1, 2]), SamplingParams(max_new_tokens=4))
    gateway.deliver(gateway.core.requests.submit([spec], Outbox(lambda: None), 0.0, 0.0))
    mail.asked.clear()
    gateway.detokenizer_moved("tcp://detokenizer:2")
    assert mail.asked == [
        "route detokenizer to tcp://detokenizer:2",
        "send Welcome to d0",
        "send Cancel to d0",
        "send ForgetAnswer to detokenizer",
        "send ExpectAnswer to detokenizer",
        "send Generate to d0",
    ]
    gateway.close()
    mail.asked.clear()
    gateway.detokenizer_moved("tcp://detokenizer:3")
    assert mail.asked == []


async def test_a_router_that_was_held_up_reads_its_mail_before_it_calls_anybody_silent() -> None:
    mail, clock = RecordingMail(), Clock()
    gateway = new_gateway(mail, clock, RouterConfig(heartbeat_s=0.001, dead_after_s=0.003))
    mail.arriving = [(D0.id, Register(instance=D0))]
    gateway.pump()
    mail.arriving = [(D0.id, beat(D0))]
    clock.now = 5.0
    await until(lambda: not mail.arriving)
    assert [member.info.id for member in gateway.core.fleet.members()] == ["d0"]
    gateway.close()


async def test_a_deadline_passes_without_traffic() -> None:
    mail, clock = RecordingMail(), Clock()
    gateway = new_gateway(mail, clock, RouterConfig(heartbeat_s=0.01, dead_after_s=0.03))
    mail.arriving = [(D0.id, Register(instance=D0))]
    gateway.pump()
    clock.now = 0.03
    await until(lambda: not list(gateway.core.fleet.members()))
    gateway.close()


async def test_a_timer_that_fires_before_the_clock_says_so_is_set_again() -> None:
    mail, clock = RecordingMail(), Clock()
    gateway = new_gateway(mail, clock, RouterConfig(heartbeat_s=0.001, dead_after_s=0.003))
    mail.arriving = [(D0.id, Register(instance=D0))]
    gateway.pump()
    await asyncio.sleep(0.02)
    assert len(list(gateway.core.fleet.members())) == 1
    clock.now = 0.003
    await until(lambda: not list(gateway.core.fleet.members()))
    gateway.close()


async def test_a_closed_gateway_leaves_no_timer() -> None:
    mail = RecordingMail()
    gateway = new_gateway(mail, Clock())
    mail.arriving = [(D0.id, Register(instance=D0)), (D0.id, Goodbye(id=D0.id, incarnation=D0.incarnation))]
    gateway.pump()
    gateway.close()
    gateway.close()
    assert gateway.core.next_deadline() is None
