"""A member of the fleet: what an instance must be to join, and the lines in which members stand to be chosen.

A member is one life of an instance, as it last reported itself. This file owns the rules for joining, the rule by which a member
gets requests, the order of those that take requests, and the random draw: a choice costs the same for ten members and for a
thousand. Does not know requests: a member only carries the number of tokens that the request book has assigned to it. The numbers
of a description from the wire are in range, but need not fit each other, so no rule for joining may raise.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from random import Random
from typing import Literal

import msgspec

from common.addresses import INSTANCE_NAME, check_address, check_instance_id
from common.errors import ConfigError, Conflict, TransferError
from common.ids import AttemptId, Digest, InstanceId, Life, Role, ServingRole
from common.instance.ports import Send
from common.messages import WIRE_VERSION, Counters, Heartbeat, InstanceInfo, LinkState, Load, Register, since
from common.pages.layout import heads_of

# --- joining -----------------------------------------------------------------------------------------------------------------

ADVICE = {
    "context": ": give every instance the same --context-tokens",
    "--verify-pages": ": give every instance the same one; it must be off where an instance has several ranks (--tp)",
    "--grammar": ": give every instance the same",
}
"""What to do about a property that differs."""
MAX_WIRE_BYTES = 2**20
"""Limit on the transport's descriptors of an instance, over its pools. One Peers message holds those of all peers and must fit a
frame."""


def malformed(info: InstanceInfo) -> str | None:
    """Why this instance could not be a member of any fleet; None when it could."""
    try:
        check_instance_id(info.id)
        check_address(info.inbox)
    except ConfigError as error:
        return str(error)
    if INSTANCE_NAME.fullmatch(info.incarnation) is None:
        return "its incarnation must be 1 to 64 letters, digits, '.', '_' or '-'"
    if abs(info.wire_version - WIRE_VERSION) > 1:
        return f"wire version {info.wire_version} is not a neighbour of the router's {WIRE_VERSION}"
    if len(info.ranks) != len(info.pools):
        return f"it has {len(info.ranks)} ranks and {len(info.pools)} pools: each rank must have one"
    wire_bytes = sum(len(pool.wire) for pool in info.pools)
    if wire_bytes > MAX_WIRE_BYTES:
        return f"the transport descriptors of its pools have {wire_bytes} bytes, more than {MAX_WIRE_BYTES}"
    wrong = (_malformed_pool(info, rank) for rank in range(len(info.pools)))
    return next((reason for reason in wrong if reason is not None), None)


def _malformed_pool(info: InstanceInfo, rank: int) -> str | None:
    """What is wrong with the pool of this rank, on its own or behind those before it."""
    pool, first = info.pools[rank], info.pools[0]
    if not pool.is_addressable:
        return f"its pool of {pool.pool_bytes} bytes at address {pool.address} is not within 64-bit addresses"
    if not pool.has_known_device:
        return f"its pool's device must be cpu or cuda:N, is {pool.device[:80]!r}"
    if pool.total_pages != first.total_pages:
        return f"its ranks must have equally many pages: rank 0 has {first.total_pages}, rank {rank} has {pool.total_pages}"
    if pool.backend != first.backend:
        return f"its ranks must have one transport: rank 0 has {first.backend[:80]!r}, rank {rank} has {pool.backend[:80]!r}"
    if pool.layout != first.layout:
        return f"its ranks must have one KV layout: rank 0 has {first.layout}, rank {rank} has {pool.layout}"
    try:
        must = heads_of(rank, len(info.pools), _kv_heads(info))
    except TransferError as error:
        return f"its {error}"
    if range(pool.first_head, pool.first_head + pool.layout.kv_heads) != must:
        held = f"{pool.layout.kv_heads} from {pool.first_head} on"
        return f"its rank {rank} must hold {len(must)} KV heads from {must.start} on, holds {held}"
    return None


def _kv_heads(info: InstanceInfo) -> int:
    """KV heads of the whole model."""
    return info.model.kv_heads or info.pools[0].layout.kv_heads


def likeness(info: InstanceInfo, *, by_config: bool = True) -> tuple[tuple[str, Hashable], ...]:
    """The properties that must be equal in all members of a fleet, with their names. by_config: not by a fingerprint of weights,
    because they may change."""
    model, pool = info.model, info.pools[0]
    layout = pool.layout
    return (
        ("model config", model.config) if by_config and model.config else ("model fingerprint", model.fingerprint),
        ("architecture", model.architecture),
        ("dtype", model.dtype),
        ("vocabulary", model.vocab_size),
        ("context", model.context_tokens),
        ("page size", layout.page_size),
        ("KV dtype", layout.dtype),
        ("page order", layout.order),
        ("layout version", layout.version),
        ("KV layout", (layout.layers, _kv_heads(info), layout.head_dim)),
        ("transport", pool.backend),
        ("--verify-pages", "on" if info.verifies_pages else "off"),
        ("--grammar", "on" if info.holds_grammars else "off"),
    )


def difference(info: InstanceInfo, member: InstanceInfo) -> str | None:
    """The first property that must match a member's and does not, with both values; None when all match."""
    by_config = bool(info.model.config and member.model.config)  # older versions do not say
    pairs = zip(likeness(info, by_config=by_config), likeness(member, by_config=by_config), strict=True)
    for (name, asked), (_, expected) in pairs:
        if asked != expected:
            return f"its {name} is {asked}, but that of {member.id} in this fleet is {expected}{ADVICE.get(name, '')}"
    return None


