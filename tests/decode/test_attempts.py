"""The decode scheduler over attempts, terms, digests, questions of the router and the end of the instance."""

import numpy as np
import pytest
from msgspec.structs import replace

from common.executor import Logprobs, StepResult
from common.ids import ROUTER, Int32Array
from common.messages import Cancel, Failed, Finished, Grant, Probe, Probed, Repeat, Standing, Terms, TokenDelta, Withdraw
from decode.scheduler import DecodeScheduler
from tests.builders import LAYOUT, key, result, sampling
from tests.decode.rig import LIFE, ME, WRITER, decoding, handoff, renew, reserve, reserved, scheduler, step, with_reservation
from tests.engine.toy import toy_logprob
from tests.schedulers import (
    abandon,
    declined,
    deltas,
    drain,
    failures,
    generate,
    granted,
    grants,
    is_home,
    kinds,
    messages,
    planned,
    settle,
)

# --- an answer that is resumed ---------------------------------------------------------------------------------------------


def test_the_tokens_of_a_resumed_answer_are_numbered_from_where_it_was() -> None:
    made = scheduler()
    made.receive(WRITER, reserve("a", 8, max_new_tokens=3, first=2), 0.0)
    (grant,) = grants(made.decide(0.0).actions)
    made.receive(WRITER, handoff(grant), 0.0)
    told = [*deltas(step(made, 0.1, token=70)), *deltas(step(made, 0.2, token=71))]
    assert told == [TokenDelta(key("a"), 3, (70,), None), TokenDelta(key("a"), 4, (71,), Finished(reason="length"))]
    assert is_home(made)


def test_an_answer_that_is_resumed_here_alone_goes_on_with_its_next_number() -> None:
    made = scheduler()
    made.receive(ROUTER, generate("a", 8, max_new_tokens=2, first=5), 0.0)
    told = [*deltas(step(made, 0.1, token=70)), *deltas(step(made, 0.2, token=71))]
    assert told == [TokenDelta(key("a"), 5, (70,), None), TokenDelta(key("a"), 6, (71,), Finished(reason="length"))]


def test_a_row_whose_sampling_needs_the_tokens_begins_with_all_that_are_known() -> None:
    """Handed off with its first token, or computed here."""
    made, penalised = scheduler(), replace(sampling(), presence_penalty=1.0)
    made.receive(WRITER, replace(reserve("a", 8, first=2), sampling=penalised), 0.0)
    made.receive(WRITER, reserve("b", 8, first=2), 0.0)
    for grant in grants(made.decide(0.0).actions):
        made.receive(WRITER, handoff(grant, first_token=50), 0.0)
    made.receive(ROUTER, replace(generate("c", 7, first=5), sampling=penalised), 0.0)
    handed_off, plain, here = planned(made.decide(0.0)).starts
    assert handed_off.token_ids is not None and here.token_ids is not None
    assert (handed_off.token_ids.tolist(), handed_off.answer_tokens) == ([*range(100, 108), 50], 3)
    assert (here.token_ids.tolist(), here.answer_tokens) == ([*range(100, 107)], 5)
    assert plain.token_ids is None


def test_a_refusal_carries_the_number_of_the_next_token() -> None:
    (delta,) = deltas(scheduler().receive(ROUTER, generate("a", 8, max_new_tokens=1000, first=5), 0.0))
    assert delta.first == 5 and isinstance(delta.ending, Failed)


def test_a_reservation_that_is_lost_fails_at_the_number_from_which_it_was_asked_for() -> None:
    """Whether the first token went out is not known here."""
    made = scheduler()
    made.receive(WRITER, reserve("a", 8, first=2), 0.0)
    made.decide(0.0)
    (delta,) = deltas(made.receive(WRITER, renew(1.0), 1.0))
    assert delta.first == 2


# --- terms -----------------------------------------------------------------------------------------------------------------


def test_a_request_whose_time_is_over_in_the_line_is_declined() -> None:
    made, _ = with_reservation(max_rows=1)
    made.receive(WRITER, reserve("b", 4, terms=Terms(timeout_s=1.0)), 0.0)
    actions = made.tick(1.0)
    assert declined(actions)["b"].status == 504 and deltas(actions) == [] and made.report().load.waiting_requests == 0


# --- what the router asks --------------------------------------------------------------------------------------------------


