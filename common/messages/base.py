"""The base of every message, and the version of the wire."""

import msgspec

WIRE_VERSION = 5
"""Raised when a message changes meaning. Neighbouring versions work together: new fields have defaults. Raised by two when that
cannot be."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of every message. The tag on the wire is the class name, unless the class keeps an older one."""
