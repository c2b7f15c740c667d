"""The decode scheduler, as messages and step results in, plans and actions out: the ways of a request, and its ends."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from common.drafting import Drafting
from common.errors import BadRequest, Unavailable
from common.executor import StepPlan, StepResult
from common.ids import ROUTER, Generation, Incarnation, InstanceId, unpack_ids
from common.instance.ports import Prepare, Prepared, Send, StepsMeasured
from common.messages import Cancel, Decline, Failed, Finished, Generate, Handoff, Reserve, Terms, TokenDelta, Withdraw
from common.step_cost import StepCost
from decode.speculation import Drafts, Speculation
from engine.grammar.grammars import ANY_TEXT
from tests.builders import EOS, engine, key, result, sampling
from tests.decode.rig import WRITER, WRITERS_LIFE, decoding, handoff, renew, reserve, reserved, scheduler, with_reservation
from tests.schedulers import declined, deltas, failures, generate, granted, grants, is_home, planned, prompt_of, renewed, settle


def test_a_handed_off_request_decodes_to_its_limit() -> None:
    made, grant = with_reservation()
    assert len(unpack_ids(grant.pages)) == 2 and made.report().load.reservations == 1
    assert made.decide(0.0).plan is None, "nothing to compute while the KV is on its way"
    assert made.receive(WRITER, handoff(grant), 0.1) == []
    first = planned(made.decide(0.1))
    (start,) = first.starts
    assert (start.length, start.last_token, len(start.pages)) == (6, 50, 3)
    assert first.chunks == () and first.decode_rows.tolist() == [start.row]
    second = planned(made.decide(0.1))  # launched before the first came back
    assert (first.held_tokens, second.held_tokens) == (7, 8), "the prompt, and what was sampled before"
    assert deltas(made.step_done(result(first, [51]), 0.2)) == [TokenDelta(key("a"), 1, (51,), None)]
    third = planned(made.decide(0.2))
    made.step_done(result(second, [52]), 0.3)
    assert made.decide(0.3).plan is None, "no step is planned beyond the limit"
    assert deltas(made.step_done(result(third, [53]), 0.4)) == [TokenDelta(key("a"), 3, (53,), Finished(reason="length"))]
    assert is_home(made)
    counters = made.report().counters
    assert (counters.prompt_tokens_computed, counters.tokens_generated, counters.pages_received) == (0, 3, 2)


def test_an_end_of_sequence_ends_the_row_and_the_wasted_step_is_dropped() -> None:
    made = decoding()
    first, wasted = planned(made.decide(0.0)), planned(made.decide(0.0))
    (delta,) = deltas(made.step_done(result(first, [EOS]), 0.1))
    assert delta.ending == Finished(reason="stop", matched=EOS)
    assert made.report().load.pages_free < made.report().load.pages_total, "a step in flight still writes the pages"
    assert made.step_done(result(wasted, [60]), 0.2) == []
    assert is_home(made)
    assert made.report().counters.tokens_generated == 1


def test_the_requests_own_stop_tokens_end_it_and_only_it() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 4, stop_token_ids=(70,)), 0.0)
    made.receive(ROUTER, generate("b", 4), 0.0)
    (one, other) = deltas(made.step_done(result(planned(made.decide(0.0)), [70, 70]), 0.1))
    assert one.ending == Finished(reason="stop", matched=70) and other.ending is None


def test_an_embedding_ends_its_request_beside_rows_that_decode() -> None:
    made = decoding()
    made.receive(ROUTER, generate("b", 4, max_new_tokens=1, pooling="last"), 0.0)
    plan = planned(made.decide(0.0))
    (chunk,) = plan.chunks
    answered = deltas(made.step_done(replace(result(plan, [EOS, 51]), embeddings={chunk.row: b"1234"}), 0.1))
    assert answered == [TokenDelta(key("b"), 0, (), Finished("stop", embedding=b"1234")), TokenDelta(key("a"), 1, (51,), None)]
    assert made.report().load.running_requests == 1 and made.report().counters.tokens_generated == 1


def test_a_row_that_cannot_go_on_ends_with_its_error_beside_rows_that_decode() -> None:
    """Its token counts for nothing, also that of the step that was launched before the failure was known."""
    made = scheduler()
    made.receive(ROUTER, generate("a", 4), 0.0)
    made.receive(ROUTER, generate("b", 4), 0.0)
    made.step_done(result(planned(made.decide(0.0)), [50, 51]), 0.1)
    plan, next_plan = planned(made.decide(0.1)), planned(made.decide(0.1))
    row = int(plan.sampled_rows[0])
    error = BadRequest("regex: it takes too long to follow", field="regex")
    (going, ended) = deltas(made.step_done(replace(result(plan, [EOS, 52]), failed={row: error}), 0.2))
    assert going == TokenDelta(key("b"), 1, (52,), None)
    assert ended == TokenDelta(key("a"), 1, (), Failed.of(error)) and Failed.of(error).field == "regex"
    (last,) = deltas(made.step_done(replace(result(next_plan, [EOS, 53]), failed={row: error}), 0.3))
    assert last.key == key("b") and made.report().load.running_requests == 1


@pytest.mark.parametrize("stop", [0, 52])
def test_tokens_before_a_failure_count_also_where_drafts_brought_them(monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    """Three drafts are right, and there is no token behind the second. A stop token before that ends the answer in order."""
    made = scheduler(max_rows=8, drafting=Drafting())
    made.receive(ROUTER, generate("a", 4, stop_token_ids=(stop,)), 0.0)
    made.step_done(result(planned(made.decide(0.0)), [50]), 0.0)
    monkeypatch.setattr(Speculation, "depths", lambda speculation, rows, *others: np.full(len(rows), 3))
    drafts = Drafts(np.zeros(3, dtype=np.int32), np.array([51, 52, 53], dtype=np.int32), 0)
    monkeypatch.setattr(Speculation, "draft", lambda speculation, rows, *others: drafts._replace(rows=rows.repeat(3)))
    plan, error = planned(made.decide(0.1)), BadRequest("regex: it takes too long to follow", field="regex")
    row, drafted = int(plan.rows[0]), np.array([52, 53, 54], dtype=np.int32)
    done = replace(result(plan, [51]), drafted=drafted, failed={row: error}, failed_behind={row: 2})
    told = deltas(made.step_done(done, 0.1))
    if stop:
        assert told == [TokenDelta(key("a"), 1, (51, 52), Finished("stop", 52), drafts=(3, 1))]
    else:
        assert told == [TokenDelta(key("a"), 1, (51, 52), drafts=(3, 1)), TokenDelta(key("a"), 3, (), Failed.of(error))]
    assert is_home(made)


def test_a_row_with_drafts_advances_however_many_prompts_are_computed_beside_it() -> None:
    """Always a step is in flight that samples the only token of another request."""
    made = scheduler(drafting=Drafting())
    made.handle(StepsMeasured(StepCost(step_s=0.02, decode_row_s=0.0001)), 0.0)
    made.receive(ROUTER, generate("a", 4, max_new_tokens=100), 0.0)
    in_flight, drafted, advanced = list[StepPlan](), 0, [0]
    for number in range(24):
        for is_later in (False, True):
            if is_later and number >= 10:  # "a" has repeated itself by then
                made.receive(ROUTER, generate(f"b{number}", 4, max_new_tokens=1), 0.0)
            while len(in_flight) < 2 and (plan := made.decide(0.0).plan) is not None:
                in_flight.append(plan)
                drafted += len(plan.draft_rows)
                advanced += [number] * len(plan.decode_rows)
        plan = in_flight.pop(0)
        tokens, behind = (np.full(len(rows), 60, dtype=np.int32) for rows in (plan.sampled_rows, plan.draft_rows))
        made.step_done(StepResult(plan, tokens, drafted=behind), 0.0)
    assert drafted and max(np.diff([*advanced, 24])) <= 2


def test_a_prompt_may_fill_the_context_where_its_one_token_ends_the_answer() -> None:
    made = scheduler(total_pages=600, chunk_tokens=4096, drafting=Drafting())
    context = engine().model.context_tokens
    made.receive(ROUTER, generate("a", context, max_new_tokens=1), 0.0)
    (delta,) = deltas(made.step_done(result(planned(made.decide(0.0)), [50]), 0.1))
    assert delta == TokenDelta(key("a"), 0, (50,), Finished("length")) and is_home(made)
    refused = failures(made.receive(ROUTER, generate("b", context, max_new_tokens=2), 0.2))["b"]
    assert "too long" in refused.message


def test_a_row_that_another_request_has_got_has_no_drafts_of_the_former_one() -> None:
    """Room is made for another key's request while no step is in flight, so that it gets the row at once."""
    made = scheduler(total_pages=20, max_rows=4, chunk_tokens=64, drafting=Drafting())
    made.handle(StepsMeasured(StepCost(step_s=0.02, decode_row_s=0.0001)), 0.0)
    for name in ("a", "b"):
        made.receive(ROUTER, generate(name, 20, max_new_tokens=50, terms=Terms(owner="alice")), 0.0)
    for _ in range(6):
        plan = planned(made.decide(0.0))
        tokens, behind = (np.full(len(rows), 60, dtype=np.int32) for rows in (plan.sampled_rows, plan.draft_rows))
        made.step_done(StepResult(plan, tokens, drafted=behind), 0.0)
    assert len(plan.draft_rows)
    made.receive(WRITER, reserve("c", 20, 4, terms=Terms(owner="bob")), 0.0)
    decision = made.decide(0.0)
    assert granted(decision.actions) == ["c"] and len(failures(decision.actions)) == 1
    assert set(planned(decision).draft_rows.tolist()) <= set(planned(decision).decode_rows.tolist())


