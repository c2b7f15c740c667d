"""The base of every message, and the version of the wire."""

import msgspec

from common.ids import Incarnation

WIRE_VERSION = 15
"""Raised by one with the first addition after a release: `VERSIONS` tells what each version has added. Neighbouring versions
work together. Raised by two when that cannot be."""

UNNAMED = Incarnation("")
"""Messages that could reach a successor, at the same address and under the same name, name the life that they are to. This comes
from versions that did not say; it fits every life."""


def fits(named: Incarnation, life: Incarnation) -> bool:
    """Whether a message that names `named` is from, or to, this life."""
    return named in (UNNAMED, life)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of every message. The tag on the wire is the class name, unless the class keeps an older one."""
