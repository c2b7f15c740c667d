"""The policies, each against a plain model of what it promises. Knows no fleet.

The power of two choices is held against what two of three can be (`test_placement.py` has the least loaded), round robin against
a sorted list of names, sessions against a ring that is written out, and cache aware against seconds that are computed by hand.
"""

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import replace
from hashlib import shake_128
from random import Random
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import PolicyName, RouterConfig
from common.ids import Role, pack_ids
from common.messages import Load
from router.cache_index import CacheIndex
from router.cost import Demand
from router.members import Candidates, Member
from router.policies import POINTS, POLICIES, BySession, Policy, RoundRobin, cache_aware, least_loaded
from tests.builders import instance
from tests.router.bench import D0, D1, P0, Bench, generates, new_fleet, placer_of, spec
from tests.router.fakes import hear

ASK = Demand(prompt_tokens=40, max_new_tokens=8)


def test_every_policy_that_a_flag_can_name_is_there() -> None:
    assert POLICIES.keys() == set(get_args(PolicyName))


def member(name: str, role: Role = "prefill", load: Load | None = None) -> Member:
    return Member(instance(name, role), load or Load(pages_free=64, pages_total=64))


def line_of(members: Iterable[Member], seed: int = 1) -> Candidates:
    candidates = Candidates(Random(seed))
    for each in members:
        candidates.judge(each)
    return candidates


def ranked(policy: Policy, candidates: Candidates, ask: Demand = ASK, barred: Set[str] = frozenset()) -> list[str]:
    """The names of all groups, one behind the other."""
    line = candidates.lines["prefill"]
    groups = list(policy(line, lambda each: each.info.id not in barred, ask, None))
    assert all(groups)
    return [each.info.id for group in groups for each in group]


def test_of_two_random_members_the_less_loaded_is_taken() -> None:
    """The least loaded of three members is among the two drawn in two cases of three, and the most loaded never wins."""
    candidates = line_of(map(member, ("p0", "p1", "p2")))
    for each, tokens in zip(candidates.lines["prefill"], (50, 10, 90), strict=True):
        each.assigned_tokens = tokens
    policy = least_loaded(candidates, "prefill", compared=2)
    orders = [ranked(policy, candidates) for _ in range(3000)]
    assert all(sorted(order) == ["p0", "p1", "p2"] for order in orders)
    first = Counter(order[0] for order in orders)
    assert set(first) == {"p0", "p1"} and 1900 < first["p1"] < 2100


NAMES = [f"p{number}" for number in range(7)]
STEPS = st.lists(st.tuples(st.sampled_from(NAMES), st.sets(st.sampled_from(NAMES))), max_size=30)


@given(STEPS)
def test_each_in_turn_behind_the_last_that_was_chosen_whoever_comes_and_goes(steps: list[tuple[str, set[str]]]) -> None:
    there = {name: member(name) for name in NAMES[:3]}
    candidates = line_of(there.values())
    policy, last = RoundRobin(candidates, "prefill"), ""
    for name, barred in steps:
        if name in there:
            candidates.leave(there.pop(name))
        else:
            there[name] = member(name)
            candidates.judge(there[name])
        in_turn = sorted(there, key=lambda name: (name <= last, name))
        expected = [name for name in in_turn if name not in barred]
        assert ranked(policy, candidates, barred=barred) == expected
        if expected:
            last = expected[0]
            candidates.chose(there[last])


def test_both_roles_take_turns_and_a_look_at_readiness_takes_none() -> None:
    members = [instance(f"{role[0]}{number}", role) for role in ("prefill", "decode") for number in range(3)]
    placer = placer_of(new_fleet(*members), RouterConfig(prefill_policy="round_robin", decode_policy="round_robin"))
    served: list[list[str]] = []
    for _ in range(6):
        placement = placer.choose(Demand(10, 5))
        served.append([placement.first.info.id, *(each.info.id for each in placement.decodes)])
        assert placer.unready() == []
    assert served == 2 * [["p0", "d0", "d1", "d2"], ["p1", "d1", "d2", "d0"], ["p2", "d2", "d0", "d1"]]


SESSION_NAMES = [f"p{number}" for number in range(10)]
NAMES_OF_PARTNERS = [f"p{number}" for number in range(10, 18)]
SESSIONS = [f"session {number}" for number in range(300)]


def places(text: str, count: int) -> list[int]:
    digits = shake_128(text.encode()).hexdigest(16 * count)
    return [int(digits[at : at + 32], 16) for at in range(0, len(digits), 32)]


def reference(names: list[str], session: str) -> list[str]:
    (start,) = places(session, 1)
    behind = {(point - start) % 2**128: name for name in names for point in places(name, POINTS)}
    return list(dict.fromkeys(behind[distance] for distance in sorted(behind)))


@given(
    st.lists(st.sampled_from(SESSION_NAMES), unique=True, min_size=1),
    st.sets(st.sampled_from(SESSION_NAMES)),
    st.sampled_from(SESSIONS),
)
def test_a_session_has_an_order_of_the_members_in_whatever_order_they_came(
    names: list[str], barred: set[str], session: str
) -> None:
    candidates = line_of(map(member, names), seed=len(barred))
    expected = [name for name in reference(names, session) if name not in barred]
    assert ranked(BySession(candidates, "prefill"), candidates, replace(ASK, session=session), barred) == expected


def test_of_a_few_partners_among_many_members_each_is_ranked_without_a_look_at_the_others() -> None:
    """A former life of a partner, which takes no requests any more, is not ranked."""
    members = {name: member(name) for name in (f"p{number}" for number in range(100))}
    candidates = line_of(members.values())
    policy, partners = BySession(candidates, "prefill"), [*list(members.values())[10:18], member("p50")]
    asked: list[Member] = []

    def suits(each: Member) -> bool:
        asked.append(each)
        return each in partners

    for session in SESSIONS[:20]:
        asked.clear()
        groups = policy(partners, suits, replace(ASK, session=session), None)
        assert [each.info.id for group in groups for each in group] == reference(NAMES_OF_PARTNERS, session)
        assert len(asked) == len(NAMES_OF_PARTNERS)


def test_a_member_that_leaves_moves_its_own_sessions_only_and_gets_them_back_in_its_next_life() -> None:
    members = {name: member(name) for name in SESSION_NAMES}
    candidates = line_of(members.values())
    policy = BySession(candidates, "prefill")

    def homes() -> dict[str, str]:
        return {session: ranked(policy, candidates, replace(ASK, session=session))[0] for session in SESSIONS}

    before = homes()
    share = Counter(before.values())
    assert set(share) == set(SESSION_NAMES) and max(share.values()) <= 2 * len(SESSIONS) / len(SESSION_NAMES)
    candidates.leave(members["p3"])
    without = homes()
    assert {session for session in SESSIONS if without[session] != before[session]} == {
        session for session in SESSIONS if before[session] == "p3"
    }
    candidates.judge(member("p3"))
    assert homes() == before


def test_a_request_without_a_session_goes_to_the_least_loaded() -> None:
    candidates = line_of(map(member, SESSION_NAMES[:5]))
    for number, each in enumerate(candidates.lines["prefill"]):
        each.assigned_tokens = (number * 3) % 5
    assert ranked(BySession(candidates, "prefill"), candidates) == ranked(least_loaded(candidates, "prefill"), candidates)
    assert ranked(BySession(candidates, "prefill"), candidates)[0] == "p0"


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
