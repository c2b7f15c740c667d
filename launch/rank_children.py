"""The other ranks of an instance that one command starts: child processes of the first of them.

Owns the processes. What they say to each other is not known here. A rank that ends, however, is the end of the instance: `check`
raises then. None is left behind, be it stopped: the kernel kills a child with its parent (`common/processes/child.py`), and this
process kills those it has before it ends by its own timers.
"""

import queue
import time
from collections.abc import Callable, Mapping, Sequence

from common.errors import ConfigError
from common.instance.ranks.line import RankLost
from common.processes.child import KILL_S, Exited, Reported
from launch.child import ChildProcess
from launch.processes import Child, ChildEvent
from launch.reports import BAD_FLAG, News, Progress

RankCommands = Callable[[str], Mapping[int, Sequence[str]]]
"""The leader's address → the command of each other rank that this one starts."""


def no_ranks(leader: str) -> Mapping[int, Sequence[str]]:
    return {}


class RankChildren:
    """Made by the main thread. wake: called on any thread when `check` has news."""

    def __init__(self, process: ChildProcess, name: str, commands: Mapping[int, Sequence[str]], wake: Callable[[], None]) -> None:
        """Raises OSError."""
        self._process = process
        self._wake = wake
        self._ends: queue.SimpleQueue[Exited] = queue.SimpleQueue()
        self._ranks = {f"{name}.rank-{rank}": rank for rank in commands}
        self._children: list[Child] = []
        for child, rank in self._ranks.items():
            self._children.append(Child(child, commands[rank], self._heard, killed_with_us=True))
        process.on_sudden_end(self.kill)

    def check(self, *, may_leave: bool = False) -> None:
        """Raises RankLost when one has ended; ConfigError when it says that it can never run as it was started. may_leave: one
        that ends in order was told to by the leader, who tells us too."""
        while not self._ends.empty():
            ended = self._ends.get_nowait()
            if may_leave and ended.status == 0:
                continue
            reason = f"rank {self._ranks[ended.child]} ended: {ended.account}"
            raise ConfigError(reason) if ended.status == BAD_FLAG else RankLost(reason)

    def kill(self) -> None:
        """All of them, at once."""
        for child in self._children:
            child.kill()

    def close(self, timeout_s: float) -> None:
        """Wait until they have ended, and kill those that have not after `timeout_s`."""
        until = time.monotonic() + timeout_s
        late = [child for child in self._children if not child.wait(max(0.0, until - time.monotonic()))]
        for child in late:
            child.kill()
        for child in late:
            child.wait(KILL_S)

    def _heard(self, event: ChildEvent) -> None:
        """On a thread of the child."""
        if isinstance(event, Reported):
            if isinstance(event.report, Progress | News):
                self._process.progress(f"rank {self._ranks[event.child]}: {event.report.text}")
            return
        self._ends.put(event)
        self._wake()
