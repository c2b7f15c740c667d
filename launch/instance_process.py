"""An instance as a process: mailbox, engine, transfers, the role's scheduler and the loop that joins them.

Owns the composition and the order of start and stop. Decides nothing.

    main thread      mailbox, scheduler, InstanceWorker: the loop
    engine thread    TorchExecutor: the model (--executor timed has no such thread, but one that waits for the ends of steps)
    transfer thread  TransferThread: everything of the transport

However the loop ends (drained, told to end at once, or because another thread failed), the router is told, everything is closed,
and the process is gone within CLOSE_S.
"""

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from common.addresses import bind_address, check_address, host_for_peers, reachable
from common.config import EngineConfig, InstanceConfig, ModelConfig
from common.engine.executor import EngineDescription, Executor
from common.engine.step_size import with_step_size
from common.ids import Incarnation, InstanceId, Role
from common.instance.limits import InstanceLimits
from common.instance.memberships import Memberships
from common.instance.ports import Scheduler
from common.instance.worker import InstanceWorker
from common.instance.worker import run as run_worker
from common.messages import DecodeInbox, InstanceInfo, PoolDescriptor, PrefillInbox, RankInfo
from common.trust import LOOPBACK_ONLY, Trust
from common.wire import Mailbox
from decode.scheduler import DecodeScheduler
from kv_transfer.backends import make_transport
from kv_transfer.target_ranks import TargetRanks
from kv_transfer.transfer_loop import TransferLoop
from kv_transfer.transfer_thread import TransferThread
from launch.child import ChildProcess
from launch.reports import Ready
from prefill.scheduler import PrefillScheduler

TRANSPORT_START_S = 60.0
CLOSE_S = 8.0
"""How long transfers and engine may take to close. Less than `launch local` waits for it; more than a push takes to end."""


def serve(
    process: ChildProcess,
    role: Role,
    instance: InstanceConfig,
    model: ModelConfig,
    engine: EngineConfig,
    name: InstanceId,
    trust: Trust = LOOPBACK_ONLY,
) -> None:
    """Serve until told to stop, which drains the instance. Raises what the engine or the transport failed with."""
    for address in instance.routers:
        trust.check(check_address(address))
    bind = f"tcp://{bind_address(instance.host, '--host')}:{instance.inbox_port}"
    starts_until = time.monotonic() + instance.startup_timeout_s
    inbox: Any = PrefillInbox if role == "prefill" else DecodeInbox
    with contextlib.ExitStack() as stack:
        timeout_s = instance.startup_timeout_s
        timer = process.end_within(timeout_s, f"loading took longer than --startup-timeout-s allows ({timeout_s:g} s)")
        try:
            mailbox: Mailbox[Any] = Mailbox(name, inbox, bind, trust=trust)
            stack.callback(mailbox.close)
            engine, executor = _executor(role, model, engine, mailbox.wake, process.progress)
            stack.callback(executor.close)
            process.progress("registering memory for transfers")
            transfers = _transfers(instance, executor.description, mailbox)
            stack.callback(transfers.close)
            pool = transfers.start(TRANSPORT_START_S)
        finally:
            timer.cancel()
        info = _describe(role, name, instance, executor, pool, reachable(mailbox.address, host_for_peers()))
        now = time.monotonic()
        worker: InstanceWorker[Any] = InstanceWorker(
            Memberships(info, instance.routers, max(0.0, starts_until - now), now),
            _scheduler(info, instance, engine, executor),
            executor,
            TargetRanks(transfers, 0, 1, executor.description.model.kv_heads),
            mailbox,
            unix_s=time.time() - now,
        )
        process.progress(f"joining the fleet at {instance.router}")
        try:
            _turn_until_drained(process, worker, mailbox, info)
        finally:
            process.end_within(CLOSE_S, f"closing took longer than {CLOSE_S:g} s, after: {sys.exception() or 'a drain'}")


def _turn_until_drained(process: ChildProcess, worker: InstanceWorker[Any], mailbox: Mailbox[Any], info: InstanceInfo) -> None:
    """Raises StoppedAtOnce."""
    told = threading.Event()
    reported = False

    def drain() -> None:
        told.set()
        mailbox.wake()

    def wait(timeout_s: float) -> None:
        nonlocal reported
        if worker.joined and not reported:
            reported = True
            process.report(Ready(addresses={"inbox": info.inbox}))
        process.check_hurry()
        mailbox.wait(timeout_s)

    process.on_stop(drain)
    run_worker(worker, wait, time.monotonic, told.is_set)


def _executor(
    role: Role, model: ModelConfig, engine: EngineConfig, wake: Callable[[], None], progress: Callable[[str], None]
) -> tuple[EngineConfig, Executor]:
    """The executor, and the config that it follows. torch is imported only for an executor that computes: that takes seconds."""
    if engine.executor == "timed":
        from common.engine.timed_checkpoint import TimedCheckpoint

        engine = with_step_size(engine, "cpu")
        return engine, TimedCheckpoint(model, engine, wake)
    from common.engine.device import with_device_defaults
    from common.engine.torch_executor import TorchExecutor

    engine = with_device_defaults(engine)
    if role == "prefill":  # it computes no decode steps
        engine = replace(engine, graphs="off")
    return engine, TorchExecutor(model, engine, wake, progress)


def _transfers(instance: InstanceConfig, engine: EngineDescription, mailbox: Mailbox[Any]) -> TransferThread:
    def make_loop() -> TransferLoop:
        transport = make_transport(instance.transport, instance.host)
        region, layout, total_pages = engine.memory, engine.layout, engine.total_pages
        return TransferLoop(transport, instance.transport, region, layout, total_pages, time.monotonic, measures=True)

    return TransferThread(make_loop, mailbox.wake)


def _scheduler(info: InstanceInfo, instance: InstanceConfig, engine: EngineConfig, executor: Executor) -> Scheduler[Any]:
    limits = InstanceLimits(
        chunk_tokens=engine.chunk_tokens,
        max_waiting=instance.max_waiting,
        request_timeout_s=instance.max_request_timeout_s,
        drain_timeout_s=instance.drain_timeout_s,
        prefix_cache=instance.prefix_cache == "on",
    )
    digest = executor.digest_pages if instance.verify_pages == "on" else None
    scheduler = PrefillScheduler if info.role == "prefill" else DecodeScheduler
    return scheduler(info, executor.description, limits, digest)


def _describe(
    role: Role, name: InstanceId, instance: InstanceConfig, executor: Executor, pool: PoolDescriptor, inbox: str
) -> InstanceInfo:
    engine = executor.description
    rank = RankInfo(rank=0, pid=os.getpid(), host=socket.gethostname(), device=engine.device)
    return InstanceInfo(
        id=name,
        incarnation=Incarnation(secrets.token_hex(8)),
        role=role,
        inbox=inbox,
        ranks=(rank,),
        model=engine.model,
        pools=(pool,),
        max_running=engine.max_rows,
        started_ns=time.time_ns(),
    )
