"""Peers that do not answer: an attempt to connect to one takes seconds, and nothing else may suffer from it."""

import pytest
from msgspec.structs import replace

from common.instance.ports import Allow, Connect, LinkChanged, PushDone, TransferEvent
from common.messages import InstanceInfo, PoolDescriptor
from tests.builders import instance
from tests.kv_transfer.two import LIFE, PEER, Two, linked

CONNECT_S = 3.0
LEASE_S, RENEW_S = 4.9, 1.0
DEAD = tuple(instance(f"dead{number}", "decode") for number in range(8))


class Blocked(Two):
    """Attempts to connect to agents that are not there take CONNECT_S. Meanwhile the other thread goes on renewing the lease."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        connect = self.source.transport.connect

        def slowly(pool: PoolDescriptor) -> str:
            if pool.agent not in self.network.regions:
                for _ in range(int(CONNECT_S / RENEW_S)):
                    self.clock.now += RENEW_S
                    self.renew()
            return connect(pool)

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
    info = replace(instance("new", "decode"), pool=newcomer.loop.descriptor)
    two.source.loop.submit(members(two, *DEAD[:6], info))
    asked_s = two.clock.now
    while not any(isinstance(event, LinkChanged) and event.link.state == "ready" for event in two.step()):
        assert two.clock.now - asked_s < 2 * CONNECT_S
    assert linked("ready", "memmove") not in two.step(), "the healthy link was never down"
