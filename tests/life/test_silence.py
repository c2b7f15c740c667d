"""Instances that fall silent and links that are cut, and come back: requests go on elsewhere, pages come home, and the fleet is whole
again."""

import pytest

from common.messages import Finished
from tests.life.client import Client
from tests.life.expected import undisturbed
from tests.life.fleet import Fleet

PROMPT = [100 + n for n in range(19)]


def held(fleet: Fleet) -> Client:
    """A request whose push is in flight and does not move."""
    fleet.memory.hold = True
    client = fleet.submit("r", PROMPT, 5)
    fleet.turn_until(lambda: fleet.instances["prefill-0"].scheduler.load().pushes_in_flight > 0)
    return client


def let_go(fleet: Fleet) -> None:
    fleet.memory.hold = False
    fleet.instances["prefill-0"].transport.release()


def assert_answered(client: Client) -> None:
    assert client.endings == [Finished(reason="length")]
    assert client.token_ids == undisturbed(PROMPT, 5)


def assert_whole(fleet: Fleet) -> None:
    """Everything is at home, every link is up, and a request takes the ring."""
    fleet.turn_until(lambda: fleet.is_home() and not fleet.router.unready(), seconds=30.0)
    before = fleet.instances["decode-0"].scheduler.counters().handoffs
    again = fleet.submit("again", PROMPT, 5)
    fleet.run(again)
    assert_answered(again)
    assert fleet.instances["decode-0"].scheduler.counters().handoffs == before + 1


def test_a_decode_instance_that_pauses_during_a_handoff_gets_the_request_again_when_it_is_back() -> None:
    fleet = Fleet()
    client = held(fleet)
    fleet.pause("decode-0", 3.5)
    assert not client.endings, "nobody else can serve it, and it may wait a while"
    let_go(fleet)
    fleet.turn_until(lambda: client.ended)
    assert_answered(client)
    assert_whole(fleet)


def test_a_prefill_instance_that_pauses_during_a_handoff_is_not_waited_for() -> None:
    fleet = Fleet()
    client = held(fleet)
    fleet.pause("prefill-0", 3.5)
    assert client.ended, "the decode instance has served it alone"
    assert_answered(client)
    let_go(fleet)
    assert_whole(fleet)


def test_a_link_that_is_cut_is_made_again() -> None:
    fleet = Fleet()
    client = held(fleet)
    agent = fleet.instances["decode-0"].info.pool.agent
    region = fleet.memory.regions.pop(agent)
    fleet.turn_until(lambda: client.ended and bool(fleet.router.unready()))
    assert_answered(client)
    fleet.memory.regions[agent] = region
    let_go(fleet)
    assert_whole(fleet)


def test_a_link_on_which_nothing_moves_is_given_up_and_made_again() -> None:
    fleet = Fleet()
    client = held(fleet)
    links = lambda: [link.detail for member in fleet.router.fleet.members("prefill") for link in member.links.values()]  # noqa: E731
    fleet.turn_until(lambda: any("no push completed" in detail for detail in links()), seconds=20.0)
    fleet.turn_until(lambda: client.ended)
    assert_answered(client)
    let_go(fleet)
    assert_whole(fleet)


@pytest.mark.parametrize("posted", [0, 1, 3])
def test_a_writer_that_is_cut_off_stops_in_mid_push_when_its_lease_ends(posted: int) -> None:
    fleet = Fleet()
    fleet.memory.slice_bytes = fleet.instances["prefill-0"].info.pool.layout.page_bytes
    client = held(fleet)
    prefill, decode = fleet.instances["prefill-0"], fleet.instances["decode-0"]
    fleet.turn_until(lambda: ("prefill-0", "TokenBatch", "detokenizer") in fleet.network.log)
    (grant,) = [pages for pages in [decode.pool.total_pages - decode.pool.free_pages] if pages]
    assert grant == 6
    prefill.transport.release(slices=posted)
    decode.stop_until(fleet.clock.now + 8.0)
    fleet.run_for(7.0)
    fleet.memory.hold = False
    fleet.run_for(0.9)
    written = int((decode.engine.pages.reshape(decode.pool.total_pages, -1) != 0).any(axis=1).sum())
    assert written == posted, "nothing more was posted after the lease had ended"
    fleet.turn_until(lambda: client.ended)
    assert_answered(client)
    assert_whole(fleet)
