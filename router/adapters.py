"""The LoRA adapters of a fleet: their names, who holds them, and how they are loaded, replaced, evicted and unloaded.

Owns the table of adapters as this router knows it, and how many open requests have each. Opens no socket, reads no clock. Does
not know requests: `begin` and `end` count them.

    load ─► room for one more, an adapter that is idle is evicted if need be ─► every member reads it ─► all have one digest
         ─► the table names it: requests can have it     (a member that cannot: the table stays as it was)

An operation is a generator that yields what it waits for; one at a time loads. A name stands for one digest. When another one
takes its place, requests that have the former one keep it, unless they are told to go on with the new one.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from msgspec.structs import replace

from common.errors import BadRequest, NotFound, TandemError, Unavailable
from common.ids import Digest, InstanceId, Life
from common.instance.ports import Send
from common.messages import AdaptersHeld, InstanceInfo, SetAdapters
from common.messages.variants import MOST_ENTRIES, AdapterEntry, AdapterTable, ReadAdapter
from router.members import Member
from router.tasks import FleetTasks

ReplaceMode = Literal["finish", "recompute", "abort"]
"""What becomes of requests whose adapter is replaced: they end with the former one; their KV is computed anew with the new one;
or they end at once."""
READ_S = 600.0
"""How long members may take to read an adapter."""
ROOM_S = 60.0
"""How long an adapter may take to leave the members."""
Condition: TypeAlias = Callable[[], bool]
Operation: TypeAlias = Generator[tuple[Condition, float], None, AdapterEntry]
"""Yields what it waits for, and for how many seconds at most. Returns the entry as it is afterwards."""


@dataclass(slots=True, eq=False)
class _Running:
    operation: Operation
    answer: Callable[[AdapterEntry | TandemError], object]
    waits_for: Condition = lambda: True
    deadline_s: float = 0.0


class Replacement(NamedTuple):
    """Requests with the former adapter are not to end with it."""

    former: Digest
    new: AdapterEntry
    mode: ReplaceMode


class FleetAdapters:
    """members: all that there are."""

    def __init__(self, members: Callable[[], Iterable[Member]], tasks: FleetTasks) -> None:
        self._members, self._tasks = members, tasks
        self.table = AdapterTable()
        self._number = 0
        """Rises with what members must know."""
        self._uses: Counter[Digest] = Counter()
        """How many open requests have each."""
        self._folders: dict[Digest, str] = {}
        """Where each of those was read."""
        self._used_s: dict[str, float] = {}
        """When a request last asked for each."""
        self._running: list[_Running] = []
        self._now = 0.0
        """When they last went on."""
        self._is_loading = False
        """One of them loads."""
        self._sends: list[Send] = []
        self._replaced: list[Replacement] = []

    def why_not(self, its: AdaptersHeld | None, newcomer: InstanceInfo) -> str | None:
        """Why an instance that begins with these adapters cannot be a member; None when it can."""
        digests = dict.fromkeys(self.table.held, "")
        for entry in () if its is None else its.entries:
            mine = self.table.get(entry.name)
            if mine is None or entry.version > mine.version:
                digests[entry.held] = entry.name
            elif entry.version == mine.version and entry.held and mine.held not in ("", entry.held):
                return (
                    f"the adapter {entry.name} of {newcomer.id} has the digest {entry.held}, and that of this fleet {mine.held}: "
                    "start it with the same files, or with another name"
                )
        places = min([newcomer.max_adapters, *(member.info.max_adapters for member in self._members())])
        if any(digests.values()) and len(digests.keys() - {""}) > places:
            own = ", ".join(sorted(name for name in digests.values() if name))
            return f"with {own} of {newcomer.id} the fleet has more than {places} adapters: give more --max-loaded-loras to all"
        return None

    # --- requests ----------------------------------------------------------------------------------------------------------

    def entry(self, name: str) -> AdapterEntry | None:
        """What the name stands for; None: nothing."""
        entry = self.table.get(name)
        return entry if entry is not None and entry.digest else None

    def entries(self) -> Iterator[AdapterEntry]:
        """All that names stand for."""
        return (entry for name in sorted(self.table) if (entry := self.entry(name)) is not None)

    def begin(self, name: str, now: float) -> Digest:
        """A request with this adapter is open from now on. "": none. Raises NotFound, Unavailable."""
        if not name:
            return Digest("")
        entry = self._require_entry(name)
        if not entry.is_loaded:
            raise Unavailable(f"the adapter {name!r} is not loaded at this moment: try again")
        self._used_s[name] = now
        return self._use(entry.digest, entry.folder)

    def _use(self, digest: Digest, folder: str) -> Digest:
        self._uses[digest] += 1
        self._folders[digest] = folder
        return digest

    def end(self, digest: Digest) -> None:
        """A request with this adapter has ended."""
        if not digest:
            return
        self._uses[digest] -= 1
        if not self._uses[digest]:
            del self._uses[digest], self._folders[digest]
            if digest not in self.table.held:
                self._tell_all()

    def change(self, digest: Digest, name: str, now: float) -> Digest:
        """A request that has this adapter goes on with what the name stands for now. Raises NotFound, Unavailable."""
        entry = self._require_entry(name)
        if not entry.is_loaded:
            self.run(self.reload(name), lambda _: None, now)
            raise Unavailable(f"the adapter {name!r} is loaded again")
        return self.exchange(digest, entry)

    def exchange(self, digest: Digest, entry: AdapterEntry) -> Digest:
        """A request that has this adapter goes on with another one."""
        self._use(entry.digest, entry.folder)
        self.end(digest)
        return entry.digest

    def is_lost(self, digest: Digest) -> bool:
        """Some member cannot hold it, and the table names it no more."""
        return digest not in self.table.held and any(digest in member.adapters_failed for member in self._members())

    # --- orders of people --------------------------------------------------------------------------------------------------

    def run(self, operation: Operation, answer: Callable[[AdapterEntry | TandemError], object], now: float) -> None:
        """Carry out one of those that follow. answer: called with what came of it."""
        self._running.append(_Running(operation, answer, deadline_s=now + READ_S))
        self.proceed(now)

    def load(
        self, name: str, folder: str, *, is_pinned: bool = False, replaces: bool = False, mode: ReplaceMode = "finish"
    ) -> Operation:
        """Have all members read it, then let requests have it. replaces: a name that is taken stands for it from then on."""
        yield lambda: not self._is_loading, READ_S
        former = self.entry(name)
        if former is not None and not replaces:
            rule = "unload it first, or replace it with load_inplace"
            raise BadRequest(f"the adapter {name!r} is loaded already, from {former.folder}: {rule}", field="lora_name")
        if former is None and sum(1 for _ in self.entries()) >= MOST_ENTRIES:
            raise BadRequest(f"the fleet knows {MOST_ENTRIES} adapters, which is the most: unload one", field="lora_name")
        digest = yield from self._read(folder, name)
        if former is not None and self.entry(name) is None:
            self.end(digest)
            raise BadRequest(f"the adapter {name!r} was unloaded while it was to be replaced", field="lora_name")
        entry = AdapterEntry(name=name, version=self.table.next_version, digest=digest, folder=folder, is_pinned=is_pinned)
        self._set(entry)
        self.end(digest)
        if former is not None and former.digest != digest and mode != "finish":
            self._replaced.append(Replacement(former.digest, entry, mode))
        return entry

    def reload(self, name: str) -> Operation:
        """Load it again if it was evicted."""
        yield lambda: not self._is_loading, READ_S
        entry = self._require_entry(name)
        if not entry.is_loaded and entry.digest in self.table.held:  # by another name
            entry = replace(entry, version=self.table.next_version, is_loaded=True)
            self._set(entry)
        elif not entry.is_loaded:
            try:
                digest = yield from self._read(entry.folder, name)
            except BadRequest as error:  # whoever asks for an answer did not name the folder
                raise Unavailable(f"the adapter {name!r} was evicted, and cannot be read: load it again: {error}") from error
            still = self.entry(name)  # it may have been unloaded meanwhile
            if still is None or still.digest != digest:
                self.end(digest)
                self._require_entry(name)
                raise Unavailable(f"the files of the adapter {name!r} have changed: load it again")
            entry = replace(entry, version=self.table.next_version, is_loaded=True)
            self._set(entry)
            self.end(digest)
        return entry

    def unload(self, name: str) -> Operation:
        """No request gets it from now on. It is over when those that have it are, and its place is free."""
        entry = self.entry(name)
        if entry is None:
            raise BadRequest(f"there is no adapter {name!r}: GET /v1/models lists those that there are", field="lora_name")
        others = {each.held for each in self.table.values() if each.name != name}
        gone = replace(entry, version=self.table.next_version, digest=Digest(""), folder="", is_pinned=False, is_loaded=False)
        self._set(gone)
        self._used_s.pop(name, None)
        if entry.held and entry.held not in others:

            def is_taken() -> bool:
                """Another name stands for it meanwhile."""
                return entry.held in self.table.held

            yield lambda: is_taken() or not self._uses[entry.held], READ_S
            yield lambda: is_taken() or self._is_gone(entry.held), ROOM_S
        return gone

    # --- what members say --------------------------------------------------------------------------------------------------

    def joined(self, member: Member, held: AdaptersHeld | None, now: float) -> list[Send]:
        if held is not None:
            self.heard(member, held, now)
        return self._remind(member)

    def reported(self, member: Member, version: int, now: float) -> list[Send]:
        """A heartbeat names the version of the member's adapters."""
        self.proceed(now)
        return self._remind(member, is_behind=version != member.adapters_version)

    def heard(self, member: Member, message: AdaptersHeld, now: float) -> bool:
        """Whether the member can serve more requests than before."""
        if message.version < member.adapters_version:
            return False
        before, member.adapters, member.adapters_leaving = member.adapters, frozenset(message.held), message.leaving
        member.adapters_version, member.adapters_number = message.version, max(member.adapters_number, message.number)
        member.adapters_failed = message.failed
        if self.table.merge(message.entries):
            self._tell_all()
        self.proceed(now)
        return not member.adapters <= before

    @property
    def has_news(self) -> bool:
        """Something is to be taken."""
        return bool(self._sends or self._replaced)

    def take_sends(self) -> list[Send]:
        """What members must be told since the last call."""
        sends, self._sends = self._sends, []
        return sends

    def take_replaced(self) -> list[Replacement]:
        replaced, self._replaced = self._replaced, []
        return replaced

    def proceed(self, now: float) -> None:
        """Carry on with the operations, as far as they go."""
        moved = True
        while moved:
            moved = False
            for running in list(self._running):
                is_ready = running.waits_for()
                if not is_ready and now < running.deadline_s:
                    continue
                moved, outcome = True, self._advance(running, now, is_late=not is_ready)
                if outcome is not None:
                    self._running.remove(running)
                    running.answer(outcome)

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _require_entry(self, name: str) -> AdapterEntry:
        entry = self.entry(name)
        if entry is None:
            raise NotFound(f"the adapter {name!r} was unloaded", field="model", code="model_not_found")
        return entry

    def _advance(self, running: _Running, now: float, *, is_late: bool) -> AdapterEntry | TandemError | None:
        """What came of the operation; None: it waits for something else now."""
        self._now = now
        try:
            if is_late:
                running.waits_for, longest_s = running.operation.throw(Unavailable("the instances did not answer in time"))
            else:
                running.waits_for, longest_s = next(running.operation)
        except StopIteration as end:
            entry: AdapterEntry = end.value
            return entry
        except TandemError as error:
            return error
        running.deadline_s = now + longest_s
        return None

    def _read(self, folder: str, name: str) -> Generator[tuple[Condition, float], None, Digest]:
        """Have all members read what this name is to stand for. Until `end` is called they hold it as if a request had it."""
        members = list(self._members())
        cannot = [member.info.id for member in members if not member.info.max_adapters]
        if cannot:
            raise BadRequest(f"{', '.join(cannot[:4])} holds no adapters: start instances with --max-loaded-loras")
        self._is_loading = True
        try:
            yield from self._make_room(min((member.info.max_adapters for member in members), default=1), name)
            outcome: list[dict[Life, str] | TandemError] = []
            tasks = {member.life: ReadAdapter(folder) for member in self._members()}
            self._sends += self._tasks.begin(tasks, outcome.append, self._now + READ_S)
            yield lambda: bool(outcome), READ_S
            digest = self._use(_agreed(folder, outcome[0]), folder)
            try:  # else a request could come before the router has heard who holds it
                yield lambda: all(digest in each.adapters for each in self._members() if each.life in tasks), ROOM_S
            except TandemError:
                self.end(digest)
                raise
            return digest
        except TandemError:
            self._tell_all()  # what some have read is not needed
            raise
        finally:
            self._is_loading = False

    def _make_room(self, places: int, name: str) -> Generator[tuple[Condition, float], None, None]:
        """Evict those that were used longest ago, until there is a place for one more; what the name stands for comes last."""
        while len(self.table.held | set(self._uses)) >= places:
            pinned = {entry.held for entry in self.table.values() if entry.is_pinned}
            idle = [each for each in self.table.values() if each.held and each.held not in pinned and not self._uses[each.held]]
            if not idle:
                yield from self._give_up_own(places, name)
                break
            oldest = min(idle, key=lambda entry: (entry.name == name, self._used_s.get(entry.name, 0.0)))
            for entry in idle:
                if entry.held == oldest.held:
                    self._set(replace(entry, version=self.table.next_version, is_loaded=False))
        # A member may still hold what left the table before, such as an adapter whose last request has just ended.
        yield lambda: self._has_heard(lambda member: len(member.adapters.union(member.adapters_leaving)) < places), ROOM_S

    def _give_up_own(self, places: int, name: str) -> Generator[tuple[Condition, float], None, None]:
        """What the name stands for is to be replaced, and requests have it: new ones wait, as for one that
        was evicted, until these have ended. Else one after another would keep its place for ever."""
        taken = f"all {places} places for adapters are taken by pinned ones or by requests that run"
        all_taken = Unavailable(f"{taken}: unload one, or give instances more --max-loaded-loras")
        own = self.entry(name)
        if own is None or not own.held or any(each.held == own.held for each in self.table.values() if each.name != name):
            raise all_taken
        self._set(replace(own, version=self.table.next_version, is_loaded=False))
        try:
            yield lambda: len(self.table.held | set(self._uses)) < places, READ_S
        except Unavailable as error:
            still = self.entry(name)
            if still is not None and not still.is_loaded and self._uses[own.held]:  # so members hold it
                self._set(replace(still, version=self.table.next_version, is_loaded=True))
            raise all_taken from error

    def _is_gone(self, digest: Digest) -> bool:
        return self._has_heard(lambda member: digest not in member.adapters and digest not in member.adapters_leaving)

    def _has_heard(self, holds: Callable[[Member], bool]) -> bool:
        """Whether this holds of all members, as they are since they know what this router wants."""
        return all(member.adapters_number == self._number and holds(member) for member in self._members())

    def _set(self, entry: AdapterEntry) -> None:
        """One that has just been read counts as used, so that it is not the next one to go."""
        if entry.is_loaded:
            self._used_s[entry.name] = self._now
        self.table.merge([entry])
        self._tell_all()

    def _tell_all(self) -> None:
        self._number += 1
        self._sends += [self._message(member) for member in self._members()]

    def _remind(self, member: Member, *, is_behind: bool = False) -> list[Send]:
        """It is told again until it has heard: messages may be lost."""
        return [self._message(member)] if is_behind or member.adapters_number < self._number else []

    def _message(self, member: Member) -> Send:
        message = SetAdapters(
            number=self._number,
            entries=tuple(self.table.values()),
            wanted={digest: self._folders[digest] for digest in self._uses.keys() - self.table.held},
            tasks_over=self._tasks.last_over,
            incarnation=member.info.incarnation,
        )
        return Send(InstanceId(member.info.id), message)


def _agreed(folder: str, results: dict[Life, str] | TandemError) -> Digest:
    """The digest that all members have read. Raises what went wrong."""
    if isinstance(results, TandemError):
        raise results
    if len(set(results.values())) > 1:
        named = ", ".join(f"{digest} on {life.id}" for life, digest in results.items())
        raise BadRequest(f"{folder} is not the same everywhere: {named}", field="lora_path")
    return Digest(next(iter(results.values())))
