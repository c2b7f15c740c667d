"""The decode scheduler, as messages and step results in, plans and actions out."""

import msgspec
import pytest

from common.engine.plan import Plan
from common.ids import Generation, InstanceId, pack_ids, unpack_ids
from common.instance.ports import Action, Decision, Send
from common.messages import (
    Cancel,
    Decline,
    Failed,
    Finished,
    Generate,
    Grant,
    Handoff,
    Peers,
    Reserve,
    TokenBatch,
    TokenDelta,
    Withdraw,
)
from decode.scheduler import FENCE_S, DecodeScheduler
from tests.builders import EOS, LAYOUT, engine, instance, key, result, sampling

ME, ROUTER, WRITER = InstanceId("d"), InstanceId("router"), InstanceId("p")


def scheduler(total_pages: int = 64, max_rows: int = 4, chunk_tokens: int = 8, max_waiting: int = 16) -> DecodeScheduler:
    made = DecodeScheduler(ME, engine(total_pages, max_rows), chunk_tokens, max_waiting, request_timeout_s=60.0)
    made.receive(ROUTER, Peers(instances=(instance("p", "prefill"),)), 0.0)
    return made


def reserve(name: str, tokens: int, max_new_tokens: int = 4) -> Reserve:
    prompt = pack_ids([100 + i for i in range(tokens)])
    return Reserve(key=key(name), source=WRITER, prompt=prompt, sampling=sampling(max_new_tokens))


def generate(name: str, tokens: int, max_new_tokens: int = 4, stop_token_ids: tuple[int, ...] = ()) -> Generate:
    prompt = pack_ids([100 + i for i in range(tokens)])
    return Generate(key=key(name), prompt=prompt, sampling=sampling(max_new_tokens, stop_token_ids=stop_token_ids))


def grants(actions: list[Action]) -> list[Grant]:
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Grant)]


def deltas(actions: list[Action]) -> list[TokenDelta]:
    batches = [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, TokenBatch)]
    return [delta for batch in batches for delta in batch.deltas]


def handoff(grant: Grant, first_token: int = 50) -> Handoff:
    pages = len(unpack_ids(grant.pages))
    return Handoff(
        key=grant.key,
        generation=grant.generation,
        first_token=first_token,
        pushed_pages=pages,
        pushed_bytes=pages * LAYOUT.page_bytes,
    )


def reserved(made: DecodeScheduler, name: str = "a", tokens: int = 6, max_new_tokens: int = 4) -> Grant:
    assert made.receive(WRITER, reserve(name, tokens, max_new_tokens), 0.0) == []
    (grant,) = grants(made.decide(0.0).actions)
    return grant


def planned(decision: Decision) -> Plan:
    assert decision.plan is not None
    return decision.plan


def assert_all_home(made: DecodeScheduler) -> None:
    load = made.load()
    assert (load.pages_free, load.waiting_requests, load.running_requests) == (load.pages_total, 0, 0)
    assert load.reservations == 0


def test_a_handed_off_request_decodes_to_its_limit() -> None:
    made = scheduler()
    grant = reserved(made)
    assert len(unpack_ids(grant.pages)) == 2 and made.open_reservations == 1
    assert made.decide(0.0).plan is None, "nothing to compute while the KV is on its way"
    assert made.receive(WRITER, handoff(grant), 0.1) == []
    first = planned(made.decide(0.1))
    (start,) = first.starts
    assert (start.length, start.last_token, len(start.pages)) == (6, 50, 3)
    assert first.chunks == () and first.decode_rows.tolist() == [start.row]
    second = planned(made.decide(0.1))  # launched before the first came back
    assert deltas(made.step_done(result(first, [51]), 0.2)) == [TokenDelta(key("a"), 1, (51,), None)]
    third = planned(made.decide(0.2))
    made.step_done(result(second, [52]), 0.3)
    assert made.decide(0.3).plan is None, "no step is planned beyond the limit"
    assert deltas(made.step_done(result(third, [53]), 0.4)) == [TokenDelta(key("a"), 3, (53,), Finished(reason="length"))]
    assert_all_home(made)
    counters = made.counters()
    assert (counters.prompt_tokens_computed, counters.tokens_generated, counters.pages_received) == (0, 3, 2)


def test_an_end_of_sequence_ends_the_row_and_the_wasted_step_is_dropped() -> None:
    made = scheduler()
    made.receive(WRITER, handoff(reserved(made)), 0.0)
    first, wasted = planned(made.decide(0.0)), planned(made.decide(0.0))
    (delta,) = deltas(made.step_done(result(first, [EOS]), 0.1))
    assert delta.ending == Finished(reason="stop", matched=EOS)
    assert made.load().pages_free < made.load().pages_total, "a step in flight still writes the pages"
    assert made.step_done(result(wasted, [60]), 0.2) == []
    assert_all_home(made)
    assert made.counters().tokens_generated == 1


