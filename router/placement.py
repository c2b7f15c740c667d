"""Placement: which instances serve a request, and whether it is taken at all. Nobody is told yet.

Owns the rules of who can serve a request (the policies rank those who can), and three rules about new ones: the choices of one
prompt go together; a request that would be too late goes where it is served soonest; if that is too late as well, it is refused.
Also owns the last few predictions of the first token's time, with what came. Does not know texts, clients, or why an attempt
follows another. A choice costs the same for ten instances and for a thousand.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from math import ceil
from statistics import median

from common.config import Dispatch, RouterConfig
from common.errors import BadRequest, Overloaded, TandemError, Unavailable
from common.ids import AttemptId, Digest, InstanceId, Life, Role, Variant, shard_of
from router.attempts import Attempt, Placement, Record
from router.cache_index import NO_OVERLAP
from router.cost import Demand, is_measured, pair_cost_s, single_estimate
from router.fleet import Members
from router.members import Member
from router.policies import CANDIDATES, POLICIES, Policy, cache_aware, soonest, ttft_s

REASONS = 4
"""How many instances in trouble a reason names."""
NO_LINK = "no prefill instance has a ready link to a decode instance"
REMEMBERED = 256
"""How many predictions are remembered."""


@dataclass(frozen=True, slots=True)
class PredictionErrors:
    """How good the latest predictions of the first token's time were."""

    requests: int
    median_s: float
    """Median of the error in seconds, whatever its sign."""
    median_share: float
    """Median of the error as a share of the real time."""


