"""Mail: one inbox and many outboxes over ZeroMQ, carrying msgspec messages in a versioned envelope.

Owns sockets, the envelope, and the counts of what was refused or lost. Does not know what a message means, whom to answer, or
when to give up: somebody's deadline brings a lost message to light.

A frame is one ZeroMQ message of one part, numbers in network order:

    | magic 4 | wire version 2 | sender length 1 | sender, UTF-8 | body, msgpack |

Nothing that arrives can raise an error: a frame that is not a message of this inbox is dropped, counted by reason and logged now
and then.
"""

import asyncio
import errno
import logging
import math
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from common.access import LOOPBACK_ONLY, Trust
from common.addresses import check_address
from common.errors import AddressTaken, ConfigError, TandemError, WireError
from common.gate import EVENTS, ConnectionWatch, Gate, Tally
from common.ids import InstanceId
from common.messages import OLDEST, WIRE_VERSION, AnyMessage, since

M = TypeVar("M")

MAGIC = b"TNDM"
_HEADER = struct.Struct("!4sHB")
MAX_FRAME_BYTES = 64 * 2**20
MAX_SENDER_BYTES = 255
SEND_LIMIT = 10_000
"""Most messages that wait for one peer; more are lost and counted."""
RECEIVE_LIMIT = 4_096
"""Most frames that one `receive` reads; the rest stays for the next."""

MOST_SOCKETS = 32_768
"""Each address that is routed takes three, and ZeroMQ's own limit of 1,023 would end a fleet at 340 instances."""

_LINGER_MS = 500
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 1_000
_PING_MS, _PEER_SILENT_MS = 5_000, 120_000
"""A connection is cut when the other side answers no ping for two minutes, since a cut loses what is in flight. A process that is
only stopped costs nothing but time until then. Nobody needs the cut to notice a death: a process that ends closes its
connections, and of a dead host the router's deadlines tell, after which its outbox is closed. Until that, at most SEND_LIMIT
messages wait. Only a router's host that dies and comes back may be found again so much later."""
_LONGEST_WAIT_S = 3_600.0

_log = logging.getLogger(__name__)


class FrameRefused(WireError):
    """A frame to drop and to count under `reason`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def pack_frame(sender: InstanceId, body: bytes, version: int = WIRE_VERSION) -> bytes:
    """Raises WireError when the sender's name is too short or too long."""
    name = sender.encode()
    if not 1 <= len(name) <= MAX_SENDER_BYTES:
        raise WireError(f"an instance id must have 1 to {MAX_SENDER_BYTES} bytes; it is {sender!r}")
    return _HEADER.pack(MAGIC, version, len(name)) + name + body


def unpack_frame(frame: bytes) -> tuple[InstanceId, memoryview, int]:
    """Sender, body and wire version of a frame. Raises FrameRefused."""
    if len(frame) < _HEADER.size or not frame.startswith(MAGIC):
        raise FrameRefused("magic", "it does not begin like a frame")
    _, version, name_bytes = _HEADER.unpack_from(frame)
    if abs(version - WIRE_VERSION) > 1:
        raise FrameRefused(
            "wire version", f"it has wire version {version}, and ours is {WIRE_VERSION}: only neighbouring versions work together"
        )
    end = _HEADER.size + name_bytes
    if name_bytes == 0 or end > len(frame):
        raise FrameRefused("sender", "it names no sender")
    try:
        sender = frame[_HEADER.size : end].decode()
    except UnicodeDecodeError as error:
        raise FrameRefused("sender", f"its sender is not UTF-8: {error.reason}") from error
    return InstanceId(sender), memoryview(frame)[end:], version


