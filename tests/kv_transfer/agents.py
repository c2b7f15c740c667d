"""Agents for the contract suite: one transport and one pool each, behind the same few methods whatever the backend is.

Owns the processes of NIXL agents and what they must leave behind: nothing. Knows no test.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np

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
    pool_descriptor,
    random_bytes,
)

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 30.0
"""Longest wait for anything; a test that waits so long has failed."""
Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


class Agent(Protocol):
    """One transport with its pool."""

    @property
    def pool(self) -> PoolDescriptor: ...

    @property
    def pool_bytes(self) -> int: ...

    def fill(self, seed: int) -> None:
        """Fill the pool with `random_bytes(seed, pool_bytes)`."""

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

    def start(self, pool_bytes: int) -> Agent: ...

    def finish(self) -> None:
        """End every agent."""


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

    def start(self, pool_bytes: int) -> MemoryAgent:
        self._agents.append(MemoryAgent(self._network, pool_bytes))
        return self._agents[-1]

    def finish(self) -> None:
        for agent in self._agents:
            agent.end()


# --- NIXL, a process each ----------------------------------------------------------------------------------------------------


class NixlAgent:
    """A NIXL agent in a process of its own."""

    def __init__(self, folder: Path, number: int, pool_bytes: int, silence_s: int, environment: Mapping[str, str]) -> None:
        self.pool_bytes = pool_bytes
        self._dump = folder / f"pool-{number}"
        self._stderr = folder / f"stderr-{number}"
        self._before = set(os.listdir("/dev/shm"))
        with self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.kv_transfer.agent_process", str(pool_bytes), str(silence_s)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **environment},
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

    @property
    def pid(self) -> int:
        return self._process.pid

    def fill(self, seed: int) -> None:
        self._do(Fill(seed=seed))

    def memory(self) -> Bytes:
        self._do(Dump(path=str(self._dump)))
        memory = np.fromfile(self._dump, dtype=np.uint8)
        self._dump.unlink()
        return memory

    def connect(self, pool: PoolDescriptor) -> None:
        self._do(Connect(pool=pool))

    def push(self, ticket: int, agent: str, runs: Int64Array) -> None:
        self._do(PushRuns(ticket=ticket, agent=agent, runs=runs.tolist()))

    def push_soon(self, ticket: int, agent: str, runs: Int64Array) -> None:
        """Command the push and do not wait until it is posted; `posted` does."""
        self._write(PushRuns(ticket=ticket, agent=agent, runs=runs.tolist()))

    def posted(self) -> None:
        """The command of push_soon is carried out."""
        self._accepted()

    def events(self, timeout_s: float) -> list[TransportEvent]:
        try:
            events = [self._news.get(timeout=timeout_s)]
            while True:
                events.append(self._news.get_nowait())
        except queue.Empty:
            return events if "events" in locals() else []

    def close(self, agent: str | None = None) -> None:
        self._do(Close(agent=agent))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; after SIGKILL it is gone."""
        os.kill(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.wait(WAIT_S)
            self._release()

    def end(self) -> None:
        if self._gone:
            return
        self._do(End())
        status = self._process.wait(WAIT_S)
        self._release()
        stderr = self._stderr.read_text()
        assert status == 0, f"an agent ended with {status}: {stderr}"
        assert not stderr, f"an agent complained: {stderr}"

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
        assert answer is not None, f"the agent has died: {self._process.wait(WAIT_S)}: {self._stderr.read_text()}"
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


class NixlBackend:
    """NIXL agents, each in its process. tcp_only: as if on hosts of their own; without it UCX writes memory of this host."""

    def __init__(self, folder: Path, tcp_only: bool, silence_s: int = 10) -> None:
        self._folder = folder
        self._silence_s = silence_s
        self._environment = {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error", "UCX_WARN_UNUSED_ENV_VARS": "n"}
        if tcp_only:
            self._environment["UCX_TLS"] = "tcp"
        if not Path("/sys/class/infiniband").exists():
            self._environment["UCX_MODULES"] = "^ib"
        self._agents: list[NixlAgent] = []

    def start(self, pool_bytes: int) -> NixlAgent:
        agent = NixlAgent(self._folder, len(self._agents), pool_bytes, self._silence_s, self._environment)
        self._agents.append(agent)
        agent.started()
        return agent

    def finish(self) -> None:
        for agent in self._agents:
            agent.end()


def outcome(agent: Agent, ticket: int, timeout_s: float = WAIT_S) -> RunsDone | RunsFailed:
    """How a ticket ended; what else is reported meanwhile is dropped."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        for event in agent.events(until - time.monotonic()):
            if isinstance(event, RunsDone | RunsFailed) and event.ticket == ticket:
                return event
    raise AssertionError(f"ticket {ticket} did not end within {timeout_s:g} s")
