"""Mail over real sockets on the loopback interface: frames, what arrives or does not, how a process waits, and large fleets.

Nothing that arrives may raise.
"""

import asyncio
import logging
import math
import resource
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
import pytest
import uvloop
import zmq
from hypothesis import given
from hypothesis import strategies as st

from common.addresses import check_address
from common.errors import ConfigError, WireError
from common.ids import DETOKENIZER, ROUTER, AttemptId, InstanceId, RequestId
from common.instance.ports import Mail
from common.mail import FrameRefused, Mailbox, pack_frame, unpack_frame
from common.messages import (
    SINCE,
    WIRE_VERSION,
    Cancel,
    DetokenizerInbox,
    ExpectAnswer,
    ForgetAnswer,
    RouterInbox,
    TokenBatch,
    Trace,
)
from tests.common.mailboxes import DECODE, FORGET, KEY, LOOPBACK, PREFILL, WAIT_S, Make, closes, received


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
    name, data, _ = unpack_frame(pack_frame(InstanceId(sender), body))
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


def test_a_type_that_the_peers_release_does_not_know_is_not_sent_until_a_frame_shows_a_newer_one(
    make: Make, raw_push: Callable[[str], zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SINCE, "ForgetAnswer", WIRE_VERSION)
    inbox, sender, trace = make(), make(DECODE), Trace(seconds=1.0, number=1)
    sender.route(PREFILL, inbox.address)
    for version, counted in ((None, 1), (WIRE_VERSION - 1, 2), (WIRE_VERSION, 2), (WIRE_VERSION - 1, 3)):
        if version is not None:
            raw_push(sender.address).send(pack_frame(PREFILL, body(trace), version))
            received(sender, 1)
        sender.send(PREFILL, FORGET)
        assert sender.messages_lost == {"too new": counted}
        sender.send(PREFILL, trace)  # it was there before
    arrived = [type(message) for _, message in received(inbox, 5)]
    assert arrived == [Trace, Trace, ForgetAnswer, Trace, Trace]


@pytest.mark.timeout(60)
def test_waiting_ends_when_another_thread_wakes_it(make: Make) -> None:
    mailbox = make()
    waker = threading.Timer(0.05, mailbox.wake)
    waker.start()
    mailbox.wait(3_600.0)
    waker.join()


def test_any_number_of_wakes_end_the_next_wait_and_only_that_one(make: Make) -> None:
    mailbox = make()
    for _ in range(100_000):
        mailbox.wake()
    mailbox.wait(WAIT_S)
    assert not mailbox._poller.poll(0)


@pytest.mark.timeout(60)
def test_waiting_ends_by_itself_and_takes_odd_times(make: Make) -> None:
    mailbox = make()
    mailbox.wait(0.01)
    mailbox.wait(-5.0)
    threading.Timer(0.02, mailbox.wake).start()
    mailbox.wait(float("inf"))


def test_closing_twice_and_waking_after_it_is_harmless(make: Make) -> None:
    mailbox = make()
    mailbox.route(ROUTER, "tcp://127.0.0.1:9")
    mailbox.send(ROUTER, FORGET)
    mailbox.close()
    mailbox.close()
    mailbox.wake()


def test_an_address_that_is_taken_is_refused_by_name(make: Make) -> None:
    taken = make().address
    with pytest.raises(ConfigError, match=taken):
        make(bind=taken)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_loop_hears_of_all_mail_although_the_descriptor_is_edge_triggered(
    make: Make, monkeypatch: pytest.MonkeyPatch, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Some mail is there before, bursts are longer than one receive takes, and some comes while the callback runs."""
    monkeypatch.setattr("common.mail.RECEIVE_LIMIT", 2)
    inbox, peer = make(), make(PREFILL)
    peer.route(DETOKENIZER, inbox.address)
    total = 500

    async def main() -> list[DetokenizerInbox]:
        got: list[DetokenizerInbox] = []
        done = asyncio.Event()

        def on_mail() -> None:
            got.extend(message for _, message in inbox.receive())
            if len(got) % 7 == 0 and len(got) < 50:
                raise ValueError("a bug in the callback")
            if len(got) == total:
                done.set()

        loop = asyncio.get_running_loop()
        faults: list[object] = []
        loop.set_exception_handler(lambda _, context: faults.append(context["exception"]))
        messages = iter(closes(total))
        for message in (next(messages) for _ in range(100)):
            peer.send(DETOKENIZER, message)
        inbox.attach(loop, on_mail)
        for number, message in enumerate(messages):
            peer.send(DETOKENIZER, message)
            if number % 10 == 0:
                await asyncio.sleep(0)
            if number % 50 == 0:
                await asyncio.sleep(0.005)
        await asyncio.wait_for(done.wait(), WAIT_S)
        inbox.detach()
        inbox.detach()
        assert all(isinstance(fault, ValueError) for fault in faults)
        return got

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(main()) == closes(total)


def test_a_wake_reaches_the_loop_and_nothing_does_after_detaching(make: Make) -> None:
    inbox = make()

    async def main() -> None:
        woken = asyncio.Event()
        inbox.attach(asyncio.get_running_loop(), woken.set)
        with pytest.raises(RuntimeError, match="one loop"):
            inbox.attach(asyncio.get_running_loop(), woken.set)
        threading.Timer(0.02, inbox.wake).start()
        await asyncio.wait_for(woken.wait(), WAIT_S)
        inbox.detach()
        woken.clear()
        inbox.wake()
        await asyncio.sleep(0.05)
        assert not woken.is_set()

    asyncio.run(main())


def test_a_loop_that_has_nothing_to_do_sleeps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that stays readable would turn the loop without end."""
    inbox, peer = make(), make(PREFILL)
    peer.route(DETOKENIZER, inbox.address)
    has_mail, looks = inbox._has_mail, 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return has_mail()

    monkeypatch.setattr(inbox, "_has_mail", look)

    async def main() -> None:
        done = asyncio.Event()

        def on_mail() -> None:
            inbox.receive()
            done.set()

        inbox.attach(asyncio.get_running_loop(), on_mail)
        peer.send(DETOKENIZER, FORGET)
        await asyncio.wait_for(done.wait(), WAIT_S)
        await asyncio.sleep(0.1)
        inbox.detach()

    asyncio.run(main())
    assert looks < 50


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_correspondent_that_closes_is_told_of_once_and_the_others_are_not(
    make: Make, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    router, leaver, stayer = make(), make(), make()
    broken: list[InstanceId] = []

    async def main() -> None:
        told = asyncio.Event()

        def on_broken(name: InstanceId) -> None:
            broken.append(name)
            told.set()

        router.attach(asyncio.get_running_loop(), lambda: None, on_broken)
        router.route(PREFILL, leaver.address)
        router.route(DECODE, stayer.address)
        for name, peer in ((PREFILL, leaver), (DECODE, stayer)):
            router.send(name, FORGET)
            peer.wait(WAIT_S)
            assert peer.receive()
        leaver.close()
        await asyncio.wait_for(told.wait(), WAIT_S)
        await asyncio.sleep(0.2)  # while it tries in vain to connect again
        router.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert broken == [PREFILL]


CORRESPONDENTS = 400
FILES = 8_192


@pytest.fixture
def _many_files() -> Iterator[None]:
    """As the router's process allows itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < FILES:
        pytest.skip(f"this system allows only {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("_many_files")
def test_a_mailbox_that_watches_its_connections_reaches_four_hundred_correspondents() -> None:
    """ZeroMQ's usual limit lets it reach 340."""

    async def route_all() -> None:
        with closing(Mailbox[RouterInbox](InstanceId("router"), RouterInbox, "tcp://127.0.0.1:0")) as mailbox:
            mailbox.attach(asyncio.get_running_loop(), lambda: None, lambda broken: None)
            for number in range(CORRESPONDENTS):
                mailbox.route(InstanceId(f"instance-{number}"), f"tcp://127.0.0.1:{20_000 + number}")
            assert mailbox.messages_lost == {}

    asyncio.run(route_all())


def test_a_message_that_goes_to_many_in_a_row_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[object] = []

    class Counting:
        def encode(self, message: object) -> bytes:
            encoded.append(message)
            return msgspec.msgpack.encode(message)

    monkeypatch.setattr(msgspec.msgpack, "Encoder", Counting)
    other = ForgetAnswer(key=AttemptId(RequestId("another"), 0, ROUTER))
    with closing(Mailbox[DetokenizerInbox](PREFILL, DetokenizerInbox, LOOPBACK)) as mailbox:
        for number in range(3):
            mailbox.route(InstanceId(f"detokenizer-{number}"), mailbox.address)
        for message in (FORGET, other, FORGET):
            for number in range(3):
                mailbox.send(InstanceId(f"detokenizer-{number}"), message)
        mail = received(mailbox, 9)
    assert [message for _, message in mail] == [FORGET] * 3 + [other] * 3 + [FORGET] * 3
    assert encoded == [FORGET, other, FORGET]


def test_a_peer_that_is_stopped_for_a_minute_is_not_cut(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut would lose what is in flight. The clock of ZeroMQ cannot be turned, so this reads what was asked of it."""
    asked: list[int] = []
    real = zmq.Socket.setsockopt

    def setsockopt(self: "zmq.Socket[bytes]", option: int, value: int) -> None:
        if option == zmq.HEARTBEAT_TIMEOUT:
            asked.append(value)
        real(self, option, value)

    monkeypatch.setattr(zmq.Socket, "setsockopt", setsockopt)
    mailbox = make()
    mailbox.route(DECODE, "tcp://127.0.0.1:1")
    assert asked and min(asked) > 60_000
