"""Peers that do not answer: an attempt to connect to one takes seconds, and nothing else may suffer from it.

First for a transport whose attempts go on by themselves, then for one whose library is slow to begin them.
"""

from concurrent.futures import Future

import pytest
from msgspec.structs import replace

from common.errors import TransferError
from common.ids import Ticket
from common.messages import InstanceInfo, LinkInfo, LinkState, PoolDescriptor
from common.messages.transfers import Allow, Connect, LinkChanged, PushDone, TransferEvent
from kv_transfer.links import AGAIN, ATTEMPT_S, ATTEMPTS, RETRY_S
from tests.builders import LAYOUT, instance
from tests.kv_transfer.two import LIFE, PEER, Two, linked

CONNECT_S = 3.0
LEASE_S, RENEW_S = 4.9, 1.0
DEAD = tuple(instance(f"dead{number}", "decode") for number in range(8))


TURN_S = 0.1


class Silent(Two):
    """A healthy link, and peers that do not answer who connects to them. The lease of the link is renewed every turn."""

    def __init__(self) -> None:
        super().__init__()
        self.connect(LEASE_S)
        self.attempts: dict[str, Future[None]] = self.network.silent

    def peer(self, name: str, incarnation: str = "1") -> InstanceInfo:
        """One that does not answer."""
        made = replace(instance(name, "decode", incarnation), pools=(self.side(seed=3).loop.descriptor,))
        self.attempts[made.pools[0].agent] = Future()
        return made

    def turn(self) -> list[TransferEvent]:
        self.clock.now += TURN_S
        self.allow(LEASE_S)
        return self.source.events()

    def turn_for(self, seconds: float) -> list[TransferEvent]:
        """What was told meanwhile. Each turn a push goes over the healthy link, and ends in the same turn."""
        told = []
        for ticket in range(1, round(seconds / TURN_S) + 1):
            self.push(ticket)
            events = self.turn()
            events.remove(PushDone(Ticket(ticket), LAYOUT.page_bytes, 0.0))
            told += events
        return told


@pytest.fixture
def beside() -> Silent:
    return Silent()


def news(peer: InstanceInfo, state: LinkState, detail: str) -> LinkChanged:
    return LinkChanged(LinkInfo(peer=peer.id, incarnation=peer.incarnation, state=state, detail=detail))


@pytest.mark.parametrize("silent", [2, 6])
def test_pushes_and_leases_go_on_in_every_turn_while_peers_do_not_answer(beside: Silent, silent: int) -> None:
    peers = [beside.peer(f"silent{number}") for number in range(silent)]
    beside.source.loop.submit(members(beside, *peers))
    assert beside.turn_for(ATTEMPT_S - 2 * TURN_S) == []
    assert beside.source.loop.expecting, "their answers come through polls"
    given_up = [news(peer, "lost", f"it did not answer within {ATTEMPT_S:g} s") for peer in peers]
    assert beside.turn_for(4 * TURN_S) == given_up
    assert beside.turn_for(130.0) == [], "what is known is not told again"


def test_an_attempt_that_was_given_up_is_made_again_and_its_late_result_counts_for_nothing(beside: Silent) -> None:
    peer = beside.peer("silent")
    beside.source.loop.submit(members(beside, peer))
    beside.turn_for(ATTEMPT_S + 2 * TURN_S)
    first, beside.attempts[peer.pools[0].agent] = beside.attempts[peer.pools[0].agent], Future()
    first.set_result(None)
    assert beside.turn_for(RETRY_S + 1.0) == []
    beside.attempts[peer.pools[0].agent].set_result(None)
    assert beside.turn_for(TURN_S) == [news(peer, "ready", "memmove")]


def test_an_attempt_that_fails_is_told_with_its_reason(beside: Silent) -> None:
    peer = beside.peer("silent")
    beside.source.loop.submit(members(beside, peer))
    beside.turn()
    beside.attempts[peer.pools[0].agent].set_exception(TransferError("it hung up"))
    assert beside.turn() == [news(peer, "lost", f"memmove could not connect to {peer.pools[0].agent}: it hung up")]


def test_a_peer_that_leaves_while_it_is_connected_is_forgotten_and_its_successor_served(beside: Silent) -> None:
    peer, successor = beside.peer("silent"), beside.peer("silent", "2")
    del beside.attempts[successor.pools[0].agent]
    beside.source.loop.submit(members(beside, peer))
    beside.turn()
    beside.source.loop.submit(members(beside, successor))
    assert beside.turn() == [news(successor, "ready", "memmove")]
    beside.attempts[peer.pools[0].agent].set_result(None)
    beside.source.loop.submit(Connect((), (successor.id,)))
    assert beside.turn_for(ATTEMPT_S + 1.0) == []


