"""A follower as a process: a rank of an instance that is not rank 0.

Owns the composition and the order of start and stop. Decides nothing: `common/instance/ranks/start.py` says how it joins, and
`follower.py` beside it what it does.

    main thread      mailbox (the leader's messages alone), FollowerLoop
    engine thread    its own executor, of its share of the weights
    transfer thread  its own transfers, from and to its own pool

It ends when the leader says so, is gone or has been silent for seconds, and when its executor or transfers fail, which it tells
the leader first. When it is told to stop, it asks the leader to drain the instance.
"""

import contextlib
import secrets
import sys
import threading
import time
from typing import TYPE_CHECKING

from common.addresses import LOOPBACK, among_ranks, bind_address, host_for_peers, is_loopback, reachable
from common.config import EngineConfig, InstanceConfig, ModelConfig
from common.errors import TandemError
from common.ids import Incarnation, Role
from common.instance.ranks.follower import FollowerLoop
from common.instance.ranks.line import RankLost
from common.instance.ranks.start import Joining
from common.mail import Mailbox
from common.messages.ranks import RankHello, RankWelcome, ToFollower, rank_name
from common.processes.child import Ready
from common.trust import LOOPBACK_ONLY, Trust
from launch.child import ChildProcess
from launch.instance_process import CLOSE_S, TRANSPORT_START_S
from launch.parts import ParallelContext, make_executor, make_transfers
from launch.rank_leader import LOST_S, describe_rank
from launch.rank_setup import RankChildren, RankCommands, StartThread, no_ranks, rank_setup

if TYPE_CHECKING:
    import torch

    from engine.parallel import Group, TorchGroup


class _Meeting:
    """The group of all ranks, as this one gets to it."""

    def __init__(self, rank: int, instance: InstanceConfig, host: str) -> None:
        self._rank = rank
        self._instance = instance
        self._host = host
        self._group: TorchGroup | None = None
        self.welcome: RankWelcome | None = None

    def meet(self, device: "torch.device") -> "Group":
        from engine.parallel import TorchGroup, reach_store

        assert self.welcome is not None
        host, _, port = self.welcome.meeting.rpartition(":")
        timeout_s = self._instance.startup_timeout_s
        store = reach_store(host, int(port), timeout_s)
        self._group = TorchGroup(store, self._rank, self._instance.tp, device, self._host, timeout_s)
        return self._group

    def leave(self) -> None:
        """No step waits for the others any more. Idempotent."""
        if self._group is not None:
            group, self._group = self._group, None
            group.close()


def serve(
    process: ChildProcess,
    role: Role,
    instance: InstanceConfig,
    model: ModelConfig,
    engine: EngineConfig,
    name: str,
    trust: Trust = LOOPBACK_ONLY,
    others: RankCommands = no_ranks,
) -> None:
    """Serve until the instance ends. others: how to start the other ranks on this host. Raises RankLost, PeerRefused, and what
    the engine or the transport failed with."""
    trust.check(instance.leader)
    rank = instance.ranks[0]
    host = LOOPBACK if is_loopback(instance.leader) else bind_address(instance.host, "--host")
    with contextlib.ExitStack() as stack:
        timeout_s = instance.startup_timeout_s
        joining: Joining | None = None
        took = f"the start took longer than --startup-timeout-s allows ({timeout_s:g} s)"
        timer = process.end_within(timeout_s, took, lambda: f"; {text}" if joining and (text := joining.waits_for) else "")
        try:
            me = rank_name(name, rank, Incarnation(secrets.token_hex(8)))
            mailbox: Mailbox[ToFollower] = Mailbox(me, ToFollower, f"tcp://{host}:0", trust=trust)
            stack.callback(mailbox.close)
            children = RankChildren(process, name, others(instance.leader), mailbox.wake)
            stack.callback(children.close, LOST_S)
            joining = Joining(mailbox, instance.leader, _hello(rank, role, instance, model, engine, mailbox.address))
            start = StartThread(process, mailbox, joining, lambda now: children.check())
            stack.callback(start.close)
            process.progress(f"asking rank 0 at {instance.leader} to let rank {rank} join")
            meeting = _Meeting(rank, instance, among_ranks(host, instance.leader))
            meeting.welcome = start.wait_for(lambda: joining.welcome)
            meet = None if engine.executor == "timed" else meeting.meet
            parallel = ParallelContext(rank, instance.tp, start.agree, meet)
            engine, executor = make_executor(role, model, engine, mailbox.wake, process.progress, parallel)
            stack.callback(executor.close)
            thread, transfers = make_transfers(instance, executor.description, mailbox.wake, parallel)
            stack.callback(thread.close)
            pool = thread.start(TRANSPORT_START_S)
            stack.callback(meeting.leave)
            made = executor.description
            start.call(lambda: joining.ready(made.model, pool, made.choices))
            start.finish()
        finally:
            timer.cancel()
        process.report(Ready(addresses={"rank": reachable(mailbox.address, host_for_peers())}))
        loop = FollowerLoop(executor, transfers, mailbox, joining.line)
        try:
            _turn_until_ended(process, loop, mailbox, children)
        finally:
            process.end_within(CLOSE_S, f"closing took longer than {CLOSE_S:g} s, after: {sys.exception() or 'the end'}")


def _turn_until_ended(process: ChildProcess, loop: FollowerLoop, mailbox: Mailbox[ToFollower], children: RankChildren) -> None:
    """Raises RankLost when the instance has ended for another reason than a drain, StoppedAtOnce."""
    told = threading.Event()
    asked = False

    def drain() -> None:
        told.set()
        mailbox.wake()

    process.on_stop(drain)
    try:
        while loop.end is None:
            if told.is_set() and not asked:
                asked = True
                loop.ask_drain()
            children.check(may_leave=True)
            loop.turn(time.monotonic())
            process.check_hurry()
            if loop.end is None:
                mailbox.wait(max(0.0, loop.next_deadline() - time.monotonic()))
    except TandemError as error:
        loop.fail(str(error))
        raise
    if not loop.end.orderly:
        raise RankLost(f"the instance has ended: {loop.end.reason}")


def _hello(rank: int, role: Role, instance: InstanceConfig, model: ModelConfig, engine: EngineConfig, address: str) -> RankHello:
    return RankHello(
        rank=rank,
        ranks=instance.tp,
        address=reachable(address, host_for_peers()),
        info=describe_rank(rank, engine.device),
        setup=rank_setup(role, instance, model, engine),
    )
