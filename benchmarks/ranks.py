"""What a step costs the processors of its ranks beside the computing: decode steps over ranks that compute nothing.

Owns the ranks' processes and what is measured. The executor over all ranks, their messages and the loops of followers are the
product's. Run it as `python -m benchmarks.ranks`.
"""

import contextlib
import multiprocessing
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from bench.report import say
from benchmarks.command import Column, Invocation, cpu_s, start, table_of
from common.config import MOST_RANKS
from common.executor import EngineDescription, Executor, StepHandle, StepPlan
from common.ids import Incarnation
from common.instance.ranks.executor import RankedExecutor
from common.instance.ranks.follower import FollowerLoop
from common.instance.ranks.leader import Followers
from common.instance.ranks.line import RankLost
from common.instance.worker import STEPS_IN_FLIGHT
from common.mail import Mailbox
from common.messages import ModelIdentity, PoolDescriptor, RankInfo
from common.messages.ranks import RankHello, ToFollower, ToLeader, rank_name
from common.messages.transfers import TransferCommand, TransferEvent
from common.options import option, parse_numbers, require, require_at_least
from common.pages.layout import KVLayout, MemoryRegion
from common.step_cost import StepCost
from engine.timed import Pace, TimedExecutor

ADDRESS = "tcp://127.0.0.1:0"
END_S = 10.0
MOST_ROWS = 4096
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, page_size=16, dtype="float32")
MODEL = ModelIdentity(
    name="none", fingerprint="", architecture="none", dtype="float32", vocab_size=1000, context_tokens=4096, kv_heads=1
)
POOL = PoolDescriptor(backend="none", agent="none", address=0, total_pages=1, device="cpu", layout=LAYOUT, wire=b"")
SPAWN = multiprocessing.get_context("spawn")
STEADY = "CPU times are affected least."
QUICK: dict[str, Any] = {"ranks": "1,2", "rows": "64", "steps": 200}


@dataclass(frozen=True, kw_only=True)
class RanksBench:
    """What is measured, and for how long."""

    ranks: str = option("1,2,4,8", "numbers of ranks, one after the other; each rank is a process")
    rows: str = option("1,64,256", "requests in the batch of the decode steps")
    steps: int = option(2000, "steps of each measurement")

    def __post_init__(self) -> None:
        require(
            all(1 <= count <= MOST_RANKS for count in self.counts), "ranks", f"numbers between 1 and {MOST_RANKS}", self.ranks
        )
        require(all(1 <= rows <= MOST_ROWS for rows in self.batches), "rows", f"numbers between 1 and {MOST_ROWS}", self.rows)
        require_at_least(self, steps=1)

    @property
    def counts(self) -> tuple[int, ...]:
        return parse_numbers(self.ranks, "ranks", int)

    @property
    def batches(self) -> tuple[int, ...]:
        return parse_numbers(self.rows, "rows", int)


class RanksFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The average of one step."""

    ranks: Annotated[int, Column("ranks")]
    rows: Annotated[int, Column("rows")]
    step_us: Annotated[float, Column("us of a step", ".0f")]
    """From one end to the next, with two steps in flight."""
    leader_cpu_us: Annotated[float, Column("CPU us: leader", ".0f")]
    """All threads of the leader's process, those of ZeroMQ too."""
    follower_cpu_us: Annotated[float, Column("CPU us: each follower", ".0f")]
    """The same of a follower; 0 where there is none."""


def run(invocation: Invocation) -> int:
    bench = invocation.config(RanksBench, QUICK)
    figures: list[RanksFigures] = []
    for ranks in bench.counts:
        say(f"{ranks} ranks")
        with gathered_ranks(ranks) as leader:
            figures += [measure(leader, rows, bench.steps) for rows in bench.batches]
    settings = f"{bench.steps} steps each; the timed executor, whose steps take no time"
    invocation.publish(settings, STEADY, [invocation.style.table(table_of(RanksFigures, figures))], ranks=figures)
    return 0


