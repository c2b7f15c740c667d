"""Renewals at the sending end: which handoffs are said to be open, to whom, and what the answers bring."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from common.errors import InstanceFailed
from common.ids import Generation, Incarnation, InstanceId, Life, Ticket
from common.instance.ports import Send
from common.messages import Decline, Failed, Renew, Renewed, Withdraw
from common.messages.transfers import Allow, PushDone, PushFailed
from kv_transfer.handoff_reader import RENEW_S, RENEWALS_AFTER, WRITE_LEASE_S
from kv_transfer.handoff_writer import MOST_RENEWALS, HandoffClosed, HandoffRefused
from tests.builders import LAYOUT, key
from tests.kv_transfer.sources import BEGAN_S, ME, D, Source, grant, reserve

E = InstanceId("e")
FIRST, SECOND = Incarnation("1"), Incarnation("2")
PAGES = np.array([10, 11], dtype=np.int32)


class Writer:
    """A source with these handoffs open to D, its clock, and what it is told."""

    def __init__(self, *names: str) -> None:
        self.source = Source(ME, LAYOUT)
        self.now = BEGAN_S
        self.stuck: list[str] = []
        """Those that the latest Renew has called stuck."""
        for name in names:
            self.open(name)

    def open(self, name: str, peer: InstanceId = D, incarnation: Incarnation = FIRST) -> None:
        self.source.reserve(reserve(name, tokens=8, sent_s=self.now), Life(peer, incarnation), PAGES)

    def move(self, name: str, to: InstanceId) -> None:
        """Its peer has no room: another one is asked."""
        full = Failed(message="full", retryable=True)
        peer = E if to == D else D
        assert self.source.receive(peer, Decline(key=key(name), failed=full), self.now) == [HandoffRefused(key(name), full)]
        self.source.reserve(reserve(name, tokens=8, sent_s=self.now), Life(to, FIRST), PAGES)

    def grant(self, name: str, generation: int = 5) -> list[Any]:
        return self.source.receive(D, grant(name, (20, 21), generation, self.now), self.now)

    def renewed(self, sent_s: float, *over: str, sender: InstanceId = D) -> list[Any]:
        answer = Renewed(sent_s=sent_s, write_lease_s=WRITE_LEASE_S, over=tuple(key(name) for name in over))
        return self.source.receive(sender, answer, self.now)

    def tick(self, seconds: float = RENEW_S) -> dict[InstanceId, list[tuple[str, int | str]]]:
        """So much later: what is claimed, from whom, and in which generation; or that it has moved."""
        self.now += seconds
        claims: dict[InstanceId, list[tuple[str, int | str]]] = {}
        for output in self.source.tick(self.now):
            assert isinstance(output, Send) and isinstance(output.message, Renew)
            renew = output.message
            assert renew.incarnation == ME and renew.sent_s == self.now and output.to not in claims
            claims[output.to] = [(claim.key.request_id, "moved" if claim.moved else claim.generation) for claim in renew.claims]
            self.stuck = [claim.key.request_id for claim in renew.claims if claim.stuck]
        return claims


def pushing() -> Writer:
    """A handoff, "a", with a push in flight."""
    writer = Writer("a")
    writer.grant("a")
    writer.source.computed(key("a"), 4)
    return writer


def stuck() -> Writer:
    """A handoff, "a", of which a push failed without proof that it has ended."""
    writer = pushing()
    (closed,) = writer.source.transfer_ended(PushFailed(Ticket(1), "cable", quiescent=False))
    assert isinstance(closed, HandoffClosed) and not closed.quiescent
    return writer


def test_every_second_each_decode_instance_hears_which_handoffs_are_open_with_it() -> None:
    writer = Writer()
    assert writer.source.next_deadline() is None and writer.tick(0.0) == {}
    writer.open("a")
    writer.open("b")
    writer.open("c", peer=E)
    assert writer.source.next_deadline() == BEGAN_S + RENEW_S
    assert writer.tick(RENEW_S - 1e-3) == {}
    assert writer.tick(1e-3) == {D: [("a", 0), ("b", 0)], E: [("c", 0)]}
    writer.grant("b", generation=7)
    assert writer.tick() == {D: [("a", 0), ("b", 7)], E: [("c", 0)]}, "generation 0 asks for the grant again"
    assert writer.source.next_deadline() == writer.now + RENEW_S
    assert len(writer.tick(100 * RENEW_S)) == 2 and writer.tick(RENEW_S / 2) == {}, "a late turn says it once"


def test_a_handoff_that_drains_is_claimed_until_its_pushes_have_ended() -> None:
    writer = pushing()
    writer.source.give_up(key("a"))
    assert writer.tick() == {D: [("a", 5)]}
    writer.source.transfer_ended(PushDone(Ticket(1), 1, 0.1))
    assert writer.tick() == {D: []}


def test_renewals_go_on_for_a_while_after_the_last_handoff_and_begin_again_with_the_next() -> None:
    """They bring to light that a Handoff or Withdraw was lost."""
    writer = Writer("a")
    writer.source.give_up(key("a"))
    assert [writer.tick() for _ in range(RENEWALS_AFTER - 1)] == [{D: []}] * (RENEWALS_AFTER - 1)
    writer.open("b")
    assert writer.tick() == {D: [("b", 0)]}
    writer.source.give_up(key("b"))
    assert [writer.tick() for _ in range(RENEWALS_AFTER)] == [{D: []}] * RENEWALS_AFTER
    assert writer.tick() == {} and writer.source.next_deadline() is None
    writer.open("c")
    assert writer.tick() == {D: [("c", 0)]}


# --- the answers -----------------------------------------------------------------------------------------------------------


def test_an_answer_extends_the_lease_from_when_its_word_was_sent_and_takes_nothing_back() -> None:
    writer = Writer("a")
    writer.grant("a")
    writer.tick()
    writer.tick()
    assert writer.renewed(writer.now + 0.1, "a") == [] and writer.source.stale == 1, "to what was not said yet"
    assert writer.renewed(writer.now, "a", sender=E) == [], "of somebody to whom nothing was said"
    writer.now += 0.5
    assert writer.renewed(writer.now - 0.5) == [Allow(D, FIRST, writer.now - 0.5 + WRITE_LEASE_S)]
    for sent_s in (writer.now - 0.5, writer.now - 0.5 - RENEW_S):
        assert writer.renewed(sent_s) == [], "it was overtaken"
    assert len(writer.source) == 1


def test_a_handoff_that_is_over_on_the_other_side_is_drained_and_withdrawn_and_may_be_retried() -> None:
    writer = pushing()
    writer.tick()
    assert [type(output) for output in writer.renewed(writer.now, "a")] == [Allow]
    withdraw, closed = writer.source.transfer_ended(PushDone(Ticket(1), 1, 0.1))
    assert withdraw == Send(D, Withdraw(key=key("a"), incarnation=ME, generation=Generation(5)))
    failure = Failed.of(InstanceFailed("d does not hold the reservation of a/0"))
    assert failure.retryable and closed == HandoffClosed(key("a"), failure, quiescent=True)


def test_a_handoff_that_is_reported_over_twice_is_withdrawn_once() -> None:
    writer = Writer("a")
    writer.tick()
    assert [type(output) for output in writer.renewed(writer.now, "a", "a", "unknown")] == [Allow, Send, HandoffRefused]
    assert [type(output) for output in writer.renewed(writer.now, "a")] == []


@pytest.mark.parametrize(("sent_before_s", "is_over"), [(0.0, False), (RENEW_S / 2 - 1e-3, False), (RENEW_S / 2, True)])
def test_a_reserve_that_was_sent_just_before_is_not_taken_for_over(sent_before_s: float, is_over: bool) -> None:
    """The Renew may have overtaken it."""
    writer = Writer("old")
    writer.now += RENEW_S - sent_before_s
    writer.open("a")
    assert writer.tick(sent_before_s) == {D: [("old", 0), ("a", 0)]}
    closed = [output.key for output in writer.renewed(writer.now, "a") if isinstance(output, HandoffRefused)]
    assert closed == ([key("a")] if is_over else [])


# --- handoffs that move ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [(), ("b",)], ids=["alone", "with others"])
@pytest.mark.parametrize(
    ("heard_at", "times"), [(1, RENEWALS_AFTER), (5, 6), (None, MOST_RENEWALS)], ids=["at once", "late", "never"]
)
def test_the_former_peer_of_a_handoff_that_moved_is_told_so_until_it_has_heard_it(
    heard_at: int | None, times: int, others: tuple[str, ...]
) -> None:
    """And some times more, because a Reserve may still be on its way; or until it has taken its pages back in any case."""
    writer = Writer("a", *others)
    writer.move("a", E)
    writer.renewed(writer.now)
    told = 0
    for number in range(1, MOST_RENEWALS + 3):
        claims = writer.tick().get(D, [])
        assert [name for name, generation in claims if generation == 0] == list(others)
        told += ("a", "moved") in claims
        if number == heard_at:
            writer.renewed(writer.now)
    assert told == times
    assert (D in writer.tick()) == bool(others)


def test_a_handoff_that_comes_back_is_claimed_again() -> None:
    writer = Writer("a")
    writer.move("a", E)
    writer.move("a", D)
    assert writer.tick() == {D: [("a", 0)], E: [("a", "moved")]}


def test_what_a_former_peer_says_of_a_handoff_that_moved_changes_nothing() -> None:
    writer = Writer("a")
    writer.move("a", E)
    writer.tick()
    assert [type(output) for output in writer.renewed(writer.now, "a")] == [Allow]
    (withdraw,) = writer.grant("a", generation=3)
    assert withdraw == Send(D, Withdraw(key=key("a"), incarnation=ME, generation=Generation(3)))
    assert len(writer.source) == 1


# --- stuck handoffs --------------------------------------------------------------------------------------------------------


def test_a_stuck_handoff_stays_claimed_whatever_is_said_of_it() -> None:
    writer = stuck()
    for _ in range(3 * RENEWALS_AFTER):
        assert writer.tick() == {D: [("a", 5)]}
        assert all(isinstance(output, Allow) for output in writer.renewed(writer.now, "a"))
    assert writer.source.give_up(key("a")) == [], "it was closed already"
    writer.open("b")
    assert writer.tick() == {D: [("a", 5), ("b", 0)]} and writer.stuck == ["a"]


def test_a_stuck_handoff_is_claimed_while_its_peer_is_away_and_forgotten_when_that_has_a_successor() -> None:
    writer = stuck()
    assert writer.source.peers_gone([(E, FIRST)]) == []
    assert writer.tick() == {D: [("a", 5)]}, "it may only be out of the router's sight"
    assert writer.source.peers_gone([(D, FIRST)]) == []
    assert writer.tick() == {D: [("a", 5)]}
    assert writer.source.peers_gone([(D, SECOND)]) == []
    assert len(writer.source) == 0 and writer.tick() == {}


# --- peers that come and go ------------------------------------------------------------------------------------------------


def test_a_peer_that_is_away_is_told_that_its_handoffs_are_over() -> None:
    writer = Writer("a")
    writer.source.peers_gone([])
    assert [writer.tick() for _ in range(MOST_RENEWALS)] == [{D: [("a", "moved")]}] * MOST_RENEWALS
    assert writer.tick() == {}


def test_a_successor_hears_of_its_own_handoffs_only() -> None:
    """It would take what was open with its predecessor for all that is open, and give away pages that are being written."""
    writer = Writer("a")
    writer.source.peers_gone([(D, SECOND)])
    writer.open("b", incarnation=SECOND)
    for _ in range(2 * RENEWALS_AFTER):
        assert writer.tick() == {D: [("b", 0)]}


def test_a_successor_hears_nothing_of_what_drains_to_its_predecessor() -> None:
    writer = pushing()
    assert writer.source.peers_gone([(D, SECOND)]) == []
    assert writer.tick() == {}
    writer.source.transfer_ended(PushDone(Ticket(1), 1, 0.1))
    assert len(writer.source) == 0 and writer.tick() == {}


def test_a_peer_that_came_back_needs_a_new_lease() -> None:
    writer = Writer("a")
    writer.tick()
    assert len(writer.renewed(writer.now)) == 1
    writer.source.peers_gone([])
    writer.source.peers_gone([(D, FIRST)])
    assert writer.renewed(writer.now) == [Allow(D, FIRST, writer.now + WRITE_LEASE_S)], "the link that had it was closed"


def test_a_late_answer_of_a_predecessor_is_no_lease_to_write_to_its_successor() -> None:
    writer = Writer("a")
    writer.tick()
    writer.source.peers_gone([(D, SECOND)])
    writer.now += 0.5
    writer.open("b", incarnation=SECOND)
    late = writer.renewed(writer.now - 0.5)
    own, _ = writer.grant("b")
    assert own == Allow(D, SECOND, writer.now + WRITE_LEASE_S)
    assert all(isinstance(output, Allow) and output.until_s < own.until_s for output in late)


# --- whose word it is --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [{"incarnation": "2"}, {"writer": "former"}], ids=["another reader", "another writer"])
def test_a_grant_or_an_answer_from_or_to_another_life_is_dropped(names: dict[str, str]) -> None:
    writer = Writer("a")
    writer.now += 1.0
    lives = {name: Incarnation(life) for name, life in names.items()}
    assert writer.source.receive(D, replace(grant("a", (20, 21), sent_s=writer.now), **lives), writer.now) == []
    answer = Renewed(sent_s=writer.now, write_lease_s=WRITE_LEASE_S, over=(key("a"),))
    assert writer.source.receive(D, replace(answer, **lives), writer.now) == []
    assert len(writer.source) == 1 and writer.source.pushes_in_flight == 0


@pytest.mark.parametrize(("generation", "ends"), [(4, False), (5, True)], ids=["another", "its own"])
def test_an_answer_ends_a_handoff_only_if_it_names_its_generation(generation: int, ends: bool) -> None:
    writer = pushing()
    writer.now += 1.0
    over, generations = (key("a"),), (Generation(generation),)
    writer.source.receive(D, Renewed(sent_s=writer.now, write_lease_s=5.0, over=over, generations=generations), writer.now)
    said = writer.source.transfer_ended(PushDone(Ticket(1), 1, 0.1))
    assert [output.message for output in said if isinstance(output, Send)] == (
        [Withdraw(key=key("a"), incarnation=ME, generation=Generation(5))] if ends else []
    )
