"""The policy: which instances serve a request. Pure functions of the fleet as it is.

Owns the choice. Knows only the sizes of a request. Does not know messages or time.
"""

from collections.abc import Set
from dataclasses import dataclass

from common.config import Dispatch
from common.errors import BadRequest, Unavailable
from common.ids import Life, Role
from router.fleet import Fleet
from router.members import Member

CANDIDATES = 4
"""How many decode instances a placement names: the next one is asked when the best has no room by then."""
NO_LINK = "no prefill instance has a ready link to a decode instance"


@dataclass(frozen=True, slots=True)
class Placement:
    """Who serves an attempt. `first` gets the request. One of `decodes` takes over after the first token: they are linked to
    `first`, best first, at most CANDIDATES. When there are none, `first` serves the request alone."""

    first: Member
    decodes: tuple[Member, ...] = ()

    @property
    def decode(self) -> Member | None:
        """The best candidate; None when `first` serves the request alone."""
        return self.decodes[0] if self.decodes else None


def choose(
    fleet: Fleet, dispatch: Dispatch, prompt_tokens: int, max_new_tokens: int, avoid: Set[Life] = frozenset()
) -> Placement:
    """Place a request of this size on the least loaded members (in tokens) that can serve it.

    auto: a prefill instance and then a decode instance, when they are linked; a prefill instance alone for an answer of one
    token; a decode instance alone when no prefill instance can take the prompt or has a link. colocated: a decode instance alone,
    always.
    avoid: where the request has failed before, or had to give up memory. These members are used only when no other, not even a
    decode instance alone, can serve it.
    Raises Unavailable when nobody can serve it now, BadRequest when no instance's memory could ever hold it.
    """
    prefills = [] if dispatch == "colocated" else [member for member in fleet.members("prefill") if member.trouble is None]
    able = [member for member in prefills if member.capacity_tokens >= prompt_tokens]
    fresh = [member for member in able if member.life not in avoid]
    decodes = [member for member in fleet.members("decode") if member.trouble is None]
    holders = [member for member in decodes if member.capacity_tokens >= prompt_tokens + max_new_tokens - 1]
    if max_new_tokens == 1 and (fresh or (able and not holders)):
        return Placement(min(fresh or able, key=_burden))
    if not decodes:
        raise Unavailable(
            _all_in_trouble(fleet, "decode") or ("no decode instance is live" if prefills else "no instance is live")
        )
    if not holders:
        largest = max(member.capacity_tokens for member in decodes)
        raise BadRequest(
            f"prompt and max_tokens need {prompt_tokens + max_new_tokens} tokens of KV memory, but the largest decode instance "
            f"holds {largest}: shorten the prompt or lower max_tokens",
            field="max_tokens",
        )
    holders = [member for member in holders if member.life not in avoid] or holders
    linked = [member for member in fresh if any(_paired(member, decode) for decode in holders)]
    if not linked:
        return Placement(min(holders, key=_burden))
    first = min(linked, key=_burden)
    return Placement(first, tuple(sorted((decode for decode in holders if _paired(first, decode)), key=_burden)[:CANDIDATES]))


def unready(fleet: Fleet, dispatch: Dispatch) -> list[str]:
    """Why the fleet could not serve a request now, or only with a part of its instances; empty when all is well."""
    reasons: list[str] = []
    try:
        placement = choose(fleet, dispatch, prompt_tokens=1, max_new_tokens=2)
    except (Unavailable, BadRequest) as error:
        reasons.append(str(error))
    else:
        if dispatch == "auto" and placement.decode is None and any(member.trouble is None for member in fleet.members("prefill")):
            reasons.append(NO_LINK)
    wanted = dispatch == "auto" and any(not member.draining for member in fleet.members("prefill"))
    trouble = _all_in_trouble(fleet, "prefill") if wanted else None
    return reasons if trouble is None else [*reasons, trouble]


def _all_in_trouble(fleet: Fleet, role: Role) -> str | None:
    """Why no instance of this role takes requests; None when one does, or when there are none."""
    troubles = [(member.info.id, member.trouble) for member in fleet.members(role)]
    reasons = [f"{name} is {trouble.state}: {trouble.reason}" for name, trouble in troubles if trouble is not None]
    if not reasons or len(reasons) < len(troubles):
        return None
    return f"no {role} instance takes requests ({'; '.join(reasons)})"


def _paired(prefill: Member, decode: Member) -> bool:
    """Both ends know of the link."""
    return decode in prefill.usable


def _burden(member: Member) -> tuple[int, int]:
    """The tokens it has to do: those that it reported or those that were assigned to it since, whichever is more. Ties go to the
    member that was chosen longest ago."""
    return max(member.load.waiting_tokens + member.load.running_tokens, member.assigned_tokens), member.chosen
