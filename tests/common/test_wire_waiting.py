"""The wire, over real sockets on the loopback interface: how a process waits for mail, in a thread and in an event loop."""

import asyncio
import threading
from collections.abc import Callable

import pytest
import uvloop

from common.errors import ConfigError
from common.ids import DETOKENIZER, ROUTER, Incarnation, InstanceId
from common.mail import Mailbox
from common.messages import DetokenizerInbox, ExpectAnswer, Goodbye, RouterInbox, TextBatch
from tests.common.mailboxes import DECODE, FORGET, KEY, PREFILL, WAIT_S, Make, closes, received


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


def test_a_router_and_an_instance_talk_both_ways(make: Make) -> None:
    router: Mailbox[RouterInbox] = make(ROUTER, inbox=RouterInbox)
    detokenizer = make()
    router.route(DETOKENIZER, detokenizer.address)
    detokenizer.route(ROUTER, router.address)
    router.send(DETOKENIZER, ExpectAnswer(key=KEY))
    detokenizer.wait(WAIT_S)
    assert detokenizer.receive() == [(ROUTER, ExpectAnswer(key=KEY))]
    detokenizer.send(ROUTER, TextBatch(deltas=()))
    detokenizer.send(ROUTER, Goodbye(id=DETOKENIZER, incarnation=Incarnation("1")))
    assert [type(message) for _, message in received(router, 2)] == [TextBatch, Goodbye]
