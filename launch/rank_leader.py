"""The leader's part in an instance with several ranks: it starts the others, gathers them, and ends with them.

Owns the mailbox for the followers, the processes of those on this host, the group of collectives, and the order in which all of
this comes and goes. What is said is decided in `common/instance/ranks`.

    start   mailbox ─► children ─► gathering (a thread) ─► the group's meeting ─► load, agree, register ─► all are ready
    turn    followers' mail, then the worker's turn
    end     the followers are told why ─► children are waited for ─► the group is left, so that no step waits for a lost rank
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from common.addresses import LOOPBACK, among_ranks, bind_address, host_for_peers, is_loopback, port_of, reachable
from common.config import EngineConfig, InstanceConfig
from common.errors import AddressTaken, MeetingFailed
from common.executor import Executor
from common.ids import Incarnation
from common.instance.ports import Transfers
from common.instance.ranks.executor import RankedExecutor
from common.instance.ranks.leader import Followers, remote_transfers
from common.mail import Mailbox
from common.messages import EngineChoices, PoolDescriptor, RankInfo
from common.messages.ranks import ToLeader, rank_name
from common.processes.child import await_children
from kv_transfer.target_ranks import RankedTransfers
from launch.child import ChildProcess
from launch.instance_command import InstanceCommand
from launch.rank_setup import ParallelContext, RankChildren, StartThread, commands_of_ranks, rank_setup

if TYPE_CHECKING:
    import torch

    from engine.parallel import Group

REMIND_S = 5.0
"""How often the start says which ranks are missing."""
MOST_SAID = 3
"""So many refusals are named."""
OTHER_KEYS = ("wrong key", "no key", "needless key", "handshake")
"""Reasons of a mailbox to turn a connection away that another cluster key explains."""
DRAINED_S, LOST_S = 5.0, 2.0
"""How long ranks on this host may take to end after they were told: when the instance has drained, and when a rank is lost."""


class LeaderRanks:
    """Rank 0, seen from its process. engines: of each rank that the command starts. life: of the instance."""

    def __init__(
        self, process: ChildProcess, command: InstanceCommand, engines: Mapping[int, EngineConfig], life: Incarnation
    ) -> None:
        instance = command.instance
        self._process = process
        self._instance = instance
        self._is_timed = command.engine.executor == "timed"
        here = is_loopback(instance.leader) if instance.leader else len(instance.ranks) == instance.tp
        host = LOOPBACK if here else bind_address(instance.host, "--host")
        bind = f"tcp://{host}:{port_of(instance.leader) if instance.leader else 0}"
        try:
            self.mailbox: Mailbox[ToLeader] = Mailbox(rank_name(command.name, 0, life), ToLeader, bind, trust=command.trust)
        except AddressTaken as error:  # whoever has chosen the port found it free; a former life may still end
            raise MeetingFailed(f"--leader: {error}") from error
        self._address = instance.leader or reachable(self.mailbox.address, host_for_peers())
        self._host = among_ranks(host, self._address)
        self.followers = Followers(self.mailbox, instance.tp, rank_setup(command))
        self._leaving = contextlib.ExitStack()
        """Leaves the group, once this process is in it."""
        self._reminder_s = time.monotonic() + REMIND_S
        commands = commands_of_ranks(command, engines, self._address)
        self._children = RankChildren(process, command.name, commands, self.mailbox.wake)
        self._start = StartThread(process, self.mailbox, self.followers, self._watch_start)

    # --- start -----------------------------------------------------------------------------------------------------------------

    @property
    def parallel(self) -> ParallelContext:
        """Loading with it waits until every rank is there."""
        if self._is_timed:
            self._start.call(lambda: self.followers.open(""))
        return ParallelContext(0, self._instance.tp, self._start.agree, None if self._is_timed else self._meet)

    def join(self, executor: Executor, transfers: Transfers, pool: PoolDescriptor) -> tuple[Executor, Transfers]:
        """This rank can take plans: wait until all can. Returns the executor and the transfers over all of them."""
        model = executor.description.model
        self._start.call(lambda: self.followers.ready(model, pool))
        self._start.finish()
        self.followers.serve(time.monotonic())
        return RankedExecutor(executor, self.followers), RankedTransfers([transfers, *remote_transfers(self.followers)])

    @property
    def waits_for(self) -> str:
        """Which ranks the start waits for, and what is known of them, for people; empty when all are there. For any thread."""
        missing = self.followers.missing
        if not missing:
            return ""
        strangers = sum(self.mailbox.frames_refused.get(reason, 0) for reason in OTHER_KEYS)
        return describe_missing(missing, self._instance, self._address, self.followers.refused, strangers)

    # --- turns and end ----------------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Take in what the followers say, once they serve. Raises RankLost, ConfigError."""
        self._children.check()
        self.followers.turn(time.monotonic)

    def end(self) -> None:
        """Tell the followers why this process ends, wait for those on this host, and leave the group, so that no step waits for a
        rank that is gone. In this order, because a group is not left while a process of it is stopped. Idempotent."""
        error = sys.exception()
        self._start.close()
        self.followers.end("drained" if error is None else str(error), orderly=error is None)
        await_children(self._children.children, DRAINED_S if error is None else LOST_S)
        self._leaving.close()

    def close(self) -> None:
        """Also when the start has failed."""
        self.end()
        self.mailbox.close()

    # --- inside ----------------------------------------------------------------------------------------------------------------

    def _watch_start(self, now: float) -> None:
        """On the start's thread, before each of its turns."""
        self._children.check()
        if now >= self._reminder_s and (text := self.waits_for):
            self._reminder_s = now + REMIND_S
            self._process.progress(text)

    def _meet(self, device: "torch.device") -> "Group":
        from engine.parallel import TorchGroup, TorchPeerMemory, open_store

        store = open_store(self._host)
        self._start.call(lambda: self.followers.open(f"{self._host}:{store.port}"))
        self._start.wait_for(lambda: self.followers.welcomed or None)
        instance = self._instance
        memory = TorchPeerMemory() if instance.all_reduce == "auto" else None
        group = TorchGroup(store, 0, instance.tp, device, self._host, instance.startup_timeout_s, memory)
        self._leaving.callback(group.close)
        return group


def describe_missing(
    missing: Sequence[int], instance: InstanceConfig, leader: str, refused: Sequence[str] = (), strangers: int = 0
) -> str:
    """Which ranks the start waits for, how to start the first that another command starts, and who has tried. For people.

    refused: who was, and why. strangers: connections without our cluster key."""
    text = f"waiting for rank {', '.join(map(str, missing))} of {instance.tp}"
    elsewhere = [rank for rank in missing if rank not in instance.ranks]
    if elsewhere:
        text += f": start rank {elsewhere[0]} with the same command, --rank {elsewhere[0]} and --leader {leader}"
    for reason in refused[:MOST_SAID]:
        text += f"; {reason}"
    if len(refused) > MOST_SAID:
        text += f"; {len(refused) - MOST_SAID} more were refused"
    if strangers:
        text += f"; {strangers} connections were turned away: a rank may have another --cluster-key than rank 0, or none"
    return text


def describe_rank(rank: int, device: str, engine: EngineChoices = EngineChoices()) -> RankInfo:  # noqa: B008
    """This process, for people."""
    return RankInfo(rank=rank, pid=os.getpid(), host=socket.gethostname(), device=device, engine=engine)
