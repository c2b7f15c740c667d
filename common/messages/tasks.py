"""Tasks: what a router has its members do once, beside their steps.

Owns the vocabulary. Does not know how a task is carried out: the executor of each rank does.

    DoTask ─► TaskDone      with a result, or why it cannot be; asked again, the instance answers again and does nothing twice
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from common.ids import Incarnation, InstanceId
from common.messages.base import UNNAMED, Message
from common.messages.requests import Failed
from common.messages.weights import GroupName, Path
from common.ranges import Count, Seconds, Size

RESULT_CHARS = 8 * 2**20
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]


class ReadAdapter(msgspec.Struct, frozen=True, tag="adapter"):
    """Read a LoRA adapter, and hold it. The result is its digest."""

    folder: Path
    """As the instance's host names it; what PEFT's save_pretrained has written."""


class JoinGroup(msgspec.Struct, frozen=True, tag="join"):
    """Join a trainer's group of `torch.distributed`, with every rank of the instance."""

    group: GroupName
    address: Name
    """Where the group meets: the trainer's host."""
    port: Annotated[int, Meta(ge=1, le=65_535)]
    first_rank: Count
    """That of the instance's rank 0; its others follow."""
    world_size: Size
    """How many processes meet."""
    backend: Name
    """"gloo" or "nccl"."""
    timeout_s: Seconds
    """How long they may take to meet, and any broadcast afterwards."""


class LeaveGroup(msgspec.Struct, frozen=True, tag="leave"):
    """Leave a trainer's group, if the instance is in it; what is received from it meanwhile is given up."""

    group: GroupName


class ReadWeight(msgspec.Struct, frozen=True, tag="read"):
    """The result is JSON: the first rows of a weight in use, as numbers."""

    name: Name
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
