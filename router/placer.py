"""The placer: which instances serve a request.

Owns the rules of who can serve it; the policies rank those who can. Knows only what a request asks for. Does not know messages or
time. A choice costs the same for ten instances and for a thousand.
"""

from collections.abc import Set
from dataclasses import dataclass
from itertools import chain, islice

from common.config import Dispatch, RouterConfig
from common.errors import BadRequest, Unavailable
from common.ids import Life, Role
from router.candidates import Candidates
from router.cost import Ask, alone, apart, is_measured
from router.members import Member
from router.policies import CANDIDATES, CacheAware, Policy, Soonest, Suits, make_policy

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


class Placer:
    """Places requests on members that can serve them, as its policies rank these.

    auto: a prefill instance and then a decode instance, when they are linked; a prefill instance alone for an answer of one
    token; a decode instance alone when no prefill instance can take the prompt or has a link. colocated: a decode instance alone,
    always. conditional: as auto, but a decode instance alone also where one costs less than the pair would.
    """

    def __init__(self, candidates: Candidates, config: RouterConfig) -> None:
        self._candidates = candidates
        self._dispatch = config.dispatch
        self._prefill = make_policy(config.prefill_policy, candidates, "prefill")
        self._decode = make_policy(config.decode_policy, candidates, "decode")
        self._alone = CacheAware(candidates, "decode", random=2, deepest=2)  # in addition to the pair, so few

    def choose(self, ask: Ask) -> Placement:
        """The members to avoid are used only when no other, not even a decode instance alone, can serve the request.
        Raises Unavailable when nobody can serve it now, BadRequest when no instance's memory could ever hold it."""
        placement = self._find(ask, self._prefill, self._decode)
        if self._dispatch == "conditional":
            placement = self._or_alone(placement, ask)
        return self._chose(placement)

    def soonest(self, ask: Ask, now: float) -> Placement:
        """Where the first token is predicted to come soonest, of those that are compared. Raises as `choose`."""
        soonest = Soonest(self._candidates, now)
        placement = self._find(ask, soonest, soonest)
        if self._dispatch == "conditional" and placement.decode is not None:
            holders = self._candidates.able("decode", ask.most_tokens)
            group = next(soonest.groups(holders, _able(ask.most_tokens, ask.avoid), ask, None), ())
            if group and soonest.ttft_s(group[0], ask) < soonest.ttft_s(placement.first, ask):
                placement = Placement(group[0])
        return self._chose(placement)

    def beside(self, former: Placement, ask: Ask) -> Placement:
        """For another choice of a prompt that was just placed: the same, so that the prompt is computed and pushed once. If there
        is no room where that one decodes, another one takes over from the same prefill instance; or it is placed for itself."""
        server = former.decode or former.first
        if server.tokens_free >= ask.held_tokens:
            return self._chose(former)
        if former.decode is None:
            return self.choose(ask)
        decodes = self._takers(former.first, self._candidates.able("decode", ask.most_tokens), ask, frozenset())
        return self._chose(Placement(former.first, decodes) if decodes else former)

    def _chose(self, placement: Placement) -> Placement:
        for member in (placement.first, *placement.decodes[:1]):
            self._candidates.chose(member)
            (self._prefill if member.info.role == "prefill" else self._decode).chose(member)
        return placement

    def unready(self) -> list[str]:
        """Why the fleet could not serve a request now, or only with a part of its instances; empty when all is well."""
        candidates, disaggregated = self._candidates, self._dispatch != "colocated"
        reasons: list[str] = []
        try:
            placement = self._find(Ask(prompt_tokens=1, max_new_tokens=2), self._prefill, self._decode)
        except (Unavailable, BadRequest) as error:
            reasons.append(str(error))
        else:
            if disaggregated and placement.decode is None and candidates.line("prefill"):
                reasons.append(NO_LINK)
        wanted = disaggregated and candidates.ailing("prefill")
        trouble = _all_in_trouble(candidates, "prefill") if wanted else None
        return reasons if trouble is None else [*reasons, trouble]

    def _find(self, ask: Ask, prefill: Policy, decode: Policy) -> Placement:
        """prefill: chooses among prefill instances. decode: among decode instances, for a request that one serves alone."""
        candidates = self._candidates
        able = [] if self._dispatch == "colocated" else candidates.able("prefill", ask.prompt_tokens)
        holders = candidates.able("decode", ask.most_tokens)
        if ask.max_new_tokens == 1:
            one = _best(prefill, able, ask.prompt_tokens, ask, ask.avoid)
            if one is None and not holders:
                one = _best(prefill, able, ask.prompt_tokens, ask, frozenset())
            if one is not None:
                return Placement(one)
        if not holders:
            raise _nobody_holds(candidates, self._dispatch, ask.prompt_tokens + ask.max_new_tokens)
        spared: Set[Life] = frozenset()
        if any(holder.life not in ask.avoid for holder in islice(holders, len(ask.avoid) + 1)):
            spared = ask.avoid
        pair = self._pair(able, holders, ask, spared, prefill)
        if pair is not None:
            return pair
        return Placement(next(decode.groups(holders, _able(ask.most_tokens, spared), ask, None))[0])

    def _or_alone(self, pair: Placement, ask: Ask) -> Placement:
        """A decode instance alone, if one costs less than this pair. Nobody knows as long as nobody has measured its pace."""
        if pair.decode is None or not is_measured(pair.first):
            return pair
        holders = self._candidates.able("decode", ask.most_tokens)
        group = next(self._alone.groups(holders, _able(ask.most_tokens, ask.avoid), ask, None), ())
        if group and alone(group[0], ask).cost_s < apart(pair.first, pair.decode, ask).cost_s:
            return Placement(group[0])
        return pair

    def _pair(self, able: list[Member], holders: list[Member], ask: Ask, spared: Set[Life], prefill: Policy) -> Placement | None:
        """A prefill instance, and decode instances that can take over from it."""
        prompt_tokens, avoid = ask.prompt_tokens, ask.avoid

        def starts(member: Member) -> bool:
            fits = member.capacity_tokens >= prompt_tokens and member.trouble is None
            return fits and member.life not in avoid and len(member.usable) > 0

        for group in prefill.groups(able, starts, ask, None):
            for first in group:
                decodes = self._takers(first, holders, ask, spared)
                if decodes:
                    return Placement(first, decodes)
        return None

    def _takers(self, first: Member, holders: list[Member], ask: Ask, spared: Set[Life]) -> tuple[Member, ...]:
        """The decode instances that can take over from this prefill instance, best first."""
        usable, most_tokens = first.usable, ask.most_tokens

        def takes_over(member: Member) -> bool:
            fits = member.capacity_tokens >= most_tokens and member.trouble is None
            return fits and member in usable and member.life not in spared

        pool = holders if len(holders) < len(usable) else usable
        return tuple(next(self._decode.groups(pool, takes_over, ask, first), ())[:CANDIDATES])


def _best(policy: Policy, pool: list[Member], tokens: int, ask: Ask, avoid: Set[Life]) -> Member | None:
    return next((group[0] for group in policy.groups(pool, _able(tokens, avoid), ask, None)), None)


def _able(tokens: int, avoid: Set[Life]) -> Suits:
    """Those that take requests, with memory for so many tokens when it is empty."""
    return lambda member: member.capacity_tokens >= tokens and member.trouble is None and member.life not in avoid


def _nobody_holds(candidates: Candidates, dispatch: Dispatch, tokens: int) -> Unavailable | BadRequest:
    """No decode instance that takes requests has so much memory."""
    line = candidates.line("decode")
    if not line:
        nobody = "no decode instance is live" if dispatch != "colocated" and candidates.line("prefill") else "no instance is live"
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
