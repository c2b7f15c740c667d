"""What placements cost, against cases that are worked out by hand.

A step takes 10 ms, a prompt token 1 ms, a decode row 2 ms. A token's KV is 32 bytes.

And predicted times to first token: compared with what came, and a request that would come too late is refused at once.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from common.config import PolicyName, RouterConfig
from common.errors import Overloaded
from common.ids import RequestId, Role, pack_ids
from common.messages import Finished, Load
from router.api.errors import response_to
from router.cache_index import NO_OVERLAP, Overlap
from router.cost import STEPS_AHEAD, Demand, decode_cost_s, pair_cost_s, predict_ttft, prefill_cost_s, single_estimate
from router.members import Member
from router.metrics import RouterMetrics
from tests.builders import instance
from tests.router.bench import D0, P0, P1, Bench, route, spec
from tests.router.calls import metric

STEP_S, TOKEN_S, ROW_S = 0.010, 0.001, 0.002
PAGES, ROWS = 1_000, 8
TOKEN_BYTES = 32
MEASURED = {"step_s": STEP_S, "chunk_token_s": TOKEN_S, "decode_row_s": ROW_S}


class Cached(Overlap):
    """The overlap of a prompt, by the names of members."""

    def __init__(self, held: Mapping[str, int]) -> None:
        self.held = held

    def tokens(self, member: Member) -> int:
        return self.held.get(member.info.id, 0)


def member(name: str, role: Role, **load: Any) -> Member:
    info = instance(name, role)
    pools = (msgspec.structs.replace(info.pools[0], total_pages=PAGES),)
    large = msgspec.structs.replace(info, pools=pools, max_running=ROWS)
    return Member(large, Load(**{"pages_free": PAGES, "pages_total": PAGES} | MEASURED | load))


def ask(prompt_tokens: int = 100, max_new_tokens: int = 20, **cached: int) -> Demand:
    return Demand(prompt_tokens, max_new_tokens, overlap=Cached(cached) if cached else NO_OVERLAP)


def test_an_idle_prefill_instance_takes_a_step_with_the_prompt() -> None:
    assert prefill_cost_s(member("p0", "prefill"), ask(100)) == pytest.approx(STEP_S + 0.100)


def test_what_waits_there_is_computed_first_and_what_is_cached_is_not() -> None:
    busy = member("p0", "prefill", tokens_to_compute=300)
    assert prefill_cost_s(busy, ask(100)) == pytest.approx(2 * STEP_S + 0.300 + 0.100)
    assert prefill_cost_s(busy, ask(100, p0=64)) == pytest.approx(2 * STEP_S + 0.300 + 0.036)
    assert prefill_cost_s(member("p0", "prefill"), ask(100, p0=100)) == pytest.approx(STEP_S + 0.001), "the last token, always"


def test_what_the_router_has_given_since_the_last_report_waits_there_too() -> None:
    busy = member("p0", "prefill", tokens_to_compute=300)
    busy.computing_before, busy.computing_tokens = 50, 70
    assert prefill_cost_s(busy, ask(100)) == pytest.approx(2 * STEP_S + 0.320 + 0.100)


def test_the_second_token_waits_for_what_the_link_moves_after_the_prompt_is_computed() -> None:
    prefill, decode = member("p0", "prefill"), member("d0", "decode")
    answer_s = 20 * (STEP_S + ROW_S)
    assert decode_cost_s(decode, prefill, ask(100)) == pytest.approx(answer_s), "a link that was not measured costs nothing"
    prefill.speeds[decode.info.id] = 100 * TOKEN_BYTES / 0.250  # bytes per second
    assert decode_cost_s(decode, prefill, ask(100)) == pytest.approx(answer_s + 0.250 - 0.100)
    assert decode_cost_s(decode, prefill, ask(100, d0=80)) == pytest.approx(answer_s), "20 tokens move while 100 are computed"
    assert decode_cost_s(decode, prefill, ask(100, p0=80)) == pytest.approx(answer_s + 0.250 - 0.020)


def test_a_row_more_makes_every_step_longer_for_itself_and_for_all_others() -> None:
    prefill = member("p0", "prefill")
    busy = member("d0", "decode", running_requests=5, running_tokens=500)
    assert decode_cost_s(busy, prefill, ask(100)) == pytest.approx(20 * (STEP_S + 6 * ROW_S) + 20 * 5 * ROW_S)
    busy.assigned_requests = 6  # one more since the report, however long: it counts as a row
    busy.requests_before = 5
    busy.assigned_before, busy.assigned_tokens = 500, 1500
    assert decode_cost_s(busy, prefill, ask(100)) == pytest.approx(20 * (STEP_S + 7 * ROW_S) + 20 * 6 * ROW_S)


def test_a_step_is_as_long_as_what_its_rows_hold_takes_to_be_read() -> None:
    prefill, token_s = member("p0", "prefill"), 0.0001
    busy = member("d0", "decode", running_requests=5, running_tokens=500, held_token_s=token_s)
    own_s = ROW_S + 120 * token_s  # with its answer it holds 120
    step_s = STEP_S + 5 * ROW_S + 500 * token_s + own_s
    assert decode_cost_s(busy, prefill, ask(100)) == pytest.approx(20 * step_s + 20 * 5 * own_s)
    assert single_estimate(busy, ask(100)).ttft_s == pytest.approx((1 + STEPS_AHEAD) * step_s + 0.100)
    fresh = member("d1", "decode", step_s=0.0, decode_row_s=0.0)
    fresh.pace.hear(busy.load)
    assert fresh.pace.held_token_s == token_s and single_estimate(fresh, ask(100)).ttft_s > STEP_S + own_s


def test_without_room_it_waits_until_so_much_of_what_others_hold_has_come_free() -> None:
    prefill = member("p0", "prefill")
    full = member("d0", "decode", running_requests=5, running_tokens=600, pages_free=15)  # 60 of its tokens
    answer_s = 20 * (STEP_S + 6 * ROW_S)
    waits_s = (120 - 60) / 600 * answer_s
    assert decode_cost_s(full, prefill, ask(100)) == pytest.approx(waits_s + answer_s + 20 * 5 * ROW_S)
    assert single_estimate(full, ask(100)).ttft_s > waits_s


def test_where_all_rows_run_it_waits_until_one_of_them_ends_for_each_that_waits() -> None:
    prefill = member("p0", "prefill")
    full = member("d0", "decode", running_requests=ROWS, waiting_requests=3, running_tokens=800)
    answer_s = 20 * (STEP_S + ROWS * ROW_S)
    assert decode_cost_s(full, prefill, ask(100)) == pytest.approx(4 / ROWS * answer_s + answer_s + 20 * (ROWS - 1) * ROW_S)


def test_nobody_waits_longer_for_memory_than_an_answer_takes_and_a_request_that_fits_exactly_not_at_all() -> None:
    """A quarter of the pages is held by none of its requests."""
    answer_s = 20 * (STEP_S + ROW_S)
    short = member("d0", "decode", pages_free=PAGES * 3 // 4)
    assert single_estimate(short, ask(3000)).ttft_s == pytest.approx(answer_s + STEP_S + ROW_S + 3.0)
    fits = ask(PAGES * 4 - 19)
    assert fits.most_tokens == PAGES * 4
    assert single_estimate(member("d0", "decode"), fits).ttft_s == pytest.approx(STEP_S + ROW_S + fits.prompt_tokens * TOKEN_S)


def test_alone_a_prompt_holds_up_every_row_that_runs() -> None:
    busy = member("d0", "decode", running_requests=4, running_tokens=400, tokens_to_compute=50)
    ttft_s = 0.050 + (1 + STEPS_AHEAD) * (STEP_S + 5 * ROW_S) + 0.100
    decoding_s = 20 * (STEP_S + 5 * ROW_S) + 20 * 4 * ROW_S
    estimate = single_estimate(busy, ask(100))
    assert (estimate.ttft_s, estimate.cost_s) == pytest.approx((ttft_s, ttft_s + 4 * 0.100 + decoding_s))
    idle = single_estimate(member("d0", "decode"), ask(100))
    assert idle.ttft_s == pytest.approx(STEP_S + ROW_S + 0.100)


def test_two_instances_are_worth_it_when_rows_would_be_held_up_or_a_queue_is_shorter() -> None:
    """Nobody waits at the idle pair but for the prompt itself: then the two ways differ by the row of the chunk's step."""
    prefill, busy = member("p0", "prefill"), member("d0", "decode", running_requests=4, running_tokens=400)
    request = ask(100)
    pair_s, single_s = pair_cost_s(prefill, busy, request), single_estimate(busy, request).cost_s
    assert pair_s == prefill_cost_s(prefill, request) + decode_cost_s(busy, prefill, request)
    assert pair_s < single_s
    held_up_s = single_s - pair_s
    queue = member("p0", "prefill", tokens_to_compute=round((held_up_s - STEP_S) / TOKEN_S))
    assert pair_cost_s(queue, busy, request) == pytest.approx(single_s, abs=TOKEN_S), "here they are equal"


