"""Weights: the router has all instances make new ones ready beside those in use, and then change to them.

Owns where new weights come from, and what an instance says of them. Does not know how they are read, or which requests go on.

    StageWeights  ─► WeightsStaged      read, checked and ready beside those in use, with their digest; or why that is impossible
    SwitchWeights ─► Heartbeat          every open request ends (it is resumed), and the instance computes with the new ones
    DropWeights                         they are not wanted: forget them
    HoldSteps                           launch no step until told to go on: requests stay where they are
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from common.ids import Digest, Incarnation, InstanceId
from common.messages.base import UNNAMED, Message
from common.messages.requests import Failed
from common.ranges import Count

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
