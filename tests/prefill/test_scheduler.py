"""The prefill scheduler, as messages and step results in, plans and actions out: the way of a request, and its ends.

Log probabilities of the prompt are collected chunk by chunk and leave with token 0, and all can be told again.
"""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from common.errors import BadRequest, Unavailable
from common.executor import Logprobs, StepPlan, StepResult
from common.ids import ROUTER, InstanceId, pack_ids, unpack_ids
from common.instance.ports import Prepare, Prepared, Send
from common.messages import Cancel, Failed, Finished, Generate, Handoff, Probe, Probed, Repeat, TokenDelta, TokenLogprobs
from common.sampling_params import MAX_PROMPT_LOGPROBS, SamplingParams
from engine.grammar.grammars import ANY_TEXT
from prefill.scheduler import PrefillScheduler
from tests.builders import EOS, LAYOUT, key, result, sampling
from tests.engine.toy import toy_logprob
from tests.prefill.rig import DECODE, begun, finish_pushes, generate, grant_for, handoffs, scheduler, spans
from tests.schedulers import deltas, failures, is_home, kinds, meet, messages


def test_one_request_goes_from_generate_to_handoff() -> None:
    made = scheduler()
    assert made.receive(ROUTER, generate("a", 10), 0.0) == []
    first = made.decide(0.0)
    assert kinds(first.actions) == ["Reserve"] and spans(first.plan) == [(0, 8, False)]
    second = made.decide(0.0)  # launched before the first came back
    assert spans(second.plan) == [(8, 10, True)] and made.decide(0.0).plan is None
    assert kinds(made.receive(DECODE, grant_for(first.actions), 0.0)) == ["Allow", "Placed"]
    actions = made.step_done(result(first.plan), 0.1)
    assert kinds(actions) == ["Push"]
    assert finish_pushes(made, actions) == []
    actions = made.step_done(result(second.plan, [55]), 0.2)
    assert kinds(actions) == ["TokenBatch", "Push"], "the first token leaves before the last push is posted"
    assert deltas(actions) == [TokenDelta(key("a"), 0, (55,), None)]
    (handoff,) = finish_pushes(made, actions)
    assert isinstance(handoff, Send) and isinstance(handoff.message, Handoff)
    assert (handoff.message.pushed_pages, handoff.message.first_token) == (3, 55)
    assert is_home(made)
    counters = made.report().counters
    assert (counters.handoffs, counters.pages_pushed, counters.prompt_tokens_computed) == (1, 3, 10)
    assert counters.bytes_pushed == 3 * LAYOUT.page_bytes


def test_a_row_whose_sampling_needs_the_tokens_begins_with_the_prompt() -> None:
    asked = generate("a", 6, first=2)
    _, decision = begun(msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, min_tokens=5)))
    assert decision.plan is not None
    (start,) = decision.plan.starts
    assert start.token_ids is not None and (start.token_ids.tolist(), start.answer_tokens) == ([*range(100, 106)], 2)


def test_an_embedding_ends_its_request_in_place_of_a_token_and_can_be_told_again() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 10, decodes=(), max_new_tokens=1, pooling="mean"), 0.0)
    first, last = made.decide(0.0).plan, made.decide(0.0).plan
    assert first is not None and last is not None
    assert made.step_done(result(first), 0.1) == []
    told = [TokenDelta(key("a"), 0, (), Finished("stop", embedding=b"1234"))]
    assert deltas(made.step_done(replace(result(last, [EOS]), embeddings={last.chunks[0].row: b"1234"}), 0.2)) == told
    assert is_home(made) and made.report().counters.tokens_generated == 0
    assert deltas(made.receive(ROUTER, Repeat(tokens=((key("a"), 0),)), 0.3)) == told


def test_a_prompt_whose_answer_cannot_begin_ends_with_its_error_and_gives_its_pages_back() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 4, decodes=(), max_new_tokens=1), 0.0)
    plan = made.decide(0.0).plan
    assert plan is not None
    error = BadRequest("regex: no token of the model can follow", field="regex")
    failed = replace(result(plan, [EOS]), failed={plan.chunks[0].row: error})
    assert deltas(made.step_done(failed, 0.1)) == [TokenDelta(key("a"), 0, (), Failed.of(error))]
    assert is_home(made)


@pytest.mark.parametrize("is_failed", [True, False])
def test_what_a_failed_chunk_leaves_in_its_pages_is_shared_with_nobody(is_failed: bool) -> None:
    made, tokens = scheduler(chunk_tokens=64), 40
    made.receive(ROUTER, generate("a", tokens, decodes=(), max_new_tokens=1, salt="s"), 0.0)
    plan = made.decide(0.0).plan
    assert plan is not None
    failed = {plan.chunks[0].row: Unavailable("its adapter is not held")} if is_failed else {}
    made.step_done(replace(result(plan, [EOS]), failed=failed), 0.1)
    made.receive(ROUTER, generate("b", tokens, decodes=(), max_new_tokens=1, salt="s"), 0.2)
    ((begin, _, _),) = spans(made.decide(0.2).plan)
    assert (begin == 0) is is_failed


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
    made, decision = begun(generate("a", 5, max_new_tokens=1, decodes=()))
    assert decision.actions == []
    assert deltas(made.step_done(result(decision.plan, [55]), 0.1)) == [TokenDelta(key("a"), 0, (55,), Finished(reason="length"))]
    assert is_home(made)