def test_who_has_measured_nothing_is_as_fast_as_its_role() -> None:
    fresh, known = (member(name, "prefill", step_s=0.0, chunk_token_s=0.0, decode_row_s=0.0) for name in ("p0", "p1"))
    fresh.pace = known.pace
    for chunk_token_s in (TOKEN_S, *(2 * TOKEN_S,) * 200):
        known.pace.hear(Load(step_s=STEP_S, chunk_token_s=chunk_token_s))
    assert prefill_cost_s(fresh, ask(100)) == pytest.approx(STEP_S + 0.200, rel=0.01), "the mean of what was heard of late"


def test_a_decode_instance_that_computed_no_prompt_is_as_fast_as_those_that_do() -> None:
    decode = member("d0", "decode", chunk_token_s=0.0)
    decode.other_pace.hear(Load(chunk_token_s=TOKEN_S))
    assert single_estimate(decode, ask(100)).ttft_s == pytest.approx(STEP_S + ROW_S + 0.100)


def test_when_nobody_has_measured_anything_members_are_ordered_by_their_load_and_nothing_is_predicted() -> None:
    nothing = {"step_s": 0.0, "chunk_token_s": 0.0, "decode_row_s": 0.0}
    prefills = [member(f"p{n}", "prefill", tokens_to_compute=100 * n, **nothing) for n in range(4)]
    decodes = [member(f"d{n}", "decode", running_requests=n, running_tokens=100 * n, **nothing) for n in range(4)]
    queues, rows = (
        [prefill_cost_s(each, ask()) for each in prefills],
        [decode_cost_s(each, prefills[0], ask()) for each in decodes],
    )
    assert queues == sorted(set(queues)) and rows == sorted(set(rows))
    assert predict_ttft(prefills[0], ask(), since_s=0.0) is None and predict_ttft(decodes[0], ask(), since_s=0.0) is None


