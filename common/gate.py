"""The gate of an inbox, and the watch over the connections of outboxes: the two threads that a mailbox may have.

Owns who is let in (only holders of the cluster key), the counts of connections that were turned away, and the proof that nobody
listens at an address any more. Does not know frames, or which process is at an address. The threads touch no socket of the
mailbox, so a flood of strangers costs the mailbox's own thread nothing but its share of the interpreter.

The gate answers whether a key is welcome, which ZeroMQ asks (ZAP, https://rfc.zeromq.org/spec/27), and reads what the inbox
reports about failed handshakes. A stranger fails in ZeroMQ's I/O thread, at its first encrypted word, because it does not know
the inbox's public key either. The gate decides about a peer that knows that public key, but not the cluster key. ZeroMQ reports
nothing about a connection that speaks another protocol or an old version of this one: it closes it, uncounted.

The watch follows connections. When one breaks, it knocks at the address: it opens a TCP connection and closes it again. A process
that is gone leaves a port at which the host refuses connections. A process that is stopped or busy does not: the host takes
connections for it. A network that is cut answers nothing. So only a refusal proves that the process is gone. An answer counts
when it comes ANSWERS times in a row, because a process that ends may close its port a moment after its connections.
"""

import logging
import queue
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from common.access import ClusterKey
from common.errors import ConfigError

_LOG_EVERY_S = 10.0

_log = logging.getLogger(__name__)


class Tally:
    """Counts by reason. Logs each reason when it first happens, and then at most every `_LOG_EVERY_S`. For any thread.

    what: how the line in the log begins, before the detail."""

    def __init__(self, what: str) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._what = what
        self._quiet_until: dict[str, float] = {}

    @property
    def counts(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)

    def add(self, reason: str, detail: str) -> None:
        with self._lock:
            self._counts[reason] += 1
            now, count = time.monotonic(), self._counts[reason]
            if now < self._quiet_until.get(reason, 0.0):
                return
            self._quiet_until[reason] = now + _LOG_EVERY_S
        _log.warning("%s %s (%s, %s so far)", self._what, detail, reason, f"{count:,}")


HANDSHAKE_MS = 5_000
"""How long a connection may take to show its key. Then ZeroMQ closes it."""
REPORTS = 1_000
"""Most reports that wait to be read, at each end."""

_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
"""What `_answer` refuses is counted there."""
_REPORTED = _FAILURES | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_EVENT = struct.Struct("=HI")
_WRONG_KEY = 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
_OTHER_MECHANISM = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_ZAP_DOMAIN = b"tandem"


