"""Sessions are held against a ring that is written out: every point of every member, sorted by how far it is behind the key."""

from collections import Counter
from dataclasses import replace
from hashlib import shake_128

from hypothesis import given
from hypothesis import strategies as st

from router.members import Member
from router.policies import POINTS, BySession, least_loaded
from tests.router.policies.lines import ASK, line_of, member, ranked

NAMES = [f"p{number}" for number in range(10)]
NAMES_OF_PARTNERS = [f"p{number}" for number in range(10, 18)]
SESSIONS = [f"session {number}" for number in range(300)]


def places(text: str, count: int) -> list[int]:
    digits = shake_128(text.encode()).hexdigest(16 * count)
    return [int(digits[at : at + 32], 16) for at in range(0, len(digits), 32)]


def reference(names: list[str], session: str) -> list[str]:
    (start,) = places(session, 1)
    behind = {(point - start) % 2**128: name for name in names for point in places(name, POINTS)}
    return list(dict.fromkeys(behind[distance] for distance in sorted(behind)))


@given(st.lists(st.sampled_from(NAMES), unique=True, min_size=1), st.sets(st.sampled_from(NAMES)), st.sampled_from(SESSIONS))
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
    members = {name: member(name) for name in NAMES}
    candidates = line_of(members.values())
    policy = BySession(candidates, "prefill")

    def homes() -> dict[str, str]:
        return {session: ranked(policy, candidates, replace(ASK, session=session))[0] for session in SESSIONS}

    before = homes()
    share = Counter(before.values())
    assert set(share) == set(NAMES) and max(share.values()) <= 2 * len(SESSIONS) / len(NAMES)
    candidates.leave(members["p3"])
    without = homes()
    assert {session for session in SESSIONS if without[session] != before[session]} == {
        session for session in SESSIONS if before[session] == "p3"
    }
    candidates.judge(member("p3"))
    assert homes() == before


def test_a_request_without_a_session_goes_to_the_least_loaded() -> None:
    candidates = line_of(map(member, NAMES[:5]))
    for number, each in enumerate(candidates.lines["prefill"]):
        each.assigned_tokens = (number * 3) % 5
    assert ranked(BySession(candidates, "prefill"), candidates) == ranked(least_loaded(candidates, "prefill"), candidates)
    assert ranked(BySession(candidates, "prefill"), candidates)[0] == "p0"
