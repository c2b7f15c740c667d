"""The ranks that compute one model together, and the two collectives that they need.

Owns how tensors pass between ranks: torch.distributed, Gloo on CPU and NCCL on CUDA; and for small sums on CUDA, where each rank
reaches the memory of all, one kernel that reads them there. Knows no layers, plans or messages. A collective computes and decides
nothing: which steps there are, and in which order, every rank is told by the leader. So all ranks call the same methods in the
same order.

The process group is an object of its own: there is no world, and two instances may live in one process. (Symmetric memory finds
its group by a name, which no other has.) Calls are synchronous to the stream: kernels go to the current stream, behind those that
made their input, and may be captured in a CUDA graph with them.
"""

import logging
import os
import socket
import threading
import time
import uuid
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from common.errors import ConfigError, MeetingFailed, first_line

_log = logging.getLogger(__name__)

ERRORS = (RuntimeError, ValueError, OSError)
"""What torch.distributed raises. Its own errors are RuntimeErrors."""
PATIENCE = timedelta(days=1)
"""A rank waits for the others for as long as it takes them to load. Silence is for the leader to notice."""
LEAVE_S = 2.0
"""How long leaving a group may take."""


class Group:
    """All ranks of an instance, seen from one of them. This one is alone: both collectives return what they are given."""

    rank, ranks = 0, 1
    sums = ""
    """What adds, for people; "": nothing."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks, bit by bit the same on each. It may be in place: x is not to be used any more. x: any
        shape, contiguous, the same on all ranks."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[rows, part] → [rows, ranks * part]: the parts side by side, in the order of the ranks. x: contiguous."""
        return x


ALONE = Group()


ONE_SHOT_BYTES = {2: 2**19, 4: 2**19, 8: 2**18}
"""The largest tensors that one kernel adds, by the most ranks. Each rank reads the whole of every other one's: NCCL, where each
passes on a part, is faster for large ones. As in vLLM (csrc/custom_all_reduce.cuh), where it was measured."""
ONE_SHOT_DTYPES = (torch.bfloat16, torch.float32)
MEET_S = timedelta(seconds=60)
"""How long ranks that are all there may take to see each other's memory."""
TRIAL_S = 10.0
"""How long one sum may take that is tried. It takes microseconds; the first one loads its kernel."""
POLL_S = 0.001
_VECTOR = 16
"""Bytes that a thread of the kernel reads at a time."""


class PeerMemory(Protocol):
    """What is used of torch's symmetric memory."""

    def reaches(self, device: torch.device, other: int) -> bool:
        """Whether kernels on the device read memory of the other one of this host."""

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """Makes the device the current one of this thread: `share` and `add` look at that, and at no tensor's."""

    def share(self, name: str, store: Store, rank: int, ranks: int, shared_bytes: int, device: torch.device) -> Tensor:
        """[shared_bytes] uint8 on the device, which all ranks see, and whose group has this name in this process. All call it at
        once. Raises one of ERRORS."""

    def add(self, shared: Tensor, x: Tensor, name: str) -> None:
        """x becomes the sum of what all ranks give, added in the order of the ranks. shared: a part of what is shared, with the
        shape and dtype of x. Goes to the current stream, and may be captured."""

    def ends_within(self, seconds: float) -> bool:
        """Whether all that was started on the current stream ends in this time. Waits for it."""

    def forget(self, name: str) -> None: ...


_c10d: Any = torch._C._distributed_c10d


class TorchPeerMemory:
    """Implements `PeerMemory`. Source: `one_shot_all_reduce_kernel` in torch/csrc/distributed/c10d/symm_mem.

    What the network adds itself (multimem_one_shot_all_reduce) is not taken: nobody says that it adds in the same order for each
    rank, and ranks whose numbers differ in a bit may sample other tokens.
    """

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}
        """By name: torch finds them while somebody else holds them."""

    def reaches(self, device: torch.device, other: int) -> bool:
        return other < torch.cuda.device_count() and torch.cuda.can_device_access_peer(device, other)

    def share(self, name: str, store: Store, rank: int, ranks: int, shared_bytes: int, device: torch.device) -> Tensor:
        # It asks the group for its ranks and its store alone. (With set_group_info instead, each sum would ask the store.)
        group = self._groups[name] = torch.distributed.ProcessGroup(store, rank, ranks)
        _c10d._register_process_group(name, group)
        shared: Tensor = _c10d._SymmetricMemory.empty_strided_p2p((shared_bytes,), (1,), torch.uint8, device)
        _c10d._SymmetricMemory.rendezvous(shared, name)
        return shared

    def add(self, shared: Tensor, x: Tensor, name: str) -> None:
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(shared, x, "sum", name, x)

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.cuda.device(device)

    def ends_within(self, seconds: float) -> bool:
        event, ends_s = torch.cuda.Event(), time.monotonic() + seconds  # type: ignore[no-untyped-call]
        event.record()
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > ends_s:
                return False
            time.sleep(POLL_S)
        return True

    def forget(self, name: str) -> None:
        _c10d._unregister_process_group(name)
        del self._groups[name]


