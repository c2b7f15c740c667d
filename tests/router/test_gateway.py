"""The gateway: routes are learnt before anything is sent along them, and deadlines pass without traffic.

A router whose turns take seconds, or that was stopped, takes who lives for a member and notices who is dead.
"""

import asyncio
from collections.abc import Callable
from typing import Self, TypeAlias

import pytest

from common.config import RouterConfig
from common.ids import DETOKENIZER, ROUTER
from common.instance.ports import Send
from common.messages import DetokenizerHeartbeat, Goodbye, Register, RouterInbox
from router import core as router_core
from router.core import TURN_MESSAGES, TURN_S, Gateway, RouterCore
from router.requests import ClientRequest
from tests.builders import HandClock, instance
from tests.common.mailboxes import FakeMail
from tests.router.bench import D0, P0, spec
from tests.router.calls import until
from tests.router.fakes import Unobserved, beat

pytestmark = pytest.mark.anyio


class Rig:
    """A gateway over mail that is recorded, with a clock turned by hand."""

    def __init__(self, **config: float) -> None:
        self.clock = HandClock()
        self.mail: FakeMail[RouterInbox] = FakeMail()
        core = RouterCore(ROUTER, ["tcp://detokenizer:1"], RouterConfig(**config), Unobserved())  # type: ignore[arg-type]
        self.gateway = Gateway(core, self.mail, self.clock)

    def hear(self, *messages: RouterInbox) -> list[str]:
        """What the mail is asked to do when these messages arrive."""
        self.mail.asked.clear()
        self.mail.arriving = [(D0.id, message) for message in messages]
        self.gateway.pump()
        return self.mail.asked

    def members(self) -> list[str]:
        return [member.info.id for member in self.gateway.core.fleet.members()]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.gateway.close()


SlowCore: TypeAlias = Callable[[Rig, float], None]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowCore:
    """Makes the core take so long for each message, on the rig's clock."""

    def make_slow(rig: Rig, cost_s: float) -> None:
        core = rig.gateway.core
        receive = core.receive

        def slowly(message: RouterInbox, now: float) -> list[Send]:
            rig.clock.now_s += cost_s
            return receive(message, now)

        monkeypatch.setattr(core, "receive", slowly)

    return make_slow


JOIN, LEAVE = Register(instance=D0), Goodbye(id=D0.id, incarnation=D0.incarnation)
IMPATIENT = {"heartbeat_s": 0.001, "dead_after_s": 0.003}


async def test_a_route_is_learnt_before_the_first_message_along_it_and_only_once() -> None:
    async with Rig() as rig:
        said = [f"route d0 to {D0.inbox}", "send Welcome to d0", "send Welcome to d0", "send Peers to d0"]
        assert rig.hear(JOIN, JOIN) == said


async def test_whatever_the_core_says_the_detokenizers_route_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig() as rig:
        fleet = rig.gateway.core.fleet
        monkeypatch.setattr(
            fleet, "take_moves", lambda: [(DETOKENIZER, "tcp://elsewhere:1"), (D0.id, D0.inbox), (DETOKENIZER, None)]
        )
        routes = {ask for ask in rig.hear(JOIN, LEAVE) if ask.startswith("route")}
    assert routes == {f"route d0 to {D0.inbox}"}


async def test_a_new_detokenizer_gets_its_route_before_any_message_and_nothing_after_the_gateway_closed() -> None:
    async with Rig() as rig:
        rig.hear(JOIN)
        rig.gateway.deliver(rig.gateway.core.requests.submit(ClientRequest(), [spec()], rig.clock()))
        rig.mail.asked.clear()
        rig.gateway.detokenizer_moved(0, "tcp://detokenizer:2")
        assert rig.mail.asked == [f"route {DETOKENIZER} to tcp://detokenizer:2", "send Welcome to d0"]
        rig.gateway.deliver(rig.gateway.core.tick(0.0))
        assert rig.mail.asked[2:] == [f"send ExpectAnswer to {DETOKENIZER}", "send Repeat to d0"]
    rig.mail.asked.clear()
    rig.gateway.detokenizer_moved(0, "tcp://detokenizer:3")
    assert rig.mail.asked == []


async def test_an_instance_whose_connection_broke_is_lost_soon_unless_it_is_heard() -> None:
    async with Rig(heartbeat_s=0.5, dead_after_s=60.0) as rig:
        rig.hear(JOIN)
        rig.gateway.connection_broken(D0.id)
        rig.gateway.deliver(rig.gateway.core.tick(rig.clock() + 1.05))
        assert rig.members() == []


async def test_a_router_that_was_held_up_reads_its_mail_before_it_calls_anybody_silent() -> None:
    async with Rig(**IMPATIENT) as rig:
        rig.hear(JOIN)
        rig.mail.arriving = [(D0.id, beat(D0))]
        rig.clock.now_s = 5.0
        await until(lambda: not rig.mail.arriving)
        assert rig.members() == ["d0"]


async def test_who_wrote_in_time_is_not_silent_although_reading_it_all_takes_longer_than_silence_may(slow: SlowCore) -> None:
    members = [instance(f"d{number}", "decode") for number in range(20)]
    async with Rig(**IMPATIENT) as rig:
        rig.hear(*(Register(instance=member) for member in members))
        slow(rig, 0.0001)
        rig.clock.now_s = 0.0029
        rig.mail.arriving = [(member.id, beat(member)) for _ in range(20) for member in members]
        await until(lambda: not rig.mail.arriving)
        await asyncio.sleep(0.005)
        assert rig.clock.now_s > 10 * IMPATIENT["dead_after_s"]
        assert len(rig.members()) == 20


