"""Resuming at the router's core: whatever ends an attempt, the next one goes on where it stopped, or the request ends once."""

import math

import pytest
from msgspec.structs import replace

from common.config import RouterConfig
from common.errors import BadRequest, DeadlinePassed, InstanceFailed, Overloaded, Preempted, TandemError, Unavailable
from common.ids import DETOKENIZER, Incarnation, RequestId, pack_ids, unpack_ids
from common.instance.ports import Send
from common.messages import (
    Ending,
    Failed,
    Finished,
    Goodbye,
    InstanceInfo,
    Load,
    Register,
    Terms,
    TextBatch,
    TextDelta,
    TokenLogprob,
    TokenLogprobs,
)
from common.pages import radix_cache
from router.attempts import Phase
from router.request_book import FRUITLESS_ATTEMPTS
from router.requests import RequestSpec
from router.timelines import ResumeReason
from tests.builders import instance, key
from tests.router.bench import D0, D1, P0, P1, PROMPT, Bench, about_requests, announced, cancels, close, generates, route, spec

PUSH_FAILED = Failed.of(Unavailable("the push failed"))
PREEMPTED = Failed.of(Preempted("an older request needs the memory"))
PAUSED_S = 2.5
"""After what the tests do at 1 s, and after the longest pause between attempts."""
STOLEN = instance("d0", "decode", incarnation="2")


# --- what the next attempt is --------------------------------------------------------------------------------------------


def test_the_next_attempt_is_the_prompt_and_the_tokens_so_far_with_what_remains() -> None:
    bench = Bench(P0, D0, P1, D1)
    asked = RequestSpec(RequestId("r"), 0, PROMPT, spec().sampling, stop=("end",), priority=5, timeout_s=30.0, owner="bob")
    to, decode = route(bench.submit(asked))
    old = [next(one for one in bench.members if one.id == name) for name in (to, decode)]
    bench.text(0, "ab", now=1.0)
    bench.text(2, "c", now=1.5)
    sent = bench.text(3, "", PUSH_FAILED, now=4.0)
    assert sent[:3] == [*cancels(*old), close()]
    ((first, generate),), (announcement,) = generates(sent), announced(sent)
    ids = [ord(char) for char in "abc"]
    assert generate.key == announcement.key == key(attempt=1)
    assert unpack_ids(generate.prompt).tolist() == [*range(100, 120), *ids]
    assert generate.sampling.max_new_tokens == 5
    assert (generate.first, announcement.first) == (3, 3)
    assert generate.terms == Terms(priority=5, age_s=4.0, timeout_s=26.0, owner="bob")
    assert announcement.context == pack_ids([*range(112, 120), *ids])
    assert (announcement.text, announcement.stop, announcement.life_s) == ("abc", ("end",), 86.0)
    assert {first, generate.decodes[0]}.isdisjoint({to, decode}), "they are avoided, for others can serve"


def test_each_token_has_its_logprob_once_and_those_of_the_prompt_are_asked_for_until_its_first_token() -> None:
    bench = Bench(P0, D0, P1, D1)
    sampling = replace(spec().sampling, logprobs=2, prompt_logprobs=1, min_tokens=3)
    asked = RequestSpec(RequestId("r"), 0, PROMPT, sampling, ("end",), include_stop=True, skip_special_tokens=False, shown=(7,))
    bench.submit(asked)
    prompt = (TokenLogprob(101, -0.5, 1),)

    def text(attempt: int, first: int, count: int, ending: Ending | None, prompt: TokenLogprobs = ()) -> list[Send]:
        ids = tuple(range(first, first + count))
        own = tuple(TokenLogprob(number, -1.0 * number, 1) for number in ids)
        delta = TextDelta(key(attempt=attempt), first, ids, "x" * count, ending, own, prompt)
        return bench.place(bench.core.receive(TextBatch(deltas=(delta,)), 1.0), 1.0)

    sent = [*text(0, 0, 0, PUSH_FAILED), *text(1, 0, 3, PUSH_FAILED, prompt), *text(2, 3, 1, None)]
    assert text(2, 3, 2, None) == [] and text(1, 0, 3, None, prompt) == [], "they came before"
    text(2, 4, 4, Finished(reason="length"))
    again = [(generate.sampling.logprobs, generate.sampling.prompt_logprobs) for _, generate in generates(sent)]
    assert again == [(2, 1), (2, None)]
    opened = announced(sent)
    assert all(one.logprobs and one.include_stop and not one.skip_special_tokens and one.min_tokens == 3 for one in opened)
    assert {one.shown for one in opened} == {(7,)}
    deltas = bench.client.take()
    assert [one.token_id for delta in deltas for one in delta.logprobs] == list(range(8))
    assert all(tuple(one.token_id for one in delta.logprobs) == delta.token_ids for delta in deltas)
    assert [one for delta in deltas for one in delta.prompt_logprobs] == list(prompt)