def test_the_requests_own_stop_tokens_end_it_and_only_it() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 4, stop_token_ids=(70,)), 0.0)
    made.receive(ROUTER, generate("b", 4), 0.0)
    (one, other) = deltas(made.step_done(result(planned(made.decide(0.0)), [70, 70]), 0.1))
    assert one.ending == Finished(reason="stop", matched=70) and other.ending is None


def test_a_direct_request_is_prefilled_in_chunks_between_decode_steps() -> None:
    made = scheduler(chunk_tokens=8)
    made.receive(WRITER, handoff(reserved(made)), 0.0)
    made.receive(ROUTER, generate("b", 10), 0.0)
    first, second = planned(made.decide(0.0)), planned(made.decide(0.0))
    assert [len(c.token_ids) for c in first.chunks] == [8] and len(first.decode_rows) == 1
    assert [c.last for c in second.chunks] == [True] and len(second.decode_rows) == 1
    made.step_done(result(first, [51]), 0.1)
    tokens = deltas(made.step_done(result(second, [80, 52]), 0.2))
    assert [(d.key.request_id, d.first, d.token_ids) for d in tokens] == [("b", 0, (80,)), ("a", 2, (52,))]
    third = planned(made.decide(0.2))
    assert len(third.decode_rows) == 2 and third.starts == ()
    assert made.counters().prompt_tokens_computed == 10


def test_pages_for_prompt_and_answer_are_leased_together() -> None:
    made = scheduler(total_pages=4)
    reserved(made, "a", tokens=8, max_new_tokens=5)  # 12 tokens of KV: 3 pages
    assert made.load().pages_free == 1
    made.receive(WRITER, reserve("b", 6), 0.0)
    assert grants(made.decide(0.0).actions) == []


def test_a_request_that_fits_may_pass_one_that_does_not_for_a_bounded_time() -> None:
    made = scheduler(total_pages=6)
    reserved(made, "holder", tokens=9, max_new_tokens=4)  # 3 of 6 pages
    made.receive(WRITER, reserve("large", 17), 0.0)
    made.receive(WRITER, reserve("small", 3, max_new_tokens=2), 0.0)
    assert [g.key.request_id for g in grants(made.decide(1.0).actions)] == ["small"]
    made.receive(WRITER, reserve("late", 3, max_new_tokens=2), 1.0)
    assert grants(made.decide(5.0).actions) == []


def test_a_reservation_waits_for_a_row_as_well_as_for_pages() -> None:
    made = scheduler(max_rows=1)
    first = reserved(made, "a", max_new_tokens=2)
    made.receive(WRITER, reserve("b", 6), 0.0)
    assert grants(made.decide(0.0).actions) == []
    made.receive(WRITER, handoff(first), 0.0)
    made.step_done(result(planned(made.decide(0.0)), [51]), 0.1)
    assert [g.key.request_id for g in grants(made.decide(0.2).actions)] == ["b"]


def test_a_cancelled_reservation_keeps_its_pages_until_the_writer_withdraws() -> None:
    made = scheduler()
    reserved(made)
    assert made.receive(ROUTER, Cancel(key=key("a")), 0.1) == []
    assert made.load().pages_free < made.load().pages_total
    made.receive(WRITER, Withdraw(key=key("a")), 0.2)
    assert_all_home(made)


def test_a_cancelled_reservation_that_is_handed_off_all_the_same_is_dropped() -> None:
    made = scheduler()
    grant = reserved(made)
    made.receive(ROUTER, Cancel(key=key("a")), 0.1)
    made.receive(WRITER, handoff(grant), 0.2)
    assert made.decide(0.2).plan is None
    assert_all_home(made)


def test_a_cancel_in_the_line_declines() -> None:
    made = scheduler(max_rows=1)
    reserved(made, "a")
    made.receive(WRITER, reserve("b", 6), 0.0)
    (send,) = made.receive(ROUTER, Cancel(key=key("b")), 0.1)
    assert isinstance(send, Send) and send.to == WRITER and isinstance(send.message, Decline)
    made.receive(WRITER, Withdraw(key=key("b")), 0.2)
    assert made.load().waiting_requests == 0


def test_a_cancel_that_overtakes_its_reserve_is_remembered() -> None:
    made = scheduler()
    made.receive(ROUTER, Cancel(key=key("a")), 0.0)
    (send,) = made.receive(WRITER, reserve("a", 6), 0.1)
    assert isinstance(send, Send) and isinstance(send.message, Decline)
    assert_all_home(made)


def test_a_cancel_while_decoding_brings_the_pages_home_after_the_step() -> None:
    made = scheduler()
    made.receive(WRITER, handoff(reserved(made)), 0.0)
    plan = planned(made.decide(0.0))
    made.receive(ROUTER, Cancel(key=key("a")), 0.1)
    assert made.decide(0.1).plan is None
    assert made.step_done(result(plan, [51]), 0.2) == []
    assert_all_home(made)


