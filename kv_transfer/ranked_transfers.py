"""Ranked transfers: the transfers of an instance with several ranks, each of which writes its own pages.

Owns the join of what becomes of them. Implements `common.instance.ports.Transfers` for the leader's scheduler, which knows
nothing of ranks: every command goes to every rank, and an event comes when all have reported it.
"""

from collections import deque
from collections.abc import Sequence
from typing import assert_never

from common.ids import Key
from common.instance.ports import (
    Connect,
    LinkChanged,
    Push,
    PushDone,
    PushFailed,
    Settle,
    Settled,
    TransferCommand,
    TransferEvent,
    Transfers,
)
from kv_transfer.joined_ends import JoinedLinks, JoinedPushes


class RankedTransfers:
    """ranks: the transfers of each rank, in order; the first are the leader's own."""

    def __init__(self, ranks: Sequence[Transfers]) -> None:
        self._ranks = ranks
        self._pushes = JoinedPushes()
        self._links = JoinedLinks(sum)  # ranks write beside each other
        self._settling: deque[tuple[Key, set[int]]] = deque()
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
