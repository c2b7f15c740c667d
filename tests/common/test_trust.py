"""The cluster key: its file, which addresses are allowed without one, and who is let in over real sockets.

A refused handshake is counted, and the rest goes on.
"""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq

from common import gate
from common.access import LOOPBACK_ONLY, ClusterKey, Trust, derive, read_key, read_trust, write_key
from common.config import SecurityConfig
from common.errors import ConfigError
from common.ids import DETOKENIZER
from common.mail import Mailbox
from common.messages import DetokenizerInbox
from tests.common.mailboxes import DECODE, FORGET, LOOPBACK, PREFILL, Detok, received
from tests.launch.waiting import wait_for


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    write_key(str(path))
    return path


def test_a_new_key_can_be_read_by_its_owner_only_and_each_is_another(key_file: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    write_key(str(tmp_path / "other"))
    assert read_key(str(key_file)) == read_key(str(key_file)) != read_key(str(tmp_path / "other"))


def test_a_key_that_exists_is_never_overwritten(key_file: Path) -> None:
    before = key_file.read_bytes()
    with pytest.raises(ConfigError, match="File exists"):
        write_key(str(key_file))
    assert key_file.read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_key_that_others_can_read_or_change_is_refused_and_the_fix_is_named(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_trust(SecurityConfig(cluster_key=str(key_file)))


@pytest.mark.parametrize("content", [b"", b"ab" * 31, b"ab" * 33, b"zz" * 32, b"\xff" * 64])
def test_a_file_that_holds_no_key_is_refused_and_not_shown(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no key file: make one with `launch key FILE`") as refused:
        read_key(str(path))
    assert "ab" * 31 not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--cluster-key: cannot read {tmp_path}/nothing: No such file"):
        read_key(f"{tmp_path}/nothing")


def test_no_key_is_shown_where_the_objects_that_hold_it_are(key_file: Path) -> None:
    trust = read_trust(SecurityConfig(cluster_key=str(key_file)))
    assert trust.key is not None
    for secret in (trust.key.inbox, trust.key.sender):
        assert repr(secret) not in repr(trust) and secret.hex() not in repr(trust)
    assert trust.key.inbox != trust.key.sender


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://127.1.2.3:1", "tcp://localhost:1"])
def test_loopback_needs_no_key(address: str) -> None:
    assert LOOPBACK_ONLY.check(address) == address


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:1", "tcp://10.0.0.1:1", "tcp://localhost.example.org:1", "tcp://127.evil:1"])
def test_other_addresses_need_a_key_or_insecure_and_the_error_names_both(address: str) -> None:
    with pytest.raises(ConfigError, match=r"launch key FILE.*--cluster-key FILE.*--insecure"):
        LOOPBACK_ONLY.check(address)
    assert Trust(derive(os.urandom(32))).check(address) == Trust(insecure=True).check(address) == address


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
    stack: ExitStack,
    ours: Trust,
    theirs: Trust,
    reasons: set[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ends of a connection may see first that only one has a key; when the stranger does, it is gone before we know why, or
    from where it came."""
    monkeypatch.setattr(gate, "_LOG_EVERY_S", 0.0)
    inbox, stranger = mailbox(stack, ours), mailbox(stack, theirs, "stranger")
    stranger.route(DETOKENIZER, inbox.address)
    stranger.send(DETOKENIZER, FORGET)
    wait_for(lambda: bool(inbox.frames_refused), "the stranger was counted")
    names = ("rejected 127.0.0.1: ", "rejected an unknown address: ")
    wait_for(lambda: any(said.startswith(names) for said in caplog.messages), "the log told of it")
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