# --- members and their lines -------------------------------------------------------------------------------------------------

QUARANTINE_DIVISOR = 4
"""An instance takes no requests while more than one page in four is quarantined: transfers fail there, and little memory is
left."""
STUCK_S = 30.0
"""A step or transfer that has not moved for longer is taken to be stuck."""

HEARD_SHARE = 1 / 32
"""How much one report moves the mean pace of its role."""


State = Literal["live", "draining", "changing", "stuck", "quarantined", "updating"]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a member takes no requests."""

    state: State
    reason: str


class RoleTotals(msgspec.Struct):
    """What members of one role have done while this router knew them. It never falls, whoever comes and goes."""

    requests: int = 0
    """Requests taken in; on decode, those that are handed over count when they have got room."""
    requests_ended: int = 0
    """Requests that ended there, however."""
    prompt_tokens: int = 0
    """Prompt tokens that were computed."""
    answer_tokens: int = 0
    """Answer tokens that were made."""


@dataclass(slots=True, eq=False)
class RolePace:
    """Seconds of a step, and what each prompt token, each decode row and each token that it holds adds: the mean of what members
    of one role have reported lately, and what they have done in all. 0: nobody has measured it."""

    step_s: float = 0.0
    chunk_token_s: float = 0.0
    decode_row_s: float = 0.0
    held_token_s: float = 0.0
    totals: RoleTotals = field(default_factory=RoleTotals)

    def count(self, before: Counters, now: Counters) -> None:
        """A member has got so far since its last report."""
        self.totals.requests += max(0, now.requests_accepted - before.requests_accepted)
        self.totals.requests_ended += max(0, now.requests_ended - before.requests_ended)
        self.totals.prompt_tokens += max(0, now.prompt_tokens_computed - before.prompt_tokens_computed)
        self.totals.answer_tokens += max(0, now.tokens_generated - before.tokens_generated)

    def hear(self, load: Load) -> None:
        """Take in one more report, as far as it tells something."""
        if load.step_s or load.decode_row_s:
            share = HEARD_SHARE if self.step_s or self.decode_row_s else 1.0
            self.step_s += (load.step_s - self.step_s) * share
            self.decode_row_s += (load.decode_row_s - self.decode_row_s) * share
            self.held_token_s += (load.held_token_s - self.held_token_s) * share
        if load.chunk_token_s:
            share = HEARD_SHARE if self.chunk_token_s else 1.0
            self.chunk_token_s += (load.chunk_token_s - self.chunk_token_s) * share


@dataclass(slots=True, eq=False)
class Member:
    """One life of an instance in the fleet."""

    info: InstanceInfo
    load: Load
    counters: Counters = field(default_factory=Counters)
    reported_s: float = 0.0
    """When it last reported."""
    was_welcome: bool = False
    """A life of the router had welcomed it before it joined."""
    answer_due_s: float = 0.0
    """Heartbeats before then are not answered."""
    excused: bool = False
    """The router was held up when this member was due, and has given it more time since it was last heard."""
    told_to_drain: bool = False
    """This router has told it to leave."""
    reports_draining: bool = False
    """The member says that it leaves, for good or for another role."""
    told_role: ServingRole | None = None
    """This router has told it to serve in another role, for which it must leave its own; `router.tasks` keeps this."""
    serves_whole: bool = False
    """A decode instance that gets whole requests too."""
    weights: Digest = Digest("")
    """What it computes with, as it last said; "": it does not say."""
    weight_version: str = ""
    """What people call them."""
    weight_changes: int = 0
    """How often it had changed them by then."""
    staged_update: int = 0
    """See `Heartbeat`."""
    is_holding: bool = False
    """It says that it launches no step."""
    adapters: frozenset[Digest] = frozenset()
    """The LoRA adapters that requests can have there. `router.adapters` keeps this and the next four."""
    adapters_leaving: Sequence[Digest] = ()
    """Those that still take a place there."""
    adapters_version: int = 0
    """The version of its last AdaptersHeld."""
    adapters_number: int = 0
    """The last SetAdapters that it has heard."""
    adapters_failed: Mapping[Digest, str] = field(default_factory=dict)
    """Why it cannot hold an adapter."""
    misfit: str = ""
    """Why its weights keep requests from it; `router.weights` keeps this. "": they do not."""

    pace: RolePace = field(default_factory=RolePace)
    """The mean of its role, for what it has not measured itself."""
    other_pace: RolePace = field(default_factory=RolePace)
    """The mean of the other role."""

    partners: dict[InstanceId, "Member"] = field(default_factory=dict)
    """The members of the other role that it works with. `router.peering` keeps this and the next three."""
    links: dict[InstanceId, LinkState] = field(default_factory=dict)
    """The state of the link to each partner, as a prefill member has reported it."""
    speeds: dict[InstanceId, float] = field(default_factory=dict)
    """Bytes per second of the links that it has measured."""
    usable: "Line" = field(default_factory=lambda: Line())
    """The partners to which the requests of a prefill member can go: the link is ready, and the partner knows of it."""

    assigned_tokens: int = 0
    """Tokens of this router's open requests on which the member works or will. The attempts keep all that follows."""
    assigned_before: int = 0
    """As many were assigned when it last reported."""
    assigned_requests: int = 0
    requests_before: int = 0
    """As many requests were assigned when it last reported."""
    requests_of: Counter[str] = field(default_factory=Counter)
    """How many of the assigned requests each owner has."""
    growth_tokens: int = 0
    """By how many tokens the assigned requests are expected to grow here."""
    computing: dict[AttemptId, None] = field(default_factory=dict)
    """The attempts whose prompts it still is to compute for this router, in the order in which it got them."""
    computing_tokens: int = 0
    """Tokens of these prompts."""
    computing_before: int = 0
    """As many were to be computed when it last reported."""
    computes_since_s: float = 0.0
    """Since when it computes the first of them, as far as this router knows: then it was given one while it had none, or another
    one was computed or given up."""
    prompts_of: Counter[str] = field(default_factory=Counter)
    """How many of the tokens that are to be computed each owner has."""
    chosen: int = 0
    """Number of the last choice of this member. Among equally loaded members, the one with the lowest number is next."""

    life: Life = field(init=False)
    page_size: int = field(init=False)
    capacity_tokens: int = field(init=False)
    """How many tokens of KV fit its memory when it is empty."""
    order: tuple[int, str] = field(init=False)
    """Its place in a line."""
    trouble: Trouble | None = field(init=False)
    """Why it takes no requests; None when it takes them."""
    stuck: bool = field(init=False)
    told_state: State = "live"
    """The state that people were told of."""
    """It reports, but a step or transfer in it does not move: it will not serve what it was given."""

    def __post_init__(self) -> None:
        self.life = Life(self.info.id, self.info.incarnation)
        self.page_size = self.info.page_size
        self.capacity_tokens = self.info.total_pages * self.page_size
        self.order = self.capacity_tokens, self.info.id
        self.judge()

    @property
    def draining(self) -> bool:
        return self.told_to_drain or self.reports_draining

    @property
    def role(self) -> ServingRole:
        """As people call it."""
        return "both" if self.serves_whole else self.info.role

    @property
    def tokens_to_do(self) -> int:
        """What it reported, which counts the requests of all routers, and what this router has assigned since or taken off. At
        least what this router has assigned: a decode instance does not know of what its writers have not reached yet."""
        reported = self.load.waiting_tokens + self.load.running_tokens
        return max(reported + self.assigned_tokens - self.assigned_before, self.assigned_tokens)

    @property
    def tokens_to_compute(self) -> int:
        """Prompt tokens in front of a new request, counted as `tokens_to_do`."""
        return max(self.load.tokens_to_compute + self.computing_tokens - self.computing_before, self.computing_tokens)

    def tokens_in_front(self, owner: str, tokens: int) -> int:
        """How many of `tokens_to_compute` come before the end of a new prompt of this owner that has so many tokens. Forwards are
        shared: until then each other owner gets no more than this one. What other routers have assigned counts as another
        owner's, unless there are no keys."""
        if not owner:
            return self.tokens_to_compute
        mine = self.prompts_of[owner]
        others = [count for other, count in self.prompts_of.items() if other != owner]
        return mine + sum(min(each, mine + tokens) for each in (*others, self.tokens_to_compute - self.computing_tokens))

    def has_part_for(self, owner: str, tokens: int) -> bool:
        """Whether this owner holds less than an equal part of the rows and the memory, with one more request of so many tokens:
        then it need not wait for room. Its others are taken to be as long. What other routers have assigned is as above."""
        if not owner:
            return False
        requests = self.requests_of[owner] + 1
        owners = len(self.requests_of.keys() | {owner}) + (self.requests_to_do > self.assigned_requests)
        return requests * owners <= self.info.max_running and requests * tokens * owners <= self.capacity_tokens

    @property
    def requests_to_do(self) -> int:
        """Those that wait or run there, counted as `tokens_to_do`."""
        reported = self.load.waiting_requests + self.load.running_requests
        return max(reported + self.assigned_requests - self.requests_before, self.assigned_requests)

    @property
    def tokens_free(self) -> int:
        """How many tokens of its memory nobody needs, if the assigned requests grow as expected. Less than 0 when it has too much
        to do."""
        free = self.load.pages_free * self.page_size - (self.assigned_tokens - self.assigned_before)
        return min(free, self.capacity_tokens - self.assigned_tokens) - self.growth_tokens

    def computed_s(self, now: float) -> float:
        """For how long it has computed what `tokens_to_compute` counts. What a report counts was there when it came."""
        counts_reported = self.load.tokens_to_compute > self.computing_before
        return now - (max(self.computes_since_s, self.reported_s) if counts_reported else self.computes_since_s)

    def assign(self, owner: str, tokens: int, requests: int = 1) -> None:
        """A request of this owner comes, with so many tokens. Both are negative when one goes."""
        self.assigned_tokens += tokens
        self.assigned_requests += requests
        self.requests_of[owner] += requests
        if not self.requests_of[owner]:
            del self.requests_of[owner]

    def compute(self, key: AttemptId, owner: str, tokens: int) -> None:
        """It is to compute so many tokens of this attempt's prompt."""
        self.computing[key] = None
        self.computing_tokens += tokens
        self.prompts_of[owner] += tokens

    def computed(self, key: AttemptId, owner: str, tokens: int, now: float) -> None:
        """These tokens are not to be computed any more."""
        if next(iter(self.computing)) == key:
            self.computes_since_s = now
        del self.computing[key]
        self.computing_tokens -= tokens
        self.prompts_of[owner] -= tokens
        if not self.prompts_of[owner]:
            del self.prompts_of[owner]

    def take_report(self, report: Heartbeat, now: float) -> None:
        if self.reported_s:  # a router that has just started does not count what was done before
            self.pace.count(self.counters, report.counters)
        self.reported_s = now
        self.load, self.counters, self.reports_draining = report.load, report.counters, report.draining
        self.is_holding, self.staged_update = report.holding, report.staged_update
        self.serves_whole = report.serves_whole
        self.take_weights(report)
        self.assigned_before, self.computing_before = self.assigned_tokens, self.computing_tokens
        self.requests_before = self.assigned_requests
        self.pace.hear(report.load)
        self.judge()

    def take_weights(self, report: Heartbeat | Register) -> None:
        """Unless a later report has come before."""
        if report.weight_changes >= self.weight_changes:
            self.weights, self.weight_version = report.weights, report.weight_version
            self.weight_changes = report.weight_changes

    @property
    def state(self) -> State:
        return "live" if self.trouble is None else self.trouble.state

    def drain(self) -> None:
        """Give it no more requests."""
        self.told_to_drain = True
        self.judge()

    def check_knows(self, order: msgspec.Struct) -> None:
        """Whether its release knows this message, or this part of one. Raises Conflict."""
        has, needs = self.info.wire_version, since(order)
        if has < needs:
            what = f"{self.info.id} has wire version {has}, and {type(order).__name__} came with {needs}"
            raise Conflict(f"{what}: give that instance a newer release first")

    def why_keep(self) -> list[str]:
        """Why it must not be deleted yet, by its last report, which tells of the requests of all routers. One that drains takes
        nothing new, so what has become 0 stays 0; pages come home only when nothing can read or write them any more."""
        load = self.load
        counts = {
            "requests wait there": load.waiting_requests,
            "requests run there": load.running_requests,
            "reservations wait for their handoff": load.reservations,
            "pushes are in flight": load.pushes_in_flight,
            "pages are in use": load.pages_in_use,
            "requests of this router are assigned to it": self.assigned_requests,
        }
        reasons = [] if self.reports_draining else [f"it does not drain: POST /cluster/{self.info.id}/drain"]
        return reasons + [f"{count} {what}" for what, count in counts.items() if count]

    def judge(self) -> None:
        """Derive what every placement asks from what was last reported."""
        load, total_pages = self.load, self.info.total_pages
        self.stuck = load.oldest_step_s > STUCK_S or load.oldest_transfer_s > STUCK_S
        self.trouble = None
        if self.told_role is not None:
            self.trouble = Trouble("changing", f"it takes the role {self.told_role}")
        elif self.draining:
            self.trouble = Trouble("draining", "it is leaving the fleet")
        elif self.stuck:
            what, seconds = max(("step", load.oldest_step_s), ("transfer", load.oldest_transfer_s), key=lambda age: age[1])
            self.trouble = Trouble("stuck", f"its oldest {what} has not moved for {seconds:.0f} s")
        elif load.pages_quarantined * QUARANTINE_DIVISOR > total_pages:
            self.trouble = Trouble("quarantined", f"{load.pages_quarantined} of {total_pages} pages are quarantined")
        elif self.misfit:
            self.trouble = Trouble("updating", self.misfit)


