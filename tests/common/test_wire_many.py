"""A mailbox has room for a large fleet, and encodes once what it sends to many."""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest
import zmq

from common.ids import ROUTER, AttemptId, InstanceId, RequestId
from common.mail import Mailbox
from common.messages import DetokenizerInbox, ForgetAnswer, RouterInbox
from tests.common.mailboxes import DECODE, FORGET, LOOPBACK, PREFILL, Make, received

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
