"""`launch bench ranks`: decode steps over ranks that compute nothing, so that what is left is the cost of having ranks.

Owns the processes and what is measured. The executor over all ranks, the messages and the loops of followers are the product's.
"""

import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import msgspec
import numpy as np

from bench.figures import Outcome
from bench.hardware import this_hardware
from bench.processes import cpu_s
from bench.ranks.parts import MODEL, POOL, executor
from bench.ranks.plan import RanksBench
from bench.tables import markdown_report, markdown_table, publish, say, text_report, text_table, write_figures
from common.engine.executor import Executor, StepHandle
from common.engine.plan import Plan
from common.ids import Incarnation
from common.instance.ranks.executor import RankedExecutor
from common.instance.ranks.gathering import Gathering
from common.instance.ranks.leader import Followers
from common.instance.worker import STEPS_IN_FLIGHT
from common.messages.ranks import ToLeader, rank_name
from common.wire import Mailbox

END_S = 10.0
COLUMNS = ("ranks", "rows", "us of a step", "CPU us: leader", "CPU us: each follower")
STEADY = "CPU times are affected least."
STEP_US = 1e6


class RanksFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one step, on average."""

    ranks: int
    rows: int
    step_us: float
    """From one end to the next, with two steps in flight."""
    leader_cpu_us: float
    """All threads of the leader's process, those of ZeroMQ too."""
    follower_cpu_us: float
    """The same of a follower; 0 where there is none."""


def run(bench: RanksBench, command: str, markdown: bool) -> int:
    """Measure, print the report and write the file. Returns the exit status."""
    hardware = this_hardware()
    figures: list[RanksFigures] = []
    for ranks in bench.counts:
        say(f"{ranks} ranks")
        with _ranks(ranks) as leader:
            figures += [_measure(leader, rows, bench.steps) for rows in bench.batches]
    outcome = Outcome(command=command, hardware=hardware, goals=[])
    lines = [
        (str(each.ranks), str(each.rows), *(f"{value:.0f}" for value in (each.step_us, each.leader_cpu_us, each.follower_cpu_us)))
        for each in figures
    ]
    body = [(markdown_table if markdown else text_table)([COLUMNS, *lines])]
    settings = f"{bench.steps} steps each; the timed executor, whose steps take no time"
    publish(outcome, (markdown_report if markdown else text_report)(outcome, settings, STEADY, body), "")
    write_figures(figures, bench.json)
    return 0


class _Leader:
    """Rank 0, in this process. followers: None where it is alone, and then the executor is the plain one."""

    def __init__(self, mailbox: Mailbox[ToLeader], followers: Followers | None, pids: list[int]) -> None:
        self.pids = pids
        self._mailbox = mailbox
        self._followers = followers
        own = executor()
        self._executor: Executor = own if followers is None else RankedExecutor(own, followers)

    def steps(self, count: int, rows: int) -> None:
        """Run so many decode steps."""
        batch = np.arange(rows, dtype=np.int32)
        flying: deque[StepHandle] = deque()
        launched = 0
        while launched < count or flying:
            while launched < count and len(flying) < STEPS_IN_FLIGHT:
                flying.append(self._executor.launch(Plan(launched, decode_rows=batch)))
                launched += 1
            if flying[0].poll() is not None:
                flying.popleft()
            elif self._followers is not None:
                self._mailbox.wait(self._followers.next_deadline() - time.monotonic())
                self._followers.turn(time.monotonic)


def _measure(leader: _Leader, rows: int, steps: int) -> RanksFigures:
    leader.steps(steps // 10 + 1, rows)
    cpu, cpus = time.process_time(), [cpu_s(pid) for pid in leader.pids]
    began = time.monotonic()
    leader.steps(steps, rows)
    took = time.monotonic() - began
    spent = [cpu_s(pid) - before for pid, before in zip(leader.pids, cpus, strict=True)]
    return RanksFigures(
        ranks=1 + len(leader.pids),
        rows=rows,
        step_us=took / steps * STEP_US,
        leader_cpu_us=(time.process_time() - cpu) / steps * STEP_US,
        follower_cpu_us=sum(spent) / max(1, len(spent)) / steps * STEP_US,
    )


@contextmanager
def _ranks(ranks: int) -> Iterator[_Leader]:
    """Ranks that are ready; ended afterwards."""
    with ExitStack() as stack:
        name = rank_name("bench", 0, Incarnation("bench"))
        mailbox = stack.enter_context(closing(Mailbox[ToLeader](name, ToLeader, "tcp://127.0.0.1:0")))
        if ranks == 1:
            yield _Leader(mailbox, None, [])
            return
        processes = []
        for rank in range(1, ranks):
            command = [sys.executable, "-P", "-m", "bench.ranks.follower", mailbox.address, str(rank), str(ranks)]
            processes.append(subprocess.Popen(command))
            stack.callback(_stop, processes[-1])
        gathering = Gathering(mailbox, ranks, {})
        gathering.open("")
        gathering.ready(MODEL, POOL)
        while not gathering.complete:
            gathering.turn(time.monotonic)
            if not gathering.complete:
                mailbox.wait(gathering.next_deadline(time.monotonic()) - time.monotonic())
        followers = gathering.followers(time.monotonic())
        stack.callback(followers.end, "measured", orderly=True)
        yield _Leader(mailbox, followers, [process.pid for process in processes])


def _stop(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
