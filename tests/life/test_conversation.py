"""A conversation on a whole fleet: what one turn has left in the prefix caches, the next one neither computes nor moves."""

import pytest

from common.ids import RequestId, pack_ids
from common.messages import Counters
from common.sampling_params import SamplingParams
from router.requests import RequestSpec
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet
from tests.life.ranks import ToyInstance, ToySize

PAGE, TURNS, ANSWER = 4, 10, 6
QUESTION = [100 + n for n in range(9)]


def counters(instance: ToyInstance) -> Counters:
    return instance.scheduler.report().counters


@pytest.mark.parametrize("caches", [True, False])
def test_each_turn_moves_only_the_pages_of_new_tokens(caches: bool) -> None:
    """Decode has the former prompt and answer, but for the answer's last token, which was never fed back. Prefill has the former
    prompt: the answer's tokens were computed on decode."""
    fleet = ToyFleet(size=ToySize(prefix_cache=caches))
    prefill, decode = fleet.instances["prefill-0"], fleet.instances["decode-0"]
    said, former, with_answer = QUESTION, 0, 0
    for turn in range(TURNS):
        before = counters(prefill)
        client = fleet.submit(f"turn {turn}", said, ANSWER)
        fleet.run(client)
        assert client.token_ids == undisturbed(said, ANSWER), "a hit changes no answer"
        there, had = (former // PAGE, max(0, with_answer - 1) // PAGE) if caches else (0, 0)
        after = counters(prefill)
        assert client.answers[0].cached_tokens == there * PAGE
        assert after.prompt_tokens_computed - before.prompt_tokens_computed == len(said) - there * PAGE
        assert after.pages_pushed - before.pages_pushed == -(-len(said) // PAGE) - had
        assert (after.pages_spared - before.pages_spared, counters(decode).prompt_tokens_computed) == (had, 0)
        former, with_answer = len(said), len(said) + ANSWER
        said = [*said, *client.token_ids, *(200 + 10 * turn + n for n in range(5))]
    assert counters(prefill).bytes_pushed == counters(decode).bytes_received


def test_choices_of_one_prompt_compute_it_once_and_are_each_right() -> None:
    fleet = ToyFleet()
    prompt = [*QUESTION, *QUESTION]
    sampling = SamplingParams(max_new_tokens=ANSWER, temperature=0.0)
    client = fleet.ask(*(RequestSpec(RequestId(f"choice {n}"), n, pack_ids(prompt), sampling) for n in range(3)))
    fleet.turn_until(lambda: client.ended)
    assert [answer.token_ids for answer in client.answers] == [undisturbed(prompt, ANSWER)] * 3
    whole = (len(prompt) - 1) // PAGE * PAGE
    assert [answer.cached_tokens for answer in client.answers] == [0, whole, whole]
    assert counters(fleet.instances["prefill-0"]).prompt_tokens_computed == len(prompt) + 2 * (len(prompt) - whole)
    fleet.turn_until(fleet.is_home)


def test_a_decode_instance_that_serves_alone_computes_only_new_tokens() -> None:
    fleet = ToyFleet(prefill=0)
    said, with_answer = QUESTION, 0
    for turn in range(TURNS):
        before = counters(fleet.instances["decode-0"])
        client = fleet.submit(f"turn {turn}", said, ANSWER)
        fleet.run(client)
        there = max(0, with_answer - 1) // PAGE * PAGE
        assert client.token_ids == undisturbed(said, ANSWER) and client.answers[0].cached_tokens == there
        after = counters(fleet.instances["decode-0"])
        assert after.prompt_tokens_computed - before.prompt_tokens_computed == len(said) - there
        with_answer = len(said) + ANSWER
        said = [*said, *client.token_ids, *(200 + 10 * turn + n for n in range(5))]
