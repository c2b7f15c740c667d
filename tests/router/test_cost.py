"""What placements cost, against cases that are worked out by hand.

A step takes 10 ms, a prompt token 1 ms, a decode row 2 ms. A token's KV is 32 bytes.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from common.ids import Role
from common.messages import Load
from router.cache_index import NO_OVERLAP, Overlap
from router.cost import STEPS_AHEAD, Demand, decode_cost_s, pair_cost_s, predict_ttft, prefill_cost_s, single_estimate
from router.members import Member
from tests.builders import instance

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
