"""The protocol between a child process and its parent, with stub children."""

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.processes import child as child_processes
from common.processes.child import Broken, Exited, Progress, Ready, Reported, stop_children
from launch.child import BAD_FLAG, MeetRouter, RoleEvent, RoleProcess
from tests.launch.stub import stub_command
from tests.launch.waiting import PATIENCE_S, is_alive, wait_for
from tests.rig.forks import forked


class Nursery:
    """Starts stubs; `next_event` is of the one that was started last."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[RoleEvent] = queue.SimpleQueue()
        self.children: list[RoleProcess] = []

    def start(self, name: str = "decode-0", **environment: str) -> RoleProcess:
        self.events = queue.SimpleQueue()
        child = RoleProcess(name, stub_command("decode", [f"--name={name}"]), self.events.put, environment)
        self.children.append(child)
        return child

    def next_event(self) -> RoleEvent:
        return self.events.get(timeout=PATIENCE_S)

    def start_ready(self, name: str = "decode-0", **environment: str) -> RoleProcess:
        child = self.start(name, **environment)
        while not (isinstance(event := self.next_event(), Reported) and isinstance(event.report, Ready)):
            assert isinstance(event, Reported), child.account()
        return child


@pytest.fixture
def nursery(log: Path) -> Iterator[Nursery]:
    made = Nursery()
    with forked():
        yield made
    for child in made.children:
        child.kill()
        assert child.wait(PATIENCE_S)


def test_a_child_reports_stops_when_asked_and_its_exit_is_the_last_event(nursery: Nursery, log: Path) -> None:
    child = nursery.start()
    assert nursery.next_event() == Reported("decode-0", Progress(text="warming up"))
    assert nursery.next_event() == Reported("decode-0", Ready(addresses={"inbox": "tcp://127.0.0.1:1"}))
    assert stop_children([child], PATIENCE_S) == []
    assert nursery.next_event() == Exited("decode-0", 0, "exit status 0")
    assert child.status == 0 and log.read_text().endswith("decode-0 stopped\n")


def test_orders_reach_the_child_also_those_given_before_it_listens(nursery: Nursery, log: Path) -> None:
    child = nursery.start()
    child.order(MeetRouter(address="tcp://127.0.0.1:3"))
    wait_for(lambda: "decode-0 order MeetRouter" in log.read_text(), "the early order was obeyed")
    child.order(MeetRouter(address="tcp://127.0.0.1:4"))
    wait_for(lambda: log.read_text().count("decode-0 order MeetRouter") == 2, "the later order was obeyed")


def test_a_child_that_ends_while_starting_is_accounted_for_with_its_last_lines(nursery: Nursery) -> None:
    child = nursery.start(STUB_DECODE_0="broken")
    assert child.wait(PATIENCE_S)
    account = child.account()
    assert child.status == 3
    assert "exit status 3" in account and "decode-0 has no water" in account and "warming up" in account


def test_an_error_of_the_body_is_reported_as_the_reason(nursery: Nursery) -> None:
    child = nursery.start(STUB_LOG="/nowhere/at/all")
    events = [nursery.next_event(), nursery.next_event(), nursery.next_event()]
    assert isinstance(events[1], Reported) and isinstance(events[1].report, Broken)
    assert "/nowhere/at/all" in events[1].report.reason
    assert events[2] == Exited("decode-0", 1, child.account())
    assert child.account().startswith("FileNotFoundError")


def test_a_child_told_to_stop_while_it_starts_ends_without_error(nursery: Nursery) -> None:
    child = nursery.start(STUB_DECODE_0="slow")
    nursery.next_event()
    child.terminate()
    assert child.wait(PATIENCE_S) and child.status == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_child_at_once_and_it_says_goodbye(nursery: Nursery, log: Path, number: signal.Signals) -> None:
    child = nursery.start_ready(STUB_DECODE_0="busy")
    child.terminate()
    wait_for(lambda: "decode-0 has work to finish" in log.read_text(), "the first signal was heard")
    assert not child.wait(0.3), "the first signal leaves it all the time it needs"
    os.kill(child.pid, number)
    assert child.wait(PATIENCE_S), "the second ends it at once, not after its work"
    assert child.status == 1 and child.account() == f"told again to stop, by {number.name}"
    assert log.read_text().endswith("decode-0 says goodbye\n")


def test_a_child_that_cannot_even_say_goodbye_is_gone_soon_after_the_second_signal(nursery: Nursery, log: Path) -> None:
    child = nursery.start_ready(STUB_DECODE_0="stubborn")
    child.terminate()
    wait_for(lambda: "will not stop" in log.read_text(), "the first signal was heard")
    child.terminate()
    assert child.wait(PATIENCE_S) and child.status == 1
    assert child.account() == "told again to stop, by SIGTERM"


def test_a_child_that_does_not_stop_is_killed_at_the_deadline(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that reaches the deadline as soon as the willing child has stopped."""
    stubborn = nursery.start_ready("decode-0", STUB_DECODE_0="stubborn")
    willing = nursery.start_ready("decode-1")
    clock = SimpleNamespace(monotonic=iter([0.0, 0.0, PATIENCE_S]).__next__)
    monkeypatch.setattr(child_processes, "time", clock)
    assert stop_children([willing, stubborn], PATIENCE_S) == ["decode-0"]
    assert stubborn.wait(PATIENCE_S)
    assert stubborn.status == -signal.SIGKILL and willing.status == 0
    assert "SIGKILL" in stubborn.account()


