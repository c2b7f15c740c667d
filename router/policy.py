"""The policy: which instances serve a request. Pure functions of the fleet as it is.

Owns the choice. Does not know requests beyond their sizes, nor messages, nor time.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass

from common.config import Dispatch
from common.errors import BadRequest, Unavailable
from common.ids import Life, Role
from router.fleet import Fleet
from router.members import Member

NO_LINK = "no prefill instance has a ready link to a decode instance"


@dataclass(frozen=True, slots=True)
class Choice:
    """`first` gets the request; `decode` takes over after the first token, or is None when `first` serves it alone."""

    first: Member
    decode: Member | None


def choose(fleet: Fleet, dispatch: Dispatch, prompt_tokens: int, max_new_tokens: int, avoid: Set[Life] = frozenset()) -> Choice:
    """Who serves a request of this size: the least loaded, in tokens, of those that can.

    auto: prefill and then decode over a ready link; prefill alone for an answer of one token; a decode instance alone when no
    prefill instance can take the prompt, or has a link. colocated: a decode instance alone, always.
    avoid: where the request has failed before; they are passed over when somebody else can serve, a decode instance alone too.
    Raises Unavailable when nobody can serve now, BadRequest when nobody's memory could ever hold it.
    """
    prefills = [] if dispatch == "colocated" else [member for member in fleet.members("prefill") if member.takes_requests]
    able = [member for member in prefills if member.capacity_tokens >= prompt_tokens]
    fresh = [member for member in able if member.life not in avoid]
    decodes = [member for member in fleet.members("decode") if member.takes_requests]
    holders = [member for member in decodes if member.capacity_tokens >= prompt_tokens + max_new_tokens - 1]
    if max_new_tokens == 1 and (fresh or (able and not holders)):
        return Choice(_least_loaded(fresh or able), None)
    if not decodes:
        raise Unavailable(_none_takes(fleet, "decode") or ("no decode instance is live" if prefills else "no instance is live"))
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
        return Choice(_least_loaded(holders), None)
    first = _least_loaded(linked)
    return Choice(first, _least_loaded(decode for decode in holders if _paired(first, decode)))


def unready(fleet: Fleet, dispatch: Dispatch) -> list[str]:
    """Why no request could be served now, or only by instances that make do without the others; empty when all is well."""
    reasons: list[str] = []
    try:
        choice = choose(fleet, dispatch, prompt_tokens=1, max_new_tokens=2)
    except (Unavailable, BadRequest) as error:
        reasons.append(str(error))
    else:
        if dispatch == "auto" and choice.decode is None and any(member.takes_requests for member in fleet.members("prefill")):
            reasons.append(NO_LINK)
    wanted = dispatch == "auto" and any(not member.draining for member in fleet.members("prefill"))
    none_takes = _none_takes(fleet, "prefill") if wanted else None
    return reasons if none_takes is None else [*reasons, none_takes]


def _none_takes(fleet: Fleet, role: Role) -> str | None:
    """Why no instance of this role takes requests, when there are some and none does."""
    troubles = [(member.info.id, member.trouble) for member in fleet.members(role)]
    reasons = [f"{name} is {trouble.state}: {trouble.reason}" for name, trouble in troubles if trouble is not None]
    if not reasons or len(reasons) < len(troubles):
        return None
    return f"no {role} instance takes requests ({'; '.join(reasons)})"


def _paired(prefill: Member, decode: Member) -> bool:
    """Both ends know the other: what one pushes, the other expects."""
    return prefill.linked(decode) and decode.linked(prefill)


def _least_loaded(members: Iterable[Member]) -> Member:
    return min(members, key=lambda member: (member.load_tokens, member.chosen))
