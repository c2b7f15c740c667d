"""The gate of an inbox: lets in only who has the cluster key, and counts who was turned away.

Owns a thread that answers whether a key is welcome, which ZeroMQ asks (ZAP, https://rfc.zeromq.org/spec/27), and that reads what
the inbox reports about failed handshakes. Does not know frames. The thread touches no socket of the mailbox, so a flood of
strangers costs the mailbox's own thread nothing but its share of the interpreter. ZeroMQ reports nothing about a connection that
speaks another protocol or an old version of this one: it closes it, uncounted.

A stranger fails in ZeroMQ's I/O thread, at its first encrypted word, because it does not know the inbox's public key either. The
answer here decides about somebody who knows that public key, but not the cluster key.
"""

import struct
import threading
from collections.abc import Callable

import zmq
from zmq.utils import z85

from common.errors import ConfigError
from common.trust import ClusterKey

HANDSHAKE_MS = 5_000
"""How long a connection may take to show its key. Then ZeroMQ closes it."""
REPORTS = 1_000
"""Most reports that wait to be read, at each end."""

_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
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
        inbox.monitor("inproc://handshakes", _FAILURES)
        self._reports = context.socket(zmq.PAIR)
        self._reports.setsockopt(zmq.RCVHWM, REPORTS)
        self._reports.connect("inproc://handshakes")
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
        version, number, _domain, _address, _identity, mechanism, *credentials = questions.recv_multipart()
        welcome = mechanism == b"CURVE" and credentials == [self._welcome]
        status, text = (b"200", b"OK") if welcome else (b"400", b"unknown key")
        questions.send_multipart([version, number, status, text, b"", b""])

    def _read_report(self) -> None:
        event, value = _EVENT.unpack(self._reports.recv_multipart(zmq.NOBLOCK)[0])
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == _WRONG_KEY:
            self._turned_away("wrong key", "a connection has another cluster key than this process")
        elif value == _OTHER_MECHANISM:
            has = "no cluster key, and this process has one" if self._key else "a cluster key, and this process has none"
            # or "handshake", if the other end saw this first and has hung up
            self._turned_away("no key" if self._key else "needless key", f"a connection has {has}")
        else:
            self._turned_away("handshake", "a connection was closed before it had shown that it belongs to the fleet")


def _public_bytes(secret: bytes) -> bytes:
    public: bytes = z85.decode(zmq.curve_public(z85.encode(secret)))
    return public