def test_a_resumed_answer_goes_on_where_it_stopped_and_late_text_of_the_old_attempt_is_dropped() -> None:
    bench = Bench(P0, D0, D1).serving()
    bench.text(0, "Hel", now=1.0)
    bench.text(3, "", PUSH_FAILED, now=1.5)
    assert bench.text(3, "XY", Finished(reason="length"), now=1.6) == []
    bench.text(3, "lo", now=2.0, attempt=1)
    bench.text(5, "!", Finished(reason="stop"), now=2.5, attempt=1)
    deltas = bench.client.take()
    assert "".join(delta.text for delta in deltas) == "Hello!"
    assert [id for delta in deltas for id in delta.token_ids] == [ord(char) for char in "Hello!"]
    assert [delta.ending for delta in deltas if delta.ending] == [Finished(reason="stop")]
    assert (bench.core.requests.stale, bench.observer.attempts) == (1, [2])
    assert bench.observer.resumes == [ResumeReason.FAILED_ATTEMPT]
    assert bench.observer.resume_gaps == [1.0], "from the last token before the resume to the next one"
    assert bench.observer.first_tokens == [1.0], "there is one first token"


def test_text_that_comes_with_the_failure_of_an_attempt_is_delivered_and_not_computed_again(bench: Bench) -> None:
    sent = bench.text(0, "ab", PUSH_FAILED)
    assert [(message.first, message.sampling.max_new_tokens) for _, message in generates(sent)] == [(2, 6)]
    assert (bench.read(), announced(sent)[0].text) == ("ab", "ab")


def test_when_no_token_had_come_the_gap_is_counted_from_the_first_resume(bench: Bench) -> None:
    bench.text(0, "", PUSH_FAILED, now=3.0)
    bench.text(0, "", PUSH_FAILED, now=4.0, attempt=1)
    bench.beat(4.0)
    bench.core.tick(5.0)
    bench.text(0, "a", now=7.0, attempt=2)
    bench.text(1, "b", now=7.5, attempt=2)
    assert bench.observer.resume_gaps == [4.0]


def test_an_answer_whose_tokens_are_all_there_ends_instead_of_being_resumed() -> None:
    bench = Bench(P0, D0).serving(spec(max_new_tokens=3))
    sent = bench.text(0, "abc", PUSH_FAILED)
    assert sent == [*cancels(P0, D0), close()]
    assert bench.endings() == [Finished(reason="length")]
    assert bench.observer.resumes == []


# --- what resumes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_dead_decode_instance_is_replaced(tokens: int) -> None:
    bench = Bench(P0, D0, D1)
    assert route(bench.submit(spec())) == ("p0", "d0")
    bench.text(0, "x" * tokens)
    bench.beat(2.0, D0)
    sent = about_requests(bench.core.tick(3.0))
    assert sent[:3] == [*cancels(P0, D0), close()], "also to d0: it may only be silent"
    assert route(sent) == ("p0", "d1")
    assert bench.observer.resumes == [ResumeReason.LOST_INSTANCE]
    assert bench.endings() == []


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_dead_prefill_instance_is_replaced_for_requests_that_were_not_handed_off(tokens: int) -> None:
    bench = Bench(P0, D0, P1)
    assert route(bench.submit(spec())) == ("p0", "d0")
    bench.text(0, "x" * tokens)
    sent = about_requests(bench.leave(P0, 2.0))
    assert sent[:3] == [*cancels(P0, D0), close()]
    assert route(sent) == ("p1", "d0")


