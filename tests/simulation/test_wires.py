"""Writes over simulated wires: when they end, alone and beside others, and what becomes of them when somebody dies."""

import numpy as np

from common.ids import Ticket
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion
from kv_transfer.transport import AgentLost, Connected, ConnectFailed, RunsDone, RunsFailed
from simulation.clock import Clock
from simulation.planned_fleet import Wires, WireTransport
from tests.builders import LAYOUT

REGION = MemoryRegion(address=1, region_bytes=10_000, device="cpu")


class Hosts:
    """Some hosts, each linked to every other. ended: when the news of each ticket came."""

    def __init__(self, hosts: int) -> None:
        self.clock = Clock()
        self.wires = Wires(self.clock, bytes_per_s=1000.0, latency_s=0.5)
        self.events: list[tuple[float, object]] = []
        """What was told, but for links that were made."""
        self.transports = [WireTransport(self.wires, self._look) for _ in range(hosts)]
        self.pools = [self._register(transport) for transport in self.transports]
        for transport in self.transports:
            for pool in self.pools:
                if pool.agent != transport.name:
                    transport.connect(pool)

    def write(self, ticket: int, source: int, target: int, write_bytes: int) -> None:
        self.transports[source].push(Ticket(ticket), self.pools[target].agent, np.array([[0, 0, write_bytes]], dtype=np.int64))

    def run(self) -> dict[int, float]:
        """When each ticket was done."""
        while self.clock.next_deadline() < float("inf"):
            self.clock.turn()
        return {event.ticket: at_s for at_s, event in self.events if isinstance(event, RunsDone)}

    def _look(self) -> None:
        news = [event for transport in self.transports for event in transport.poll()]
        self.events += [(self.clock.now, event) for event in news if not isinstance(event, Connected)]

    def _register(self, transport: WireTransport) -> PoolDescriptor:
        agent, wire = transport.register(REGION)
        return PoolDescriptor(backend="wire", agent=agent, address=1, total_pages=1, device="cpu", layout=LAYOUT, wire=wire)


def test_a_write_alone_takes_its_latency_and_its_bytes() -> None:
    hosts = Hosts(2)
    hosts.write(1, 0, 1, 2000)
    assert hosts.run() == {1: 2.5}


def test_writes_from_one_host_and_writes_to_one_host_share_its_link() -> None:
    from_one, to_one, apart = Hosts(3), Hosts(3), Hosts(4)
    from_one.write(1, 0, 1, 1000)
    from_one.write(2, 0, 2, 1000)
    to_one.write(1, 0, 2, 1000)
    to_one.write(2, 1, 2, 1000)
    apart.write(1, 0, 2, 1000)
    apart.write(2, 1, 3, 1000)
    assert from_one.run() == to_one.run() == {1: 1.5, 2: 2.5}
    assert apart.run() == {1: 1.5, 2: 1.5}


def test_both_directions_of_a_link_are_independent() -> None:
    hosts = Hosts(2)
    hosts.write(1, 0, 1, 1000)
    hosts.write(2, 1, 0, 1000)
    assert hosts.run() == {1: 1.5, 2: 1.5}


def test_what_is_under_way_to_a_host_that_dies_fails_and_its_writers_lose_the_link() -> None:
    hosts = Hosts(3)
    hosts.write(1, 0, 1, 1000)
    hosts.write(2, 0, 2, 1000)
    hosts.clock.at(1.0, lambda: hosts.wires.died(hosts.pools[1].agent))
    assert hosts.run() == {2: 2.5}
    failed = RunsFailed(Ticket(1), "the agent died", quiescent=True)
    lost = AgentLost(hosts.pools[1].agent, "the agent died")
    assert [(at_s, event) for at_s, event in hosts.events if not isinstance(event, RunsDone)] == [
        (1.0, failed), (1.0, lost), (1.0, lost)
    ]  # fmt: skip
    hosts.transports[0].connect(hosts.pools[1])
    assert isinstance(hosts.events[-1][1], ConnectFailed)


def test_a_write_over_a_link_that_is_closed_is_refused() -> None:
    hosts = Hosts(2)
    hosts.transports[0].close(hosts.pools[1].agent)
    hosts.write(1, 0, 1, 1000)
    assert hosts.run() == {}
    ((_, event),) = hosts.events
    assert isinstance(event, RunsFailed) and event.quiescent
