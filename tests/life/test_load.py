"""Many requests at once: with too little memory for all, with short decode memory, with a key that floods, and by the clock.

Every answer is the undisturbed one, nobody fails, and a short chat beside a flood is delayed by a few steps. Steps have a known
cost, which shows what disaggregation is for.
"""

from random import Random
from statistics import median

import pytest

from common.config import Dispatch, RouterConfig
from common.executor import StepHandle, StepPlan
from common.ids import RequestId, pack_ids
from common.instance.request import LEAST_CHUNK_TOKENS
from common.messages import Finished
from common.sampling_params import SamplingParams
from common.step_cost import StepCost
from router.requests import RequestSpec
from simulation.clock import TURN_S
from simulation.network import DELAY_S
from tests.engine.toy import ToyExecutor
from tests.life.client import Client
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet
from tests.life.ranks import ToySize

COST = StepCost(step_s=0.01, chunk_token_s=0.0001, decode_row_s=0.0)


def test_little_is_computed_twice_when_memory_is_short_and_everybody_is_served() -> None:
    random = Random(0)
    fleet = ToyFleet(size=ToySize(pages=64, rows=16, chunk_tokens=64, max_waiting=1024, request_timeout_s=600.0, cost=COST))
    clients, asked = [], 0
    for number in range(60):
        prompt = [random.randrange(10, 1000) for _ in range(random.randint(4, 16))]
        asked += len(prompt)
        clients.append(fleet.submit(f"r{number}", prompt, random.randint(50, 100)))
        fleet.run_for(random.expovariate(20))
    fleet.turn_until(lambda: all(client.ended for client in clients), 600.0)
    assert all(isinstance(ending, Finished) for client in clients for ending in client.endings)
    counters = [life.scheduler.report().counters for life in fleet.lives]
    assert sum(each.prompt_tokens_computed for each in counters) < 2.5 * asked, "without the forecast: six times"
    assert fleet.clock.now < 14.0, "a reservation of the longest answers takes 18 s"


def test_whoever_is_preempted_gets_the_whole_answer_though_nobody_has_a_second_attempt() -> None:
    """Memory is given out as if nobody's answer grew. The one of low priority gives it up first, and then the youngest do."""
    random = Random(1)
    size = ToySize(pages=64, rows=16, chunk_tokens=64, max_waiting=1024, request_timeout_s=600.0, cost=COST, answer_tokens=0)
    fleet = ToyFleet(size=size, config=RouterConfig(request_timeout_s=600.0, max_attempts=1))
    sampling = SamplingParams(max_new_tokens=200, temperature=0.0)
    patient = fleet.ask(RequestSpec(RequestId("patient"), 0, pack_ids(range(10, 18)), sampling, priority=5))
    urgent: list[Client] = []
    while fleet.clock.now < 3.0:
        prompt = [random.randrange(10, 1000) for _ in range(8)]
        urgent.append(fleet.submit(f"r{len(urgent)}", prompt, random.randint(40, 120)))
        fleet.run_for(random.expovariate(6))
    fleet.turn_until(lambda: all(client.ended for client in [patient, *urgent]), 600.0)
    assert sum(life.scheduler.report().counters.preemptions for life in fleet.lives) > 2
    assert all(isinstance(ending, Finished) for client in [patient, *urgent] for ending in client.endings)
    assert len(patient.token_ids) == 200


