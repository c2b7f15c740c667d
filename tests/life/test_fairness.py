"""A key that floods the fleet with long answers delays another key's short chat by a few steps, and loses none of its answers."""

import pytest

from common.config import Dispatch, RouterConfig
from common.ids import RequestId, pack_ids
from common.sampling_params import SamplingParams
from common.step_cost import StepCost
from router.requests import RequestSpec
from tests.life.client import Client
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet
from tests.life.ranks import ToySize

STEP_S = 0.05
FEW_STEPS = 10
"""Two are in flight when it comes, and two when room is made for it; and it needs four itself."""
SMALL = {"rows": (64, 4), "pages": (40, 40)}
"""What an instance has too little of, with its pages and rows."""


def ask(fleet: ToyFleet, owner: str, name: str, prompt: list[int], max_tokens: int) -> Client:
    sampling = SamplingParams(max_new_tokens=max_tokens, temperature=0.0)
    return fleet.ask(RequestSpec(RequestId(name), 0, pack_ids(prompt), sampling, owner=owner))


@pytest.mark.parametrize("scarce", SMALL)
@pytest.mark.parametrize("dispatch", ["auto", "colocated"])
def test_a_chat_ends_within_a_few_steps_whatever_another_key_has_running_and_waiting(dispatch: Dispatch, scarce: str) -> None:
    pages, rows = SMALL[scarce]
    size = ToySize(pages=pages, rows=rows, chunk_tokens=64, cost=StepCost(step_s=STEP_S, chunk_token_s=0.0, decode_row_s=0.0))
    fleet = ToyFleet(1, 1, size=size, config=RouterConfig(dispatch=dispatch))
    long = [[30 * number + each for each in range(10, 18)] for number in range(1, 31)]
    flood = [ask(fleet, "alice", f"a{number}", prompt, 40) for number, prompt in enumerate(long)]
    fleet.run_for(10 * STEP_S)
    decode = fleet.instances["decode-0"].scheduler
    assert (decode.report().load.running_requests == rows) is (scarce == "rows")
    for number in range(4):
        assert decode.report().load.waiting_requests, "there is no room"
        asked_s = fleet.clock.now
        prompt = [20 + number, 30, 40]
        chat = ask(fleet, "bob", f"b{number}", prompt, 3)
        fleet.turn_until(lambda chat=chat: chat.ended)  # type: ignore[misc]
        assert fleet.clock.now - asked_s < FEW_STEPS * STEP_S
        assert chat.token_ids == undisturbed(prompt, 3)
    fleet.turn_until(lambda: all(client.ended for client in flood), 60.0)
    fleet.turn_until(fleet.is_home)
    assert [client.token_ids for client in flood] == [undisturbed(prompt, 40) for prompt in long]
