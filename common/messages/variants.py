"""Variants: the weights and adapters that the instances of a fleet compute with, and the tasks that routers give them meanwhile.

Owns where new weights come from, and what an instance says of them; the table of adapters, which all routers and instances keep
alike; the vocabulary of tasks. Does not know how weights or adapters are read, which requests go on, or how a task is carried
out: the executor of each rank does that.

    StageWeights  ─► WeightsStaged      read, checked and ready beside those in use, with their digest; or why that is impossible
    SwitchWeights ─► Heartbeat          every open request ends (it is resumed), and the instance computes with the new ones
    DropWeights                         they are not wanted: forget them
    HoldSteps                           launch no step until told to go on: requests stay where they are
    DoTask ─► TaskDone                  with a result, or why it cannot be; asked again, it answers again and does nothing twice
    SetAdapters ─► AdaptersHeld         the router's table, and what it needs besides; then the instance's

A router has every instance read a new adapter (ReadAdapter): its digest is the same everywhere. Whoever hears of a later version
of an entry takes it over. So a router that has just started learns the table from the instances, and an instance from the
routers; it reads what it lacks.
"""

from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from common.ids import Digest, Incarnation, InstanceId
from common.messages.base import UNNAMED, Message
from common.messages.requests import Failed
from common.ranges import Count, Seconds, Size

# --- weights -----------------------------------------------------------------------------------------------------------------

MOST_SEGMENTS = 4_096
MOST_WEIGHTS = 16_384
VERSION_CHARS = 128
FIRST_VERSION = "default"
"""What the weights are called with which an instance begins, as in SGLang."""
Path: TypeAlias = Annotated[str, Meta(min_length=1, max_length=4_096)]
WeightVersion: TypeAlias = Annotated[str, Meta(max_length=VERSION_CHARS)]
"""What people call some weights. "": not said."""


class WeightsOnDisk(msgspec.Struct, frozen=True, tag="disk"):
    """A checkpoint: all weights are in it."""

    folder: Path
    """As the instance's host names it."""


class WeightsInMemory(msgspec.Struct, frozen=True, tag="memory"):
    """Images of safetensors files in shared memory of the instance's host. Weights that are in none of them stay as they are."""

    segments: Annotated[tuple[Path, ...], Meta(min_length=1, max_length=MOST_SEGMENTS)]
    """Names of shared memory (shm_open(3)), without the slash."""


GroupName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
FloatName: TypeAlias = Literal["float64", "float32", "float16", "bfloat16"]
"""As torch names it."""


class AnnouncedWeight(msgspec.Struct, frozen=True, array_like=True):
    """A weight that somebody will send."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    """As the checkpoint names it."""
    dtype: FloatName
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**40)], ...], Meta(max_length=8)]


class WeightsFromGroup(msgspec.Struct, frozen=True, tag="group"):
    """What rank 0 of a trainer's group broadcasts to all others, one weight after the other. Weights that are not among them stay
    as they are. They come once: who was not there cannot get them later."""

    group: GroupName
    bucket: Annotated[str, Meta(min_length=1, max_length=64)]
    """What tells this broadcast from all others."""
    weights: Annotated[tuple[AnnouncedWeight, ...], Meta(min_length=1, max_length=MOST_WEIGHTS)]
    """In the order in which they come."""


WeightsSource: TypeAlias = WeightsOnDisk | WeightsInMemory | WeightsFromGroup


class StageWeights(Message, frozen=True):
    """router → instance. Another one for the same life drops what the former has staged."""

    update: Count
    """The number of the update; the answer and later orders repeat it."""
    source: WeightsSource
    incarnation: Incarnation = UNNAMED
    """The life that is meant."""


class WeightsStaged(Message, frozen=True):
    """instance → router."""

    id: InstanceId
    incarnation: Incarnation
    update: Count
    weights: Digest
    """The digest of the whole model with them; "" if they cannot be used."""
    failed: Failed | None = None
    """Why they cannot be used."""


class SwitchWeights(Message, frozen=True):
    """router → instance: use what was staged. What is not staged, or is in use already, changes nothing: heartbeats tell."""

    update: Count
    weights: Digest
    """What was staged."""
    version: WeightVersion = ""
    """What people call them from now on."""
    incarnation: Incarnation = UNNAMED
    """The life that is meant."""


class DropWeights(Message, frozen=True):
    """router → instance: what was staged is not wanted."""

    update: Count


class HoldSteps(Message, frozen=True):
    """router → instance."""

    hold: bool
    """Launch no step from now on; False: go on."""


# --- adapters ----------------------------------------------------------------------------------------------------------------

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


# --- tasks -------------------------------------------------------------------------------------------------------------------

RESULT_CHARS = 8 * 2**20
ShortText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]


class ReadAdapter(msgspec.Struct, frozen=True, tag="adapter"):
    """Read a LoRA adapter, and hold it. The result is its digest."""

    folder: Path
    """As the instance's host names it; what PEFT's save_pretrained has written."""


class JoinGroup(msgspec.Struct, frozen=True, tag="join"):
    """Join a trainer's group of `torch.distributed`, with every rank of the instance."""

    group: GroupName
    address: ShortText
    """Where the group meets: the trainer's host."""
    port: Annotated[int, Meta(ge=1, le=65_535)]
    first_rank: Count
    """That of the instance's rank 0; its others follow."""
    world_size: Size
    """How many processes meet."""
    backend: ShortText
    """"gloo" or "nccl"."""
    timeout_s: Seconds
    """How long they may take to meet, and any broadcast afterwards."""


class LeaveGroup(msgspec.Struct, frozen=True, tag="leave"):
    """Leave a trainer's group, if the instance is in it; what is received from it meanwhile is given up."""

    group: GroupName


class ReadWeight(msgspec.Struct, frozen=True, tag="read"):
    """The result is JSON: the first rows of a weight in use, as numbers."""

    name: ShortText
    """As the checkpoint names it."""
    rows: Size
    """How many of them."""


Task: TypeAlias = ReadAdapter | JoinGroup | LeaveGroup | ReadWeight


class DoTask(Message, frozen=True):
    """router → instance, with each heartbeat until TaskDone comes."""

    number: Count
    """The router's number for it. A later one is higher."""
    task: Task
    incarnation: Incarnation = UNNAMED
    """The life that is meant."""


class TaskDone(Message, frozen=True):
    """instance → router."""

    id: InstanceId
    incarnation: Incarnation
    number: Count
    result: Annotated[str, Meta(max_length=RESULT_CHARS)] = ""
    failed: Failed | None = None
    """Why it could not be carried out."""