def test_a_dead_prefill_instance_does_not_matter_after_the_handoff(bench: Bench) -> None:
    bench.text(0, "ab")
    assert about_requests(bench.leave(P0, 2.0)) == []
    bench.text(2, "c", Finished(reason="length"))
    assert bench.client.take()[-1].ending == Finished(reason="length")


def test_in_a_later_attempt_too_its_own_second_token_proves_the_handoff() -> None:
    bench = Bench(P0, D0, P1, D1).serving()
    bench.text(0, "abc")
    first, _ = route(bench.text(3, "", PUSH_FAILED))
    bench.text(3, "d", attempt=1)
    sent = bench.leave(P0 if first == P0.id else P1, 2.0)
    assert [message.first for _, message in generates(sent)] == [4], "it had four tokens, but one of this attempt"


def test_an_instance_that_comes_back_under_its_id_does_not_inherit_requests_but_may_get_them_again(bench: Bench) -> None:
    sent = about_requests(bench.core.receive(Register(instance=STOLEN), 1.0))
    assert sent[:3] == [*cancels(P0, D0), close()]
    assert route(sent) == ("d0", None), "the links to it are not there yet"
    assert bench.assigned() == {"p0": 0, "d0": 20}


def test_only_the_requests_of_the_dead_instance_are_resumed() -> None:
    bench = Bench(P0, D0, D1)
    sent = bench.submit(spec("a", 0), spec("b", 1))
    by_decode = {message.decodes[0]: message.key.request_id for _, message in generates(sent)}
    resumed = generates(bench.leave(D0, 1.0))
    assert [(message.key.request_id, message.decodes[0]) for _, message in resumed] == [(by_decode[D0.id], D1.id)]


def test_the_requests_of_a_stuck_instance_go_elsewhere_once() -> None:
    bench = Bench(P0, D0, D1)
    assert route(bench.submit(spec())) == ("p0", "d0")
    sent = about_requests(bench.report(D0, 31.0, Load(oldest_step_s=30.5)))
    assert (sent[:3], route(sent)) == ([*cancels(P0, D0), close()], ("p0", "d1"))
    assert about_requests(bench.report(D0, 31.5, Load(oldest_step_s=31.0))) == []
    assert bench.observer.resumes == [ResumeReason.LOST_INSTANCE]


@pytest.mark.parametrize("error", [BadRequest("no"), DeadlinePassed("late"), TandemError("a bug")])
def test_a_failure_that_trying_again_does_not_help_ends_the_request(error: TandemError) -> None:
    bench = Bench(P0, D0, D1).serving()
    assert bench.text(0, "", Failed.of(error)) == cancels(P0, D0)
    assert bench.endings() == [Failed.of(error)]


# --- where it goes -------------------------------------------------------------------------------------------------------


def test_a_preempted_request_goes_elsewhere_first_and_may_come_back_next_time() -> None:
    bench = Bench(P0, D0, D1)
    assert route(bench.submit(spec())) == ("p0", "d0")
    bench.report(D1, 1.0, Load(running_tokens=10_000))
    assert route(bench.text(0, "", PREEMPTED)) == ("p0", "d1"), "d0 has less to do, but no room"
    assert route(bench.text(0, "", PREEMPTED, attempt=1)) == ("p0", "d0")
    assert bench.observer.resumes == [ResumeReason.PREEMPTED] * 2


def test_a_request_that_failed_does_not_go_back_to_where_it_failed_however_busy_the_others_are() -> None:
    bench = Bench(P0, D0, D1)
    assert route(bench.submit(spec())) == ("p0", "d0")
    bench.text(0, "ab")  # handed off: whatever fails now, it is not p0
    bench.report(D1, 1.0, Load(running_tokens=10_000))
    assert route(bench.text(2, "", PUSH_FAILED)) == ("p0", "d1")


