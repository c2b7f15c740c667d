"""The worker's loop over ports, with the executor two steps ahead; and the cost of steps that it measures."""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, combinations, cycle, islice
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import BadRequest, TandemError, TransferError
from common.executor import Chunk, ExecutorFailed, StepPlan
from common.ids import DETOKENIZER, ROUTER, Incarnation, InstanceId, Ticket, pack_ids, text_name
from common.instance.cost_meter import FORMER_SHARE, HALF_LIFE_STEPS, LEAST_STEPS, CostMeter
from common.instance.membership import ABANDON_AFTER_S
from common.instance.ports import Prepare
from common.instance.worker import ROUTE_MEMORY_S, SLACK, run
from common.messages import Cancel, Drain, Failed, Generate, Goodbye, LinkInfo, LinkReport, LinkState, Peers, Reserve, TokenBatch
from common.messages.transfers import Connect, LinkChanged, PushDone, Settled
from common.sampling_params import Grammar
from common.step_cost import StepCost
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


def test_the_requests_of_a_router_that_is_silent_gone_or_has_a_successor_end_once() -> None:
    silent, gone, rig = FakedRig(), FakedRig(), FakedRig()
    for each in (silent, gone, rig):
        each.turn(0.0, WELCOME)
    sent = [silent.turn(float(second)) for second in range(1, 2 * int(ABANDON_AFTER_S / WELCOME.heartbeat_s))]
    assert sent[10:100] == [["Register"]] * 90, "its requests are served meanwhile"
    assert silent.scheduler.told == ["RouterLost"]
    gone.mail.gone = [AT]
    gone.turn(0.1)
    assert gone.scheduler.told == ["RouterLost"]
    successor = msgspec.structs.replace(WELCOME, router=InstanceId("router-2"), detokenizers=("tcp://127.0.0.1:8",))
    rig.turn(0.1, successor)
    assert rig.scheduler.told == ["RouterLost"]
    there = {InstanceId("router-2"): ADDRESS, text_name(InstanceId("router-2"), 0): "tcp://127.0.0.1:8"}
    assert rig.mail.routes == {AT: ADDRESS, ROUTER: None, DETOKENIZER: None, **there}


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
    rig.turn(1.25)
    rig.transfers.progress_s = 2.5
    load = rig.heartbeat(2.0).load
    assert (load.oldest_step_s, load.oldest_transfer_s) == (0.75, 0.0), "of the step that is left; the other thread is ahead"
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


@pytest.mark.parametrize(("pages_total", "reason", "is_quiet"), [(5, "", True), (6, "", False), (5, "rank 1 ended", False)])
def test_it_says_that_its_transfers_have_ended_only_when_it_drained_and_all_pages_are_home(
    rig: FakedRig, pages_total: int, reason: str, is_quiet: bool
) -> None:
    rig.turn(0.0, WELCOME, Drain())
    rig.scheduler.drained, rig.scheduler.pages_total = True, pages_total
    rig.worker.leave(TransferError(reason) if reason else None)
    goodbye = rig.mail.sent[-1][1]
    assert isinstance(goodbye, Goodbye) and goodbye.is_quiet is is_quiet


def test_an_instance_that_was_not_drained_does_not_say_that_its_transfers_have_ended(rig: FakedRig) -> None:
    rig.turn(0.0, WELCOME)
    rig.scheduler.drained = True
    rig.worker.leave()
    goodbye = rig.mail.sent[-1][1]
    assert isinstance(goodbye, Goodbye) and not goodbye.is_quiet


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


COST = StepCost(step_s=0.006, chunk_token_s=0.00004, decode_row_s=0.0001, held_token_s=0.00000003)
WORK = ((0, 1, 8000), (500, 0, 0), (0, 60, 90_000), (8000, 0, 0), (0, 20, 160_000), (2000, 30, 15_000))
"""Chunk tokens and decode rows of some steps, and what the rows hold."""


def plan(tokens: int, rows: int, held: int) -> StepPlan:
    chunks = (Chunk(0, 0, np.zeros(tokens, dtype=np.int32), last=True),) if tokens else ()
    return StepPlan(0, chunks=chunks, decode_rows=np.zeros(rows, dtype=np.int32), held_tokens=held)


