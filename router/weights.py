"""Which weights the fleet computes with, and how all instances change to others.

Owns the weights that members must have, the update that is under way, and what each member is told until its heartbeats show that
it has done so. Opens no socket, reads no clock. Does not know requests: it says when none may be placed.

    begin ─► STAGING ── every member has the new weights ready, with one digest ──► SWITCHING ── all have changed ─► settled
                └─ one cannot, digests differ, or it takes too long ─► DropWeights; everything stays as it was

Nobody computes with the new weights before all are known to have them. In the second phase a member that is lost, or does
not change in time, leaves the fleet; it comes back and is brought to the new weights before it gets requests. How requests fare:

    recompute   none is placed until all members have changed, at once; what they served is resumed, its KV computed anew
    abort       the same, but what they served ends
    finish      members serve what they have and get nothing new; each changes when it is idle, half of the fleet after the other;
                none is placed while the other half has nobody left

New requests go to members with the weights of `target` only, so the two instances of a request always have the same.
"""

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from common.errors import BadRequest, Conflict, TandemError, Unavailable
from common.ids import Digest, InstanceId, Life
from common.instance.ports import Send
from common.messages import Drain, DropWeights, HoldSteps, StageWeights, SwitchWeights, WeightsStaged
from common.messages.variants import WeightsFromGroup, WeightsInMemory, WeightsOnDisk, WeightsSource
from router.members import Change, Member

UpdateMode = Literal["recompute", "finish", "abort"]

STAGE_S = 1_800.0
"""How long members may take to read new weights."""
SETTLE_S = 30.0
"""How long the members of another router's update may have different weights while requests wait."""
SWITCH_S = 120.0
"""How long a member may take to change to weights that are ready, once nothing keeps it."""
_SAME_FILES = "give all instances the same files, or have all change by POST /update_weights_from_disk"


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """What somebody wants of an update."""

    source: WeightsSource
    mode: UpdateMode = "recompute"
    version: str = ""
    """What to call the new weights; "": their digest."""
    finish_s: float | None = None
    """With mode finish: how long requests may go on; None: as long as any."""
    keeps_pause: bool = False
    """Place no request afterwards."""


@dataclass(frozen=True, slots=True)
class Updated:
    """An update that was carried out."""

    weights: Digest
    version: str
    instances: int
    """How many computed with them when it ended."""
    held_s: float
    """For how long no request was placed."""


@dataclass(slots=True, eq=False)
class Update:
    """An update that is under way."""

    number: int
    order: UpdateOrder
    mode: UpdateMode
    """What is left of that of the order."""
    answer: Callable[[Updated | TandemError], object]
    """Called once, when it is over."""
    deadline_s: float
    lives: set[Life]
    """The members that have the fleet's weights, and so must change. Others are brought to the new ones afterwards."""
    is_switching: bool = False
    """All members have staged the new weights, and change to them."""
    staged: dict[Life, Digest] = field(default_factory=dict)
    weights: Digest = Digest("")
    """The new ones, once all have them."""
    resting: set[Life] = field(default_factory=set)
    """With mode finish: the first half. They get no requests any more."""
    held_since_s: float | None = None
    """Since when no request is placed."""

    @property
    def name(self) -> str:
        """What people call the new weights."""
        return self.order.version or self.weights


