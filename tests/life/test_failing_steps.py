"""A request that ends whatever instance computes it ends two of them, then itself; the others are answered as on a quiet day."""

import pytest

from common.executor import ExecutorFailed, StepResult
from common.messages import Failed, Finished
from tests.engine.toy import ToyStep
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet
from tests.life.ranks import ToySize

POISON = 250
PROMPTS = [[100 + 5 * number + place for place in range(9)] for number in range(6)]


@pytest.fixture(autouse=True)
def poisoned_steps_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    poll = ToyStep.poll

    def fails_at_poison(self: ToyStep) -> StepResult | None:
        result = poll(self)
        if result is not None and any(POISON in chunk.token_ids for chunk in self.plan.chunks):
            raise ExecutorFailed(f"step {self.plan.step} failed: poison", self.plan.step)
        return result

    monkeypatch.setattr(ToyStep, "poll", fails_at_poison)


@pytest.mark.parametrize(("prefill", "decode"), [(3, 1), (0, 3), (1, 3)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_that_ends_every_instance_that_computes_it_ends_two(prefill: int, decode: int, ranks: int) -> None:
    fleet = ToyFleet(prefill, decode, size=ToySize(chunk_tokens=8), ranks={"prefill": ranks, "decode": ranks})
    good = [fleet.submit(f"good-{number}", prompt, 6) for number, prompt in enumerate(PROMPTS)]
    fleet.turn_until(lambda: all(client.token_ids for client in good))
    poisoned = fleet.submit("poisoned", [*range(100, 116), POISON], 6)
    fleet.turn_until(lambda: all(client.endings for client in [poisoned, *good]))
    fleet.turn_until(fleet.is_home, seconds=60.0)  # decode instances wait until no rank that is gone can write any more
    assert len(fleet.ends) == 2 and all("failed: poison" in reason for _, reason in fleet.ends)
    (ending,) = poisoned.endings
    assert isinstance(ending, Failed) and not ending.retryable
    assert "in 2 steps that ended their instances" in ending.message
    for client, prompt in zip(good, PROMPTS, strict=True):
        assert client.endings == [Finished(reason="length")] and client.token_ids == undisturbed(prompt, 6)


def test_one_such_step_is_a_death_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = ToyFleet(0, 3)
    poisoned = fleet.submit("poisoned", [*range(100, 116), POISON], 6)
    fleet.turn_until(lambda: len(fleet.ends) == 1)
    monkeypatch.undo()
    fleet.run(poisoned)
    assert poisoned.endings == [Finished(reason="length")] and len(fleet.ends) == 1
