"""Instances that fall silent and links that are cut, and come back: pages come home, and requests are served again."""

import pytest

from common.messages import Failed
from tests.life.expected import undisturbed
from tests.life.fleet import Fleet

PROMPT = [100 + n for n in range(19)]


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_an_instance_that_pauses_during_a_handoff_comes_back_whole(name: str) -> None:
    fleet = Fleet()
    fleet.memory.hold = True
    client = fleet.submit("r", PROMPT, 5)
    fleet.turn_until(lambda: fleet.instances["prefill-0"].scheduler.load().pushes_in_flight > 0)
    fleet.pause(name, 3.5)
    assert client.ended and isinstance(client.endings[0], Failed) and client.endings[0].status == 503
    fleet.memory.hold = False
    fleet.instances["prefill-0"].transport.release()
    assert_serves_again(fleet)
    assert len(client.endings) == 1


def test_a_link_that_is_cut_is_made_again() -> None:
    fleet = Fleet()
    fleet.memory.hold = True
    client = fleet.submit("r", PROMPT, 5)
    fleet.turn_until(lambda: fleet.instances["prefill-0"].scheduler.load().pushes_in_flight > 0)
    region = fleet.memory.regions.pop("memory-2")
    fleet.turn_until(lambda: client.ended and bool(fleet.router.unready()))
    assert client.ended and isinstance(client.endings[0], Failed) and client.endings[0].status == 503
    fleet.memory.regions["memory-2"], fleet.memory.hold = region, False
    fleet.instances["prefill-0"].transport.release()
    assert_serves_again(fleet)
    assert len(client.endings) == 1


def test_a_link_on_which_nothing_moves_is_given_up_and_made_again() -> None:
    fleet = Fleet()
    fleet.memory.hold = True
    client = fleet.submit("r", PROMPT, 5)
    fleet.turn_until(lambda: client.ended, seconds=20.0)
    (ending,) = client.endings
    assert isinstance(ending, Failed) and ending.status == 503 and "no push completed" in ending.message
    fleet.memory.hold = False
    assert_serves_again(fleet)


def assert_serves_again(fleet: Fleet) -> None:
    fleet.turn_until(lambda: fleet.is_home() and not fleet.router.unready(), seconds=20.0)
    again = fleet.submit("again", PROMPT, 5)
    fleet.run(again)
    assert again.token_ids == undisturbed(PROMPT, 5)
