"""The ranks of a real instance, each a process: they start from one command or several, and end together, whichever ends first.

The executor is the timed one, and the test is the router. Tokens of several ranks that compute are in `tests/e2e/test_ranks.py`.
"""

import os
import queue
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping

import pytest

from common.addresses import LOOPBACK, among_ranks, free_port, host_for_peers
from common.config import EngineConfig, InstanceConfig
from common.errors import MeetingFailed
from common.ids import Incarnation
from common.instance.ranks.line import RankLost
from common.processes.child import Exited, Progress, Ready, Reported, await_children
from launch.child import BAD_FLAG, ChildProcess, RoleEvent, RoleProcess
from launch.instance_command import InstanceCommand
from launch.rank_leader import LeaderRanks, describe_missing
from launch.rank_setup import RankChildren, rank_setup
from tests.launch.one_router import HANG_S, Router
from tests.rig.forks import forked

NAME = "decode-0"
FLAGS = ("--executor=timed", "--transport=cma", "--kv-memory=16MiB", "--step-cost=0.002,0,0", "--tp=2", f"--name={NAME}")
SOON_S = 20.0
"""Three seconds of silence, two until children are killed, and what a busy machine adds. Nothing here waits for a drain."""


def instance_command(
    instance: InstanceConfig = InstanceConfig(tp=2),  # noqa: B008
    engine: EngineConfig = EngineConfig(executor="timed"),  # noqa: B008
) -> InstanceCommand:
    return InstanceCommand(role="decode", name=NAME, instance=instance, engine=engine)


def command(*flags: str) -> list[str]:
    return [sys.executable, "-P", "-m", "launch.main", "decode", *FLAGS, *flags]


class Elsewhere:
    """A rank that another command starts, as on another host."""

    def __init__(self, *flags: str) -> None:
        self.events: queue.SimpleQueue[RoleEvent] = queue.SimpleQueue()
        with forked():
            self.child = RoleProcess(f"{NAME}.rank-1", command(*flags), self.events.put)

    def end(self) -> Exited:
        while True:
            event = self.events.get(timeout=SOON_S)
            if isinstance(event, Exited):
                return event

    def close(self) -> None:
        self.child.kill()
        assert self.child.wait(HANG_S)


@pytest.fixture
def start() -> Iterator[Callable[[Router | Elsewhere], None]]:
    started: list[Router | Elsewhere] = []
    yield started.append
    for each in started:
        each.close()


Start = Callable[[Router | Elsewhere], None]


def two_commands(start: Start) -> tuple[Router, Elsewhere]:
    """An instance whose ranks were started by two commands, with a request that runs."""
    leader = f"--leader=tcp://127.0.0.1:{free_port(LOOPBACK)}"
    other = Elsewhere(leader, "--rank=1")
    start(other)
    router = Router(NAME, lambda address: command(f"--router={address}", leader, "--rank=0"))
    start(router)
    router.until_joined()
    router.generate(1_800)
    router.until_running()
    return router, other


def rank_pids(router: Router) -> list[int]:
    assert router.info is not None
    return [rank.pid for rank in router.info.ranks]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_follower_that_is_killed_ends_the_instance_and_the_router_is_told_which(start: Start) -> None:
    router, other = two_commands(start)
    assert rank_pids(router) == [router.child.pid, other.child.pid]
    other.child.kill()
    ended = router.end(SOON_S)
    assert ended.status == 1 and ended.account.startswith("rank 1 (pid ") and ended.account.endswith("is gone")
    assert [goodbye.reason for goodbye in router.goodbyes] == [ended.account]


def test_a_follower_that_is_stopped_ends_the_instance_and_itself_when_it_goes_on(start: Start) -> None:
    router, other = two_commands(start)
    other.child.signal(signal.SIGSTOP)
    ended = router.end(SOON_S)
    assert ended.status == 1 and "rank 1" in ended.account and "has been silent for 3" in ended.account
    other.child.signal(signal.SIGCONT)
    assert other.end().status == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_ends_by_itself_when_its_leader_is_gone_or_stopped(start: Start, number: signal.Signals) -> None:
    router, other = two_commands(start)
    router.child.signal(number)
    ended = other.end()
    assert ended.status == 1 and "rank 0 at tcp://127.0.0.1:" in ended.account, ended
    assert ("is gone" if number == signal.SIGKILL else "has been silent for 3") in ended.account


def test_ranks_of_one_command_drain_when_any_of_them_is_told_to_stop_and_leave_nobody_behind(start: Start) -> None:
    router = Router(NAME, lambda address: command(f"--router={address}"))
    start(router)
    router.until_joined()
    pids = rank_pids(router)
    assert len(set(pids)) == 2 and pids[0] == router.child.pid
    router.generate(300)
    router.until_running()
    os.kill(pids[1], signal.SIGTERM)
    ended = router.end(HANG_S)
    assert ended.status == 0 and sum(len(delta.token_ids) for delta in router.deltas) == 300
    assert [goodbye.reason for goodbye in router.goodbyes] == [""]
    assert all(is_gone(pid) for pid in pids)


def test_the_ranks_of_one_command_die_with_their_leader(start: Start) -> None:
    router = Router(NAME, lambda address: command(f"--router={address}"))
    start(router)
    router.until_joined()
    pids = rank_pids(router)
    os.kill(pids[0], signal.SIGKILL)
    router.until(lambda: all(is_gone(pid) for pid in pids), "both are gone", SOON_S)


