"""Membership: registering until welcome, heartbeats both ways, and routers that die or are followed by others."""

from collections.abc import Callable

import msgspec
import pytest

from common.errors import PeerRefused
from common.ids import ROUTER, InstanceId
from common.instance.membership import ABANDON_AFTER_S, REGISTER_EVERY_S, Membership, State
from common.instance.ports import Send
from common.messages import Counters, Goodbye, Heartbeat, Load, Refused, Welcome
from tests.builders import instance

INFO = instance("p", "prefill")
WELCOME = Welcome(router=InstanceId("router-1"), detokenizers=("tcp://127.0.0.1:9",), heartbeat_s=0.5, dead_after_s=3.0)
SUCCESSOR = msgspec.structs.replace(WELCOME, router=InstanceId("router-2"))


class Member:
    """A membership with its clock."""

    def __init__(self) -> None:
        self.membership = Membership(INFO, startup_timeout_s=5.0, now=100.0)
        self.now = 100.0

    def beat(self) -> list[str]:
        """What is sent now."""
        sends = self.membership.due(self.now, State(Load(), Counters(), 0, 0, draining=False))
        assert all(send.to == ROUTER for send in sends)
        return [type(send.message).__name__ for send in sends]

    def next(self) -> list[str]:
        """What is sent when it is due."""
        self.now = self.membership.next_deadline
        return self.beat()

    def silent_until(self, done: Callable[[], bool]) -> float:
        """How long the router leaves everything unanswered until the condition holds."""
        began_s = self.now
        while not done():
            self.next()
            assert self.now - began_s < 2 * ABANDON_AFTER_S
        return self.now - began_s


@pytest.fixture
def member() -> Member:
    """One that has joined."""
    member = Member()
    member.membership.receive(WELCOME)
    return member


def test_it_registers_until_it_is_welcome() -> None:
    member = Member()
    assert [member.next(), member.next()] == [["Register"], ["Register"]]
    assert member.membership.next_deadline == 100.0 + 2 * REGISTER_EVERY_S
    joined_before = member.membership.joined
    assert not member.membership.receive(WELCOME), "it had no router before"
    assert [joined_before, member.membership.joined] == [False, True]
    assert (member.membership.detokenizer,) == WELCOME.detokenizers
    assert member.next() == ["Heartbeat"]


def test_a_registration_that_nobody_answers_ends_the_start() -> None:
    member = Member()
    member.now += 5.0
    with pytest.raises(PeerRefused, match="--router"):
        member.beat()


def test_a_refusal_is_told_with_its_reason() -> None:
    with pytest.raises(PeerRefused, match="the router refused p: page size differs"):
        Member().membership.receive(Refused(reason="page size differs"))


def test_a_heartbeat_says_how_the_instance_is(member: Member) -> None:
    load, counters = Load(pages_free=3), Counters(steps=5)
    (send,) = member.membership.due(100.0, State(load, counters, 7, 8, draining=True))
    beat = Heartbeat(
        id=INFO.id,
        incarnation=INFO.incarnation,
        load=load,
        counters=counters,
        peers_version=7,
        links_version=8,
        draining=True,
    )
    assert send == Send(ROUTER, beat)


# --- a router that falls silent --------------------------------------------------------------------------------------------


def test_a_router_that_leaves_heartbeats_unanswered_is_registered_with_again_and_its_requests_are_served(member: Member) -> None:
    silent_s = member.silent_until(lambda: not member.membership.joined)
    assert WELCOME.dead_after_s < silent_s <= WELCOME.dead_after_s + 2 * WELCOME.heartbeat_s
    assert [member.next() for _ in range(20)] == [["Register"]] * 20
    assert not member.membership.router_lost()
    assert not member.membership.receive(WELCOME), "the same router still waits for its answers"
    assert member.membership.joined and member.next() == ["Heartbeat"]


def test_only_a_silence_that_a_failure_alone_explains_ends_the_requests_of_a_router(member: Member) -> None:
    silent_s = member.silent_until(member.membership.router_lost)
    assert ABANDON_AFTER_S < silent_s <= ABANDON_AFTER_S + 2 * WELCOME.heartbeat_s
    assert not member.membership.router_lost(), "it is told once"
    member.now += 1000.0
    assert member.beat() == ["Register"], "the deadline of the start is over"


def test_a_silent_router_that_is_followed_by_another_has_lost_its_requests(member: Member) -> None:
    member.silent_until(lambda: not member.membership.joined)
    assert member.membership.receive(SUCCESSOR)


@pytest.mark.parametrize(("answers", "beats"), [(100, 1), (10, 6)], ids=["each heartbeat", "now and then"])
def test_a_router_that_answers_is_never_lost(member: Member, answers: int, beats: int) -> None:
    for _ in range(answers):
        for _ in range(beats):
            member.next()
            assert member.membership.joined
        assert not member.membership.receive(WELCOME)


def test_a_process_that_was_stopped_has_sent_nothing_that_could_be_answered(member: Member) -> None:
    member.next()
    member.now += 1000.0
    assert member.beat() == ["Heartbeat"] and not member.membership.router_lost()
    assert member.membership.joined


def test_hurried_heartbeats_do_not_count_as_silence(member: Member) -> None:
    """Many links change at once: so many heartbeats go out before the first answer can come."""
    for _ in range(100):
        member.now += 0.001
        member.membership.hurry(member.now)
        assert member.next() == ["Heartbeat"]
        assert member.membership.joined


def test_a_router_that_was_lost_is_joined_again_without_a_second_farewell(member: Member) -> None:
    member.silent_until(member.membership.router_lost)
    assert not member.membership.receive(WELCOME), "what it had sent has been ended already"
    assert member.membership.joined and member.silent_until(lambda: not member.membership.joined) > WELCOME.dead_after_s


# --- a router that is followed by another ----------------------------------------------------------------------------------


def test_the_welcome_of_another_router_says_that_the_former_ones_requests_are_nobodys(member: Member) -> None:
    assert member.membership.receive(SUCCESSOR)
    assert not member.membership.receive(SUCCESSOR)


def test_its_times_and_its_detokenizer_hold_from_now_on(member: Member) -> None:
    member.membership.receive(msgspec.structs.replace(SUCCESSOR, detokenizers=("tcp://127.0.0.1:8",), heartbeat_s=2.0))
    assert member.membership.detokenizer == "tcp://127.0.0.1:8"
    member.next()
    assert member.membership.next_deadline == member.now + 2.0


def test_hurrying_before_the_welcome_changes_nothing() -> None:
    member = Member()
    member.next()
    member.membership.hurry(100.0)
    assert member.membership.next_deadline == 100.0 + REGISTER_EVERY_S


def test_goodbye_names_the_incarnation(member: Member) -> None:
    assert member.membership.goodbye() == Send(ROUTER, Goodbye(id=INFO.id, incarnation=INFO.incarnation))
