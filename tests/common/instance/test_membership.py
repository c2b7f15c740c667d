"""Membership: registering until welcome, heartbeats both ways, and routers that die or are followed by others.

Also the peer sets of an instance: versions, whole sets in parts, several routers, and routers that start again.
"""

from collections.abc import Callable
from itertools import permutations
from random import Random

import msgspec
import pytest

from common.config import RouterConfig
from common.errors import ConfigError, PeerRefused
from common.ids import Incarnation, InstanceId
from common.instance.membership import (
    ABANDON_AFTER_S,
    KEEP_S,
    OVER_S,
    REGISTER_EVERY_S,
    SELDOM_EVERY_S,
    TIMELINES_AT_ONCE,
    TIMELINES_WAITING,
    Memberships,
    PeerSets,
    RouterChange,
)
from common.instance.ports import PeersChanged, Send
from common.messages import Counters, Goodbye, Heartbeat, Load, Peers, Refused, Register, Timeline, Times, Welcome
from router.fleet import Members
from tests.builders import instance, key

INFO = instance("p", "prefill")
HERE, THERE = "tcp://127.0.0.1:7", "tcp://127.0.0.1:8"
WELCOME = Welcome(
    router=InstanceId("router-1"), address=HERE, detokenizers=("tcp://127.0.0.1:9",), heartbeat_s=0.5, dead_after_s=3.0
)


def beat_of(load: Load, counters: Counters) -> Heartbeat:
    return Heartbeat(id=INFO.id, incarnation=INFO.incarnation, load=load, counters=counters, peers_version=0)


def no_adapters() -> None:
    return None


BEAT = beat_of(Load(), Counters())
SUCCESSOR = msgspec.structs.replace(WELCOME, router=InstanceId("router-2"))


class Member:
    """A membership with its clock."""

    def __init__(self) -> None:
        self.all = Memberships(INFO, [HERE], startup_timeout_s=5.0, now=100.0)
        (self.membership,) = self.all
        self.now = 100.0

    def receive(self, message: Welcome | Refused) -> list[str]:
        """The routers that are lost by this message."""
        return [change.router for change in self.all.receive(message, self.now) if change.is_lost]

    def router_lost(self) -> bool:
        return any(change.is_lost for change in self.all.check(self.now))

    def beat(self) -> list[str]:
        """What is sent now."""
        sends = self.membership.due(self.now, BEAT, no_adapters, 0, reachable=True)
        assert all(send.to == self.membership.name for send in sends)
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
    member.receive(WELCOME)
    return member


def test_it_registers_until_it_is_welcome() -> None:
    member = Member()
    assert [member.next(), member.next()] == [["Register"], ["Register"]]
    member.membership.hurry(member.now)  # changes nothing before the welcome
    assert member.membership.next_deadline == 100.0 + 3 * REGISTER_EVERY_S
    joined_before = member.membership.joined
    assert not member.receive(WELCOME), "it had no router before"
    assert [joined_before, member.membership.joined] == [False, True]
    assert member.membership.welcome == WELCOME
    assert member.next() == ["Heartbeat"]


def test_a_registration_that_nobody_answers_ends_the_start() -> None:
    member = Member()
    member.now += 5.0
    with pytest.raises(PeerRefused, match=r"--router right.*same --cluster-key, or none"):
        member.router_lost()


def test_a_refusal_is_told_with_its_reason() -> None:
    with pytest.raises(PeerRefused, match="refused p: page size differs"):
        Member().receive(Refused(reason="page size differs"))


def test_a_heartbeat_says_how_the_instance_is(member: Member) -> None:
    beat = beat_of(Load(pages_free=3), Counters(steps=5))
    told = msgspec.structs.replace(beat, peers_version=7)
    assert member.membership.due(100.0, beat, no_adapters, 7, reachable=True) == [Send(member.membership.name, told)]


# --- a router that falls silent --------------------------------------------------------------------------------------------


def test_a_router_that_leaves_heartbeats_unanswered_is_registered_with_again_and_its_requests_are_served(member: Member) -> None:
    silent_s = member.silent_until(lambda: not member.membership.joined)
    assert WELCOME.dead_after_s < silent_s <= WELCOME.dead_after_s + 2 * WELCOME.heartbeat_s
    assert [member.next() for _ in range(20)] == [["Register"]] * 20
    assert not member.router_lost()
    assert not member.receive(WELCOME), "the same router still waits for its answers"
    assert member.membership.joined and member.next() == ["Heartbeat"]


