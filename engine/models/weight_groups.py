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

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from common.errors import BadRequest, TandemError, Unavailable, first_line
from common.messages.variants import AnnouncedWeight, JoinGroup, WeightsFromGroup
from engine.models.group_process import DTYPES, GlooProcess, TooFewBytes, broadcast, filled, store_of
from engine.parallel import ERRORS, nccl_group

_Arrivals = queue.SimpleQueue["Tensor | TandemError"]


class _Joined(Protocol):
    """One rank in a group. Raises `ERRORS`, TooFewBytes."""

    def meet(self) -> None:
        """Returns when all have met."""

    def receive(self, weight: AnnouncedWeight) -> Tensor:
        """The next weight."""

    def abort(self) -> None:
        """Leave. Whoever waits waits no more, as far as that can be. From any thread."""

    def end(self) -> None:
        """The same, from the thread that has used it."""


class TrainerGroup:
    """One of them, from the side of one member. Implements `Work`: it is done when all have met. wake: called then."""

    def __init__(self, task: JoinGroup, rank: int, device: torch.device, wake: Callable[[], None]) -> None:
        """rank: this one of the instance's. Raises BadRequest."""
        self._task, self._rank = task, task.first_rank + rank
        self._joined = _joined(task, self._rank, device)
        self._device = device if task.backend == "nccl" else torch.device("cpu")
        self._wake = wake
        self.ends_s: float | None = None
        self._is_wanted, self._has_met = True, False
        self._failure: TandemError | None = None
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
        """Leave; returns at once, and whoever waits for others here waits no more."""
        self._is_wanted = False
        if not self._has_met and self._failure is None:
            self._failure = Unavailable(f"the group {self._task.group} was left before all had met")
            self._wake()
        self.give_up()
        self._buckets.put(None)
        threading.Thread(target=self._joined.abort, name="leave a trainer's group", daemon=True).start()

    def _run(self) -> None:
        try:
            self._joined.meet()
            self._has_met = self._is_wanted
        except ERRORS as error:
            task = self._task
            where = f"rank {self._rank} of {task.world_size} at {task.address}:{task.port}"
            if self._failure is None:
                self._failure = Unavailable(f"the group {task.group} did not meet: {where}: {first_line(error)}")
        self._wake()
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            while self._is_wanted and self._failure is None and (bucket := self._buckets.get()) is not None:
                self._receive(*bucket)
        self._joined.end()

    def _receive(self, weights: tuple[AnnouncedWeight, ...], arrivals: _Arrivals) -> None:
        try:
            for weight in weights:
                arrivals.put(self._joined.receive(weight))
        except TooFewBytes:
            rule = f"it has fewer bytes than {weight.dtype} of shape {list(weight.shape)}, as was announced"
            arrivals.put(BadRequest(f"names: {weight.name}: {rule}", field="names"))
        except torch.OutOfMemoryError as error:  # a RuntimeError too
            arrivals.put(Unavailable(f"it does not fit in the memory of {self._device}: {first_line(error)}"))
        except ERRORS as error:
            arrivals.put(Unavailable(first_line(error)))


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


class NcclRank:
    """A rank in a group of NCCL, in this process. Members connect with the first broadcast: how long that may take is for the one
    who waits for it."""

    def __init__(self, task: JoinGroup, rank: int, device: torch.device) -> None:
        self._task, self._rank, self._device = task, rank, device
        self._group: Any = None

    def meet(self) -> None:
        task = self._task
        store = store_of(task.address, task.port, task.world_size, task.group, "cuda", task.timeout_s)
        self._group = nccl_group(store, self._rank, task.world_size)

    def receive(self, weight: AnnouncedWeight) -> Tensor:
        received, group = torch.empty(weight.shape, dtype=DTYPES[weight.dtype], device=self._device), self._group
        if group is None:
            raise ValueError("the group was left")
        with filled(received):
            broadcast(group, received)
        torch.cuda.current_stream(self._device).synchronize()
        return received

    def end(self) -> None:
        self.abort()

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def _joined(task: JoinGroup, rank: int, device: torch.device) -> _Joined:
    """Raises BadRequest."""
    if task.backend == "gloo":
        return GlooProcess(task, rank)
    if task.backend == "nccl" and device.type == "cuda":
        return NcclRank(task, rank, device)
    fix = "use gloo" if task.backend == "nccl" else "use gloo or nccl"
    raise BadRequest(f"backend {task.backend!r} cannot send weights to {device}: {fix}", field="backend")
