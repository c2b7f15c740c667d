"""Agents for the contract suite: one transport and one pool each, behind the same few methods whatever the backend is.

Owns the processes of agents and what they must leave behind: nothing. Knows no test.
"""

import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, assert_never

import msgspec
import numpy as np

from common.config import TransportName
from common.errors import TransferError
from common.ids import Int64Array, Ticket
from common.messages import PoolDescriptor
from common.processes.child import Respondent
from kv_transfer.transport import AgentLost, Connected, ConnectFailed, RunsDone, RunsFailed, TransportEvent
from tests.kv_transfer.agent_process import Answer, Call, Event, Happened, Plan, Report, Started, event_in
from tests.kv_transfer.local_agent import LAYOUT, WAIT_S, LocalAgent
from tests.kv_transfer.memory import MemoryNetwork, MemoryTransport
from tests.kv_transfer.pools import Bytes
from tests.rig.forks import forked

END_S = 30.0
"""Longest wait for an agent to end."""


class MemoryBackend:
    """Agents of this process, on one MemoryNetwork."""

    def __init__(self) -> None:
        self._network = MemoryNetwork()
        self._agents: list[LocalAgent[MemoryTransport]] = []

    def start(self, *pool_bytes: int) -> list[LocalAgent[MemoryTransport]]:
        agents = [LocalAgent(MemoryTransport(self._network), each) for each in pool_bytes]
        self._agents += agents
        return agents

    def finish(self) -> None:
        for agent in self._agents:
            agent.end()


# --- a process each ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A transport and how it is to work. silence_s: after which it calls a peer lost. devices: of the agents' pools, in turn."""

    transport: TransportName
    silence_s: int = 4
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu",)


