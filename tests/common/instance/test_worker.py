"""The worker's loop over ports: what happened is taken in, and the executor is kept two steps ahead."""

import msgspec
import pytest

from common.errors import BadRequest, PeerRefused, TransferError
from common.ids import DETOKENIZER, ROUTER, Incarnation, InstanceId, Ticket, pack_ids, text_name
from common.instance.membership import ABANDON_AFTER_S
from common.instance.ports import Connect, LinkChanged, Prepare, PushDone, Settled
from common.instance.worker import ROUTE_MEMORY_S, run
from common.messages import Cancel, Drain, Failed, Generate, LinkInfo, LinkReport, LinkState, Peers, Refused, Reserve, TokenBatch
from common.sampling_params import Grammar
from engine.grammar.grammars import ANY_TEXT
from tests.builders import instance, key, sampling
from tests.common.instance.rig import ADDRESS, WELCOME, FakedRig, Rig

D = InstanceId("d")
AT = InstanceId(f"router@{ADDRESS}")
THERE, GONE = Peers(version=1, joined=(instance("d", "decode"),)), Peers(version=2)


def link(state: LinkState, incarnation: str = "1", detail: str = "") -> LinkInfo:
    return LinkInfo(peer=D, incarnation=Incarnation(incarnation), state=state, detail=detail)


@pytest.fixture
def rig() -> FakedRig:
    return FakedRig()


# --- joining ---------------------------------------------------------------------------------------------------------------


def test_an_instance_registers_until_it_is_welcome_and_then_reports() -> None:
    rig = Rig()
    assert rig.turn(0.0) == ["Register"]
    assert rig.turn(0.1) == []
    assert rig.turn(0.25) == ["Register"]
    assert rig.turn(0.5, WELCOME) == ["Heartbeat"]
    joined = rig.worker.joined
    assert joined and rig.mail.routes == {AT: ADDRESS, ROUTER: ADDRESS, DETOKENIZER: "tcp://127.0.0.1:9"}
    assert rig.turn(1.0) == []
    assert [rig.turn(1.5 + beat, WELCOME) for beat in range(5)] == 5 * [["Heartbeat"]]


def test_a_refused_instance_says_why() -> None:
    rig = Rig()
    with pytest.raises(PeerRefused, match="page size differs"):
        rig.turn(0.0, Refused(reason="page size differs"))


def test_an_unanswered_registration_ends_at_the_deadline() -> None:
    rig = Rig()
    rig.turn(0.0)
    with pytest.raises(PeerRefused, match="--router"):
        rig.turn(5.0)


def test_the_requests_of_a_router_that_does_not_answer_are_served_while_the_instance_registers_again(rig: FakedRig) -> None:
    sent = [rig.turn(0.0, WELCOME)] + [rig.turn(float(second)) for second in range(1, 10)]
    silent_at = sent.index(["Register"])
    assert silent_at * WELCOME.heartbeat_s > WELCOME.dead_after_s
    assert all(names == ["Register"] for names in sent[silent_at:])
    assert rig.turn(20.0, WELCOME) == ["Heartbeat"] and rig.scheduler.told == []


def test_the_requests_of_a_router_that_has_been_silent_for_minutes_are_abandoned_once(rig: FakedRig) -> None:
    rig.turn(0.0, WELCOME)
    for second in range(1, 2 * int(ABANDON_AFTER_S / WELCOME.heartbeat_s)):
        rig.turn(float(second))
    assert rig.scheduler.told == ["RouterLost"]


def test_the_requests_of_a_former_router_are_abandoned_when_another_welcomes_us(rig: FakedRig) -> None:
    rig.turn(0.0, WELCOME)
    successor = msgspec.structs.replace(WELCOME, router=InstanceId("router-2"), detokenizers=("tcp://127.0.0.1:8",))
    rig.turn(0.1, successor)
    assert rig.scheduler.told == ["RouterLost"]
    successor_text = text_name(InstanceId("router-2"), 0)
    assert rig.mail.routes == {
        AT: ADDRESS,
        ROUTER: None,
        DETOKENIZER: None,
        InstanceId("router-2"): ADDRESS,
        successor_text: "tcp://127.0.0.1:8",
    }


