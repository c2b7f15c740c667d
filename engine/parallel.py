"""The ranks that compute one model together, and the two collectives that they need.

Owns how tensors pass between ranks: torch.distributed, Gloo on CPU and NCCL on CUDA. Knows no layers, plans or messages. A
collective computes and decides nothing: which steps there are, and in which order, every rank is told by the leader. So all ranks
call the same methods in the same order.

The process group is an object of its own: it is not registered with torch, so there is no world, and two instances may live in
one process. Calls are synchronous to the stream: NCCL's kernels go to the current stream, behind those that made their input, and
may be captured in a CUDA graph with them.
"""

import os
import socket
import threading
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from common.errors import ConfigError, MeetingFailed

ERRORS = (RuntimeError, ValueError, OSError)
"""What torch.distributed raises. Its own errors are RuntimeErrors."""
PATIENCE = timedelta(days=1)
"""A rank waits for the others for as long as it takes them to load. Silence is for the leader to notice."""
LEAVE_S = 2.0
"""How long leaving a group may take."""


class Group:
    """All ranks of an instance, seen from one of them. This one is alone: both collectives return what they are given."""

    rank, ranks = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks, bit by bit the same on each. It may be in place: x is not to be used any more. x: any
        shape, contiguous, the same on all ranks."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[rows, part] → [rows, ranks * part]: the parts side by side, in the order of the ranks. x: contiguous."""
        return x


ALONE = Group()


class TorchGroup(Group):
    """Ranks of torch.distributed.

    A rank that ends breaks the calls of the others at once on CPU: they raise RuntimeError. On CUDA their kernels wait for ever,
    until `close` or the end of the process: the leader has to notice.
    """

    def __init__(self, store: Store, rank: int, ranks: int, device: torch.device, host: str, connect_s: float) -> None:
        """Meet the other ranks; blocks until all are here. store: see `open_store`. host: our own address, for Gloo; NCCL finds
        its interfaces itself (NCCL_SOCKET_IFNAME). connect_s: the longest wait for a rank that does not come; NCCL waits without
        limit for one that ends while they connect. Raises MeetingFailed."""
        self.rank, self.ranks = rank, ranks
        make = _nccl if device.type == "cuda" else _gloo
        try:
            self._group: Any = make(store, rank, ranks, device, host, timedelta(seconds=connect_s))
        except ERRORS as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise MeetingFailed(f"rank {rank} could not connect to the other {ranks - 1} ranks ({reason})") from error
        self._sum_options, self._gather_options = AllreduceOptions(), AllgatherOptions()
        self._sum_options.asyncOp = self._gather_options.asyncOp = False

    def sum(self, x: Tensor) -> Tensor:
        _finish(self._group.allreduce([x], self._sum_options))
        return x

    def gather(self, x: Tensor) -> Tensor:
        rows, part = x.shape
        parts = x.new_empty((self.ranks * rows, part))
        _finish(self._group._allgather_base(parts, x, self._gather_options))
        return parts.view(self.ranks, rows, part).transpose(0, 1).reshape(rows, self.ranks * part)

    def close(self) -> None:
        """Leave: from any thread, for good. Kernels on CUDA that wait for other ranks end. Idempotent.

        Takes LEAVE_S at most. Gloo leaves only when the call that is under way has ended, which it never does while another rank
        is stopped. Such a call goes on until that rank leaves, or until this process ends.
        """
        leaving = threading.Thread(target=self._leave, name="leave group", daemon=True)
        leaving.start()
        leaving.join(LEAVE_S)

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # when this returns the group is gone: Gloo keeps its connections while it is held


def _finish(work: Any) -> None:
    """NCCL returns no work for a call that is synchronous to the stream."""
    if work is not None:
        work.wait()


def open_store(host: str) -> TCPStore:
    """Where the ranks of a group meet, on rank 0; its `port` is for the others. It listens on this address alone. Raises
    ConfigError."""
    try:
        family = socket.getaddrinfo(host, 0)[0][0]
        listener = socket.create_server((host, 0), family=family)  # by itself a store would listen on every address
        port = listener.getsockname()[1]
        return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    except ERRORS as error:
        raise ConfigError(f"the ranks cannot meet at {host}: {error}") from error


def reach_store(host: str, port: int, connect_s: float) -> TCPStore:
    """The store of rank 0, on any other rank. Raises MeetingFailed."""
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=connect_s), wait_for_workers=False)
    except ERRORS as error:
        raise MeetingFailed(f"rank 0 cannot be reached at {host}:{port}: {error}") from error


def _gloo(store: Store, rank: int, ranks: int, device: torch.device, host: str, connect: timedelta) -> Any:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = connect
    options._threads = 1
    options._devices = [gloo.create_device(hostname=host)]
    group = gloo(store, rank, ranks, options)
    group._set_default_timeout(PATIENCE)
    return group


def _nccl(store: Store, rank: int, ranks: int, device: torch.device, host: str, connect: timedelta) -> Any:
    """The communicator is made here, not by the first collective, which may be inside of a capture."""
    quiet_nccl()
    nccl: Any = torch.distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = PATIENCE
    store.set_timeout(connect)
    group = nccl(store, rank, ranks, options)
    group.eager_connect_single_device(device)
    return group


def quiet_nccl() -> None:
    """Before a group of NCCL is made: else torch's watchdog ends the process with an abort when something takes too long."""
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
        os.environ.setdefault(name, "0")