def test_drafts_take_no_page_where_the_answers_will_need_all_of_them() -> None:
    made, steps = scheduler(total_pages=8, max_rows=4, chunk_tokens=64, drafting=Drafting()), list[tuple[int, int]]()
    made.handle(StepsMeasured(StepCost(step_s=0.02, decode_row_s=0.0001)), 0.0)
    for name in ("a", "b"):
        made.receive(ROUTER, generate(name, 4, max_new_tokens=24), 0.0)
    for _ in range(9):
        plan = planned(made.decide(0.0))
        tokens, behind = (np.full(len(rows), 60, dtype=np.int32) for rows in (plan.sampled_rows, plan.draft_rows))
        made.step_done(StepResult(plan, tokens, drafted=behind), 0.0)
        steps.append((len(plan.draft_rows), len(plan.grown_rows)))
    assert [each for each in steps if each[0]] == [(2, 0)] * 3, "a step that grows rows for their answers has no drafts"


@pytest.mark.parametrize("is_failed", [True, False])
def test_what_a_failed_chunk_leaves_in_its_pages_is_shared_with_nobody(is_failed: bool) -> None:
    made = scheduler(chunk_tokens=64)
    made.receive(ROUTER, generate("a", 40, max_new_tokens=1, salt="s"), 0.0)
    plan = planned(made.decide(0.0))
    failed = {plan.chunks[0].row: Unavailable("its adapter is not held")} if is_failed else {}
    made.step_done(replace(result(plan, [EOS]), failed=failed), 0.1)
    made.receive(ROUTER, generate("b", 40, max_new_tokens=1, salt="s"), 0.2)
    (chunk,) = planned(made.decide(0.2)).chunks
    assert (chunk.start == 0) is is_failed


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
    assert made.report().counters.prompt_tokens_computed == 10


