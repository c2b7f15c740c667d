"""One of the two processes of a measurement: a pool and one end of a way, which obey commands.

Owns the pool, the pages of each push and the clock around them. Run as `python -m bench.agent PLAN`, it answers once when it has
started, and once to each command. Ends when it is told to, when a command fails, or when its parent is gone. Does not know who
measures.
"""

import contextlib
import sys
import time
from typing import assert_never

import msgspec
import numpy as np

from bench.ends import make_end
from bench.lines import AgentPlan, Answer, Command, Connect, Digest, Expect, Push, Report, Stop
from bench.plan import Point
from bench.pools import make_pool
from common.errors import TransferError
from common.ids import Int32Array
from common.processes.lines import Broken
from common.processes.parent import Parent


def pages_of(point: Point, unit_bytes: int, pool_bytes: int, seed: int) -> list[tuple[Int32Array, Int32Array]]:
    """The pages of each push of a point, as units of the pool: (source, target), [units] int32 each. Equal in all processes."""
    random = np.random.default_rng([seed, point.page_bytes, point.pages])
    total, units = pool_bytes // point.page_bytes, point.page_bytes // unit_bytes

    def side() -> Int32Array:
        if point.arrangement == "contiguous":
            pages = random.integers(total - point.pages + 1) + np.arange(point.pages)
        else:
            pages = random.permutation(total)[: point.pages]
        return (pages[:, None] * units + np.arange(units)).reshape(-1).astype(np.int32)

    return [(side(), side()) for _ in range(point.pushes_in_turn(pool_bytes))]


class Agent:
    """A pool and one end over it."""

    def __init__(self, plan: AgentPlan) -> None:
        self._plan = plan
        self._pool = make_pool(plan.device, plan.pool_bytes, plan.huge_pages)
        self.end = make_end(plan, self._pool, lambda: make_pool(plan.other_device, plan.pool_bytes, plan.huge_pages))

    def act(self, command: Command) -> Answer | None:
        """Returns the answer; None for Stop. Raises TransferError."""
        match command:
            case Connect():
                self._pool.fill()
                self.end.connect(command.address)
                return self.answer()
            case Push():
                return self._push(command)
            case Expect():
                self.end.expect(command.pushes)
                return self.answer()
            case Digest():
                return self.answer(digest=self._digest(command))
            case Stop():
                return None
            case _:
                assert_never(command)

    def answer(self, *, elapsed_s: float = 0.0, pushes: tuple[float, ...] = (), digest: int = 0) -> Answer:
        cpu_s = time.process_time()
        return Answer(cpu_s=cpu_s, address=self.end.address, elapsed_s=elapsed_s, pushes=pushes, digest=digest)

    def _push(self, command: Push) -> Answer:
        pages = pages_of(command.point, self._plan.unit_bytes, self._plan.pool_bytes, command.seed)
        pushes = [self.end.prepare(source, target) for source, target in pages]
        taken: list[float] = []
        began = before = time.perf_counter()
        while len(taken) < command.least_pushes or before - began < command.seconds:
            pushes[len(taken) % len(pushes)]()
            now = time.perf_counter()
            taken.append(now - before)
            before = now
        return self.answer(elapsed_s=before - began, pushes=tuple(taken))

    def _digest(self, command: Digest) -> int:
        """Of the last push of a turn: no later push of that turn has overwritten its pages."""
        source, target = pages_of(command.point, self._plan.unit_bytes, self._plan.pool_bytes, command.seed)[-1]
        pool, pages = (self.end.landing, target) if command.landed else (self._pool, source)
        return pool.checksum(pages, self._plan.unit_bytes)


def main(plan_text: str) -> None:
    parent: Parent[Command, Report] = Parent(msgspec.json.Decoder[Command](Command))
    try:
        agent = Agent(msgspec.json.decode(plan_text, type=AgentPlan))
        with contextlib.closing(agent.end):
            parent.report(agent.answer())
            parent.obey(agent.act, agent.end.turn)
    except TransferError as error:
        parent.report(Broken(reason=str(error)))


if __name__ == "__main__":
    main(sys.argv[1])