class OneShot:
    """Adds small tensors by one kernel, which reads them from the memory of all ranks. Make it with `share_memory`."""

    def __init__(self, memory: PeerMemory, store: Store, rank: int, ranks: int, device: torch.device) -> None:
        self._memory, self._name = memory, f"tandem-{uuid.uuid4().hex}"
        self.most_bytes = next(most for most_ranks, most in ONE_SHOT_BYTES.items() if ranks <= most_ranks)
        self._shared = memory.share(self._name, store, rank, ranks, self.most_bytes, device)

    def takes(self, x: Tensor) -> bool:
        """The same on every rank, because it looks at shape and dtype alone."""
        return x.dtype in ONE_SHOT_DTYPES and 0 < x.nbytes <= self.most_bytes and x.nbytes % _VECTOR == 0

    def sum(self, x: Tensor) -> Tensor:
        """As `Group.sum`."""
        if x.storage_offset() * x.itemsize % _VECTOR:
            x = x.clone()
        self._memory.add(self._shared[: x.nbytes].view(x.dtype).view(x.shape), x, self._name)
        return x

    def leave(self) -> None:
        self._memory.forget(self._name)


def share_memory(memory: PeerMemory | None, store: Store, rank: int, ranks: int, device: torch.device) -> OneShot | str:
    """What adds small tensors, or why NCCL adds all: the same on every rank. Each says what it finds, and hears all. A sum is
    tried, because one that is wrong would show nowhere else. Raises one of ERRORS when a rank says nothing, and ConfigError when
    the trial does not end on a rank: its kernel keeps the device busy, so nothing else can be trusted to run there."""

    def heard(what: str, said: str) -> list[str]:
        store.set(f"{what} of {rank}", said)
        return [store.get(f"{what} of {each}").decode() for each in range(ranks)]

    places = [place.rpartition(" ") for place in heard("place", f"{socket.gethostname()}/{_boot()} {device.index}")]
    why = ""
    if memory is None:
        why = "--all-reduce says so"
    elif ranks > max(ONE_SHOT_BYTES):
        why = f"{ranks} ranks are too many"
    elif len({host for host, _, _ in places}) > 1:
        why = "the ranks are on several hosts"
    else:
        others = [int(index) for at, (_, _, index) in enumerate(places) if at != rank]
        why = next(
            (f"{device} does not reach the memory of GPU {each}" for each in others if not memory.reaches(device, each)), ""
        )
    found = next(filter(None, heard("reach", why)), "")
    if found:
        return found
    assert memory is not None
    made: OneShot | None = None
    hangs = ""
    try:
        with memory.on(device):
            made = OneShot(memory, store, rank, ranks, device)
            total = made.sum(torch.full((_VECTOR,), rank + 1.0, device=device))
            expected = ranks * (ranks + 1) / 2
            if not memory.ends_within(TRIAL_S):
                hangs = f"a sum over the memory of {ranks} GPUs has not ended on rank {rank} ({device}) within {TRIAL_S:g} s"
            elif not (total == expected).all():
                why = f"memory that ranks share adds wrongly: {total.tolist()}, and not {expected}"
    except ERRORS as error:
        why = f"they cannot share memory ({first_line(error)})"
    all_found, all_hang = heard("trial", why), heard("trial that hangs", hangs)
    if any(all_hang):
        found = "; ".join(filter(None, [*all_hang, *all_found]))
        fix = "give --all-reduce nccl on every rank, and set NCCL_P2P_DISABLE=1 if that hangs too"
        raise ConfigError(f"{found}. PCIe ACS or an IOMMU may keep GPUs from each other's memory: {fix}")
    found = next(filter(None, all_found), "")
    if made is not None and not found:
        return made
    if made is not None:
        made.leave()
    return found


