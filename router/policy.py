"""The policy: which instances serve a request. Pure functions of the fleet as it is.

Owns the choice. Does not know requests beyond their sizes, nor messages, nor time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from common.config import Dispatch
from common.errors import BadRequest, Unavailable
from common.ids import Role
from router.fleet import QUARANTINE_DIVISOR, Fleet, Member


@dataclass(frozen=True, slots=True)
class Choice:
    """`first` gets the request; `decode` takes over after the first token, or is None when `first` serves it alone."""

    first: Member
    decode: Member | None


def choose(fleet: Fleet, dispatch: Dispatch, prompt_tokens: int, max_new_tokens: int) -> Choice:
    """Who serves a request of this size: the least loaded, in tokens, of those that can.

    auto: prefill and then decode over a ready link; prefill alone for an answer of one token; a decode instance alone when no
    prefill instance can take the prompt. colocated: a decode instance alone, always.
    Raises Unavailable when nobody can serve now, BadRequest when nobody's memory could ever hold it.
    """
    prefills = [member for member in fleet.members("prefill") if member.takes_requests]
    decodes = [member for member in fleet.members("decode") if member.takes_requests]
    holders = [member for member in decodes if member.capacity_tokens >= prompt_tokens + max_new_tokens - 1]
    able = [] if dispatch == "colocated" else [member for member in prefills if member.capacity_tokens >= prompt_tokens]
    if able and max_new_tokens == 1:
        return Choice(_least_loaded(able), None)
    if not decodes:
        raise Unavailable(_all_worn(fleet, "decode") or ("no decode instance is live" if prefills else "no instance is live"))
    if not holders:
        largest = max(member.capacity_tokens for member in decodes)
        raise BadRequest(
            f"prompt and max_tokens need {prompt_tokens + max_new_tokens} tokens of KV memory, but the largest decode instance "
            f"holds {largest}: shorten the prompt or lower max_tokens",
            field="max_tokens",
        )
    if not able:
        return Choice(_least_loaded(holders), None)
    linked = [member for member in able if any(_paired(member, decode) for decode in holders)]
    if not linked:
        raise Unavailable("no prefill instance has a ready link to a decode instance yet")
    first = _least_loaded(linked)
    return Choice(first, _least_loaded(decode for decode in holders if _paired(first, decode)))


def unready(fleet: Fleet, dispatch: Dispatch) -> list[str]:
    """Why no request could be served now, or only by instances that make do without the others; empty when all is well."""
    reasons: list[str] = []
    try:
        choose(fleet, dispatch, prompt_tokens=1, max_new_tokens=2)
    except (Unavailable, BadRequest) as error:
        reasons.append(str(error))
    worn = None if dispatch == "colocated" else _all_worn(fleet, "prefill")
    return reasons if worn is None else [*reasons, worn]


def _all_worn(fleet: Fleet, role: Role) -> str | None:
    """That quarantine is why no instance of this role takes requests, if it is."""
    members = list(fleet.members(role))
    worn = [member for member in members if member.worn and not member.draining]
    if not worn or any(member.takes_requests for member in members):
        return None
    pages = ", ".join(f"{m.info.id}: {m.load.pages_quarantined} of {m.info.pool.total_pages}" for m in worn)
    return f"no {role} instance is whole: more than 1/{QUARANTINE_DIVISOR} of its pages are quarantined ({pages})"


def _paired(prefill: Member, decode: Member) -> bool:
    """Both ends know the other: what one pushes, the other expects."""
    return prefill.linked(decode) and decode.linked(prefill)


def _least_loaded(members: Iterable[Member]) -> Member:
    return min(members, key=lambda member: (member.load_tokens, member.chosen))
