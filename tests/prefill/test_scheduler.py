"""The prefill scheduler, as messages and step results in, plans and actions out."""

import msgspec

from common.engine.plan import Plan
from common.ids import Generation, InstanceId, Key, Ticket, pack_ids, unpack_ids
from common.instance.ports import Action, Push, PushDone, PushFailed, Send
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
from prefill.scheduler import PrefillScheduler
from tests.builders import EOS, LAYOUT, engine, instance, key, result, sampling

ME, ROUTER, DECODE = InstanceId("p"), InstanceId("router"), InstanceId("d")


def scheduler(total_pages: int = 64, max_rows: int = 4, chunk_tokens: int = 8, max_waiting: int = 16) -> PrefillScheduler:
    made = PrefillScheduler(ME, engine(total_pages, max_rows), chunk_tokens, max_waiting, request_timeout_s=60.0)
    made.receive(ROUTER, Peers(instances=(instance("d", "decode"),)), 0.0)
    return made


def generate(name: str, tokens: int, max_new_tokens: int = 4, decode: InstanceId | None = DECODE) -> Generate:
    prompt = pack_ids([100 + i for i in range(tokens)])
    return Generate(key=key(name), prompt=prompt, sampling=sampling(max_new_tokens), decode=decode)


def grant_for(actions: list[Action], first_page: int = 40) -> Grant:
    """What the decode instance would answer to the Reserve among `actions`."""
    reserve = next(a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Reserve))
    pages = range(first_page, first_page + LAYOUT.pages_for(len(unpack_ids(reserve.prompt))))
    return Grant(key=reserve.key, generation=Generation(1), pages=pack_ids(list(pages)))


def spans(plan: Plan | None) -> list[tuple[int, int, bool]]:
    assert plan is not None
    return [(chunk.start, chunk.start + len(chunk.token_ids), chunk.last) for chunk in plan.chunks]


def deltas(actions: list[Action]) -> list[TokenDelta]:
    batches = [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, TokenBatch)]
    return [delta for batch in batches for delta in batch.deltas]


def kinds(actions: list[Action]) -> list[str]:
    return [type(a.message).__name__ if isinstance(a, Send) else "Push" for a in actions]


def assert_all_home(made: PrefillScheduler) -> None:
    load = made.load()
    assert (load.pages_free, load.waiting_requests, load.running_requests) == (load.pages_total, 0, 0)


def finish_pushes(made: PrefillScheduler, actions: list[Action]) -> list[Action]:
    more: list[Action] = []
    for push in [a for a in actions if isinstance(a, Push)]:
        more += made.transfer_event(PushDone(push.ticket, len(push.source_pages) * LAYOUT.page_bytes, 0.1), 1.0)
    return more


def test_one_request_goes_from_generate_to_handoff() -> None:
    made = scheduler()
    assert made.receive(ROUTER, generate("a", 10), 0.0) == []
    first = made.decide(0.0)
    assert kinds(first.actions) == ["Reserve"] and spans(first.plan) == [(0, 8, False)]
    second = made.decide(0.0)  # launched before the first came back
    assert spans(second.plan) == [(8, 10, True)] and made.decide(0.0).plan is None
    assert made.receive(DECODE, grant_for(first.actions), 0.0) == []
    actions = made.step_done(result(first.plan), 0.1)
    assert kinds(actions) == ["Push"]
    assert finish_pushes(made, actions) == []
    actions = made.step_done(result(second.plan, [55]), 0.2)
    assert kinds(actions) == ["TokenBatch", "Push"], "the first token leaves before the last push is posted"
    assert deltas(actions) == [TokenDelta(key("a"), 0, (55,), None)]
    (handoff,) = finish_pushes(made, actions)
    assert isinstance(handoff, Send) and isinstance(handoff.message, Handoff)
    assert (handoff.message.pushed_pages, handoff.message.first_token) == (3, 55)
    assert_all_home(made)
    counters = made.counters()
    assert (counters.handoffs, counters.pages_pushed, counters.prompt_tokens_computed) == (1, 3, 10)
    assert counters.bytes_pushed == 3 * LAYOUT.page_bytes


