"""Instances that are silent for longer than the router waits, and come back: their pages come home."""

import pytest

from common.messages import Failed
from tests.life.fleet import Fleet, undisturbed

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
    fleet.turn_until(lambda: fleet.is_home() and not fleet.router.unready())
    again = fleet.submit("again", PROMPT, 5)
    fleet.run(again)
    assert again.token_ids == undisturbed(PROMPT, 5) and len(client.endings) == 1
