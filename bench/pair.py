"""The two processes of a way, as the measuring process sees them: started, connected, measured, ended.

Owns the processes, and how CPU time is attributed. Does not know how bytes move, or what is worth measuring.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

import msgspec

from bench.figures import Sample
from bench.lines import Address, AgentPlan, Answer, Command, Connect, Digest, Expect, Push, Refused, Report, Started, Stop
from bench.plan import Point, TransferBench, Way
from common.errors import TransferError
from common.processes.child import KILL_S, ChildEnded, Respondent

ANSWER_S = 120.0
LEAST_PUSHES = 3
LEAST_PUSHES_OF_ONE_PAGE = 200
"""Enough for a 99th percentile."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a process is. prefix: what its command is run by, such as `ip netns exec NAME`. host: the address to listen on."""

    prefix: Sequence[str]
    host: str


Spots: TypeAlias = tuple[Spot, Spot]
"""Of the source and the target."""


class Agent:
    """One process. prefix: what its command is run by."""

    def __init__(self, plan: AgentPlan, prefix: Sequence[str], environment: Mapping[str, str]) -> None:
        command = [*prefix, sys.executable, "-P", "-m", "bench.agent", msgspec.json.encode(plan).decode()]
        decoder = msgspec.json.Decoder[Report](Report)
        self._child: Respondent[Command, Report] = Respondent("agent", command, decoder, environment)

    def started(self) -> Address:
        """Wait until it has started. Raises TransferError with its reason."""
        report = self._report()
        assert isinstance(report, Started), report
        return report.address

    def do(self, command: Command) -> Answer:
        """Returns the answer. Raises TransferError with the reason when the command is refused."""
        self._child.order(command)
        report = self._report()
        assert isinstance(report, Answer), report
        return report

    def close(self) -> None:
        """Ask it to end; kill it when it does not."""
        self._child.order(Stop())
        if not self._child.wait(KILL_S):
            self._child.kill()
            self._child.wait(KILL_S)

    def _report(self) -> Started | Answer:
        try:
            report = self._child.next_report(ANSWER_S)
        except ChildEnded as error:
            raise TransferError(" / ".join(line.strip() for line in str(error).splitlines())) from error
        if report is None:
            raise TransferError(f"an agent did not answer for {ANSWER_S:g} s")
        if isinstance(report, Refused):
            raise TransferError(report.reason)
        return report


class Pair:
    """The processes of one way: the source pushes, the target is written to. With memmove one process is both."""

    def __init__(self, bench: TransferBench, way: Way, spots: Spots, environment: Mapping[str, str]) -> None:
        self.way = way
        self._pool_bytes = bench.pool_bytes
        self._agents = [
            Agent(
                AgentPlan(
                    way=way,
                    host=spot.host,
                    unit_bytes=bench.unit_bytes,
                    pool_bytes=bench.pool_bytes,
                    huge_pages=bench.huge_pages == "on",
                ),
                spot.prefix,
                environment,
            )
            for spot in (spots[:1] if way.kind == "memmove" else spots)
        ]
        self._source, self._target = self._agents[0], self._agents[-1]

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for agent in self._agents:
            agent.close()

    def connect(self) -> None:
        """Wait until both have started, and link them. Raises TransferError."""
        addresses = [agent.started() for agent in self._agents]
        self._target.do(Expect(pushes=True))
        self._source.do(Connect(address=addresses[-1]))
        self._target.do(Expect(pushes=False))

    def check(self, point: Point, seed: int) -> None:
        """Push one turn, which also warms up the way, and compare what landed. Raises TransferError."""
        turn = point.pushes_in_turn(self._pool_bytes)
        self._target.do(Expect(pushes=True))
        self._source.do(Push(point=point, seed=seed, seconds=0.0, least_pushes=turn))
        sent = self._source.do(Digest(point=point, seed=seed, landed=False)).digest
        landed = self._target.do(Digest(point=point, seed=seed, landed=True)).digest
        self._target.do(Expect(pushes=False))
        if sent != landed:
            raise TransferError(f"{self.way.label} wrote other bytes than were sent")

    def measure(self, point: Point, seed: int, seconds: float) -> Sample:
        """Push for this many seconds. CPU time is that of all threads of both processes. Raises TransferError."""
        least = LEAST_PUSHES_OF_ONE_PAGE if point.pages == 1 else LEAST_PUSHES
        before = self._cpu_s(pushes=True)
        answer = self._source.do(Push(point=point, seed=seed, seconds=seconds, least_pushes=least))
        after = self._cpu_s(pushes=False)
        return Sample.of(point, answer.pushes, answer.elapsed_s, after - before)

    def idle_cpu_s(self) -> float:
        """CPU time of both processes so far, while nothing is pushed."""
        return self._cpu_s(pushes=False)

    def _cpu_s(self, pushes: bool) -> float:
        commands = [Expect(pushes=pushes and agent is self._target) for agent in self._agents]
        return sum(agent.do(command).cpu_s for agent, command in zip(self._agents, commands, strict=True))
