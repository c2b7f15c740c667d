"""Faults: who is struck how and when, and that nobody is struck before the former victim of that role is whole again.

Owns the plan of a run, the rotation and its pace. Does not know requests.

    role 0   strike ─── down ─── back ─ whole ─ strike ───                  one instance of a role at a time,
    role 1          strike ─── down ─── back ─ whole ─ strike ───           the roles in turn

An instance of several ranks ends when any of them is killed, and also when one is stopped for longer than the others bear.
"""

import asyncio
import itertools
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from common.ids import Role
from tests.chaos.fleet import Fleet, Shape
from tests.rig.pages import FleetPages, NotInTime

Kind = Literal["kill", "stop", "term"]
SIGNALS: dict[Kind, signal.Signals] = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
KINDS = tuple(SIGNALS)
DELAY_S = 2.0
"""A strike comes up to so much later than it could, so that it hits the others' recoveries at any moment."""
PAUSE_S = (4.0, 8.0)
"""How long a stopped instance is left stopped."""
END_S = 60.0
"""A struck process has ended within this."""
SETTLE_S = 10.0
"""When a rank that was stopped goes on, its instance has ended within this, or does not end."""
WAIT_S = 0.1
"""The pause between two looks at a page."""
WHOLE_S = 90.0
"""An instance that runs again is live and linked within this; the machine may be busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """requests: different ones; they are sent again and again until the faults are through. at_once: open at the same time.
    away_s: how long an instance that has ended stays away. is_compared: whether a run without faults goes first, and answers are
    held against it."""

    shape: Shape = field(default_factory=Shape)
    requests: int = 500
    faults: int = 50
    roles: tuple[Role, ...] = ("prefill", "decode")
    kinds: tuple[Kind, ...] = KINDS
    seed: int = 1
    at_once: int = 12
    away_s: float = 0.0
    is_compared: bool = True


@dataclass(slots=True)
class Fault:
    """at_s: when the signal was sent. over_s: when the process had ended, or could go on. back_s: when it ran again. whole_s:
    when it was live and linked again. In seconds of the loop's clock. rank: which process of the victim was struck."""

    number: int
    kind: Kind
    role: Role
    victim: str
    at_s: float
    over_s: float = 0.0
    back_s: float = 0.0
    whole_s: float = 0.0
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.victim}" + (f" rank {self.rank}" if self.rank else "")


@dataclass(slots=True)
class _Role:
    """A role's instances in the order in which they are struck, and who is down now."""

    name: Role
    turns: Iterator[tuple[str, Kind]]
    down: Fault | None = None
    recovery: asyncio.Task[None] | None = None
    former: dict[str, str] = field(default_factory=dict)
    """Incarnations that were ended."""


