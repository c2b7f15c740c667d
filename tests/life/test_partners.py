"""Who is linked to whom in a simulated fleet: not every pair where there are many, and the same after a restart of the router."""

from collections.abc import Callable

from common.config import RouterConfig
from common.ids import InstanceId, Int64Array, Ticket
from common.messages import Finished, PoolDescriptor
from kv_transfer.transport import Transport
from tests.kv_transfer.memory import MemoryTransport
from tests.life.client import Client
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet
from tests.life.ranks import ToySize

PROMPT = [100 + n for n in range(19)]
EVERY = 8
LIMIT = 3


class CountingFleet(ToyFleet):
    """connects, closes: calls of transports, by the agent of the peer. pushes: how often they wrote, to measure or hand off."""

    def __init__(self, prefill: int, decode: int, config: RouterConfig | None = None) -> None:
        self.connects: list[str] = []
        self.closes: list[str | None] = []
        self.pushes = 0
        super().__init__(prefill, decode, config, ToySize(pages=256, rows=16))

    def make_transport(self, wake: Callable[[], None]) -> Transport:
        return _CountingTransport(self)


class _CountingTransport(MemoryTransport):
    def __init__(self, fleet: CountingFleet) -> None:
        super().__init__(fleet.memory)
        self._fleet = fleet

    def connect(self, pool: PoolDescriptor) -> None:
        self._fleet.connects.append(pool.agent)
        super().connect(pool)

    def push(self, ticket: Ticket, agent: str, runs: Int64Array) -> None:
        self._fleet.pushes += 1
        super().push(ticket, agent, runs)

    def close(self, agent: str | None = None) -> None:
        self._fleet.closes.append(agent)
        super().close(agent)


def all_usable(fleet: ToyFleet) -> bool:
    router = fleet.router.fleet
    members = list(router.members("prefill"))
    everybody = len(members) == sum(instance.name.role == "prefill" for instance in fleet.instances.values())
    return everybody and router.peering.settled and all(len(each.usable) == len(each.partners) > 0 for each in members)


def partners(fleet: ToyFleet) -> dict[InstanceId, set[InstanceId]]:
    """The partners of each prefill instance."""
    return {member.info.id: set(member.partners) for member in fleet.router.fleet.members("prefill")}


def handed_off(fleet: ToyFleet) -> int:
    lives = (life for life in fleet.lives if life.name.role == "decode")
    return sum(life.scheduler.report().counters.handoffs for life in lives)


def submit(fleet: ToyFleet, first: int, count: int) -> list[Client]:
    return [fleet.submit(f"r{first + number}", PROMPT, 20) for number in range(count)]


def assert_answered(*clients: Client) -> None:
    assert [client.endings for client in clients] == [[Finished(reason="length")]] * len(clients)
    assert all(client.token_ids == undisturbed(PROMPT, 20) for client in clients)


def test_after_a_restart_of_the_router_no_link_is_closed_or_made_again_and_requests_take_the_links() -> None:
    fleet = CountingFleet(2, 3)
    fleet.turn_until(lambda: all_usable(fleet))
    fleet.run(*submit(fleet, 0, 4))
    before, pairs = handed_off(fleet), partners(fleet)
    pushes = fleet.pushes
    assert before == 4 and pushes > 4 and len(fleet.connects) == 6 and not fleet.closes
    fleet.restart_router()
    fleet.turn_until(lambda: all_usable(fleet))
    assert partners(fleet) == pairs
    assert fleet.pushes == pushes, "nothing is measured again"
    clients = submit(fleet, 4, 4)
    fleet.run(*clients)
    assert_answered(*clients)
    assert handed_off(fleet) == before + 4
    fleet.run_for(30.0)
    assert len(fleet.connects) == 6 and not fleet.closes, "not later either"


def test_where_not_every_pair_is_linked_all_are_answered_and_a_dead_partner_is_replaced() -> None:
    fleet = CountingFleet(EVERY, EVERY, RouterConfig(peers_per_instance=LIMIT))
    fleet.turn_until(lambda: all_usable(fleet))
    before = partners(fleet)
    assert sum(map(len, before.values())) < EVERY * EVERY
    clients = submit(fleet, 0, 16)
    fleet.run_for(0.1)
    victims = sorted(before[InstanceId("prefill-0")])[:LIMIT]
    for victim in victims:
        fleet.kill(victim)
    fleet.turn_until(lambda: all(client.ended for client in clients), seconds=30.0)
    assert_answered(*clients)
    fleet.turn_until(lambda: len(list(fleet.router.fleet.members("decode"))) == EVERY - len(victims))
    fleet.turn_until(lambda: all_usable(fleet))
    for mine in partners(fleet).values():
        assert len(mine) >= LIMIT and not mine & set(victims)
    later = submit(fleet, 16, 16)
    fleet.run(*later)
    assert_answered(*later)