@pytest.mark.parametrize("chunk_token_s", [0.0001, 0.00002])
def test_chunks_are_as_long_as_the_limit_of_a_step_allows_by_the_cost_that_was_measured(
    monkeypatch: pytest.MonkeyPatch, chunk_token_s: float
) -> None:
    """As on a GPU that two roles share: the decode instance computes a long prompt beside the tokens of a chat."""
    limit_s, cost, took = 0.05, StepCost(step_s=0.01, chunk_token_s=chunk_token_s, decode_row_s=0.001), list[tuple[int, float]]()
    launch = ToyExecutor.launch

    def noted(self: ToyExecutor, plan: StepPlan) -> StepHandle:
        if plan.chunks and len(plan.decode_rows):
            took.append((plan.chunk_tokens, cost.seconds(plan.chunk_tokens, len(plan.decode_rows))))
        return launch(self, plan)

    monkeypatch.setattr(ToyExecutor, "launch", noted)
    size = ToySize(pages=16_384, rows=64, chunk_tokens=4_096, cost=cost, step_limit_s=limit_s, request_timeout_s=600.0)
    fleet = ToyFleet(0, 1, size=size)
    fleet.submit("chat", [10, 11], 240)
    fleet.run_for(1.2)
    prompts = [[number + each % 100 for each in range(240)] for number in range(10, 210)]
    others = [fleet.submit(f"r{number}", prompt, 2) for number, prompt in enumerate(prompts)]
    fleet.turn_until(lambda: all(other.ended for other in others), 60.0)
    assert took[0][0] == LEAST_CHUNK_TOKENS, "until it is measured"
    settled = [seconds for _, seconds in took[-len(took) // 4 :]]
    assert max(settled) <= 1.02 * limit_s and median(settled) > 0.95 * limit_s
    assert [other.token_ids for other in others[:5]] == [undisturbed(prompt, 2) for prompt in prompts[:5]]


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


SIZE = ToySize(cost=StepCost(step_s=0.002, chunk_token_s=0.010, decode_row_s=0.001))
CHUNK_S = 0.002 + 8 * 0.010
"""A full chunk of 8 tokens."""
SLACK_S = 8 * (TURN_S + DELAY_S)
"""Messages and turns on the way of one token."""


def longest_pause(fleet: ToyFleet) -> float:
    """Between two tokens of an answer, while the prompt of another request of five chunks is computed."""
    talking = fleet.submit("talking", list(range(10, 15)), max_tokens=60)
    fleet.turn_until(lambda: len(fleet.observer.seconds_between) > 3)
    other = fleet.submit("other", list(range(10, 50)), max_tokens=1)
    fleet.run(talking, other)
    return max(fleet.observer.seconds_between)


def test_a_long_prompt_does_not_hold_up_the_tokens_of_others() -> None:
    assert longest_pause(ToyFleet(size=SIZE)) < 2 * 0.003 + SLACK_S < CHUNK_S


def test_where_one_instance_does_both_it_does() -> None:
    assert longest_pause(ToyFleet(prefill=0, size=SIZE)) >= CHUNK_S


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_first_token_takes_its_chunks_and_a_few_messages(chunks: int) -> None:
    fleet = ToyFleet(size=SIZE)
    fleet.run(fleet.submit("r", list(range(10, 10 + 8 * chunks)), max_tokens=4))
    (seconds,) = fleet.observer.seconds_to_first
    assert chunks * CHUNK_S <= seconds < chunks * CHUNK_S + SLACK_S


def test_instances_measure_their_pace_and_their_router_hears_of_it() -> None:
    fleet = ToyFleet(size=SIZE)
    for number in range(12):
        prompts = list(range(60 * number + 60, 61 * number + 62)), list(range(50, 55))
        fleet.run(*(fleet.submit(f"r{number}-{n}", prompt, max_tokens=5) for n, prompt in enumerate(prompts)))
    fleet.run_for(2.0)
    loads = {member.info.role: member.load for member in fleet.router.fleet.members()}
    cost = SIZE.cost
    prefill, decode = loads["prefill"], loads["decode"]
    assert (prefill.step_s, prefill.chunk_token_s) == pytest.approx((cost.step_s, cost.chunk_token_s), rel=0.1)
    assert (decode.step_s, decode.decode_row_s) == pytest.approx((cost.step_s, cost.decode_row_s), rel=0.1)
    assert (prefill.decode_row_s, decode.chunk_token_s) == (0.0, 0.0), "neither has had such steps"