class FleetWeights:
    """The weights of a router's fleet. longest_s: the longest that a request may take. members: all that there are. judge: called
    for a member whose fitness has changed."""

    def __init__(
        self, router: InstanceId, longest_s: float, members: Callable[[], Iterable[Member]], judge: Callable[[Member], object]
    ) -> None:
        self._longest_s, self._members, self._judge = longest_s, members, judge
        self._number = zlib.crc32(router.encode()) << 24
        """The number of the latest update. Those of two lives do not meet."""
        self.target = Digest("")
        """What members must compute with: the first one's, until an update; "": nobody has said."""
        self.version = ""
        """What people call them."""
        self._source: WeightsSource | None = None
        """How a newcomer gets them; None: it must have them."""
        self._source_number = 0
        """The number of the update that brought them."""
        self._to_rename: set[Life] = set()
        """Members that have the weights of the fleet, and are to learn what these are called."""
        self._bringing: dict[Life, Digest | None] = {}
        """Newcomers that had others, and what they have staged so far."""
        self._differs_s: dict[Life, float] = {}
        """Since when members have had weights that another router gave them, and this one does not know."""
        self._heard_s = 0.0
        """When a member was last heard."""
        self._unable: dict[Life, str] = {}
        """Why newcomers could not be given the fleet's weights."""
        self.update: Update | None = None
        self.is_paused = False
        """Somebody wants no request placed until told otherwise."""
        self.holds_steps = False
        """Somebody wants no step launched until told otherwise."""

    @property
    def is_held(self) -> bool:
        """No request may be placed now; those that come wait."""
        return self.is_paused or (self.update is not None and self.update.held_since_s is not None)

    @property
    def is_settling(self) -> bool:
        """Some decode instances get no requests only because another router has the fleet change its weights: in a moment more
        than half of them will have changed, and this router follows."""
        decodes = (member for member in self._members() if member.info.role == "decode")
        return any(self._heard_s - self._differs_s.get(member.life, -math.inf) < SETTLE_S for member in decodes)

    def next_deadline(self) -> float | None:
        return None if self.update is None else self.update.deadline_s

    # --- orders of people ----------------------------------------------------------------------------------------------------

    def begin(self, order: UpdateOrder, answer: Callable[[Updated | TandemError], object], now: float) -> Change:
        """Have all members change. answer: called with what came of it. Raises Conflict, Unavailable, BadRequest."""
        if self.update is not None:
            raise Conflict("another update of the weights is under way: wait until it has ended")
        members = list(self._members())
        if not members:
            raise Unavailable("no instance is a member of the fleet")
        for member in members:
            if not member.weights:
                raise BadRequest(f"{member.info.id} is of an older version, which cannot change its weights: start it anew")
        self._number += 1
        lives = {member.life for member in members if self._fits(member)} or {member.life for member in members}
        self.update = Update(self._number, order, order.mode, answer, now + STAGE_S, lives)
        return self._tell_all()

    def rename(self, version: str) -> Change:
        """Call the present weights so. Raises Conflict."""
        if self.update is not None:
            raise Conflict("an update of the weights is under way, which names them: wait until it has ended")
        self.version = version
        self._to_rename = {member.life for member in self._members()}
        return self._tell_all()

    def pause(self, *, holds_steps: bool) -> Change:
        """Place no request until `go_on`. holds_steps: members launch no step either."""
        self.is_paused, self.holds_steps = True, holds_steps
        return self._tell_all()

    def go_on(self) -> Change:
        self.is_paused = self.holds_steps = False
        return Change(more_can_serve=True).take(self._tell_all())

    # --- what members say ----------------------------------------------------------------------------------------------------

    def why_not(self, weights: Digest, newcomer: InstanceId) -> str | None:
        """Why an instance that begins with these weights cannot be a member; None when it can, at once or after it was given the
        fleet's."""
        once = isinstance(self._source, WeightsFromGroup)
        if not self.target or weights in ("", self.target) or self.update is not None or not (self._source is None or once):
            return None
        fix = "send POST /update_weights_from_disk, because what a trainer broadcasts comes once" if once else _SAME_FILES
        return (
            f"the weights of {newcomer} have the digest {weights}, but those of this fleet have {self.target}"
            f"{f' (version {self.version})' if self.version else ''}: {fix}"
        )

    def joined(self, member: Member, now: float) -> Change:
        if not self.target:
            self.target, self.version = member.weights, member.weight_version
        if not self._fits(member):
            self._bringing[member.life] = None
        else:
            self._to_rename.add(member.life)
            if self.update is not None and not self.update.is_switching:
                self.update.lives.add(member.life)
        return self._follow(member, now)

    def left(self, member: Member, now: float) -> Change:
        """It serves nothing any more, and keeps nobody waiting."""
        self._bringing.pop(member.life, None)
        self._differs_s.pop(member.life, None)
        self._unable.pop(member.life, None)
        self._to_rename.discard(member.life)
        is_gone = self.update is None and not any(True for _ in self._members())
        if is_gone and not isinstance(self._source, WeightsOnDisk):  # else those that come are given the fleet's
            self.target, self._source = Digest(""), None
        update = self.update
        if (
            update is not None
            and not update.is_switching
            and member.life in update.lives
            and isinstance(update.order.source, WeightsFromGroup)
        ):
            fix = "make a group of the instances that are there with POST /init_weights_update_group"
            return self._fail(Unavailable(f"{member.info.id} has left, and was of the group that gets the new weights: {fix}"))
        change = Change()
        self._proceed(change, now)
        return change

    def heard(self, member: Member, now: float) -> Change:
        """A heartbeat says what the member computes with."""
        change, self._heard_s = Change(), now
        if self.update is None and not self._fits(member) and member.life not in self._bringing:
            self._differs_s.setdefault(member.life, now)
            change.more_can_serve = self._follow_others()
        if self._fits(member):
            self._differs_s.pop(member.life, None)
        if member.weights == self.target and member.weight_version == self.version:
            self._to_rename.discard(member.life)
        elif self.update is None and member.weights == self.target and member.life not in self._to_rename:
            self.version = member.weight_version  # another router has renamed them
        return change.take(self._follow(member, now))

    def staged(self, message: WeightsStaged, member: Member, now: float) -> Change:
        """A member has made weights ready, or cannot."""
        update, life = self.update, member.life
        if update is not None and message.update == update.number:
            if message.failed is None:
                update.staged[life] = message.weights
            elif update.is_switching:
                update.staged.pop(life, None)  # it has lost them, and stages them again
            else:
                who = f"{member.info.id} cannot use the new weights: {message.failed.message}"
                return self._fail(message.failed.to_error(who))
        elif message.update == self._source_number and life in self._bringing:
            self._unable.pop(life, None)
            if message.weights != self.target:
                self._unable[life] = message.failed.message if message.failed is not None else f"it has read {message.weights}"
            self._mark(member)
            if message.failed is not None and message.failed.retryable:
                self._bringing[life] = None  # again with its next heartbeat: it has forgotten the failure by then
                return Change([Send(member.info.id, DropWeights(update=message.update))])
            self._bringing[life] = message.weights
        return self._follow(member, now)

    def tick(self, now: float) -> Change:
        change, update = Change(), self.update
        if update is None or now < update.deadline_s:
            return change
        late = [member for member in self._members() if self._keeps_waiting(update, member)]
        if not update.is_switching:
            names = ", ".join(member.info.id for member in late)
            return self._fail(Unavailable(f"the new weights were not ready within {STAGE_S:g} s on {names}"))
        if update.mode == "finish":
            update.mode = "recompute"  # what still runs has had its time
            self._hold(update, now)
            change.take(self._tell_all())
        else:
            for member in late:
                member.drain()
                self._judge(member)
                change.sends.append(Send(member.info.id, Drain(incarnation=member.info.incarnation)))
        update.deadline_s = now + SWITCH_S
        self._proceed(change, now)
        return change

    # --- inside --------------------------------------------------------------------------------------------------------------

    def _follow(self, member: Member, now: float) -> Change:
        """What follows from news of this member."""
        self._mark(member)
        change = Change(self._orders(member))
        self._proceed(change, now)
        return change

    def _tell_all(self) -> Change:
        sends: list[Send] = []
        for member in self._members():
            self._mark(member)
            sends += self._orders(member)
        return Change(sends)

    def _fits(self, member: Member) -> bool:
        return member.weights in ("", self.target)

    def _mark(self, member: Member) -> None:
        """Note why the member gets no requests, if its weights are the reason."""
        update, misfit = self.update, ""
        if not self._fits(member):
            misfit = f"it computes with {member.weights}, and the fleet with {self.target}"
            if (reason := self._unable.get(member.life)) is not None:
                misfit = f"it cannot be given the weights of the fleet, {self.target}: {reason}"
            elif update is None and self._source is None and member.life in self._bringing:
                misfit = f"{misfit}: {_SAME_FILES}"
        elif update is not None and member.life in update.resting:
            misfit = "it changes its weights as soon as it is idle"
        if misfit != member.misfit:
            member.misfit = misfit
            self._judge(member)

    def _orders(self, member: Member) -> list[Send]:
        """What the member must be told, as far as its latest report shows. It is told again with each report until it has done
        so: each message may be lost."""
        life, update, sends = member.life, self.update, list[Send]()
        if member.is_holding != self.holds_steps:
            sends.append(Send(life.id, HoldSteps(hold=self.holds_steps)))
        if not member.weights:
            return sends
        if member.staged_update >> 24 == self._number >> 24 and not self._is_wanted(member):
            sends.append(Send(life.id, DropWeights(update=member.staged_update)))
        if update is not None and life in update.lives and member.weights != update.weights:
            if life not in update.staged:
                order = StageWeights(update=update.number, source=update.order.source, incarnation=life.incarnation)
                return [*sends, Send(life.id, order)]
            return [*sends, *([self._switch(member, update.number, update.weights, update.name)] if self._may(member) else [])]
        if update is None and not self._fits(member) and self._source is not None and life in self._bringing:
            staged = self._bringing[life]
            if staged == self.target:
                return [*sends, self._switch(member, self._source_number, self.target, self.version)]
            if staged is None:
                stage = StageWeights(update=self._source_number, source=self._source, incarnation=life.incarnation)
                return [*sends, Send(life.id, stage)]
        if life in self._to_rename and member.weights == self.target and member.weight_version != self.version:
            sends.append(self._switch(member, 0, self.target, self.version))
        return sends

    def _is_wanted(self, member: Member) -> bool:
        """Whether what the member has staged for this router is still of use."""
        if self.update is not None and member.staged_update == self.update.number:
            return True
        return member.life in self._bringing and member.staged_update == self._source_number

    def _switch(self, member: Member, number: int, weights: Digest, version: str) -> Send:
        order = SwitchWeights(update=number, weights=weights, version=version, incarnation=member.info.incarnation)
        return Send(member.info.id, order)

    def _may(self, member: Member) -> bool:
        """Whether the member may change now."""
        update = self.update
        if update is None or not update.is_switching:
            return False
        if update.mode != "finish":
            return True
        if self.target != update.weights and member.life not in update.resting:
            return False
        return not (member.assigned_requests or member.requests_to_do or member.load.reservations)

    def _keeps_waiting(self, update: Update, member: Member) -> bool:
        """Whether the present phase cannot end without this member."""
        if member.life not in update.lives:
            return False
        if not update.is_switching:
            return member.life not in update.staged
        return member.weights not in ("", update.weights) and not member.draining

    def _proceed(self, change: Change, now: float) -> None:
        """Go on with the update if nothing keeps it waiting."""
        update = self.update
        if update is None:
            return
        members = [member for member in self._members() if member.life in update.lives]
        if not update.is_switching:
            if not members:
                self._fail(Unavailable("no instance is left in the fleet"))
                return
            if any(self._keeps_waiting(update, member) for member in members):
                return
            digests = Counter(update.staged[member.life] for member in members)
            if len(digests) != 1:
                self._differ(update, members, change)
                return
            (update.weights,) = digests
            change.aborts = update.mode == "abort"
            if update.weights == self.target:
                self._settle(update, change, now)
                return
            self._begin_switching(update, members, now)
            change.take(self._tell_all())
        elif self.target != update.weights and update.mode == "finish":
            first_half = (member for member in members if member.life in update.resting)
            if not any(self._keeps_waiting(update, member) for member in first_half):
                self._turn_to(update, change)
        if update.is_switching and self._is_without_servers(update):
            self._hold(update, now)
        if update.is_switching and not any(self._keeps_waiting(update, member) for member in members):
            self._settle(update, change, now)

    def _is_without_servers(self, update: Update) -> bool:
        """Whether the update keeps all decode instances from what comes. One that is left can serve alone."""
        decodes = [member for member in self._members() if member.info.role == "decode"]
        return bool(decodes) and not any(member.trouble is None and member.life not in update.resting for member in decodes)

    def _begin_switching(self, update: Update, members: list[Member], now: float) -> None:
        """With mode finish, one half of each role rests first, so that the other half serves what comes. Where there is only one
        decode instance, nobody can."""
        longest_s = update.order.finish_s or self._longest_s
        update.is_switching, update.deadline_s = True, now + (longest_s if update.mode == "finish" else SWITCH_S)
        if update.mode == "finish":
            staying = [member for member in members if not member.draining]
            decodes = [member for member in staying if member.info.role == "decode"]
            prefills = [member for member in staying if member.info.role == "prefill"]
            first = decodes[: max(1, len(decodes) // 2)] + prefills[: -(-len(prefills) // 2)]
            update.resting = {member.life for member in (first if len(decodes) > 1 else members)}
        else:
            self._hold(update, now)

    def _hold(self, update: Update, now: float) -> None:
        if update.held_since_s is None:
            update.held_since_s = now

    def _aim_at(self, weights: Digest, version: str, source: WeightsSource | None, number: int) -> None:
        """Members must compute with these from now on."""
        self.target, self.version, self._source, self._source_number = weights, version, source, number
        self._unable.clear()  # they were about others, or about another source

    def _turn_to(self, update: Update, change: Change) -> None:
        """New requests go to the members that have changed; the others rest and follow."""
        self._aim_at(update.weights, update.name, update.order.source, update.number)
        update.resting.clear()
        change.more_can_serve = True
        change.take(self._tell_all())

    def _settle(self, update: Update, change: Change, now: float) -> None:
        """Everybody that is left has the new weights."""
        self.update = None
        self._bringing.clear()
        same = not update.is_switching
        version = (update.order.version or self.version) if same else update.name
        keeps_source = same and isinstance(self._source, WeightsOnDisk) and not isinstance(update.order.source, WeightsOnDisk)
        source, number = (self._source, self._source_number) if keeps_source else (update.order.source, update.number)
        self._aim_at(update.weights, version, source, number)
        self.is_paused = self.is_paused or update.order.keeps_pause
        change.more_can_serve = True
        members = list(self._members())
        self._to_rename = {member.life for member in members}
        for member in members:
            if not self._fits(member):
                self._bringing[member.life] = None
            self._mark(member)
            if same:
                change.sends.append(Send(member.info.id, DropWeights(update=update.number)))
            change.sends += self._orders(member)
        held_s, count = 0.0 if update.held_since_s is None else now - update.held_since_s, sum(map(self._fits, members))
        if count:
            update.answer(Updated(self.target, self.version, count, held_s))
        else:
            update.answer(Unavailable("no instance has changed its weights in time: those that come back get the new ones"))

    def _differ(self, update: Update, members: list[Member], change: Change) -> None:
        named = ", ".join(f"{update.staged[member.life]} on {member.info.id}" for member in members)
        field = {WeightsOnDisk: "model_path", WeightsInMemory: "shared_memory"}.get(type(update.order.source), "names")
        failed = self._fail(BadRequest(f"the new weights are not the same everywhere: {named}", field=field))
        change.sends += failed.sends

    def _fail(self, error: TandemError) -> Change:
        """The weights stay as they are."""
        update = self.update
        assert update is not None
        self.update = None
        update.answer(error)
        for member in self._members():
            self._mark(member)
        return Change([Send(member.info.id, DropWeights(update=update.number)) for member in self._members()])

    def _follow_others(self) -> bool:
        """Another router has changed the fleet's weights: follow when more than half of the members have that had them. Returns
        whether that is so now."""
        members = [member for member in self._members() if member.life not in self._bringing]
        weights, count = Counter(member.weights for member in members).most_common(1)[0]
        if weights and weights != self.target and 2 * count > len(members):
            version = next(member.weight_version for member in members if member.weights == weights)
            self._aim_at(weights, version, None, self._source_number)
            for member in members:
                self._mark(member)
            return True
        return False
