"""The cache index: which members hold which blocks of prompts in their prefix caches, as far as they have said.

Owns the names of blocks and their holders, and what each member has told. Does not know requests, policies or pages: a prompt is
a list of names (`common/pages/radix_cache.py`).

    TellCache ─► all blocks ─► changes, changes, ...      each follows a version: what follows another one is dropped
    Heartbeat: cache_version                              another one than here for longer than a heartbeat: TellCache
    expect ─► expected blocks                             of prompts that were sent there a moment ago; they count for EXPECT_S

A member has a bit. The holders of a block are an integer of such bits, so those of a whole prefix are found by `&`. Where a
member is the only holder, the integer is its bit: one object for all its blocks.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from common.ids import Role
from common.instance.ports import Send
from common.messages import CacheChanges, TellCache
from common.pages.radix_cache import NAME_BYTES, pages_of_block
from router.members import Lag, Member

EXPECT_S = 2.0
"""How long a prompt that was sent to a member counts as if it were cached there, unless the member says so."""
EXPECTED_NAMES = 2**18
"""How many such blocks the index knows at once; the oldest go first."""

TRIES = 32
"""How many holders of a prompt are looked at: half a fleet may drain."""


@dataclass(slots=True, eq=False)
class _MemberCache:
    """The prefix cache of one member."""

    member: Member
    bit: int
    """Its place in the holders of a block."""
    held: set[int] = field(default_factory=set)
    """Names of the blocks that it has reported."""
    expected: "dict[int, _SentPrompt]" = field(default_factory=dict)
    """Other blocks that it is to have soon, because of a prompt."""
    version: int = 0
    """Version of the cache as it is here; 0: no report has come yet."""
    arriving: "_ArrivingReport | None" = None
    """A report of all its blocks, of which only some parts are here."""
    lag: Lag = field(default_factory=Lag)


@dataclass(slots=True, eq=False)
class _ArrivingReport:
    """The first parts of all blocks of a member at this version."""

    version: int
    parts: int = 0
    names: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, eq=False)
class _SentPrompt:
    """Blocks that were sent to a member and were not there, and until when they are expected to be there soon."""

    cache: _MemberCache
    names: Sequence[int]
    until_s: float


@dataclass(slots=True, eq=False)
class Overlap:
    """How much of a prompt each member held when the prompt was looked up."""

    _index: "CacheIndex"
    _depths: Sequence[int] = ()
    """Numbers of blocks, rising."""
    _holders: Sequence[int] = ()
    """Who holds at least so many of the first blocks, for each depth."""
    _first: int = 0
    """The seat from which on the members of one depth are named."""
    _whole_at: Member | None = None
    """Another choice of the same prompt goes to this member, which has all whole pages of it by then."""
    _whole_tokens: int = 0

    def with_whole(self, member: Member, prompt_tokens: int) -> "Overlap":
        """The same, but this member has all whole pages of the prompt."""
        whole_tokens = (prompt_tokens - 1) // member.page_size * member.page_size
        return replace(self, _whole_at=member, _whole_tokens=whole_tokens)

    def tokens(self, member: Member) -> int:
        """How many of the prompt's first tokens the member holds: whole blocks."""
        if member is self._whole_at:
            return self._whole_tokens
        cache = self._index.of_members.get(member)
        if cache is None or not self._holders or not self._holders[0] & cache.bit:
            return 0
        bit = cache.bit
        fewer = bisect_left(self._holders, True, key=lambda holders: not holders & bit)
        return self._depths[fewer - 1] * self._index.block_tokens

    def deepest(self, role: Role, most: int, suits: Callable[[Member], bool]) -> list[Member]:
        """The members of this role that suit and hold most of the prompt, the deepest first: at most so many of the first TRIES,
        and none that holds nothing. Among equals, the first ones differ from call to call of `match`."""
        found: list[Member] = []
        left, tries = self._index.of_role[role], TRIES
        for holders in reversed(self._holders):
            here = holders & left
            left ^= here
            for member in self._members(here):
                if len(found) == most or not tries:
                    return found
                tries -= 1
                if suits(member):
                    found.append(member)
        return found

    def _members(self, holders: int) -> Iterator[Member]:
        below = (1 << self._first) - 1
        for part in (holders & ~below, holders & below):
            while part:
                bit = part & -part
                part ^= bit
                yield self._index.seats[bit.bit_length() - 1].member