def test_what_was_computed_of_the_queue_since_is_not_waited_for() -> None:
    busy = member("p0", "prefill", tokens_to_compute=300)
    at_once_s = 2 * STEP_S + 0.100
    assert predict_ttft(busy, ask(100), since_s=0.200) == pytest.approx(at_once_s + 0.100)
    assert predict_ttft(busy, ask(100), since_s=9.0) == pytest.approx(at_once_s), "the queue is over, but not more"


def test_an_owner_that_has_less_than_its_part_of_rows_and_memory_is_predicted_to_wait_for_neither() -> None:
    full = member("d0", "decode", running_requests=ROWS, waiting_requests=30, running_tokens=800)
    for _ in range(ROWS + 30):
        full.assign("alice", 20)
    full.requests_before, full.assigned_before = full.assigned_requests, full.assigned_tokens
    waits_s = 31 / ROWS * 20 * (STEP_S + ROWS * ROW_S)

    def predicted(owner: str, tokens: int = 100) -> float:
        found = predict_ttft(full, Demand(tokens, 20, owner=owner))
        assert found is not None
        return found

    assert predicted("bob") == pytest.approx(predicted("alice") - waits_s)
    assert predicted("alice") == predicted("")
    assert predicted("bob", PAGES * 3) - predicted("alice", PAGES * 3) == pytest.approx(0.0), (
        "its part of the memory is half of it"
    )


# --- predictions ----------------------------------------------------------------------------------------------------------------


SLOW_STEP_S, SLOW_TOKEN_S = 0.5, 0.1
PROMPT_S = SLOW_STEP_S + 20 * SLOW_TOKEN_S
"""The time of the prompt of `spec`, where nothing is in front of it."""


def measured(**load: int) -> Load:
    return Load(pages_free=64, pages_total=64, step_s=SLOW_STEP_S, chunk_token_s=SLOW_TOKEN_S, **load)


def busy_bench(tokens: int, early_rejection: str = "on") -> Bench:
    """So many tokens of others are in front of every new prompt."""
    bench = Bench(P0, D0, config=RouterConfig(early_rejection="on" if early_rejection == "on" else "off"))
    bench.report(P0, 0.0, measured(waiting_tokens=tokens, tokens_to_compute=tokens))
    return bench