class Gate:
    """Made by the mailbox's thread before the inbox is bound.

    turned_away: called on the gate's thread, with a reason and a detail, for each failed handshake.
    Raises ConfigError when a key is given and ZeroMQ was built without CURVE.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        inbox: "zmq.Socket[bytes]",
        key: ClusterKey | None,
        turned_away: Callable[[str, str], None],
    ) -> None:
        if key is not None and not zmq.has("curve"):
            raise ConfigError("--cluster-key: this ZeroMQ was built without CURVE (libsodium): install pyzmq from its wheels")
        self._key = key
        self._turned_away = turned_away
        inbox.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        inbox.monitor("inproc://handshakes", _REPORTED)
        self._reports = context.socket(zmq.PAIR)
        self._reports.setsockopt(zmq.RCVHWM, REPORTS)
        self._reports.connect("inproc://handshakes")
        self._peers: dict[int, str] = {}
        """The address of each connection's other end, by file descriptor."""
        self._failed: _Failure | None = None
        """A handshake that has failed, on the connection that ZeroMQ closes next."""
        self._questions: zmq.Socket[bytes] | None = None
        self._welcome = b""
        if key is not None:
            self._welcome = _public_bytes(key.sender)
            self._questions = context.socket(zmq.REP)
            self._questions.bind("inproc://zeromq.zap.01")
            inbox.setsockopt(zmq.CURVE_SERVER, 1)
            inbox.setsockopt(zmq.CURVE_SECRETKEY, key.inbox)
            inbox.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
            inbox.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody is let in while nobody answers
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)

    def open(self) -> None:
        """Start the thread. It ends when the context is terminated."""
        self._thread.start()

    def dress(self, outbox: "zmq.Socket[bytes]") -> None:
        """Give a socket that is about to connect the sender's key, and the key that its peer must have."""
        if self._key is None:
            return
        outbox.setsockopt(zmq.CURVE_SERVERKEY, _public_bytes(self._key.inbox))
        outbox.setsockopt(zmq.CURVE_PUBLICKEY, self._welcome)
        outbox.setsockopt(zmq.CURVE_SECRETKEY, self._key.sender)

    def _run(self) -> None:
        sockets = [self._reports] if self._questions is None else [self._reports, self._questions]
        poller = zmq.Poller()
        for each in sockets:
            poller.register(each, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._questions is not None and self._questions in ready:
                    self._answer(self._questions)
                if self._reports in ready:
                    self._read_report()
        except zmq.ContextTerminated:
            return
        finally:
            for each in sockets:
                each.close(linger=0)

    def _answer(self, questions: "zmq.Socket[bytes]") -> None:
        version, number, _domain, address, _identity, mechanism, *credentials = questions.recv_multipart()
        welcome = mechanism == b"CURVE" and credentials == [self._welcome]
        if not welcome:
            self._turned_away("wrong key", f"{address.decode(errors='replace')}: {_OTHER_KEY}")
        status, text = (b"200", b"OK") if welcome else (b"400", b"unknown key")
        questions.send_multipart([version, number, status, text, b"", b""])

    def _read_report(self) -> None:
        """ZeroMQ closes a connection right after it has reported that its handshake failed, and only then says which it was.
        Reports may be missing, beyond REPORTS: a failure is counted all the same."""
        event, value = _EVENT.unpack(self._reports.recv_multipart(zmq.NOBLOCK)[0])
        failed, self._failed = self._failed, None
        peer = self._peers.pop(value, _UNKNOWN) if event == zmq.EVENT_DISCONNECTED else _UNKNOWN
        if failed is not None:
            self._turned_away(failed.reason, f"{peer}: {failed.detail}")
        if event == zmq.EVENT_ACCEPTED:
            self._peers[value] = _other_end(value)
        elif event & _FAILURES:
            self._failed = self._failure(value)

    def _failure(self, error: int) -> "_Failure":
        if error == _WRONG_KEY:
            return _Failure("wrong key", _OTHER_KEY)
        if error == _OTHER_MECHANISM:  # or "handshake", if the other end saw this first and has hung up
            if self._key is None:
                return _Failure("needless key", "it has a cluster key, and this process has none")
            return _Failure("no key", "it has no cluster key, and this process has one")
        return _Failure("handshake", "the connection was closed before it had shown that it belongs to the fleet")


_OTHER_KEY = "its cluster key differs from ours"
_UNKNOWN = "an unknown address"


class _Failure(NamedTuple):
    """Why a handshake failed."""

    reason: str
    detail: str


def _other_end(descriptor: int) -> str:
    """The address of a connection that ZeroMQ has accepted. It may be closed by now."""
    try:
        line = socket.socket(fileno=descriptor)
    except OSError:
        return _UNKNOWN
    try:
        return str(line.getpeername()[0])
    except (OSError, IndexError):
        return _UNKNOWN
    finally:
        line.detach()  # it is ZeroMQ's


def _public_bytes(secret: bytes) -> bytes:
    public: bytes = z85.decode(zmq.curve_public(z85.encode(secret)))
    return public


KNOCK_TIMEOUT_S = 0.5
ANSWERS, KNOCK_EVERY_MS = 3, 100
EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
"""What a monitor must report to be followed."""


class ConnectionWatch:
    """Made by the thread of a mailbox. wake: called on the watch's thread when `take` has news. It ends with the context."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", wake: Callable[[], None]) -> None:
        self._wake = wake
        self._newcomers: queue.SimpleQueue[tuple[zmq.Socket[bytes], _Followed]] = queue.SimpleQueue()
        self._lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._up: frozenset[str] = frozenset()
        """The addresses whose connections are up. The thread replaces it."""
        self._bell, self._ringer = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        for end in (self._bell, self._ringer):
            end.set_hwm(0)  # one ring for each connection, however many are made at once
        self._bell.bind("inproc://refusals")
        self._ringer.connect("inproc://refusals")
        threading.Thread(target=self._run, name="refusals", daemon=True).start()

    def follow(self, address: str, monitor: "zmq.Socket[bytes]", knocks: bool) -> None:
        """monitor: of a socket that is about to connect to tcp://host:port, for EVENTS. It belongs to the watch from now on.
        knocks: when the connection breaks, `take` has its address only if nobody listens there any more."""
        self._newcomers.put((monitor, _Followed(address, knocks)))
        self._ringer.send(b"", zmq.NOBLOCK)

    def reaches(self, address: str) -> bool:
        """Whether a connection to this address is up."""
        return address in self._up

    def take(self) -> list[str]:
        """The addresses whose connection broke, each once for each time that it did."""
        addresses: list[str] = []
        while not self._lost.empty():
            addresses.append(self._lost.get_nowait())
        return addresses

    def close(self) -> None:
        """Let the context end. Called by the thread that called `follow`."""
        self._ringer.close(linger=0)

    # --- the thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        followed: dict[zmq.Socket[bytes], _Followed] = {}
        up: set[zmq.Socket[bytes]] = set()
        knocks: dict[str, _Verdict] = {}
        """What was answered lately at each address whose connection broke."""
        try:
            while True:
                for ready, _ in poller.poll(KNOCK_EVERY_MS if knocks else None):
                    if ready is self._bell:
                        self._bell.recv(zmq.NOBLOCK)
                        monitor, newcomer = self._newcomers.get_nowait()
                        followed[monitor] = newcomer
                        poller.register(monitor, zmq.POLLIN)
                        continue
                    event = parse_monitor_message(ready.recv_multipart(zmq.NOBLOCK))["event"]
                    up.discard(ready)
                    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        up.add(ready)
                    elif event == zmq.EVENT_DISCONNECTED:
                        if followed[ready].knocks:
                            knocks.setdefault(followed[ready].address, _Verdict(None))
                        else:
                            self._lose(followed[ready].address)
                    else:
                        poller.unregister(ready)
                        knocks.pop(followed.pop(ready).address, None)
                        ready.close(linger=0)
                    self._up = frozenset(followed[each].address for each in up)
                for address in list(knocks):
                    self._knock_again(address, knocks)
        except zmq.ContextTerminated:
            return
        finally:
            while not self._newcomers.empty():
                monitor, newcomer = self._newcomers.get_nowait()
                followed[monitor] = newcomer
            for each in (*followed, self._bell):
                each.close(linger=0)

    def _knock_again(self, address: str, knocks: dict[str, "_Verdict"]) -> None:
        """Where nothing comes back, ask again and again: the host will answer some day."""
        somebody, last = knock(address), knocks[address]
        knocks[address] = answer = _Verdict(somebody, last.times + 1 if somebody is last.somebody else 1)
        if somebody is None or answer.times < ANSWERS:
            return
        del knocks[address]
        if not somebody:
            self._lose(address)

    def _lose(self, address: str) -> None:
        self._lost.put(address)
        self._wake()


class _Followed(NamedTuple):
    """A connection that is followed."""

    address: str
    knocks: bool


class _Verdict(NamedTuple):
    """The latest answer of `knock`, and how often in a row it came."""

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
