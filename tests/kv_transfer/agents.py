"""Agents for the contract suite: one transport and one pool each, behind the same few methods whatever the backend is.

Owns the processes of agents and what they must leave behind: nothing. Knows no test.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np

from common.config import TransportName
from common.errors import TransferError
from common.ids import Int64Array, Ticket
from common.messages import PoolDescriptor
from common.pages.layout import MemoryRegion
from kv_transfer.memory import MemoryNetwork, MemoryTransport
from kv_transfer.transport import AgentLost, RunsDone, RunsFailed, TransportEvent
from tests.kv_transfer.agent_process import (
    Answer,
    Close,
    Command,
    Connect,
    Done,
    Dump,
    End,
    Failed,
    Fill,
    Lost,
    PushRuns,
    Report,
    Started,
    Wipe,
    pool_descriptor,
    random_bytes,
)

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
"""Longest wait for an answer or an event: an agent that is silent for longer hangs."""
END_S = 30.0
"""Longest wait for an agent to end."""
Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


class Agent(Protocol):
    """One transport with its pool."""

    @property
    def pool(self) -> PoolDescriptor: ...

    @property
    def pool_bytes(self) -> int: ...

    def fill(self, seed: int) -> None:
        """Fill the pool with `random_bytes(seed, pool_bytes)`."""

    def wipe(self, value: int, start: int = 0, end: int | None = None) -> None:
        """Set every byte of the pool, or of a part of it."""

    def memory(self) -> Bytes:
        """A copy of the pool."""

    def connect(self, pool: PoolDescriptor) -> None:
        """Raises TransferError."""

    def push(self, ticket: int, agent: str, runs: Int64Array) -> None: ...

    def events(self, timeout_s: float) -> list[TransportEvent]:
        """What was reported since the last call; waits for the first of it. Empty when the time is over."""

    def close(self, agent: str | None = None) -> None: ...

    def end(self) -> None:
        """Leave in order. Raises AssertionError when something is left behind."""


class Backend(Protocol):
    """Makes agents that can reach each other."""

    def start(self, *pool_bytes: int) -> Sequence[Agent]:
        """An agent for each pool."""

    def finish(self) -> None:
        """End every agent that is alive. Raises AssertionError when one leaves something behind."""


# --- in this process ---------------------------------------------------------------------------------------------------------


class MemoryAgent:
    """A MemoryTransport and its pool."""

    def __init__(self, network: MemoryNetwork, pool_bytes: int) -> None:
        self._bytes = np.zeros(pool_bytes, dtype=np.uint8)
        self._transport = MemoryTransport(network)
        region = MemoryRegion(address=self._bytes.ctypes.data, region_bytes=pool_bytes, device="cpu")
        agent, wire = self._transport.register(region)
        self.pool = pool_descriptor(agent, region.address, pool_bytes, wire, backend="memory")
        self.pool_bytes = pool_bytes

    def fill(self, seed: int) -> None:
        self._bytes[:] = random_bytes(seed, self.pool_bytes)

    def wipe(self, value: int, start: int = 0, end: int | None = None) -> None:
        self._bytes[start:end] = value

    def memory(self) -> Bytes:
        return self._bytes.copy()

    def connect(self, pool: PoolDescriptor) -> None:
        self._transport.connect(pool)

    def push(self, ticket: int, agent: str, runs: Int64Array) -> None:
        self._transport.push(Ticket(ticket), agent, runs)

    def events(self, timeout_s: float) -> list[TransportEvent]:
        return self._transport.poll()

    def close(self, agent: str | None = None) -> None:
        self._transport.close(agent)

    def end(self) -> None:
        self._transport.close()


class MemoryBackend:
    """Agents of one MemoryNetwork."""

    def __init__(self) -> None:
        self._network = MemoryNetwork()
        self._agents: list[MemoryAgent] = []

    def start(self, *pool_bytes: int) -> list[MemoryAgent]:
        agents = [MemoryAgent(self._network, each) for each in pool_bytes]
        self._agents += agents
        return agents

    def finish(self) -> None:
        for agent in self._agents:
            agent.end()


# --- a process each ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A transport and how it is to work. silence_s: after which it calls a peer lost."""

    transport: TransportName
    silence_s: int = 10
    environment: Mapping[str, str] = field(default_factory=dict)