def test_only_a_silence_that_a_failure_alone_explains_ends_the_requests_of_a_router(member: Member) -> None:
    silent_s = member.silent_until(member.router_lost)
    assert ABANDON_AFTER_S < silent_s <= ABANDON_AFTER_S + 2 * WELCOME.heartbeat_s
    assert not member.router_lost(), "it is told once"
    member.now += 1000.0
    assert member.beat() == ["Register"], "the deadline of the start is over"


@pytest.mark.parametrize(("answers", "beats"), [(100, 1), (10, 6)], ids=["each heartbeat", "now and then"])
def test_a_router_that_answers_is_never_lost(member: Member, answers: int, beats: int) -> None:
    for _ in range(answers):
        for _ in range(beats):
            member.next()
            assert member.membership.joined
        assert not member.receive(WELCOME)


def test_a_process_that_was_stopped_has_sent_nothing_that_could_be_answered(member: Member) -> None:
    member.next()
    member.now += 1000.0
    assert member.beat() == ["Heartbeat"] and not member.router_lost()
    assert member.membership.joined


def test_hurried_heartbeats_do_not_count_as_silence(member: Member) -> None:
    """Many links change at once: so many heartbeats go out before the first answer can come."""
    for _ in range(100):
        member.now += 0.001
        member.membership.hurry(member.now)
        assert member.next() == ["Heartbeat"]
        assert member.membership.joined


def test_a_router_that_was_lost_is_joined_again_without_a_second_farewell(member: Member) -> None:
    member.silent_until(member.router_lost)
    assert not member.receive(WELCOME), "what it had sent has been ended already"
    assert member.membership.joined and member.silent_until(lambda: not member.membership.joined) > WELCOME.dead_after_s


# --- a router that is followed by another ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_silent", [False, True])
def test_the_welcome_of_another_router_says_that_the_former_ones_requests_are_nobodys(member: Member, is_silent: bool) -> None:
    if is_silent:
        member.silent_until(lambda: not member.membership.joined)
    successor = msgspec.structs.replace(SUCCESSOR, detokenizers=("tcp://127.0.0.1:8",), heartbeat_s=2.0)
    assert member.receive(successor) and not member.receive(successor)
    assert member.membership.welcome == successor
    member.next()
    assert member.membership.next_deadline == member.now + 2.0


# --- several routers ---------------------------------------------------------------------------------------------------------

OTHER = msgspec.structs.replace(WELCOME, router=InstanceId("router-9"), address=THERE)


def both() -> Memberships:
    return Memberships(INFO, [HERE, THERE], startup_timeout_s=5.0, now=100.0)


def test_each_router_is_a_membership_of_its_own_and_one_is_enough() -> None:
    members = both()
    here, there = members
    assert members.receive(OTHER, 100.0) == [RouterChange(there, OTHER.router, OTHER.detokenizers)] and members.joined
    members.check(1000.0)  # the deadline of the start is over
    assert members.receive(WELCOME, 100.0) == [RouterChange(here, WELCOME.router, WELCOME.detokenizers)]
    assert members.of(OTHER.router) is there and members.of(InstanceId("router-2")) is None


def test_a_welcome_without_an_address_answers_a_heartbeat_of_the_life_that_it_names() -> None:
    members = both()
    here, there = members
    members.receive(WELCOME, 100.0)
    moved = msgspec.structs.replace(WELCOME, address="", detokenizers=("tcp://127.0.0.1:5",))
    assert members.receive(moved, 100.0) == [RouterChange(here, WELCOME.router, moved.detokenizers)]
    assert members.receive(msgspec.structs.replace(OTHER, address=""), 100.0) == [] and there.welcome is None


def test_only_the_requests_of_the_router_that_is_gone_end_and_it_is_asked_again() -> None:
    members = both()
    here, there = members
    for welcome in (WELCOME, OTHER):
        members.receive(welcome, 100.0)
    assert members.gone([there.name], 100.0) == [RouterChange(there, OTHER.router, OTHER.detokenizers, is_lost=True)]
    assert members.gone([there.name], 100.0) == []
    assert here.joined and there.next_deadline <= 100.0 + REGISTER_EVERY_S


