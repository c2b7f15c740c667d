"""Predicted times to first token: compared with what came, and a request that would come too late is refused at once."""

from dataclasses import replace

import pytest
from msgspec import structs

from common.config import PolicyName, RouterConfig
from common.errors import Overloaded
from common.ids import RequestId, pack_ids
from common.messages import Finished, Load
from router.api.errors import response_to
from router.metrics import RouterMetrics
from tests.router.bench import D0, P0, P1, Bench, route, spec
from tests.router.calls import metric

STEP_S, TOKEN_S = 0.5, 0.1
PROMPT_S = STEP_S + 20 * TOKEN_S
"""The time of the prompt of `spec`, where nothing is in front of it."""


def measured(**load: int) -> Load:
    return Load(pages_free=64, pages_total=64, step_s=STEP_S, chunk_token_s=TOKEN_S, **load)


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
    assert second.times.predicted_first_s == pytest.approx(2 * STEP_S + 40 * TOKEN_S - 0.5)


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
    assert last.times.predicted_first_s == pytest.approx(2 * STEP_S + 40 * TOKEN_S - 0.5)


def test_what_a_report_counts_of_other_routers_prompts_was_still_there_when_it_came() -> None:
    """The instance has computed for 59 s, of which this router's prompt got nothing: 510 tokens are left in front of the next."""
    bench = busy_bench(1000)
    bench.submit(spec("a"), at=0.0)
    bench.report(P0, 59.0, measured(waiting_tokens=510, tokens_to_compute=510))
    bench.submit(spec("b"), at=59.5)
    (*_, last) = bench.core.requests.records()
    assert last.times.predicted_first_s == pytest.approx(2 * STEP_S + (510 + 20) * TOKEN_S - 0.5)


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
    comes_s = 2 * STEP_S + (100 + own) * TOKEN_S  # the last of them
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
    fair_s = 2 * STEP_S + (20 + 20 + 20) * TOKEN_S  # as much of another router's queue, of alice's, and its own
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
