"""Members as a test sees them: processes with a transfer thread, commanded one by one, each under a name and an incarnation.

Owns the member's process and what it has reported. Knows no test.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias, assert_never

import msgspec
import numpy as np

from common.ids import InstanceId
from common.messages import InstanceInfo, LinkState
from tests.builders import instance
from tests.kv_transfer.agent_process import Answer, Dump, End, Failed
from tests.kv_transfer.agents import Bytes, Kind
from tests.kv_transfer.child import WAIT_S, Child, remaining
from tests.kv_transfer.member_process import (
    Command,
    ConnectTo,
    Digested,
    DigestPages,
    Linked,
    MemberPlan,
    MemberStarted,
    Pushed,
    PushPages,
    Report,
    SettleWrites,
    WipePages,
    WritesSettled,
)

LEASE_S = 120.0
Ended: TypeAlias = Pushed | Failed


class Member:
    """A member's process. `start_all` waits until several are there."""

    def __init__(
        self, name: str, incarnation: int, plan: MemberPlan, kind: Kind, folder: Path, prefix: Sequence[str] = ()
    ) -> None:
        self.name, self._folder = name, folder
        self._incarnation = incarnation
        self._child = Child(
            "tests.kv_transfer.member_process",
            [msgspec.json.encode(plan).decode()],
            msgspec.json.Decoder[Report](Report),
            folder / f"{name}-{incarnation}",
            prefix,
            kind.environment,
        )
        self.pid = self._child.pid
        self._answer: Answer | Digested | None = None
        self._ended: dict[int, Ended] = {}
        self._links: dict[InstanceId, Linked] = {}
        self._tickets = 0
        self._settled = False

    def started(self) -> None:
        """Wait until it is there; from then on it has an `info`."""
        report = self._child.report(WAIT_S)
        assert isinstance(report, MemberStarted), f"{self.name} began with {report}"
        self.info: InstanceInfo = msgspec.structs.replace(instance(self.name, "decode", str(self._incarnation)), pool=report.pool)

    def connect(self, peers: Sequence["Member"]) -> None:
        """These and no others are its peers from now on."""
        self._do(ConnectTo(peers=tuple(peer.info for peer in peers)))
        wanted = {peer.info.id for peer in peers}
        self._links = {peer: linked for peer, linked in self._links.items() if peer in wanted}

    def push(self, peer: "Member", source_pages: Sequence[int], target_pages: Sequence[int], lease_s: float = LEASE_S) -> int:
        """Begin to push. Returns the ticket."""
        self._tickets += 1
        self._do(
            PushPages(
                ticket=self._tickets,
                peer=peer.info.id,
                incarnation=peer.info.incarnation,
                source_pages=list(source_pages),
                target_pages=list(target_pages),
                lease_s=lease_s,
            )
        )
        return self._tickets

    def digest(self, pages: Sequence[int]) -> int:
        answer = self._do(DigestPages(pages=list(pages)))
        assert isinstance(answer, Digested)
        return answer.digest

    def wipe(self, pages: Sequence[int], value: int) -> None:
        self._do(WipePages(pages=list(pages), value=value))

    def settle(self) -> None:
        """What had arrived before is in the pages."""
        self._settled = False
        self._do(SettleWrites())
        until = time.monotonic() + WAIT_S
        while not self._settled:
            assert self._hears(until), f"{self.name} does not settle"

    def memory(self) -> Bytes:
        """A copy of the pool: [pages, bytes]."""
        path = self._folder / f"{self.name}-pool"
        self._do(Dump(path=str(path)))
        memory = np.fromfile(path, dtype=np.uint8)
        path.unlink()
        return memory.reshape(self.info.pool.total_pages, -1)

    def link_to(self, peer: "Member") -> LinkState | None:
        """The latest that it has said of its link to this incarnation of the peer."""
        linked = self._links.get(peer.info.id)
        return linked.link.state if linked is not None and linked.link.incarnation == peer.info.incarnation else None

    def await_link(self, peer: "Member", state: LinkState, timeout_s: float = WAIT_S) -> None:
        until = time.monotonic() + timeout_s
        while self.link_to(peer) != state:
            assert self._hears(until), f"{self.name}'s link to {peer.name} is {self.link_to(peer)} and not {state}"

    def await_push(self, ticket: int, timeout_s: float = WAIT_S) -> Ended:
        """How the push ended."""
        until = time.monotonic() + timeout_s
        while ticket not in self._ended:
            assert self._hears(until), f"push {ticket} of {self.name} did not end within {timeout_s:g} s"
        return self._ended.pop(ticket)

    def end(self) -> None:
        """Leave in order. Raises AssertionError when it does not."""
        self._child.tell(End())
        status = self._child.wait()
        assert status == 0, f"{self.name} ended with {status}: {self._child.complaints()}"

    def kill(self) -> None:
        self._child.kill()

    def _do(self, command: Command) -> Answer | Digested:
        self._child.tell(command)
        until = time.monotonic() + WAIT_S
        while self._answer is None:
            assert self._hears(until), f"{self.name} does not answer {type(command).__name__}"
        answer, self._answer = self._answer, None
        return answer

    def _hears(self, until: float) -> bool:
        """Take in one report; False when there is none until then."""
        report = self._child.report(remaining(until))
        match report:
            case None:
                return False
            case Answer() | Digested():
                self._answer = report
            case Pushed() | Failed():
                assert report.ticket not in self._ended, f"a push of {self.name} has ended twice: {report}"
                self._ended[report.ticket] = report
            case WritesSettled():
                self._settled = True
            case Linked():
                self._links[report.link.peer] = report
            case MemberStarted():
                raise AssertionError(f"{self.name} has started twice")
            case _:
                assert_never(report)
        return True


def open_files(pid: int) -> int:
    """How many file descriptors a process has."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def running_threads(pid: int) -> int:
    """How many threads a process has, also those of libraries."""
    return len(os.listdir(f"/proc/{pid}/task"))
