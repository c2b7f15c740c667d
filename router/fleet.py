"""The fleet: which instances are members, what they last reported, and which of them must know about which.

Owns membership, the last report of each member, and the deadlines after which a silent member is lost. Opens no socket and reads
no clock. Does not know requests. `members` says who may be a member, and which members take requests.

    Register ─► Welcome
             └► Refused(reason)      a mismatch, an earlier incarnation (final), an absurd description; shown on /cluster
    Heartbeat ─► Welcome             the router's own heartbeat, unless one went out just before; a stranger gets none, and
                                     registers in time
              └► Drain               while a member that was told to leave does not report that it drains
    Goodbye, a later incarnation, or silence (of `dead_after_s`, or of two heartbeats after the connection broke)
              ─► the member is lost
    flush ─► Peers                   what has changed for each member (`router.peering`)

The first member of a router that has just started decides what all others must be like. If that one is the odd one, the fleet of
the former life would stay outside. So an instance that a former life has welcomed votes whenever it is refused because it
differs; instances that are alike vote together, and a majority of them replaces the members. Newcomers do not vote: nobody can
push out a fleet by starting a larger one.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from random import Random
from typing import NamedTuple, TypeVar, assert_never

from msgspec.structs import replace

from common.addresses import check_address
from common.config import RouterConfig
from common.deadlines import DeadlineWheel, earliest
from common.errors import BadRequest, ConfigError, NotFound, TandemError
from common.ids import InstanceId, Life, Role, ServingRole
from common.instance.membership import ABANDON_AFTER_S
from common.instance.ports import Send
from common.instance.roles import is_of_one_process
from common.messages import (
    AdaptersHeld,
    CacheChanges,
    Drain,
    FlushCache,
    Goodbye,
    Heartbeat,
    InstanceInfo,
    LinkReport,
    Load,
    ModelIdentity,
    Refused,
    Register,
    RoleKept,
    TaskDone,
    TellLinks,
    WeightsStaged,
    Welcome,
)
from router.adapters import FleetAdapters
from router.cache_index import CacheIndex
from router.history import FleetHistory
from router.members import Candidates, Change, Member, RolePace, difference, likeness, malformed
from router.peering import Peering
from router.tasks import FleetRoles, FleetTasks
from router.weights import FleetWeights

VOTE_S = 15.0
"""How long a vote counts: who is refused asks again before that, however seldom it asks."""
VOTES_COUNTED = 4096
"""How many votes are kept, the newest."""


DEPARTED_REMEMBERED = 4096
"""How many departures the fleet remembers: a whole fleet may fall silent at once, and who comes back still drains if it was told
to."""
NOBODY_DECODES = "no decode instance takes requests now, and new ones are refused"
SILENT_ROUTE_S = ABANDON_AFTER_S
"""A silent member can be reached this long: as long as it keeps the requests of a router that it does not hear."""
LEFT_ROUTE_S = 10.0
"""A member that left can be reached this long: what was on its way to it is no news to anybody."""
REFUSED_REMEMBERED = 32
"""How many refused instances it remembers with their addresses."""
REPLACED_REMEMBERED = 1024
"""How many replaced incarnations it remembers: more, because one may sleep while a whole fleet restarts."""
HEARTBEATS_PER_S = 1_000
"""As many a router takes in; more members than that times --heartbeat-s report more rarely."""
BEATS_BEFORE_DEATH = 3
"""A silent member is not taken for dead before so many of its heartbeats are missing, however slowly a large fleet reports: one
or two may be late or lost."""
BEATS_AFTER_BREAK = 2
"""A member whose connection broke is dead after this many heartbeats of silence; so is one that is due when this router was held
up itself."""
ANSWER_DIVISOR = 2
"""A heartbeat is not answered while the last answer is younger than this part of `dead_after_s`: an answer costs as much as a
heartbeat."""
TAKES_ROLE = "it takes the role"
"""How the reason of an instance begins that comes back in another role."""
IN_ORDER = "left"
"""The reason of a member that was told to leave."""
NAME_SHOWN, REASON_SHOWN = 64, 500
"""How many characters are kept of what a stranger says: it may be of any length."""

K = TypeVar("K")
V = TypeVar("V")


class Departure(NamedTuple):
    """A member that left, and why."""

    member: Member
    reason: str
    at_s: float
    """When, by the router's clock."""
    silent: bool
    """It may only have been unreachable; its next heartbeat makes it a member again."""
    is_quiet: bool = False
    """See `Goodbye`."""