def test_a_rank_that_does_not_fit_is_refused_by_name_and_the_leader_says_how_to_start_the_right_one(start: Start) -> None:
    leader = f"tcp://127.0.0.1:{free_port(LOOPBACK)}"
    router = Router(NAME, lambda address: command(f"--router={address}", f"--leader={leader}", "--rank=0"))
    start(router)
    wrong = Elsewhere(f"--leader={leader}", "--rank=1", "--page-size=32")
    start(wrong)
    ended = wrong.end()
    assert "--page-size is 32 there, and 16 on rank 0" in ended.account

    def asks() -> bool:
        said = [event.report for event in drained(router.events) if isinstance(event, Reported)]
        assert not any(isinstance(report, Ready) for report in said)
        return any(isinstance(report, Progress) and f"--rank 1 and --leader {leader}" in report.text for report in said)

    router.until(asks, "it says how", SOON_S)


def test_the_start_names_the_missing_ranks_and_tells_how_to_start_those_of_other_commands() -> None:
    leader, of_all, of_some = "tcp://h:9", InstanceConfig(tp=4), InstanceConfig(tp=4, rank="0-1", leader="tcp://h:9", host="h")
    assert describe_missing([1, 3], of_all, leader) == "waiting for rank 1, 3 of 4"
    assert describe_missing([1], of_some, leader) == "waiting for rank 1 of 4"
    how = "start rank 2 with the same command, --rank 2 and --leader tcp://h:9"
    assert describe_missing([1, 2, 3], of_some, leader) == f"waiting for rank 1, 2, 3 of 4: {how}"


def test_the_start_says_who_was_refused_and_that_a_key_may_differ() -> None:
    refused = [f"rank 1 (pid {pid} on h) was refused: --page-size" for pid in range(5)]
    text = describe_missing([1], InstanceConfig(tp=2), "tcp://h:9", refused, 7)
    assert text == "; ".join(
        [
            "waiting for rank 1 of 2",
            *refused[:3],
            "2 more were refused",
            "7 connections were turned away: a rank may have another --cluster-key than rank 0, or none",
        ]
    )


def test_a_leader_whose_port_is_taken_may_try_again(stopped: ChildProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        instance = InstanceConfig(tp=2, rank="0", leader=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(MeetingFailed, match=r"--leader: cannot listen on .* in use"):
            LeaderRanks(stopped, instance_command(instance=instance), {}, Incarnation("1"))


def differing(before: Mapping[str, object], after: Mapping[str, object]) -> set[str]:
    return {name for name in after if after[name] != before.get(name)}


def test_a_rank_on_another_kind_of_device_is_unlike_the_leader() -> None:
    setups = [rank_setup(instance_command(engine=EngineConfig(device=device))) for device in ("cpu", "cuda:1")]
    assert differing(*setups) == {"the kind of device (--device)"}


def test_a_rank_with_another_draft_model_is_unlike_the_leader() -> None:
    """It would begin, and fail or mix up answers when drafts first pay."""
    instances = InstanceConfig(), InstanceConfig(speculative_config='{"model": "demo"}')
    engine = EngineConfig(executor="torch", device="cpu")
    setups = [rank_setup(instance_command(instance=each, engine=engine)) for each in instances]
    assert differing(*setups) == {"the draft model (--speculative-config), by its fingerprint"}


def test_a_rank_of_another_release_is_unlike_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    before = rank_setup(instance_command())

    def other(library: str) -> str:
        return "9.9" if library == "tandem-serve" else before[f"the version of {library}"]

    monkeypatch.setattr("launch.rank_setup.version_of", other)
    assert differing(before, rank_setup(instance_command())) == {"the version of tandem-serve"}


@pytest.mark.parametrize(
    ("host", "leader", "reached"),
    [
        ("0.0.0.0", "tcp://127.0.0.1:9", "127.0.0.1"),
        ("10.0.0.2", "tcp://localhost:9", "127.0.0.1"),
        ("10.0.0.2", "tcp://h:9", "10.0.0.2"),
        ("0.0.0.0", "tcp://h:9", host_for_peers()),
    ],
)
def test_ranks_meet_where_they_reach_each_other(host: str, leader: str, reached: str) -> None:
    assert among_ranks(host, leader) == reached


def test_a_process_that_ends_without_its_threads_kills_the_ranks_that_it_has_started(
    stopped: ChildProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = RankChildren(stopped, NAME, {1: [sys.executable, "-c", "import time; time.sleep(1000)"]}, lambda: None)
    monkeypatch.setattr(os, "_exit", lambda status: None)
    end: Callable[[str], object] = stopped.end_now
    end("the start took too long")
    with pytest.raises(RankLost, match="rank 1 ended: killed by SIGKILL"):
        await_children(children.children, HANG_S)
        children.check()


def test_a_rank_that_drains_before_the_follower_that_has_started_it_is_not_lost(stopped: ChildProcess) -> None:
    leaves = RankChildren(stopped, NAME, {3: ["true"]}, lambda: None)
    await_children(leaves.children, HANG_S)
    leaves.check(may_leave=True)
    fails = RankChildren(stopped, NAME, {3: ["false"]}, lambda: None)
    await_children(fails.children, HANG_S)
    with pytest.raises(RankLost, match="rank 3 ended: exit status 1"):
        fails.check(may_leave=True)


@pytest.fixture
def stopped() -> ChildProcess:
    """This process, which nobody stops."""
    return ChildProcess(NAME)


def test_a_rank_whose_flags_can_never_work_ends_its_command_for_good(start: Start) -> None:
    router = Router(NAME, lambda address: command(f"--router={address}", "--context-tokens=100000000"))
    start(router)
    router.until(lambda: router.child.status is not None, "it has ended", SOON_S)
    assert router.child.status == BAD_FLAG and "--context-tokens" in router.child.account()


def drained(events: "queue.SimpleQueue[RoleEvent]") -> list[RoleEvent]:
    return [events.get_nowait() for _ in range(events.qsize())]
