"""A calm fleet whose decode memory is short: admission leaves room for what running requests grow by, and nobody fails."""

from random import Random

from common.config import RouterConfig
from common.ids import RequestId, pack_ids
from common.messages import Finished
from common.sampling_params import SamplingParams
from common.step_cost import StepCost
from router.requests import RequestSpec
from tests.life.client import Client
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
