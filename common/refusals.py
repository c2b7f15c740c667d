"""Refusals: whether anybody still listens at an address whose connection broke.

Owns a thread that follows connections and, when one breaks, knocks at its address: it opens a TCP connection and closes it again.
A process that is gone leaves a port at which the host refuses connections. A process that is stopped or busy does not: the host
takes connections for it. A network that is cut answers nothing. So only a refusal proves that the process is gone. An answer
counts when it comes ANSWERS times in a row, because a process that ends may close its port a moment after its connections.

Does not know frames or who is at an address.
"""

import queue
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import parse_monitor_message

KNOCK_TIMEOUT_S = 0.5
ANSWERS, KNOCK_EVERY_MS = 3, 100
EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
"""What a monitor must report to be followed."""


class RefusalWatch:
    """Made by the thread of a mailbox. wake: called on the watch's thread when `take` has news. It ends with the context."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", wake: Callable[[], None]) -> None:
        self._wake = wake
        self._newcomers: queue.SimpleQueue[tuple[str, zmq.Socket[bytes]]] = queue.SimpleQueue()
        self._refused: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._up: frozenset[str] = frozenset()
        """The addresses whose connections are up. The thread replaces it."""
        self._bell, self._ringer = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._bell.bind("inproc://refusals")
        self._ringer.connect("inproc://refusals")
        threading.Thread(target=self._run, name="refusals", daemon=True).start()

    def follow(self, address: str, monitor: "zmq.Socket[bytes]") -> None:
        """monitor: of a socket that is about to connect to tcp://host:port, for EVENTS. It belongs to the watch from now on."""
        self._newcomers.put((address, monitor))
        self._ringer.send(b"", zmq.NOBLOCK)

    def reaches(self, address: str) -> bool:
        """Whether a connection to this address is up."""
        return address in self._up

    def take(self) -> list[str]:
        """The addresses at which nobody listens, each once for each time that a connection broke."""
        addresses: list[str] = []
        while not self._refused.empty():
            addresses.append(self._refused.get_nowait())
        return addresses

    def close(self) -> None:
        """Let the context end. Called by the thread that called `follow`."""
        self._ringer.close(linger=0)

    # --- the thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        followed: dict[zmq.Socket[bytes], str] = {}
        up: set[zmq.Socket[bytes]] = set()
        knocks: dict[str, _Answer] = {}
        """What was answered lately at each address whose connection broke."""
        try:
            while True:
                for ready, _ in poller.poll(KNOCK_EVERY_MS if knocks else None):
                    if ready is self._bell:
                        self._bell.recv(zmq.NOBLOCK)
                        address, monitor = self._newcomers.get_nowait()
                        followed[monitor] = address
                        poller.register(monitor, zmq.POLLIN)
                        continue
                    event = parse_monitor_message(ready.recv_multipart(zmq.NOBLOCK))["event"]
                    up.discard(ready)
                    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        up.add(ready)
                    elif event == zmq.EVENT_DISCONNECTED:
                        knocks.setdefault(followed[ready], _Answer(None))
                    else:
                        poller.unregister(ready)
                        knocks.pop(followed.pop(ready), None)
                        ready.close(linger=0)
                    self._up = frozenset(followed[each] for each in up)
                for address in list(knocks):
                    self._knock_again(address, knocks)
        except zmq.ContextTerminated:
            return
        finally:
            for each in (*followed, self._bell):
                each.close(linger=0)

    def _knock_again(self, address: str, knocks: dict[str, "_Answer"]) -> None:
        """Where nothing comes back, ask again and again: the host will answer some day."""
        somebody, last = knock(address), knocks[address]
        knocks[address] = answer = _Answer(somebody, last.times + 1 if somebody is last.somebody else 1)
        if somebody is None or answer.times < ANSWERS:
            return
        del knocks[address]
        if not somebody:
            self._refused.put(address)
            self._wake()


class _Answer(NamedTuple):
    """somebody: as of `knock`. times: in a row."""

    somebody: bool | None
    times: int = 0


def knock(address: str) -> bool | None:
    """Whether somebody listens at tcp://host:port; None when no answer comes within KNOCK_TIMEOUT_S, or no way leads there."""
    where = urlsplit(address)
    try:
        with socket.create_connection((where.hostname or "", where.port or 0), KNOCK_TIMEOUT_S) as line:
            return bool(line.getsockname() != line.getpeername())  # where nobody listens, a port may meet itself
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