def test_one_that_is_there_and_does_not_answer_is_asked_more_and_more_seldom() -> None:
    _, there = both()
    pauses = []
    for _ in range(20):
        now = there.next_deadline
        there.due(now, BEAT, no_adapters, 0, reachable=True)
        pauses.append(there.next_deadline - now)
    assert pauses[0] == REGISTER_EVERY_S and pauses == sorted(pauses) and pauses[-1] == SELDOM_EVERY_S


def test_the_log_names_a_router_that_does_not_answer_after_5_s_and_every_30_s_until_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    members = Memberships(INFO, [HERE, THERE], startup_timeout_s=600.0, now=100.0)
    members.receive(WELCOME, 100.0)

    def warned(seconds: range) -> list[int]:
        caplog.clear()
        at = []
        for second in seconds:
            before = len(caplog.messages)
            members.check(100.0 + second)
            at += [second] * (len(caplog.messages) - before)
        return at

    assert warned(range(80)) == [5, 35, 65]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert all(f"the router at {THERE} does not answer: is --router right" in said for said in caplog.messages)
    members.receive(Refused(reason="other pages", address=THERE), 180.0)
    assert warned(range(81, 130)) == [95, 125] and "still refuses us: other pages" in caplog.messages[-1]
    members.receive(OTHER, 230.0)
    assert warned(range(130, 240)) == []


def test_one_registration_waits_for_a_router_that_is_down_and_it_is_asked_soon_when_it_is_back() -> None:
    members = Memberships(INFO, [HERE], startup_timeout_s=5.0, now=100.0)
    (here,) = members
    sent = []
    for reachable in (True, True, True, True, False, False, False, True):
        now = here.next_deadline
        sent.append(len(here.due(now, BEAT, no_adapters, 0, reachable=reachable)))
    assert sent == [1, 1, 1, 1, 0, 0, 0, 1] and here.next_deadline == now + REGISTER_EVERY_S
    members.receive(WELCOME, now)
    members.gone([here.name], now)
    down = [len(here.due(now, BEAT, no_adapters, 0, reachable=False)) for _ in range(100)]
    assert sum(down) == 1, "they would all arrive at once"


def test_a_router_that_refuses_us_is_no_end_while_another_may_welcome_us() -> None:
    members = both()
    assert members.receive(Refused(reason="other pages", address=HERE), 100.0) == []
    with pytest.raises(PeerRefused, match=r"other pages.*; .*other dtype"):
        members.receive(Refused(reason="other dtype", address=THERE), 100.0)


@pytest.mark.parametrize(
    ("refused", "is_hopeless"),
    [
        (Refused(reason="other dtype", is_mismatch=True), True),
        (Refused(reason="a newer incarnation", final=True), True),
        (Refused(reason="the weights change"), False),
    ],
)
def test_a_start_that_ends_the_same_way_each_time_is_an_error_of_configuration_and_others_are_not(
    refused: Refused, is_hopeless: bool
) -> None:
    with pytest.raises(PeerRefused) as ended:
        Member().receive(refused)
    assert isinstance(ended.value, ConfigError) == is_hopeless


def test_one_that_was_welcome_once_is_never_ended_by_refusals_but_asks_again_more_and_more_seldom(member: Member) -> None:
    refused = Refused(reason="other pages", address=HERE)
    assert member.receive(refused) == [WELCOME.router], "its requests end"
    pauses = []
    for _ in range(10):
        before = member.now
        assert member.next() == ["Register"] and member.receive(refused) == []
        pauses.append(member.now - before)
    assert pauses == sorted(pauses) and pauses[-1] == SELDOM_EVERY_S
    assert member.receive(WELCOME) == [] and member.membership.refusal is None


def test_one_router_under_two_addresses_is_refused_at_the_start_and_ignored_later() -> None:
    members, twice = both(), msgspec.structs.replace(WELCOME, address=THERE)
    members.receive(WELCOME, 100.0)
    with pytest.raises(PeerRefused, match="one router twice"):
        members.receive(twice, 100.0)
    assert members.receive(twice, 3600.0) == [] and [one.welcome for one in members] == [WELCOME, None]
    members = both()
    for welcome in (WELCOME, OTHER):
        members.receive(welcome, 100.0)
    assert members.receive(twice, 101.0) == [] and [one.welcome for one in members] == [WELCOME, OTHER]