class Faults:
    """Strikes the instances of the plan's roles by rotation. on_whole: called with each fault when its victim is whole again."""

    def __init__(self, fleet: Fleet, pages: FleetPages, plan: Plan, on_whole: Callable[[Fault], object]) -> None:
        self._fleet, self._pages, self._plan = fleet, pages, plan
        self._random = Random(f"faults {plan.seed}")
        self._on_whole = on_whole
        self._roles = [_Role(role, itertools.cycle(itertools.product(plan.shape.names(role), plan.kinds))) for role in plan.roles]
        self.past: list[Fault] = []

    async def run(self, count: int) -> None:
        """Strike so often; returns when the last victim is whole again. Raises NotInTime, TimeoutError."""
        try:
            for number, role in zip(range(count), itertools.cycle(self._roles), strict=False):
                await self._until_whole(role)
                await asyncio.sleep(self._random.uniform(0, DELAY_S))
                await self._strike(number, role)
            for role in self._roles:
                await self._until_whole(role)
        finally:
            for role in self._roles:
                if role.recovery is not None:
                    role.recovery.cancel()

    async def _until_whole(self, role: _Role) -> None:
        """Every instance of the role is whole, as far as the other role's instances are there."""
        if role.recovery is not None:
            await role.recovery
        away = {other.down.victim for other in self._roles if other is not role and other.down is not None}
        names = self._fleet.shape.names
        peers = [name for name in names("decode" if role.name == "prefill" else "prefill") if name not in away]
        await _until_nothing_lacks(lambda: self._pages.not_whole([*names(role.name), *peers], role.former))
        if role.down is not None:
            role.down.whole_s = asyncio.get_running_loop().time()
            self._on_whole(role.down)
        role.down = role.recovery = None

    async def _strike(self, number: int, role: _Role) -> None:
        victim, kind = next(role.turns)
        await _until_nothing_lacks(lambda: self._not_busy(victim))
        ranks = self._plan.shape.tp
        if kind != "stop" or ranks > 1:
            role.former[victim] = (await asyncio.to_thread(self._pages.members))[victim]["incarnation"]
        loop = asyncio.get_running_loop()
        fault = Fault(number, kind, role.name, victim, loop.time())
        self.past.append(fault)
        if ranks > 1:
            fault.rank = self._random.randrange(ranks)
            pid = (await asyncio.to_thread(self._pages.members))[victim]["ranks"][fault.rank]["pid"]
            fault.at_s = loop.time()
            self._fleet.process(victim).strike_rank(pid, SIGNALS[kind])
            recovery = self._recover_stopped_rank(fault, pid, role) if kind == "stop" else self._recover(fault)
        else:
            self._fleet.process(victim).strike(SIGNALS[kind])
            recovery = self._recover_stopped(fault) if kind == "stop" else self._recover(fault)
        role.down = fault
        role.recovery = loop.create_task(recovery)

    def _not_busy(self, name: str) -> list[str]:
        """A strike at an idle instance proves nothing."""
        member = self._pages.members().get(name)
        return [] if member is not None and member["assigned_tokens"] else [f"{name} has nothing to do"]

    async def _recover_stopped(self, fault: Fault) -> None:
        await asyncio.sleep(self._random.uniform(*PAUSE_S))
        self._fleet.process(fault.victim).strike(signal.SIGCONT)
        fault.over_s = fault.back_s = asyncio.get_running_loop().time()

    async def _recover_stopped_rank(self, fault: Fault, pid: int, role: _Role) -> None:
        """The other ranks end when they have heard nothing for long enough, and it ends when it goes on."""
        process = self._fleet.process(fault.victim)
        await asyncio.sleep(self._random.uniform(*PAUSE_S))
        process.strike_rank(pid, signal.SIGCONT)
        if await process.end(SETTLE_S) is not None:
            await self._recover(fault)
            return
        process.is_struck = False  # the others were too busy to miss it
        del role.former[fault.victim]
        fault.over_s = fault.back_s = asyncio.get_running_loop().time()

    async def _recover(self, fault: Fault) -> None:
        """Once it has ended, start it again."""
        process = self._fleet.process(fault.victim)
        clock = asyncio.get_running_loop().time
        status = await process.end(END_S)
        if status != _status_after(fault):
            self._fleet.problems.append(f"{fault.victim}, struck by {fault.kind}, ended with status {status}")
            process.kill()
        fault.over_s = clock()
        await asyncio.sleep(self._plan.away_s)
        await self._fleet.start_instance(fault.victim)
        fault.back_s = clock()


async def _until_nothing_lacks(lacking: Callable[[], list[str]]) -> None:
    """Look at the router's pages until nothing is lacking. Raises NotInTime."""
    clock = asyncio.get_running_loop().time
    until_s = clock() + WHOLE_S
    while what := await asyncio.to_thread(lacking):
        if clock() > until_s:
            raise NotInTime(f"not within {WHOLE_S:g} s: {'; '.join(what)}")
        await asyncio.sleep(WAIT_S)


def _status_after(fault: Fault) -> int:
    """With which the instance ends. Rank 0 ends with 1 when it has lost a rank, and when it went on and all others had ended."""
    if fault.kind == "term":
        return 0
    return -signal.SIGKILL if fault.kind == "kill" and fault.rank == 0 else 1
