"""The detokenizer's process, run on a thread: real sockets, a real loop."""

import threading
import time
from collections.abc import Iterator

import pytest

from common.errors import ConfigError
from common.ids import DETOKENIZER, ROUTER
from common.mail import Mailbox
from common.messages import (
    DetokenizerHeartbeat,
    DetokenizerInbox,
    ExpectAnswer,
    Finished,
    RouterInbox,
    TextBatch,
    TextDelta,
    TokenBatch,
    TokenDelta,
)
from common.text.detokenizer import Detokenizer
from common.text.detokenizer_manager import TURN_S, DetokenizerManager
from tests.builders import key
from tests.common.mailboxes import DECODE, KEY, LOOPBACK, PREFILL, WAIT_S, Make
from tests.common.text.tiny import tiny_tokenizer, write_checkpoint

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


def arrived(router: Mailbox[RouterInbox]) -> list[RouterInbox]:
    """What arrives next at the router."""
    router.wait(WAIT_S)
    mail = router.receive()
    assert mail, "nothing came in time"
    assert {sender for sender, _ in mail} == {DETOKENIZER}
    return [message for _, message in mail]


def test_tokens_of_two_instances_become_one_answer_at_the_router(manager: DetokenizerManager, make: Make) -> None:
    ids = tuple(tiny_tokenizer().encode("日本 🙂").ids)
    router, prefill, decode = make(ROUTER, inbox=RouterInbox), make(PREFILL), make(DECODE)
    manager.meet_router(router.address)
    for mailbox in (router, prefill, decode):
        mailbox.route(DETOKENIZER, manager.address)
    router.send(DETOKENIZER, ExpectAnswer(key=KEY))
    decode.send(DETOKENIZER, TokenBatch(deltas=(TokenDelta(KEY, 1, ids[1:], LENGTH),)))
    prefill.send(DETOKENIZER, TokenBatch(deltas=(TokenDelta(KEY, 0, ids[:1]),)))
    got: list[TextDelta] = []
    while not got or got[-1].ending is None:
        got += [delta for message in arrived(router) if isinstance(message, TextBatch) for delta in message.deltas]
    assert "".join(delta.text for delta in got) == "日本 🙂"
    assert got[-1].ending == LENGTH


def test_what_comes_before_the_router_is_known_waits_and_nothing_is_lost(manager: DetokenizerManager, make: Make) -> None:
    """As when it was killed: instances that find the new one tell it tokens at once."""
    router, decode = make(ROUTER, inbox=RouterInbox), make(DECODE)
    for mailbox in (router, decode):
        mailbox.route(DETOKENIZER, manager.address)
    router.send(DETOKENIZER, ExpectAnswer(key=KEY))
    decode.send(DETOKENIZER, TokenBatch(deltas=(TokenDelta(KEY, 0, tuple(tiny_tokenizer().encode("cat").ids), LENGTH),)))
    time.sleep(0.2)  # enough to have read it
    manager.meet_router(router.address)
    got: list[TextDelta] = []
    deadline_s = time.monotonic() + WAIT_S
    while not got and time.monotonic() < deadline_s:  # heartbeats come too
        got += [delta for message in arrived(router) if isinstance(message, TextBatch) for delta in message.deltas]
    assert "".join(delta.text for delta in got) == "cat" and got[-1].ending == LENGTH


def test_heartbeats_reach_the_router_from_when_it_is_known(manager: DetokenizerManager, make: Make) -> None:
    router, stranger = make(ROUTER, inbox=RouterInbox), make(PREFILL)
    for mailbox in (router, stranger):
        mailbox.route(DETOKENIZER, manager.address)
    router.send(DETOKENIZER, ExpectAnswer(key=KEY))
    stranger.send(DETOKENIZER, TokenBatch(deltas=(TokenDelta(key("unknown"), 0, (5,)),)))
    manager.meet_router(router.address)
    beats: list[DetokenizerHeartbeat] = []
    while len(beats) < 2 or beats[-1].open_answers == 0:
        beats += [message for message in arrived(router) if isinstance(message, DetokenizerHeartbeat)]
        assert len(beats) < 9
    assert beats[-1] == DetokenizerHeartbeat(open_answers=1, early_answers=1, dropped=0)


def test_stop_works_before_run_and_after_its_end(model: str) -> None:
    manager = DetokenizerManager(LOOPBACK, model)
    manager.stop()
    manager.run()
    manager.stop()
    manager.close()


def test_an_address_that_is_taken_is_refused(manager: DetokenizerManager, model: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        DetokenizerManager(manager.address, model)


def test_a_turn_is_bounded_in_time_however_much_mail_waits(model: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message takes a millisecond at least, so a turn has only so many."""
    turns = [0]

    def receive(detokenizer: Detokenizer, message: DetokenizerInbox, now: float) -> list[TextDelta]:
        time.sleep(0.001)
        turns[-1] += 1
        return []

    def tick(detokenizer: Detokenizer, now: float) -> list[TextDelta]:
        turns.append(0)
        return []

    monkeypatch.setattr(Detokenizer, "receive", receive)
    monkeypatch.setattr(Detokenizer, "tick", tick)
    manager = DetokenizerManager(LOOPBACK, model)
    router = make(ROUTER, inbox=RouterInbox)
    router.route(DETOKENIZER, manager.address)
    manager.meet_router(router.address)
    for number in range(300):
        router.send(DETOKENIZER, ExpectAnswer(key=key(str(number))))
    thread = threading.Thread(target=manager.run)
    thread.start()
    deadline_s = time.monotonic() + WAIT_S
    while sum(turns) < 300 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    manager.stop()
    thread.join(WAIT_S)
    assert sum(turns) == 300 and max(turns) <= TURN_S / 0.001 + 1
