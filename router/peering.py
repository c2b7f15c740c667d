"""Acquaintance: which members work together, what each has been told of the others, and which pairs can be used.

Owns the pairs and the versions of what was said. Does not know why a member joins or leaves, nor requests.

    join, leave ─► partners ─flush─► Peers to both ends       changes, coalesced; the whole set when a heartbeat lacks them
    LinkReport ─► links ──────────┐                           TellLinks when a heartbeat shows that one is missing
    Heartbeat: peers_version ─────┴─► `usable`                the writer reports the link ready, and the reader knows the writer

Partners: which prefill instances link to which decode instances when not every pair may.

Owns the choice. Pure and deterministic: it depends on names only, so several routers over one fleet choose alike. Knows no
messages, loads or links.

Each pair of names has a rank, a hash of both (rendezvous hashing, Thaler and Ravishankar 1998). The favourites of an instance are
those of the other role with the highest ranks. A pair is linked when the decode instance is among the `limit` favourites of the
prefill instance, or the prefill instance among the AT_LEAST favourites of the decode instance. So everyone has partners, one that
dies is replaced by the next favourite, and one that joins changes little. A partner that a newcomer displaces is kept, because
its link is there already. When a prefill instance has more than twice the limit, those of the lowest ranks go that are too
many.
"""

import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.ids import Incarnation, InstanceId, Role
from common.instance.ports import Send
from common.messages import Heartbeat, InstanceInfo, LinkReport, Peers, TellLinks
from router.members import Member

AT_LEAST = 4
"""A decode instance has so many partners, if there are so many."""

Ranks = NDArray[np.uint64]
Flags = NDArray[np.bool_]


class Pair(NamedTuple):
    """A prefill instance and a decode instance that are linked."""

    prefill: InstanceId
    decode: InstanceId


class Regrouping(NamedTuple):
    """How the pairs have changed."""

    made: list[Pair]
    """Pairs that are linked from now on."""
    dropped: list[Pair]
    """Pairs of which both are still there, and that are linked no longer."""


class Partners:
    """limit: favourites of a prefill instance; 0: all pairs are linked."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._hashes: dict[Role, dict[InstanceId, int]] = {"prefill": {}, "decode": {}}
        """Hashes of the names of each role."""
        self._linked: Flags = np.zeros((0, 0), dtype=bool)
        """[prefill instances, decode instances], in the order of the hashes."""

    def join(self, name: InstanceId, role: Role) -> None:
        """`settle` makes its pairs."""
        self._hashes[role][name] = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") | 1
        self._linked = np.pad(self._linked, ((0, 1), (0, 0)) if role == "prefill" else ((0, 0), (0, 1)))

    def leave(self, name: InstanceId, role: Role) -> None:
        """Its pairs are gone at once; `settle` makes those that take their place."""
        place = list(self._hashes[role]).index(name)
        del self._hashes[role][name]
        self._linked = np.delete(self._linked, place, axis=0 if role == "prefill" else 1)

    def settle(self) -> Regrouping:
        """Make the pairs that there should be, and drop those for which there is no room."""
        before = self._linked
        if not before.size:
            return Regrouping([], [])
        prefill, decode = (np.fromiter(hashes.values(), dtype=np.uint64) for hashes in self._hashes.values())
        ranks = _mix(prefill[:, None] ^ _turned(decode))
        wanted = (ranks >= _least(ranks, self._limit or len(decode))) | (_least(ranks.T, AT_LEAST) <= ranks.T).T
        linked = before | wanted
        too_many = linked.sum(axis=1) - (2 * self._limit or len(decode))
        for row in np.flatnonzero(too_many > 0):
            spare = np.flatnonzero(linked[row] & ~wanted[row])
            linked[row, spare[np.argsort(ranks[row, spare])[: too_many[row]]]] = False
        self._linked = linked
        return Regrouping(self._pairs(linked & ~before), self._pairs(before & ~linked))

    def _pairs(self, table: Flags) -> list[Pair]:
        """table: as `_linked`."""
        prefill, decode = map(list, self._hashes.values())
        return [Pair(prefill[row], decode[column]) for row, column in np.argwhere(table).tolist()]


def _least(ranks: Ranks, most: int) -> Ranks:
    """The rank of the last of the `most` highest in each row, as a column; 0 where the row is not that long."""
    columns = ranks.shape[1]
    if columns <= most:
        return np.zeros((len(ranks), 1), dtype=np.uint64)
    least: Ranks = np.partition(ranks, columns - most, axis=1)[:, columns - most, None]
    return least


def _turned(hashes: Ranks) -> Ranks:
    """So that two names rank differently when their roles are exchanged."""
    return (hashes << np.uint64(31)) | (hashes >> np.uint64(33))


def _mix(bits: Ranks) -> Ranks:
    """Spread the bits (the finalizer of splitmix64, Steele et al. 2014). Never 0."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits ^ (bits >> np.uint64(31))) | np.uint64(1)


