"""An instance as a process: mailbox, engine, transfers, the role's scheduler and the loop that joins them.

Owns the composition and the order of start and stop. Decides nothing.

    main thread      mailbox, scheduler, InstanceWorker: the loop
    engine thread    TorchExecutor: the model
    transfer thread  TransferThread: everything of the transport
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from common.config import EngineConfig, InstanceConfig, ModelConfig
from common.engine.executor import EngineDescription, Executor
from common.engine.torch_executor import TorchExecutor
from common.ids import ROUTER, Incarnation, InstanceId, Role
from common.instance.membership import Membership
from common.instance.ports import Scheduler
from common.instance.worker import InstanceWorker
from common.instance.worker import run as run_worker
from common.messages import DecodeInbox, InstanceInfo, PoolDescriptor, PrefillInbox, RankInfo
from common.wire import Mailbox, check_address
from decode.scheduler import DecodeScheduler
from kv_transfer.backends import make_transport
from kv_transfer.transfer_loop import TransferLoop
from kv_transfer.transfer_thread import TransferThread
from launch.addresses import bind_address, host_for_peers, reachable
from launch.child import ChildProcess
from launch.reports import Broken, Ready
from prefill.scheduler import PrefillScheduler

TRANSPORT_START_S = 60.0

_log = logging.getLogger(__name__)


def serve(
    process: ChildProcess, role: Role, instance: InstanceConfig, model: ModelConfig, engine: EngineConfig, name: InstanceId
) -> None:
    """Serve until told to stop."""
    check_address(instance.router)
    starts_until = time.monotonic() + instance.startup_timeout_s
    inbox: Any = PrefillInbox if role == "prefill" else DecodeInbox
    with contextlib.ExitStack() as stack:
        with _start_deadline(process, instance.startup_timeout_s):
            mailbox: Mailbox[Any] = Mailbox(name, inbox, f"tcp://{bind_address(instance.host, '--host')}:{instance.inbox_port}")
            stack.callback(mailbox.close)
            executor = TorchExecutor(model, engine, mailbox.wake, process.progress)
            stack.callback(executor.close)
            process.progress("registering memory for transfers")
            transfers = _transfers(instance, executor.description, mailbox)
            stack.callback(transfers.close)
            pool = transfers.start(TRANSPORT_START_S)
        info = _describe(role, name, instance, executor, pool, reachable(mailbox.address, host_for_peers()))
        mailbox.route(ROUTER, instance.router)
        now = time.monotonic()
        worker: InstanceWorker[Any] = InstanceWorker(
            Membership(info, max(0.0, starts_until - now), now),
            _scheduler(role, name, instance, engine, executor.description),
            executor,
            transfers,
            mailbox,
            pushes=role == "prefill",
        )
        process.progress(f"joining the fleet at {instance.router}")
        _turn_until_stopped(process, worker, mailbox, info)


def _turn_until_stopped(process: ChildProcess, worker: InstanceWorker[Any], mailbox: Mailbox[Any], info: InstanceInfo) -> None:
    stopped = threading.Event()
    reported = False

    def stop() -> None:
        stopped.set()
        mailbox.wake()

    def wait(timeout_s: float) -> None:
        nonlocal reported
        if worker.joined and not reported:
            reported = True
            process.report(Ready(addresses={"inbox": info.inbox}))
        mailbox.wait(timeout_s)

    process.on_stop(stop)
    run_worker(worker, wait, time.monotonic, stopped.is_set)


def _transfers(instance: InstanceConfig, engine: EngineDescription, mailbox: Mailbox[Any]) -> TransferThread:
    def make_loop() -> TransferLoop:
        transport = make_transport(instance.transport)
        return TransferLoop(transport, instance.transport, engine.memory, engine.layout, engine.total_pages, time.monotonic)

    return TransferThread(make_loop, mailbox.wake)


def _scheduler(
    role: Role, name: InstanceId, instance: InstanceConfig, engine: EngineConfig, description: EngineDescription
) -> Scheduler[Any]:
    scheduler = PrefillScheduler if role == "prefill" else DecodeScheduler
    return scheduler(name, description, engine.chunk_tokens, instance.max_waiting, instance.request_timeout_s)


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
        pool=pool,
        max_running=engine.max_rows,
    )


@contextlib.contextmanager
def _start_deadline(process: ChildProcess, timeout_s: float) -> Iterator[None]:
    """End the process when what is inside takes longer: loading may hang in a library that nothing can interrupt."""

    def give_up() -> None:
        reason = f"loading took longer than --startup-timeout-s allows ({timeout_s:g} s)"
        _log.critical(reason)
        process.report(Broken(reason=reason))
        os._exit(1)

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
