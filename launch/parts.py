"""What a rank computes and writes with: its executor and its transfers, as its flags say.

Owns the choice. torch is imported only for an executor that computes: that takes seconds.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from common.config import EngineConfig, InstanceConfig, ModelConfig, with_step_size
from common.executor import EngineDescription, Executor
from common.ids import Role
from common.pages.layout import heads_of
from engine.kv_budget import Agree, as_offered
from kv_transfer.backends import make_transport
from kv_transfer.target_ranks import TargetRanks
from kv_transfer.transfer_loop import TransferLoop, TransferThread

if TYPE_CHECKING:
    import torch

    from engine.parallel import Group

Wake = Callable[[], None]
Progress = Callable[[str], None]


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


def make_executor(
    role: Role, model: ModelConfig, engine: EngineConfig, wake: Wake, progress: Progress, parallel: ParallelContext = SINGLE_RANK
) -> tuple[EngineConfig, Executor]:
    """The executor, and the config that it follows."""
    if engine.executor == "timed":
        from engine.timed import TimedCheckpoint

        engine = with_step_size(engine, "cpu")
        return engine, TimedCheckpoint(model, engine, wake, progress, parallel.rank, parallel.ranks, parallel.agree)
    from engine.backends import device_of, with_device_defaults
    from engine.parallel import ALONE
    from engine.torch_executor import TorchExecutor

    engine = with_device_defaults(engine)
    if role == "prefill":  # it computes no decode steps
        engine = replace(engine, graphs="off")
    group = ALONE if parallel.meet is None else parallel.meet(device_of(engine.device))
    return engine, TorchExecutor(model, engine, wake, progress, group, parallel.agree)


def make_transfers(
    instance: InstanceConfig, engine: EngineDescription, wake: Wake, parallel: ParallelContext = SINGLE_RANK
) -> tuple[TransferThread, TargetRanks]:
    """The thread of the transport, and the transfers over it to peers of any number of ranks."""
    kv_heads = engine.model.kv_heads
    first_head = heads_of(parallel.rank, parallel.ranks, kv_heads).start

    def make_loop() -> TransferLoop:
        transport = make_transport(instance.transport, instance.host)
        parts = engine.memory, engine.layout, engine.total_pages
        return TransferLoop(transport, instance.transport, *parts, time.monotonic, measures=True, first_head=first_head)

    thread = TransferThread(make_loop, wake)
    return thread, TargetRanks(thread, parallel.rank, parallel.ranks, kv_heads)