def test_an_end_of_sequence_as_first_token_ends_here_and_withdraws_the_reservation() -> None:
    made, decision = begun(generate("a", 5), is_granted=True)
    actions = made.step_done(result(decision.plan, [EOS]), 0.1)
    assert deltas(actions) == [TokenDelta(key("a"), 0, (EOS,), Finished(reason="stop", matched=EOS))]
    assert kinds(actions) == ["TokenBatch", "Withdraw"]
    assert is_home(made)


def test_a_cancel_under_a_step_keeps_the_pages_until_the_step_returns() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 12), 0.0)
    first, second = made.decide(0.0), made.decide(0.0)
    actions = made.receive(ROUTER, Cancel(key=key("a")), 0.0)
    assert kinds(actions) == ["Withdraw"]
    made.step_done(result(first.plan), 0.1)
    assert made.report().load.pages_free < made.report().load.pages_total
    assert made.step_done(result(second.plan, [5]), 0.2) == []
    assert is_home(made)


def test_pages_that_are_written_and_not_cached_come_home_while_the_last_push_goes_on() -> None:
    made = scheduler(chunk_tokens=8, prefix_cache=False)
    made.receive(ROUTER, generate("a", 12), 0.0)
    first = made.decide(0.0)
    made.receive(DECODE, grant_for(first.actions), 0.0)
    second = made.decide(0.0)
    pushed = made.step_done(result(first.plan), 0.1)
    finish_pushes(made, pushed)
    assert made.report().load.pages_free == made.report().load.pages_total - 3, "the second chunk attends to them"
    last = made.step_done(result(second.plan, [5]), 0.2)
    assert made.report().load.pages_free == made.report().load.pages_total - 1
    assert kinds(finish_pushes(made, last)) == ["Handoff"]
    assert is_home(made)


def test_requests_for_a_decode_instance_that_left_fail_in_every_phase() -> None:
    made = scheduler(chunk_tokens=4)
    for name in ("computing", "waiting"):
        made.receive(ROUTER, generate(name, 4), 0.0)
    decision = made.decide(0.0)
    actions = meet(made, [], 0.1)
    assert {delta.key.request_id for delta in deltas(actions)} == {"computing", "waiting"}
    made.step_done(result(decision.plan, [5]), 0.2)
    assert is_home(made)


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"prompt": b""}, 400, "prompt"),
        ({"prompt": pack_ids([1000])}, 400, "between 0 and 999"),
        ({"prompt": pack_ids([1] * 129)}, 400, "too long"),
        ({"sampling": sampling(max_new_tokens=0)}, 400, "max_tokens"),
        ({"decodes": ()}, 400, "cannot decode"),
        ({"decodes": (InstanceId("nobody"),)}, 503, "knows none of the decode instances nobody"),
        ({"first": 5}, 400, "first must be between"),
    ],
)
def test_an_invalid_request_is_refused_with_a_reason(change: dict[str, Any], status: int, reason: str) -> None:
    made = scheduler()
    absurd = msgspec.structs.replace(generate("a", 5), **change)
    (delta,) = deltas(made.receive(ROUTER, absurd, 0.0))
    assert isinstance(delta.ending, Failed) and delta.ending.status == status and reason in delta.ending.message
    assert delta.first == absurd.first and made.report().counters.requests_accepted == 0 and made.next_deadline() is None


def test_a_prompt_that_the_pool_cannot_hold_is_refused() -> None:
    assert failures(scheduler(total_pages=2).receive(ROUTER, generate("a", 9), 0.0))["a"].status == 400


def with_grammar(name: str) -> Generate:
    asked = generate(name, 4)
    terms = msgspec.structs.replace(asked.terms, owner="alice")
    return msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, grammar=ANY_TEXT), terms=terms)


def test_a_request_waits_until_its_grammar_is_ready_and_others_pass_it() -> None:
    made = scheduler()
    assert made.receive(ROUTER, with_grammar("a"), 0.0) == [Prepare(key("a"), ANY_TEXT, "alice")]
    assert made.decide(0.0).plan is None
    made.receive(ROUTER, generate("b", 3), 0.0)
    assert spans(made.decide(0.0).plan) == [(0, 3, True)]
    (probed,) = messages(made.receive(ROUTER, Probe(round=1, keys=(key("a"),)), 0.1))
    assert isinstance(probed, Probed) and probed.standings[0].next_token == 0, "it is known while it waits"
    assert made.handle(Prepared(key("a")), 0.2) == []
    assert spans(made.decide(0.2).plan) == [(0, 4, True)]