class Placer:
    """Places requests on members that can serve them, as its policies rank these, and makes their attempts.

    auto: a prefill instance and then a decode instance, when they are linked; a prefill instance alone for an answer of one
    token; a decode instance alone when no prefill instance can take the prompt or has a link, and one whose role is both where
    it costs less than the pair would. colocated: a decode instance alone, always. conditional: as auto, but all decode instances
    are taken as those whose role is both.
    """

    def __init__(self, router: InstanceId, detokenizers: Sequence[InstanceId], fleet: Members, config: RouterConfig) -> None:
        """detokenizers: their names, by number."""
        self._router, self._detokenizers = router, detokenizers
        self._fleet = fleet
        self._candidates = candidates = fleet.candidates
        self._dispatch = config.dispatch
        self._prefill = POLICIES[config.prefill_policy](candidates, "prefill")
        self._decode = POLICIES[config.decode_policy](candidates, "decode")
        self._single = cache_aware(candidates, "decode", drawn=2, deepest=2)  # in addition to the pair, so few
        self._rejects_early = config.early_rejection == "on"
        self.rejected = 0
        """Requests that were refused because they would have been too late."""
        self._predicted: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        """The latest predictions, each with what came."""

    # --- attempts --------------------------------------------------------------------------------------------------------

    def start(self, records: Sequence[Record], now: float) -> list[Attempt]:
        """The first attempts of all choices of a client's request, or none. Raises Overloaded, Unavailable, BadRequest."""
        for choose in (self.choose, partial(self.choose_soonest, now=now)):
            attempts = self._start(records, now, choose)
            refusal = self._refusal(records, attempts, now)
            if refusal is None:
                return attempts
            _release(attempts, now)
        self.rejected += len(records)
        assert refusal is not None
        raise refusal

    def restart(self, record: Record, now: float) -> Attempt:
        """The next attempt of a request. Raises Unavailable, BadRequest."""
        (attempt,) = self._start([record], now, self.choose)
        return attempt

    def _start(self, records: Sequence[Record], now: float, choose: Callable[[Demand], Placement]) -> list[Attempt]:
        attempts: list[Attempt] = []
        placements: dict[tuple[bytes, Digest], Placement] = {}
        page_size = self._fleet.caches.page_size
        try:
            for record in records:
                spec, variant = record.spec, Variant(self._fleet.weights.target, record.adapter)
                blocks = record.block_names(page_size, variant) if page_size else ()
                demand = Demand(
                    record.prompt_tokens,
                    record.remaining_tokens,
                    self._fleet.caches.match(blocks) if blocks and spec.can_share else NO_OVERLAP,
                    spec.session,
                    record.avoid | record.crowded,
                    spec.owner,
                    blocks,
                    record.adapter,
                )
                same = placements.get((spec.prompt, record.adapter))
                if same is not None and same.first.info.caches_prefixes and spec.can_share:
                    demand.overlap = demand.overlap.with_whole(same.first, demand.prompt_tokens)
                    placement = self._choose_again(same, demand)
                else:
                    placement = placements[spec.prompt, record.adapter] = choose(demand)
                key = AttemptId(spec.request_id, record.attempts, self._router)
                detokenizer = self._detokenizers[shard_of(key, len(self._detokenizers))]
                attempts.append(Attempt(record, key, detokenizer, demand, placement, self._fleet.weights.version, now))
        except TandemError:
            _release(attempts, now)
            raise
        return attempts

    def _refusal(self, records: Sequence[Record], attempts: Sequence[Attempt], now: float) -> Overloaded | None:
        """Why a client's request is refused here: the first token of a choice is predicted to come after its time limit. A wrong
        prediction must not keep everybody out: where nothing else is to be computed, a request is always taken."""
        if not self._rejects_early or not attempts[0].tokens_in_front:
            return None
        predicted = [
            (now - record.times.received_s + attempt.predicted_s, record.timeout_s)
            for record, attempt in zip(records, attempts, strict=True)
            if attempt.predicted_s is not None
        ]
        first_s, limit_s = max(predicted, key=lambda pair: pair[0] - pair[1], default=(0.0, 0.0))
        if first_s <= limit_s:
            return None
        when = f"its first token would come after about {first_s:.1f} s, and it may take {limit_s:g} s"
        return Overloaded(f"the request would be too late: {when}", retry_after_s=ceil(first_s - limit_s))

    # --- predictions -----------------------------------------------------------------------------------------------------

    def note_first_token(self, predicted_s: float | None, real_s: float) -> None:
        """A first token came so long after the arrival of its request. predicted_s: None if nothing was predicted."""
        if predicted_s is not None:
            self._predicted.append((predicted_s, real_s))

    def prediction_errors(self) -> PredictionErrors | None:
        """None: nothing was predicted yet."""
        if not self._predicted:
            return None
        errors = [(abs(predicted_s - real_s), real_s) for predicted_s, real_s in self._predicted]
        shares = (error_s / max(real_s, 1e-9) for error_s, real_s in errors)
        return PredictionErrors(len(errors), median(error_s for error_s, _ in errors), median(shares))

    # --- choices ---------------------------------------------------------------------------------------------------------

    def choose(self, demand: Demand) -> Placement:
        """The members to avoid are used only when no other, not even a decode instance alone, can serve the request.
        Raises Unavailable when nobody can serve it now, BadRequest when no instance's memory could ever hold it."""
        placement = self._find(demand, self._prefill, self._decode)
        if placement.decode is not None and is_measured(placement.first):
            single = self._best_single(self._single, demand)
            pair_s = pair_cost_s(placement.first, placement.decode, demand)
            if single is not None and single_estimate(single, demand).cost_s < pair_s:
                placement = Placement(single)
        return self._chose(placement)

    def choose_soonest(self, demand: Demand, now: float) -> Placement:
        """Where the first token is predicted to come soonest, of those that are compared. Raises as `choose`."""
        prefill, decode = soonest(self._candidates, "prefill", now), soonest(self._candidates, "decode", now)
        placement = self._find(demand, prefill, decode)
        if placement.decode is not None:
            single = self._best_single(decode, demand)
            if single is not None and ttft_s(single, demand, now) < ttft_s(placement.first, demand, now):
                placement = Placement(single)
        return self._chose(placement)

    def _choose_again(self, former: Placement, demand: Demand) -> Placement:
        """For another choice of a prompt that was just placed: the same, so that the prompt is computed and pushed once. If there
        is no room where that one decodes, another one takes over from the same prefill instance; or it is placed for itself."""
        server = former.decode or former.first
        if server.tokens_free >= demand.held_tokens:
            return self._chose(former)
        if former.decode is None:
            return self.choose(demand)
        holders = self._candidates.lines["decode"].holding(demand.most_tokens)
        decodes = self._successors(former.first, holders, demand, frozenset())
        return self._chose(Placement(former.first, decodes) if decodes else former)

    def _chose(self, placement: Placement) -> Placement:
        for member in (placement.first, *placement.decodes[:1]):
            self._candidates.chose(member)
        return placement

    def _find(self, demand: Demand, prefill: Policy, decode: Policy) -> Placement:
        """prefill: chooses among prefill instances. decode: among decode instances, for a request that one serves alone."""
        lines, alone = self._candidates.lines, demand.max_new_tokens == 1
        holders, able = lines["decode"].holding(demand.most_tokens), lines["prefill"].holding(demand.prompt_tokens)
        avoids = (demand.avoid,) if holders else (demand.avoid, frozenset())
        if self._dispatch == "colocated" or not (holders or alone):
            avoids = ()
        spared: Set[Life] = frozenset()
        if any(holder.life not in demand.avoid for holder in islice(holders, len(demand.avoid) + 1)):
            spared = demand.avoid
        for avoid in avoids:
            for group in prefill(able, partial(_suits, demand, avoid, None), demand, None):
                for first in group:
                    decodes = () if alone else self._successors(first, holders, demand, spared)
                    if alone or decodes:
                        return Placement(first, decodes)
        if not holders:
            raise _nobody_holds(self._fleet, self._dispatch, demand.prompt_tokens + demand.max_new_tokens)
        for group in decode(holders, partial(_suits, demand, spared, None), demand, None):
            return Placement(group[0])
        raise Unavailable("no instance that takes requests holds the adapter of the request")

    def _best_single(self, policy: Policy, demand: Demand) -> Member | None:
        """The decode instance that this policy prefers for a request that one serves alone, of those that get whole ones."""
        is_any = self._dispatch == "conditional"
        line = self._candidates.lines["decode"] if is_any else self._candidates.whole
        if not line:
            return None

        def suits(member: Member) -> bool:
            return (is_any or member.serves_whole) and _suits(demand, demand.avoid, None, member)

        group = next(policy(line.holding(demand.most_tokens), suits, demand, None), None)
        return None if group is None else group[0]

    def _successors(self, first: Member, holders: Sequence[Member], demand: Demand, spared: Set[Life]) -> tuple[Member, ...]:
        """The decode instances that can take over from this prefill instance, best first."""
        pool = holders if len(holders) < len(first.usable) else first.usable
        group = next(self._decode(pool, partial(_suits, demand, spared, first), demand, first), ())
        return tuple(group[:CANDIDATES])

    # --- reasons ---------------------------------------------------------------------------------------------------------

    def unready(self) -> list[str]:
        """Why a request that comes now would be refused; empty when it would be served, or wait until the fleet's weights have
        changed."""
        weights = self._fleet.weights
        if (weights.is_held or weights.is_settling) and any(not member.draining for member in self._fleet.members("decode")):
            return []
        try:
            self._probe()
        except (Unavailable, BadRequest) as error:
            return [str(error)]
        return []

    def degraded(self) -> list[str]:
        """Why requests are served by a part of the instances only, or wait; empty when all is well."""
        reasons: list[str] = []
        disaggregated = self._dispatch != "colocated"
        try:
            placement = self._probe()
        except (Unavailable, BadRequest) as error:
            reasons += [] if self.unready() else [f"requests wait: {error}"]
        else:
            if self._fleet.weights.is_held:
                reasons.append("requests wait: the fleet is paused, or its weights change")
            if disaggregated and placement.decode is None and self._candidates.lines["prefill"]:
                reasons.append(NO_LINK)
        wanted = disaggregated and any(not member.draining for member in self._fleet.members("prefill"))
        trouble = _all_in_trouble(self._fleet, "prefill") if wanted else None
        return reasons if trouble is None else [*reasons, trouble]

    def _probe(self) -> Placement:
        """Where a short request would go. Raises Unavailable, BadRequest."""
        return self._find(Demand(prompt_tokens=1, max_new_tokens=2), self._prefill, self._decode)


