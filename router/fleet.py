"""The fleet: which instances are members, how they are, and who must know of whom.

Owns membership, the last report of each member and the deadlines after which a silent one is lost. Opens no socket, reads no
clock. Does not know requests: a member only carries the tokens that the request book has assigned to it.

    Register ─► Welcome + Peers      (again and again: each answer is whole, so a lost one costs only time)
             └► Refused(reason)      a mismatch, named
    Heartbeat ─► load, counters, links, draining
    Goodbye, silence of `dead_after_s`, or a newer incarnation ─► the member is lost, the other role gets new Peers
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from common.deadlines import DeadlineWheel
from common.ids import Incarnation, InstanceId, Role
from common.instance.ports import Send
from common.messages import (
    WIRE_VERSION,
    Counters,
    Goodbye,
    Heartbeat,
    InstanceInfo,
    LinkInfo,
    Load,
    ModelIdentity,
    Peers,
    Refused,
    Register,
    Welcome,
)

REMEMBERED = 32
"""Members that left, incarnations that were replaced and refused addresses that are remembered, each."""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True, eq=False)
class Member:
    """One incarnation of an instance in the fleet.

    assigned_tokens: tokens of the router's open requests that this member works on or will, kept by the request book.
    chosen: number of the last choice that fell on it; among equals the one that waited longest is next.
    """

    info: InstanceInfo
    load: Load
    counters: Counters = field(default_factory=Counters)
    links: dict[InstanceId, LinkInfo] = field(default_factory=dict)
    draining: bool = False
    assigned_tokens: int = 0
    chosen: int = 0

    @property
    def load_tokens(self) -> int:
        """Tokens it has to do: what it reported, or what was assigned to it since, whichever is more."""
        return max(self.load.waiting_tokens + self.load.running_tokens, self.assigned_tokens)

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose KV fits its memory when it is empty."""
        return self.info.pool.total_pages * self.info.pool.layout.page_size

    def linked(self, peer: "Member") -> bool:
        """Whether it reports a ready link to this incarnation of the peer."""
        link = self.links.get(peer.info.id)
        return link is not None and link.incarnation == peer.info.incarnation and link.state == "ready"


@dataclass(frozen=True, slots=True)
class Departure:
    """A member that left, and why."""

    info: InstanceInfo
    reason: str
    silent: bool
    """It may only have been unreachable: if it is heard of again, it is a member again."""


@dataclass(slots=True)
class Change:
    """What a message or a deadline brought: messages to send, and members whose requests can no longer be served."""

    sends: list[Send] = field(default_factory=list)
    lost: list[Member] = field(default_factory=list)