def test_the_requests_of_a_router_whose_process_is_gone_end_at_once(rig: FakedRig) -> None:
    rig.turn(0.0, WELCOME)
    rig.mail.gone = [AT]
    rig.turn(0.1)
    assert rig.scheduler.told == ["RouterLost"]


def test_a_peer_is_dead_when_its_host_refuses_connections_or_another_life_has_its_address(rig: FakedRig) -> None:
    rig.turn(0.0, WELCOME, THERE)
    rig.mail.gone = [D]
    rig.turn(0.1)
    assert rig.scheduler.told == ["PeersChanged"], "a successor listens there, so it is not proven who was meant"
    rig.mail.gone, rig.mail.broken = [D], {D}
    rig.turn(0.2)
    assert rig.scheduler.told == ["PeersChanged", "PeerDied"]
    former = instance("d", "decode")
    successor = msgspec.structs.replace(former, incarnation=Incarnation("2"))
    elsewhere = msgspec.structs.replace(successor, incarnation=Incarnation("3"), inbox="tcp://127.0.0.1:77")
    rig.turn(0.3, Peers(version=2, since=1, joined=(successor,)))
    assert rig.scheduler.told[2:] == ["PeerDied", "PeersChanged"]
    rig.turn(0.4, Peers(version=3, since=2, joined=(former,)))
    assert rig.scheduler.told[4:] == ["PeersChanged"], "old news of a router: the successor lives"
    rig.turn(0.5, Peers(version=4, since=3, joined=(elsewhere,)))
    assert rig.scheduler.told[5:] == ["PeersChanged"], "its predecessor may live"


# --- steps -----------------------------------------------------------------------------------------------------------------


def test_two_steps_are_in_flight_before_the_first_is_read() -> None:
    rig = Rig()
    rig.turn(0.0, WELCOME, THERE)
    prompt = pack_ids([100 + i for i in range(12)])
    sent = rig.turn(0.1, Generate(key=key(), prompt=prompt, sampling=sampling(), decodes=(D,)))
    assert Reserve.__name__ in sent and len(rig.executor.steps) == 2
    rig.executor.finish_one()
    rig.turn(0.2)
    assert len(rig.executor.steps) == 2
    rig.executor.finish_one()
    rig.executor.finish_one()
    assert TokenBatch.__name__ in rig.turn(0.3)
    assert not rig.executor.steps


def test_the_next_turn_is_due_when_the_first_of_all_deadlines_is(rig: FakedRig) -> None:
    rig.turn(0.0, WELCOME)
    assert rig.worker.next_deadline() == WELCOME.heartbeat_s
    rig.scheduler.deadline_s = 0.7
    assert rig.worker.next_deadline() == 0.7
    rig.scheduler.steps_to_plan = 1
    rig.turn(0.1)
    rig.executor.steps[0][1].ends_s = 0.4
    assert rig.worker.next_deadline() == 0.4


# --- reports ---------------------------------------------------------------------------------------------------------------


def test_a_heartbeat_carries_the_load_with_the_age_of_the_oldest_step_and_of_a_transfer_that_stands_still(rig: FakedRig) -> None:
    rig.turn(0.0, WELCOME)
    rig.scheduler.steps_to_plan = 1
    rig.turn(0.25)
    rig.scheduler.steps_to_plan = 1
    rig.turn(0.5)
    rig.transfers.progress_s = 0.75
    load = rig.heartbeat(1.0).load
    assert (load.pages_free, load.oldest_step_s, load.oldest_transfer_s) == (5, 0.75, 0.25)
    rig.executor.finish_one()
    rig.transfers.progress_s = 2.5
    load = rig.heartbeat(2.0).load
    assert (load.oldest_step_s, load.oldest_transfer_s) == (1.5, 0.0), "of the step that is left; the other thread is ahead"
    rig.executor.finish_one()
    assert rig.heartbeat(3.0).load.oldest_step_s == 0.0


