"""Instances that fall silent and links that are cut, and come back: requests go on elsewhere, and everything is as before."""

import pytest

from common.ids import DETOKENIZER
from common.messages import Finished, LinkTraffic
from common.step_cost import StepCost
from kv_transfer.handoff_reader import MARGIN_S, ORPHANED_S, WRITE_LEASE_S
from prefill.scheduler import PrefillScheduler
from tests.kv_transfer.memory import MemoryNetwork
from tests.life.client import Client
from tests.life.expected import undisturbed
from tests.life.fabric import PAGE_BYTES
from tests.life.fleet import ToyFleet, World
from tests.life.ranks import ToySize, toy_of, transport_of

PROMPT = [100 + n for n in range(19)]


def held(fleet: ToyFleet) -> Client:
    """A request whose push is in flight and does not move."""
    fleet.memory.hold = True
    client = fleet.submit("r", PROMPT, 5)
    fleet.turn_until(lambda: fleet.instances["prefill-0"].scheduler.report().load.pushes_in_flight > 0)
    return client


def let_go(fleet: ToyFleet) -> None:
    fleet.memory.hold = False
    transport_of(fleet.instances["prefill-0"]).release()


def assert_answered(client: Client) -> None:
    assert client.endings == [Finished(reason="length")]
    assert client.token_ids == undisturbed(PROMPT, 5)


def link_detail(fleet: ToyFleet) -> str:
    """What prefill-0 knows of its link."""
    scheduler = fleet.instances["prefill-0"].scheduler
    assert isinstance(scheduler, PrefillScheduler)
    (link,) = scheduler._links.all_links(lambda peer: LinkTraffic()).links
    return link.detail


def assert_whole(fleet: ToyFleet) -> None:
    """Everything is at home, every link is up, and a request takes the ring."""
    fleet.turn_until(lambda: fleet.is_home() and not (fleet.router.unready() or fleet.router.degraded()), seconds=30.0)
    before = fleet.instances["decode-0"].scheduler.report().counters.handoffs
    again = fleet.submit("again", PROMPT, 5)
    fleet.run(again)
    assert_answered(again)
    assert fleet.instances["decode-0"].scheduler.report().counters.handoffs == before + 1


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_a_request_whose_handoff_pauses_waits_for_its_decode_instance_and_not_for_its_prefill_instance(name: str) -> None:
    fleet = ToyFleet()
    client = held(fleet)
    fleet.pause(name, 3.5)
    assert client.ended is (name == "prefill-0"), "the decode instance serves it alone, and nobody else does"
    let_go(fleet)
    fleet.turn_until(lambda: client.ended)
    assert_answered(client)
    assert_whole(fleet)


def test_a_router_that_was_stopped_for_ten_seconds_finds_everybody_and_no_token_is_computed_anew() -> None:
    size = ToySize(pages=256, rows=16, cost=StepCost(step_s=0.05, chunk_token_s=0.0, decode_row_s=0.0))
    fleet = ToyFleet(prefill=2, decode=2, size=size)
    clients = [fleet.submit(f"r{number}", PROMPT, 100) for number in range(4)]
    fleet.run_for(1.0)
    fleet.stop_router(10.0)
    clients.append(fleet.submit("late", PROMPT, 5))
    fleet.turn_until(lambda: all(client.ended for client in clients))
    assert [client.endings for client in clients] == [[Finished(reason="length")]] * 5
    assert fleet.observer.resumes == []
    asked = sum(life.scheduler.report().counters.prompt_tokens_asked for life in fleet.lives)
    assert asked == 5 * len(PROMPT)
    assert clients[0].token_ids == undisturbed(PROMPT, 100)
    fleet.turn_until(fleet.is_home)


@pytest.mark.parametrize(("apart", "ranks", "after_s"), [(False, 1, ORPHANED_S), (True, 1, MARGIN_S), (False, 2, None)])
def test_the_reservations_of_a_killed_writer_come_home_when_nothing_of_it_can_land(
    apart: bool, ranks: int, after_s: float | None
) -> None:
    """A writer of several ranks is fenced by its silence: nothing proves that the others are gone."""
    fleet = ToyFleet(size=ToySize(apart=apart), ranks={"prefill": ranks})
    client = held(fleet)
    decode = fleet.instances["decode-0"].scheduler
    fleet.turn_until(lambda: decode.report().load.reservations > 0)
    fleet.kill("prefill-0")
    killed_s, quarantined = fleet.clock.now, False
    while decode.report().load.reservations:
        fleet.run_for(0.05)
        quarantined = quarantined or decode.report().load.pages_quarantined > 0
    took_s = fleet.clock.now - killed_s
    assert not quarantined, "it says nothing of this instance that its writer died"
    if after_s is None:
        assert took_s > MARGIN_S + WRITE_LEASE_S / 2
    else:
        assert after_s < took_s < after_s + 1.0, "and the time to find out that nobody listens there"
    fleet.turn_until(lambda: client.ended and fleet.is_home())
    assert_answered(client)


def test_a_life_that_listens_at_the_address_of_its_predecessor_proves_that_it_is_gone() -> None:
    fleet = ToyFleet()
    client = held(fleet)
    decode = fleet.instances["decode-0"].scheduler
    fleet.turn_until(lambda: decode.report().load.reservations > 0)
    fleet.start("prefill-0", "prefill", fleet.kill("prefill-0").name.address)
    fleet.memory.hold = False
    fleet.run_for(ORPHANED_S + 1.0)
    assert decode.report().load.reservations == 0
    fleet.turn_until(lambda: client.ended and fleet.is_home())
    assert_answered(client)


def test_a_link_that_is_cut_is_made_again() -> None:
    fleet = ToyFleet()
    client = held(fleet)
    agent = fleet.instances["decode-0"].info.pools[0].agent
    region = fleet.memory.regions.pop(agent)
    fleet.turn_until(lambda: client.ended and bool(fleet.router.degraded()))
    assert_answered(client)
    fleet.memory.regions[agent] = region
    let_go(fleet)
    assert_whole(fleet)


def test_a_link_on_which_nothing_moves_is_given_up_and_made_again() -> None:
    fleet = ToyFleet()
    client = held(fleet)
    fleet.turn_until(lambda: "no push completed" in link_detail(fleet), seconds=20.0)
    fleet.turn_until(lambda: client.ended)
    assert_answered(client)
    let_go(fleet)
    assert_whole(fleet)


def test_a_writer_that_is_not_answered_stops_in_mid_push_when_its_lease_ends() -> None:
    fleet = ToyFleet(decode=2, world=World(memory=MemoryNetwork(slice_bytes=PAGE_BYTES)))
    client = held(fleet)
    fleet.turn_until(lambda: ("prefill-0", "TokenBatch", DETOKENIZER) in fleet.network.log)
    assert ("prefill-0", "Reserve", "decode-0") in fleet.network.log
    transport_of(fleet.instances["prefill-0"]).release(slices=1)
    written = pages_written(fleet)
    assert 0 < written < 5, "the push is under way"
    fleet.pause("decode-0", WRITE_LEASE_S + 1.0)
    fleet.memory.hold = False
    fleet.run_for(0.5)
    assert pages_written(fleet) == written, "nothing is posted under a lease that has ended"
    fleet.turn_until(lambda: client.ended)
    assert_answered(client)
    fleet.turn_until(lambda: fleet.is_home() and not fleet.router.degraded(), seconds=30.0)


def pages_written(fleet: ToyFleet) -> int:
    """On decode-0."""
    pages = toy_of(fleet.instances["decode-0"]).pages
    return int(pages.reshape(len(pages), -1).any(axis=1).sum())
