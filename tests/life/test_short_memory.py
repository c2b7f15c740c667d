"""A calm fleet whose decode memory is short: admission leaves room for what running requests grow by."""

from random import Random

from common.engine.timed import StepCost
from common.messages import Finished
from simulation.fleet import Fleet
from simulation.instance import Size


def test_little_is_computed_twice_when_memory_is_short_and_everybody_is_served() -> None:
    random = Random(0)
    cost = StepCost(step_s=0.01, chunk_token_s=0.0001, decode_row_s=0.0)
    fleet = Fleet(size=Size(pages=64, rows=16, chunk_tokens=64, max_waiting=1024, request_timeout_s=600.0, cost=cost))
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
