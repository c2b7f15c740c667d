"""The two processes of a way, as the one that measures sees them: started, connected, measured, ended.

Owns the processes and their pipes, and how CPU time is attributed. Does not know how bytes move, or what is worth measuring.
"""

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import msgspec

from bench.figures import Sample
from bench.lines import Address, AgentPlan, Answer, Command, Connect, Digest, End, Expect, Push, Refused, Report, Started
from bench.plan import Point, TransferBench, Way
from common.errors import TransferError
from common.processes.child import KILL_S

_ROOT = Path(__file__).resolve().parents[1]
ANSWER_S = 120.0
LEAST_PUSHES = 3
LEAST_PUSHES_OF_ONE_PAGE = 200
"""So that a 99th percentile is one."""


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
        self._decoder = msgspec.json.Decoder[Report](Report)
        self._unread = b""
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "bench.agent", msgspec.json.encode(plan).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            cwd=_ROOT,  # a child runs the code that we run
            env={**os.environ, **environment},
        )

    def started(self) -> Address:
        """Wait until it is there. Raises TransferError with its reason."""
        report = self._report()
        if not isinstance(report, Started):
            raise TransferError(f"an agent began with {report}")
        return report.address

    def tell(self, command: Command) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise TransferError(f"an agent is gone: {error}; {self._last_words()}") from error

    def answer(self) -> Answer:
        """The answer to a command. Raises TransferError with the reason when it was refused."""
        report = self._report()
        if not isinstance(report, Answer):
            raise TransferError(f"an agent answered {report}")
        return report

    def do(self, command: Command) -> Answer:
        self.tell(command)
        return self.answer()

    def close(self) -> None:
        """Ask it to end, and end it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self.tell(End())
            self._process.wait(KILL_S)
        except (TransferError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._complaints.close()
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            return  # what was not read any more

    def _report(self) -> Report:
        assert self._process.stdout is not None
        until = time.monotonic() + ANSWER_S
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TransferError(f"an agent said nothing for {ANSWER_S:g} s; {self._last_words()}")
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                raise TransferError(f"an agent ended with {self._process.wait()}; {self._last_words()}")
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        report: Report = self._decoder.decode(line)
        if isinstance(report, Refused):
            raise TransferError(report.reason)
        return report

    def _last_words(self) -> str:
        self._complaints.seek(0)
        return self._complaints.read()[-500:].decode(errors="replace").strip().replace("\n", " / ") or "it said nothing"


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
        """Wait until both are there, and link them. Raises TransferError."""
        addresses = [agent.started() for agent in self._agents]
        self._target.do(Expect(pushes=True))
        self._source.do(Connect(address=addresses[-1]))
        self._target.do(Expect(pushes=False))

    def check(self, point: Point, seed: int) -> None:
        """Push a turn, so that what is done once is done, and compare what landed. Raises TransferError."""
        turn = point.pushes_in_turn(self._pool_bytes)
        self._target.do(Expect(pushes=True))
        self._source.do(Push(point=point, seed=seed, seconds=0.0, least_pushes=turn))
        sent = self._source.do(Digest(point=point, seed=seed, landed=False)).digest
        landed = self._target.do(Digest(point=point, seed=seed, landed=True)).digest
        self._target.do(Expect(pushes=False))
        if sent != landed:
            raise TransferError(f"{self.way.label} wrote other bytes than were sent")

    def measure(self, point: Point, seed: int, seconds: float) -> Sample:
        """Push for so long. CPU time is that of all threads of both processes. Raises TransferError."""
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
