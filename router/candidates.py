"""Candidates: the members by role, so arranged that a choice costs the same for ten of them and for a thousand.

Owns the order and the draw. The fleet says who joins, who leaves, and who may have got into trouble or out of it. Does not know
requests, loads or links.

    line    │ small memory ──────────────► large memory │      who take requests; those that hold a given one are its end
    ailing  │ they stay in the fleet, but take no requests for now
    leaving │ they drain

Eligibility: what an instance must be to join the fleet, on its own and compared with a member.

Owns the rules and the reasons. Pure functions. Does not know who is a member. The numbers of a description from the wire are
in range, but need not fit each other, so nothing here may raise.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterator, Set
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from common.addresses import INSTANCE_NAME, check_address, check_instance_id
from common.errors import ConfigError, TransferError
from common.ids import Role
from common.messages import WIRE_VERSION, InstanceInfo, PoolDescriptor
from common.pages.layout import heads_of
from router.members import Member

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
    return _malformed_pools(info)


def _malformed_pools(info: InstanceInfo) -> str | None:
    if len(info.ranks) != len(info.pools):
        return f"it has {len(info.ranks)} ranks and {len(info.pools)} pools: each rank must have one"
    wire_bytes = sum(len(pool.wire) for pool in info.pools)
    if wire_bytes > MAX_WIRE_BYTES:
        return f"the transport descriptors of its pools have {wire_bytes} bytes, more than {MAX_WIRE_BYTES}"
    wrong = (_malformed_pool(pool) or _misfit(info, rank) for rank, pool in enumerate(info.pools))
    return next((reason for reason in wrong if reason is not None), None)


def _misfit(info: InstanceInfo, rank: int) -> str | None:
    """Why the pool of this rank does not fit those before it."""
    pool, first, ranks = info.pools[rank], info.pools[0], len(info.pools)
    if pool.total_pages != first.total_pages:
        return f"its ranks must have equally many pages: rank 0 has {first.total_pages}, rank {rank} has {pool.total_pages}"
    if pool.backend != first.backend:
        return f"its ranks must have one transport: rank 0 has {first.backend[:80]!r}, rank {rank} has {pool.backend[:80]!r}"
    if pool.layout != first.layout:
        return f"its ranks must have one KV layout: rank 0 has {first.layout}, rank {rank} has {pool.layout}"
    try:
        must = heads_of(rank, ranks, _kv_heads(info))
    except TransferError as error:
        return f"its {error}"
    if range(pool.first_head, pool.first_head + pool.layout.kv_heads) != must:
        held = f"{pool.layout.kv_heads} from {pool.first_head} on"
        return f"its rank {rank} must hold {len(must)} KV heads from {must.start} on, holds {held}"
    return None


def _kv_heads(info: InstanceInfo) -> int:
    """Of the whole model."""
    return info.model.kv_heads or info.pools[0].layout.kv_heads


def _malformed_pool(pool: PoolDescriptor) -> str | None:
    if not pool.is_addressable:
        return f"its pool of {pool.pool_bytes} bytes at address {pool.address} is not within 64-bit addresses"
    if not pool.has_known_device:
        return f"its pool's device must be cpu or cuda:N, is {pool.device[:80]!r}"
    return None


def likeness(info: InstanceInfo) -> tuple[tuple[str, Hashable], ...]:
    """The properties that must be equal in all members of a fleet, with their names."""
    model, pool = info.model, info.pools[0]
    layout = pool.layout
    return (
        ("model fingerprint", model.fingerprint),
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
    for (name, asked), (_, expected) in zip(likeness(info), likeness(member), strict=True):
        if asked != expected:
            return f"its {name} is {asked}, but that of {member.id} in this fleet is {expected}{ADVICE.get(name, '')}"
    return None


class Pool(Protocol):
    """Members from which one can draw by number: a list, or a SampleSet."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Member: ...

    def __iter__(self) -> Iterator[Member]: ...


@dataclass(slots=True)
class _Side:
    """The members of one role, each in one of the three."""

    line: list[Member] = field(default_factory=list)
    ailing: dict[Member, None] = field(default_factory=dict)
    leaving: dict[Member, None] = field(default_factory=dict)
    changes: int = 0
    """Of the line."""


class Candidates:
    """random: decides who is drawn. The same seed and the same members in the same order make the same draws."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._sides: dict[Role, _Side] = {"prefill": _Side(), "decode": _Side()}
        self._standing: set[Member] = set()
        """Those in a line."""
        self._choices = 0

    def judge(self, member: Member) -> None:
        """Put a member where it belongs. Call it when the member joined, and after whatever may change its trouble."""
        side = self._sides[member.info.role]
        if member.trouble is None:
            if member not in self._standing:
                self.leave(member)
                self._standing.add(member)
                insort(side.line, member, key=_order)
                side.changes += 1
            return
        group = side.leaving if member.draining else side.ailing
        if member not in group:
            self.leave(member)
            group[member] = None

    def leave(self, member: Member) -> None:
        """Take out a member that has left. Idempotent."""
        side = self._sides[member.info.role]
        side.ailing.pop(member, None)
        side.leaving.pop(member, None)
        if member in self._standing:
            self._standing.remove(member)
            del side.line[bisect_left(side.line, _order(member), key=_order)]
            side.changes += 1

    def line(self, role: Role) -> list[Member]:
        """All of this role that take requests, those with the least memory first. Only to look at."""
        return self._sides[role].line

    def able(self, role: Role, tokens: int) -> list[Member]:
        """Those of them whose memory holds so many tokens when it is empty."""
        line = self._sides[role].line
        first = bisect_left(line, tokens, key=_capacity)
        return line[first:] if first else line

    def ailing(self, role: Role) -> Set[Member]:
        """Those that take no requests, but do not drain."""
        return self._sides[role].ailing.keys()

    def leaving(self, role: Role) -> Set[Member]:
        """Those that drain."""
        return self._sides[role].leaving.keys()

    def chose(self, member: Member) -> None:
        """A request goes to this member."""
        self._choices += 1
        member.chosen = self._choices

    def after(self, role: Role, last: Member | None) -> Iterator[Member]:
        """All of this role that take requests, each once, from the one behind this member on. None: from the first."""
        line = self._sides[role].line
        first = 0 if last is None else bisect_right(line, _order(last), key=_order)
        return (line[number % len(line)] for number in range(first, first + len(line)))

    def changes(self, role: Role) -> int:
        """How often the line has changed."""
        return self._sides[role].changes

    def some(self, members: Pool, most: int) -> list[Member]:
        """Random ones, in random order; all of them, if there are no more than so many."""
        count, random = len(members), self._random.random
        if count < 2 * most:
            return [members[number] for number in self._random.sample(range(count), min(most, count))]
        numbers: dict[int, None] = {}  # `sample` takes three times as long
        while len(numbers) < most:
            numbers[int(random() * count)] = None
        return [members[number] for number in numbers]


def _capacity(member: Member) -> int:
    return member.capacity_tokens


def _order(member: Member) -> tuple[int, str]:
    return member.capacity_tokens, member.info.id