def test_a_heartbeat_counts_what_the_mail_refused_and_lost() -> None:
    counters = FakedRig().heartbeat(0.0, WELCOME).counters
    assert (counters.steps, counters.frames_refused, counters.messages_lost) == (6, 3, 4)


# --- peers and links -------------------------------------------------------------------------------------------------------


def test_links_are_reported_as_they_change() -> None:
    rig = Rig()
    rig.turn(0.0, WELCOME)
    assert reported(rig, 0.1, THERE) == [(link("connecting"),)]
    assert rig.transfers.submitted == [Connect(THERE.joined)]
    ready = link("ready", detail="cma")
    rig.transfers.events.append(LinkChanged(ready))
    assert reported(rig, 0.2) == [(ready,)]
    assert reported(rig, 0.3) == [], "nothing has changed"
    assert reported(rig, 0.4, GONE) == [], "the router knows that it has left"
    assert rig.transfers.submitted[-1] == Connect((), (D,))


def test_a_heartbeat_says_which_peers_the_instance_knows_and_which_links_it_has_told() -> None:
    rig = Rig()
    first = rig.heartbeat(0.0, WELCOME)
    beat = rig.heartbeat(0.1, THERE)
    assert [(each.peers_version, each.links_version) for each in (first, beat)] == [(0, 0), (1, 1)]
    skipped = Peers(version=9, since=8, left=(D,))
    assert rig.heartbeat(0.2, skipped).peers_version == 1, "it lacks what came between"


def reported(rig: Rig, now: float, *messages: Peers) -> list[tuple[LinkInfo, ...]]:
    """The links of the reports that a turn sends."""
    rig.mail.sent.clear()
    rig.mail.arriving += [(ROUTER, message) for message in messages]
    rig.worker.turn(now)
    return [message.links for _, message in rig.mail.sent if isinstance(message, LinkReport)]


@pytest.mark.parametrize(
    ("peers", "links"),
    [(GONE, []), (Peers(version=2, since=1, joined=(instance("d", "decode", "2"),)), [(link("connecting", "2"),)])],
    ids=["a peer that has left", "a former incarnation"],
)
def test_a_link_event_of_somebody_who_is_not_there_any_more_is_not_reported(
    peers: Peers, links: list[tuple[LinkInfo, ...]]
) -> None:
    rig = Rig()
    rig.turn(0.0, WELCOME, THERE)
    rig.transfers.events.append(LinkChanged(link("lost")))
    assert reported(rig, 1.0, peers) == links


def test_a_peer_that_left_can_be_written_to_for_a_while() -> None:
    """It may only have been silent, and wait for the word that brings its pages home."""
    rig = Rig()
    rig.turn(0.0, WELCOME, THERE)
    rig.turn(1.0, GONE)
    rig.turn(2.0, msgspec.structs.replace(THERE, version=3))
    rig.turn(100.0, msgspec.structs.replace(GONE, version=4))
    assert rig.mail.routes[D] is not None
    rig.worker.turn(100.0 + ROUTE_MEMORY_S)
    assert rig.mail.routes[D] is None


def test_what_the_transfers_say_reaches_the_scheduler_before_the_steps_that_returned(rig: FakedRig) -> None:
    rig.scheduler.steps_to_plan = 1
    rig.turn(0.0, WELCOME)
    rig.transfers.events += [PushDone(Ticket(1), 1, 0.1), Settled(key()), LinkChanged(link("lost"))]
    rig.executor.finish_one()
    rig.turn(0.1, Cancel(key=key()))
    assert rig.scheduler.told == ["Cancel", "PushDone", "Settled", "LinkChanged", "step done"]