# --- bounds --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Overloaded("full"), Unavailable("gone"), InstanceFailed("the step failed")])
def test_a_request_that_never_brings_a_token_ends_with_the_last_reason(bench: Bench, error: TandemError) -> None:
    for attempt in range(FRUITLESS_ATTEMPTS):
        assert bench.endings() == []
        sent = bench.text(0, "", Failed.of(error), attempt=attempt)
        bench.core.tick(PAUSED_S)
    assert generates(sent) == []
    assert bench.observer.endings == [Failed.of(error)]
    assert bench.observer.attempts == [FRUITLESS_ATTEMPTS]


def test_a_token_makes_attempts_count_anew(bench: Bench) -> None:
    for attempt in range(FRUITLESS_ATTEMPTS - 1):
        bench.text(0, "", PUSH_FAILED, attempt=attempt)
        bench.core.tick(PAUSED_S)
    bench.text(0, "a", PUSH_FAILED, attempt=FRUITLESS_ATTEMPTS - 1)
    for attempt in range(FRUITLESS_ATTEMPTS, 2 * FRUITLESS_ATTEMPTS):
        assert bench.observer.endings == []
        bench.text(1, "", PUSH_FAILED, attempt=attempt)
        bench.core.tick(PAUSED_S)
    assert bench.observer.endings == [PUSH_FAILED]


def test_after_two_fruitless_attempts_there_is_time_for_the_fleets_state_to_arrive() -> None:
    """An instance that leaves refuses faster than its heartbeat says so."""
    config = RouterConfig(dispatch="colocated", heartbeat_s=0.25)
    bench = Bench(P0, D0, D1, config=config).serving()
    refused = Failed.of(Unavailable("it is leaving the fleet"))
    assert len(generates(bench.text(0, "", refused, attempt=0, now=1.0))) == 1, "somebody else may do better at once"
    for attempt, begins_s, ends_s in ((1, 1.0, 1.5), (2, 1.5, 2.0)):
        assert generates(bench.text(0, "", refused, attempt=attempt, now=begins_s)) == []
        assert phases(bench) == [Phase.RESUMING] and bench.core.next_deadline() is not None
        assert generates(bench.core.tick(ends_s - 0.01)) == []
        assert len(generates(bench.core.tick(ends_s))) == 1


def test_a_pause_after_fruitless_attempts_is_a_pause_whoever_joins_meanwhile() -> None:
    bench = Bench(D0, config=RouterConfig(heartbeat_s=0.5)).serving()
    for attempt in range(2):
        bench.text(0, "", Failed.of(Overloaded("d0 has 1024 requests waiting already")), attempt=attempt, now=1.0)
    for number in range(10):
        assert generates(bench.join(instance(f"d{number + 1}", "decode"), 1.0 + 0.05 * number)) == []
    assert len(generates(bench.core.tick(2.0))) == 1, "two heartbeats later"