GATHER_S = 0.2
"""Changes of the set are told at once, but what changes within this long after that is told together: when a thousand instances
register at a router that started again, each gets a few messages."""
PAIRS_AT_ONCE, INFOS_AT_ONCE, MESSAGE_INFOS = 1_024, 1_024, 16
"""How many pairs one turn makes, and of how many partners in all it tells: a few milliseconds each. A message costs as much as
MESSAGE_INFOS partners. A large fleet takes several turns, in which the router serves."""
WHOLE_BYTES = 4 * 2**20
"""A set larger than this is told in several messages. A frame may be 64 MiB."""
_encoder = msgspec.msgpack.Encoder()


@dataclass(slots=True, eq=False)
class _Told:
    """What one member has been told and has said.

    version, told_s: of the latest Peers. whole: it needs the whole set. changed: partners that may have changed since, each with
    the incarnation that was told, None for none.
    unaware: of a reader, the writers whose lives it has not confirmed to know, each with the version that tells it.
    links_version: of the latest LinkReport. links_missing: one before it has not arrived. links_behind_s: since when heartbeats
    show that something is missing, or when it was asked for; None: nothing is missing.
    """

    member: Member
    info_bytes: int
    version: int = 0
    told_s: float = 0.0
    whole: bool = True
    changed: dict[InstanceId, Incarnation | None] = field(default_factory=dict)
    unaware: dict[InstanceId, int] = field(default_factory=dict)
    links_version: int = 0
    links_missing: bool = False
    links_behind_s: float | None = None


