"""Cache aware is held against seconds that are computed by hand. Its members have blocks of 32 tokens."""

from collections import Counter
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import RouterConfig
from common.ids import pack_ids
from common.messages import Load
from router.cache_index import CacheIndex
from router.cost import Demand
from router.members import Member
from router.policies import cache_aware
from tests.builders import instance
from tests.router.bench import D0, D1, P0, Bench, generates, new_fleet, placer_of, spec
from tests.router.fakes import hear
from tests.router.policies.lines import line_of, member, ranked

BLOCK = 32
PROMPT = range(5)
"""Names of the blocks of a prompt."""


def index_of(held: dict[Member, int]) -> CacheIndex:
    """Each member holds so many of the prompt's first blocks."""
    index = CacheIndex(follows=True)
    for each, blocks in held.items():
        index.join(each)
        index.expect([each], PROMPT[:blocks], now=0.0)
    assert index.block_tokens == BLOCK
    return index


def load(step_s: float = 0.01, chunk_token_s: float = 0.001, tokens: int = 0, rows: int = 0) -> Load:
    return Load(
        step_s=step_s, chunk_token_s=chunk_token_s, tokens_to_compute=tokens, pages_free=64, pages_total=64, running_requests=rows
    )


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 400), st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=4))
def test_the_order_is_that_of_the_seconds_for_the_request_and_for_those_behind_it(of: list[tuple[int, int, int, int]]) -> None:
    held, seconds = dict[Member, int](), dict[str, float]()
    usual = max(1, sum(queue for _, queue, _, _ in of) / max(1, sum(prompts for _, _, prompts, _ in of)))
    for number, (pace, queue, prompts, blocks) in enumerate(of):
        each = member(f"p{number}", load=load(chunk_token_s=pace / 1000, tokens=queue, rows=prompts))
        each.chosen, held[each] = number, blocks
        steps, compute_s = 2 if queue else 1, (170 - BLOCK * blocks) * pace / 1000
        seconds[each.info.id] = 0.01 * steps + queue * pace / 1000 + compute_s + queue / usual * compute_s
    candidates = line_of(held)
    names = ranked(cache_aware(candidates, "prefill"), candidates, Demand(170, 8, index_of(held).match(PROMPT)))
    assert sorted(names) == sorted(seconds)
    assert [seconds[name] for name in names] == pytest.approx(sorted(seconds.values()))


def test_in_a_crowd_the_one_that_holds_the_prompt_is_found() -> None:
    held = {member(f"p{number:02}", load=load()): 4 if number == 42 else 0 for number in range(100)}
    candidates = line_of(held)
    assert ranked(cache_aware(candidates, "prefill"), candidates, Demand(170, 8, index_of(held).match(PROMPT)))[0] == "p42"


def test_holders_that_cannot_serve_do_not_hide_one_that_can() -> None:
    """A rolling restart: those that hold most drain."""
    held = {member(f"p{number:02}", load=load()): {42: 4, 7: 5, 8: 5, 9: 5}.get(number, 0) for number in range(100)}
    candidates = line_of(held)
    policy, request = cache_aware(candidates, "prefill"), Demand(170, 8, index_of(held).match(PROMPT))
    assert ranked(policy, candidates, request, barred={"p07", "p08", "p09"})[0] == "p42"


def test_a_prompt_that_all_begin_with_makes_no_crowd() -> None:
    """Many requests come at once, each with 32 tokens of its own behind 160 that one member has."""
    held = {member(f"p{number}", load=load()): 5 if number == 0 else 0 for number in range(4)}
    candidates, index, computed = line_of(held), index_of(held), Counter[str]()
    policy = cache_aware(candidates, "prefill")
    for _ in range(100):
        overlap = index.match(PROMPT)
        (group,) = policy(candidates.lines["prefill"], lambda each: True, Demand(192, 8, overlap), None)
        tokens = 192 - overlap.tokens(group[0])
        group[0].computing_tokens += tokens
        index.expect([group[0]], PROMPT, now=0.0)
        candidates.chose(group[0])
        computed[group[0].info.id] += tokens
    assert computed.total() == 100 * 32 + 3 * 160, "each other one computes the common part once"
    assert max(computed.values()) - min(computed.values()) <= 192


@pytest.mark.parametrize(
    ("rows", "expected"), [(0, ("d0", ())), (2, ("d0", ())), (4, ("p0", ("d0", "d1"))), (9, ("p0", ("d0", "d1")))]
)
def test_a_request_is_served_alone_where_that_delays_fewer_than_it_helps(
    rows: int, expected: tuple[str, tuple[str, ...]]
) -> None:
    """d0 lacks 32 of 128 tokens, each of which takes a millisecond and delays every row that runs there; p0 lacks all. So d0
    alone costs 32 ms for itself and for each row, and the pair 128 ms: with three rows they are equal."""
    wide0, wide1 = (msgspec.structs.replace(each, max_running=64) for each in (D0, D1))
    fleet = new_fleet(P0, wide0, wide1)
    hear(fleet, P0, wide0, wide1, load=load(), now=1.0)
    hear(fleet, wide0, P0, load=load(rows=rows), now=1.0)
    hear(fleet, wide1, P0, load=load(rows=rows, step_s=0.02), now=1.0)
    d0 = next(each for each in fleet.members() if each.info.id == "d0")
    overlap = index_of({each: 3 if each is d0 else 0 for each in fleet.members()}).match(PROMPT[:4])
    for dispatch, placed in (("conditional", expected), ("auto", ("p0", ("d0", "d1")))):
        config = RouterConfig(dispatch=dispatch, decode_policy="cache_aware")  # type: ignore[arg-type]
        placement = placer_of(fleet, config).choose(Demand(128, 8, overlap))
        assert (placement.first.info.id, tuple(each.info.id for each in placement.decodes)) == placed


def test_a_router_that_would_serve_alone_is_ready_while_it_could_use_a_pair() -> None:
    fleet = new_fleet(P0, D0)
    hear(fleet, P0, D0, load=load(step_s=0.05), now=1.0)
    hear(fleet, D0, P0, load=load(), now=1.0)
    placer = placer_of(fleet, RouterConfig(dispatch="conditional"))
    assert placer.choose(Demand(1, 2)).decode is None and placer.unready() == []


def test_as_long_as_nobody_has_measured_anything_conditional_dispatch_uses_pairs() -> None:
    fleet = new_fleet(P0, D0)
    overlap = index_of({each: 4 * (each.info.role == "decode") for each in fleet.members()}).match(PROMPT[:4])
    placement = placer_of(fleet, RouterConfig(dispatch="conditional")).choose(Demand(128, 8, overlap))
    assert placement.decode is not None


def test_requests_follow_what_was_asked_under_their_salt_only() -> None:
    """Two tenants send the same prompt, again and again. Each finds its own way, although nothing else tells them apart."""
    bench = Bench(P0, instance("p1", "prefill"), D0, config=RouterConfig(prefill_policy="cache_aware"))

    def served(name: str, salt: str) -> str:
        sends = bench.submit(replace(spec(name), prompt=pack_ids(range(100, 200)), salt=salt))
        bench.text(0, "a", name=name)  # computed
        return generates(sends)[0][0]

    one = served("a", "one")
    assert [served(name, "one") for name in "bcd"] == [one] * 3
    other = served("e", "other")
    assert other != one
    assert [served(*asked) for asked in (("f", "one"), ("g", "other"), ("h", "one"), ("i", "other"))] == [one, other] * 2