def test_a_prediction_is_compared_with_the_first_token_and_counts_from_the_arrival() -> None:
    bench = Bench(P0, D0)
    bench.report(P0, 0.0, measured())
    bench.client.received_s = 1.0
    bench.core.requests.submit(bench.client, [spec()], now=1.25)
    bench.text(0, "a", now=5.0)
    ((predicted_s, real_s),) = bench.observer.predictions
    assert (predicted_s, real_s) == pytest.approx((0.25 + PROMPT_S, 4.0))
    errors = bench.core.requests.placer.prediction_errors()
    assert errors is not None
    assert errors.requests == 1
    assert (errors.median_s, errors.median_share) == pytest.approx((1.25, 1.25 / 4.0))


def test_a_prompt_behind_another_waits_for_what_is_left_of_that() -> None:
    bench = Bench(P0, D0)
    bench.report(P0, 0.0, measured())
    bench.submit(spec("r"), at=1.0)
    bench.submit(spec("s"), at=1.5)
    (_, second) = bench.core.requests.records()
    assert second.times.predicted_first_s == pytest.approx(2 * SLOW_STEP_S + 40 * SLOW_TOKEN_S - 0.5)


@pytest.mark.parametrize("ending", ["token", "embedding", "cancel"])
def test_however_the_prompt_in_front_ended_the_next_one_has_been_computed_since_then_only(ending: str) -> None:
    bench = Bench(P0, D0)
    bench.report(P0, 0.0, measured())
    for name in "abc":
        bench.submit(spec(name), at=0.0)
    bench.core.requests.cancel([RequestId("c")], 1.5)  # behind another one: that goes on
    if ending == "token":
        bench.text(0, "a", now=2.0, name="a")
    elif ending == "embedding":
        bench.text(0, "", Finished(reason="length"), now=2.0, name="a")
    else:
        bench.core.requests.cancel([RequestId("a")], 2.0)
    bench.submit(spec("d"), at=2.5)
    (*_, last) = bench.core.requests.records()
    assert last.times.predicted_first_s == pytest.approx(2 * SLOW_STEP_S + 40 * SLOW_TOKEN_S - 0.5)


def test_what_a_report_counts_of_other_routers_prompts_was_still_there_when_it_came() -> None:
    """The instance has computed for 59 s, of which this router's prompt got nothing: 510 tokens are left in front of the next."""
    bench = busy_bench(1000)
    bench.submit(spec("a"), at=0.0)
    bench.report(P0, 59.0, measured(waiting_tokens=510, tokens_to_compute=510))
    bench.submit(spec("b"), at=59.5)
    (*_, last) = bench.core.requests.records()
    assert last.times.predicted_first_s == pytest.approx(2 * SLOW_STEP_S + (510 + 20) * SLOW_TOKEN_S - 0.5)


def test_without_a_measured_pace_nothing_is_predicted_and_nothing_refused() -> None:
    bench = Bench(P0, D0)
    bench.report(P0, 0.0, Load(pages_free=64, pages_total=64, waiting_tokens=10**9, tokens_to_compute=10**9))
    bench.submit(replace(spec(), timeout_s=0.001))
    bench.text(0, "a")
    assert bench.observer.predictions == [] and bench.core.requests.placer.prediction_errors() is None


@pytest.mark.parametrize("choices", [1, 3])
def test_a_request_that_would_be_too_late_is_refused_whole_and_told_when_to_come_again(choices: int) -> None:
    bench = busy_bench(100)
    own = 20 + 4 * (choices - 1)  # a prompt's choices share its whole pages, but for the last token's
    comes_s = 2 * SLOW_STEP_S + (100 + own) * SLOW_TOKEN_S  # the last of them
    specs = [replace(spec(f"r{n}", n), timeout_s=comes_s - 1.5) for n in range(choices)]
    with pytest.raises(Overloaded, match="too late") as refused:
        bench.submit(*specs)
    assert refused.value.retry_after_s == 2
    assert (response_to(refused.value).status_code, response_to(refused.value).headers["retry-after"]) == (429, "2")
    requests = bench.core.requests
    assert (requests.placer.rejected, len(requests)) == (choices, 0)
    assert set(bench.assigned().values()) == {0}
    assert all(member.computing_tokens == member.growth_tokens == 0 for member in bench.core.fleet.members())
    bench.submit(*(replace(each, timeout_s=comes_s + 0.1) for each in specs))


