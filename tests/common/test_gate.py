"""Who is let in, over real sockets: those with the cluster key. A refused handshake is counted, and the rest goes on."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import zmq

from common import gate
from common.errors import ConfigError
from common.ids import DETOKENIZER
from common.mail import Mailbox
from common.messages import DetokenizerInbox
from common.trust import LOOPBACK_ONLY, ClusterKey, Trust, derive
from tests.common.mailboxes import DECODE, FORGET, LOOPBACK, PREFILL, Detok, received
from tests.launch.waiting import wait_for

OURS, THEIRS = Trust(derive(b"o" * 32)), Trust(derive(b"t" * 32))
assert OURS.key is not None and THEIRS.key is not None
INSIDER_NO_MORE = Trust(ClusterKey(inbox=OURS.key.inbox, sender=THEIRS.key.sender))
"""Knows the inbox's key, as somebody would who knows its public half, but not the cluster key: has a sender's key of its own."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def mailbox(stack: ExitStack, trust: Trust, name: str = DETOKENIZER) -> Detok:
    made: Detok = Mailbox(PREFILL if name == "stranger" else DECODE, DetokenizerInbox, LOOPBACK, trust=trust)
    return stack.enter_context(closing(made))


def the_rest_goes_on(stack: ExitStack, inbox: Detok, trust: Trust) -> None:
    """A member's message arrives, and nothing but this."""
    member = mailbox(stack, trust)
    member.route(DETOKENIZER, inbox.address)
    member.send(DETOKENIZER, FORGET)
    assert received(inbox, 1) == [(DECODE, FORGET)]


@pytest.mark.parametrize(
    ("ours", "theirs", "reasons"),
    [
        (OURS, THEIRS, {"wrong key"}),
        (OURS, INSIDER_NO_MORE, {"wrong key"}),
        (OURS, LOOPBACK_ONLY, {"no key", "handshake"}),
        (LOOPBACK_ONLY, THEIRS, {"needless key", "handshake"}),
    ],
    ids=["another cluster key", "only the inbox's public key", "no key", "a key where none is used"],
)
def test_who_does_not_have_our_key_is_refused_and_counted_and_the_rest_goes_on(
    stack: ExitStack, ours: Trust, theirs: Trust, reasons: set[str]
) -> None:
    """Both ends of a connection may see first that only one has a key; when the stranger does, it is gone before we know why."""
    inbox, stranger = mailbox(stack, ours), mailbox(stack, theirs, "stranger")
    stranger.route(DETOKENIZER, inbox.address)
    stranger.send(DETOKENIZER, FORGET)
    wait_for(lambda: bool(inbox.frames_refused), "the stranger was counted")
    the_rest_goes_on(stack, inbox, ours)
    assert set(inbox.frames_refused) <= reasons


def test_connections_that_say_nothing_are_closed_counted_and_keep_nobody_out(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "HANDSHAKE_MS", 300)
    inbox = mailbox(stack, OURS)
    port = int(inbox.address.rsplit(":", 1)[1])
    idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(100)]
    idle[0].send(b"\xff\0\0")  # the beginning of a greeting
    the_rest_goes_on(stack, inbox, OURS)
    wait_for(lambda: inbox.frames_refused.get("handshake") == len(idle), "each was counted")
    for each in idle:
        each.settimeout(10)
        while each.recv(1_000):  # ends, because the other side has closed it
            pass


def test_a_flood_of_other_protocols_keeps_nobody_out(stack: ExitStack) -> None:
    inbox = mailbox(stack, OURS)
    port = int(inbox.address.rsplit(":", 1)[1])
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\0\0\0\0\0\0\0\1\x7f\1\0" + bytes(60), os.urandom(2_000)) * 30:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.send(text)
    the_rest_goes_on(stack, inbox, OURS)


def test_an_address_beyond_loopback_is_refused_without_a_key_for_listening_and_for_peers(stack: ExitStack) -> None:
    with pytest.raises(ConfigError, match="--cluster-key FILE"):
        Mailbox(DECODE, DetokenizerInbox, "tcp://0.0.0.0:0")
    member = mailbox(stack, LOOPBACK_ONLY)
    member.route(PREFILL, "tcp://192.0.2.1:9")
    assert member.messages_lost == {"bad address": 1}
    stack.enter_context(closing(Mailbox(DECODE, DetokenizerInbox, "tcp://0.0.0.0:0", trust=OURS)))


def test_a_zeromq_without_curve_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with pytest.raises(ConfigError, match="built without CURVE"):
        Mailbox(DECODE, DetokenizerInbox, LOOPBACK, trust=OURS)