# --- leaving ---------------------------------------------------------------------------------------------------------------


def test_an_instance_that_is_told_to_drain_says_so_at_once_and_once(rig: FakedRig) -> None:
    assert not rig.heartbeat(0.0, WELCOME).draining
    assert rig.heartbeat(0.1, Drain()).draining
    assert rig.turn(0.2, Drain()) == [] and rig.scheduler.told == ["Drain"]


def test_what_tells_a_former_life_to_drain_is_ignored_and_counted(rig: FakedRig) -> None:
    beat = rig.heartbeat(0.0, WELCOME, Drain(incarnation=Incarnation("former")))
    assert (beat.draining, beat.counters.messages_stale, rig.scheduler.told) == (False, 1, [])
    assert rig.heartbeat(0.1, Drain(incarnation=rig.memberships.info.incarnation)).draining


def test_it_has_drained_when_the_scheduler_has_and_no_step_is_in_flight(rig: FakedRig) -> None:
    rig.scheduler.drained = True
    drained = [rig.worker.drained]
    rig.scheduler.drained, rig.scheduler.steps_to_plan = False, 1
    rig.turn(0.0, WELCOME, Drain())
    drained.append(rig.worker.drained)
    rig.scheduler.drained = True
    drained.append(rig.worker.drained)
    rig.executor.finish_one()
    rig.turn(0.1)
    drained.append(rig.worker.drained)
    assert drained == [False, False, False, True]


def test_the_loop_turns_until_it_has_drained_and_says_goodbye(rig: FakedRig) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        rig.scheduler.drained = len(waits) == 2

    run(rig.worker, wait, lambda: 0.0, lambda: len(waits) == 1)
    assert rig.scheduler.told == ["Drain"] and waits == [0.25, 0.25]
    assert rig.mail.names()[-1] == "Goodbye"


def test_the_router_is_told_also_when_something_fails() -> None:
    rig = FakedRig()

    def wait(seconds: float) -> None:
        raise TransferError("the transfer thread failed")

    with pytest.raises(TransferError):
        run(rig.worker, wait, lambda: 0.0, lambda: False)
    assert rig.mail.names()[-1] == "Goodbye"


def test_layers_of_the_step_under_way_are_told_once_each_time_there_are_more(rig: FakedRig) -> None:
    rig.scheduler.steps_to_plan = 2
    rig.turn(0.0)
    (_, first), (_, second) = rig.executor.steps
    first.layers_done, second.layers_done = 1, 1
    rig.turn(0.1)
    rig.turn(0.2)
    assert rig.scheduler.told == ["1 layers"], "steps are computed in order: the second is not under way"
    first.layers_done = 2
    rig.turn(0.3)
    rig.executor.finish_one()
    rig.turn(0.4)
    assert rig.scheduler.told == ["1 layers", "2 layers", "step done", "1 layers"]


# --- grammars --------------------------------------------------------------------------------------------------------------


def test_the_scheduler_hears_when_a_grammar_is_ready_and_the_loop_is_due_then(rig: FakedRig) -> None:
    rig.turn(0.0, WELCOME)
    rig.executor.prepared_s = 0.3
    rig.scheduler.answers = [Prepare(key("a"), ANY_TEXT), Prepare(key("b"), Grammar("regex", "b"), "bob")]
    rig.turn(0.1, Cancel(key=key("a")))
    assert rig.executor.prepared_for == ["", "bob"]
    assert "Prepared" not in rig.scheduler.told and rig.worker.next_deadline() == 0.3
    rig.executor.now = 0.3
    rig.turn(0.3)
    unknown = Failed.of(BadRequest("regex: the fake knows no grammars: serve a model to use them", field="regex"))
    assert rig.scheduler.prepared == {"a": None, "b": unknown}
    rig.turn(0.4)
    assert rig.scheduler.told.count("Prepared") == 2
