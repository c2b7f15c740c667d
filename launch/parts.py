"""What a rank computes and writes with: its executor and its transfers, as its flags say.

Owns the choice. torch is imported only for an executor that computes: that takes seconds.
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

Wake = Callable[[], None]
Progress = Callable[[str], None]
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
    command: InstanceCommand, engine: EngineConfig, wake: Wake, progress: Progress, parallel: ParallelContext
) -> tuple[EngineConfig, Executor]:
    """The executor, and the config that it follows."""
    if engine.executor == "timed":
        from engine.timed import TimedCheckpoint

        engine = with_step_size(engine, "cpu")
        return engine, TimedCheckpoint(command.model, engine, wake, progress, parallel.rank, parallel.ranks, parallel.agree)
    from engine.backends import device_of, with_device_defaults
    from engine.parallel import ALONE
    from engine.torch_executor import TorchExecutor

    engine = with_device_defaults(engine)
    device = device_of(engine.device)
    if command.role == "prefill" and engine.graphs == "auto" and device.type == "cuda":
        engine = replace(engine, graphs="off")  # their memory is better used for pages, unless it takes another role
    group = ALONE if parallel.meet is None else parallel.meet(device)
    return engine, TorchExecutor(command.model, engine, wake, progress, group, parallel.agree, command.drafting)