def test_a_probe_is_answered_with_what_each_request_emits_next() -> None:
    made = decoding("decodes", max_rows=2)
    step(made, 0.1)
    reserved(made, "reserved")
    made.receive(WRITER, reserve("waits", 8, first=3), 0.0)
    made.receive(ROUTER, generate("over", 4), 0.0)
    made.receive(ROUTER, Cancel(key=key("over")), 0.0)
    asked = {"decodes": 2, "reserved": 0, "waits": 3, "over": None, "unknown": None}
    (answer,) = messages(made.receive(ROUTER, Probe(round=1, keys=tuple(key(name) for name in asked)), 1.0))
    standings = tuple(Standing(key(name), next_token) for name, next_token in asked.items())
    assert answer == Probed(round=1, id=ME, incarnation=LIFE, standings=standings)


def repeated(made: DecodeScheduler, name: str, first: int = 0) -> list[TokenDelta]:
    return deltas(made.receive(ROUTER, Repeat(tokens=((key(name), first),)), 1.0))


def test_a_decode_instance_tells_an_answer_again_from_the_token_that_its_writer_sent() -> None:
    made, grant = with_reservation(max_new_tokens=3)
    assert repeated(made, "a") == []
    made.receive(WRITER, handoff(grant, first_token=50), 0.0)
    told = [repeated(made, "a")]
    for token in (70, 71):
        step(made, 0.1, token=token)
        told.append(repeated(made, "a"))
    assert is_home(made)
    ending = Finished(reason="length")
    assert told == [
        [TokenDelta(key("a"), 0, tokens, end)] for tokens, end in (((50,), None), ((50, 70), None), ((50, 70, 71), ending))
    ]
    assert repeated(made, "a", 2) == [TokenDelta(key("a"), 2, (71,), ending)]


@pytest.mark.parametrize(
    ("asks", "first", "tells_first"),
    [
        ({"logprobs": 1}, 0, True),
        ({"logprobs": 1}, 2, True),
        ({"logprobs": 1, "prompt_logprobs": 0}, 2, True),
        ({"logprobs": 1, "prompt_logprobs": 0}, 0, False),
    ],
    ids=["its logprob came with the handoff", "a resumed one", "the prompt's are known there", "the prompt's are not here"],
)
def test_the_token_that_its_writer_sent_is_told_again_only_with_all_that_goes_with_it(
    asks: dict[str, int], first: int, tells_first: bool
) -> None:
    made = scheduler()
    plain = reserve("a", 6, first=first)
    made.receive(WRITER, replace(plain, sampling=replace(plain.sampling, **asks)), 0.0)
    (grant,) = grants(made.decide(0.0).actions)
    made.receive(WRITER, replace(handoff(grant, first_token=50), first_logprob=toy_logprob(50, 6, 1)), 0.0)
    plan = planned(made.decide(0.1))
    own = Logprobs.of(plan.sampled_rows.tolist(), [toy_logprob(70, 7, 1)])
    (told,) = deltas(made.step_done(StepResult(plan, np.array([70], dtype=np.int32), own), 0.1))
    assert told == TokenDelta(key("a"), first + 1, (70,), None, (toy_logprob(70, 7, 1),))
    both = TokenDelta(key("a"), first, (50, 70), None, (toy_logprob(50, 6, 1), toy_logprob(70, 7, 1)))
    assert repeated(made, "a", first) == ([both] if tells_first else [told])


def test_the_requests_of_a_router_that_is_gone_end_without_a_word_to_the_client() -> None:
    made = decoding("decodes", max_rows=3)
    made.receive(WRITER, reserve("reserved", 4), 0.0)
    made.receive(ROUTER, generate("computes", 12), 0.0)
    plan = planned(made.decide(0.0))
    made.receive(WRITER, reserve("waits", 4), 0.0)
    assert abandon(made, 0.5) == []
    assert made.step_done(result(plan, [60]), 0.6) == []
    settle(made, made.receive(WRITER, Withdraw(key=key("reserved")), 0.7))
    assert is_home(made) and made.decide(0.8).plan is None
    assert made.report().counters.requests_ended == 4


# --- digests ---------------------------------------------------------------------------------------------------------------


def digest(pages: Int32Array) -> bytes:
    """Made of nothing but the pages' numbers."""
    return pages.astype("<u4").tobytes()


def verified(change: int = 0) -> tuple[DecodeScheduler, Grant, bytes]:
    """A reservation, and the digests of its pages, of which so many were changed on the way."""
    made, grant = with_reservation(tokens=10, digest=digest)
    sent = np.frombuffer(grant.pages, dtype="<u4").copy()
    sent[:change] += 1
    return made, grant, sent.tobytes()