class Acquaintance:
    """router: the name of this life. heartbeat_s: how long a missing message is waited for. partners_limit: see `Partners`.

    What lets more pairs serve returns True.
    """

    def __init__(self, router: InstanceId, heartbeat_s: float, partners_limit: int) -> None:
        self._heartbeat_s = heartbeat_s
        self._partners = Partners(partners_limit)
        self._told: dict[InstanceId, _Told] = {}
        self._dirty: dict[InstanceId, None] = {}
        """Who is to be told something in the next round."""
        self._telling: dict[InstanceId, None] = {}
        """Who is still to be told something in this round."""
        self._regroup = False
        self._forming: deque[tuple[_Told, _Told]] = deque()
        """Pairs that are still to be made in this round: writer and reader."""
        self._version = zlib.crc32(router.encode()) << 24
        """The version of the latest Peers to anybody. Numbers of two lives do not meet, so a late word to a former one confirms
        nothing."""
        self._gather_until_s = 0.0

    # --- who is there ------------------------------------------------------------------------------------------------------

    def join(self, member: Member) -> None:
        """A new life; the former one of its name has left."""
        info = member.info
        self._told[info.id] = _Told(member, len(_encoder.encode(info)))
        self._partners.join(info.id, info.role)
        self._dirty[info.id] = None
        self._regroup = True

    def leave(self, member: Member) -> None:
        """Nobody uses its links any more. Its partners are told at the next flush."""
        info = member.info
        for partner in list(member.partners.values()):
            self._part(member, partner)
        self._partners.leave(info.id, info.role)
        del self._told[info.id]
        self._dirty.pop(info.id, None)
        self._telling.pop(info.id, None)
        self._regroup = True

    # --- what members say --------------------------------------------------------------------------------------------------

    def heard(self, beat: Heartbeat, now: float) -> tuple[bool, list[Send]]:
        """A member's heartbeat: what it knows now, and what it has said. What has been missing for longer than a heartbeat is
        sent or asked for again. Returns whether more pairs can serve, and what to send."""
        told = self._told[beat.id]
        more = self._confirmed(told, beat.peers_version)
        if beat.peers_version != told.version and now - told.told_s > self._heartbeat_s:
            told.whole = True
            self._dirty[beat.id] = None
        return more, self._ask_links(told, beat, now)

    def reported(self, report: LinkReport) -> bool:
        """A writer tells of its links. Reports that were overtaken are dropped; the next heartbeat shows that one is missing."""
        told = self._told[report.id]
        is_old = report.version < told.links_version or (report.since is not None and report.version == told.links_version)
        if is_old:
            return False
        if report.since is None:
            told.links_missing = False
            told.member.links.clear()
            told.member.speeds.clear()
        elif report.since != told.links_version:
            told.links_missing = True
        told.links_version = report.version
        more = False
        for link in report.links:
            partner = told.member.partners.get(link.peer)
            if partner is not None and partner.info.incarnation == link.incarnation:
                told.member.links[link.peer] = link.state
                if link.bytes_per_s is not None:
                    told.member.speeds[link.peer] = link.bytes_per_s
                more = self._judge(told.member, partner) or more
        if report.since is None:
            for partner in list(told.member.usable):
                self._judge(told.member, partner)
        return more

    # --- what members are told -----------------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Everybody has been told everything, as far as this router knows."""
        return not (self._dirty or self._regroup or self._telling or self._forming)

    def next_deadline(self) -> float | None:
        """When `flush` has something to do."""
        return None if self.settled else self._gather_until_s

    def flush(self, now: float) -> list[Send]:
        """Tell the members what has changed, if enough time has passed since the last round. Call it at the end of a turn.

        Members that are told the same get the same message object, one after the other, so that it is encoded once."""
        if self.settled or now < self._gather_until_s:
            return []
        self._gather_until_s = now  # the round goes on in the next turn
        if not self._telling:
            self._form_pairs()
            if self._forming:
                return []
            self._telling, self._dirty = self._dirty, {}
        sends = self._tell(now)
        if not self._telling:
            self._gather_until_s = now + GATHER_S
        return sends

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _form_pairs(self) -> None:
        """Make the pairs that there should be, as many as one turn may."""
        if self._regroup and not self._forming:
            regrouping = self._partners.settle()
            self._regroup = False
            for pair in regrouping.dropped:
                self._part(self._told[pair.prefill].member, self._told[pair.decode].member)
            self._forming.extend((self._told[pair.prefill], self._told[pair.decode]) for pair in regrouping.made)
        for _ in range(min(len(self._forming), PAIRS_AT_ONCE)):
            prefill, decode = self._forming.popleft()
            if not (self._is_here(prefill) and self._is_here(decode)):
                continue  # it has left since the pairs were chosen
            for one, other in ((prefill, decode), (decode, prefill)):
                one.member.partners[other.member.info.id] = other.member
                one.changed.setdefault(other.member.info.id, None)
                self._dirty[one.member.info.id] = None

    def _is_here(self, told: _Told) -> bool:
        return self._told.get(told.member.info.id) is told

    def _tell(self, now: float) -> list[Send]:
        """Tell as many as one turn may."""
        groups: dict[tuple[object, ...], list[Send]] = {}
        first, room = self._version + 1, INFOS_AT_ONCE
        while self._telling and room > 0:
            name = next(iter(self._telling))
            del self._telling[name]
            for message in self._news(self._told[name], first, now):
                lives = tuple((info.id, info.incarnation) for info in message.joined)
                group = groups.setdefault((message.version, message.since, lives, message.left, message.more), [])
                group.append(Send(name, group[0].message if group else message))
                room -= MESSAGE_INFOS + len(lives)
        return [send for group in groups.values() for send in group]

    def _news(self, told: _Told, first: int, now: float) -> list[Peers]:
        """What the member is to be told, in messages numbered from `first` on."""
        partners = told.member.partners
        joined: list[InstanceInfo] = []
        left: list[InstanceId] = []
        for name, before in told.changed.items():
            partner = partners.get(name)
            if partner is None:
                told.unaware.pop(name, None)
                if before is not None:
                    left.append(name)
            elif partner.info.incarnation != before:
                joined.append(partner.info)
        told.changed.clear()
        if not (told.whole or joined or left):
            return []
        fresh = [info.id for info in joined]
        if told.whole:
            joined, left = [partner.info for partner in partners.values()], []
        messages: list[Peers] = []
        since = None if told.whole else told.version
        for part in self._parts(joined):
            version = first + len(messages)
            messages.append(Peers(version=version, since=since, joined=part, left=tuple(left)))
            since, left = version, []
        if told.whole:
            messages = [msgspec.structs.replace(message, more=True) for message in messages[:-1]] + messages[-1:]
        told.version, told.told_s, told.whole = messages[-1].version, now, False
        told.unaware.update((name, told.version) for name in fresh)
        self._version = max(self._version, told.version)
        return messages

    def _parts(self, infos: Iterable[InstanceInfo]) -> Iterator[tuple[InstanceInfo, ...]]:
        """Cut what is too large for one message. At least one part, which may be empty."""
        part: list[InstanceInfo] = []
        part_bytes = 0
        for info in infos:
            info_bytes = self._told[info.id].info_bytes
            if part and part_bytes + info_bytes > WHOLE_BYTES:
                yield tuple(part)
                part, part_bytes = [], 0
            part.append(info)
            part_bytes += info_bytes
        yield tuple(part)

    def _part(self, one: Member, other: Member) -> None:
        for mine, theirs in ((one, other), (other, one)):
            del mine.partners[theirs.info.id]
            mine.links.pop(theirs.info.id, None)
            mine.speeds.pop(theirs.info.id, None)
            mine.usable.discard(theirs)
            self._told[mine.info.id].changed.setdefault(theirs.info.id, theirs.info.incarnation)
            self._dirty[mine.info.id] = None

    def _confirmed(self, told: _Told, version: int) -> bool:
        """The member has applied what it was told up to this version. Returns whether more pairs can serve."""
        if not told.unaware or version > told.version:
            return False
        more = False
        for name in [name for name, tells in told.unaware.items() if tells <= version]:
            del told.unaware[name]
            partner = told.member.partners.get(name)
            if partner is not None and told.member.info.role == "decode":
                more = self._judge(partner, told.member) or more
        return more

    def _judge(self, writer: Member, reader: Member) -> bool:
        """Whether the pair can be used, and could not before."""
        told, name = self._told[reader.info.id], writer.info.id
        knows = name not in told.unaware and told.changed.get(name, writer.info.incarnation) == writer.info.incarnation
        if not (knows and writer.links.get(reader.info.id) == "ready"):
            writer.usable.discard(reader)
        elif reader not in writer.usable:
            writer.usable.add(reader)
            return True
        return False

    def _ask_links(self, told: _Told, beat: Heartbeat, now: float) -> list[Send]:
        """Ask a writer for all its links when it has said something that is not here, or nothing of a link that it must have."""
        member = told.member
        if member.info.role != "prefill":
            return []
        silent = beat.peers_version == told.version and len(member.links) < len(member.partners)
        if not (silent or told.links_missing or beat.links_version != told.links_version):
            told.links_behind_s = None
            return []
        if told.links_behind_s is None:
            told.links_behind_s = now
        is_new = told.links_version == 0 and not silent
        if not is_new and now - told.links_behind_s < self._heartbeat_s / 2:  # a report may be under way
            return []
        told.links_behind_s = now
        told.links_version = min(told.links_version, beat.links_version)  # a report beyond that was not the member's
        return [Send(member.info.id, TellLinks())]
