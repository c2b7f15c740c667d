"""Pushes and links between instances of several ranks.

Owns two ends of the same join. `RankedTransfers`: an instance with several ranks, each of which writes its own pages. Every
command goes to every rank, and an event comes when all have reported it, so the leader's scheduler knows nothing of ranks.
`TargetRanks`: a peer whose KV is divided among ranks is several targets for the transfers of one rank, each a peer with one pool.
Knows neither requests nor transports.

    Push(ticket, peer) ─┬─► Push(ticket + 1 · STRIDE, peer/0)  ──PushDone──►┬─► PushDone(ticket)
                        └─► Push(ticket + 2 · STRIDE, peer/1)  ──PushDone──►┘

Where we and a peer have one rank each, commands and events pass as they are. A rank that writes nothing to a peer, because others
hold the same heads, has done its part of a push at once: the next `poll` says so.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, assert_never

from msgspec.structs import replace as changed

from common.errors import TransferError
from common.ids import AttemptId, Incarnation, InstanceId, Ticket
from common.instance.ports import Transfers
from common.messages import InstanceInfo, LinkInfo, LinkState, PoolDescriptor
from common.messages.transfers import (
    Allow,
    Connect,
    LinkChanged,
    Push,
    PushDone,
    PushFailed,
    Settle,
    Settled,
    TransferCommand,
    TransferEvent,
)
from common.pages.layout import heads_of
from kv_transfer.planner import writers


class JoinedPushes:
    """Pushes that several parts carry out. Each ends when its last part does."""

    def __init__(self) -> None:
        self._parts: dict[Ticket, int] = {}
        """How many parts each push has."""
        self._ends: defaultdict[Ticket, list[tuple[str, PushDone | PushFailed]]] = defaultdict(list)
        """How those that have ended did, each with its name."""

    def begin(self, ticket: Ticket, parts: int) -> None:
        assert ticket not in self._parts, f"push {ticket} is begun twice"
        self._parts[ticket] = parts

    def ended(self, ticket: Ticket, part: str, end: PushDone | PushFailed) -> PushDone | PushFailed | None:
        """A part of the push has ended. Returns the end of the whole with the last part: it is done when all are, and quiescent
        when all are. part: its name, for people."""
        self._ends[ticket].append((part, end))
        if len(self._ends[ticket]) < self._parts[ticket]:
            return None
        del self._parts[ticket]
        ends = self._ends.pop(ticket)
        done = [end for _, end in ends if isinstance(end, PushDone)]
        failed = [(part, end) for part, end in ends if isinstance(end, PushFailed)]
        if not failed:
            pushed_bytes, seconds = sum(end.pushed_bytes for end in done), max(end.seconds for end in done)
            return PushDone(ticket, pushed_bytes, seconds, sum(end.runs for end in done))
        quiescent, begun = all(end.quiescent for _, end in failed), bool(done) or any(end.begun for _, end in failed)
        return PushFailed(ticket, f"{failed[0][0]}: {failed[0][1].reason}", quiescent, begun)


@dataclass(slots=True)
class _JoinedLink:
    """A link to one life of a peer."""

    incarnation: Incarnation
    parts: int
    infos: dict[str, LinkInfo] = field(default_factory=dict)
    """The latest report of each part, by its name."""
    reported: tuple[LinkState, str] = ("connecting", "")
    """State and detail of the whole that were reported last."""


class JoinedLinks:
    """Links that have several parts: ready when all parts are, lost when one is. speed: makes the speed of a link, in bytes per
    second, from those of its parts.
    """

    def __init__(self, speed: Callable[[Iterable[float]], float]) -> None:
        self._speed = speed
        self._links: dict[InstanceId, _JoinedLink] = {}

    def expect(self, peer: InstanceId, incarnation: Incarnation, parts: int) -> None:
        """So many parts will report on the link to this life of the peer. What is known of the same life stays."""
        link = self._links.get(peer)
        if link is None or link.incarnation != incarnation:
            self._links[peer] = _JoinedLink(incarnation, parts)

    def forget(self, peer: InstanceId) -> None:
        self._links.pop(peer, None)

    def changed(self, part: str, info: LinkInfo) -> LinkChanged | None:
        """Take in the report of a part; it may name a life of the peer that has left. None: the whole has not changed."""
        link = self._links.get(info.peer)
        if link is None or link.incarnation != info.incarnation:
            return None
        link.infos[part] = info
        joined = self._join(link)
        if link.reported == (joined.state, joined.detail):
            return None
        link.reported = joined.state, joined.detail
        return LinkChanged(joined)

    def _join(self, link: _JoinedLink) -> LinkInfo:
        infos = link.infos
        for state in ("lost", "connecting"):
            for part, info in infos.items():
                if info.state == state:
                    return changed(info, detail=f"{part}: {info.detail}", bytes_per_s=None, host_bytes_per_s=None, warning="")
        info = next(iter(infos.values()))
        if len(infos) < link.parts:
            return changed(info, state="connecting", detail="", bytes_per_s=None, host_bytes_per_s=None, warning="")
        return changed(
            info,
            detail=", ".join(dict.fromkeys(info.detail for info in infos.values())),
            bytes_per_s=self._of_all(info.bytes_per_s for info in infos.values()),
            host_bytes_per_s=self._of_all(info.host_bytes_per_s for info in infos.values()),
            warning="; ".join(f"{part}: {info.warning}" for part, info in infos.items() if info.warning),
        )

    def _of_all(self, speeds: Iterable[float | None]) -> float | None:
        known = [speed for speed in speeds if speed is not None]
        return self._speed(known) if known else None


class RankedTransfers:
    """ranks: the transfers of each rank, in order; the first are the leader's own."""

    def __init__(self, ranks: Sequence[Transfers]) -> None:
        self._ranks = ranks
        self._pushes = JoinedPushes()
        self._links = JoinedLinks(sum)  # ranks write beside each other
        self._settling: deque[tuple[AttemptId, set[int]]] = deque()
        """Each Settle, with the ranks that have not settled."""

    def submit(self, command: TransferCommand) -> None:
        match command:
            case Connect():
                for gone in command.left:
                    self._links.forget(gone)
                for info in command.peers:
                    self._links.expect(info.id, info.incarnation, len(self._ranks))
            case Push():
                self._pushes.begin(command.ticket, len(self._ranks))
            case Settle():
                self._settling.append((command.key, set(range(len(self._ranks)))))
        for transfers in self._ranks:
            transfers.submit(command)

    def poll(self) -> list[TransferEvent]:
        reported = ((rank, event) for rank, transfers in enumerate(self._ranks) for event in transfers.poll())
        return [joined for rank, event in reported if (joined := self._joined(rank, event)) is not None]

    @property
    def progress_s(self) -> float:
        """That of the slowest rank."""
        return min(transfers.progress_s for transfers in self._ranks)

    def close(self) -> None:
        for transfers in self._ranks:
            transfers.close()

    def _joined(self, rank: int, event: TransferEvent) -> TransferEvent | None:
        match event:
            case PushDone() | PushFailed():
                return self._pushes.ended(event.ticket, f"rank {rank}", event)
            case LinkChanged():
                return self._links.changed(f"rank {rank}", event.link)
            case Settled():
                return self._settled(rank, event)
            case _:
                assert_never(event)

    def _settled(self, rank: int, event: Settled) -> Settled | None:
        """A rank settles in the order of its commands, so the first entry of the key that lacks it is meant."""
        for key, lacking in self._settling:
            if key == event.key and rank in lacking:
                lacking.discard(rank)
                if lacking:
                    return None
                self._settling.remove((key, lacking))
                return event
        raise AssertionError(f"rank {rank} settled {event.key}, which nobody asked for")


