"""Prefix caches on a whole fleet: what one turn has left there, the next one neither computes nor moves.

Routers know what is in the caches of both roles if a policy needs it, and only then are they told.
"""

import pytest

from common.config import PolicyName, RouterConfig
from common.ids import InstanceId, RequestId, Variant, pack_ids
from common.messages import Counters, TellCache
from common.pages.radix_cache import BlockNames
from common.sampling_params import SamplingParams
from router.requests import RequestSpec
from tests.engine.toy import TOY_WEIGHTS
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet
from tests.life.ranks import ToyInstance, ToySize

PROMPT = [10 + number for number in range(70)]
BLOCK_TOKENS = 32
"""Eight of the toy's pages of four tokens."""


def fleet_of(policy: PolicyName) -> ToyFleet:
    return ToyFleet(1, 1, RouterConfig(prefill_policy=policy, decode_policy=policy), ToySize(pages=64))


def known(fleet: ToyFleet, tokens: list[int]) -> dict[str, int]:
    """How many of these tokens each instance holds, as far as the router knows."""
    caches = fleet.router.fleet.caches
    overlap = caches.match(BlockNames.of(pack_ids(tokens), 4, Variant(TOY_WEIGHTS)).names)
    return {member.info.id: overlap.tokens(member) for member in fleet.router.fleet.members()}


def test_a_router_that_follows_caches_knows_of_prompts_and_answers_and_so_does_its_successor() -> None:
    fleet = fleet_of("cache_aware")
    client = fleet.submit("r", PROMPT, 40)
    fleet.run(client)
    fleet.run_for(3.0)
    turn = [*PROMPT, *client.token_ids]
    assert known(fleet, turn) == {"prefill-0": 2 * BLOCK_TOKENS, "decode-0": 3 * BLOCK_TOKENS}
    fleet.restart_router()
    assert known(fleet, turn) == {}
    fleet.run_for(5.0)
    assert known(fleet, turn) == {"prefill-0": 2 * BLOCK_TOKENS, "decode-0": 3 * BLOCK_TOKENS}
    fleet.router_process.flush_caches()
    fleet.run_for(1.0)
    assert known(fleet, turn) == {"prefill-0": 0, "decode-0": 0}


@pytest.mark.parametrize(("policy", "is_noted"), [("least_loaded", False), ("cache_aware", True)])
def test_instances_note_what_changes_only_while_a_router_of_theirs_follows(policy: PolicyName, is_noted: bool) -> None:
    fleet = fleet_of(policy)
    fleet.run_for(2.0)
    assert [instance.pool.cache.log is not None for instance in fleet.instances.values()] == [is_noted] * 2


def test_a_router_that_has_not_welcomed_an_instance_is_told_nothing() -> None:
    fleet = fleet_of("least_loaded")
    for instance in fleet.instances.values():
        instance.scheduler.receive(InstanceId("a stranger"), TellCache(), fleet.clock.now)
        assert instance.pool.cache.log is None


def test_a_prompt_is_not_taken_to_be_where_nothing_is_cached() -> None:
    policy = RouterConfig(prefill_policy="cache_aware", decode_policy="cache_aware")
    fleet = ToyFleet(1, 1, policy, ToySize(pages=64, prefix_cache=False))
    client = fleet.submit("r", PROMPT, 4)
    assert set(known(fleet, PROMPT).values()) == {0}, "also just after it was sent there"
    fleet.run(client)
    assert set(known(fleet, PROMPT).values()) == {0}


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
