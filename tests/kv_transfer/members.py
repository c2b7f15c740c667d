"""Members as a test sees them: agents with a transfer thread, commanded one by one, each under a name and an incarnation.

Owns what a member has reported of its links and pushes. Knows no test.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from common.ids import InstanceId
from common.messages import InstanceInfo, LinkInfo, LinkState
from common.messages.transfers import LinkChanged, PushDone, PushFailed, Settled
from tests.builders import instance
from tests.kv_transfer.agent_process import Event, Plan
from tests.kv_transfer.agents import Kind, PoolProcess
from tests.kv_transfer.local_agent import WAIT_S
from tests.kv_transfer.pools import Bytes

LEASE_S = 120.0
Ended: TypeAlias = PushDone | PushFailed


class Member(PoolProcess):
    """A member's process."""

    def __init__(self, name: str, incarnation: int, plan: Plan, kind: Kind, folder: Path, prefix: Sequence[str] = ()) -> None:
        super().__init__(name, plan, kind, folder, prefix)
        self._incarnation = incarnation
        self._ended: dict[int, Ended] = {}
        self._links: dict[InstanceId, LinkInfo] = {}
        self._tickets = 0
        self._settled = False

    @property
    def info(self) -> InstanceInfo:
        return msgspec.structs.replace(instance(self.name, "decode", str(self._incarnation)), pools=(self.pool,))

    def connect(self, peers: Sequence["Member"]) -> None:
        """These and no others are its peers from now on."""
        self.do("connect", peers=[peer.info for peer in peers])
        wanted = {peer.info.id for peer in peers}
        self._links = {peer: link for peer, link in self._links.items() if peer in wanted}

    def push(self, peer: "Member", source_pages: Sequence[int], target_pages: Sequence[int], lease_s: float = LEASE_S) -> int:
        """Begin to push. Returns the ticket."""
        self._tickets += 1
        self.do(
            "push",
            ticket=self._tickets,
            peer=peer.info.id,
            incarnation=peer.info.incarnation,
            source_pages=list(source_pages),
            target_pages=list(target_pages),
            lease_s=lease_s,
        )
        return self._tickets

    def digest(self, pages: Sequence[int]) -> int:
        digest = self.do("digest", pages=list(pages)).digest
        assert digest is not None
        return digest

    def wipe(self, pages: Sequence[int], value: int) -> None:
        self.do("wipe", pages=list(pages), value=value)

    def settle(self) -> None:
        """Wait until what had arrived before is in the pages."""
        self._settled = False
        self.do("settle")
        until = time.monotonic() + WAIT_S
        while not self._settled:
            assert self.hears(until), f"{self.name} does not settle"

    def memory(self) -> Bytes:
        """A copy of the pool: [pages, bytes]."""
        return super().memory().reshape(self.pool.total_pages, -1)

    def link_to(self, peer: "Member") -> LinkState | None:
        """Its last report of its link to this incarnation of the peer."""
        link = self._links.get(peer.info.id)
        return link.state if link is not None and link.incarnation == peer.info.incarnation else None

    def await_link(self, peer: "Member", state: LinkState, timeout_s: float = WAIT_S) -> None:
        until = time.monotonic() + timeout_s
        while self.link_to(peer) != state:
            assert self.hears(until), f"{self.name}'s link to {peer.name} is {self.link_to(peer)} and not {state}"

    def await_push(self, ticket: int, timeout_s: float = WAIT_S) -> Ended:
        """How the push ended."""
        until = time.monotonic() + timeout_s
        while ticket not in self._ended:
            assert self.hears(until), f"push {ticket} of {self.name} did not end within {timeout_s:g} s"
        return self._ended.pop(ticket)

    def take(self, event: Event) -> None:
        match event:
            case PushDone() | PushFailed():
                assert event.ticket not in self._ended, f"a push of {self.name} has ended twice: {event}"
                self._ended[event.ticket] = event
            case Settled():
                self._settled = True
            case LinkChanged():
                self._links[event.link.peer] = event.link
            case _:
                raise AssertionError(f"a transfer thread does not report {event}")
