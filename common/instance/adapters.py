"""The LoRA adapters of an instance: the fleet's table as it knows it, what it reads, holds, and forgets.

Owns which adapters requests can have here. Does not know how they are read or what computes with them (the executor does), or
which requests are open: `RequestTable` ends those whose adapter is served no more, and says when nothing uses it.

    SetAdapters ─► the table, and what each router wants ─► read what is lacking ─► AdaptersHeld to all routers
                                                        └─► serve the rest no more ─► unused ─► executor.free_adapter
"""

from collections.abc import Callable, Iterable, Mapping

from common.errors import ConfigError, TandemError
from common.executor import Executor, Work, take_done
from common.ids import Digest, InstanceId
from common.instance.ports import Send
from common.instance.roles import InstanceRole
from common.messages import AdaptersHeld, SetAdapters
from common.messages.base import fits
from common.messages.variants import AT_START, AdapterEntry, AdapterTable, ReadAdapter

REASON_CHARS = 500


class InstanceAdapters:
    """at_start: the folder of each adapter that it loads before it joins a fleet, by its name. is_reading: whether a task reads
    one."""

    def __init__(
        self, role: InstanceRole, executor: Executor, at_start: Mapping[str, str], is_reading: Callable[[], bool]
    ) -> None:
        self._role, self._executor, self._is_reading = role, executor, is_reading
        self.table = AdapterTable()
        self.version = 0
        """Rises with every change that routers hear of."""
        self.served: frozenset[Digest] = frozenset()
        """What requests can have."""
        self.unused: frozenset[Digest] = frozenset()
        """What is held besides."""
        self._held: set[Digest] = set()
        """What the executor has: those, and what is still used."""
        self._to_free: set[Digest] = set()
        """What nothing uses any more."""
        self._wanted: dict[InstanceId, SetAdapters] = {}
        """The latest of each router."""
        self._read: dict[Digest, tuple[InstanceId, int]] = {}
        """What was read for a router's task, until the router says that it is over."""
        self._failed: dict[Digest, str] = {}
        """Why it cannot hold what is needed."""
        self._reading: dict[Digest, Work] = {}
        """By what is expected."""
        self._is_stale = False
        """Something has changed since `poll` last looked."""
        self._told = 0
        """The version that routers have heard of."""
        self._folders = at_start
        self._starting = {name: executor.perform(ReadAdapter(folder)) for name, folder in at_start.items()}

    @property
    def is_ready(self) -> bool:
        """It holds all that it loads before it joins a fleet."""
        return not self._starting

    @property
    def ends_s(self) -> Iterable[float | None]:
        """When what is read now is ready, if that is known in advance."""
        return [work.ends_s for work in (*self._reading.values(), *self._starting.values())]

    def order(self, router: InstanceId, order: SetAdapters) -> list[Send]:
        """A router that has welcomed this instance says what it wants."""
        if not fits(order.incarnation, self._role.me.incarnation):
            return []
        before = self._wanted.get(router)
        if before is None or order.number > before.number:
            self._failed.clear()  # it is tried again
        if before is None or order.number >= before.number:
            self._wanted[router] = order
        if self.table.merge(order.entries):
            self.version += 1
        self._read = {
            digest: (owner, number)
            for digest, (owner, number) in self._read.items()
            if owner != router or number > order.tasks_over
        }
        self._is_stale = True
        return [Send(router, self.report(router))]

    def read(self, router: InstanceId, number: int, digest: Digest) -> None:
        """The executor holds an adapter that a router's task had it read."""
        self._held.add(digest)
        self._is_stale = True
        order = self._wanted.get(router)
        if order is None or number > order.tasks_over:  # else the order has come late, and nobody waits for it
            self._read[digest] = router, number

    def forget(self, router: InstanceId) -> None:
        """This life of a router is gone: it wants nothing more."""
        self._is_stale = True
        self._wanted.pop(router, None)
        self._read = {digest: task for digest, task in self._read.items() if task[0] != router}

    def unused_by_all(self, digest: Digest) -> None:
        """No request has it any more."""
        self._to_free.add(digest)
        self._is_stale = True
        self._free()

    def poll(self) -> bool:
        """Take in what was read, and begin to read what is lacking. Whether routers must hear of something new. Raises
        ConfigError when an adapter that it was started with cannot be used."""
        for name, result, failed in take_done(self._starting):
            self._is_stale = True
            if failed is not None:
                raise ConfigError(f"--lora {name}={self._folders[name]}: {failed.message}")
            self._held.add(Digest(result))
            self.table.merge([AdapterEntry(name=name, version=AT_START, digest=Digest(result), folder=self._folders[name])])
            self.version += 1
        for digest, result, failed in take_done(self._reading):
            self._is_stale = True
            if failed is not None:
                self._fail(digest, failed.message)
                continue
            self._held.add(Digest(result))
            if result != digest:
                self._fail(digest, f"the files have the digest {result} here")
        if not self._is_stale and not self._to_free:  # this is asked in every turn of the loop
            return False
        self._is_stale = False
        for digest, folder in self._needed().items():
            if folder and not {digest} & (self._held | self._failed.keys() | self._reading.keys()):
                try:
                    self._reading[digest] = self._executor.perform(ReadAdapter(folder))
                except TandemError as error:
                    self._fail(digest, str(error))
        self._free()
        before = self.served, self.unused
        self.served = frozenset(self._needed().keys() & self._held)
        self.unused = frozenset(self._held - self.served)
        if (self.served, self.unused) != before:
            self.version += 1
        is_news, self._told = self.version != self._told, self.version
        return is_news

    def report(self, router: InstanceId) -> AdaptersHeld:
        me, order = self._role.me, self._wanted.get(router)
        return AdaptersHeld(
            id=me.id,
            incarnation=me.incarnation,
            version=self.version,
            number=0 if order is None else order.number,
            entries=tuple(self.table.values()),
            held=tuple(sorted(self.served)),
            leaving=tuple(sorted(self.unused)),
            failed=self._failed,
        )

    def _needed(self) -> dict[Digest, str]:
        """The folder of each that it is to hold; "": it was read already, and is not read again."""
        needed = dict.fromkeys(self._read, "")
        for order in self._wanted.values():
            needed |= order.wanted
        return needed | {entry.held: entry.folder for entry in self.table.values() if entry.held}

    def _free(self) -> None:
        """Not while something is read: it may be the same, and the executor may hold it already."""
        if self._to_free and not self._reading and not self._starting and not self._is_reading():
            for digest in self._to_free & self._held - self._needed().keys():
                self._held.discard(digest)
                self._executor.free_adapter(digest)
                self._failed.clear()  # there is a place more
                self._is_stale = True
                self.version += 1
            self._to_free.clear()

    def _fail(self, digest: Digest, reason: str) -> None:
        self._failed[digest] = reason[:REASON_CHARS]
        self.version += 1
