"""A follower as a process: a rank of an instance that is not rank 0.

Owns the composition and the order of start and stop. Decides nothing: `common/instance/ranks/follower.py` says how it joins and
what it does.

    main thread      mailbox (the leader's messages alone), FollowerLoop
    engine thread    its own executor, of its share of the weights
    transfer thread  its own transfers, from and to its own pool

It ends when the leader says so, is gone or has been silent for seconds, and when its executor or transfers fail, which it tells
the leader first. When it is told to stop, it asks the leader to drain the instance.
"""

import contextlib
import secrets
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from common.addresses import LOOPBACK, among_ranks, bind_address, host_for_peers, is_loopback, reachable
from common.config import EngineConfig
from common.errors import TandemError
from common.executor import ExecutorFailed
from common.ids import Incarnation
from common.instance.ranks.follower import FollowerLoop
from common.instance.ranks.line import RankLost
from common.mail import Mailbox
from common.messages.ranks import RankHello, ToFollower, rank_name
from common.processes.child import Ready, await_children
from launch.child import ChildProcess
from launch.instance_command import InstanceCommand
from launch.instance_process import CLOSE_S, stop_event
from launch.rank_leader import LOST_S, describe_rank
from launch.rank_setup import ParallelContext, RankChildren, StartThread, commands_of_ranks, open_rank, rank_setup

if TYPE_CHECKING:
    import torch

    from engine.parallel import Group


def serve(process: ChildProcess, command: InstanceCommand, engines: Mapping[int, EngineConfig]) -> None:
    """Serve until the instance ends. engines: of each rank that the command starts; this process is the first of them. Raises
    RankLost, PeerRefused, and what the engine or the transport failed with."""
    instance, trust = command.instance, command.trust
    trust.check(instance.leader)
    rank, timeout_s = instance.ranks[0], instance.startup_timeout_s
    host = LOOPBACK if is_loopback(instance.leader) else bind_address(instance.host, "--host")
    with contextlib.ExitStack() as stack:
        loop: FollowerLoop | None = None
        took = f"the start took longer than --startup-timeout-s allows ({timeout_s:g} s)"
        timer = process.end_within(timeout_s, took, lambda: f"; {text}" if loop and (text := loop.waits_for) else "")
        try:
            me = rank_name(command.name, rank, Incarnation(secrets.token_hex(8)))
            mailbox: Mailbox[ToFollower] = Mailbox(me, ToFollower, f"tcp://{host}:0", trust=trust)
            stack.callback(mailbox.close)
            commands = commands_of_ranks(command, engines, instance.leader)
            children = RankChildren(process, command.name, commands, mailbox.wake)
            stack.callback(await_children, children.children, LOST_S)
            hello = RankHello(
                rank=rank,
                ranks=instance.tp,
                address=reachable(mailbox.address, host_for_peers()),
                info=describe_rank(rank, engines[rank].device),
                setup=rank_setup(command),
            )
            loop = FollowerLoop(mailbox, instance.leader, hello)
            start = StartThread(process, mailbox, loop, lambda now: children.check())
            stack.callback(start.close)
            process.progress(f"asking rank 0 at {instance.leader} to let rank {rank} join")
            welcome = start.wait_for(lambda: loop.welcome)
            leaving = contextlib.ExitStack()

            def meet(device: "torch.device") -> "Group":
                from engine.parallel import TorchGroup, TorchPeerMemory, reach_store

                store_host, _, port = welcome.meeting.rpartition(":")
                store = reach_store(store_host, int(port), timeout_s)
                memory = TorchPeerMemory() if instance.all_reduce == "auto" else None
                group = TorchGroup(store, rank, instance.tp, device, among_ranks(host, instance.leader), timeout_s, memory)
                leaving.callback(group.close)
                return group

            is_timed = command.engine.executor == "timed"
            parallel = ParallelContext(rank, instance.tp, start.agree, None if is_timed else meet)
            _, executor, transfers, pool = open_rank(stack, process, command, engines[rank], mailbox.wake, parallel)
            stack.callback(leaving.close)  # no step waits for the others any more
            made = executor.description
            start.call(lambda: loop.ready(made.model, pool, made.choices))
            start.finish()
            loop.serve(executor, transfers)
        finally:
            timer.cancel()
        process.report(Ready(addresses={"rank": reachable(mailbox.address, host_for_peers())}))
        try:
            _turn_until_ended(process, loop, mailbox, children)
        finally:
            process.end_within(CLOSE_S, f"closing took longer than {CLOSE_S:g} s, after: {sys.exception() or 'the end'}")


def _turn_until_ended(process: ChildProcess, loop: FollowerLoop, mailbox: Mailbox[ToFollower], children: RankChildren) -> None:
    """Raises RankLost when the instance has ended for another reason than a drain, StoppedAtOnce."""
    told, asked = stop_event(process, mailbox), False
    try:
        while loop.ending is None:
            if told.is_set() and not asked:
                asked = True
                loop.ask_drain()
            children.check(may_leave=True)
            loop.turn(time.monotonic)
            process.check_hurry()
            if loop.ending is None:
                mailbox.wait(max(0.0, loop.next_deadline() - time.monotonic()))
    except TandemError as error:
        loop.end(str(error), error.step if isinstance(error, ExecutorFailed) else None)
        raise
    if not loop.ending.orderly:
        raise RankLost(f"the instance has ended: {loop.ending.reason}")
