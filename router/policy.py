"""The policy: which instances serve a request.

Owns the choice. Knows only the sizes of a request. Does not know messages or time. A choice compares a few random candidates, so
it costs the same for ten instances and for a thousand.
"""

from collections.abc import Set
from dataclasses import dataclass
from itertools import chain, islice

from common.config import Dispatch
from common.errors import BadRequest, Unavailable
from common.ids import Life, Role
from router.ask import Ask
from router.candidates import Candidates
from router.fleet import Fleet
from router.members import Member

CANDIDATES = 4
"""How many decode instances a placement names: the next one is asked when the best has no room by then."""
REASONS = 4
"""How many instances in trouble a reason names."""
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


def choose(fleet: Fleet, dispatch: Dispatch, ask: Ask) -> Placement:
    """Place a request on members that can serve it: the least loaded for their memory, of some random ones.

    auto: a prefill instance and then a decode instance, when they are linked; a prefill instance alone for an answer of one
    token; a decode instance alone when no prefill instance can take the prompt or has a link. colocated: a decode instance alone,
    always.
    The members to avoid are used only when no other, not even a decode instance alone, can serve it.
    Raises Unavailable when nobody can serve it now, BadRequest when no instance's memory could ever hold it.
    """
    candidates = fleet.candidates
    load, avoid = _Weighing(ask), ask.avoid
    able = [] if dispatch == "colocated" else candidates.able("prefill", ask.prompt_tokens)
    holders = candidates.able("decode", ask.most_tokens)
    if ask.max_new_tokens == 1:
        alone = candidates.draw(able, lambda member: member.life not in avoid)
        if not alone and not holders:
            alone = candidates.draw(able, lambda member: True)
        if alone:
            return Placement(min(alone, key=load.at_prefill))
    if not holders:
        raise _nobody_holds(candidates, dispatch, ask.prompt_tokens + ask.max_new_tokens)
    spared: Set[Life] = frozenset()
    if any(holder.life not in avoid for holder in islice(holders, len(avoid) + 1)):
        spared = avoid
    for some in candidates.rounds(able):
        fresh = (member for member in some if member.usable and member.life not in avoid)
        for first in sorted(fresh, key=load.at_prefill):
            decodes = _partners(candidates, first, holders, spared)
            if decodes:
                return Placement(first, tuple(sorted(decodes, key=load.at_decode)[:CANDIDATES]))
    return Placement(min(candidates.draw(holders, lambda member: member.life not in spared), key=load.at_decode))


def unready(fleet: Fleet, dispatch: Dispatch) -> list[str]:
    """Why the fleet could not serve a request now, or only with a part of its instances; empty when all is well."""
    candidates = fleet.candidates
    reasons: list[str] = []
    try:
        placement = choose(fleet, dispatch, Ask(prompt_tokens=1, max_new_tokens=2))
    except (Unavailable, BadRequest) as error:
        reasons.append(str(error))
    else:
        if dispatch == "auto" and placement.decode is None and candidates.line("prefill"):
            reasons.append(NO_LINK)
    wanted = dispatch == "auto" and candidates.ailing("prefill")
    trouble = _all_in_trouble(candidates, "prefill") if wanted else None
    return reasons if trouble is None else [*reasons, trouble]


def _partners(candidates: Candidates, prefill: Member, holders: list[Member], spared: Set[Life]) -> list[Member]:
    """Some of the decode instances that can take over from this prefill instance."""
    usable = prefill.usable

    def suits(decode: Member) -> bool:
        return decode in usable and decode.trouble is None and decode.capacity_tokens >= least and decode.life not in spared

    least = holders[0].capacity_tokens
    return candidates.draw(holders if len(holders) < len(usable) else usable, suits)


def _nobody_holds(candidates: Candidates, dispatch: Dispatch, tokens: int) -> Unavailable | BadRequest:
    """No decode instance that takes requests has so much memory."""
    line = candidates.line("decode")
    if not line:
        nobody = "no decode instance is live" if dispatch == "auto" and candidates.line("prefill") else "no instance is live"
        return Unavailable(_all_in_trouble(candidates, "decode") or nobody)
    large = next((member for member in candidates.ailing("decode") if member.capacity_tokens >= tokens), None)
    if large is not None and large.trouble is not None:
        name, trouble = large.info.id, large.trouble
        return Unavailable(
            f"an instance that holds {tokens} tokens takes no requests: {name} is {trouble.state}: {trouble.reason}"
        )
    return BadRequest(
        f"prompt and max_tokens need {tokens} tokens of KV memory, but the largest decode instance "
        f"holds {line[-1].capacity_tokens}: shorten the prompt or lower max_tokens",
        field="max_tokens",
    )


def _all_in_trouble(candidates: Candidates, role: Role) -> str | None:
    """Why no instance of this role takes requests; None when one does, or when there are none."""
    ailing, leaving = candidates.ailing(role), candidates.leaving(role)
    count = len(ailing) + len(leaving)
    if candidates.line(role) or not count:
        return None
    named = [(member.info.id, member.trouble) for member in islice(chain(ailing, leaving), REASONS)]
    reasons = [f"{name} is {trouble.state}: {trouble.reason}" for name, trouble in named if trouble is not None]
    if count > REASONS:
        reasons.append(f"and {count - REASONS} more")
    return f"no {role} instance takes requests ({'; '.join(reasons)})"


class _Weighing:
    """How much members would have to do if they got a request of this size, for what their memory holds. Among equals, the member
    that was chosen longest ago comes first."""

    def __init__(self, ask: Ask) -> None:
        self._prompt_tokens = ask.prompt_tokens
        self._held_tokens = ask.held_tokens

    def at_prefill(self, member: Member) -> tuple[float, int]:
        return (member.tokens_to_do + self._prompt_tokens) / member.capacity_tokens, member.chosen

    def at_decode(self, member: Member) -> tuple[bool, float, int]:
        """Those without room for it come last: it would wait there, or drive another out."""
        tokens = member.tokens_to_do + member.growth_tokens + self._held_tokens
        return member.tokens_free < self._held_tokens, tokens / member.capacity_tokens, member.chosen
