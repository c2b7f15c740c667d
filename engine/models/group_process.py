"""A rank in a trainer's group of Gloo, in a process of its own: Gloo ends the process to which more is sent than it has room for,
and waits for a member that is gone as long as it was told to. Here that ends this process and nothing else.

Owns the process, and memory that both halves have. Does not know what is received.

    instance ── where to meet, then the next weight ──► process ── group of torch.distributed
    instance ◄── "", or what went wrong ── process         the weight is in memory of both

The process ends when its parent does, or wants it to.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import BroadcastOptions

from common.messages.variants import AnnouncedWeight, JoinGroup
from common.processes.child import with_our_code
from engine.parallel import ERRORS

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MARK_BYTES = 8


def store_of(address: str, port: int, world_size: int, group: str, device: str, timeout_s: float) -> PrefixStore:
    """What torch's rendezvous and its `_new_process_group_helper` make of a TCP address and the name of a group. device: "cpu" or
    "cuda". Raises `ERRORS`."""
    store = TCPStore(address, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_s))
    return PrefixStore(f"{device}/", PrefixStore(f"{group}/", PrefixStore(group, store)))


def broadcast(group: Any, tensor: Tensor) -> None:
    """Receive what rank 0 sends. Raises `ERRORS`."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()


class TooFewBytes(Exception):
    """Less was sent than there is room for."""


@contextlib.contextmanager
def filled(memory: Tensor) -> Iterator[None]:
    """Something is received into a contiguous tensor meanwhile, to its end. Raises TooFewBytes when it did not come so far, which
    torch takes for enough: then the last bytes are the random ones that they were before."""
    end = memory.flatten().view(torch.uint8)[-_MARK_BYTES:] if memory.nbytes >= _MARK_BYTES else None
    mark = torch.frombuffer(bytearray(os.urandom(_MARK_BYTES)), dtype=torch.uint8)
    if end is not None:
        end.copy_(mark)
    yield
    if end is not None and torch.equal(end.cpu(), mark):
        raise TooFewBytes


class GlooProcess:
    """The parent's half. One thread uses it; `abort` may be called on any."""

    def __init__(self, task: JoinGroup, rank: int) -> None:
        """rank: in the group."""
        self._where = [task.address, task.port, task.world_size, task.group, "cpu", task.timeout_s]
        self._rank = rank
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_left = False

    def meet(self) -> None:
        """Start the process. Returns when all have met. Raises OSError."""
        with self._lock:
            if self._is_left:
                raise OSError("the group was left")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.models.group_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=with_our_code({**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}),
                start_new_session=True,
            )
        self._ask({"where": self._where, "rank": self._rank})

    def receive(self, weight: AnnouncedWeight) -> Tensor:
        """The next weight. Raises OSError, TooFewBytes."""
        dtype, count = DTYPES[weight.dtype], prod(weight.shape)
        if not count:
            return torch.empty(weight.shape, dtype=dtype)
        memory = os.memfd_create("weight")
        try:
            os.ftruncate(memory, count * dtype.itemsize)
            received = torch.from_file(f"/proc/self/fd/{memory}", shared=True, size=count, dtype=dtype).view(weight.shape)
            with filled(received):
                self._ask({"path": f"/proc/{os.getpid()}/fd/{memory}", "count": count, "dtype": weight.dtype})
        finally:
            os.close(memory)
        return received

    def abort(self) -> None:
        """End the process; whoever waits for it gets OSError. Idempotent."""
        with self._lock:
            self._is_left = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def end(self) -> None:
        """The same, from the thread that uses it: nobody does any more."""
        self.abort()
        for pipe in () if self._process is None else (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _ask(self, order: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            status = self._process.wait()
            raise OSError(f"what receives it has ended with {status}: more came than was announced, or the group was left")
        if failed := json.loads(answer):
            raise OSError(failed)


def _serve() -> None:
    orders = queue.SimpleQueue[dict[str, Any]]()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    first = orders.get()
    try:
        where = first["where"]
        timeout = timedelta(seconds=where[-1])
        group = ProcessGroupGloo(store_of(*where), first["rank"], where[2], timeout=timeout)
    except ERRORS as error:
        return _say(str(error))
    _say("")
    while True:
        order = orders.get()
        try:
            tensor = torch.from_file(order["path"], shared=True, size=order["count"], dtype=DTYPES[order["dtype"]])
            broadcast(group, tensor)
        except ERRORS as error:
            return _say(str(error))
        _say("")


def _listen(orders: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    os._exit(0)  # the parent is gone


def _say(failed: str) -> None:
    sys.stdout.write(json.dumps(next(iter(failed.strip().splitlines()), "")) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve()