def nixl_kind(tcp_only: bool, silence_s: int = 10) -> Kind:
    """tcp_only: as if on hosts of their own; without it UCX writes memory of this host."""
    environment = {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    if tcp_only:
        environment["UCX_TLS"] = "tcp"
    if not Path("/sys/class/infiniband").exists():
        environment["UCX_MODULES"] = "^ib"
    return Kind("nixl", silence_s, environment)


def mooncake_kind(silence_s: int = 10) -> Kind:
    """silence_s: at least 5."""
    return Kind("mooncake", silence_s, {"MC_TRANSFER_TIMEOUT": str(silence_s), "GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"})


class ProcessAgent:
    """An agent in a process of its own."""

    def __init__(self, folder: Path, number: int, pool_bytes: int, kind: Kind) -> None:
        self.pool_bytes = pool_bytes
        self._dump = folder / f"pool-{number}"
        self._stderr = folder / f"stderr-{number}"
        with self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.kv_transfer.agent_process", kind.transport, str(pool_bytes), str(kind.silence_s)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **kind.environment},
            )
        self._answers: queue.Queue[Started | Answer | None] = queue.Queue()
        self._news: queue.Queue[TransportEvent] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._gone = False

    def started(self) -> None:
        """Wait until the agent is there."""
        answer = self._answer()
        assert isinstance(answer, Started)
        self.pool = answer.pool

    def fill(self, seed: int) -> None:
        self._do(Fill(seed=seed))

    def wipe(self, value: int, start: int = 0, end: int | None = None) -> None:
        self._do(Wipe(value=value, start=start, end=end))

    def memory(self) -> Bytes:
        self._do(Dump(path=str(self._dump)))
        memory = np.fromfile(self._dump, dtype=np.uint8)
        self._dump.unlink()
        return memory

    def connect(self, pool: PoolDescriptor) -> None:
        self._do(Connect(pool=pool))

    def push(self, ticket: int, agent: str, runs: Int64Array) -> None:
        self._do(PushRuns(ticket=ticket, agent=agent, runs=runs.tolist()))

    def push_many(self, tickets: Iterable[int], agent: str, runs: Int64Array) -> None:
        """Push the same runs again and again, without waiting until they are posted. Call `posted` for each of them."""
        for ticket in tickets:
            self._write(PushRuns(ticket=ticket, agent=agent, runs=runs.tolist()))

    def posted(self) -> None:
        """Wait until one push of push_many is posted."""
        self._accepted()

    def events(self, timeout_s: float) -> list[TransportEvent]:
        try:
            events = [self._news.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        return events + [self._news.get_nowait() for _ in range(self._news.qsize())]

    def close(self, agent: str | None = None) -> None:
        self._do(Close(agent=agent))

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self._gone:
            return
        maps = Path(f"/proc/{self._process.pid}/maps").read_text()
        shared = {path for path in maps.split() if path.startswith("/dev/shm/")}
        self._do(End())
        status = self._process.wait(END_S)
        self._release()
        assert status == 0, f"an agent ended with {status}: {self.complaints()}"
        left = [path for path in shared if Path(path).exists()]
        assert not left, f"an agent has left {left}"

    def complaints(self) -> str:
        """What it and its libraries have written to stderr and stdout."""
        return self._stderr.read_text()

    def kill(self) -> None:
        """End the process at once, whatever state it is in."""
        if not self._gone:
            self._process.kill()
            self._process.wait(END_S)
            self._release()

    def _release(self) -> None:
        self._gone = True
        self._reader.join(WAIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _do(self, command: Command) -> None:
        self._write(command)
        self._accepted()

    def _write(self, command: Command) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(command) + b"\n")
        self._process.stdin.flush()

    def _accepted(self) -> None:
        answer = self._answer()
        assert isinstance(answer, Answer)
        if answer.refused is not None:
            raise TransferError(answer.refused)

    def _answer(self) -> Started | Answer:
        answer = self._answers.get(timeout=WAIT_S)
        assert answer is not None, f"the agent has died: {self._process.wait(END_S)}: {self.complaints()}"
        return answer

    def _read(self) -> None:
        """On a thread of its own, until the process is gone."""
        decoder = msgspec.json.Decoder[Report](Report)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            report = decoder.decode(line)
            match report:
                case Started() | Answer():
                    self._answers.put(report)
                case Done():
                    self._news.put(RunsDone(Ticket(report.ticket)))
                case Failed():
                    self._news.put(RunsFailed(Ticket(report.ticket), report.reason, report.quiescent))
                case Lost():
                    self._news.put(AgentLost(report.agent, report.reason))
        self._answers.put(None)


class ProcessBackend:
    """Agents of one kind, each in its process."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self._folder = folder
        self._kind = kind
        self._agents: list[ProcessAgent] = []

    def start(self, *pool_bytes: int) -> list[ProcessAgent]:
        agents = []
        for each in pool_bytes:  # their processes start side by side
            agents.append(ProcessAgent(self._folder, len(self._agents), each, self._kind))
            self._agents.append(agents[-1])
        for agent in agents:
            agent.started()
        return agents

    def finish(self) -> None:
        try:
            for agent in self._agents:
                agent.go_on()
                agent.end()
        finally:
            for agent in self._agents:
                agent.kill()


def done(ticket: int) -> RunsDone:
    return RunsDone(Ticket(ticket))


def outcomes(agent: Agent, tickets: Iterable[int], timeout_s: float = WAIT_S) -> dict[int, RunsDone | RunsFailed]:
    """How each ticket ended. Raises AssertionError for one that does not end, that ends twice or that nobody asked for."""
    until = time.monotonic() + timeout_s
    open_tickets, ended = set(tickets), dict[int, RunsDone | RunsFailed]()
    while open_tickets:
        assert time.monotonic() < until, f"tickets {sorted(open_tickets)} did not end within {timeout_s:g} s"
        for event in agent.events(until - time.monotonic()):
            if isinstance(event, RunsDone | RunsFailed):
                open_tickets.remove(event.ticket)
                ended[event.ticket] = event
    return ended
