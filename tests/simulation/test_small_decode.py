"""A small instance that joins is help, never harm."""

from random import Random

from common.config import RouterConfig
from common.step_cost import StepCost
from tests.life.fleet import ToyFleet
from tests.life.ranks import ToySize

REQUESTS, PER_S = 60, 12.0


def preemptions(small_pages: int | None) -> int:
    """Of a large decode instance under load, and of a small one beside it if its pages are given."""
    cost = StepCost(step_s=0.01, chunk_token_s=0.0001, decode_row_s=0.0)
    size = ToySize(pages=1024, rows=64, chunk_tokens=128, max_waiting=4096, request_timeout_s=600.0, cost=cost)
    fleet = ToyFleet(prefill=1, decode=1, size=size, config=RouterConfig())
    if small_pages is not None:
        fleet.size = ToySize(pages=small_pages, rows=64, chunk_tokens=128, max_waiting=4096, request_timeout_s=600.0, cost=cost)
        fleet.start("small", "decode")
        fleet.run_for(2.0)
    chance = Random(3)
    clients = []
    for number in range(REQUESTS):
        prompt = [chance.randrange(10, 1000) for _ in range(chance.randint(20, 60))]
        clients.append(fleet.submit(f"r{number}", prompt, chance.randint(100, 180)))
        fleet.run_for(chance.expovariate(PER_S))
    fleet.turn_until(lambda: all(client.ended for client in clients), 600.0)
    served = [life for life in fleet.lives if life.scheduler.report().counters.requests_ended]
    assert len(served) == len(fleet.lives), "everyone helps"
    return sum(life.scheduler.report().counters.preemptions for life in fleet.lives)


def test_a_small_decode_instance_beside_a_large_one_makes_preemptions_no_more() -> None:
    assert preemptions(small_pages=96) <= preemptions(small_pages=None)
