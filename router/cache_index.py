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
from dataclasses import dataclass, field
from random import Random

import numpy as np

from common.ids import Role
from common.instance.ports import Send
from common.messages import CacheChanges, TellCache
from common.pages.radix_cache import NAME_BYTES, pages_of_block
from router.members import Member

EXPECT_S = 2.0
"""How long a prompt that was sent to a member counts as if it were cached there, unless the member says so."""
EXPECTED_NAMES = 2**18
"""How many such blocks the index knows at once; the oldest go first."""

TRIES = 32
"""How many holders of a prompt are tried: half a fleet may drain."""


@dataclass(slots=True, eq=False)
class _Told:
    """What one member has said. bit: its place in the holders of a block.

    held: names of the blocks that it says it has. expected: others that it is to have soon, because of a prompt. version: of its
    cache as it is here; 0: it has not said anything yet. coming: all its blocks, of which only some parts are here. behind_s:
    since when its heartbeats have shown another version, or when it was asked; None: nothing is missing.
    """

    member: Member
    bit: int
    held: set[int] = field(default_factory=set)
    expected: "dict[int, _Prompt]" = field(default_factory=dict)
    version: int = 0
    coming: "_Coming | None" = None
    behind_s: float | None = None


@dataclass(slots=True, eq=False)
class _Coming:
    """The first parts of all blocks of a member at this version."""

    version: int
    parts: int = 0
    names: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    """What was sent to a member, as far as it was not there, and until when it is expected to be there soon."""

    told: _Told
    names: Sequence[int]
    until_s: float


class Overlap:
    """How much of a prompt each member held when the prompt was looked up. depths: numbers of blocks, rising. holders: who holds
    at least so many of the first blocks, for each depth. first: the seat from which on the members of one depth are named."""

    def __init__(self, index: "CacheIndex", depths: Sequence[int] = (), holders: Sequence[int] = (), first: int = 0) -> None:
        self._index = index
        self._depths = depths
        self._holders = holders
        self._first = first

    def tokens(self, member: Member) -> int:
        """How many of the prompt's first tokens the member holds: whole blocks."""
        told = self._index.told.get(member)
        if told is None or not self._holders or not self._holders[0] & told.bit:
            return 0
        bit = told.bit
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


class WholePrompt(Overlap):
    """Another choice of the same prompt goes to this member, which has all whole pages of it by then; the others as before."""

    def __init__(self, before: Overlap, member: Member, prompt_tokens: int) -> None:
        super().__init__(before._index, before._depths, before._holders, before._first)
        self._member = member
        self._whole = (prompt_tokens - 1) // member.page_size * member.page_size

    def tokens(self, member: Member) -> int:
        return self._whole if member is self._member else super().tokens(member)


class CacheIndex:
    """follows: whether members are asked for their caches; if not, nobody holds anything. heartbeat_s: how long a missing message
    is waited for. page_size, block_tokens: tokens of a page and of a block; 0 before anybody with a prefix cache has joined.

    For `Overlap`: told: what each member has said. seats: the members by the numbers of their bits. of_role: their bits.
    """

    def __init__(self, follows: bool, heartbeat_s: float = 1.0) -> None:
        self.follows = follows
        self._heartbeat_s = heartbeat_s
        self._random = Random(0)  # a simulation is repeated exactly
        self._holders: dict[int, int] = {}
        """Who holds, or is expected to hold, the block of this name."""
        self._expected: deque[_Prompt] = deque()
        self._expected_names = 0
        self._free: list[int] = []
        """Numbers of seats whose members left."""
        self.told: dict[Member, _Told] = {}
        self.seats: list[_Told] = []
        self.of_role: dict[Role, int] = {"prefill": 0, "decode": 0}
        self.page_size = self.block_tokens = 0

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
        for told in filter(None, map(self.told.get, members)):
            prompt = _Prompt(told, [name for name in names if name not in told.held], now + EXPECT_S)
            for name in prompt.names:
                if name not in told.expected:
                    self._add(told, name)
                told.expected[name] = prompt
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
        told = self.told[member] = _Told(member, 1 << number)
        self.seats[number : number + 1] = [told]
        self.of_role[member.info.role] |= told.bit

    def leave(self, member: Member) -> None:
        """It holds nothing any more."""
        told = self.told.pop(member, None)
        if told is None:
            return
        for name in told.held | told.expected.keys():
            self._drop(told, name)
        told.held.clear()
        told.expected.clear()
        self.of_role[member.info.role] ^= told.bit
        self._free.append(told.bit.bit_length() - 1)

    # --- what members say --------------------------------------------------------------------------------------------------

    def heard(self, member: Member, version: int, now: float) -> list[Send]:
        """A member's heartbeat names the version of its cache. What has been missing for longer than a heartbeat is asked for
        again."""
        self._expire(now)
        told = self.told.get(member)
        if told is None:
            return []
        if version == told.version > 0:
            told.behind_s = None
            return []
        is_new = told.version == 0 and told.behind_s is None
        if told.behind_s is None:
            told.behind_s = now
        if not is_new and now - told.behind_s < self._heartbeat_s / 2:  # changes may be under way
            return []
        told.behind_s = now
        return [Send(member.info.id, TellCache())]

    def receive(self, member: Member, message: CacheChanges) -> None:
        """A member tells of its cache. What was overtaken is dropped; the next heartbeats show that it is missing."""
        told = self.told.get(member)
        if told is None or len(message.stored) % NAME_BYTES or len(message.gone) % NAME_BYTES:
            return
        if message.since is None:
            self._take_part(told, message)
        elif message.since == told.version:
            for name in _unpack(message.gone):
                self._lose(told, name)
            for name in _unpack(message.stored):
                self._store(told, name)
            told.version = message.version

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _take_part(self, told: _Told, message: CacheChanges) -> None:
        """A part of all blocks: they count when the last part is here."""
        if message.version < told.version:
            return
        if message.part == 0:
            told.coming = _Coming(message.version)
        coming = told.coming
        if coming is None or (coming.version, coming.parts) != (message.version, message.part):
            return
        coming.parts += 1
        coming.names.update(_unpack(message.stored))
        if message.more:
            return
        told.coming = None
        for name in told.held - coming.names:
            self._lose(told, name)
        for name in coming.names - told.held:
            self._store(told, name)
        told.version = message.version

    def _store(self, told: _Told, name: int) -> None:
        if told.expected.pop(name, None) is None and name not in told.held:
            self._add(told, name)
        told.held.add(name)

    def _lose(self, told: _Told, name: int) -> None:
        if name in told.held:
            told.held.remove(name)
            self._drop(told, name)

    def _add(self, told: _Told, name: int) -> None:
        holders = self._holders.get(name)
        self._holders[name] = told.bit if holders is None else holders | told.bit

    def _drop(self, told: _Told, name: int) -> None:
        holders = self._holders[name] ^ told.bit
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
        told = prompt.told
        self._expected_names -= len(prompt.names)
        for name in prompt.names:
            if told.expected.get(name) is prompt:
                del told.expected[name]
                self._drop(told, name)


def _unpack(names: bytes) -> Iterable[int]:
    unpacked: list[int] = np.frombuffer(names, dtype="<u8").tolist()
    return unpacked


NO_OVERLAP = Overlap(CacheIndex(follows=False))
"""Nobody holds anything."""
