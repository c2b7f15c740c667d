"""An instance as a process: mailbox, engine, transfers, the role's scheduler and the loop that joins them.

Owns the composition and the order of start and stop. Decides nothing.

    main thread      mailbox, scheduler, InstanceWorker: the loop
    engine thread    TorchExecutor: the model (--executor timed has no such thread, but one that waits for the ends of steps)
    transfer thread  TransferThread: everything of the transport

With --tp above 1 this is rank 0, the leader: its executor and transfers reach over all ranks (`rank_leader.py`), and the loop
takes in what the followers say before each of its turns. Followers are processes of their own (`follower_process.py`).

However the loop ends (drained, told to end at once, or because another thread failed), the router is told, everything is closed,
and the process is gone within CLOSE_S.
"""

import contextlib
import logging
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from common.addresses import bind_address, check_address, host_for_peers, reachable
from common.config import EngineConfig, step_limit_of
from common.executor import Executor
from common.ids import Incarnation, InstanceId
from common.instance.membership import Memberships
from common.instance.ports import FormerRole, Scheduler, Transfers
from common.instance.request import InstanceLimits
from common.instance.worker import InstanceWorker, MakeScheduler
from common.instance.worker import run as run_worker
from common.mail import Mailbox
from common.messages import InstanceInbox, InstanceInfo, PoolDescriptor
from common.processes.child import Ready
from decode.scheduler import DecodeScheduler
from launch.child import ChildProcess
from launch.instance_command import InstanceCommand
from launch.rank_leader import LeaderRanks, describe_rank
from launch.rank_setup import SINGLE_RANK, open_rank
from prefill.scheduler import PrefillScheduler

_log = logging.getLogger(__name__)

CLOSE_S = 8.0
"""How long transfers and engine may take to close. Less than `launch local` waits for it; more than a push takes to end."""


def serve(process: ChildProcess, command: InstanceCommand, engines: Mapping[int, EngineConfig]) -> None:
    """Serve until told to stop, which drains the instance. engines: of each rank that the command starts; this process is rank 0.
    Raises what the engine or the transport failed with, and RankLost."""
    instance, trust = command.instance, command.trust
    for address in instance.routers:
        trust.check(check_address(address))
    bind = f"tcp://{bind_address(instance.host, '--host')}:{instance.inbox_port}"
    starts_until = time.monotonic() + instance.startup_timeout_s
    life = Incarnation(secrets.token_hex(8))
    inbox: Any = InstanceInbox
    with contextlib.ExitStack() as stack:
        timeout_s = instance.startup_timeout_s
        ranks: LeaderRanks | None = None
        took = f"loading took longer than --startup-timeout-s allows ({timeout_s:g} s)"
        timer = process.end_within(timeout_s, took, lambda: f"; {text}" if ranks and (text := ranks.waits_for) else "")
        try:
            mailbox: Mailbox[Any] = Mailbox(InstanceId(command.name), inbox, bind, trust=trust)
            stack.callback(mailbox.close)
            if instance.tp > 1:
                ranks = LeaderRanks(process, command, engines, life)
                stack.callback(ranks.close)
            parallel = SINGLE_RANK if ranks is None else ranks.parallel
            engine, executor, own, pool = open_rank(stack, process, command, engines[0], mailbox.wake, parallel)
            transfers: Transfers = own
            if ranks is not None:
                stack.callback(ranks.end)
                executor, transfers = ranks.join(executor, own, pool)
        finally:
            timer.cancel()
        info = _describe(command, life, engine, executor, pool, reachable(mailbox.address, host_for_peers()), ranks)
        now = time.monotonic()
        worker: InstanceWorker = InstanceWorker(
            Memberships(info, instance.routers, max(0.0, starts_until - now), now),
            _schedulers(command, engine, executor),
            executor,
            transfers,
            mailbox,
            unix_s=time.time() - now,
            adapters=engine.loras,
            serves_whole=command.role == "both",
        )
        process.progress(f"joining the fleet at {instance.router}")
        try:
            _turn_until_drained(process, worker, mailbox, info, ranks)
        finally:
            process.end_within(CLOSE_S, f"closing took longer than {CLOSE_S:g} s, after: {sys.exception() or 'a drain'}")
    _log.info("drained, and left the fleet")


def _turn_until_drained(
    process: ChildProcess, worker: InstanceWorker, mailbox: Mailbox[Any], info: InstanceInfo, ranks: LeaderRanks | None
) -> None:
    """Raises StoppedAtOnce, RankLost."""
    stopping, reported = stop_event(process, mailbox), False

    def wait(timeout_s: float) -> None:
        """The mail of other ranks is taken in before the worker's turn."""
        nonlocal reported
        if worker.joined and not reported:
            reported = True
            process.report(Ready(addresses={"inbox": info.inbox}))
        process.check_hurry()
        if ranks is None:
            mailbox.wait(timeout_s)
            return
        mailbox.wait(min(timeout_s, ranks.followers.next_deadline() - time.monotonic()))
        ranks.turn()
        if ranks.followers.drain_asked:
            stopping.set()

    if ranks is not None:
        mailbox.wait_for_mail_of(ranks.mailbox)
    run_worker(worker, wait, time.monotonic, stopping.is_set)


def stop_event(process: ChildProcess, mailbox: Mailbox[Any]) -> threading.Event:
    """Set when the process is told to stop; who waits for mail wakes then."""
    told = threading.Event()

    def tell() -> None:
        told.set()
        mailbox.wake()

    process.on_stop(tell)
    return told


def _schedulers(command: InstanceCommand, engine: EngineConfig, executor: Executor) -> MakeScheduler:
    """What makes the scheduler of a role."""
    instance = command.instance
    limits = InstanceLimits(
        chunk_tokens=engine.chunk_tokens,
        max_waiting=instance.max_waiting,
        request_timeout_s=instance.max_request_timeout_s,
        drain_timeout_s=instance.drain_timeout_s,
        prefix_cache=instance.prefix_cache == "on",
        drafting=command.drafting,
        step_limit_s=step_limit_of(instance, engine, executor.description.device.partition(":")[0]),
    )
    digest = executor.digest_pages if instance.verify_pages == "on" else None

    def make(info: InstanceInfo, former: FormerRole | None) -> Scheduler[Any]:
        scheduler = PrefillScheduler if info.role == "prefill" else DecodeScheduler
        return scheduler(info, replace(executor.description, weights=executor.weights), limits, digest, former)

    return make


def _describe(
    command: InstanceCommand,
    life: Incarnation,
    config: EngineConfig,
    executor: Executor,
    pool: PoolDescriptor,
    inbox: str,
    ranks: LeaderRanks | None,
) -> InstanceInfo:
    instance, engine = command.instance, executor.description
    return InstanceInfo(
        id=InstanceId(command.name),
        incarnation=life,
        role="prefill" if command.role == "prefill" else "decode",
        inbox=inbox,
        ranks=(describe_rank(0, engine.device, engine.choices), *(() if ranks is None else ranks.followers.infos)),
        model=engine.model,
        pools=(pool, *(() if ranks is None else ranks.followers.pools)),
        max_running=engine.max_rows,
        started_ns=time.time_ns(),
        caches_prefixes=instance.prefix_cache == "on",
        verifies_pages=instance.verify_pages == "on",
        holds_grammars=config.grammar == "on",
        max_adapters=engine.max_adapters,
    )