class Engine:
    """Its steps take what the cost says, and run one after the other."""

    def __init__(self) -> None:
        self.meter = CostMeter()
        self.now = 0.0

    def compute(self, work: Iterable[tuple[int, int, int]], longer_s: float = 0.0) -> StepCost:
        """longer_s: how much longer than their cost these steps take. Returns the cost that is measured behind them."""
        for each in work:
            began_s, what = self.now, plan(*each)
            self.now += seconds(what) + longer_s
            self.meter.step(what, began_s, self.now)
        return self.meter.read()


def seconds(work: StepPlan) -> float:
    return COST.seconds(work.chunk_tokens, len(work.decode_rows), work.held_tokens)


def assert_is_cost(cost: StepCost, share: float = 0.01) -> None:
    assert msgspec.structs.astuple(cost) == pytest.approx(msgspec.structs.astuple(COST), rel=share)


def test_the_pace_is_the_cost_of_the_steps() -> None:
    assert_is_cost(Engine().compute(WORK * 20))


def test_a_draft_costs_what_a_row_costs() -> None:
    """One row, which holds as much in all, with and without drafts: nothing else tells a row from a step."""
    meter, now = CostMeter(), 0.0
    for number in range(200):
        drafts = np.zeros(number % 5, dtype=np.int32)
        what = replace(plan(0, 1, 100 * (number % 3)), draft_rows=drafts, draft_tokens=drafts)
        began_s, now = now, now + COST.seconds(0, 1 + len(drafts), what.held_tokens)
        meter.step(what, began_s, now)
    assert meter.read().decode_row_s == pytest.approx(COST.decode_row_s, rel=0.01)


def test_a_few_steps_tell_nothing_yet() -> None:
    engine = Engine()
    assert engine.compute(WORK[:1] * (LEAST_STEPS - 1)) == StepCost()
    assert engine.compute(WORK[:1]) != StepCost()


def test_steps_that_are_held_up_for_seconds_do_not_count_more_than_others() -> None:
    engine = Engine()
    engine.compute(WORK[1:2], longer_s=5.0)
    for _ in range(10):
        engine.compute(WORK * 10)
        engine.compute(WORK[:1], longer_s=5.0)
    assert_is_cost(engine.compute(WORK), share=0.05)


@pytest.mark.parametrize("alike", [(8192, 0, 0), (0, 64, 64 * 2048), (4096, 64, 64 * 512)])
def test_steps_that_are_all_alike_are_told_right_however_their_seconds_are_divided(alike: tuple[int, int, int]) -> None:
    cost = Engine().compute([alike] * 100)
    assert cost.seconds(*alike) == pytest.approx(COST.seconds(*alike), rel=0.001)
    assert (cost.chunk_token_s > 0, cost.decode_row_s > 0) == (alike[0] > 0, alike[1] > 0), "what never came is not measured"