@pytest.mark.parametrize(
    ("tokens", "max_new_tokens", "pages"), [(8, 2, 3), (8, 60, 3), (6, 60, 3), (6, 3, 2), (6, 4, 3), (3, 2, 1), (4, 2, 2)]
)
def test_pages_are_leased_for_the_prompt_and_one_more_if_the_answer_can_need_it(
    tokens: int, max_new_tokens: int, pages: int
) -> None:
    made, _ = with_reservation("a", tokens, max_new_tokens)
    assert made.report().load.pages_total - made.report().load.pages_free == pages


def test_a_reservation_waits_for_a_row_as_well_as_for_pages() -> None:
    made, first = with_reservation(max_new_tokens=2, max_rows=1)
    made.receive(WRITER, reserve("b", 6), 0.0)
    assert grants(made.decide(0.0).actions) == []
    made.receive(WRITER, handoff(first), 0.0)
    made.step_done(result(planned(made.decide(0.0)), [51]), 0.1)
    assert granted(made.decide(0.2).actions) == ["b"]


def test_a_cancel_in_the_line_is_told_to_the_writer_when_it_asks() -> None:
    made, _ = with_reservation(max_rows=1)
    made.receive(WRITER, reserve("b", 6), 0.0)
    assert made.receive(ROUTER, Cancel(key=key("b")), 0.1) == []
    assert made.report().load.waiting_requests == 0
    assert renewed(made.receive(WRITER, renew(1.0, ("a", 1), ("b", 0)), 1.0)).over == (key("b"),)
    assert made.receive(WRITER, Withdraw(key=key("b")), 1.1) == []