def test_a_cancel_between_handoff_and_the_next_step_leaves_no_start_behind() -> None:
    made = scheduler(max_rows=1)
    made.receive(WRITER, handoff(reserved(made)), 0.0)
    made.receive(ROUTER, Cancel(key=key("a")), 0.0)
    assert_all_home(made)
    made.receive(ROUTER, generate("b", 4), 0.1)
    assert len(planned(made.decide(0.1)).starts) == 1


def test_a_cancel_during_local_prefill_brings_the_pages_home_after_the_step() -> None:
    made = scheduler(chunk_tokens=4)
    made.receive(ROUTER, generate("a", 12), 0.0)
    first, second = planned(made.decide(0.0)), planned(made.decide(0.0))
    made.receive(ROUTER, Cancel(key=key("a")), 0.1)
    assert made.decide(0.1).plan is None
    made.step_done(result(first), 0.2)
    made.step_done(result(second), 0.3)
    assert_all_home(made)


def test_a_stale_handoff_is_counted_and_changes_nothing() -> None:
    made = scheduler()
    grant = reserved(made)
    stale = Handoff(key=grant.key, generation=Generation(grant.generation + 1), first_token=1, pushed_pages=2, pushed_bytes=2)
    made.receive(WRITER, stale, 0.1)
    assert made.decide(0.1).plan is None and made.counters().messages_stale == 1


def test_the_reservations_of_a_writer_that_died_come_home_after_the_margin() -> None:
    made = scheduler()
    reserved(made)
    made.receive(ROUTER, Peers(instances=()), 1.0)
    made.tick(1.0 + FENCE_S - 0.1)
    assert made.load().reservations == 1
    (delta,) = deltas(made.tick(1.0 + FENCE_S))
    assert isinstance(delta.ending, Failed)
    assert_all_home(made)


def test_a_request_ends_when_its_deadline_passes() -> None:
    made = scheduler()
    made.receive(WRITER, handoff(reserved(made)), 0.0)
    plan = planned(made.decide(0.0))
    (delta,) = deltas(made.tick(60.0))
    assert delta.first == 1 and isinstance(delta.ending, Failed) and delta.ending.status == 504
    made.step_done(result(plan, [51]), 60.1)
    assert_all_home(made)


def test_what_cannot_be_served_is_refused_to_whoever_asked() -> None:
    made = scheduler(max_waiting=1)
    (send,) = made.receive(WRITER, reserve("long", 126), 0.0)
    assert isinstance(send, Send) and isinstance(send.message, Decline) and "too long" in send.message.failed.message
    (delta,) = deltas(made.receive(ROUTER, generate("long", 126), 0.0))
    assert isinstance(delta.ending, Failed) and delta.ending.status == 400
    (send,) = made.receive(InstanceId("stranger"), reserve("s", 4), 0.0)
    assert isinstance(send, Send) and isinstance(send.message, Decline) and "stranger" in send.message.failed.message
    made.receive(ROUTER, generate("a", 5), 0.0)
    (delta,) = deltas(made.receive(ROUTER, generate("b", 5), 0.0))
    assert isinstance(delta.ending, Failed) and delta.ending.status == 429
    (send,) = made.receive(WRITER, reserve("c", 4), 0.0)
    assert isinstance(send, Send) and isinstance(send.message, Decline) and send.message.failed.status == 429


@pytest.mark.parametrize("change", [{"max_new_tokens": 0}, {"max_new_tokens": -100}, {"max_new_tokens": 1}, {"seed": 2**63}])
def test_a_reservation_with_absurd_limits_is_declined(change: dict[str, int]) -> None:
    made = scheduler()
    absurd = msgspec.structs.replace(sampling(), **change)
    (send,) = made.receive(WRITER, msgspec.structs.replace(reserve("a", 5), sampling=absurd), 0.0)
    assert isinstance(send, Send) and isinstance(send.message, Decline) and send.message.failed.status == 400
    assert_all_home(made)


@pytest.mark.parametrize(
    "change", [{"first_token": 10**6}, {"first_token": -1}, {"pushed_pages": 2**64 - 1}, {"pushed_bytes": 3}]
)
def test_a_handoff_that_does_not_fit_its_reservation_fails_its_request_only(change: dict[str, int]) -> None:
    made = scheduler()
    grant = reserved(made)
    (delta,) = deltas(made.receive(WRITER, msgspec.structs.replace(handoff(grant), **change), 0.1))
    assert isinstance(delta.ending, Failed) and delta.first == 1
    assert_all_home(made)
    made.receive(WRITER, handoff(reserved(made, "b")), 0.2)
    assert planned(made.decide(0.2)).decode_rows.tolist() == [0]


def test_a_writer_that_was_only_silent_keeps_its_reservations() -> None:
    made = scheduler()
    grant = reserved(made)
    made.receive(ROUTER, Peers(instances=()), 1.0)
    made.receive(ROUTER, Peers(instances=(instance("p", "prefill"),)), 5.0)
    assert made.tick(1.0 + 2 * FENCE_S) == []
    made.receive(WRITER, handoff(grant), 40.0)
    assert len(planned(made.decide(40.0)).decode_rows) == 1