class RefusedInstance(NamedTuple):
    """An instance that may not be a member, and why."""

    inbox: str | None
    """None when it gave no valid address, so that the refusal cannot be sent."""
    reason: str


class Members:
    """Membership as a state machine."""

    def __init__(
        self,
        router: InstanceId,
        detokenizers: Sequence[str],
        config: RouterConfig,
        vocab_size: int | None = None,
        unix_s: float = 0.0,
    ) -> None:
        """detokenizers: their addresses. vocab_size: of the router's tokenizer; None: any. unix_s: see `FleetHistory`."""
        self.history = FleetHistory(unix_s)
        self._heartbeat_s, self._dead_after_s = config.heartbeat_s, config.dead_after_s
        self._welcome = Welcome(
            router=router,
            detokenizers=tuple(detokenizers),
            heartbeat_s=config.heartbeat_s,
            dead_after_s=config.dead_after_s,
        )
        self.peering = Peering(router, config.heartbeat_s, config.peers_per_instance)
        self.candidates = Candidates(Random(router))  # no two lives of a router draw alike, and a simulation is repeated exactly
        self.caches = CacheIndex(config.needs_caches, config.heartbeat_s)
        self.weights = FleetWeights(router, config.max_request_timeout_s, self.members, self._judge)
        self.tasks = FleetTasks(self.find)
        self.adapters = FleetAdapters(self.members, self.tasks)
        self.roles = FleetRoles(self.members, self.find, self._judge)
        self._vocab_size = vocab_size
        self._members: dict[InstanceId, Member] = {}
        self.paces: dict[Role, RolePace] = {"prefill": RolePace(), "decode": RolePace()}
        self.departed: dict[InstanceId, Departure] = {}
        """Who left and did not come back, the latest last."""
        self._farewells: DeadlineWheel[InstanceId] = DeadlineWheel()
        """Until when those who departed can be reached."""
        self._moved: dict[InstanceId, str | None] = {}
        """The addresses that may have changed since `take_moves`."""
        self._replaced: dict[Life, None] = {}
        self._votes: dict[InstanceId, tuple[Hashable, float]] = {}
        """What each instance that was welcome once and is refused now is like, and until when its vote counts."""
        self.refused: dict[InstanceId, RefusedInstance] = {}
        """Who was refused lately, each under a name of its own: id#incarnation."""
        self._curious: dict[InstanceId, list[Callable[[LinkReport], object]]] = {}
        """Who waits for a member's report of all its links."""
        self._silence: DeadlineWheel[InstanceId] = DeadlineWheel()
        self.model: ModelIdentity | None = None
        """What every member serves: as the first one does, unless a majority that was here before differs. None: no member."""
        self.holds_grammars = True
        self.stale = 0
        """Messages from incarnations that are not members."""
        self.refusals = 0
        """Refused registrations."""

    # --- what it looks like ----------------------------------------------------------------------------------------------

    def members(self, role: Role | None = None) -> Iterator[Member]:
        return (member for member in self._members.values() if role is None or member.info.role == role)

    def find(self, life: Life) -> Member | None:
        """The member that is this life, if there is one."""
        member = self._members.get(life.id)
        return member if member is not None and member.life == life else None

    def take_moves(self) -> list[tuple[InstanceId, str | None]]:
        """Where those are now whose address may have changed since the last call; None: they are to be forgotten."""
        moved, self._moved = self._moved, {}
        return list(moved.items())

    def next_deadline(self) -> float | None:
        """When the next member is lost unless it is heard from, or a route is forgotten; None when there is neither."""
        return earliest(
            self._silence.next_deadline(),
            self._farewells.next_deadline(),
            self.weights.next_deadline(),
            self.tasks.next_deadline(),
            self.roles.next_deadline(),
        )

    # --- messages and time -----------------------------------------------------------------------------------------------

    def register(self, message: Register, now: float) -> Change:
        info, change = message.instance, Change()
        known = self._members.get(info.id)
        if known is not None and known.info.incarnation == info.incarnation:
            self._heard(known, now)
            return Change(self._greet(known, message.address))
        reason = self._unfit(info)
        is_mismatch = reason is not None
        other = next((member.info for member in self._members.values() if member.info.id != info.id), None)
        if reason is None and other is not None:
            reason = difference(info, other)  # from one, so from all
            is_mismatch = reason is not None
            reason = reason or self.weights.why_not(message.weights, info.id)
            reason = reason or self.adapters.why_not(message.adapters, info)
            if reason is not None and message.was_welcome and self._is_outvoted(message, now):
                reason = None
                for member in list(self._members.values()):
                    change.lost.append(self._remove(member, "it differs from most that served here before", now, silent=False))
        if reason is not None:
            return Change(self._refuse(message, reason, now, is_mismatch=is_mismatch))
        if known is not None and info.id in self._members:
            reason = "replaced by a newer incarnation"
            if info.inbox != known.info.inbox:
                reason += f" at {info.inbox} (it was at {known.info.inbox}): if both run, give them different names"
            change.lost.append(self._remove(known, reason, now, silent=False))
        for member in change.lost:
            self._left(member, change, now)
        change.sends += self._join(message, now)
        change.more_can_serve = True
        joined = self._members[info.id]
        change.sends += self.adapters.joined(joined, message.adapters, now)
        return change.take(self.weights.joined(joined, now))

    def _is_outvoted(self, message: Register, now: float) -> bool:
        """Those like this one, whom a former life of this router had welcomed, are no fewer than the members, and more than the
        members that were welcome then."""
        mine = likeness(message.instance), message.weights
        _remember(self._votes, message.instance.id, (mine, now + VOTE_S), VOTES_COUNTED)
        votes = sum(until_s > now and theirs == mine for theirs, until_s in self._votes.values())
        return votes >= len(self._members) and votes > sum(member.was_welcome for member in self._members.values())

    def heartbeat(self, message: Heartbeat, now: float) -> Change:
        back = self.departed.get(message.id)
        if back is not None and not (back.silent and back.member.info.incarnation == message.incarnation):
            back = None
        change = Change()
        if back is not None:
            change = self.register(
                Register(
                    instance=back.member.info,
                    was_welcome=True,
                    weights=message.weights,
                    weight_version=message.weight_version,
                    weight_changes=message.weight_changes,
                ),
                now,
            )
        member = self._sender(message)
        if member is None:
            return change
        self._heard(member, now)
        if back is None and now >= member.answer_due_s:  # a member that is back was greeted by `register`
            member.answer_due_s = now + self._dead_after_s / ANSWER_DIVISOR
            change.sends.append(Send(message.id, self._welcome))
        took_requests, was_stuck = member.trouble is None, member.stuck
        member.take_report(message, now)
        self.candidates.judge(member)
        more, sends = self.peering.receive_heartbeat(message, now)
        change.sends += sends
        if self.caches.follows:
            change.sends += self.caches.heard(member, message.cache_version, now)
        if member.told_to_drain and not member.reports_draining:
            change.sends.append(Send(member.info.id, Drain(incarnation=member.info.incarnation)))
        if member.stuck and not was_stuck:
            change.lost.append(member)
        change.take(self.weights.heard(member, now))
        self._note_state(member, now)
        change.sends += self.roles.heard(member)
        change.sends += self.tasks.heard(member) + self.adapters.reported(member, message.adapters_version, now)
        if (member.trouble is None and not took_requests) or more:
            change.more_can_serve = True
        return change

    def told(self, message: LinkReport | CacheChanges | WeightsStaged | TaskDone | RoleKept | AdaptersHeld, now: float) -> Change:
        """A member tells of its links, its prefix cache, new weights, a task, a role that it does not take, or its adapters."""
        member = self._sender(message)
        if member is None:
            return Change()
        match message:
            case LinkReport():
                for answer in self._curious.pop(message.id, ()) if message.since is None else ():
                    answer(message)
                return Change(more_can_serve=self.peering.receive_links(message))
            case CacheChanges():
                if message.weights in ("", member.weights):  # of others nobody is asked for their names any more
                    self.caches.receive(member, message)
            case WeightsStaged():
                return self.weights.staged(message, member, now)
            case TaskDone():
                self.tasks.done(message, member)
                self.adapters.proceed(now)
            case RoleKept():
                self.roles.kept(message, member)
            case AdaptersHeld():
                return Change(more_can_serve=self.adapters.heard(member, message, now))
            case _:
                assert_never(message)
        return Change()

    def _note_state(self, member: Member, now: float) -> None:
        """It may have come into trouble, or out of it."""
        if member.state != member.told_state:
            reason = "" if member.trouble is None else f": {member.trouble.reason}"
            level = logging.INFO
            if member.trouble is not None and member.info.role == "decode" and self.nobody_decodes:
                reason += f"; {NOBODY_DECODES}"
                level = logging.WARNING
            self.history.tell("state", member.info.id, f"{member.told_state} → {member.state}{reason}", now, level=level)
            member.told_state = member.state

    def _judge(self, member: Member) -> None:
        """Something else than its report decides whether it takes requests."""
        member.judge()
        self.candidates.judge(member)

    def _heard(self, member: Member, now: float) -> None:
        self._silence.set(member.info.id, now + self._dead_after_s)
        member.excused = False

    def ask_links(self, instance: InstanceId, answer: Callable[[LinkReport], object]) -> list[Send]:
        """Ask a prefill member for all its links with their traffic. answer: called with its next report of all of them.
        Raises NotFound, BadRequest."""
        if self._find(instance).info.role != "prefill":
            raise BadRequest(f"{instance} is a decode instance: prefill instances tell of the links to it")
        self._curious.setdefault(instance, []).append(answer)
        return [Send(instance, TellLinks())]

    def goodbye(self, message: Goodbye, now: float) -> Change:
        member = self._sender(message)
        if member is None:
            return Change()
        reason = message.reason or IN_ORDER
        change = Change(lost=[self._remove(member, reason, now, silent=False, is_quiet=message.is_quiet)])
        self._left(member, change, now)
        return change

    def _left(self, member: Member, change: Change, now: float) -> None:
        """It is no member any more: nobody waits for it."""
        self.tasks.left(member)
        self.adapters.proceed(now)
        change.take(self.weights.left(member, now))

    def _sender(
        self, message: Heartbeat | LinkReport | CacheChanges | Goodbye | WeightsStaged | TaskDone | AdaptersHeld | RoleKept
    ) -> Member | None:
        """The member that says this. None, which is counted, when it is from another life."""
        member = self.find(Life(message.id, message.incarnation))
        self.stale += member is None
        return member

    @property
    def nobody_decodes(self) -> bool:
        """Whether no decode instance takes requests."""
        return not self.candidates.lines["decode"]

    def drain(self, instance: InstanceId, now: float) -> Change:
        """Give the member no more requests, and tell it to leave until it reports that it drains. Raises NotFound."""
        member = self._find(instance)
        member.drain()
        self.candidates.judge(member)
        self._note_state(member, now)
        change = Change([Send(instance, Drain(incarnation=member.info.incarnation))])
        return change.take(self.weights.heard(member, now))  # an update may have counted on it

    def why_keep(self, instance: InstanceId) -> list[str]:
        """Why the instance must not be deleted yet. Empty: every write from or to it is proven to have ended, and no request of
        any router needs it. What is not known is a reason. Raises NotFound."""
        gone = self.departed.get(instance)
        if gone is None:
            return self._find(instance).why_keep()
        return [] if gone.is_quiet else [f"it is gone ({gone.reason}), and has not said that its transfers have ended"]

    def change_role(
        self, instance: InstanceId, role: ServingRole, answer: Callable[[Member | TandemError], object], now: float
    ) -> list[Send]:
        """See `FleetRoles.begin`. Raises NotFound, Conflict."""
        return self.roles.begin(self._find(instance), role, answer, now)

    def flush_caches(self) -> list[Send]:
        """Tell every member to forget its prefix cache."""
        return [Send(member.info.id, FlushCache()) for member in self.members()]

    def _find(self, instance: InstanceId) -> Member:
        """Raises NotFound."""
        member = self._members.get(instance)
        if member is None:
            raise NotFound(f"no instance {instance[:NAME_SHOWN]!r} is a member of the fleet: see /cluster")
        return member

    def connection_broken(self, instance: InstanceId, now: float) -> None:
        """A hint that the member's process has ended. A live one sends a heartbeat before two of them are due."""
        self._silence.hasten(instance, now + BEATS_AFTER_BREAK * self._welcome.heartbeat_s)

    def detokenizer_moved(self, shard: int, address: str) -> list[Send]:
        """Tell every member where the tokens of this detokenizer go from now on."""
        addresses = list(self._welcome.detokenizers)
        addresses[shard] = address
        self._welcome = replace(self._welcome, detokenizers=tuple(addresses))
        return [Send(member, self._welcome) for member in self._members]

    def tick(self, now: float, *, is_late: bool = False) -> Change:
        """is_late: this router was held up: those whose time is over get as long as it takes them to be heard, once in each
        silence."""
        change = Change()
        for instance in self._silence.expired(now):
            member = self._members[instance]
            if is_late and not member.excused:
                member.excused = True
                self._silence.set(instance, now + BEATS_AFTER_BREAK * self._welcome.heartbeat_s)
            else:
                change.lost.append(self._remove(member, "not heard of in time", now, silent=True))
        for member in change.lost:
            self._left(member, change, now)
        self._moved |= dict.fromkeys(self._farewells.expired(now))
        self.tasks.tick(now)
        self.roles.tick(now)
        self.adapters.proceed(now)
        return change.take(self.weights.tick(now))

    # --- changes of the set ----------------------------------------------------------------------------------------------

    def _join(self, message: Register, now: float) -> list[Send]:
        info = message.instance
        load = Load(pages_free=info.total_pages, pages_total=info.total_pages)
        member = Member(info, load, was_welcome=message.was_welcome)
        member.take_weights(message)
        member.pace, member.other_pace = self.paces[info.role], self.paces["decode" if info.role == "prefill" else "prefill"]
        former = self.departed.pop(info.id, None)
        self._farewells.clear(info.id)
        before = None if former is None else former.member
        if before is not None and before.told_to_drain and is_of_one_process(before.life.incarnation, info.incarnation):
            member.drain()  # the process may have taken another role before it heard that
        if before is not None and before.life != member.life and not info.began_before(before.info):
            _remember(self._replaced, before.life, None, REPLACED_REMEMBERED)
        self._members[info.id] = member
        self._set_pace()
        self.model, self.holds_grammars = info.model, info.holds_grammars
        self._heard(member, now)
        self._moved[info.id] = info.inbox
        self.peering.join(member)
        self.candidates.judge(member)
        self.caches.join(member)
        self._note_join(member, former, now)
        return self._greet(member, message.address)

    def _note_join(self, member: Member, former: Departure | None, now: float) -> None:
        info, is_same = member.info, False
        if former is not None:
            is_same = is_of_one_process(former.member.life.incarnation, info.incarnation)
        if former is not None and is_same and former.member.info.role != info.role:
            changed = f"{former.member.info.role} → {info.role} in {now - former.at_s:.2f} s"
            self.history.tell("role", info.id, changed, now)
            return
        again = "is back from" if former is not None else "joined from"
        where = f"{again} {info.inbox.rpartition('/')[2]}"
        self.history.tell("joined", info.id, f"{where} ({member.role}, {info.total_pages:,} pages)", now)

    def _remove(self, member: Member, reason: str, now: float, *, silent: bool, is_quiet: bool = False) -> Member:
        info = member.info
        del self._members[info.id]
        self._set_pace()
        if not self._members:
            self.model = None
        self._silence.clear(info.id)
        self._curious.pop(info.id, None)
        self._farewells.set(info.id, now + (SILENT_ROUTE_S if silent else LEFT_ROUTE_S))
        self._note_leave(member, reason, now, is_quiet=is_quiet)
        departure = Departure(member, reason, now, silent, is_quiet)
        for forgotten in _remember(self.departed, info.id, departure, DEPARTED_REMEMBERED):
            self._farewells.clear(forgotten)
            self._moved[forgotten] = None
        self.peering.leave(member)
        self.candidates.leave(member)
        self.caches.leave(member)
        return member

    def _note_leave(self, member: Member, reason: str, now: float, *, is_quiet: bool) -> None:
        if reason == IN_ORDER:
            self.history.tell("left", member.info.id, "drained and left" if is_quiet else "left", now)
        elif reason.startswith(TAKES_ROLE):
            self.history.tell("left", member.info.id, f"leaves for a moment: {reason}", now)
        else:
            self.history.tell("left", member.info.id, f"is lost: {reason}", now, level=logging.WARNING)

    def _set_pace(self) -> None:
        """In a large fleet each member reports more rarely, so that all of them together cost this router no more. A member still
        reports several times before it could be taken for dead."""
        slowest_s = max(self._heartbeat_s, self._dead_after_s / BEATS_BEFORE_DEATH)
        paced_s = min(max(self._heartbeat_s, len(self._members) / HEARTBEATS_PER_S), slowest_s)
        if paced_s != self._welcome.heartbeat_s:
            self._welcome = replace(self._welcome, heartbeat_s=paced_s)

    def _greet(self, member: Member, address: str) -> list[Send]:
        """address: at which it registered; it may know several routers."""
        welcome = replace(self._welcome, address=address) if address else self._welcome
        return [Send(member.info.id, welcome)]

    # --- refusals --------------------------------------------------------------------------------------------------------

    def _refuse(self, message: Register, reason: str, now: float, *, is_mismatch: bool) -> list[Send]:
        """Send the refusal to the address that asked, under a name of its own: a member of the same id keeps its route."""
        info = message.instance
        self.refusals += 1
        name = InstanceId(f"{info.id[:NAME_SHOWN]}#{info.incarnation[:NAME_SHOWN]}")
        inbox, reason = _good_address(info.inbox), reason[:REASON_SHOWN]
        if name not in self.refused or self.refused[name].inbox != inbox:
            self._moved[name] = inbox
        if name not in self.refused or self.refused[name].reason != reason:
            who, where = info.id[:NAME_SHOWN], inbox or "an address that is none"
            self.history.tell("refused", who, f"at {where} was refused: {reason}", now, level=logging.WARNING)
        self._moved |= dict.fromkeys(_remember(self.refused, name, RefusedInstance(inbox, reason), REFUSED_REMEMBERED))
        ends, life = self._is_replaced(info), info.incarnation
        refused = Refused(
            reason=reason, address=message.address, incarnation=life, id=info.id, final=ends, is_mismatch=is_mismatch
        )
        return [] if inbox is None else [Send(name, refused)]

    def _is_replaced(self, info: InstanceInfo) -> bool:
        """A later life has taken its place. A router that started meanwhile knows it by the order of the lives."""
        member = self._members.get(info.id)
        is_earlier = member is not None and info.began_before(member.info)
        return is_earlier or (info.id, info.incarnation) in self._replaced

    def _unfit(self, info: InstanceInfo) -> str | None:
        """Why it cannot be a member, whoever else is one."""
        if reason := malformed(info):
            return reason
        if self._is_replaced(info):
            return f"a newer incarnation of {info.id} has taken its place"
        if self._vocab_size not in (None, info.model.vocab_size):
            return f"its vocabulary is {info.model.vocab_size}, but that of the router's model is {self._vocab_size}"
        return None


def _good_address(inbox: str) -> str | None:
    try:
        return check_address(inbox)
    except ConfigError:
        return None


def _remember(memory: dict[K, V], key: K, value: V, limit: int) -> list[K]:
    """Add to a memory that keeps the newest `limit` entries. Returns what it forgot."""
    memory.pop(key, None)
    memory[key] = value
    forgotten = [next(iter(memory))] if len(memory) > limit else []
    for oldest in forgotten:
        del memory[oldest]
    return forgotten