def test_a_refusal_of_another_life_of_ours_is_ignored() -> None:
    members = Memberships(INFO, [HERE], startup_timeout_s=5.0, now=100.0)
    assert members.receive(Refused(reason="it is replaced", incarnation=Incarnation("former"), final=True), 100.0) == []
    assert members.stale == 1
    with pytest.raises(PeerRefused):
        members.receive(Refused(reason="other pages", incarnation=INFO.incarnation), 100.0)


@pytest.mark.parametrize("restarts", [False, True], ids=["", "one router starts again and again"])
@pytest.mark.parametrize("incarnations", [("9", "10"), ("01", "1")], ids=["one later", "at one moment"])
def test_of_two_processes_of_one_name_the_later_one_goes_on_wherever_and_whenever_they_register(
    incarnations: tuple[str, str], restarts: bool
) -> None:
    lives = [instance("d", "decode", life) for life in incarnations]
    for order in permutations([(HERE, 0), (HERE, 1), (THERE, 0), (THERE, 1)]):
        fleets = {at: new_fleet(at) for at in (HERE, THERE)}
        members = [Memberships(life, [HERE, THERE], startup_timeout_s=5.0, now=100.0) for life in lives]
        exited: set[int] = set()
        for at, number in order * 2:
            if restarts:
                fleets[THERE] = new_fleet("router-3")
            if number in exited:
                continue
            for send in fleets[at].register(Register(instance=lives[number], address=at), 100.0).sends:
                assert isinstance(send.message, Welcome | Refused)
                if isinstance(send.message, Refused):
                    exited.add(number)
                    with pytest.raises(PeerRefused, match="for good: a newer incarnation of d"):
                        members[number].receive(send.message, 100.0)
        assert exited == {0} and [member.info for member in fleets[HERE].members()] == [lives[1]]


def new_fleet(router: str) -> Members:
    return Members(InstanceId(router), (), RouterConfig(heartbeat_s=1.0, dead_after_s=3.0))


def test_a_late_word_of_a_router_that_has_a_successor_is_not_believed_for_a_while(member: Member) -> None:
    member.receive(SUCCESSOR)
    member.now += 0.1
    assert member.receive(WELCOME) == [] and member.all.of(SUCCESSOR.router) is member.membership
    member.all.gone([member.membership.name], member.now)
    assert member.receive(WELCOME) == [] and not member.membership.joined
    member.now += OVER_S
    member.receive(WELCOME)
    assert member.all.of(WELCOME.router) is member.membership, "the address was moved back to it"


def test_timelines_go_with_heartbeats_a_few_with_each_and_the_oldest_are_dropped_and_counted_when_too_many_wait(
    member: Member,
) -> None:
    timelines = [Timeline(key(f"r{number}"), Times(1, 0.0)) for number in range(TIMELINES_WAITING + 3)]
    for timeline in timelines:
        member.membership.note(timeline)
    told: list[Timeline] = []
    while True:
        (send,) = member.membership.due(member.now, BEAT, no_adapters, 0, reachable=True)
        assert isinstance(send.message, Heartbeat)
        if not send.message.timelines:
            break
        assert len(send.message.timelines) <= TIMELINES_AT_ONCE
        told += send.message.timelines
    assert (told, member.membership.timelines_dropped) == (timelines[3:], 3)
    for timeline in timelines[3:]:
        member.membership.note(timeline)
    goodbye = member.membership.goodbye().message
    assert goodbye == Goodbye(id=INFO.id, incarnation=INFO.incarnation, timelines=tuple(timelines[3:])), "nothing follows it"
    member.membership.end(member.now)
    member.receive(WELCOME)
    forgotten = member.membership.due(member.now, BEAT, no_adapters, 0, reachable=True)
    assert forgotten == [Send(member.membership.name, beat_of(Load(), Counters()))], (
        "those of a router that is gone are forgotten"
    )


A, B = InstanceId("router-a"), InstanceId("router-b")
P0, P1, P0_NEXT = instance("p0", "prefill"), instance("p1", "prefill"), instance("p0", "prefill", "2")