def test_a_grammar_that_cannot_be_ends_its_request_with_what_is_wrong() -> None:
    made = scheduler()
    made.receive(ROUTER, with_grammar("a"), 0.0)
    refused = Failed.of(BadRequest("regex: at position 3"))
    failed = failures(made.handle(Prepared(key("a"), refused), 0.1))
    assert failed == {"a": refused} and (refused.status, refused.retryable) == (400, False)
    assert made.handle(Prepared(key("a"), refused), 0.2) == [] and is_home(made)


def test_a_request_that_is_cancelled_while_its_grammar_is_made_ready_is_over() -> None:
    made = scheduler()
    made.receive(ROUTER, with_grammar("a"), 0.0)
    made.receive(ROUTER, Cancel(key=key("a")), 0.1)
    assert made.handle(Prepared(key("a")), 0.2) == [] and made.decide(0.2).plan is None and is_home(made)


TOKENS = 19


def reported(plan: StepPlan | None, tokens: list[int], sampling: SamplingParams) -> StepResult:
    """The step came back, with what its only row asks for."""
    plain = result(plan, tokens)
    (chunk,) = plain.plan.chunks
    ids = enumerate(chunk.token_ids.tolist(), chunk.start)
    prompt = [toy_logprob(token, position, sampling.prompt_logprobs or 0) for position, token in ids if position > 0]
    wants_prompt = sampling.prompt_logprobs is not None
    sampled = [toy_logprob(token, TOKENS, sampling.logprobs or 0) for token in tokens if sampling.logprobs is not None]
    return StepResult(
        plain.plan,
        plain.tokens,
        Logprobs.of([chunk.row] * len(sampled), sampled),
        Logprobs.of([chunk.row] * len(prompt), prompt) if wants_prompt else Logprobs(),
    )


def asked(first: int = 0, **asks: int) -> tuple[PrefillScheduler, SamplingParams]:
    """A scheduler with a request that asks for log probabilities, whose last chunk is to be computed."""
    request = generate("a", TOKENS, first=first)
    sampling = msgspec.structs.replace(request.sampling, **asks)
    made, decision = begun(msgspec.structs.replace(request, sampling=sampling), is_granted=True)
    finish_pushes(made, made.step_done(reported(decision.plan, [], sampling), 0.1))
    finish_pushes(made, made.step_done(reported(made.decide(0.2).plan, [], sampling), 0.2))
    return made, sampling


def of_prompt(alternatives: int) -> TokenLogprobs:
    prompt = unpack_ids(generate("a", TOKENS).prompt).tolist()
    return tuple(toy_logprob(token, position, alternatives) for position, token in enumerate(prompt))[1:]


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(2, 1), (0, None), (None, 3)])
def test_they_leave_with_the_first_token_and_are_told_again_with_it(logprobs: int | None, prompt_logprobs: int | None) -> None:
    asks = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    made, sampling = asked(**{name: count for name, count in asks.items() if count is not None})
    actions = made.step_done(reported(made.decide(0.3).plan, [55], sampling), 0.3)
    own = () if logprobs is None else (toy_logprob(55, TOKENS, logprobs),)
    told = TokenDelta(key("a"), 0, (55,), None, own, () if prompt_logprobs is None else of_prompt(prompt_logprobs))
    assert deltas(actions) == [told]
    (handoff,) = handoffs([*actions, *finish_pushes(made, actions)])
    assert handoff.first_logprob == (own[0] if own else None)
    assert deltas(made.receive(ROUTER, Repeat(tokens=((key("a"), 0),)), 0.5)) == [told]


def test_an_answer_that_is_resumed_behind_its_first_token_is_not_told_those_of_the_prompt_again() -> None:
    made, sampling = asked(first=3, logprobs=0, prompt_logprobs=0)
    actions = made.step_done(reported(made.decide(0.3).plan, [55], sampling), 0.3)
    assert deltas(actions) == [TokenDelta(key("a"), 3, (55,), None, (toy_logprob(55, TOKENS, 0),))]


def test_more_of_them_than_fit_into_a_message_are_refused_with_the_number_that_does() -> None:
    made = scheduler()
    request = generate("a", 20)
    sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=20)
    prompt = request.prompt * (MAX_PROMPT_LOGPROBS // (20 * 21))
    actions = made.receive(ROUTER, msgspec.structs.replace(request, sampling=sampling, prompt=prompt), 0.0)
    assert "more than 250000" not in failures(actions)["a"].message, "as many as just fit"
    prompt += request.prompt
    actions = made.receive(ROUTER, msgspec.structs.replace(request, key=key("b"), sampling=sampling, prompt=prompt), 0.0)
    failed = failures(actions)["b"]
    assert (failed.status, failed.retryable) == (400, False)
    assert "prompt_logprobs of 20" in failed.message and "at most 19" in failed.message
