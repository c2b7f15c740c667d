"""What a rank computes and writes with, and the ranks that one command starts: what must be equal on all ranks of an instance,
the processes of the others, and the thread that turns the start while the main thread loads the model.

Owns the choice of executor and transfers, as flags say it; the list of what is compared, how one command's cores and GPUs are
divided among its ranks, and the child processes. torch is imported only for an executor that computes: that takes seconds. Does
not know what ranks send to each other: `common/instance/ranks` decides that. A rank that ends is the end of the instance:
`RankChildren.check` raises then. When the start fails, the main thread may be deep in a library that waits for the other ranks:
then the process ends without it. No rank is left behind, be it stopped: the kernel kills a child with its parent
(`common/processes/child.py`), and this process kills those it has before it ends by its own timers.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from common.config import EngineConfig, with_step_size
from common.executor import Executor
from common.messages import PoolDescriptor
from common.pages.layout import heads_of
from engine.kv_budget import Agree, as_offered
from kv_transfer.backends import make_transport
from kv_transfer.target_ranks import TargetRanks
from kv_transfer.transfer_loop import TransferLoop, TransferThread
from launch.child import ChildProcess
from launch.instance_command import InstanceCommand

if TYPE_CHECKING:
    import torch

    from engine.parallel import Group

import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from common import version_of
from common.config import InstanceConfig, shares_gpu
from common.errors import ConfigError
from common.host import core_count, count_gpus, devices_of_ranks, divide_cores
from common.instance.ranks.follower import FollowerLoop
from common.instance.ranks.leader import Followers
from common.instance.ranks.line import RankLost
from common.mail import Mailbox
from common.model_path import resolve_model_path
from common.options import flag_of, refuse_without_effect, to_flags
from common.processes.child import Exited, Progress, Reported
from engine.checkpoint import fingerprint
from engine.kv_budget import memory_part
from launch.child import BAD_FLAG, RoleEvent, RoleProcess, launch_command

Wake = Callable[[], None]
TRANSPORT_START_S = 60.0


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """Which rank of its instance a process is, and how it works with the others."""

    rank: int = 0
    ranks: int = 1
    agree: Agree = as_offered
    """Agrees with the other ranks on a number of pages."""
    meet: "Callable[[torch.device], Group] | None" = None
    """From the device to the group of all ranks; None: it computes alone."""


SINGLE_RANK = ParallelContext()


def open_rank(
    stack: ExitStack, process: ChildProcess, command: InstanceCommand, engine: EngineConfig, wake: Wake, parallel: ParallelContext
) -> tuple[EngineConfig, Executor, TargetRanks, PoolDescriptor]:
    """Load the executor, and start the transfers over the thread of the transport, to peers of any number of ranks. The stack
    closes both. Returns the config that the executor follows too, and its pool of pages."""
    engine, executor = _make_executor(command, engine, wake, process.progress, parallel)
    stack.callback(executor.close)
    if parallel.rank == 0:
        process.progress("registering memory for transfers")
    instance, made = command.instance, executor.description
    first_head = heads_of(parallel.rank, parallel.ranks, made.model.kv_heads).start

    def make_loop() -> TransferLoop:
        transport = make_transport(instance.transport, instance.host)
        memory = made.memory, made.layout, made.total_pages
        return TransferLoop(transport, instance.transport, *memory, time.monotonic, measures=True, first_head=first_head)

    thread = TransferThread(make_loop, wake)
    stack.callback(thread.close)
    transfers = TargetRanks(thread, parallel.rank, parallel.ranks, made.model.kv_heads)
    return engine, executor, transfers, thread.start(TRANSPORT_START_S)


def _make_executor(
    command: InstanceCommand, engine: EngineConfig, wake: Wake, progress: Callable[[str], None], parallel: ParallelContext
) -> tuple[EngineConfig, Executor]:
    """The executor, and the config that it follows."""
    if engine.executor == "timed":
        from engine.timed import TimedCheckpoint

        engine = with_step_size(engine, "cpu")
        return engine, TimedCheckpoint(command.model, engine, wake, progress, parallel.rank, parallel.ranks, parallel.agree)
    import torch

    from engine.backends import device_of, with_device_defaults
    from engine.parallel import ALONE
    from engine.torch_executor import TorchExecutor

    engine = with_device_defaults(engine)
    device = device_of(engine.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else this thread's first call would make a context on GPU 0
    if command.role == "prefill" and engine.graphs == "auto" and device.type == "cuda":
        engine = replace(engine, graphs="off")  # their memory is better used for pages, unless it takes another role
    group = ALONE if parallel.meet is None else parallel.meet(device)
    return engine, TorchExecutor(command.model, engine, wake, progress, group, parallel.agree, command.drafting)


# --- the ranks of one command ------------------------------------------------------------------------------------------------


class RankChildren:
    """Made by the main thread. wake: called on any thread when `check` has news."""

    def __init__(self, process: ChildProcess, name: str, commands: Mapping[int, Sequence[str]], wake: Callable[[], None]) -> None:
        """Raises OSError."""
        self._process = process
        self._wake = wake
        self._ends: queue.SimpleQueue[Exited] = queue.SimpleQueue()
        self._ranks = {f"{name}.rank-{rank}": rank for rank in commands}
        self.children: list[RoleProcess] = []
        for child, rank in self._ranks.items():
            self.children.append(RoleProcess(child, commands[rank], self._heard, killed_with_us=True))
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
        for child in self.children:
            child.kill()

    def _heard(self, event: RoleEvent) -> None:
        """On a thread of the child."""
        if isinstance(event, Reported):
            if isinstance(event.report, Progress):
                self._process.progress(f"rank {self._ranks[event.child]}: {event.report.text}")
            return
        self._ends.put(event)
        self._wake()


OF_A_HOST = ("device", "threads", "lent_cores", "memory_part", "sharers", "kv_memory")
"""Flags of the engine that ranks may differ in."""
LIBRARIES = ("tandem-serve", "torch", "transformers", "safetensors", "xgrammar", "flashinfer-python", "triton")
"""Their versions decide what is computed. Our own is one of them: all ranks of an instance are of one release."""


def rank_setup(command: InstanceCommand) -> dict[str, str]:
    """What `RankHello` says of a rank, each by its name. Raises ConfigError for a checkpoint that cannot be read."""
    engine, model = command.engine, command.model.model
    weights = engine.executor != "timed" and engine.load_format != "dummy"

    def checkpoint(model: str) -> str:
        return fingerprint(resolve_model_path(model, weights=weights), weights=weights)

    flags = {flag_of(field.name): str(vars(engine)[field.name]) for field in fields(engine) if field.name not in OF_A_HOST}
    drafts = "" if command.drafting is None else command.drafting.model
    return {
        **flags,
        "the command": command.role,
        "--served-name": command.model.served_name,
        "--transport": command.instance.transport,
        "--all-reduce": command.instance.all_reduce,
        "the kind of device (--device)": _device_kind(engine),
        "whether it shares its GPU (--sharers)": "yes" if shares_gpu(engine, _device_kind(engine)) else "no",
        "the checkpoint (its fingerprint)": checkpoint(model),
        "the draft model (--speculative-config), by its fingerprint": checkpoint(drafts) if drafts else "none",
        **{f"the version of {library}": version_of(library) or "none" for library in LIBRARIES},
    }


def engines_of_ranks(instance: InstanceConfig, engine: EngineConfig) -> dict[int, EngineConfig]:
    """The engine of each rank that this command starts: they share its cores, and each has a device
    or an equal part of the host's memory. Raises ConfigError."""
    ranks = instance.ranks
    gpus = count_gpus() if engine.device != "cpu" and engine.executor == "torch" else 0
    devices = devices_of_ranks(engine.device, len(ranks), gpus)
    on_gpus = gpus > 0 or engine.device.startswith("cuda")
    check_nccl(instance, on_gpus)
    if not on_gpus:
        refuse_without_effect(instance, ("all_reduce",), "without GPUs")
    threads = divide_cores(engine.threads or core_count(), len(ranks))
    engine = replace(engine, threads=threads)
    if not on_gpus:
        engine = replace(engine, memory_part=memory_part(engine, instance.tp, len(ranks)))
    return {rank: replace(engine, device=device) for rank, device in zip(ranks, devices, strict=True)}