def test_what_is_left_of_a_childs_process_group_is_killed(nursery: Nursery, log: Path) -> None:
    child = nursery.start_ready(STUB_DECODE_0="parent")
    left = int(log.read_text().split("decode-0 left ")[1].split()[0])
    assert is_alive(left)
    stop_children([child], PATIENCE_S)
    wait_for(lambda: not is_alive(left), "the process left behind is gone")


def test_a_line_that_is_no_report_is_dropped(nursery: Nursery) -> None:
    child = nursery.start_ready(STUB_DECODE_0="babbler")
    assert stop_children([child], PATIENCE_S) == [] and child.status == 0


def test_nothing_happens_to_a_child_that_has_ended(nursery: Nursery) -> None:
    child = nursery.start_ready()
    stop_children([child], PATIENCE_S)
    child.order(MeetRouter(address="tcp://127.0.0.1:3"))
    child.terminate()
    child.kill()
    assert stop_children([child], PATIENCE_S) == [] and child.status == 0


def test_no_file_descriptor_is_left(nursery: Nursery) -> None:
    stop_children([nursery.start_ready()], PATIENCE_S)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        stop_children([nursery.start_ready()], PATIENCE_S)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("", "decode-0 stopped\n"),
        ("busy", "decode-0 has work to finish\ndecode-0 says goodbye\n"),
    ],
    ids=["stops in order", "has limited time to finish its work"],
)
def test_a_child_whose_parent_was_killed(log: Path, monkeypatch: pytest.MonkeyPatch, how: str, said: str) -> None:
    if how:
        monkeypatch.setenv("STUB_DECODE_0", how)
        monkeypatch.setenv("STUB_ORPHAN_S", "0.5")
    command = [sys.executable, "-m", "tests.launch.stub", "parent"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as parent:
        wait_for(lambda: "decode-0 runs as " in log.read_text(), "the child runs")
        child = int(log.read_text().split("decode-0 runs as ")[1].split()[0])
        parent.kill()
    wait_for(lambda: not is_alive(child), "the child is gone")
    assert log.read_text().endswith(said)


def test_a_child_that_finds_too_little_memory_may_be_started_again_but_not_one_that_cannot_use_its_flags() -> None:
    lines = (
        "from common import errors",
        "from launch.child import run_child",
        "def body(_): raise errors.{}('x')",
        "exit(run_child('x', body))",
    )
    code = "\n".join(lines)
    ends = {name: subprocess.run([sys.executable, "-c", code.format(name)]).returncode for name in ("MemoryShort", "ConfigError")}
    assert ends == {"MemoryShort": 1, "ConfigError": BAD_FLAG}