def nixl_kind(tcp_only: bool, silence_s: int = 4) -> Kind:
    """tcp_only: as if on hosts of their own; without it UCX writes memory of this host."""
    environment = {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    if tcp_only:
        environment["UCX_TLS"] = "tcp"
    if not Path("/sys/class/infiniband").exists():
        environment["UCX_MODULES"] = "^ib"
    return Kind("nixl", silence_s, environment)


def mooncake_kind(silence_s: int = 5) -> Kind:
    """silence_s: at least 5."""
    return Kind("mooncake", silence_s, {"MC_TRANSFER_TIMEOUT": str(silence_s), "GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"})


class PoolProcess(ABC):
    """A process with a pool, that is called again and again. prefix: what its command is run by, such as `ip netns exec NAME`."""

    def __init__(self, name: str, plan: Plan, kind: Kind, folder: Path, prefix: Sequence[str] = ()) -> None:
        self.name = name
        self.pool_bytes = plan.total_pages * plan.page_bytes
        self._folder = folder
        self._answers: deque[Answer] = deque()
        command = [*prefix, sys.executable, "-m", "tests.kv_transfer.agent_process", msgspec.json.encode(plan).decode()]
        decoder = msgspec.json.Decoder[Report](Report)
        self._child: Respondent[Report] = Respondent(name, command, decoder, kind.environment)
        self.pid = self._child.pid

    @abstractmethod
    def take(self, event: Event) -> None:
        """Called with each event that the process reports."""

    def started(self) -> None:
        """Wait until the process does its work; from then on it has a `pool`."""
        report = self._child.next_report(WAIT_S)
        assert isinstance(report, Started), f"{self.name} began with {report}"
        self.pool = report.pool

    def do(self, method: str, **arguments: object) -> Answer:
        """Call this method of `PortEnd` or `ThreadEnd`. Raises TransferError when it is refused, ChildEnded when the process
        is gone."""
        self._child.order(Call(method=method, arguments=arguments))
        return self.answer()

    def answer(self) -> Answer:
        """The answer to the first call that has none yet. Raises as `do` does."""
        until = time.monotonic() + WAIT_S
        while not self._answers:
            assert self.hears(until), f"{self.name} does not answer"
        answer = self._answers.popleft()
        if answer.refused is not None:
            raise TransferError(answer.refused)
        return answer

    def hears(self, until: float) -> bool:
        """Take in one report. Returns False when there is none until then. Raises ChildEnded."""
        report = self._child.next_report(until - time.monotonic())
        match report:
            case None:
                return False
            case Answer():
                self._answers.append(report)
            case Happened():
                self.take(event_in(report))
            case Started():
                raise AssertionError(f"{self.name} has started twice")
            case _:
                assert_never(report)
        return True

    def memory(self) -> Bytes:
        path = self._folder / f"{self.name}-pool"
        self.do("dump", path=str(path))
        memory = np.fromfile(path, dtype=np.uint8)
        path.unlink()
        return memory

    def complaints(self) -> str:
        """What it and its libraries have written to stderr and stdout."""
        return "".join(self._child.output)

    def stop(self) -> None:
        self._child.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._child.signal(signal.SIGCONT)

    def end(self) -> None:
        """Leave in order. Raises AssertionError when the process fails or leaves shared memory behind."""
        if self._child.wait(0.0):
            return
        maps = Path(f"/proc/{self.pid}/maps").read_text()
        shared = {path for path in maps.split() if path.startswith("/dev/shm/")}
        self.do("end")
        ended = self._child.wait(END_S)
        assert ended and self._child.status == 0, f"{self.name} ended with {self._child.status}: {self.complaints()}"
        left = [path for path in shared if Path(path).exists()]
        assert not left, f"{self.name} has left {left}"

    def kill(self) -> None:
        """End the process at once, whatever state it is in."""
        self._child.kill()
        assert self._child.wait(END_S), f"{self.name} is still there"


class ProcessAgent(PoolProcess):
    """An agent in a process of its own."""

    def __init__(self, folder: Path, number: int, pool_bytes: int, kind: Kind) -> None:
        plan = Plan(
            transport=kind.transport,
            device=kind.devices[number % len(kind.devices)],
            silence_s=kind.silence_s,
            total_pages=pool_bytes // LAYOUT.page_bytes,
        )
        super().__init__(f"agent-{number}", plan, kind, folder)
        self._news: list[TransportEvent] = []

    def take(self, event: Event) -> None:
        assert isinstance(event, Connected | ConnectFailed | RunsDone | RunsFailed | AgentLost)
        self._news.append(event)

    def fill(self, seed: int) -> None:
        self.do("fill", seed=seed)

    def wipe(self, value: int, start: int = 0, end: int | None = None) -> None:
        self.do("wipe", value=value, start=start, end=end)

    def connect(self, pool: PoolDescriptor) -> None:
        self.do("connect_to", pool=pool)

    def begin_connect(self, pool: PoolDescriptor) -> None:
        self.do("begin_connect_to", pool=pool)

    def push(self, ticket: int, agent: str, runs: Int64Array) -> None:
        self.push_many([ticket], agent, runs)
        self.posted()

    def push_many(self, tickets: Iterable[int], agent: str, runs: Int64Array) -> None:
        """Push the same runs again and again, without waiting until they are posted. Call `posted` for each of them."""
        for ticket in tickets:
            self._child.order(Call(method="push_rows", arguments={"ticket": ticket, "agent": agent, "runs": runs.tolist()}))

    def posted(self) -> None:
        """Wait until one push of push_many is posted."""
        self.answer()

    def events(self, timeout_s: float) -> list[TransportEvent]:
        """What was reported since the last call; waits for the first of it. Empty when the time is over."""
        until = time.monotonic() + timeout_s
        while not self._news and self.hears(until):
            pass
        while self.hears(0.0):
            pass
        events, self._news = self._news, []
        return events

    def close(self, agent: str | None = None) -> None:
        self.do("close", agent=agent)


class ProcessBackend:
    """Agents of one kind, each in its process."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self._folder = folder
        self.kind = kind
        self._agents: list[ProcessAgent] = []

    def start(self, *pool_bytes: int) -> list[ProcessAgent]:
        agents = []
        with forked():
            for each in pool_bytes:  # their processes start side by side
                agents.append(ProcessAgent(self._folder, len(self._agents), each, self.kind))
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


Agent: TypeAlias = LocalAgent[MemoryTransport] | ProcessAgent
Backend: TypeAlias = MemoryBackend | ProcessBackend


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


def open_files(pid: int) -> int:
    """How many file descriptors a process has."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def running_threads(pid: int) -> int:
    """How many threads a process has, also those of libraries."""
    return len(os.listdir(f"/proc/{pid}/task"))