@dataclass(slots=True, eq=False)
class Lag:
    """Since when a member's heartbeats show that a report of it is missing here."""

    since_s: float | None = None
    """None: nothing is missing."""

    def is_overdue(self, is_missing: bool, now: float, patience_s: float) -> bool:
        """Whether to ask the member for its report now. patience_s: a missing report may be under way for so long."""
        if not is_missing:
            self.since_s = None
            return False
        if self.since_s is None:
            self.since_s = now
        if now - self.since_s < patience_s:
            return False
        self.since_s = now
        return True


@dataclass(slots=True)
class Change:
    """What followed from a message, an order or a deadline."""

    sends: list[Send] = field(default_factory=list)
    lost: list[Member] = field(default_factory=list)
    """Members that left or got stuck: they no longer serve their requests."""
    more_can_serve: bool = False
    """A member takes requests or has a link that it did not have before, or requests may be placed again."""
    aborts: bool = False
    """Every request that was dispatched ends."""

    def take(self, other: "Change") -> "Change":
        """The other follows too."""
        self.sends += other.sends
        self.lost += other.lost
        self.more_can_serve = self.more_can_serve or other.more_can_serve
        self.aborts = self.aborts or other.aborts
        return self


_order = attrgetter("order")
_capacity = attrgetter("capacity_tokens")