def test_who_does_not_want_it_waits() -> None:
    busy_bench(100, early_rejection="off").submit(replace(spec(), timeout_s=0.1))


def test_where_nothing_is_in_front_a_request_is_always_taken_whatever_is_predicted() -> None:
    """A pace that was measured wrong must be measured again."""
    bench = busy_bench(0)
    bench.submit(*(replace(spec(f"r{n}", n), timeout_s=0.1) for n in range(2)))
    with pytest.raises(Overloaded):
        bench.submit(replace(spec("s"), timeout_s=0.1))
    bench.join(P1, 1.0)
    bench.submit(replace(spec("s"), timeout_s=0.1), at=1.0)
    assert RequestId("s") in {record.spec.request_id for record in bench.core.requests.records()}


def test_predictions_are_in_the_metrics() -> None:
    metrics = RouterMetrics()
    metrics.first_token(4.0, predicted_s=1.0)
    text = metrics.text().decode()
    assert metric(text, "tandem_predicted_time_to_first_token_seconds_sum") == 1.0
    assert metric(text, 'tandem_time_to_first_token_prediction_ratio_bucket{le="0.25"}') == 1.0


def test_a_prompt_that_was_refused_is_not_expected_to_be_cached_anywhere() -> None:
    """Else it would be taken when it is asked again at once."""
    bench = Bench(P0, D0, config=RouterConfig(prefill_policy="cache_aware"))
    bench.report(P0, 0.0, measured(waiting_tokens=1, tokens_to_compute=1))
    long = replace(spec(), prompt=pack_ids(range(100)), timeout_s=10.0)
    for _ in range(2):
        with pytest.raises(Overloaded, match="too late"):
            bench.submit(long)
    assert len(bench.core.fleet.caches) == 0
    bench.submit(replace(long, timeout_s=12.0))
    assert len(bench.core.fleet.caches) == 100 // 32


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded"])
def test_a_request_that_another_member_serves_in_time_goes_there_instead_of_being_refused(policy: PolicyName) -> None:
    bench = Bench(P0, P1, D0, config=RouterConfig(prefill_policy=policy), places=False)
    for each, tokens, token_s in ((P0, 2000, 0.001), (P1, 1000, 1.0)):  # the one with fewer tokens is the slower one
        load = measured(waiting_tokens=tokens, tokens_to_compute=tokens)
        bench.report(each, 0.0, structs.replace(load, chunk_token_s=token_s))
    sent = [route(bench.submit(replace(spec(f"r{n}"), timeout_s=10.0)))[0] for n in range(4)]
    assert sent == [P0.id] * 4 and bench.core.requests.placer.rejected == 0
    with pytest.raises(Overloaded, match="too late"):
        bench.submit(replace(spec("late"), timeout_s=1.0))


def test_one_keys_long_queue_refuses_no_short_prompt_of_another_key() -> None:
    """Forwards are shared, so alice's queue delays bob's prompt by its own length, whichever router assigned it."""
    bench = Bench(P0, D0, config=RouterConfig(early_rejection="on"))
    bench.report(P0, 0.0, measured(waiting_tokens=1000, tokens_to_compute=1000))
    fair_s = 2 * SLOW_STEP_S + (20 + 20 + 20) * SLOW_TOKEN_S  # as much of another router's queue, of alice's, and its own
    for number in range(10):
        bench.submit(replace(spec(f"a{number}"), owner="alice", timeout_s=1000.0))
    with pytest.raises(Overloaded, match="too late"):
        bench.submit(replace(spec("a"), owner="alice", timeout_s=fair_s + 1))
    with pytest.raises(Overloaded, match="too late"):
        bench.submit(replace(spec("nobody"), timeout_s=fair_s + 1))
    with pytest.raises(Overloaded, match="too late"):
        bench.submit(replace(spec("b"), owner="bob", timeout_s=fair_s - 0.1))
    bench.submit(replace(spec("b"), owner="bob", timeout_s=fair_s + 0.1))
    with pytest.raises(Overloaded, match="too late"):
        bench.submit(replace(spec("b2"), owner="bob", timeout_s=fair_s + 0.1))
    bench.core.requests.cancel([record.spec.request_id for record in bench.core.requests.records()], 1.0)
    assert not any(member.requests_of or member.prompts_of for member in bench.core.fleet.members())