def test_pages_that_are_as_they_were_sent_are_decoded_from() -> None:
    made, grant, digests = verified()
    assert made.receive(WRITER, handoff(grant, digests=digests), 0.1) == []
    assert len(planned(made.decide(0.1)).decode_rows) == 1 and made.report().counters.pages_corrupt == 0


@pytest.mark.parametrize("corrupt", [1, 3])
def test_a_page_that_is_not_as_it_was_sent_is_counted_and_its_request_is_resumed(corrupt: int) -> None:
    made, grant, digests = verified(corrupt)
    actions = made.receive(WRITER, handoff(grant, digests=digests), 0.1)
    told = failures(actions)["a"]
    assert told.retryable and f"{corrupt} of 3 pages differ from what was sent" in told.message
    settle(made, actions)
    assert is_home(made) and made.decide(0.2).plan is None
    assert (made.report().counters.pages_corrupt, made.report().counters.handoffs) == (corrupt, 0)


@pytest.mark.parametrize(("digests", "missing"), [(2, 1), (0, 3)])
def test_digests_of_too_few_pages_are_a_difference(digests: int, missing: int) -> None:
    made, grant, sent = verified()
    actions = made.receive(WRITER, handoff(grant, digests=sent[: 4 * digests]), 0.1)
    assert f"{missing} of 3 pages" in failures(actions)["a"].message


def test_digests_are_nothing_to_an_instance_that_does_not_verify_pages() -> None:
    made = scheduler()
    assert made.receive(WRITER, handoff(reserved(made), digests=b"nonsense"), 0.1) == []


# --- the end of the instance -----------------------------------------------------------------------------------------------


def test_a_draining_instance_takes_nothing_in_and_hands_on_what_waits() -> None:
    made, grant = with_reservation("reserved", max_rows=1)
    made.receive(WRITER, reserve("waits", 4), 0.0)
    made.receive(ROUTER, generate("waits too", 4), 0.0)
    actions = drain(made, 1.0)
    assert declined(actions)["waits"].retryable and failures(actions)["waits too"].retryable
    late = [*made.receive(WRITER, reserve("late", 4), 1.0), *made.receive(ROUTER, generate("late too", 4), 1.0)]
    assert "leaving" in declined(late)["late"].message and "leaving" in failures(late)["late too"].message
    assert drain(made, 2.0) == [] and made.receive(WRITER, handoff(grant), 2.0) == []
    drained = []
    for _ in range(3):
        drained.append(made.report().drained)
        assert failures(step(made, 3.0)) == {}
    assert [*drained, made.report().drained] == [False, False, False, True] and is_home(made)


def test_requests_that_still_run_when_the_drain_times_out_fail_so_that_they_are_resumed() -> None:
    made = decoding("decodes")
    plan = planned(made.decide(0.0))
    drain(made, 0.0)
    assert made.tick(29.9) == []
    told = failures(made.tick(30.0))["decodes"]
    assert told.retryable and told.status == 503
    drained = [made.report().drained]
    made.step_done(result(plan, [60]), 30.1)
    assert [*drained, made.report().drained] == [False, True]


# --- reports ---------------------------------------------------------------------------------------------------------------


def test_the_load_says_who_waits_runs_and_is_expected() -> None:
    made = decoding("decodes", tokens=6, max_rows=2, total_pages=16)
    step(made, 0.0)
    reserved(made, "reserved", tokens=10)
    made.receive(WRITER, reserve("waits", 7), 0.0)
    load = made.report().load
    assert (load.waiting_requests, load.waiting_tokens) == (1, 7)
    assert (load.running_requests, load.running_tokens) == (2, (6 + 2) + 10)
    assert (load.reservations, load.pages_total, load.pages_free) == (1, 16, 16 - 3 - 4)
    assert granted(made.decide(0.0).actions) == [] and kinds(made.tick(0.0)) == []
    assert made.report().counters.pages_received == LAYOUT.pages_for(6)


def test_a_failure_behind_a_token_that_only_the_writer_knows_keeps_its_number_when_it_is_told_again() -> None:
    made, grant = with_reservation()
    invalid = replace(handoff(grant), pushed_pages=99)
    told = deltas(made.receive(WRITER, invalid, 0.0))
    assert [(delta.first, delta.token_ids) for delta in told] == [(1, ())]
    assert repeated(made, "a") == repeated(made, "a", 1) == told