class Line(list[Member]):
    """Members in the order of their memory and names, those with the least memory first. Changed by `add` and `discard` only."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[Member] = set()
        self.changes = 0
        """How often a member came or went."""

    def __contains__(self, member: object) -> bool:
        return member in self._known

    def add(self, member: Member) -> None:
        """Idempotent."""
        if member not in self._known:
            self._known.add(member)
            insort(self, member, key=_order)
            self.changes += 1

    def discard(self, member: Member) -> None:
        """Idempotent."""
        if member in self._known:
            self._known.remove(member)
            del self[bisect_left(self, member.order, key=_order)]
            self.changes += 1

    def holding(self, tokens: int) -> Sequence[Member]:
        """Those whose memory holds so many tokens when it is empty."""
        first = bisect_left(self, tokens, key=_capacity)
        return self[first:] if first else self

    def after(self, last: Member | None) -> Iterator[Member]:
        """All of them, each once, from the one behind this member on. None: from the first."""
        first = 0 if last is None else bisect_right(self, last.order, key=_order)
        return (self[number % len(self)] for number in range(first, first + len(self)))


class Candidates:
    """The members of each role that take requests."""

    def __init__(self, random: Random) -> None:
        self._random = random
        """The same seed and the same members in the same order make the same draws."""
        self.lines: dict[Role, Line] = {"prefill": Line(), "decode": Line()}
        self.latest: dict[Role, Member] = {}
        """The last choice among the members of each role."""
        self.whole = Line()
        """The decode members that get whole requests too."""
        self._choices = 0

    def judge(self, member: Member) -> None:
        """A member has joined, or its trouble may have changed."""
        line = self.lines[member.info.role]
        (line.add if member.trouble is None else line.discard)(member)
        (self.whole.add if member.trouble is None and member.serves_whole else self.whole.discard)(member)

    def leave(self, member: Member) -> None:
        """A member has left. Idempotent."""
        self.lines[member.info.role].discard(member)
        self.whole.discard(member)

    def chose(self, member: Member) -> None:
        """A request goes to this member."""
        self._choices += 1
        member.chosen = self._choices
        self.latest[member.info.role] = member

    def some(self, members: Sequence[Member], most: int) -> list[Member]:
        """Random ones, in random order; all of them, if there are no more than so many."""
        count, random = len(members), self._random.random
        if count < 2 * most:
            return [members[number] for number in self._random.sample(range(count), min(most, count))]
        numbers: dict[int, None] = {}  # `sample` takes three times as long
        while len(numbers) < most:
            numbers[int(random() * count)] = None
        return [members[number] for number in numbers]