STRIDE = 2**40
"""More than an instance has tickets. The multiple says which target a ticket of ours belongs to; 0: a peer that is one target."""


class _Spread(NamedTuple):
    """A peer of several targets."""

    incarnation: Incarnation
    targets: list[int]
    """The ranks of the peer that we write to."""


class TargetRanks:
    """transfers: of this rank, whose number among `ranks` is `rank`. kv_heads: of the whole model."""

    def __init__(self, transfers: Transfers, rank: int, ranks: int, kv_heads: int) -> None:
        self._transfers = transfers
        self._rank, self._ranks, self._kv_heads = rank, ranks, kv_heads
        self._spread: dict[InstanceId, _Spread] = {}
        self._pushes = JoinedPushes()
        self._links = JoinedLinks(min)  # the targets share what carries our bytes
        self._known: list[TransferEvent] = []
        """Events that needed no transfer."""

    def submit(self, command: TransferCommand) -> None:
        match command:
            case Connect():
                self._connect(command)
            case Push() if command.peer in self._spread:
                self._push(command, self._spread[command.peer])
            case Allow() if command.peer in self._spread:
                for target in self._spread[command.peer].targets:
                    self._transfers.submit(changed(command, peer=_name_of(command.peer, target)))
            case _:
                self._transfers.submit(command)

    def poll(self) -> list[TransferEvent]:
        events, self._known = [*self._known, *self._transfers.poll()], []
        return [joined for event in events if (joined := self._joined(event)) is not None]

    @property
    def progress_s(self) -> float:
        return self._transfers.progress_s

    def close(self) -> None:
        self._transfers.close()

    # --- commands --------------------------------------------------------------------------------------------------------------

    def _connect(self, command: Connect) -> None:
        left: list[InstanceId] = []
        for gone in command.left:
            left += self._leave(gone)
        peers: list[InstanceInfo] = []
        """What our transfers see of them."""
        for info in command.peers:
            former = self._spread.get(info.id)
            if former is not None and former.incarnation == info.incarnation:
                continue  # its links stay as they are
            left += self._leave(info.id)
            try:
                targets = self._targets(info)
            except TransferError as error:
                self._known.append(_link(info, "lost", str(error)))
                continue
            if targets is None:
                peers.append(info)
                continue
            self._spread[info.id] = _Spread(info.incarnation, targets)
            self._links.expect(info.id, info.incarnation, len(targets))
            peers += [changed(info, id=_name_of(info.id, target), pools=(info.pools[target],)) for target in targets]
            if not targets:
                self._known.append(_link(info, "ready", "other ranks write"))
        stay = {info.id for info in peers}  # it replaces the link to a former life by itself, and keeps one to the same life
        self._transfers.submit(Connect(tuple(peers), tuple(name for name in left if name not in stay)))

    def _leave(self, peer: InstanceId) -> list[InstanceId]:
        """Forget the peer: the names under which our transfers know it."""
        spread = self._spread.pop(peer, None)
        if spread is None:
            return [peer]
        self._links.forget(peer)
        return [_name_of(peer, target) for target in spread.targets]

    def _targets(self, info: InstanceInfo) -> list[int] | None:
        """The ranks of a peer that this rank writes to; None: we and the peer have one rank. Raises TransferError."""
        ranks = len(info.pools)
        theirs = info.model.kv_heads or info.pools[0].layout.kv_heads
        if theirs != self._kv_heads:
            raise TransferError(f"its model has {theirs} KV heads, and ours has {self._kv_heads}")
        for rank, pool in enumerate(info.pools):
            _check_heads(pool, heads_of(rank, ranks, theirs))
        if ranks == self._ranks == 1:
            return None
        return [part.target for part in writers(self._ranks, ranks, self._kv_heads) if part.source == self._rank]

    def _push(self, push: Push, spread: _Spread) -> None:
        if spread.targets:
            self._pushes.begin(push.ticket, len(spread.targets))
        elif push.incarnation == spread.incarnation:
            self._known.append(PushDone(push.ticket, 0, 0.0, 0))
        else:
            self._known.append(PushFailed(push.ticket, f"there is no link to {push.peer}", quiescent=True, begun=False))
        for target in spread.targets:
            ticket = Ticket(push.ticket + (target + 1) * STRIDE)
            self._transfers.submit(replace(push, ticket=ticket, peer=_name_of(push.peer, target)))

    # --- events ----------------------------------------------------------------------------------------------------------------

    def _joined(self, event: TransferEvent) -> TransferEvent | None:
        match event:
            case PushDone() | PushFailed() if event.ticket >= STRIDE:
                target, ticket = divmod(event.ticket, STRIDE)
                return self._pushes.ended(Ticket(ticket), f"to rank {target - 1}", event)
            case LinkChanged(link=link) if "/" in link.peer:
                peer, _, rank = link.peer.rpartition("/")
                return self._links.changed(f"to rank {rank}", changed(link, peer=InstanceId(peer)))
            case _:
                return event


def _name_of(peer: InstanceId, target: int) -> InstanceId:
    """What our transfers call a rank of the peer. No instance has such a name."""
    return InstanceId(f"{peer}/{target}")


def _check_heads(pool: PoolDescriptor, heads: range) -> None:
    held = range(pool.first_head, pool.first_head + pool.layout.kv_heads)
    if held != heads:
        raise TransferError(f"a rank of its holds the KV heads {held.start}–{held.stop - 1}, not {heads.start}–{heads.stop - 1}")


def _link(info: InstanceInfo, state: Literal["lost", "ready"], detail: str) -> LinkChanged:
    return LinkChanged(LinkInfo(peer=info.id, incarnation=info.incarnation, state=state, detail=detail))