def test_a_withdrawal_of_a_life_that_did_not_ask_leaves_the_line_as_it_is() -> None:
    made, _ = with_reservation(max_rows=1)
    made.receive(WRITER, reserve("b", 6), 0.0)
    assert made.receive(WRITER, Withdraw(key=key("b"), incarnation=Incarnation("2")), 0.1) == []
    assert made.report().load.waiting_requests == 1
    made.receive(WRITER, Withdraw(key=key("b"), incarnation=Incarnation("1")), 0.2)
    assert made.report().load.waiting_requests == 0


def test_a_cancel_that_overtakes_its_reserve_is_remembered() -> None:
    made = scheduler()
    made.receive(ROUTER, Cancel(key=key("a")), 0.0)
    assert made.receive(WRITER, reserve("a", 6), 0.1) == [] and made.decide(0.1).actions == []
    assert renewed(made.receive(WRITER, renew(1.0, ("a", 0)), 1.0)).over == (key("a"),)
    assert is_home(made)


def test_a_cancel_between_handoff_and_the_next_step_leaves_no_start_behind() -> None:
    made = decoding(max_rows=1)
    made.receive(ROUTER, Cancel(key=key("a")), 0.0)
    assert is_home(made)
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
    assert is_home(made)


def test_a_stale_handoff_is_counted_and_changes_nothing() -> None:
    made, grant = with_reservation()
    stale = Handoff(key=grant.key, generation=Generation(grant.generation + 1), first_token=1, pushed_pages=2, pushed_bytes=2)
    made.receive(WRITER, stale, 0.1)
    assert made.decide(0.1).plan is None and made.report().counters.messages_stale == 1


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"prompt": b""}, 400, "prompt"),
        ({"prompt": prompt_of(126)}, 400, "too long"),
        ({"sampling": sampling(max_new_tokens=0)}, 400, "max_tokens"),
        ({"sampling": sampling(max_new_tokens=-100)}, 400, "max_tokens"),
        ({"sampling": sampling(max_new_tokens=2**40)}, 400, "too long"),
        ({"sampling": msgspec.structs.replace(sampling(), seed=2**63)}, 400, "seed"),
        ({"first": 6}, 400, "first must be between"),
    ],
)
def test_an_invalid_request_is_refused_to_the_instance_that_sent_it(change: dict[str, Any], status: int, reason: str) -> None:
    made = scheduler()
    told_to_writer = declined(made.receive(WRITER, msgspec.structs.replace(reserve("a", 6), **change), 0.0))
    told_to_client = failures(made.receive(ROUTER, msgspec.structs.replace(generate("b", 6), **change), 0.0))
    for failed in (told_to_writer["a"], told_to_client["b"]):
        assert failed.status == status and reason in failed.message
    assert is_home(made) and made.report().counters.requests_accepted == 0


def test_an_answer_of_one_token_needs_no_reservation() -> None:
    assert declined(scheduler().receive(WRITER, reserve("a", 6, max_new_tokens=1), 0.0))["a"].status == 400


