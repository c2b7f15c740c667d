"""A child that misbehaves: it can always be ended, its end is always told, and nothing of it is left."""

import os
import queue
import subprocess
import sys
import threading
from typing import TypeAlias

import msgspec
import pytest

from common.processes.child import REPORT_FD, Child, ChildEvent, Exited, JsonLine, Progress, with_our_code
from tests.launch.waiting import PATIENCE_S, is_alive, wait_for

PIPE_BYTES = 64 * 1024

Events: TypeAlias = "queue.SimpleQueue[ChildEvent[Progress]]"


class Say(JsonLine, frozen=True):
    """An order."""

    text: str


def started(code: str, events: Events, environment: dict[str, str] | None = None) -> Child[Progress]:
    """A child that runs this code."""
    decoder = msgspec.json.Decoder(Progress)
    return Child("child", [sys.executable, "-c", code], decoder, events.put, lambda line: None, environment)


def test_a_child_that_reads_no_orders_can_be_killed_while_an_order_is_written() -> None:
    events: Events = queue.SimpleQueue()
    child = started("import time; time.sleep(1000)", events)
    order = threading.Thread(target=child.order, args=(Say(text="x" * 16 * PIPE_BYTES),), daemon=True)
    order.start()
    order.join(0.1)  # it now waits for the child to read
    assert order.is_alive()
    killed = threading.Thread(target=child.kill, daemon=True)
    killed.start()
    assert child.wait(PATIENCE_S) and child.status == -9
    order.join(PATIENCE_S)
    assert not order.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a stopped child with its parent")
def test_a_stopped_child_is_killed_with_its_parent_where_that_is_asked_for() -> None:
    child = "import os; from common.processes.child import Parent; Parent(None); os.kill(os.getpid(), 19)"
    parent = f"""if True:
        import os, sys, msgspec
        from common.processes.child import Child
        command = [sys.executable, "-c", "{child}"]
        child = Child("child", command, msgspec.json.Decoder(), print, print, killed_with_us=True)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        os.write(1, str(child.pid).encode())
        os.kill(os.getpid(), 9)"""
    environment = with_our_code({**os.environ})
    ended = subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, env=environment, timeout=PATIENCE_S)
    assert ended.returncode == -9
    wait_for(lambda: not is_alive(int(ended.stdout)), "the child is gone")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (f"import os; os.write(int(os.environ['{REPORT_FD}']), b'{{\"a\":' + b'[' * 100000 + b']' * 100000 + b'}}\\n')", 0),
        ("import os; os.kill(os.getpid(), 40)", -40),
    ],
    ids=["after a line nested too deeply to be read", "by a real-time signal, which has no name"],
)
def test_the_end_of_a_child_is_told(code: str, status: int) -> None:
    events: Events = queue.SimpleQueue()
    child = started(code, events)
    assert child.wait(PATIENCE_S)
    last = events.get_nowait()
    assert isinstance(last, Exited) and last.status == status
    assert status == 0 or "signal 40" in last.account


def test_a_child_that_cannot_be_started_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="null byte"):
        started("", queue.SimpleQueue(), {"NAME": "a\0b"})
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_report_longer_than_a_pipe_arrives_whole() -> None:
    events: Events = queue.SimpleQueue()
    line = f"json.dumps({{'type': 'Progress', 'text': 'x' * {3 * PIPE_BYTES}}}) + chr(10)"
    code = f"import json, os; f = os.fdopen(int(os.environ['{REPORT_FD}']), 'w'); f.write({line}); f.close()"
    child = started(code, events)
    assert child.wait(PATIENCE_S)
    assert child.last_report == Progress(text="x" * 3 * PIPE_BYTES)