def _boot() -> str:
    """What Linux calls itself from its start to its end: two hosts may have one name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else ""


class TorchGroup(Group):
    """Ranks of torch.distributed.

    A rank that ends breaks the calls of the others at once on CPU: they raise RuntimeError. On CUDA their kernels wait for ever,
    until `close` (those of NCCL) or the end of the process (all): the leader has to notice.
    """

    _one_shot: OneShot | None = None

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        device: torch.device,
        host: str,
        connect_s: float,
        memory: PeerMemory | None = None,
    ) -> None:
        """Meet the other ranks; blocks until all are here. store: see `open_store`. host: our own address, for Gloo; NCCL finds
        its interfaces itself (NCCL_SOCKET_IFNAME). connect_s: the longest wait for a rank that does not come; NCCL waits without
        limit for one that ends while they connect. memory: by which small sums on CUDA may go; None: NCCL adds all. Raises
        MeetingFailed."""
        self.rank, self.ranks = rank, ranks
        make = _nccl if device.type == "cuda" else _gloo
        try:
            self._group: Any = make(store, rank, ranks, device, host, timedelta(seconds=connect_s))
            if device.type == "cuda":
                self._meet_memory(PrefixStore("memory", store), device, memory)
        except ERRORS as error:
            rest = f"the other {ranks - 1} ranks ({first_line(error)})"
            raise MeetingFailed(f"rank {rank} could not connect to {rest}") from error
        self._sum_options, self._gather_options = AllreduceOptions(), AllgatherOptions()
        self._sum_options.asyncOp = self._gather_options.asyncOp = False

    def _meet_memory(self, store: Store, device: torch.device, memory: PeerMemory | None) -> None:
        store.set_timeout(MEET_S)
        made = share_memory(memory, store, self.rank, self.ranks, device)
        if isinstance(made, OneShot):
            self._one_shot, small = made, made.most_bytes // 1024
            self.sums = f"one kernel up to {small} KiB, NCCL above"
        else:
            self.sums = f"NCCL, because {made}"
        _log.info("ranks add by: %s", self.sums)

    def sum(self, x: Tensor) -> Tensor:
        if self._one_shot is not None and self._one_shot.takes(x):
            return self._one_shot.sum(x)
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
        if self._one_shot is not None:
            self._one_shot.leave()  # its memory stays: to give it back waits for kernels, which may wait for a rank that is gone
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # when this returns the group is gone: Gloo keeps its connections while it is held


def _finish(work: Any) -> None:
    """NCCL returns no work for a call that is synchronous to the stream."""
    if work is not None:
        work.wait()


def open_store(host: str) -> TCPStore:
    """Where the ranks of a group meet, on rank 0; its `port` is for the others. Raises ConfigError."""
    try:
        return listening_store(host)
    except ERRORS as error:
        raise ConfigError(f"the ranks cannot meet at {host}: {error}") from error


def listening_store(host: str) -> TCPStore:
    """It listens on this address alone, at a free `port`. Raises one of ERRORS."""
    family = socket.getaddrinfo(host, 0)[0][0]
    listener = socket.create_server((host, 0), family=family)  # by itself a store would listen on every address
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def joined_store(host: str, port: int, connect_s: float) -> TCPStore:
    """One that listens elsewhere. Raises one of ERRORS."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=connect_s), wait_for_workers=False)


def reach_store(host: str, port: int, connect_s: float) -> TCPStore:
    """The store of rank 0, on any other rank. Raises MeetingFailed."""
    try:
        return joined_store(host, port, connect_s)
    except ERRORS as error:
        raise MeetingFailed(f"rank 0 cannot be reached at {host}:{port}: {error}") from error


def _gloo(store: Store, rank: int, ranks: int, device: torch.device, host: str, connect: timedelta) -> Any:
    group = gloo_group(store, rank, ranks, host, connect)
    group._set_default_timeout(PATIENCE)
    return group


def gloo_group(store: Store, rank: int, ranks: int, host: str, connect: timedelta) -> Any:
    """It waits for its members, and for each message, for `connect`. Raises one of ERRORS."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = connect
    options._threads = 1
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, ranks, options)


def _nccl(store: Store, rank: int, ranks: int, device: torch.device, host: str, connect: timedelta) -> Any:
    """The communicator is made here, not by the first collective, which may be inside of a capture."""
    store.set_timeout(connect)
    group = nccl_group(store, rank, ranks)
    group.eager_connect_single_device(device)
    return group


def nccl_group(store: Store, rank: int, ranks: int) -> Any:
    """Its first message connects it, for as long as that takes. Raises one of ERRORS."""
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):  # else its watchdog aborts the process
        os.environ.setdefault(name, "0")
    nccl: Any = torch.distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = PATIENCE
    return nccl(store, rank, ranks, options)
