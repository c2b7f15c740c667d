"""Routers know what is in the prefix caches of both roles, if a policy needs it, and only then are they told."""

import pytest

from common.config import PolicyName, RouterConfig
from common.ids import InstanceId, pack_ids
from common.messages import TellCache
from common.pages.radix_cache import BlockNames
from tests.life.fleet import ToyFleet
from tests.life.ranks import ToySize

PROMPT = [10 + number for number in range(70)]
BLOCK_TOKENS = 32
"""Eight of the toy's pages of four tokens."""


def fleet_of(policy: PolicyName) -> ToyFleet:
    return ToyFleet(1, 1, RouterConfig(prefill_policy=policy, decode_policy=policy), ToySize(pages=64))


def known(fleet: ToyFleet, tokens: list[int]) -> dict[str, int]:
    """How many of these tokens each instance holds, as far as the router knows."""
    caches = fleet.router.fleet.caches
    overlap = caches.match(BlockNames.of(pack_ids(tokens), 4).names)
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