class Fleet:
    """Membership as a state machine. vocab_size: of the router's tokenizer, or None to take any."""

    def __init__(
        self,
        incarnation: Incarnation,
        detokenizer_address: str,
        heartbeat_s: float,
        dead_after_s: float,
        vocab_size: int | None = None,
    ) -> None:
        self._welcome = Welcome(router=incarnation, detokenizer=detokenizer_address, heartbeat_s=heartbeat_s)
        self._dead_after_s = dead_after_s
        self._vocab_size = vocab_size
        self._members: dict[InstanceId, Member] = {}
        self._departed: dict[InstanceId, Departure] = {}
        self._replaced: dict[Incarnation, None] = {}
        self._refused: dict[InstanceId, str] = {}
        self._silence: DeadlineWheel[InstanceId] = DeadlineWheel()
        self.stale = 0
        """Messages of incarnations that are no members."""
        self.addresses_version = 0
        """Raised when `addresses` changes."""

    # --- what it looks like ----------------------------------------------------------------------------------------------

    def members(self, role: Role | None = None) -> Iterator[Member]:
        return (member for member in self._members.values() if role is None or member.info.role == role)

    @property
    def departed(self) -> list[Departure]:
        return list(self._departed.values())

    @property
    def model(self) -> ModelIdentity | None:
        """What every member serves: the first member says it for those that follow."""
        return next((member.info.model for member in self._members.values()), None)

    def addresses(self) -> Mapping[InstanceId, str]:
        """Where everyone that is or was lately spoken to can be reached."""
        lately = {departure.info.id: departure.info.inbox for departure in self._departed.values()}
        return self._refused | lately | {member.info.id: member.info.inbox for member in self._members.values()}

    # --- messages and time -----------------------------------------------------------------------------------------------

    def register(self, message: Register, now: float) -> Change:
        info = message.instance
        known = self._members.get(info.id)
        if known is not None and known.info.incarnation == info.incarnation:
            self._silence.set(info.id, now + self._dead_after_s)
            return Change(self._greet(known))
        reason = self._mismatch(info)
        if reason is not None:
            return Change([self._refuse(info, reason)])
        change = self._remove(known, "replaced by a newer incarnation", silent=False) if known is not None else Change()
        if known is not None:
            _remember(self._replaced, known.info.incarnation, None)
        change.sends += self._join(info, now)
        return change

    def heartbeat(self, message: Heartbeat, now: float) -> Change:
        departed = self._departed.get(message.id)
        if departed is not None and departed.silent and departed.info.incarnation == message.incarnation:
            change = self.register(Register(instance=departed.info), now)
        else:
            change = Change()
        member = self._members.get(message.id)
        if member is None or member.info.incarnation != message.incarnation:
            self.stale += 1
            return change
        self._silence.set(message.id, now + self._dead_after_s)
        member.load, member.counters, member.draining = message.load, message.counters, message.draining
        member.links = {link.peer: link for link in message.links}
        return change

    def goodbye(self, message: Goodbye) -> Change:
        member = self._members.get(message.id)
        if member is None or member.info.incarnation != message.incarnation:
            self.stale += 1
            return Change()
        return self._remove(member, "left", silent=False)

    def tick(self, now: float) -> Change:
        change = Change()
        for instance in self._silence.expired(now):
            gone = self._remove(self._members[instance], f"not heard of for {self._dead_after_s:g} s", silent=True)
            change.sends += gone.sends
            change.lost += gone.lost
        return change

    def next_deadline(self) -> float | None:
        return self._silence.next_at()

    # --- changes of the set ----------------------------------------------------------------------------------------------

    def _join(self, info: InstanceInfo, now: float) -> list[Send]:
        total_pages = info.pool.total_pages
        member = Member(info, Load(pages_free=total_pages, pages_total=total_pages))
        self._members[info.id] = member
        self._departed.pop(info.id, None)
        self._silence.set(info.id, now + self._dead_after_s)
        self.addresses_version += 1
        return self._greet(member) + self._tell_others(info.role)

    def _remove(self, member: Member, reason: str, *, silent: bool) -> Change:
        info = member.info
        del self._members[info.id]
        self._silence.clear(info.id)
        _remember(self._departed, info.id, Departure(info, reason, silent))
        self.addresses_version += 1
        return Change(self._tell_others(info.role), [member])

    def _greet(self, member: Member) -> list[Send]:
        return [Send(member.info.id, self._welcome), Send(member.info.id, self._peers_of(member.info.role))]

    def _tell_others(self, role: Role) -> list[Send]:
        """The set of `role` changed: everyone of the other role gets it whole."""
        others = [member.info for member in self._members.values() if member.info.role != role]
        return [Send(other.id, self._peers_of(other.role)) for other in others]

    def _peers_of(self, role: Role) -> Peers:
        return Peers(instances=tuple(member.info for member in self._members.values() if member.info.role != role))

    # --- refusals --------------------------------------------------------------------------------------------------------

    def _refuse(self, info: InstanceInfo, reason: str) -> Send:
        """The refusal goes to the address that asked, under a name of its own: a member of the same id keeps its route."""
        name = InstanceId(f"{info.id}#{info.incarnation}")
        _remember(self._refused, name, info.inbox)
        self.addresses_version += 1
        return Send(name, Refused(reason=reason))

    def _mismatch(self, info: InstanceInfo) -> str | None:
        if info.incarnation in self._replaced:
            return f"a newer incarnation of {info.id} has taken its place"
        if abs(info.wire_version - WIRE_VERSION) > 1:
            return f"wire version {info.wire_version} is not a neighbour of the router's {WIRE_VERSION}"
        if self._vocab_size not in (None, info.model.vocab_size):
            return f"its vocabulary is {info.model.vocab_size}, but that of the router's model is {self._vocab_size}"
        others = (member.info for member in self._members.values() if member.info.id != info.id)
        return next((reason for other in others if (reason := _difference(info, other)) is not None), None)


def _difference(info: InstanceInfo, member: InstanceInfo) -> str | None:
    """The first thing that must match and does not, named with both values."""
    ours, theirs = info.pool.layout, member.pool.layout
    pairs: tuple[tuple[str, object, object], ...] = (
        ("model fingerprint", info.model.fingerprint, member.model.fingerprint),
        ("architecture", info.model.architecture, member.model.architecture),
        ("dtype", info.model.dtype, member.model.dtype),
        ("vocabulary", info.model.vocab_size, member.model.vocab_size),
        ("context", info.model.context_tokens, member.model.context_tokens),
        ("page size", ours.page_size, theirs.page_size),
        ("KV dtype", ours.dtype, theirs.dtype),
        ("page order", ours.order, theirs.order),
        ("layout version", ours.version, theirs.version),
        ("KV layout", (ours.layers, ours.kv_heads, ours.head_dim), (theirs.layers, theirs.kv_heads, theirs.head_dim)),
        ("transport", info.pool.backend, member.pool.backend),
    )
    for name, asked, expected in pairs:
        if asked != expected:
            return f"its {name} is {asked}, but that of {member.id} in this fleet is {expected}"
    return None


def _remember(memory: dict[K, V], key: K, value: V) -> None:
    """Keep the newest few."""
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > REMEMBERED:
        del memory[next(iter(memory))]
