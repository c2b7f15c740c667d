"""Who notices that a process is gone: a mailbox whose correspondent was killed, stopped, or cut off. Over real sockets."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from common.gate import ANSWERS, KNOCK_EVERY_MS, KNOCK_TIMEOUT_S, knock
from common.ids import InstanceId
from tests.common.mailboxes import Make

ROUTER_THERE = InstanceId("router@there")
LIFE = InstanceId("router-1")
SERVER = """
import os, signal, socket, sys
door = socket.create_server(("127.0.0.1", 0))
print(door.getsockname()[1], flush=True)
first, _ = door.accept()
if sys.argv[1] == "stops":
    first.close()
    os.kill(os.getpid(), signal.SIGSTOP)
signal.pause()
"""
WHILE_S = ANSWERS * KNOCK_EVERY_MS / 1_000 + KNOCK_TIMEOUT_S
"""Long enough for a refusal to be found."""
PATIENCE_S = 20.0


@contextmanager
def server(how: str) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    process = subprocess.Popen([sys.executable, "-I", "-c", SERVER, how], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as output:
        try:
            yield process, f"tcp://127.0.0.1:{int(output.readline())}"
        finally:
            process.kill()
            process.wait()


def stops(process: "subprocess.Popen[bytes]") -> None:
    """Wait until it has stopped itself."""
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def test_a_process_that_was_killed_is_reported_once_under_every_name_of_its_address(make: Make) -> None:
    mailbox = make()
    with server("lives") as (process, address):
        mailbox.route(ROUTER_THERE, address, watch=True)
        mailbox.route(LIFE, address)
        mailbox.wait(0.3)  # it connects
        assert mailbox.refused() == []
        process.send_signal(signal.SIGKILL)
        mailbox.wait(PATIENCE_S)  # the watch wakes us
    assert sorted(mailbox.refused()) == [LIFE, ROUTER_THERE]
    assert mailbox.refused() == []


def test_a_stopped_process_is_not_taken_for_gone_though_its_connection_broke(make: Make) -> None:
    mailbox = make()
    with server("stops") as (process, address):
        mailbox.route(ROUTER_THERE, address, watch=True)
        stops(process)
        time.sleep(WHILE_S)
        assert mailbox.refused() == []
        assert knock(address), "the host takes connections for it"
        process.send_signal(signal.SIGKILL)
        mailbox.wait(PATIENCE_S)
    assert mailbox.refused() == [ROUTER_THERE]


def test_a_host_that_answers_nothing_is_not_taken_for_gone_until_it_refuses(make: Make) -> None:
    mailbox = make()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as door:
        address = f"tcp://127.0.0.1:{door.getsockname()[1]}"
        mailbox.route(ROUTER_THERE, address, watch=True)
        first, _ = door.accept()
        crowd = [socket.socket() for _ in range(3)]  # they fill the line of those who wait: others get no answer
        for each in crowd:
            each.setblocking(False)
            each.connect_ex(door.getsockname())
        assert knock(address) is None
        first.close()
        time.sleep(2 * KNOCK_TIMEOUT_S)
        assert mailbox.refused() == []
        for each in crowd:
            each.close()
    mailbox.wait(PATIENCE_S)
    assert mailbox.refused() == [ROUTER_THERE]


def test_a_correspondent_that_is_forgotten_is_not_reported(make: Make) -> None:
    mailbox = make()
    with server("lives") as (process, address):
        mailbox.route(ROUTER_THERE, address, watch=True)
        mailbox.wait(0.3)
        mailbox.route(ROUTER_THERE, None)
        process.send_signal(signal.SIGKILL)
        process.wait()
        mailbox.wait(WHILE_S)
    assert mailbox.refused() == []


def test_a_correspondent_is_reached_from_the_first_handshake_until_it_closes(make: Make) -> None:
    mailbox, there = make(), make()

    def comes(reached: bool) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while mailbox.reaches(ROUTER_THERE) != reached and time.monotonic() < deadline:
            time.sleep(0.01)
        return mailbox.reaches(ROUTER_THERE) == reached

    assert not mailbox.reaches(ROUTER_THERE)
    mailbox.route(ROUTER_THERE, there.address, watch=True)
    assert comes(True)
    there.close()
    assert comes(False)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://localhost:1"])
def test_a_port_at_which_nobody_listens_refuses(address: str) -> None:
    assert knock(address) is False
