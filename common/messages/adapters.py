"""LoRA adapters: which there are, and which of them an instance holds.

Owns the table of adapters, which all routers and instances of a fleet keep alike. Does not know how an adapter is read, or which
request wants which.

    DoTask(ReadAdapter) ─► TaskDone       a router has every instance read a new adapter: its digest is the same everywhere
    SetAdapters ─► AdaptersHeld           the router's table, and what it needs besides; then the instance's

Whoever hears of a later version of an entry takes it over. So a router that has just started learns the table from the instances,
and an instance from the routers; it reads what it lacks.
"""

from collections.abc import Iterable
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from common.ids import Digest, Incarnation, InstanceId
from common.messages.base import UNNAMED, Message
from common.ranges import Count

NAME_CHARS = 256
MOST_ENTRIES = 2_048
"""Adapters that a fleet knows, the removed ones among them."""
AT_START = 0
"""The version of what an instance was started with. What a router has loaded is later."""
Folder: TypeAlias = Annotated[str, Meta(max_length=4_096)]
AdapterName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS)]


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What a fleet knows by one name."""

    name: AdapterName
    """As clients write it."""
    version: Count
    """A later one replaces this entry."""
    digest: Digest = Digest("")
    """What the name stands for; "": for nothing any more."""
    folder: Folder = ""
    """Where it is read, on every host."""
    is_pinned: bool = False
    """It does not give up its place for another one."""
    is_loaded: bool = True
    """Instances hold it; False: they read it again when a request comes."""

    @property
    def held(self) -> Digest:
        """What instances must hold for it; "": nothing."""
        return self.digest if self.is_loaded else Digest("")


class AdapterTable(dict[str, AdapterEntry]):
    """The latest entry of each name. Two that merge what the other has become equal, in any order."""

    def merge(self, entries: Iterable[AdapterEntry]) -> bool:
        """Take over what is later. Whether anything was. The oldest removed names are forgotten when there are too many."""
        changed = False
        for entry in entries:
            mine = self.get(entry.name)
            if mine is None or _order(entry) > _order(mine):
                self[entry.name] = entry
                changed = True
        removed = (
            sorted((entry.version, name) for name, entry in self.items() if not entry.digest) if len(self) > MOST_ENTRIES else []
        )
        for _, name in removed[: len(self) - MOST_ENTRIES]:
            del self[name]
        return changed

    @property
    def next_version(self) -> int:
        return 1 + max((entry.version for entry in self.values()), default=0)

    @property
    def held(self) -> set[Digest]:
        """What instances must hold for it."""
        return {entry.held for entry in self.values() if entry.held}


def _order(entry: AdapterEntry) -> tuple[int, str, bool, bool]:
    return entry.version, entry.digest, entry.is_pinned, entry.is_loaded


class SetAdapters(Message, frozen=True):
    """router → instance, until its AdaptersHeld repeats the number."""

    number: Count
    """Rises with what this router wants."""
    entries: Annotated[tuple[AdapterEntry, ...], Meta(max_length=MOST_ENTRIES)] = ()
    """The router's table."""
    wanted: Annotated[dict[Digest, Folder], Meta(max_length=MOST_ENTRIES)] = msgspec.field(default_factory=dict)
    """What its open requests need although the table names it no more, and where it was read."""
    tasks_over: Count = 0
    """What was read for tasks up to this one, and is not named here, is not needed."""
    incarnation: Incarnation = UNNAMED
    """The life that is meant."""


class AdaptersHeld(Message, frozen=True):
    """instance → router, in answer to SetAdapters and to all routers when something has changed."""

    id: InstanceId
    incarnation: Incarnation
    version: Count
    """Rises with every change. Heartbeats say it too: a router that has missed one sends its SetAdapters again."""
    number: Count = 0
    """That of this router's last SetAdapters."""
    entries: Annotated[tuple[AdapterEntry, ...], Meta(max_length=MOST_ENTRIES)] = ()
    """The instance's table."""
    held: Annotated[tuple[Digest, ...], Meta(max_length=MOST_ENTRIES)] = ()
    """What requests can have here now."""
    leaving: Annotated[tuple[Digest, ...], Meta(max_length=MOST_ENTRIES)] = ()
    """What still takes a place here, and no request can have any more."""
    failed: dict[Digest, str] = msgspec.field(default_factory=dict)
    """Why it cannot hold what is needed."""