class CacheIndex:
    """The prefix caches of all members."""

    def __init__(self, follows: bool, heartbeat_s: float = 1.0) -> None:
        """follows: whether members are asked for their caches; if not, nobody holds anything. heartbeat_s: how long to wait for a
        missing message."""
        self.follows = follows
        self._heartbeat_s = heartbeat_s
        self._random = Random(0)  # a simulation is repeated exactly
        self._holders: dict[int, int] = {}
        """Who holds, or is expected to hold, the block of this name."""
        self._expected: deque[_SentPrompt] = deque()
        self._expected_names = 0
        self._free: list[int] = []
        """Numbers of seats whose members left."""
        self.of_members: dict[Member, _MemberCache] = {}
        self.seats: list[_MemberCache] = []
        """The members by the numbers of their bits."""
        self.of_role: dict[Role, int] = {"prefill": 0, "decode": 0}
        """The bits of the members of each role."""
        self.page_size = self.block_tokens = 0
        """Tokens of a page and of a block; 0 before anybody with a prefix cache has joined."""

    def __len__(self) -> int:
        """How many blocks somebody holds."""
        return len(self._holders)

    # --- for policies ------------------------------------------------------------------------------------------------------

    def match(self, names: Sequence[int]) -> Overlap:
        """Who holds how much of a prompt. names: of its blocks (`common.pages.radix_cache.BlockNames`)."""
        depths: list[int] = []
        common: list[int] = []
        holders, depth = -1, 0
        for name in names:
            here = holders & self._holders.get(name, 0)
            if here != holders:
                if depth:
                    depths.append(depth)
                    common.append(holders)
                holders = here
                if not here:
                    break
            depth += 1
        if depth and holders:
            depths.append(depth)
            common.append(holders)
        return Overlap(self, depths, common, int(self._random.random() * len(self.seats))) if depths else NO_OVERLAP

    def expect(self, members: Iterable[Member], names: Sequence[int], now: float) -> None:
        """A prompt with these blocks was sent to the members: for a moment, others may follow it there."""
        self._expire(now)
        for cache in filter(None, map(self.of_members.get, members)):
            prompt = _SentPrompt(cache, [name for name in names if name not in cache.held], now + EXPECT_S)
            for name in prompt.names:
                if name not in cache.expected:
                    self._add(cache, name)
                cache.expected[name] = prompt
            self._expected.append(prompt)
            self._expected_names += len(prompt.names)
        while self._expected_names > EXPECTED_NAMES:
            self._forget_oldest()

    # --- who is there ------------------------------------------------------------------------------------------------------

    def join(self, member: Member) -> None:
        """A new life; the former one of its name has left. Who has no prefix cache never holds anything."""
        if not self.follows or not member.info.caches_prefixes:
            return
        self.page_size = member.info.page_size
        self.block_tokens = pages_of_block(self.page_size) * self.page_size
        number = self._free.pop() if self._free else len(self.seats)
        cache = self.of_members[member] = _MemberCache(member, 1 << number)
        self.seats[number : number + 1] = [cache]
        self.of_role[member.info.role] |= cache.bit

    def leave(self, member: Member) -> None:
        """It holds nothing any more."""
        cache = self.of_members.pop(member, None)
        if cache is None:
            return
        for name in cache.held | cache.expected.keys():
            self._drop(cache, name)
        cache.held.clear()
        cache.expected.clear()
        self.of_role[member.info.role] ^= cache.bit
        self._free.append(cache.bit.bit_length() - 1)

    # --- what members say --------------------------------------------------------------------------------------------------

    def heard(self, member: Member, version: int, now: float) -> list[Send]:
        """A member's heartbeat names the version of its cache. What has been missing for longer than a heartbeat is asked for
        again."""
        self._expire(now)
        cache = self.of_members.get(member)
        if cache is None:
            return []
        is_new = cache.version == 0 and cache.lag.since_s is None
        is_missing = cache.version == 0 or version != cache.version  # changes may be under way
        is_overdue = cache.lag.is_overdue(is_missing, now, 0.0 if is_new else self._heartbeat_s / 2)
        return [Send(member.info.id, TellCache())] if is_overdue else []

    def receive(self, member: Member, message: CacheChanges) -> None:
        """A member tells of its cache. What was overtaken is dropped; the next heartbeats show that it is missing."""
        cache = self.of_members.get(member)
        if cache is None or len(message.stored) % NAME_BYTES or len(message.gone) % NAME_BYTES:
            return
        if message.since is None:
            self._take_part(cache, message)
        elif message.since == cache.version:
            for name in _unpack(message.gone):
                self._lose(cache, name)
            for name in _unpack(message.stored):
                self._store(cache, name)
            cache.version = message.version

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _take_part(self, cache: _MemberCache, message: CacheChanges) -> None:
        """A part of all blocks: they count when the last part is here."""
        if message.version < cache.version:
            return
        if message.part == 0:
            cache.arriving = _ArrivingReport(message.version)
        arriving = cache.arriving
        if arriving is None or (arriving.version, arriving.parts) != (message.version, message.part):
            return
        arriving.parts += 1
        arriving.names.update(_unpack(message.stored))
        if message.more:
            return
        cache.arriving = None
        for name in cache.held - arriving.names:
            self._lose(cache, name)
        for name in arriving.names - cache.held:
            self._store(cache, name)
        cache.version = message.version

    def _store(self, cache: _MemberCache, name: int) -> None:
        if cache.expected.pop(name, None) is None and name not in cache.held:
            self._add(cache, name)
        cache.held.add(name)

    def _lose(self, cache: _MemberCache, name: int) -> None:
        if name in cache.held:
            cache.held.remove(name)
            self._drop(cache, name)

    def _add(self, cache: _MemberCache, name: int) -> None:
        holders = self._holders.get(name)
        self._holders[name] = cache.bit if holders is None else holders | cache.bit

    def _drop(self, cache: _MemberCache, name: int) -> None:
        holders = self._holders[name] ^ cache.bit
        if holders == 0:
            del self._holders[name]
        else:
            is_single = holders & (holders - 1) == 0
            self._holders[name] = self.seats[holders.bit_length() - 1].bit if is_single else holders

    def _expire(self, now: float) -> None:
        while self._expected and self._expected[0].until_s <= now:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        prompt = self._expected.popleft()
        cache = prompt.cache
        self._expected_names -= len(prompt.names)
        for name in prompt.names:
            if cache.expected.get(name) is prompt:
                del cache.expected[name]
                self._drop(cache, name)


def _unpack(names: bytes) -> Iterable[int]:
    unpacked: list[int] = np.frombuffer(names, dtype="<u8").tolist()
    return unpacked


NO_OVERLAP = Overlap(CacheIndex(follows=False))
"""Nobody holds anything."""
