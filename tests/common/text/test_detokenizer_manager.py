"""The detokenizer's process, run on a thread: real sockets, a real loop."""

import threading
from collections.abc import Iterator

import pytest

from common.errors import ConfigError
from common.ids import DETOKENIZER, ROUTER, InstanceId, Key, RequestId
from common.messages import DetokenizerInbox, Finished, Open, RouterInbox, TextBatch, TextDelta, TokenBatch, TokenDelta
from common.text.detokenizer_manager import DetokenizerManager
from common.wire import Mailbox
from tests.common.text.tiny import tiny_tokenizer, write_checkpoint

LOOPBACK = "tcp://127.0.0.1:0"
WAIT_S = 10.0
KEY = Key(RequestId("r"), 0)
LENGTH = Finished("length")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def manager(model: str) -> Iterator[DetokenizerManager]:
    manager = DetokenizerManager(LOOPBACK, model)
    thread = threading.Thread(target=manager.run)
    thread.start()
    yield manager
    manager.stop()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def texts(router: Mailbox[RouterInbox]) -> list[TextDelta]:
    """The next text that arrives at the router."""
    router.wait(WAIT_S)
    deltas: list[TextDelta] = []
    for sender, message in router.receive():
        assert sender == DETOKENIZER
        assert isinstance(message, TextBatch)
        deltas += message.deltas
    return deltas


def test_tokens_of_two_instances_become_one_answer_at_the_router(manager: DetokenizerManager) -> None:
    ids = tuple(tiny_tokenizer().encode("日本 🙂").ids)
    router: Mailbox[RouterInbox] = Mailbox(ROUTER, RouterInbox, LOOPBACK)
    prefill: Mailbox[DetokenizerInbox] = Mailbox(InstanceId("prefill-1"), DetokenizerInbox, LOOPBACK)
    decode: Mailbox[DetokenizerInbox] = Mailbox(InstanceId("decode-1"), DetokenizerInbox, LOOPBACK)
    try:
        manager.meet_router(router.address)
        for mailbox in (router, prefill, decode):
            mailbox.route(DETOKENIZER, manager.address)
        router.send(DETOKENIZER, Open(key=KEY))
        decode.send(DETOKENIZER, TokenBatch(deltas=(TokenDelta(KEY, 1, ids[1:], LENGTH),)))
        prefill.send(DETOKENIZER, TokenBatch(deltas=(TokenDelta(KEY, 0, ids[:1]),)))
        got: list[TextDelta] = []
        while not got or got[-1].ending is None:
            arrived = texts(router)
            assert arrived, "nothing came in time"
            got += arrived
        assert "".join(delta.text for delta in got) == "日本 🙂"
        assert got[-1].ending == LENGTH
    finally:
        for mailbox in (router, prefill, decode):
            mailbox.close()


def test_stop_before_run_and_after_the_end_is_heard(model: str) -> None:
    manager = DetokenizerManager(LOOPBACK, model)
    manager.stop()
    manager.run()
    manager.stop()
    manager.close()


def test_an_address_that_is_taken_is_refused(manager: DetokenizerManager, model: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        DetokenizerManager(manager.address, model)
