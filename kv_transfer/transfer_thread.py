"""The transfer thread: one thread per process makes every call to the transport.

Owns the thread and how often it polls. The loop itself is `kv_transfer/transfer_loop.py`.
"""

import threading
import time
from collections.abc import Callable

from common.errors import TransferError
from common.instance.ports import TransferCommand, TransferEvent
from common.messages import PoolDescriptor
from kv_transfer.transfer_loop import TransferLoop

BUSY_S = 100e-6
EXPECT_S = 1e-3
IDLE_S = 0.2
"""How often the transport is polled. BUSY_S: while we push, or while other hosts push to us (over TCP, our polls set their pace).
EXPECT_S: while peers on this host write to us, which hardly needs our help. IDLE_S: otherwise, to let peers connect. NIXL offers
nothing to wait on, and each poll takes processor time from computing."""
DRAIN_S = 5.0


class TransferThread:
    """Implements `common.instance.ports.Transfers`. make_loop runs on the thread, and wake is called there when there is
    news."""

    def __init__(self, make_loop: Callable[[], TransferLoop], wake: Callable[[], None]) -> None:
        self._make_loop = make_loop
        self._wake = wake
        self._loop: TransferLoop | None = None
        self._failure: Exception | None = None
        self._started = threading.Event()
        self._kick = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    def start(self, timeout_s: float) -> PoolDescriptor:
        """Start the thread and the transport on it. Raises TransferError with the reason."""
        self._thread.start()
        if not self._started.wait(timeout_s):
            raise TransferError(f"the transport did not start within {timeout_s:g} s")
        return self._running().descriptor

    def submit(self, command: TransferCommand) -> None:
        self._running().submit(command)
        self._kick.set()

    @property
    def progress_s(self) -> float:
        return self._running().progress_s

    def poll(self) -> list[TransferEvent]:
        return self._running().poll()

    def close(self) -> None:
        self._stopping = True
        self._kick.set()
        if self._thread.is_alive():
            self._thread.join(DRAIN_S + 2.0)

    def _running(self) -> TransferLoop:
        """The loop. Raises TransferError when the thread has failed or not started."""
        if self._failure is not None:
            raise TransferError(f"the transfer thread failed: {self._failure}") from self._failure
        if self._loop is None:
            raise TransferError("the transfer thread is not running")
        return self._loop

    def _run(self) -> None:
        try:
            self._loop = self._make_loop()
            self._started.set()
            self._turn(self._loop)
        except Exception as error:  # noqa: BLE001 - the thread's outermost door; the next call of the port raises it
            self._failure = error
        finally:
            self._started.set()
            self._wake()

    def _turn(self, loop: TransferLoop) -> None:
        drain_until: float | None = None
        while True:
            if loop.step():
                self._wake()
            now = time.monotonic()
            if self._stopping:
                drain_until = drain_until or now + DRAIN_S
                if loop.idle or now >= drain_until:
                    break
            self._kick.wait(_pace(loop))
            self._kick.clear()
        loop.close()


def _pace(loop: TransferLoop) -> float:
    """Seconds until progress is driven again."""
    if loop.active:
        return BUSY_S
    return EXPECT_S if loop.expecting else IDLE_S