def test_several_prompts_share_one_forward_under_the_token_budget() -> None:
    made = scheduler(chunk_tokens=8)
    for name, tokens in (("a", 3), ("b", 3), ("c", 20)):
        made.receive(ROUTER, generate(name, tokens), 0.0)
    assert spans(made.decide(0.0).plan) == [(0, 3, True), (0, 3, True), (0, 2, False)]
    assert spans(made.decide(0.0).plan) == [(2, 10, False)]


def test_a_reservation_is_asked_for_only_when_the_first_chunk_is_admitted() -> None:
    made = scheduler(chunk_tokens=8)
    for name in ("a", "b"):
        made.receive(ROUTER, generate(name, 20), 0.0)
    reserved = [kinds(made.decide(0.0).actions) for _ in range(3)]
    assert reserved == [["Reserve"], [], ["Reserve"]]


def test_admission_stops_while_memory_is_full_and_goes_on_when_pages_come_home() -> None:
    made = scheduler(total_pages=3)
    made.receive(ROUTER, generate("a", 8), 0.0)
    made.receive(ROUTER, generate("b", 8), 0.0)
    first = made.decide(0.0)
    assert spans(first.plan) == [(0, 8, True)]
    made.receive(DECODE, grant_for(first.actions), 0.0)
    actions = made.step_done(result(first.plan, [55]), 0.1)
    assert made.decide(0.1).plan is None
    finish_pushes(made, actions)
    assert spans(made.decide(0.2).plan) == [(0, 8, True)]


def test_an_answer_of_one_token_needs_no_decode_instance() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 5, max_new_tokens=1, decode=None), 0.0)
    decision = made.decide(0.0)
    assert decision.actions == []
    assert deltas(made.step_done(result(decision.plan, [55]), 0.1)) == [TokenDelta(key("a"), 0, (55,), Finished(reason="length"))]
    assert_all_home(made)


def test_an_end_of_sequence_as_first_token_ends_here_and_withdraws_the_reservation() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 5), 0.0)
    decision = made.decide(0.0)
    made.receive(DECODE, grant_for(decision.actions), 0.0)
    actions = made.step_done(result(decision.plan, [EOS]), 0.1)
    assert deltas(actions) == [TokenDelta(key("a"), 0, (EOS,), Finished(reason="stop", matched=EOS))]
    assert kinds(actions) == ["TokenBatch", "Withdraw"]
    assert_all_home(made)


def test_a_cancel_in_the_waiting_line_leaves_nothing() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 5), 0.0)
    assert made.receive(ROUTER, Cancel(key=key("a")), 0.0) == []
    assert made.decide(0.0).plan is None
    assert_all_home(made)


def test_a_cancel_under_a_step_keeps_the_pages_until_the_step_returns() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 12), 0.0)
    first, second = made.decide(0.0), made.decide(0.0)
    actions = made.receive(ROUTER, Cancel(key=key("a")), 0.0)
    assert kinds(actions) == ["Withdraw"]
    made.step_done(result(first.plan), 0.1)
    assert made.load().pages_free < made.load().pages_total
    assert made.step_done(result(second.plan, [5]), 0.2) == []
    assert_all_home(made)


def test_a_cancel_under_a_push_keeps_the_pages_until_the_push_is_terminal() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 4), 0.0)
    decision = made.decide(0.0)
    made.receive(DECODE, grant_for(decision.actions), 0.0)
    actions = made.step_done(result(decision.plan, [5]), 0.1)
    assert made.receive(ROUTER, Cancel(key=key("a")), 0.2) == []
    assert made.load().pages_free < made.load().pages_total
    assert kinds(finish_pushes(made, actions)) == ["Withdraw"]
    assert_all_home(made)


