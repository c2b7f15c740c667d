"""Peering: which members work together, what each has been sent about the others, and which pairs can be used.

Owns the choice of pairs, and the versions of what was sent. Does not know why a member joins or leaves, nor requests.

    join, leave ─► partners ─flush─► Peers to both ends       changes, coalesced; the whole set when a heartbeat lacks them
    LinkReport ─► links ──────────┐                           TellLinks when a heartbeat shows that one is missing
    Heartbeat: peers_version ─────┴─► `usable`                the writer reports the link ready, and the reader knows the writer

Where not every pair may link, the choice depends on names only, so several routers over one fleet choose alike. Each pair of
names has a rank, a hash of both (rendezvous hashing, Thaler and Ravishankar 1998). The favourites of an instance are those of the
other role with the highest ranks. A pair is linked when the decode instance is among the `limit` favourites of the prefill
instance, or the prefill instance among the AT_LEAST favourites of the decode instance. So everyone has partners, one that dies is
replaced by the next favourite, and one that joins changes little. A partner that a newcomer displaces is kept, because its link
is there already. When a prefill instance has more than twice the limit, those of the lowest ranks go that are too many.
"""

import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.ids import Incarnation, InstanceId, Role
from common.instance.ports import Send
from common.messages import Heartbeat, InstanceInfo, LinkReport, Peers, TellLinks
from router.members import Lag, Member

AT_LEAST = 4
"""A decode instance has so many partners, if there are so many."""

Ranks = NDArray[np.uint64]
Flags = NDArray[np.bool_]


class Pair(NamedTuple):
    """A prefill instance and a decode instance that are linked."""

    prefill: InstanceId
    decode: InstanceId


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

    def settle(self) -> tuple[list[Pair], list[Pair]]:
        """Make the pairs that there should be, and drop those for which there is no room. Returns those that are linked from now
        on, and those of which both are still there and that are linked no longer."""
        before = self._linked
        if not before.size:
            return [], []
        prefill, decode = (np.fromiter(hashes.values(), dtype=np.uint64) for hashes in self._hashes.values())
        ranks = _mix(prefill[:, None] ^ _turned(decode))
        wanted = (ranks >= _least(ranks, self._limit or len(decode))) | (_least(ranks.T, AT_LEAST) <= ranks.T).T
        linked = before | wanted
        too_many = linked.sum(axis=1) - (2 * self._limit or len(decode))
        for row in np.flatnonzero(too_many > 0):
            spare = np.flatnonzero(linked[row] & ~wanted[row])
            linked[row, spare[np.argsort(ranks[row, spare])[: too_many[row]]]] = False
        self._linked = linked
        return self._pairs(linked & ~before), self._pairs(before & ~linked)

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
class _PeerState:
    """What one member has been sent about its peers, and what it has reported about them."""

    member: Member
    info_bytes: int
    """Size of its description in a message."""
    version: int = 0
    """Version of the latest Peers to it."""
    sent_s: float = 0.0
    """When that was sent."""
    needs_all: bool = True
    """It is to get the whole set."""
    changed: dict[InstanceId, Incarnation | None] = field(default_factory=dict)
    """Partners that may have changed since, each with the incarnation that was sent; None: none was."""
    unaware: dict[InstanceId, int] = field(default_factory=dict)
    """Partners whose lives it has not confirmed to know, each with the version that tells it."""
    links_version: int = 0
    """Version of its latest LinkReport."""
    lacks_links: bool = False
    """A report before that one has not arrived."""
    links_lag: Lag = field(default_factory=Lag)


