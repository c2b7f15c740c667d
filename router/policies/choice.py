"""The choice of a policy by its name, as the flags have it. Owns the names. Does not know what policies do."""

from collections.abc import Callable, Mapping
from functools import partial

from common.config import PolicyName
from common.ids import Role
from router.candidates import Candidates
from router.policies.cache_aware import CacheAware
from router.policies.load import LeastLoaded
from router.policies.port import Policy
from router.policies.round_robin import RoundRobin
from router.policies.session import BySession

_POLICIES: Mapping[PolicyName, Callable[[Candidates, Role], Policy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "power_of_two": partial(LeastLoaded, compared=2),
    "session": BySession,
    "cache_aware": CacheAware,
}


def make_policy(name: PolicyName, candidates: Candidates, role: Role) -> Policy:
    """The policy of this name, for the members of this role."""
    return _POLICIES[name](candidates, role)