def test_a_preemption_is_no_failed_attempt_and_only_the_deadline_bounds_their_number() -> None:
    config = RouterConfig(max_attempts=2, request_timeout_s=100.0)
    bench = Bench(P0, D0, config=config).serving(spec(max_new_tokens=100))
    for attempt in range(40):
        assert len(generates(bench.text((attempt + 1) // 2, "" if attempt % 2 else "a", PREEMPTED, attempt=attempt))) == 1
        bench.beat(1.0)
    bench.text(20, "", PUSH_FAILED, attempt=40)
    assert bench.observer.endings == [], "one of two has failed"
    bench.core.requests.tick(100.0, {DETOKENIZER: math.inf})
    (ending,) = bench.observer.endings
    assert isinstance(ending, Failed) and ending.status == 504
    assert bench.assigned() == {"p0": 0, "d0": 0}


def test_attempts_that_fail_are_limited_however_many_were_preempted_between_them() -> None:
    bench = Bench(P0, D0, config=RouterConfig(max_attempts=3)).serving(spec(max_new_tokens=100))
    for attempt in range(5):
        assert bench.observer.endings == []
        bench.text(attempt, "a", PREEMPTED if attempt % 2 else PUSH_FAILED, attempt=attempt)
    assert bench.observer.endings == [PUSH_FAILED]


# --- steps that end their instances ---------------------------------------------------------------------------------------


def step_failed(bench: Bench, member: InstanceInfo, attempt: int, now: float, *, names_it: bool = True) -> list[Send]:
    """The instance's last words. names_it: the request was in the step that has ended it."""
    suspects = (key(attempt=attempt),) if names_it else ()
    goodbye = Goodbye(id=member.id, incarnation=member.incarnation, reason="step 7 failed: no kernel", suspects=suspects)
    return bench.place(bench.core.receive(goodbye, now), now)


def test_a_request_that_was_in_two_steps_that_ended_their_instances_is_not_carried_to_a_third() -> None:
    bench = Bench(D0, D1, instance("d2", "decode"), config=RouterConfig(max_attempts=9)).serving(spec(max_new_tokens=100))
    for attempt in range(2):
        assert bench.observer.endings == []
        at = next(each for each in bench.members if bench.assigned().get(each.id))
        bench.text(attempt, "a", attempt=attempt)
        sent = step_failed(bench, at, attempt, 1.0 + attempt)
        bench.members.remove(at)
    assert generates(sent) == []
    (ending,) = bench.observer.endings
    assert isinstance(ending, Failed) and not ending.retryable and ending.status == 500
    assert "in 2 steps that ended their instances" in ending.message and ending.message.count("step 7 failed: no kernel") == 2
    assert bench.assigned() == {bench.members[0].id: 0}


def test_deaths_from_outside_and_last_words_of_a_former_life_or_about_a_former_attempt_count_for_nothing() -> None:
    decodes = [instance(f"d{number}", "decode") for number in range(9)]
    bench = Bench(*decodes, config=RouterConfig(max_attempts=99)).serving(spec(max_new_tokens=100))
    for attempt in range(8):
        at = next(each for each in bench.members if bench.assigned().get(each.id))
        bench.text(attempt, "a", attempt=attempt)
        other = next(each for each in bench.members if each is not at)
        (other_member,) = (each for each in bench.core.fleet.members() if each.info.id == other.id)
        bench.core.requests.suspect([key(attempt=attempt)], other_member, "no part of it runs there")
        stolen = replace(at, incarnation=Incarnation("other"))
        assert step_failed(bench, stolen, attempt, 1.0) == []
        assert len(generates(step_failed(bench, at, attempt if attempt == 3 else 99, 1.0, names_it=attempt != 5))) == 1
        bench.members.remove(at)
    assert bench.observer.endings == [], "one step counts"


# --- nobody can serve ----------------------------------------------------------------------------------------------------


def phases(bench: Bench) -> list[Phase]:
    return [record.phase for record in bench.core.requests.records()]


def test_a_request_that_nobody_can_serve_waits_for_an_instance_and_goes_on_with_the_first_that_comes(bench: Bench) -> None:
    bench.text(0, "ab")
    sent = about_requests(bench.leave(D0, 2.0))
    assert (sent, phases(bench)) == ([*cancels(P0, D0), close()], [Phase.RESUMING])
    assert bench.assigned() == {"p0": 0}
    sent = bench.core.receive(Register(instance=D1), 4.0)
    ((to, generate),) = generates(sent)
    assert (to, generate.key, generate.first, generate.terms.age_s) == ("d1", key(attempt=1), 2, 4.0)
    bench.beat(6.9, D0)
    bench.text(2, "c", Finished(reason="length"), attempt=1)
    assert bench.client.take()[-1].ending == Finished(reason="length")
    assert bench.core.requests.next_deadline() is None


def test_a_new_request_is_refused_at_once_while_an_older_one_waits(bench: Bench) -> None:
    bench.leave(D0, 2.0)
    with pytest.raises(Unavailable):
        bench.submit(spec("other"))
    assert len(bench.core.requests) == 1


def test_a_report_after_which_an_instance_takes_requests_again_ends_the_wait() -> None:
    bench = Bench(D0).serving()
    bench.report(D0, 1.0, draining=True)
    assert generates(bench.text(0, "", PUSH_FAILED, now=2.0)) == []
    assert generates(bench.report(D0, 2.5, draining=True)) == []
    assert [message.key for _, message in generates(bench.report(D0, 3.0))] == [key(attempt=1)]


def test_a_request_that_waits_too_long_ends_as_unavailable() -> None:
    bench = Bench(P0, D0, config=RouterConfig(resume_wait_s=2.5)).serving()
    bench.leave(D0, 2.0)
    bench.beat(2.0, D0)
    assert bench.core.tick(4.4) == []
    bench.report(P0, 4.2, draining=True)
    assert generates(bench.report(P0, 4.4)) == [], "more can serve, but it still cannot be served, and waits no longer for that"
    assert bench.core.requests.next_deadline() == 4.5
    assert bench.core.tick(4.5) == []
    (ending,) = bench.endings()
    assert isinstance(ending, Failed) and (ending.status, ending.message) == (503, "no decode instance is live")
    assert len(bench.core.requests) == 0
    assert generates(bench.core.receive(Register(instance=D1), 5.0)) == []


def test_a_waiting_request_can_be_cancelled(bench: Bench) -> None:
    bench.leave(D0, 2.0)
    assert bench.core.requests.cancel([RequestId("r")], 3.0) == []
    assert bench.endings() == [Finished(reason="cancelled")]
    assert generates(bench.core.receive(Register(instance=D1), 4.0)) == []
    assert bench.core.requests.next_deadline() is None


def test_a_waiting_request_keeps_its_deadline() -> None:
    bench = Bench(P0, D0, config=RouterConfig(request_timeout_s=4.0)).serving()
    bench.leave(D0, 2.0)
    bench.report(P0, 2.0)
    assert bench.core.tick(4.0) == []
    (ending,) = bench.endings()
    assert isinstance(ending, Failed) and ending.status == 504
    assert bench.core.requests.next_deadline() is None


def test_of_two_times_that_are_over_at_once_one_ends_a_waiting_request() -> None:
    bench = Bench(P0, D0, config=RouterConfig(resume_wait_s=2.0, request_timeout_s=4.0)).serving()
    bench.leave(D0, 2.0)
    bench.report(P0, 2.0)
    assert bench.core.tick(4.5) == [] and len(bench.endings()) == 1


def test_a_request_that_only_a_larger_instance_can_hold_waits_for_one() -> None:
    bench = Bench(P0, D0).serving(spec(max_new_tokens=200))
    bench.join(replace(instance("d2", "decode"), pools=(replace(D0.pools[0], total_pages=40),)), 1.0)
    bench.leave(D0, 2.0)
    assert phases(bench) == [Phase.RESUMING]
    assert [to for to, _ in generates(bench.join(D1, 3.0))] == ["d1"]


# --- the books -----------------------------------------------------------------------------------------------------------


def test_a_request_that_waits_is_not_named_again_and_then_only_its_answer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    digest = radix_cache._digest

    def noted(before: bytes, tokens: bytes) -> bytes:
        hashed.append(tokens)
        return digest(before, tokens)

    monkeypatch.setattr(radix_cache, "_digest", noted)
    bench = Bench(P0, D0, config=RouterConfig(decode_policy="cache_aware")).serving(spec(max_new_tokens=40))
    prompt_pages = len(PROMPT) // 4 // 4
    assert len(hashed) == prompt_pages
    bench.text(0, "abcdefgh")
    bench.leave(D0, 1.0)
    bench.leave(P0, 1.0)
    for number in range(3):
        bench.core.receive(Register(instance=instance(f"p{number}", "prefill")), 2.0 + number)
    assert len(hashed) == prompt_pages + 2
    bench.join(D1, 6.0)
    (record,) = bench.core.requests.records()
    assert record.attempt is not None and len(hashed) == prompt_pages + 2