def decode_body(decoder: msgspec.msgpack.Decoder[M], sender: InstanceId, body: bytes | memoryview) -> M:
    """Raises FrameRefused."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TandemError) as error:
        raise FrameRefused("body", f"from {sender!r}: {error}") from error


@dataclass(frozen=True, eq=False)
class _Attachment:
    loop: asyncio.AbstractEventLoop
    on_broken: Callable[[InstanceId], None] | None


@dataclass(slots=True, eq=False)
class _Outbox:
    """The one connection to an address, whatever we call who is there."""

    address: str
    socket: "zmq.Socket[bytes]"
    is_watched: bool
    """The connection watch has its monitor."""
    names: set[InstanceId] = field(default_factory=set)
    version: int = OLDEST
    """The wire version of the latest frame from there."""


class Mailbox(Generic[M]):
    """The inbox of one process, and its outboxes. Implements `common.instance.ports.Mail`.

    me: the sender in every frame. inbox: the union M of what may arrive. bind: tcp://host:port; port 0 picks a free one.
    trust: who is let in, and which addresses are allowed. Raises ConfigError when the address cannot be bound, AddressTaken among
    them, or is not allowed.
    Call everything but `wake` from one thread.
    """

    def __init__(
        self,
        me: InstanceId,
        inbox: Any,
        bind: str,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        trust: Trust = LOOPBACK_ONLY,
    ) -> None:
        self._trust = trust
        trust.check(check_address(bind))
        self._prefix = pack_frame(me, b"")
        self._max_frame_bytes = max_frame_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._latest: AnyMessage | None = None
        """The message that was sent last, and its frame: the same object often goes to many."""
        self._latest_frame = b""
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(inbox)
        self._refused = Tally("rejected")
        self._lost = Tally("a message was not sent:")
        self._outboxes: dict[InstanceId, _Outbox] = {}
        """By name; those with the same address are the same."""
        self._at: dict[str, _Outbox] = {}
        self._watch: ConnectionWatch | None = None
        self._attached: _Attachment | None = None
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MOST_SOCKETS)
        self._inbox = self._new_socket(zmq.PULL)
        try:
            self._gate = Gate(self._context, self._inbox, trust.key, self._refused.add)
            self._inbox.bind(bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            kind = AddressTaken if error.errno == errno.EADDRINUSE else ConfigError
            raise kind(f"cannot listen on {bind}: {error.strerror}") from error
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._gate.open()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._woken.fileno(), zmq.POLLIN)
        self._others: list[Mailbox[Any]] = []
        """Those whose mail ends our waits."""
        self.address: str = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where this inbox listens, with the real port."""

    @property
    def frames_refused(self) -> Mapping[str, int]:
        """Frames that arrived and were dropped, and connections that were turned away; a count by reason."""
        return self._refused.counts

    @property
    def messages_lost(self) -> Mapping[str, int]:
        """Messages that `send` could not hand to ZeroMQ; a count by reason."""
        return self._lost.counts

    # --- sending -------------------------------------------------------------------------------------------------------

    def route(self, to: InstanceId, address: str | None, *, watch: bool = False) -> None:
        """Set the address of a correspondent, or forget it (None). Messages that wait for a former address are dropped.

        watch: `refused` tells when nobody listens there any more, and `reaches` whether the connection is up. Names with the same
        address share one connection.
        """
        known = self._outboxes.get(to)
        if known is not None:
            if known.address == address:
                return
            del self._outboxes[to]
            known.names.remove(to)
            if not known.names:
                del self._at[known.address]
                self._close_outbox(known, linger_ms=_LINGER_MS if address is None else 0)
        if address is None:
            return
        try:
            outbox = self._at.get(address) or self._connect(address, watch)
        except (ConfigError, zmq.ZMQError) as error:
            self._lost.add("bad address", f"{to} cannot be reached at {address!r}: {error}")
            return
        outbox.names.add(to)
        self._outboxes[to] = self._at[address] = outbox

    def reaches(self, to: InstanceId) -> bool:
        """Whether the connection to a correspondent that is watched is up: he has been heard of, and it has not broken since."""
        outbox = self._outboxes.get(to)
        return outbox is not None and self._watch is not None and self._watch.reaches(outbox.address)

    def refused(self) -> list[InstanceId]:
        """Correspondents whose connection broke, and at whose address nobody listens any more; each break is reported once."""
        if self._watch is None:
            return []
        return [name for address in self._watch.take() if address in self._at for name in self._at[address].names]

    def send(self, to: InstanceId, message: AnyMessage) -> None:
        """Put a message in the outbox of `to`. Never blocks; `messages_lost` counts what cannot be put there, or what the release
        there does not know. The same object sent to many in a row is encoded once."""
        outbox = self._outboxes.get(to)
        if outbox is None:
            self._lost.add("no route", f"the address of {to} is not known")
            return
        if since(message) > outbox.version:
            what = f"{type(message).__name__} to {to} came with wire version {since(message)}"
            self._lost.add("too new", f"{what}, and the latest frame from there had {outbox.version}")
            return
        if message is not self._latest:
            self._latest, self._latest_frame = message, self._prefix + self._encoder.encode(message)
        frame = self._latest_frame
        if len(frame) > self._max_frame_bytes:
            self._lost.add(
                "too large", f"{type(message).__name__} to {to} has {len(frame)} bytes, more than {self._max_frame_bytes}"
            )
            return
        try:
            outbox.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._lost.add(
                "full", f"{SEND_LIMIT} messages already wait for {to}, or it refuses our cluster key or the lack of one"
            )

    # --- receiving -----------------------------------------------------------------------------------------------------

    def receive(self, most: int = RECEIVE_LIMIT) -> list[tuple[InstanceId, M]]:
        """Returns what has arrived, in order, each message with its sender: at most `most` messages, from at most RECEIVE_LIMIT
        frames."""
        mail: list[tuple[InstanceId, M]] = []
        for _ in range(RECEIVE_LIMIT):
            if len(mail) >= most:
                break
            try:
                frame = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                if self._inbox.getsockopt(zmq.RCVMORE):
                    while self._inbox.getsockopt(zmq.RCVMORE):
                        self._inbox.recv(zmq.NOBLOCK)
                    raise FrameRefused("parts", "it has more than one part")
                sender, body, version = unpack_frame(frame)
                if sender in self._outboxes:
                    self._outboxes[sender].version = version
                mail.append((sender, decode_body(self._decoder, sender, body)))
            except FrameRefused as error:
                self._refused.add(error.reason, f"a frame: {error}")
        return mail

    def wait(self, timeout_s: float) -> None:
        """Block until mail is there, `wake` is called, or the time is over."""
        timeout_ms = math.ceil(1_000 * min(max(timeout_s, 0.0), _LONGEST_WAIT_S))
        ready = dict(self._poller.poll(timeout_ms))
        for mailbox in (self, *self._others):
            if mailbox._woken.fileno() in ready:
                mailbox._sleep_again()

    def wait_for_mail_of(self, other: "Mailbox[Any]") -> None:
        """From now on, `wait` ends for the other mailbox's reasons too. One thread owns both."""
        self._others.append(other)
        self._poller.register(other._inbox, zmq.POLLIN)
        self._poller.register(other._woken.fileno(), zmq.POLLIN)

    def wake(self) -> None:
        """End the current or the next `wait`. Any thread may call it, any number of times, even after `close`."""
        try:
            self._waker.send(b"\0")
        except BlockingIOError:
            return  # the pipe is full, so the wait will end
        except OSError:
            if not self._closed:
                raise

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_mail: Callable[[], None],
        on_broken: Callable[[InstanceId], None] | None = None,
    ) -> None:
        """Call `on_mail` on the loop whenever mail is there or `wake` was called; it must call `receive`.

        on_broken: called with the name of a correspondent that closed its connection, for example because its process ended. It
        works for correspondents that are routed from now on. Nothing reports when the connection is back.

        ZMQ_FD becomes readable once per change of state and does not stay so while mail is there. So `check` runs again after
        every `on_mail`, as long as mail is left.
        """
        if self._attached is not None:
            raise RuntimeError("a mailbox is attached to one loop at a time")

        def check() -> None:
            if self._attached is not here or not self._has_mail():
                return
            loop.call_soon(check)  # before on_mail, which may raise
            on_mail()

        def woken() -> None:
            self._sleep_again()
            loop.call_soon(check)
            if on_broken is not None:
                for name in self.refused():
                    on_broken(name)
            on_mail()

        here = self._attached = _Attachment(loop, on_broken)
        loop.add_reader(self._inbox.fileno(), check)
        loop.add_reader(self._woken.fileno(), woken)
        loop.call_soon(check)  # for mail that came before

    def detach(self) -> None:
        """Undo `attach`. Call it on the loop's thread. Idempotent."""
        if self._attached is None:
            return
        loop, self._attached = self._attached.loop, None
        if not loop.is_closed():
            loop.remove_reader(self._inbox.fileno())
            loop.remove_reader(self._woken.fileno())

    def close(self) -> None:
        """Close every socket. Messages that were sent may still leave for half a second. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.detach()
        for outbox in self._at.values():
            self._close_outbox(outbox, linger_ms=_LINGER_MS)
        self._outboxes.clear()
        self._at.clear()
        if self._watch is not None:
            self._watch.close()
        self._inbox.close(linger=0)
        self._context.term()
        self._woken.close()
        self._waker.close()

    # --- inside --------------------------------------------------------------------------------------------------------

    def _connect(self, address: str, watch: bool) -> _Outbox:
        """Raises ConfigError, zmq.ZMQError."""
        self._trust.check(check_address(address))
        made = self._new_socket(zmq.PUSH)
        self._gate.dress(made)
        reports_breaks = self._attached is not None and self._attached.on_broken is not None
        if watch or reports_breaks:
            self._watch = self._watch or ConnectionWatch(self._context, self.wake)
            self._watch.follow(address, made.get_monitor_socket(EVENTS), knocks=not reports_breaks)
        made.connect(address)
        return _Outbox(address, made, watch or reports_breaks)

    def _close_outbox(self, outbox: _Outbox, linger_ms: int) -> None:
        if outbox.is_watched:
            outbox.socket.disable_monitor()  # the watch closes its end when it reads of that
        outbox.socket.close(linger=linger_ms)

    def _has_mail(self) -> bool:
        return self._inbox.poll(0, zmq.POLLIN) != 0

    def _sleep_again(self) -> None:
        try:
            while self._woken.recv(4_096):
                pass
        except BlockingIOError:
            return

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, _LINGER_MS)
        made.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        made.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PEER_SILENT_MS)
        made.setsockopt(zmq.TCP_KEEPALIVE, 1)
        made.setsockopt(zmq.SNDHWM, SEND_LIMIT)
        made.setsockopt(zmq.RCVHWM, SEND_LIMIT)
        made.setsockopt(zmq.MAXMSGSIZE, self._max_frame_bytes)
        made.setsockopt(zmq.IPV6, 0)
        return made