def check_nccl(instance: InstanceConfig, on_gpus: bool) -> None:
    """Raises ConfigError where ranks would compute and push with NCCL at once: two of its communicators that work on a GPU at one
    time may wait for each other for ever, if they begin in another order on another GPU."""
    if on_gpus and instance.tp > 1 and instance.transport == "torch":
        raise ConfigError(
            f"--transport torch with --tp {instance.tp} on GPUs: NCCL would carry KV and the ranks' sums at the same time, and "
            f"can lock up then: give --transport nixl"
        )


def commands_of_ranks(command: InstanceCommand, engines: Mapping[int, EngineConfig], leader: str) -> dict[int, Sequence[str]]:
    """How the first of the ranks that this command starts starts the others. leader: the address of rank 0."""
    others = replace(command.instance, name=command.name, leader=leader, inbox_port=0, rank=str(command.instance.ranks[-1]))

    def flags(rank: int) -> list[str]:
        return to_flags(replace(others, rank=str(rank)), command.model, engines[rank], command.log, command.security)

    return {rank: launch_command(command.role, flags(rank)) for rank in command.instance.ranks[1:]}


def _device_kind(engine: EngineConfig) -> str:
    """With equal flags it decides the dtype and the sizes of steps, and how ranks meet."""
    if engine.executor == "timed":
        return "none"
    return "cpu" if engine.device == "cpu" or (engine.device == "auto" and not count_gpus()) else "cuda"


