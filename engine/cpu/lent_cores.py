"""Cores that the instances of a host lend to each other while they have nothing to compute.

Owns the file in which they tell each other whether they compute. Sets no threads and knows no steps: the executor asks how many
threads it may use now, before a step and between layers. So the cores go where the work is, whatever the mix of prompts and
answers, and hardly ever is one used twice: when a lender begins to compute, borrowers notice at their next layer.

    the file     one slot for each instance: [its threads, its state], two int64
    its state    0: has not computed yet; COMPUTING; else the time, in ns of the host's monotonic clock, when it last stopped

A slot belongs to the process that has a lock on it, so one that dies gives it back. If it died while it computed, the next who
finds its lock free says that it computes no more. Reads and writes of 8 aligned bytes are whole.
"""

import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Callable

from common.errors import ConfigError

COMPUTING = -1
SLOT_BYTES = 16
GRACE_NS = 20_000_000
"""An instance lends its cores so long after a step, because the next step mostly follows at once."""

TAKE_AGAIN_NS = 1_000_000
"""How long a step goes on with the threads it has before it takes more: to change their number costs as much as a small layer."""
LOOK_AGAIN_NS = 1_000_000_000
"""How often the locks of those who compute are looked at."""
_CLAIMS, _CLAIM_AGAIN_S = 5, 0.01
"""A slot that looks taken may be one whose lock somebody else looks at."""


def make_file(instances: int) -> int:
    """A file with a slot for each, open: it has no name, so nothing of it is left when the last process that has it is gone.
    Processes that inherit it open it as /dev/fd/<number>."""
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(bytes(instances * SLOT_BYTES))
        return os.dup(file.fileno())


class LentCores:
    """The slot of this process. own_threads: what it lends, and always has. Raises ConfigError."""

    def __init__(self, path: str, own_threads: int, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._own, self._now_ns = own_threads, now_ns
        try:
            self._file = os.open(path, os.O_RDWR)
            self._cells = memoryview(mmap.mmap(self._file, 0)).cast("q")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--lent-cores {path} cannot be used: {error}: leave it to launch local") from error
        self._told, self._take_at_ns, self._look_at_ns = own_threads, 0, 0
        threads_at = 2 * self._claim(path)
        self._state_at = threads_at + 1
        self._cells[self._state_at] = 0
        self._cells[threads_at] = own_threads

    def begin(self) -> None:
        """A step begins."""
        self._cells[self._state_at] = COMPUTING
        now_ns = self._now_ns()
        self._take_at_ns = now_ns
        if now_ns >= self._look_at_ns:
            self._look_at_ns = now_ns + LOOK_AGAIN_NS
            self._clear_dead()

    def end(self) -> None:
        """The step has ended."""
        self._cells[self._state_at] = self._now_ns()

    def threads(self) -> int:
        """How many a step may use now: its own, and an equal part of what others lend. What they take back is gone at once; more
        than before is told at the begin of a step, and then when TAKE_AGAIN_NS have passed."""
        now_ns, lent, borrowers = self._now_ns(), 0, 0
        lends_since = now_ns - GRACE_NS
        for at in range(0, len(self._cells), 2):
            threads, state = self._cells[at], self._cells[at + 1]
            if state == COMPUTING or state > lends_since:
                borrowers += 1
            else:
                lent += threads
        threads = self._own + lent // max(1, borrowers)
        if threads > self._told and now_ns < self._take_at_ns:
            return self._told
        if threads != self._told:
            self._told, self._take_at_ns = threads, now_ns + TAKE_AGAIN_NS
        return threads

    def close(self) -> None:
        """It computes no more, so others have its cores until a successor takes the slot. Idempotent."""
        if self._file >= 0:
            self._cells[self._state_at] = 0
            os.close(self._file)
            self._file = -1

    def _claim(self, path: str) -> int:
        for attempt in range(_CLAIMS):
            for slot in range(len(self._cells) // 2):
                if self._locked(slot):
                    return slot
            time.sleep(_CLAIM_AGAIN_S * (attempt + 1 < _CLAIMS))
        raise ConfigError(f"--lent-cores {path} has no slot left: leave it to launch local")

    def _locked(self, slot: int) -> bool:
        """Lock it. False: another process has it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, SLOT_BYTES, slot * SLOT_BYTES)
        except OSError:
            return False
        return True

    def _clear_dead(self) -> None:
        """Those who died while they computed compute no more."""
        for state_at in range(1, len(self._cells), 2):
            slot = state_at // 2
            if state_at != self._state_at and self._cells[state_at] == COMPUTING and self._locked(slot):
                self._cells[state_at] = 0
                fcntl.lockf(self._file, fcntl.LOCK_UN, SLOT_BYTES, slot * SLOT_BYTES)