class Peering:
    """The pairs of the fleet."""

    def __init__(self, router: InstanceId, heartbeat_s: float, partners_limit: int) -> None:
        """router: the name of this life. heartbeat_s: how long to wait for a missing message. partners_limit: see `Partners`."""
        self._heartbeat_s = heartbeat_s
        self._partners = Partners(partners_limit)
        self._states: dict[InstanceId, _PeerState] = {}
        self._dirty: dict[InstanceId, None] = {}
        """Members that are to be sent something in the next round."""
        self._sending: dict[InstanceId, None] = {}
        """Members that are still to be sent something in this round."""
        self._is_changed = False
        """Members have come or gone since the pairs were chosen."""
        self._forming: deque[tuple[_PeerState, _PeerState]] = deque()
        """Pairs that are still to be made in this round: writer and reader."""
        self._version = zlib.crc32(router.encode()) << 24
        """Version of the latest Peers to anybody. Numbers of two lives do not meet, so a late answer to a former one confirms
        nothing."""
        self._gather_until_s = 0.0

    # --- who is there ------------------------------------------------------------------------------------------------------

    def join(self, member: Member) -> None:
        """A new life; the former one of its name has left."""
        info = member.info
        self._states[info.id] = _PeerState(member, len(_encoder.encode(info)))
        self._partners.join(info.id, info.role)
        self._dirty[info.id] = None
        self._is_changed = True

    def leave(self, member: Member) -> None:
        """Nobody uses its links any more. Its partners learn it at the next flush."""
        info = member.info
        for partner in list(member.partners.values()):
            self._separate(member, partner)
        self._partners.leave(info.id, info.role)
        del self._states[info.id]
        self._dirty.pop(info.id, None)
        self._sending.pop(info.id, None)
        self._is_changed = True

    # --- what members report -----------------------------------------------------------------------------------------------

    def receive_heartbeat(self, beat: Heartbeat, now: float) -> tuple[bool, list[Send]]:
        """What a member knows now, and what it has reported. What has been missing for longer than a heartbeat is sent again, or
        asked for again. Returns whether more pairs can serve, and what to send."""
        state, version, more = self._states[beat.id], beat.peers_version, False
        for name in [] if version > state.version else [name for name, sent in state.unaware.items() if sent <= version]:
            del state.unaware[name]
            partner = state.member.partners.get(name)
            if partner is not None and state.member.info.role == "decode":
                more = self._judge(partner, state.member) or more
        if beat.peers_version != state.version and now - state.sent_s > self._heartbeat_s:
            state.needs_all = True
            self._dirty[beat.id] = None
        return more, self._ask_links(state, beat, now)

    def receive_links(self, report: LinkReport) -> bool:
        """A writer reports its links. Reports that were overtaken are dropped; the next heartbeat shows that one is missing."""
        state = self._states[report.id]
        is_old = report.version < state.links_version or (report.since is not None and report.version == state.links_version)
        if is_old:
            return False
        writer = state.member
        if report.since is None:
            state.lacks_links = False
            writer.links.clear()
            writer.speeds.clear()
        elif report.since != state.links_version:
            state.lacks_links = True
        state.links_version = report.version
        more = False
        for link in report.links:
            partner = writer.partners.get(link.peer)
            if partner is not None and partner.info.incarnation == link.incarnation:
                writer.links[link.peer] = link.state
                if link.bytes_per_s is not None:
                    writer.speeds[link.peer] = link.bytes_per_s
                more = self._judge(writer, partner) or more
        if report.since is None:
            for partner in list(writer.usable):
                self._judge(writer, partner)
        return more

    def _judge(self, writer: Member, reader: Member) -> bool:
        """Whether the pair can be used, and could not before."""
        state, name = self._states[reader.info.id], writer.info.id
        knows = name not in state.unaware and state.changed.get(name, writer.info.incarnation) == writer.info.incarnation
        was_usable = reader in writer.usable
        if knows and writer.links.get(reader.info.id) == "ready":
            writer.usable.add(reader)
            return not was_usable
        writer.usable.discard(reader)
        return False

    def _ask_links(self, state: _PeerState, beat: Heartbeat, now: float) -> list[Send]:
        """Ask a writer for all its links when it has sent a report that is not here, or none of a link that it must have."""
        member = state.member
        if member.info.role != "prefill":
            return []
        is_silent = beat.peers_version == state.version and len(member.links) < len(member.partners)
        is_missing = is_silent or state.lacks_links or beat.links_version != state.links_version
        is_new = state.links_version == 0 and not is_silent
        if not state.links_lag.is_overdue(is_missing, now, 0.0 if is_new else self._heartbeat_s / 2):
            return []
        state.links_version = min(state.links_version, beat.links_version)  # a report beyond that was not the member's
        return [Send(member.info.id, TellLinks())]

    # --- what members are sent -----------------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Everybody has been sent everything, as far as this router knows."""
        return not (self._dirty or self._is_changed or self._sending or self._forming)

    def next_deadline(self) -> float | None:
        """When `flush` has something to do."""
        return None if self.settled else self._gather_until_s

    def flush(self, now: float) -> list[Send]:
        """Send the members what has changed, if enough time has passed since the last round. Call it at the end of a turn.

        Members that are sent the same get the same message object, one after the other, so that it is encoded once."""
        if self.settled or now < self._gather_until_s:
            return []
        self._gather_until_s = now  # the round goes on in the next turn
        if not self._sending:
            self._form_pairs()
            if self._forming:
                return []
            self._sending, self._dirty = self._dirty, {}
        groups: dict[tuple[object, ...], list[Send]] = {}
        first, room = self._version + 1, INFOS_AT_ONCE
        while self._sending and room > 0:
            name = next(iter(self._sending))
            del self._sending[name]
            for message in self._changes(self._states[name], first, now):
                lives = tuple((info.id, info.incarnation) for info in message.joined)
                group = groups.setdefault((message.version, message.since, lives, message.left, message.more), [])
                group.append(Send(name, group[0].message if group else message))
                room -= MESSAGE_INFOS + len(lives)
        if not self._sending:
            self._gather_until_s = now + GATHER_S
        return [send for group in groups.values() for send in group]

    def _form_pairs(self) -> None:
        """Make the pairs that there should be, as many as one turn may."""
        if self._is_changed and not self._forming:
            self._is_changed = False
            made, dropped = self._partners.settle()
            for pair in dropped:
                self._separate(self._states[pair.prefill].member, self._states[pair.decode].member)
            self._forming.extend((self._states[pair.prefill], self._states[pair.decode]) for pair in made)
        for _ in range(min(len(self._forming), PAIRS_AT_ONCE)):
            pair_states = self._forming.popleft()
            if any(self._states.get(state.member.info.id) is not state for state in pair_states):
                continue  # one has left since the pairs were chosen
            for state, other in (pair_states, pair_states[::-1]):
                state.member.partners[other.member.info.id] = other.member
                state.changed.setdefault(other.member.info.id, None)
                self._dirty[state.member.info.id] = None

    def _separate(self, one: Member, other: Member) -> None:
        for mine, theirs in ((one, other), (other, one)):
            del mine.partners[theirs.info.id]
            mine.links.pop(theirs.info.id, None)
            mine.speeds.pop(theirs.info.id, None)
            mine.usable.discard(theirs)
            self._states[mine.info.id].changed.setdefault(theirs.info.id, theirs.info.incarnation)
            self._dirty[mine.info.id] = None

    def _changes(self, state: _PeerState, first: int, now: float) -> list[Peers]:
        """What the member is to be sent, in messages numbered from `first` on."""
        partners = state.member.partners
        joined: list[InstanceInfo] = []
        left: list[InstanceId] = []
        for name, before in state.changed.items():
            partner = partners.get(name)
            if partner is None:
                state.unaware.pop(name, None)
                if before is not None:
                    left.append(name)
            elif partner.info.incarnation != before:
                joined.append(partner.info)
        state.changed.clear()
        if not (state.needs_all or joined or left):
            return []
        fresh = [info.id for info in joined]
        if state.needs_all:
            joined, left = [partner.info for partner in partners.values()], []
        messages: list[Peers] = []
        since = None if state.needs_all else state.version
        parts = self._parts(joined)
        for part in parts:
            version, more = first + len(messages), state.needs_all and len(messages) < len(parts) - 1
            messages.append(Peers(version=version, since=since, joined=part, left=tuple(left), more=more))
            since, left = version, []
        state.version, state.sent_s, state.needs_all = messages[-1].version, now, False
        state.unaware.update((name, state.version) for name in fresh)
        self._version = max(self._version, state.version)
        return messages

    def _parts(self, infos: Iterable[InstanceInfo]) -> list[tuple[InstanceInfo, ...]]:
        """Cut what is too large for one message. At least one part, which may be empty."""
        parts: list[tuple[InstanceInfo, ...]] = [()]
        part_bytes = 0
        for info in infos:
            part_bytes += self._states[info.id].info_bytes
            if parts[-1] and part_bytes > WHOLE_BYTES:
                parts.append(())
                part_bytes = self._states[info.id].info_bytes
            parts[-1] += (info,)
        return parts
