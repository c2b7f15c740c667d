"""Members of one role that take requests, and what a policy says of them. Knows no fleet."""

from collections.abc import Iterable, Set
from random import Random

from common.ids import Role
from common.messages import Load
from router.cost import Demand
from router.members import Candidates, Member
from router.policies import Policy
from tests.builders import instance

ASK = Demand(prompt_tokens=40, max_new_tokens=8)


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