class RankLeader:
    """Rank 0, in this process. Where it is alone, its executor is the plain one."""

    def __init__(self, mailbox: Mailbox[ToLeader], followers: Followers | None, pids: list[int]) -> None:
        self.pids = pids
        self._mailbox, self._followers = mailbox, followers
        self._executor: Executor = idle_executor() if followers is None else RankedExecutor(idle_executor(), followers)

    def run_steps(self, count: int, rows: int) -> None:
        """Run so many decode steps."""
        batch = np.arange(rows, dtype=np.int32)
        in_flight: deque[StepHandle] = deque()
        launched = 0
        while launched < count or in_flight:
            while launched < count and len(in_flight) < STEPS_IN_FLIGHT:
                in_flight.append(self._executor.launch(StepPlan(launched, decode_rows=batch)))
                launched += 1
            if in_flight[0].poll() is not None:
                in_flight.popleft()
            elif self._followers is not None:
                self._mailbox.wait(self._followers.next_deadline() - time.monotonic())
                self._followers.turn(time.monotonic)


def measure(leader: RankLeader, rows: int, steps: int) -> RanksFigures:
    leader.run_steps(steps // 10 + 1, rows)
    began, cpu, cpus = time.monotonic(), time.process_time(), [cpu_s(pid) for pid in leader.pids]
    leader.run_steps(steps, rows)
    took = time.monotonic() - began
    spent = [cpu_s(pid) - before for pid, before in zip(leader.pids, cpus, strict=True)]
    return RanksFigures(
        ranks=1 + len(leader.pids),
        rows=rows,
        step_us=1e6 * took / steps,
        leader_cpu_us=1e6 * (time.process_time() - cpu) / steps,
        follower_cpu_us=1e6 * sum(spent) / max(1, len(spent)) / steps,
    )


@contextlib.contextmanager
def gathered_ranks(ranks: int) -> Iterator[RankLeader]:
    """Ranks that are ready; ended afterwards."""
    with contextlib.ExitStack() as stack:
        name = rank_name("bench", 0, Incarnation("bench"))
        mailbox = stack.enter_context(contextlib.closing(Mailbox[ToLeader](name, ToLeader, ADDRESS)))
        if ranks == 1:
            yield RankLeader(mailbox, None, [])
            return
        pids = []
        for rank in range(1, ranks):
            process = SPAWN.Process(target=follow, args=(mailbox.address, rank, ranks), daemon=True)
            process.start()
            pids.append(process.pid or 0)
            stack.callback(process.kill)
            stack.callback(process.join, END_S)
        followers = Followers(mailbox, ranks, {})
        followers.open("")
        followers.ready(MODEL, POOL)
        while not followers.complete:
            followers.turn(time.monotonic)
            if not followers.complete:
                mailbox.wait(followers.next_deadline() - time.monotonic())
        followers.serve(time.monotonic())
        stack.callback(followers.end, "measured", orderly=True)
        yield RankLeader(mailbox, followers, pids)


def follow(leader: str, rank: int, ranks: int) -> None:
    """A follower's process: it ends when the leader says so, or is gone."""
    name = rank_name("bench", rank, Incarnation(str(rank)))
    with contextlib.suppress(RankLost), contextlib.closing(Mailbox[ToFollower](name, ToFollower, ADDRESS)) as mailbox:
        info = RankInfo(rank=rank, pid=0, host="here", device="cpu")
        loop = FollowerLoop(mailbox, leader, RankHello(rank=rank, ranks=ranks, address=mailbox.address, info=info, setup={}))
        loop.ready(MODEL, POOL)
        while not loop.complete:
            loop.turn(time.monotonic)
            if loop.welcome is None:
                mailbox.wait(loop.next_deadline() - time.monotonic())
        loop.serve(idle_executor(), NoTransfers())
        while loop.ending is None:
            loop.turn(time.monotonic)
            mailbox.wait(max(0.0, loop.next_deadline() - time.monotonic()))


def idle_executor() -> TimedExecutor:
    """Its steps take no time."""
    region = MemoryRegion(address=0, region_bytes=LAYOUT.page_bytes, device="cpu")
    description = EngineDescription(
        model=MODEL, layout=LAYOUT, total_pages=1, max_rows=MOST_ROWS, memory=region, eos_token_ids=(), device="cpu"
    )
    return TimedExecutor(description, Pace(StepCost(0.0, 0.0, 0.0), lambda: 0.0))


class NoTransfers:
    """Implements `common.instance.ports.Transfers`: nothing is moved."""

    progress_s = 0.0

    def submit(self, command: TransferCommand) -> None:
        """Nothing to move."""

    def poll(self) -> list[TransferEvent]:
        return []

    def close(self) -> None:
        """Nothing to close."""


EXPLANATION = "Measure what a step costs the processors beside the computing, for several ranks."

if __name__ == "__main__":
    sys.exit(start("ranks", EXPLANATION, run, RanksBench))