def reference(work: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The first fit in another way: the rows themselves are solved, by their singular values, not the products of them. work:
    [steps, 4]. A small row for each number draws it to 0, as the meter does to the fit before."""
    weights = 1 / np.maximum(seconds, seconds.mean())
    weighed = work * weights[:, None]
    size = np.sqrt((weighed**2).sum(axis=0))
    seen = [number for number in range(4) if size[number]]
    best, least = np.zeros(4), np.inf
    for chosen in chain.from_iterable(combinations(seen, count) for count in range(1, len(seen) + 1)):
        columns = np.vstack([weighed / np.where(size, size, 1.0), math.sqrt(FORMER_SHARE) * np.eye(4)])[:, chosen]
        right = np.concatenate([seconds * weights, np.zeros(4)])
        x = np.linalg.lstsq(columns, right, rcond=None)[0]
        error = float(((columns @ x - right) ** 2).sum())
        if x.min() >= 0 and error < least:
            best, least = np.zeros(4), error
            best[list(chosen)] = x / size[list(chosen)]
    return best


CONTEXTS = {"one": (2048, 2048), "nearly one": (2000, 2100), "many": (100, 32_000), "huge": (1_000_000, 1_100_000)}


@pytest.mark.parametrize("contexts", CONTEXTS)
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_rows_and_what_they_hold_are_told_apart_where_steps_show_it_and_fit_together_where_they_do_not(
    contexts: str, noise: float
) -> None:
    meter, now, chance = CostMeter(), 0.0, np.random.default_rng(3)
    work, took = np.ones((200, 4)), np.zeros(200)
    for number in range(200):
        rows = int(chance.integers(1, 64))
        work[number, 1:] = 0, rows, chance.integers(*CONTEXTS[contexts], rows, endpoint=True).sum()
        took[number] = COST.seconds(*map(int, work[number, 1:])) * (1 + noise * chance.standard_normal())
        meter.step(plan(*map(int, work[number, 1:])), now, now + took[number])
        now += took[number]
    cost, fit = meter.read(), reference(work, np.diff(np.concatenate([[0.0], np.cumsum(took)])))
    found = np.array(msgspec.structs.astuple(cost))
    assert found == pytest.approx(fit, rel=1e-6, abs=1e-12)
    assert work @ found == pytest.approx(took, rel=0.02 + 5 * noise)
    if contexts == "many" and not noise:
        assert found[2:] == pytest.approx((COST.decode_row_s, COST.held_token_s), rel=0.05)


def test_steps_of_other_contexts_divide_what_those_of_one_context_could_not() -> None:
    engine = Engine()
    for each in (2048, 8192, 512):
        cost = engine.compute([(0, rows, rows * each) for rows in range(1, 65)] * 4)
        assert cost.seconds(0, 32, 32 * each) == pytest.approx(COST.seconds(0, 32, 32 * each), rel=0.02)
    assert cost.decode_row_s == pytest.approx(COST.decode_row_s, rel=0.05)
    assert cost.held_token_s == pytest.approx(COST.held_token_s, rel=0.05)


def test_what_no_step_tells_any_more_stays_as_it_was() -> None:
    engine = Engine()
    engine.compute(WORK * 20)
    for _ in range(200):
        cost = engine.compute([(0, 64, 130_000)] * 100)
    assert_is_cost(cost)


def test_another_pace_is_learned() -> None:
    engine = Engine()
    engine.compute(WORK * 100)
    for _ in range(100):
        cost = engine.compute(WORK * 6, longer_s=0.01)
    assert cost.step_s == pytest.approx(COST.step_s + 0.01, rel=0.02)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, 10), (10, 1)])
def test_a_pace_that_changes_as_a_whole_is_learned_within_a_few_half_lives(before: int, after: int) -> None:
    """As when a GPU is throttled, or is free again."""
    meter, now = CostMeter(), 0.0

    def compute(steps: int, factor: int) -> StepCost:
        nonlocal now
        for each in islice(cycle(WORK), steps):
            began_s, what = now, plan(*each)
            now += factor * seconds(what)
            meter.step(what, began_s, now)
            if began_s // 1.0 != now // 1.0:
                meter.read()
        return meter.read()

    assert compute(8 * HALF_LIFE_STEPS, before).chunk_token_s == pytest.approx(before * COST.chunk_token_s, rel=0.05)
    cost = compute(5 * HALF_LIFE_STEPS, after)
    assert (cost.step_s, cost.chunk_token_s) == pytest.approx((after * COST.step_s, after * COST.chunk_token_s), rel=0.25)


def test_a_step_that_waited_for_the_one_before_began_when_that_ended_and_two_of_one_turn_count_as_one() -> None:
    meter, now, chance = CostMeter(), 0.0, Random(1)
    for _ in range(100):
        some = [plan(*chance.choice(WORK)) for _ in range(3)]
        began_s = now + 1.0  # it was idle meanwhile
        now = began_s + seconds(some[0])
        meter.step(some[0], began_s, now)
        now += seconds(some[1]) + seconds(some[2])
        meter.step(some[1], began_s, now)
        meter.step(some[2], began_s + 0.001, now)
    assert_is_cost(meter.read())


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9000), st.integers(0, 300), st.integers(1, 99_000), st.floats(1e-4, 1e3)),
        min_size=LEAST_STEPS,
        max_size=60,
    )
)
def test_whatever_the_steps_took_nothing_is_negative_and_no_other_pace_fits_much_better(
    steps: list[tuple[int, int, int, float]],
) -> None:
    """A row holds as many tokens as the third number says."""
    meter, now = CostMeter(), 0.0
    for tokens, rows, each, took_s in steps:
        meter.step(plan(tokens, rows, rows * each), now, now + took_s)
        now += took_s
    fit = np.array(msgspec.structs.astuple(meter.read()))
    assert (fit >= 0).all() and fit.any()
    what = np.array([(1, tokens, rows, rows * each) for tokens, rows, each, _ in steps], dtype=float)
    took = np.array([took_s for *_, took_s in steps])
    weights = 1 / np.maximum(took, took.mean())  # as for the first fit

    def error(x: np.ndarray) -> float:
        return float((((what @ x - took) * weights) ** 2).sum())

    scale = 1 / np.maximum(what.max(axis=0), 1)
    for number in range(4):
        for change in (-0.1, 0.1):
            other = fit.copy()
            other[number] = max(0.0, fit[number] + change * scale[number] * took.mean())
            assert error(fit) <= error(other) + 0.01 * len(steps)


def test_last_words_name_the_requests_of_the_step_that_failed_each_to_the_router_that_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The second of three is not in the step; the third has come after it."""
    rig = Rig()
    rig.turn(0.0, WELCOME, THERE)
    for number in range(3):
        prompt = pack_ids([100 * number + token for token in range(2 if number else 4)])
        rig.turn(0.1 + number / 10, Generate(key=key(f"r{number}"), prompt=prompt, sampling=sampling(), decodes=(D,)))
    plan, step = rig.executor.steps[0]
    assert [chunk.row for chunk in plan.chunks] == [0] and len(rig.executor.steps) == 2

    def fails() -> None:
        raise ExecutorFailed("step 1 failed: no kernel", plan.step)

    step.poll = fails  # type: ignore[method-assign]
    with pytest.raises(ExecutorFailed):
        run(rig.worker, lambda seconds: None, lambda: 0.5, lambda: False)
    goodbye = rig.mail.sent[-1][1]
    assert isinstance(goodbye, Goodbye) and goodbye.reason == "step 1 failed: no kernel"
    assert goodbye.suspects == (key("r0"),) and not goodbye.is_quiet
    assert "step 1 failed: no kernel; its requests: r0" in caplog.text


@pytest.mark.parametrize(
    "error", [ExecutorFailed("the device is lost"), ExecutorFailed("no such step", 99), TransferError("lost")]
)
def test_what_is_no_failure_of_a_step_accuses_no_request(error: TandemError) -> None:
    rig = Rig()
    rig.turn(0.0, WELCOME, THERE)
    rig.turn(0.1, Generate(key=key(), prompt=pack_ids(range(4)), sampling=sampling(), decodes=(D,)))
    rig.worker.leave(error)
    goodbye = rig.mail.sent[-1][1]
    assert isinstance(goodbye, Goodbye) and goodbye.suspects == () and goodbye.reason == str(error)


def test_a_step_is_stuck_when_it_has_not_moved_for_longer_than_its_like_take() -> None:
    rig = Rig()
    rig.turn(0.0, WELCOME, THERE)
    rig.turn(0.1, Generate(key=key(), prompt=pack_ids(range(9)), sampling=sampling(), decodes=(D,)))

    def oldest_s(now: float) -> float:
        return rig.heartbeat(now, WELCOME).load.oldest_step_s

    assert oldest_s(40.0) == pytest.approx(39.9)
    rig.executor.steps[0][1].progress = 3
    assert oldest_s(60.0) == 0.0 and oldest_s(70.0) == pytest.approx(10.0), "it computes, slowly"
    rig.executor.finish_one()
    rig.turn(80.0, WELCOME)
    assert oldest_s(90.0) == pytest.approx(10.0), "the next one begins where that one ended"
    rig.worker._cost.read = lambda: StepCost(step_s=2.0, chunk_token_s=1.0)  # type: ignore[method-assign]
    plan = rig.executor.steps[0][0]
    assert oldest_s(100.0) == pytest.approx(max(0.0, 20.0 - SLACK * (2.0 + plan.chunk_tokens)))
