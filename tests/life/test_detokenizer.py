"""Detokenizers that are killed and come back: the tokens are told again, and nobody computes anything anew.

`tests/e2e/test_supervision.py` kills one while streams go on.
"""

from common.config import RouterConfig
from common.messages import Finished
from common.step_cost import StepCost
from tests.life.client import Client
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet
from tests.life.ranks import ToySize

TOKENS = 100
SIZE = ToySize(pages=1024, rows=16, chunk_tokens=64, cost=StepCost(step_s=0.02, chunk_token_s=0.002, decode_row_s=0.0))


def prompt(number: int) -> list[int]:
    return [10 + number + token for token in range(40)]


def assert_nothing_was_computed_anew(fleet: ToyFleet, clients: list[Client]) -> None:
    """Every answer is whole, and came of one attempt."""
    assert fleet.observer.resumes == []
    for number, client in enumerate(clients):
        tokens = undisturbed(prompt(number), TOKENS)
        assert (client.token_ids, client.endings) == (tokens, [Finished(reason="length")])
        assert client.text == "".join(f" {token}" for token in tokens)
    computed = sum(life.scheduler.report().counters.prompt_tokens_computed for life in fleet.lives)
    assert computed == sum(len(prompt(number)) for number in range(len(clients)))
    assert sum(kind == "Generate" for _, kind, _ in fleet.network.log) == len(clients)


def test_answers_that_ended_while_no_detokenizer_was_there_come_whole() -> None:
    """Even after longer than the router waits before it asks, and before it calls the detokenizer silent."""
    fleet = ToyFleet(size=SIZE, config=RouterConfig(dead_after_s=10.0))
    clients = [fleet.submit(f"r{number}", prompt(number), TOKENS) for number in range(3)]
    fleet.turn_until(lambda: len(clients[0].token_ids) > 3)
    fleet.router_process.detokenizers[0].kill()
    fleet.run_for(8.0)
    loads = [instance.scheduler.report().load for instance in fleet.instances.values()]
    assert [load.running_requests for load in loads] == [0, 0], "the instances are done"
    fleet.router_process.restart_detokenizer(0)
    fleet.run(*clients)
    assert_nothing_was_computed_anew(fleet, clients)