@pytest.mark.parametrize(
    ("sender", "incarnation"), [(InstanceId("stranger"), WRITERS_LIFE), (WRITER, Incarnation("another"))], ids=["name", "life"]
)
def test_a_writer_that_is_not_known_may_be_known_later(sender: InstanceId, incarnation: Incarnation) -> None:
    (decline,) = scheduler().receive(sender, reserve("a", 4, incarnation=incarnation), 0.0)
    assert isinstance(decline, Send) and decline.to == sender and isinstance(decline.message, Decline)
    assert decline.message.failed.retryable and sender in decline.message.failed.message


@pytest.mark.parametrize("message", [generate("a", 5), reserve("a", 5)])
def test_what_comes_again_is_dropped_while_it_is_served_and_after(message: Generate | Reserve) -> None:
    made = scheduler()
    made.receive(WRITER, message, 0.0)
    assert made.receive(WRITER, message, 0.0) == []
    made.receive(ROUTER, Cancel(key=key("a")), 0.1)
    assert is_home(made)
    assert made.receive(WRITER, message, 0.2) == [] and made.decide(0.2).actions == []
    assert made.report().counters.messages_stale == 2


@pytest.mark.parametrize(
    "change", [{"first_token": 10**6}, {"first_token": -1}, {"pushed_pages": 2**64 - 1}, {"pushed_bytes": 3}]
)
def test_a_handoff_that_does_not_fit_its_reservation_fails_its_request_only(change: dict[str, int]) -> None:
    made, grant = with_reservation()
    actions = made.receive(WRITER, msgspec.structs.replace(handoff(grant), **change), 0.1)
    (delta,) = deltas(actions)
    assert isinstance(delta.ending, Failed) and delta.ending.retryable and delta.first == 1
    settle(made, actions)
    assert is_home(made) and made.report().counters.handoffs == 0
    made.receive(WRITER, handoff(reserved(made, "b")), 0.2)
    assert planned(made.decide(0.2)).decode_rows.tolist() == [0]


# --- grammars --------------------------------------------------------------------------------------------------------------


def test_a_request_is_not_admitted_before_its_grammar_is_ready_and_others_pass_it() -> None:
    made = scheduler(max_rows=1)
    asked = generate("a", 4)
    held = msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, grammar=ANY_TEXT))
    assert made.receive(ROUTER, held, 0.0) == [Prepare(key("a"), ANY_TEXT)]
    assert made.decide(60.0).plan is None, "also when it has waited long"
    made.receive(ROUTER, generate("b", 3), 60.0)
    assert [len(chunk.token_ids) for chunk in planned(made.decide(60.0)).chunks] == [3]


def test_a_reservation_is_granted_before_its_grammar_is_ready_and_decodes_only_then() -> None:
    made = scheduler()
    asked = reserve("a", 6)
    terms = msgspec.structs.replace(asked.terms, owner="alice")
    held = msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, grammar=ANY_TEXT), terms=terms)
    assert made.receive(WRITER, held, 0.0) == [Prepare(key("a"), ANY_TEXT, "alice")]
    (grant,) = grants(made.decide(0.0).actions)
    made.receive(WRITER, handoff(grant, first_token=50), 0.1)
    assert made.decide(0.1).plan is None
    made.handle(Prepared(key("a")), 0.2)
    plan = planned(made.decide(0.2))
    (start,) = plan.starts
    assert (start.last_token, start.length, start.answer_tokens) == (50, 6, 1) and len(plan.decode_rows) == 1


@pytest.mark.parametrize("landed", [False, True])
def test_a_reservation_whose_grammar_cannot_be_ends_once(landed: bool) -> None:
    made = scheduler()
    asked = reserve("a", 6)
    held = msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, grammar=ANY_TEXT))
    made.receive(WRITER, held, 0.0)
    (grant,) = grants(made.decide(0.0).actions)
    if landed:
        made.receive(WRITER, handoff(grant), 0.1)
    refused = Failed.of(BadRequest("regex: at position 3"))
    actions = made.handle(Prepared(key("a"), refused), 0.2)
    assert (failures(actions) if landed else declined(actions)) == {"a": refused}
    assert landed == is_home(made), "its writer may still write"