END_S = 2.0
"""How long the main thread may take to notice that the start has failed. Then the process ends without it."""


CLOSE_S = 1.0


T = TypeVar("T")


class StartThread:
    """Turns `start` until it is complete or has failed. also: a function that is called before each turn; it may raise too."""

    def __init__(
        self, process: ChildProcess, mailbox: Mailbox[Any], start: Followers | FollowerLoop, also: Callable[[float], None]
    ) -> None:
        self._process = process
        self._mailbox = mailbox
        self._start = start
        self._also = also
        self._failure: Exception | None = None
        self._stopped = False
        self._turned = threading.Condition()
        """Held while the start turns, and while the main thread calls it."""
        self._thread = threading.Thread(target=self._run, name="ranks start", daemon=True)
        self._thread.start()

    def call(self, method: Callable[[], T]) -> T:
        """Call a method of the start from another thread."""
        with self._turned:
            result = method()
        self._mailbox.wake()
        return result

    def wait_for(self, look: Callable[[], T | None]) -> T:
        """Wait until `look` finds something. Raises what the start has failed with."""
        with self._turned:
            while self._failure is None:
                found = look()
                if found is not None:
                    return found
                self._turned.wait()
            raise self._failure

    def agree(self, pages: int) -> int:
        """This rank can hold so many pages. Waits, and returns how many all ranks use."""
        self.call(lambda: self._start.offer(pages))
        return self.wait_for(lambda: self._start.agreed)

    def finish(self) -> None:
        """Wait until it is complete. From then on the mailbox belongs to the caller. Raises what the start has failed with."""
        self.wait_for(lambda: self._start.complete or None)
        self._thread.join()

    def close(self) -> None:
        """Stop, whatever is open; so the mailbox can be closed. When an error unwinds, the other side gets it. Idempotent."""
        error = sys.exception()
        if error is not None and self._failure is None and not self._start.complete:
            self.call(lambda: self._start.end(str(error)))
        self._stopped = True
        self._mailbox.wake()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._stopped and (wait_s := self._turn()) is not None:
                self._mailbox.wait(wait_s)
        except Exception as error:  # noqa: BLE001 - the thread's outermost door; the main thread's next wait raises it
            with self._turned:
                self._failure = error
                self._start.end(str(error))
                self._turned.notify_all()
            self._process.end_within(END_S, str(error))

    def _turn(self) -> float | None:
        """Returns how long to wait; None when it is complete."""
        with self._turned:
            now = time.monotonic()
            self._also(now)
            self._start.turn(time.monotonic)
            self._turned.notify_all()
            return None if self._start.complete else self._start.next_deadline() - now
