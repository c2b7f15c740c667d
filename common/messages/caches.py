"""Prefix caches: what an instance tells those routers that ask which blocks it has.

Owns the words. Does not know how a router uses them: `common/pages/blocks.py` says what a block is.
"""

from common.ids import Incarnation, InstanceId
from common.messages.base import Message
from common.ranges import Count


class TellCache(Message, frozen=True):
    """router → instance: send the names of all blocks in the prefix cache, and from now on what changes."""


class CacheChanges(Message, frozen=True, omit_defaults=True):
    """instance → router: which blocks have come into its prefix cache and left it, or all that are there.

    A router applies changes only to the version that they follow. Heartbeats say the latest version: who lacks it for longer than
    a heartbeat asks again with TellCache.
    """

    id: InstanceId
    incarnation: Incarnation
    version: Count
    """Of the cache with this message applied. It rises with every message of changes."""
    since: Count | None = None
    """The version that these changes follow; None: `stored` is a part of all blocks at this version."""
    stored: bytes = b""
    """Names of blocks: little-endian uint64, in any order."""
    gone: bytes = b""
    """Names of blocks that left."""
    part: Count = 0
    """The number of this part of all blocks."""
    more: bool = False
    """Another part follows: act when all are there."""