def test_a_failed_push_ends_the_request_after_its_first_token() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 4), 0.0)
    decision = made.decide(0.0)
    made.receive(DECODE, grant_for(decision.actions), 0.0)
    made.step_done(result(decision.plan, [5]), 0.1)
    actions = made.transfer_event(PushFailed(Ticket(1), "cable", quiescent=True), 0.2)
    (delta,) = deltas(actions)
    assert delta.first == 1 and isinstance(delta.ending, Failed) and "cable" in delta.ending.message
    assert_all_home(made)


def test_pages_that_a_push_may_still_read_never_come_home() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 4), 0.0)
    decision = made.decide(0.0)
    made.receive(DECODE, grant_for(decision.actions), 0.0)
    made.step_done(result(decision.plan, [5]), 0.1)
    made.transfer_event(PushFailed(Ticket(1), "cable", quiescent=False), 0.2)
    assert made.load().pages_quarantined == 1 and made.pool.free_pages == made.pool.total_pages - 1
    assert made.load().running_requests == 0


def test_a_declined_request_fails_with_the_reason() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 4), 0.0)
    decision = made.decide(0.0)
    too_long = Failed(message="too long for d", kind="invalid_request_error", status=400)
    (delta,) = deltas(made.receive(DECODE, Decline(key=key("a"), failed=too_long), 0.1))
    assert delta.ending == too_long
    made.step_done(result(decision.plan, [5]), 0.2)
    assert_all_home(made)


def test_a_request_ends_when_its_deadline_passes() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 4), 0.0)
    assert made.next_deadline() == 60.0
    (delta,) = deltas(made.tick(60.0))
    assert isinstance(delta.ending, Failed) and delta.ending.status == 504
    assert made.decide(60.0).plan is None
    assert_all_home(made)


def test_requests_for_a_decode_instance_that_left_fail_in_every_phase() -> None:
    made = scheduler(chunk_tokens=4)
    for name in ("computing", "waiting"):
        made.receive(ROUTER, generate(name, 4), 0.0)
    decision = made.decide(0.0)
    actions = made.receive(ROUTER, Peers(instances=()), 0.1)
    assert {delta.key.request_id for delta in deltas(actions)} == {"computing", "waiting"}
    made.step_done(result(decision.plan, [5]), 0.2)
    assert_all_home(made)


def refusal(made: PrefillScheduler, message: Generate) -> Failed:
    (delta,) = deltas(made.receive(ROUTER, message, 0.0))
    assert isinstance(delta.ending, Failed)
    return delta.ending


def test_what_cannot_be_served_is_refused_with_a_reason() -> None:
    made = scheduler(max_waiting=1)
    bad = Generate(key=key("bad"), prompt=b"abc", sampling=sampling(), decode=DECODE)
    empty = Generate(key=key("bad"), prompt=b"", sampling=sampling(), decode=DECODE)
    assert refusal(made, bad).status == 400
    assert refusal(made, empty).status == 400
    assert "too long" in refusal(made, generate("a", 129)).message
    absurd = msgspec.structs.replace(generate("a", 5), sampling=sampling(max_new_tokens=0))
    assert "max_tokens" in refusal(made, absurd).message
    assert "cannot decode" in refusal(made, generate("a", 5, decode=None)).message
    assert refusal(made, generate("a", 5, decode=InstanceId("nobody"))).status == 503
    made.receive(ROUTER, generate("a", 5), 0.0)
    assert refusal(made, generate("b", 5)).status == 429
    assert made.counters().requests_accepted == 1


def test_a_second_generate_of_the_same_attempt_is_dropped_and_counted() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 5), 0.0)
    assert made.receive(ROUTER, generate("a", 5), 0.0) == []
    assert made.counters().messages_stale == 1


def test_withdraw_and_cancel_names_stay_with_their_attempt() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 5), 0.0)
    assert made.receive(ROUTER, Cancel(key=Key(key("a").request_id, 1)), 0.0) == []
    decision = made.decide(0.0)
    assert not any(isinstance(a.message, Withdraw) for a in decision.actions if isinstance(a, Send))
    assert decision.plan is not None
