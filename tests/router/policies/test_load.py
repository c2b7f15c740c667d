"""The power of two choices is held against what two of three can be. `tests/router/test_candidates.py` has the least loaded."""

from collections import Counter

from router.policies import least_loaded
from tests.router.policies.lines import line_of, member, ranked


def test_of_two_random_members_the_less_loaded_is_taken() -> None:
    """Of three members, the least loaded is among the two drawn in two cases of three, and the most loaded never wins."""
    candidates = line_of(map(member, ("p0", "p1", "p2")))
    for each, tokens in zip(candidates.lines["prefill"], (50, 10, 90), strict=True):
        each.assigned_tokens = tokens
    policy = least_loaded(candidates, "prefill", compared=2)
    orders = [ranked(policy, candidates) for _ in range(3000)]
    assert all(sorted(order) == ["p0", "p1", "p2"] for order in orders)
    first = Counter(order[0] for order in orders)
    assert set(first) == {"p0", "p1"} and 1900 < first["p1"] < 2100