def _release(attempts: Iterable[Attempt], now: float) -> None:
    for attempt in attempts:
        attempt.release(now)


def _suits(demand: Demand, avoid: Set[Life], source: Member | None, member: Member) -> bool:
    """Whether this member takes requests, has the adapter of this one, has memory for it when it is empty, and has the links that
    are needed: to source, or from a prefill instance to anybody."""
    if member.trouble is not None or member.life in avoid or (demand.adapter and demand.adapter not in member.adapters):
        return False
    if member.info.role == "decode":
        return member.capacity_tokens >= demand.most_tokens and (source is None or member in source.usable)
    return member.capacity_tokens >= demand.prompt_tokens and (demand.max_new_tokens == 1 or len(member.usable) > 0)


def _nobody_holds(fleet: Members, dispatch: Dispatch, tokens: int) -> Unavailable | BadRequest:
    """No decode instance that takes requests has so much memory."""
    line = fleet.candidates.lines["decode"]
    if not line:
        nobody = (
            "no decode instance is live"
            if dispatch != "colocated" and fleet.candidates.lines["prefill"]
            else "no instance is live"
        )
        return Unavailable(_all_in_trouble(fleet, "decode") or nobody)
    for member in fleet.members("decode"):
        if member.trouble is not None and not member.draining and member.capacity_tokens >= tokens:
            who = f"{member.info.id} is {member.trouble.state}: {member.trouble.reason}"
            return Unavailable(f"an instance that holds {tokens} tokens takes no requests: {who}")
    return BadRequest(
        f"prompt and max_tokens need {tokens} tokens of KV memory, but the largest decode instance "
        f"holds {line[-1].capacity_tokens}: shorten the prompt or lower max_tokens",
        field="max_tokens",
    )


def _all_in_trouble(fleet: Members, role: Role) -> str | None:
    """Why no instance of this role takes requests; None when one does, or when there are none. Names those that drain last."""
    members = list(fleet.members(role))
    if fleet.candidates.lines[role] or not members:
        return None
    staying, leaving = (member for member in members if not member.draining), (member for member in members if member.draining)
    named = [(member.info.id, member.trouble) for member in islice(chain(staying, leaving), REASONS)]
    reasons = [f"{name} is {trouble.state}: {trouble.reason}" for name, trouble in named if trouble is not None]
    if len(members) > REASONS:
        reasons.append(f"and {len(members) - REASONS} more")
    return f"no {role} instance takes requests ({'; '.join(reasons)})"
