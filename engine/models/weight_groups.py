"""The groups of `torch.distributed` in which trainers send weights: how this rank joins one, receives, and leaves.

Owns the threads that wait for a trainer, so that nobody else does, and the bound of each wait. Knows no models.

    join ─► a thread meets all members ─► receive: rank 0 broadcasts one weight after the other ─► … ─► leave
               └─ not all come in time          └─ the trainer dies, or is silent for too long: the group is left

Members meet as those of SGLang's `init_custom_process_group` do (python/sglang/srt/utils/common.py at
https://github.com/sgl-project/sglang), so a trainer's script needs no change: a store at tcp://address:port, with the prefixes
that torch gives to a group of this name. A group is an object of its own: it is not registered with torch.

A group is of no use any more when one member has missed a broadcast: what comes next would be taken for that. So whatever goes
wrong with weights of a group ends it, and the trainer makes another one.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import BroadcastOptions

from common.errors import BadRequest, TandemError, Unavailable
from common.messages.tasks import JoinGroup
from common.messages.weights import AnnouncedWeight, WeightsFromGroup
from engine.parallel import PATIENCE, quiet_nccl

_ERRORS = (RuntimeError, ValueError, OSError)
"""What torch.distributed raises. Its own errors are RuntimeErrors."""
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CONNECT_S = 1.0
"""So often a rank that cannot reach the trainer asks whether it still should."""
_MARK_BYTES = 8
_Arrivals = queue.SimpleQueue["Tensor | TandemError"]


class TrainerGroup:
    """One of them, from the side of one member. Implements `Work`: it is done when all have met. wake: called then."""

    def __init__(self, task: JoinGroup, rank: int, device: torch.device, wake: Callable[[], None]) -> None:
        """rank: this one of the instance's. Raises BadRequest."""
        self._task, self._rank = task, task.first_rank + rank
        self._make = _maker(task.backend, device)
        self._device = device if task.backend == "nccl" else torch.device("cpu")
        self._wake = wake
        self.ends_s: float | None = None
        self._is_wanted, self._has_met = True, False
        self._failure: TandemError | None = None
        self._group: Any = None
        self._buckets: queue.SimpleQueue[tuple[tuple[AnnouncedWeight, ...], _Arrivals] | None] = queue.SimpleQueue()
        self._arrivals: _Arrivals = queue.SimpleQueue()
        """Where the weights come that somebody waits for."""
        self._last_bucket = ""
        threading.Thread(target=self._run, name="trainer's group", daemon=True).start()

    def poll(self) -> str | None:
        if self._failure is not None:
            raise self._failure
        return "" if self._has_met else None

    def receive(self, source: WeightsFromGroup, progress: Callable[[str], None]) -> Iterator[tuple[str, Tensor]]:
        """What rank 0 broadcasts, as it comes: each weight with its name, whole and contiguous, on the group's device. progress:
        called before each wait; what it raises ends the work. Raises Unavailable when the trainer is gone or silent, or when
        `give_up` is called; BadRequest for what was received before."""
        if source.bucket == self._last_bucket:
            raise BadRequest(f"what the group {source.group} broadcast was received before, and is lost", field="group_name")
        if not self._has_met:
            raise Unavailable(f"the members of the group {source.group} have not met yet")
        self._last_bucket = source.bucket
        arrivals = self._arrivals = queue.SimpleQueue()
        for number, weight in enumerate(source.weights):
            progress("receiving weights")  # who gives up from now on reaches `arrivals`
            if not number:
                self._buckets.put((source.weights, arrivals))
            try:
                arrived = arrivals.get(timeout=self._task.timeout_s)
            except queue.Empty:
                arrived = Unavailable(f"nothing came for {self._task.timeout_s:g} s")
            if isinstance(arrived, BadRequest):
                raise arrived
            if isinstance(arrived, TandemError):
                count = f"weight {number + 1} of {len(source.weights)}"
                raise Unavailable(f"{weight.name} ({count}) did not come from the group {source.group}: {arrived}") from arrived
            yield weight.name, arrived

    def give_up(self) -> None:
        """Nobody waits any more for what is being received, if anything is."""
        self._arrivals.put(Unavailable("nobody wants it any more"))

    def close(self) -> None:
        """Leave; returns at once, and whoever waits for others here waits no more. A call of torch that waits ends when they
        leave too, or when its time is over."""
        self._is_wanted = False
        if not self._has_met and self._failure is None:
            self._failure = Unavailable(f"the group {self._task.group} was left before all had met")
            self._wake()
        self.give_up()
        self._buckets.put(None)
        threading.Thread(target=self._abort, name="leave a trainer's group", daemon=True).start()

    def _run(self) -> None:
        try:
            self._group = self._make(self._store(), self._rank, self._task.world_size, timedelta(seconds=self._task.timeout_s))
            self._has_met = self._is_wanted
        except _ERRORS as error:
            task = self._task
            where = f"rank {self._rank} of {task.world_size} at {task.address}:{task.port}"
            if self._failure is None:
                self._failure = Unavailable(f"the group {task.group} did not meet: {where}: {_first_line(error)}")
        self._wake()
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            while self._is_wanted and self._failure is None and (bucket := self._buckets.get()) is not None:
                self._receive(*bucket)
        self._abort()

    def _receive(self, weights: tuple[AnnouncedWeight, ...], arrivals: _Arrivals) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            for weight in weights:
                received = torch.empty(weight.shape, dtype=_DTYPES[weight.dtype], device=self._device)
                end = received.flatten().view(torch.uint8)[-_MARK_BYTES:]
                mark = torch.frombuffer(bytearray(os.urandom(len(end))), dtype=torch.uint8) if len(end) else torch.empty(0)
                end.copy_(mark)
                self._group.broadcast([received], options).wait()
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
                if len(end) == _MARK_BYTES and torch.equal(end.cpu(), mark):  # gloo takes less than it has room for
                    rule = f"it has fewer bytes than {weight.dtype} of shape {list(weight.shape)}, as was announced"
                    arrivals.put(BadRequest(f"names: {weight.name}: {rule}", field="names"))
                    return
                arrivals.put(received)
        except torch.OutOfMemoryError as error:  # a RuntimeError too
            arrivals.put(Unavailable(f"it does not fit in the memory of {self._device}: {_first_line(error)}"))
        except (AttributeError, *_ERRORS) as error:  # the former: it was left meanwhile
            arrivals.put(Unavailable(_first_line(error)))

    def _store(self) -> PrefixStore:
        """What torch's rendezvous and its `_new_process_group_helper` make of a TCP address and the name of a group."""
        task = self._task
        store, ends_s = None, time.monotonic() + task.timeout_s
        while store is None:
            patience = timedelta(seconds=min(CONNECT_S, max(0.1, ends_s - time.monotonic())))
            try:
                store = TCPStore(task.address, task.port, task.world_size, is_master=False, timeout=patience)
            except _ERRORS:
                if not self._is_wanted or time.monotonic() >= ends_s:
                    raise
        if not self._is_wanted:
            raise ValueError("it was left")
        store.set_timeout(timedelta(seconds=task.timeout_s))
        device = "cuda" if task.backend == "nccl" else "cpu"
        return PrefixStore(f"{device}/", PrefixStore(f"{task.group}/", PrefixStore(task.group, store)))

    def _abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class TrainerGroups:
    """All that this rank of an instance is in, by name."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._groups: dict[str, TrainerGroup] = {}

    def join(self, task: JoinGroup, wake: Callable[[], None]) -> TrainerGroup:
        """Begin to. wake: called when all have met. Raises BadRequest."""
        if task.group in self._groups:
            rule = "is there already: send POST /destroy_weights_update_group first, or give this one another name"
            raise BadRequest(f"the group {task.group} {rule}", field="group_name")
        self._groups[task.group] = TrainerGroup(task, self._rank, self._device, wake)
        return self._groups[task.group]

    def receive(self, source: WeightsFromGroup, progress: Callable[[str], None]) -> Iterator[tuple[str, Tensor]]:
        """As `TrainerGroup.receive`."""
        return self._found(source.group).receive(source, progress)

    def require(self, group: str) -> None:
        """Raises BadRequest when this rank is not in it."""
        self._found(group)

    def leave(self, group: str) -> None:
        """Idempotent."""
        left = self._groups.pop(group, None)
        if left is not None:
            left.close()

    def give_up(self) -> None:
        """Nobody waits any more for what is being received."""
        for group in list(self._groups.values()):
            group.give_up()

    def close(self) -> None:
        for name in list(self._groups):
            self.leave(name)

    def _found(self, group: str) -> TrainerGroup:
        found = self._groups.get(group)
        if found is None:
            raise BadRequest(f"no group {group} is here: send POST /init_weights_update_group first", field="group_name")
        return found


def _maker(backend: str, device: torch.device) -> Callable[..., Any]:
    if backend == "gloo":
        return _gloo
    if backend == "nccl" and device.type == "cuda":
        return _nccl
    fix = "use gloo" if backend == "nccl" else "use gloo or nccl"
    raise BadRequest(f"backend {backend!r} cannot send weights to {device}: {fix}", field="backend")


def _gloo(store: PrefixStore, rank: int, ranks: int, timeout: timedelta) -> Any:
    return ProcessGroupGloo(store, rank, ranks, timeout=timeout)


def _nccl(store: PrefixStore, rank: int, ranks: int, timeout: timedelta) -> Any:
    """Members connect with the first broadcast. How long that may take is for the one who waits for it."""
    quiet_nccl()
    nccl: Any = torch.distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = PATIENCE
    return nccl(store, rank, ranks, options)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
