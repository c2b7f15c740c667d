"""The two processes of a way, as the measuring process sees them: started, connected, measured, ended.

Owns the processes, and how CPU time is attributed. Does not know how bytes move, or what is worth measuring.
"""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from bench.figures import Sample
from bench.lines import AgentPlan, Answer, Command, Connect, Digest, Expect, Push, Report, Stop
from bench.plan import ALONE, Point, TransferBench, Way
from common.errors import TransferError
from common.processes.child import KILL_S, ChildEnded, Respondent
from common.processes.lines import Broken

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

    def do(self, command: Command) -> Answer:
        """Returns the answer. Raises TransferError with the reason when the command cannot be done."""
        self._child.order(command)
        return self.answer()

    def answer(self) -> Answer:
        """The next answer; the first one tells that it has started. Raises TransferError with the reason when it fails."""
        try:
            report = self._child.next_report(ANSWER_S)
        except ChildEnded as error:
            raise TransferError(" / ".join(line.strip() for line in str(error).splitlines())) from error
        match report:
            case Answer():
                return report
            case Broken():
                raise TransferError(report.reason)
            case None:
                raise TransferError(f"an agent did not answer for {ANSWER_S:g} s")

    def close(self) -> None:
        """Ask it to end; kill it when it does not."""
        self._child.order(Stop())
        if not self._child.wait(KILL_S):
            self._child.kill()
            self._child.wait(KILL_S)


class Pair(contextlib.AbstractContextManager["Pair"]):
    """The processes of one way: the source pushes, the target is written to. For the speed of the memory one is both."""

    def __init__(self, bench: TransferBench, way: Way, spots: Spots, environment: Mapping[str, str]) -> None:
        self.way = way
        self._pool_bytes = bench.pool_bytes
        unit_bytes, pool_bytes, huge_pages = bench.unit_bytes, bench.pool_bytes, bench.huge_pages == "on"
        self._agents = []
        source, target = bench.devices
        ends = list(zip(spots, ((source, target), (target, source)), strict=True))
        for spot, (device, other) in ends[:1] if way.kind in ALONE else ends:
            plan = AgentPlan(
                way=way,
                host=spot.host,
                unit_bytes=unit_bytes,
                pool_bytes=pool_bytes,
                huge_pages=huge_pages,
                device=device,
                other_device=other,
            )
            self._agents.append(Agent(plan, spot.prefix, environment))
        self._source, self._target = self._agents[0], self._agents[-1]

    def __exit__(self, *_: object) -> None:
        for agent in self._agents:
            agent.close()

    def connect(self) -> None:
        """Wait until both have started, and link them. Raises TransferError."""
        addresses = [agent.answer().address for agent in self._agents]
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
