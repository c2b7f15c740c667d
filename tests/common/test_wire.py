"""The wire, over real sockets on the loopback interface: frames, and what arrives or does not. Nothing that arrives may raise."""

import logging
import math
import struct
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from common.addresses import check_address
from common.errors import ConfigError, WireError
from common.ids import DETOKENIZER, ROUTER, InstanceId
from common.instance.ports import Mail
from common.mail import FrameRefused, Mailbox, pack_frame, unpack_frame
from common.messages import WIRE_VERSION, Cancel, DetokenizerInbox, ExpectAnswer, TokenBatch
from tests.common.mailboxes import FORGET, KEY, LOOPBACK, PREFILL, WAIT_S, Make, closes, received


@pytest.fixture
def raw_push() -> Iterator[Callable[[str], zmq.Socket[bytes]]]:
    """A foreign program that sends whatever it likes."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made: list[zmq.Socket[bytes]] = []

    def connect(address: str) -> zmq.Socket[bytes]:
        made.append(context.socket(zmq.PUSH))
        made[-1].connect(address)
        return made[-1]

    yield connect
    for pusher in made:
        pusher.close(linger=0)
    context.term()


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


@given(st.text(min_size=1, max_size=60).filter(_is_utf8), st.binary(max_size=50))
def test_a_frame_carries_sender_and_body(sender: str, body: bytes) -> None:
    name, data = unpack_frame(pack_frame(InstanceId(sender), body))
    assert (name, bytes(data)) == (sender, body)


@given(st.binary(max_size=40))
def test_any_bytes_are_either_a_frame_or_refused(data: bytes) -> None:
    for frame in (data, pack_frame(PREFILL, data)[: len(data)], b"TNDM" + data):
        try:
            unpack_frame(frame)
        except FrameRefused as error:
            assert error.reason in {"magic", "wire version", "sender"}


@pytest.mark.parametrize(("version", "works"), [(-2, False), (-1, True), (0, True), (1, True), (2, False)])
def test_neighbouring_wire_versions_work_together_and_others_are_refused(version: int, works: bool) -> None:
    if WIRE_VERSION + version < 0:
        version = 2**16 + version  # the number before 0 cannot be written
    frame = pack_frame(PREFILL, b"", WIRE_VERSION + version)
    if works:
        assert unpack_frame(frame)[0] == PREFILL
    else:
        with pytest.raises(FrameRefused, match="wire version"):
            unpack_frame(frame)


@pytest.mark.parametrize("name", ["", "x" * 256])
def test_a_sender_whose_name_does_not_fit_cannot_have_a_mailbox(name: str) -> None:
    with pytest.raises(WireError, match="1 to 255 bytes"):
        Mailbox(InstanceId(name), DetokenizerInbox, LOOPBACK)


def test_messages_arrive_with_their_sender_and_in_order(make: Make) -> None:
    inbox, peer = make(), make(PREFILL)
    mail: Mail[DetokenizerInbox] = peer
    mail.route(DETOKENIZER, inbox.address)
    sent: list[DetokenizerInbox] = [ExpectAnswer(key=KEY, stop=("日本",), context=b"1234"), TokenBatch(deltas=()), *closes(3)]
    for message in sent:
        mail.send(DETOKENIZER, message)
    assert received(inbox, len(sent)) == [(PREFILL, message) for message in sent]
    assert inbox.frames_refused == peer.messages_lost == {}


def test_what_is_sent_before_the_peer_listens_arrives_once_it_does(make: Make) -> None:
    first = make()
    address = first.address
    first.close()
    peer = make(PREFILL)
    peer.route(DETOKENIZER, address)
    peer.send(DETOKENIZER, FORGET)
    assert received(make(bind=address), 1) == [(PREFILL, FORGET)]


def test_a_peer_that_was_restarted_on_the_same_address_is_found_again(make: Make) -> None:
    first, peer = make(), make(PREFILL)
    peer.route(DETOKENIZER, first.address)
    peer.send(DETOKENIZER, FORGET)
    assert len(received(first, 1)) == 1
    first.close()
    second = make(bind=first.address)
    deadline = time.monotonic() + WAIT_S
    arrived: list[tuple[InstanceId, DetokenizerInbox]] = []
    while not arrived and time.monotonic() < deadline:  # what is sent before the loss is noticed may be lost
        peer.send(DETOKENIZER, FORGET)
        second.wait(0.1)
        arrived = second.receive()
    assert set(arrived) == {(PREFILL, FORGET)}


def test_a_new_address_replaces_the_former_one(make: Make) -> None:
    old, new, peer = make(), make(), make(PREFILL)
    peer.route(DETOKENIZER, old.address)
    peer.route(DETOKENIZER, old.address)
    peer.route(DETOKENIZER, new.address)
    peer.send(DETOKENIZER, FORGET)
    assert len(received(new, 1)) == 1
    assert old.receive() == []


def test_two_names_for_one_address_share_a_connection_until_both_are_forgotten(make: Make) -> None:
    inbox, peer = make(), make(PREFILL)
    peer.route(DETOKENIZER, inbox.address)
    peer.route(ROUTER, inbox.address)
    for number, message in enumerate(closes(100)):
        peer.send(ROUTER if number % 2 else DETOKENIZER, message)
    assert [message for _, message in received(inbox, 100)] == closes(100), "in order"
    peer.route(DETOKENIZER, None)
    peer.send(ROUTER, FORGET)
    assert received(inbox, 1) == [(PREFILL, FORGET)]
    peer.route(ROUTER, None)
    peer.send(ROUTER, FORGET)
    assert peer.messages_lost == {"no route": 1}


def test_a_message_to_somebody_unknown_or_forgotten_is_counted_as_lost(make: Make) -> None:
    peer = make(PREFILL)
    peer.send(ROUTER, FORGET)
    peer.route(ROUTER, LOOPBACK.replace(":0", ":9"))
    peer.route(ROUTER, None)
    peer.route(ROUTER, None)
    peer.send(ROUTER, FORGET)
    assert peer.messages_lost == {"no route": 2}


@pytest.mark.parametrize(
    "address", ["", "nonsense", "ipc:///tmp/x", "inproc://x", "tcp://", "tcp://h", "tcp://h:70000", "tcp://[::1]:5"]
)
def test_a_malformed_address_is_refused(make: Make, address: str) -> None:
    with pytest.raises(ConfigError, match="write tcp://host:port"):
        check_address(address)
    with pytest.raises(ConfigError, match="write tcp://host:port"):
        make(bind=address)
    peer = make(PREFILL)
    peer.route(DETOKENIZER, address)  # a peer's mistake must not stop this process
    peer.send(DETOKENIZER, FORGET)
    assert peer.messages_lost == {"bad address": 1, "no route": 1}


def test_sending_to_a_dead_peer_never_blocks_and_what_is_over_the_limit_is_counted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.mail.SEND_LIMIT", 5)
    gone = make()
    gone.close()
    peer = make(PREFILL)
    peer.route(DETOKENIZER, gone.address)
    for message in closes(20):
        peer.send(DETOKENIZER, message)
    assert peer.messages_lost == {"full": 15}


def test_a_message_that_is_too_large_is_not_sent(make: Make) -> None:
    inbox, peer = make(), make(PREFILL, max_frame_bytes=1_000)
    peer.route(DETOKENIZER, inbox.address)
    peer.send(DETOKENIZER, ExpectAnswer(key=KEY, text="x" * 1_000))
    peer.send(DETOKENIZER, FORGET)
    assert received(inbox, 1) == [(PREFILL, FORGET)]
    assert peer.messages_lost == {"too large": 1}


def test_a_frame_that_is_too_large_never_arrives_and_others_do(make: Make) -> None:
    inbox, careless, peer = make(max_frame_bytes=1_000), make(PREFILL), make(ROUTER)
    careless.route(DETOKENIZER, inbox.address)
    careless.send(DETOKENIZER, ExpectAnswer(key=KEY, text="x" * 10_000))
    peer.route(DETOKENIZER, inbox.address)
    peer.send(DETOKENIZER, FORGET)
    assert received(inbox, 1) == [(ROUTER, FORGET)]


def test_one_receive_is_bounded_and_the_rest_stays(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.mail.RECEIVE_LIMIT", 3)
    inbox, peer = make(), make(PREFILL)
    peer.route(DETOKENIZER, inbox.address)
    for message in closes(8):
        peer.send(DETOKENIZER, message)
    got: list[DetokenizerInbox] = []
    while len(got) < 8:
        inbox.wait(WAIT_S)
        mail = inbox.receive()
        assert 1 <= len(mail) <= 3
        got += [message for _, message in mail]
    assert got == closes(8)


def body(message: object) -> bytes:
    return msgspec.msgpack.encode(message)


BAD_FRAMES: dict[str, list[bytes]] = {
    "empty": [b""],
    "noise": [b"\x00\xff" * 40],
    "a header alone": [b"TNDM"],
    "two parts": [pack_frame(PREFILL, body(FORGET)), b"more"],
    "three parts": [b"", b"", b""],
    "an old version": [pack_frame(PREFILL, body(FORGET), 2**16 - 1)],
    "no sender": [struct.pack("!4sHB", b"TNDM", WIRE_VERSION, 0) + body(FORGET)],
    "a sender longer than the frame": [struct.pack("!4sHB", b"TNDM", WIRE_VERSION, 200) + b"x"],
    "a sender that is no text": [struct.pack("!4sHB", b"TNDM", WIRE_VERSION, 2) + b"\xff\xfe" + body(FORGET)],
    "no body": [pack_frame(PREFILL, b"")],
    "half a body": [pack_frame(PREFILL, body(FORGET)[:-1])],
    "a body with a tail": [pack_frame(PREFILL, body(FORGET) + b"\x00")],
    "a message of another inbox": [pack_frame(PREFILL, body(Cancel(key=KEY)))],
    "a message nobody knows": [pack_frame(PREFILL, body({"type": "Surprise"}))],
    "a field of another type": [pack_frame(PREFILL, body({"type": "Close", "key": 5}))],
    "a field that is missing": [pack_frame(PREFILL, body({"type": "Close"}))],
    "a token id that is no int32": [pack_frame(PREFILL, body({"type": "TokenBatch", "deltas": [[["r", 0], 0, [2**31], None]]}))],
    "a time that is not a number": [pack_frame(PREFILL, body({"type": "Trace", "seconds": math.nan, "number": 1}))],
    "text that is no UTF-8": [pack_frame(PREFILL, b"\x82\xa4type\xa5Close\xa3key\x92\xa1\xff\x00")],
    "nesting without end": [pack_frame(PREFILL, b"\x82\xa4type\xa5Close\xa1x" + b"\x91" * 100_000)],
}


@pytest.mark.parametrize("parts", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_a_frame_that_is_no_message_of_this_inbox_is_counted_and_the_next_one_is_read(
    make: Make, raw_push: Callable[[str], zmq.Socket[bytes]], parts: list[bytes]
) -> None:
    inbox = make()
    pusher = raw_push(inbox.address)
    pusher.send_multipart(parts)
    pusher.send(pack_frame(PREFILL, body(FORGET)))
    assert received(inbox, 1) == [(PREFILL, FORGET)]
    assert sum(inbox.frames_refused.values()) == 1


def test_each_reason_is_counted_apart_and_logged_once_in_a_while(
    make: Make, raw_push: Callable[[str], zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    inbox = make()
    pusher = raw_push(inbox.address)
    with caplog.at_level(logging.WARNING, "common.mail"):
        for _ in range(50):
            pusher.send(b"noise")
            pusher.send(pack_frame(PREFILL, b"\xc1"))
        pusher.send(pack_frame(PREFILL, body(FORGET)))
        assert len(received(inbox, 1)) == 1
    assert inbox.frames_refused == {"magic": 50, "body": 50}
    assert len(caplog.records) == 2


def test_a_field_that_a_newer_version_added_is_ignored(make: Make, raw_push: Callable[[str], zmq.Socket[bytes]]) -> None:
    inbox = make()
    newer = {"type": "Close", "key": ["r", 0, "router", "new in the key"], "reason": "new"}
    raw_push(inbox.address).send(pack_frame(PREFILL, body(newer), WIRE_VERSION + 1))
    assert received(inbox, 1) == [(PREFILL, FORGET)]
