"""Two transfer loops over the in-process transport, on a clock that is turned by hand.

Owns the pools of a source and a target, and the words in which they are commanded. Knows no test.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from common.ids import Incarnation, InstanceId, Ticket
from common.messages import InstanceInfo, LinkInfo, LinkState
from common.messages.transfers import Allow, Connect, LinkChanged, Push, PushFailed, TransferCommand, TransferEvent
from common.pages.layout import KVLayout
from kv_transfer.transfer_loop import TransferLoop
from tests.builders import LAYOUT, instance, key
from tests.kv_transfer.local_agent import region_of
from tests.kv_transfer.memory import MemoryNetwork, MemoryTransport
from tests.kv_transfer.pools import Bytes

PEER = InstanceId("d")
LIFE = Incarnation("1")
PAGES = 8
LONG_S = 10_000.0
"""A lease that ends in no test that is not about leases."""


@dataclass(slots=True, eq=False)
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True, eq=False)
class Side:
    """One instance's transfers: [pages, page_bytes] of memory and the loop over them."""

    memory: Bytes
    transport: MemoryTransport
    loop: TransferLoop

    def info(self, incarnation: str = "1") -> InstanceInfo:
        return msgspec.structs.replace(instance(PEER, "decode", incarnation), pools=(self.loop.descriptor,))

    def events(self) -> list[TransferEvent]:
        """Turn once: what came of it."""
        news = self.loop.step()
        events = self.loop.poll()
        assert news == bool(events), "news are announced when there are any"
        return events


class SlowTransport(MemoryTransport):
    """Ends what it holds long after its link was closed, as a backend may that cannot abort."""

    def close(self, agent: str | None = None) -> None:
        if agent is None:
            super().close()


class Two:
    """A source, and a target that it may connect to. measures: links are measured, for both have a spare page."""

    def __init__(
        self,
        make_transport: type[MemoryTransport] = MemoryTransport,
        measures: bool = False,
        network: MemoryNetwork | None = None,
    ) -> None:
        self.clock = Clock()
        self.measures = measures
        self.network = network or MemoryNetwork()
        self.make_transport = make_transport
        self.source = self.side(seed=1)
        self.target = self.side(seed=2)

    def side(self, seed: int, layout: KVLayout = LAYOUT) -> Side:
        shape = (PAGES + self.measures, layout.page_bytes)
        memory = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        transport = self.make_transport(self.network)
        loop = TransferLoop(transport, "memory", region_of(memory), layout, PAGES, self.clock, measures=self.measures)
        return Side(memory, transport, loop)

    def connect(self, lease_s: float = LONG_S) -> None:
        """The link from source to target is up, and may be written over for so long."""
        self.source.loop.submit(Connect((self.target.info(),)))
        assert self.source.events() == [linked("ready", "memmove")]
        self.allow(lease_s)

    def allow(self, lease_s: float = LONG_S, incarnation: Incarnation = LIFE) -> None:
        self.source.loop.submit(Allow(PEER, incarnation, self.clock.now + lease_s))

    def push(
        self, ticket: int, source_pages: Sequence[int] = (0,), target_pages: Sequence[int] = (0,), incarnation: Incarnation = LIFE
    ) -> None:
        source, target = (np.array(side, dtype=np.int32) for side in (source_pages, target_pages))
        self.source.loop.submit(Push(Ticket(ticket), PEER, incarnation, source, target, key()))

    # --- what the source reports then ----------------------------------------------------------------------------------------

    def pushed(
        self, ticket: int, source_pages: Sequence[int] = (0,), target_pages: Sequence[int] = (0,), incarnation: Incarnation = LIFE
    ) -> list[TransferEvent]:
        self.push(ticket, source_pages, target_pages, incarnation)
        return self.source.events()

    def told(self, command: TransferCommand) -> list[TransferEvent]:
        self.source.loop.submit(command)
        return self.source.events()

    def after(self, seconds: float) -> list[TransferEvent]:
        self.clock.now += seconds
        return self.source.events()


def linked(state: LinkState, detail: str, incarnation: str = "1") -> LinkChanged:
    return LinkChanged(LinkInfo(peer=PEER, incarnation=Incarnation(incarnation), state=state, detail=detail))


def failed(ticket: int, reason: str, quiescent: bool) -> PushFailed:
    return PushFailed(Ticket(ticket), reason, quiescent)


def refused(ticket: int, reason: str) -> PushFailed:
    """Nothing of it was begun."""
    return PushFailed(Ticket(ticket), reason, quiescent=True, begun=False)
