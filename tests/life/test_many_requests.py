"""Many requests at once over several instances, with too little memory for all: every answer is the undisturbed one."""

from random import Random

import pytest

from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet
from tests.life.ranks import ToySize


@pytest.mark.parametrize("seed", range(12))
def test_every_answer_is_that_of_an_undisturbed_run_and_everything_comes_home(seed: int) -> None:
    random = Random(seed)
    prefill, decode, pages = random.randrange(1, 4), random.randrange(1, 4), random.randrange(20, 64)
    fleet = ToyFleet(prefill, decode, size=ToySize(pages=pages, rows=3))
    asked = []
    for number in range(20):
        prompt = [random.randrange(10, 1000) for _ in range(random.randrange(1, 45))]
        max_tokens = random.randrange(1, 20)
        asked.append((prompt, max_tokens, fleet.submit(f"r{number}", prompt, max_tokens)))
        for _ in range(random.randrange(4)):
            fleet.clock.turn()
    fleet.run(*(client for _, _, client in asked))
    for prompt, max_tokens, client in asked:
        assert client.token_ids == undisturbed(prompt, max_tokens)
        assert len(client.endings) == 1


@pytest.mark.parametrize("seed", range(12))
def test_clients_that_leave_at_any_moment_disturb_nobody(seed: int) -> None:
    random = Random(1000 + seed)
    fleet = ToyFleet(prefill=2, decode=2, size=ToySize(pages=40, rows=3))
    asked = []
    for number in range(20):
        prompt = [random.randrange(10, 1000) for _ in range(random.randrange(1, 45))]
        asked.append((prompt, fleet.submit(f"r{number}", prompt, 12), random.random() < 0.5))
        for _ in range(random.randrange(8)):
            fleet.clock.turn()
        for older, (_, _, leaves) in enumerate(asked):
            if leaves and random.random() < 0.2:
                fleet.leave(f"r{older}")
    for number, (_, _, leaves) in enumerate(asked):
        if leaves:
            fleet.leave(f"r{number}")
    fleet.run(*(client for _, client, _ in asked))
    for prompt, client, leaves in asked:
        assert len(client.endings) == 1
        answer = undisturbed(prompt, 12)
        assert client.token_ids == (answer[: len(client.token_ids)] if leaves else answer)
