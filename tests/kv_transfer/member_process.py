"""One member of a fleet that does nothing but transfer: a pool, a transfer thread over it, and a loop that does what it is told.

Owns the words between a member and who commands it, and the loop. Run as `python -m tests.kv_transfer.member_process PLAN` it
says MemberStarted, and then answers each command with one Answer; what the transfers report comes in between. It ends when it is
told to, or when its stdin closes. Which pages go where, and when, is for the other end to decide.
"""

import os
import select
import sys
import time
import zlib
from typing import BinaryIO, TypeAlias, assert_never

import msgspec
import numpy as np

from common.addresses import LOOPBACK
from common.config import TransportName
from common.ids import Incarnation, InstanceId, Key, RequestId, Ticket
from common.instance.ports import Allow, Connect, LinkChanged, Push, PushDone, PushFailed, Settle, Settled
from common.messages import InstanceInfo, LinkInfo, PoolDescriptor
from common.pages.layout import KVLayout, MemoryRegion
from kv_transfer.transfer_loop import TransferLoop
from kv_transfer.transfer_thread import TransferThread
from tests.kv_transfer.agent_process import Answer, Dump, End, Failed, Line, random_bytes, transport_of
from tests.kv_transfer.child import reports_to_parent

START_S = 60.0
READ_BYTES = 64 * 1024
"""Larger buffers come and go at the top of the heap, and make resident memory creep."""
ANY_KEY = Key(RequestId("any"), 0)


class MemberPlan(msgspec.Struct, frozen=True, kw_only=True):
    """host: the address on which peers reach it. silence_s: after which the transport calls a peer lost. seed: of the pool's
    bytes."""

    transport: TransportName
    host: str = LOOPBACK
    total_pages: int
    page_bytes: int
    silence_s: int
    seed: int


class ConnectTo(Line, frozen=True):
    """See Connect."""

    peers: tuple[InstanceInfo, ...]


class PushPages(Line, frozen=True):
    """See Push. lease_s: the peer may be written to for so long."""

    ticket: int
    peer: InstanceId
    incarnation: Incarnation
    source_pages: list[int]
    target_pages: list[int]
    lease_s: float


class SettleWrites(Line, frozen=True):
    """See Settle; Settled follows."""


class WipePages(Line, frozen=True):
    """Set every byte of these pages."""

    pages: list[int]
    value: int


class DigestPages(Line, frozen=True):
    """The answer is the CRC-32 of these pages, one after the other."""

    pages: list[int]


Command: TypeAlias = ConnectTo | PushPages | SettleWrites | WipePages | DigestPages | Dump | End


class MemberStarted(Line, frozen=True):
    """The member is there."""

    pool: PoolDescriptor


class Digested(Line, frozen=True):
    """The Answer to DigestPages."""

    digest: int


class Pushed(Line, frozen=True):
    """See PushDone."""

    ticket: int
    pushed_bytes: int
    seconds: float


class Linked(Line, frozen=True):
    """See LinkChanged."""

    link: LinkInfo


class WritesSettled(Line, frozen=True):
    """See Settled."""


Report: TypeAlias = MemberStarted | Answer | Digested | Pushed | Failed | Linked | WritesSettled


class MemberProcess:
    """The pool and its transfer thread."""

    def __init__(self, plan: MemberPlan, reports: BinaryIO) -> None:
        self._reports = reports
        self._pool = random_bytes(plan.seed, plan.total_pages * plan.page_bytes).reshape(plan.total_pages, plan.page_bytes)
        self._news = os.eventfd(0)
        self._thread = TransferThread(lambda: self._make_loop(plan), lambda: os.eventfd_write(self._news, 1))
        self._say(MemberStarted(pool=self._thread.start(START_S)))

    def run(self) -> None:
        """Obey until End, or until nobody is there to command. Raises TransferError when the thread has failed."""
        decoder = msgspec.json.Decoder[Command](Command)
        unread = b""
        while True:
            ready, _, _ = select.select([0, self._news], [], [])
            if self._news in ready:
                os.eventfd_read(self._news)
                self._report()
            if 0 not in ready:
                continue
            data = os.read(0, READ_BYTES)
            *lines, unread = (unread + data).split(b"\n")
            commands = [decoder.decode(line) for line in lines]
            if not data or any(isinstance(command, End) for command in commands):
                self._thread.close()
                return
            for command in commands:
                self._say(self._obey(command))

    def _make_loop(self, plan: MemberPlan) -> TransferLoop:
        """On the thread."""
        layout = KVLayout(layers=1, kv_heads=1, head_dim=plan.page_bytes // 2, page_size=1, dtype="uint8")
        region = MemoryRegion(address=self._pool.ctypes.data, region_bytes=self._pool.nbytes, device="cpu")
        return TransferLoop(
            transport_of(plan.transport, plan.silence_s, plan.host),
            plan.transport,
            region,
            layout,
            plan.total_pages,
            time.monotonic,
        )

    def _obey(self, command: Command) -> Answer | Digested:
        match command:
            case ConnectTo():
                self._thread.submit(Connect(command.peers))
            case PushPages():
                self._push(command)
            case SettleWrites():
                self._thread.submit(Settle(ANY_KEY))
            case WipePages():
                self._pool[command.pages] = command.value
            case DigestPages():
                return Digested(digest=self._digest(command.pages))
            case Dump():
                self._pool.tofile(command.path)
            case End():
                raise AssertionError("the loop ends with it")
            case _:
                assert_never(command)
        return Answer()

    def _digest(self, pages: list[int]) -> int:
        """Page by page: copies of many megabytes would count as memory for long."""
        digest = 0
        for page in pages:
            digest = zlib.crc32(self._pool[page].data, digest)
        return digest

    def _push(self, command: PushPages) -> None:
        source, target = (np.array(pages, dtype=np.int32) for pages in (command.source_pages, command.target_pages))
        self._thread.submit(Allow(command.peer, command.incarnation, time.monotonic() + command.lease_s))
        self._thread.submit(Push(Ticket(command.ticket), command.peer, command.incarnation, source, target))

    def _report(self) -> None:
        for event in self._thread.poll():
            match event:
                case PushDone():
                    self._say(Pushed(ticket=event.ticket, pushed_bytes=event.pushed_bytes, seconds=event.seconds))
                case PushFailed():
                    self._say(Failed(ticket=event.ticket, reason=event.reason, quiescent=event.quiescent))
                case LinkChanged():
                    self._say(Linked(link=event.link))
                case Settled():
                    self._say(WritesSettled())
                case _:
                    assert_never(event)

    def _say(self, report: Report) -> None:
        self._reports.write(msgspec.json.encode(report) + b"\n")
        self._reports.flush()


if __name__ == "__main__":
    MemberProcess(msgspec.json.decode(sys.argv[1], type=MemberPlan), reports_to_parent()).run()