def test_a_peer_that_dies_while_it_is_connected_is_lost_and_not_ready_afterwards(beside: Silent) -> None:
    peer = beside.peer("silent")
    beside.source.loop.submit(members(beside, peer))
    beside.turn()
    del beside.network.regions[peer.pools[0].agent]
    beside.attempts[peer.pools[0].agent].set_result(None)
    assert beside.turn() == [news(peer, "lost", "the agent died")]


def test_closing_waits_for_no_attempt(beside: Silent) -> None:
    beside.source.loop.submit(members(beside, beside.peer("silent")))
    beside.turn()
    beside.source.loop.close()
    assert beside.source.loop.idle


def test_lost_links_that_are_tried_again_leave_room_for_newcomers(beside: Silent) -> None:
    peers = [beside.peer(f"silent{number}") for number in range(ATTEMPTS)]
    beside.source.loop.submit(members(beside, *peers))
    beside.turn()
    newcomer = beside.peer("new")
    del beside.attempts[newcomer.pools[0].agent]
    beside.source.loop.submit(members(beside, *peers, newcomer))
    assert beside.turn_for(ATTEMPT_S - 2 * TURN_S) == [], "no more attempts at once"
    assert news(newcomer, "ready", "memmove") in beside.turn_for(5 * TURN_S)
    beside.turn_for(RETRY_S)
    assert len(beside.source.loop._links._connecting) == AGAIN
    another = beside.peer("another")
    del beside.attempts[another.pools[0].agent]
    beside.source.loop.submit(members(beside, *peers, newcomer, another))
    assert beside.turn() == [news(another, "ready", "memmove")]


# --- a library that is slow to begin -------------------------------------------------------------------------------------------


class Blocked(Two):
    """Attempts to connect to agents that are not there take CONNECT_S. Meanwhile the other thread goes on renewing the lease."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        connect = self.source.transport.connect

        def slowly(pool: PoolDescriptor) -> None:
            if pool.agent not in self.network.regions:
                for _ in range(int(CONNECT_S / RENEW_S)):
                    self.clock.now += RENEW_S
                    self.renew()
            connect(pool)

        monkeypatch.setattr(self.source.transport, "connect", slowly)

    def renew(self) -> None:
        self.source.loop.submit(Allow(PEER, LIFE, self.clock.now + LEASE_S))

    def step(self) -> list[TransferEvent]:
        """Turn once: what came of it, without what is said of the dead. Between two turns 0.1 s pass, and a lease is renewed."""
        began_s = self.clock.now
        events = [event for event in self.source.events() if not (isinstance(event, LinkChanged) and "dead" in event.link.peer)]
        assert self.clock.now - began_s <= CONNECT_S + 1e-6, "at most one of them is waited for"
        self.clock.now += 0.1
        self.renew()
        return events


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Blocked:
    two = Blocked(monkeypatch)
    two.connect(LEASE_S)
    return two


def members(two: Two, *others: InstanceInfo) -> Connect:
    return Connect((two.target.info(), *others))


def test_peers_that_do_not_answer_cost_a_healthy_link_neither_its_lease_nor_a_push(two: Blocked) -> None:
    two.source.loop.submit(members(two, *DEAD))
    began_s = two.clock.now
    for ticket in range(1, 1_000):
        two.network.hold = True
        two.push(ticket)
        said = two.step()
        two.network.hold = False
        two.source.transport.release()
        (done,) = [*said, *two.step()]
        assert isinstance(done, PushDone) and done.ticket == ticket
    assert two.clock.now - began_s > 130.0


def test_a_renewal_that_waits_behind_a_slow_attempt_has_come_in_time(two: Blocked) -> None:
    two.network.hold = True
    assert two.pushed(1) == []
    two.clock.now += LEASE_S - CONNECT_S / 2
    two.source.loop.submit(members(two, DEAD[0]))
    assert two.step() == []


def test_a_peer_that_joins_is_connected_before_those_that_failed_are_tried_again(two: Blocked) -> None:
    two.source.loop.submit(members(two, *DEAD[:6]))
    while two.clock.now < 150.0:
        two.step()
    newcomer = two.side(seed=3)
    info = replace(instance("new", "decode"), pools=(newcomer.loop.descriptor,))
    two.source.loop.submit(members(two, *DEAD[:6], info))
    asked_s = two.clock.now
    while not any(isinstance(event, LinkChanged) and event.link.state == "ready" for event in two.step()):
        assert two.clock.now - asked_s < 2 * CONNECT_S
    assert linked("ready", "memmove") not in two.step(), "the healthy link was never down"