def test_changes_follow_the_version_that_they_name_and_others_are_dropped() -> None:
    sets = PeerSets()
    assert sets.receive(A, Peers(version=5, joined=(P0,))) == PeersChanged((P0,), ())
    assert sets.receive(A, Peers(version=7, since=6, joined=(P1,))) is None, "6 was lost"
    assert sets.version(A) == 5
    assert sets.receive(A, Peers(version=8, joined=(P0, P1))) == PeersChanged((P1,), ())
    assert sets.receive(A, Peers(version=8, joined=(P0, P1))) is None, "it came twice"
    assert sets.receive(A, Peers(version=9, since=8, left=(P0.id,))) == PeersChanged((), (P0.id,))


def test_a_whole_set_in_parts_counts_when_it_is_complete() -> None:
    sets = PeerSets()
    sets.receive(A, Peers(version=1, joined=(P0,)))
    assert sets.receive(A, Peers(version=2, joined=(P1,), more=True)) is None
    assert sets.receive(A, Peers(version=3, since=2, joined=(P0_NEXT,))) == PeersChanged((P0_NEXT, P1), ())


def test_a_peer_leaves_when_no_router_names_it_and_the_latest_incarnation_counts() -> None:
    sets = PeerSets()
    sets.receive(A, Peers(version=1, joined=(P0,)))
    assert sets.receive(B, Peers(version=1, joined=(P0,))) is None
    assert sets.receive(A, Peers(version=2, since=1, left=(P0.id,))) is None, "the other router sees it"
    assert sets.receive(B, Peers(version=2, since=1, joined=(P0_NEXT,))) == PeersChanged((P0_NEXT,), ())
    assert sets.receive(B, Peers(version=3, since=2, left=(P0.id,))) == PeersChanged((), (P0.id,))


def test_a_router_that_starts_again_costs_no_link_while_it_meets_its_members() -> None:
    sets = PeerSets()
    sets.receive(A, Peers(version=1, joined=(P0, P1)))
    sets.retire(A, 100.0)
    assert sets.version(A) == 0
    assert sets.receive(B, Peers(version=900, joined=(P0,))) is None
    assert sets.tick(500.0) is None, "the new one has just spoken"
    assert sets.tick(500.0 + KEEP_S) == PeersChanged((), (P1.id,)), "it has not come back"


def test_only_the_successor_of_a_former_life_says_who_has_left_it() -> None:
    sets = PeerSets()
    for router, place in ((A, "a"), (B, "b")):
        sets.receive(router, Peers(version=1, joined=(P0,)), place)
    sets.retire(A, 100.0)
    assert sets.receive(B, Peers(version=2, since=1, left=(P0.id,)), "b") is None, "it counts with the other router"
    successor = InstanceId("router-a2")
    sets.receive(successor, Peers(version=1, joined=(P0,)), "a")
    assert sets.receive(successor, Peers(version=2, since=1, left=(P0.id,)), "a") == PeersChanged((), (P0.id,))


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_lost_late_or_twice_the_union_is_that_of_the_routers_when_each_has_sent_its_whole_set(seed: int) -> None:
    random, sets = Random(seed), PeerSets()
    known: dict[InstanceId, str] = {}
    truth: dict[InstanceId, dict[InstanceId, str]] = {A: {}, B: {}}
    versions, waiting = {A: 0, B: 0}, list[tuple[InstanceId, Peers]]()

    def hear(router: InstanceId, message: Peers) -> None:
        change = sets.receive(router, message)
        if change is not None:
            known.update((info.id, info.incarnation) for info in change.joined)
            for gone in change.left:
                del known[gone]

    for life in range(200):
        router, name = random.choice((A, B)), InstanceId(f"p{random.randrange(6)}")
        since = versions[router]
        versions[router] += 1
        if truth[router].pop(name, None) is None:
            truth[router][name] = str(life)
            message = Peers(version=versions[router], since=since, joined=(instance(name, "prefill", str(life)),))
        else:
            message = Peers(version=versions[router], since=since, left=(name,))
        waiting += [(router, message)] * random.choice((0, 1, 1, 1, 2))
        random.shuffle(waiting)
        while waiting and random.random() < 0.7:
            hear(*waiting.pop())
    for router in (A, B):
        whole = tuple(instance(name, "prefill", life) for name, life in truth[router].items())
        hear(router, Peers(version=versions[router] + 1, joined=whole))
    assert known.keys() == truth[A].keys() | truth[B].keys()
    assert all(life in (truth[A].get(name), truth[B].get(name)) for name, life in known.items())
