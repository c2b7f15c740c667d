"""One agent in a process of its own: a transport and a pool of bytes, driven over pipes with lines of JSON.

Owns the words between a test and the agent, and the agent's loop. Knows no pages; the test decides what happens and when. Run as
`python -m tests.kv_transfer.agent_process TRANSPORT POOL_BYTES SILENCE_S` it says Started, and then answers each command with one
Answer; what the transport reports comes in between. It ends when it is told to, or when its stdin closes.
"""

import os
import select
import sys
import threading
import time
from typing import TypeAlias, assert_never

import msgspec
import numpy as np

from common.addresses import LOOPBACK
from common.config import TransportName
from common.errors import TransferError
from common.ids import Ticket
from common.messages import PoolDescriptor
from common.pages.layout import KVLayout, MemoryRegion
from kv_transfer.backends import make_transport
from kv_transfer.transport import AgentLost, RunsDone, RunsFailed, Transport

POLL_S = 1e-3
REPORTS = 3
"""The file descriptor of the pipe to whoever started this process; its stdout is for what libraries have to say."""
THREADS_S = 3.0
"""How long the threads of a transport that is closed may take to end."""
PERIOD_BYTES = 2**20 + 7
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=1, page_size=1, dtype="uint8")
"""A transport knows bytes only; descriptors must have some layout."""


class Line(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of every line; the tag is the class name."""


class Connect(Line, frozen=True):
    """Connect to a peer's pool."""

    pool: PoolDescriptor


class PushRuns(Line, frozen=True):
    """Push rows of (source offset, target offset, bytes)."""

    ticket: int
    agent: str
    runs: list[tuple[int, int, int]]


class Fill(Line, frozen=True):
    """Fill the pool with `random_bytes` of this seed."""

    seed: int


class Wipe(Line, frozen=True):
    """Set the bytes from `start` to `end` of the pool to this value; without an end, up to the pool's."""

    value: int
    start: int = 0
    end: int | None = None


class Dump(Line, frozen=True):
    """Write the pool into a file."""

    path: str


class Close(Line, frozen=True):
    """Close the link to an agent, or with None everything."""

    agent: str | None


class End(Line, frozen=True):
    """Close everything and exit. The answer says what is left that should not be."""


Command: TypeAlias = Connect | PushRuns | Fill | Wipe | Dump | Close | End


class Started(Line, frozen=True):
    """The agent is there."""

    pool: PoolDescriptor


class Answer(Line, frozen=True):
    """A command is done, or `refused` says why it could not be done."""

    refused: str | None = None


class Done(Line, frozen=True):
    """See RunsDone."""

    ticket: int


class Failed(Line, frozen=True):
    """See RunsFailed."""

    ticket: int
    reason: str
    quiescent: bool


class Lost(Line, frozen=True):
    """See AgentLost."""

    agent: str
    reason: str


Report: TypeAlias = Started | Answer | Done | Failed | Lost


def random_bytes(seed: int, pool_bytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """The same bytes for the same seed, in any process. They repeat with a period that divides no page or slice."""
    return np.resize(np.frombuffer(np.random.default_rng(seed).bytes(PERIOD_BYTES), dtype=np.uint8), pool_bytes)


def pool_descriptor(agent: str, address: int, pool_bytes: int, wire: bytes, backend: str) -> PoolDescriptor:
    """A pool of bytes: each page is of two bytes, the smallest there is."""
    return PoolDescriptor(
        backend=backend,
        agent=agent,
        address=address,
        total_pages=pool_bytes // LAYOUT.page_bytes,
        device="cpu",
        layout=LAYOUT,
        wire=wire,
    )


class AgentProcess:
    """The transport and its pool."""

    def __init__(self, name: TransportName, pool_bytes: int, silence_s: int) -> None:
        self._pool = np.zeros(pool_bytes, dtype=np.uint8)
        self._transport = transport_of(name, silence_s)
        region = MemoryRegion(address=self._pool.ctypes.data, region_bytes=pool_bytes, device="cpu")
        agent, wire = self._transport.register(region)
        say(Started(pool=pool_descriptor(agent, region.address, pool_bytes, wire, name)))

    def run(self) -> None:
        """Obey until End, or until nobody is there to command."""
        decoder = msgspec.json.Decoder[Command](Command)
        unread = b""
        while True:
            self._report()
            ready, _, _ = select.select([0], [], [], POLL_S)
            if not ready:
                continue
            data = os.read(0, 1 << 20)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                command = decoder.decode(line)
                if isinstance(command, End):
                    self._transport.close()
                    left = threads_left()
                    say(Answer(refused=f"threads are left: {left}" if left else None))
                    return
                say(self._obey(command))

    def _obey(self, command: Connect | PushRuns | Fill | Wipe | Dump | Close) -> Answer:
        try:
            match command:
                case Connect():
                    self._transport.connect(command.pool)
                case PushRuns():
                    runs = np.array(command.runs, dtype=np.int64).reshape(-1, 3)
                    self._transport.push(Ticket(command.ticket), command.agent, runs)
                case Fill():
                    self._pool[:] = random_bytes(command.seed, len(self._pool))
                case Wipe():
                    self._pool[command.start : command.end] = command.value
                case Dump():
                    self._pool.tofile(command.path)
                case Close():
                    self._transport.close(command.agent)
                case _:
                    assert_never(command)
        except TransferError as error:
            return Answer(refused=str(error))
        return Answer()

    def _report(self) -> None:
        for event in self._transport.poll():
            match event:
                case RunsDone():
                    say(Done(ticket=event.ticket))
                case RunsFailed():
                    say(Failed(ticket=event.ticket, reason=event.reason, quiescent=event.quiescent))
                case AgentLost():
                    say(Lost(agent=event.agent, reason=event.reason))
                case _:
                    assert_never(event)


def transport_of(name: TransportName, silence_s: int, host: str = LOOPBACK) -> Transport:
    """A transport that calls a peer lost after so long a silence, where that can be told to it; else it is in the environment."""
    match name:
        case "nixl":
            from kv_transfer.nixl import NixlTransport

            sys.modules["torch"] = None  # type: ignore[assignment]  # NIXL would import it to ask for CUDA, which takes seconds
            return NixlTransport(silence_s)
        case "torch":
            from kv_transfer.distributed import TorchTransport

            return TorchTransport(host, silence_s)
        case "mooncake" | "cma":
            return make_transport(name, host)
        case _:
            assert_never(name)


def threads_left() -> list[str]:
    """The names of the threads that have not ended, beside this one."""
    until = time.monotonic() + THREADS_S
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        thread.join(max(0.0, until - time.monotonic()))
    return [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]


def say(line: Report) -> None:
    """One line to whoever started this process."""
    data = msgspec.json.encode(line) + b"\n"
    while data:
        data = data[os.write(REPORTS, data) :]


if __name__ == "__main__":
    os.dup2(1, REPORTS)
    os.dup2(2, 1)  # UCX logs to stdout
    transport_name: TransportName = msgspec.convert(sys.argv[1], TransportName)
    AgentProcess(transport_name, int(sys.argv[2]), int(sys.argv[3])).run()