@pytest.mark.parametrize(("cost_s", "taken"), [(TURN_S / 10, 10), (0.0, TURN_MESSAGES)], ids=["in time", "in messages"])
async def test_one_turn_takes_in_a_bounded_amount_of_mail(slow: SlowCore, cost_s: float, taken: int) -> None:
    async with Rig() as rig:
        rig.hear(JOIN)
        slow(rig, cost_s)
        rig.hear(*[beat(D0)] * 3_000)
        assert abs(3_000 - len(rig.mail.arriving) - taken) <= 1


async def test_a_timer_that_is_due_while_mail_waits_takes_no_second_turn_of_it(slow: SlowCore) -> None:
    async with Rig(**IMPATIENT) as rig:
        rig.hear(JOIN)
        slow(rig, TURN_S / 10)
        rig.hear(*[beat(D0)] * 100)
        left = len(rig.mail.arriving)
        async with asyncio.timeout(60):
            while len(rig.mail.arriving) == left:
                await asyncio.sleep(0)
        assert left - len(rig.mail.arriving) == 1


async def test_a_dead_instance_is_lost_in_the_end_although_mail_always_waits(
    slow: SlowCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig(**IMPATIENT) as rig:
        rig.hear(JOIN, Register(instance=instance("d1", "decode")))
        monkeypatch.setattr(router_core, "BACKLOG_S", backlog_s := 5.0)
        slow(rig, 0.0025)  # less than dead_after_s, so whoever is read all the time is heard in time
        monkeypatch.setattr(rig.mail, "receive", lambda most: [(D0.id, beat(D0))] * most)
        while rig.clock.now_s < backlog_s / 2:
            await asyncio.sleep(0)
        before = rig.members()
        while rig.clock.now_s < backlog_s + 1.0:
            await asyncio.sleep(0)
        assert (before, rig.members()) == (["d0", "d1"], ["d0"])


async def test_a_timer_that_fires_before_the_clock_says_so_is_set_again() -> None:
    async with Rig(**IMPATIENT) as rig:
        rig.hear(JOIN)
        await asyncio.sleep(0.02)
        assert len(rig.members()) == 1
        rig.clock.now_s = 0.003
        await until(lambda: not rig.members())


async def test_a_closed_gateway_leaves_no_timer() -> None:
    async with Rig(**IMPATIENT) as rig:
        rig.hear(JOIN)
        rig.gateway.close()
        rig.clock.now_s = 0.003
        await asyncio.sleep(0.02)
        assert len(rig.members()) == 1, "whose deadline has passed"


CONFIG = RouterConfig(heartbeat_s=0.5, dead_after_s=3.0)
STOPPED_S = 10.0


def new_core() -> RouterCore:
    core = RouterCore(ROUTER, ["tcp://detokenizer:1"], CONFIG, Unobserved())
    for info in (P0, D0):
        core.receive(Register(instance=info), 0.0)
    core.receive(DetokenizerHeartbeat(open_answers=0, early_answers=0, dropped=0), 0.0)
    return core


def members(core: RouterCore) -> set[str]:
    return {member.info.id for member in core.fleet.members()}


@pytest.mark.parametrize("turn_s", [0.05, 0.3, 0.6, 1.0, 1.4, 2.0, 2.9])
def test_a_death_is_noticed_within_two_heartbeats_and_two_turns_more_than_it_should_be(turn_s: float) -> None:
    """Turns read all mail, then act on deadlines. p0 lives; d0 and the detokenizer are dead from the beginning."""
    core, now = new_core(), 0.0
    lost_s = silent_s = 0.0
    while now < 30.0:
        now += turn_s
        core.receive(beat(P0), now)
        core.tick(now)
        assert P0.id in members(core)
        lost_s = lost_s or now * (D0.id not in members(core))
        silent_s = silent_s or now * core.detokenizers[0].silent
    assert CONFIG.dead_after_s <= lost_s <= CONFIG.dead_after_s + 2 * CONFIG.heartbeat_s + 2 * turn_s
    assert CONFIG.dead_after_s <= silent_s <= CONFIG.dead_after_s + 3.0 + 2 * turn_s


def test_a_router_that_is_stopped_again_and_again_loses_nobody_whose_mail_arrives_a_moment_after_it_goes_on() -> None:
    core, now = new_core(), 0.0
    for _ in range(5):
        now += STOPPED_S
        core.tick(now)
        now += 0.05
        for info in (P0, D0):
            core.receive(beat(info), now)
        core.receive(DetokenizerHeartbeat(open_answers=0, early_answers=0, dropped=0), now)
        core.tick(now)
    assert members(core) == {"p0", "d0"} and not core.detokenizers[0].silent


def test_a_backlog_that_takes_longer_to_read_than_silence_may_last_uses_up_nobodys_time() -> None:
    core = new_core()
    for tenth in range(10, 100):
        core.tick(tenth / 10, caught_up=False)
    core.tick(10.0)
    assert members(core) == {"p0", "d0"}
