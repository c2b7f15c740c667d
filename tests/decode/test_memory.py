"""Memory on a decode instance: pages one by one, who gives them up when none is free, and who comes in."""

import numpy as np
import pytest

from common.executor import StepPlan
from common.ids import DETOKENIZER, ROUTER, Generation
from common.instance.waiting_line import Rank
from common.messages import Cancel, Claim, Grant, Renew, Terms, Times, Withdraw
from common.pages.pool import PageLease, PagePool
from common.pages.radix_cache import PageKeys
from decode.memory import choose_victims
from decode.requests import DecodeRequest
from decode.scheduler import DecodeScheduler
from kv_transfer.handoff_reader import WRITE_LEASE_S
from tests.builders import EOS, LAYOUT, key, result
from tests.decode.rig import WRITER, WRITERS_LIFE, handoff, renew, reserve, reserved, scheduler, step, with_reservation
from tests.schedulers import (
    declined,
    deltas,
    failures,
    generate,
    granted,
    grants,
    is_home,
    kinds,
    planned,
    prompt_of,
    renewed,
    settle,
)


def ask(made: DecodeScheduler, name: str, tokens: int, max_new_tokens: int = 16, age_s: float = 0.0, priority: int = 0) -> None:
    """A request to be served here alone."""
    terms = Terms(age_s=age_s, priority=priority)
    assert made.receive(ROUTER, generate(name, tokens, max_new_tokens, terms=terms), 100.0) == []


def grown(plan: StepPlan) -> list[tuple[int, int]]:
    return list(zip(plan.grown_rows.tolist(), plan.grown_pages.tolist(), strict=True))


# --- page by page ----------------------------------------------------------------------------------------------------------


def test_a_request_takes_a_page_when_it_needs_one_and_the_executor_is_told() -> None:
    made = scheduler(total_pages=8)
    ask(made, "a", tokens=4, max_new_tokens=12)
    first = planned(made.decide(100.0))
    row, pages = first.starts[0].row, first.starts[0].pages.tolist()
    made.step_done(result(first, [60]), 100.0)
    for number in range(1, 12):
        plan = planned(made.decide(100.0))
        held = max(2, LAYOUT.pages_for(4 + number))  # the step writes the KV of one token more
        assert [grown_row for grown_row, _ in grown(plan)] == [row] * (held - len(pages))
        pages += [page for _, page in grown(plan)]
        assert len(set(pages)) == held and made.report().load.pages_free == 8 - held
        made.step_done(result(plan, [60]), 100.0)
    assert len(pages) == 4 and is_home(made)


def test_a_page_is_taken_for_a_step_while_the_step_before_is_still_in_flight() -> None:
    made = scheduler()
    made.receive(WRITER, handoff(reserved(made, tokens=7, max_new_tokens=60)), 0.0)  # leased: room for 12 tokens
    plans = [planned(made.decide(0.0)) for _ in range(10)]
    assert [len(grown(plan)) for plan in plans] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    assert made.report().load.pages_total - made.report().load.pages_free == LAYOUT.pages_for(7 + 10)


def test_a_request_never_takes_more_than_its_longest_answer_needs() -> None:
    made = scheduler(total_pages=3)
    ask(made, "a", tokens=6, max_new_tokens=7)  # 12 tokens of KV: the whole pool
    ends = [deltas(step(made, 100.0))[-1].ending for _ in range(7)]
    assert ends[:-1] == [None] * 6 and ends[-1] is not None and is_home(made)
    assert made.report().counters.preemptions == 0


def test_the_pages_that_were_taken_on_the_way_come_home_with_the_others() -> None:
    made = scheduler(total_pages=8)
    ask(made, "a", tokens=4)
    for _ in range(9):
        step(made, 100.0)
    assert made.report().load.pages_free == 5
    step(made, 100.0, token=EOS)
    assert is_home(made)


# --- preemption ------------------------------------------------------------------------------------------------------------


def crowded(*, old_age_s: float = 10.0, young_age_s: float = 5.0, young_priority: int = 0) -> DecodeScheduler:
    """Two requests that have filled 4 pages of a pool of 5, and both need another page for the next step."""
    made = scheduler(total_pages=5)
    ask(made, "old", tokens=4, age_s=old_age_s)
    ask(made, "young", tokens=4, age_s=young_age_s, priority=young_priority)
    for _ in range(5):
        assert failures(step(made, 100.0)) == {}
    assert made.report().load.pages_free == 1
    return made


def test_when_no_page_is_free_the_youngest_is_preempted_and_may_go_on_elsewhere() -> None:
    made = crowded()
    actions = step(made, 100.0)
    told = failures(actions)
    assert list(told) == ["young"]
    assert told["young"].kind == "preempted_error" and told["young"].retryable and told["young"].status == 503
    (ending,) = (delta for delta in deltas(actions) if delta.ending)
    assert ending.first == 5 and ending.token_ids == ()
    assert (made.report().counters.preemptions, made.report().counters.requests_ended) == (1, 1)
    assert [delta.key.request_id for delta in deltas(step(made, 100.0))] == ["old"]


def test_the_least_urgent_is_preempted_and_among_equals_the_youngest_whoever_arrived_here_first() -> None:
    assert list(failures(step(crowded(young_age_s=1000.0, young_priority=1), 100.0))) == ["young"]
    assert list(failures(step(crowded(old_age_s=5.0, young_age_s=10.0), 100.0))) == ["old"]


def test_the_oldest_request_is_never_preempted_and_always_advances() -> None:
    made = scheduler(total_pages=6)
    ask(made, "oldest", tokens=4, max_new_tokens=20, age_s=50.0)
    emitted = 0
    for number in range(20):
        if not made.report().load.waiting_requests:
            ask(made, f"younger{number}", tokens=3, age_s=40.0)
        actions = step(made, 100.0)
        assert "oldest" not in failures(actions)
        emitted += sum(len(delta.token_ids) for delta in deltas(actions) if delta.key == key("oldest"))
    assert emitted == 20 and made.report().counters.preemptions > 0


def test_the_pages_of_a_victim_come_home_when_its_step_returns_and_the_row_that_needs_one_sits_out_until_then() -> None:
    made = scheduler(total_pages=5)
    ask(made, "old", tokens=1, age_s=10.0)
    ask(made, "young", tokens=4, age_s=5.0)
    for _ in range(7):
        assert failures(step(made, 100.0)) == {}
    in_flight = planned(made.decide(100.0))
    assert len(in_flight.decode_rows) == 2 and made.report().load.pages_free == 0
    decision = made.decide(100.0)
    assert list(failures(decision.actions)) == ["young"] and decision.plan is None
    again = made.decide(100.0)
    assert (again.plan, again.actions) == (None, []), "its pages are on their way: nobody else is put out"
    assert [delta.key.request_id for delta in deltas(made.step_done(result(in_flight, [60, 60]), 100.0))] == ["old"]
    after = planned(made.decide(100.0))
    assert len(after.decode_rows) == 1 and [row for row, _ in grown(after)] == after.decode_rows.tolist()


def test_as_memory_runs_out_requests_are_preempted_one_by_one_youngest_first() -> None:
    made = scheduler(total_pages=11, chunk_tokens=16)
    for number in range(4):
        ask(made, f"r{number}", tokens=4, age_s=10.0 - number)
    out = [list(failures(step(made, 100.0))) for _ in range(13)]
    assert out == [[]] * 5 + [["r3"]] + [[]] * 3 + [["r2"]] + [[]] * 3


def holder(name: str, number: int, lease: PageLease | None, keys: PageKeys) -> DecodeRequest:
    """A request that is older than those of a larger number, with this lease."""
    asked, rank, prompt = generate(name, 8), Rank(0, float(number)), np.zeros(8, dtype=np.int32)
    return DecodeRequest(asked, asked.key, prompt, None, rank, 3, Times(8, 0.0), 0.0, 0, DETOKENIZER, keys, owner="", lease=lease)


def victims(names: str, lacking: str, coming_pages: int = 0, pages: int = 2) -> list[str]:
    """Requests named in the order of their age, oldest first; each holds so many pages."""
    pool = PagePool(100)
    requests = {name: holder(name, number, pool.lease(pages), PageKeys(4)) for number, name in enumerate(names)}
    coming = pool.lease(coming_pages)
    assert coming is not None
    chosen = choose_victims(requests.values(), [requests[name] for name in lacking], [coming])
    return [request.key.request_id for request in chosen]


@pytest.mark.parametrize(
    ("names", "lacking", "coming_pages", "expected"),
    [
        ("abc", "a", 0, ["c"]),
        ("abc", "c", 0, ["c"]),
        ("abcd", "abc", 0, ["d", "c"]),
        ("abcd", "ab", 0, ["d"]),
        ("abcd", "abcd", 0, ["d", "c"]),
        ("abc", "ab", 2, []),
        ("abc", "ab", 1, ["c"]),
        ("a", "a", 0, ["a"]),
        ("", "", 0, []),
    ],
)
def test_victims_are_the_youngest_and_no_more_than_are_needed(
    names: str, lacking: str, coming_pages: int, expected: list[str]
) -> None:
    assert victims(names, lacking, coming_pages) == expected


@pytest.mark.parametrize(
    ("holders", "lacking", "expected"),
    [(["s1", "s1", "s1", "s1"], 2, [3, 2]), (["o4", "s0", "s0"], 1, [2, 1]), (["s1", "o2", "s0"], 1, [1])],
)
def test_victims_bring_what_they_alone_hold_together(holders: list[str], lacking: int, expected: list[int]) -> None:
    """From the oldest on. s: has the two pages of a prompt that many have. o: of another one. Then so many pages of its own. The
    oldest is spared where two others bring their prompt, and who brings nothing where that is of no use."""
    pool, keys = PagePool(100), PageKeys(4, packed=prompt_of(8))
    requests: list[DecodeRequest] = []
    for number, holding in enumerate(holders):
        prompt, own = holding[0], int(holding[1])
        hit = pool.cache.match(keys, 2) if prompt == "s" else None
        lease = pool.lease(2 + own, hit)
        assert lease is not None
        if prompt == "s":
            lease.publish(keys, 2)
        requests.append(holder(str(number), number, lease, keys))
    assert choose_victims(requests, requests[:lacking], coming=[]) == [requests[at] for at in expected]


# --- reservations that give up their memory --------------------------------------------------------------------------------


def with_young_reservation() -> tuple[DecodeScheduler, Grant]:
    """An old request that needs a page for its next step, and a younger reservation; no page is free."""
    made = scheduler(total_pages=5)
    ask(made, "old", tokens=4, age_s=50.0)
    step(made, 100.0)
    made.receive(WRITER, reserve("young", 4, sent_s=100.0), 100.0)
    (grant,) = grants([action for _ in range(8) for action in step(made, 100.0)])
    assert (made.report().load.reservations, made.report().load.pages_free) == (1, 0)
    return made, grant


def test_a_reservation_that_is_preempted_is_declined_and_its_pages_come_home_with_its_writers_word() -> None:
    made, _ = with_young_reservation()
    actions = made.decide(100.0).actions
    assert declined(actions)["young"].kind == "preempted_error" and deltas(actions) == []
    for now in (100.1, 101.0):
        again = made.decide(now)
        assert (again.plan, again.actions) == (None, []), "the row sits out, and nobody else is put out for it"
    settle(made, made.receive(WRITER, Withdraw(key=key("young")), 102.0))
    plan = planned(made.decide(102.0))
    assert len(plan.decode_rows) == 1 and len(grown(plan)) == 1
    assert made.report().counters.preemptions == 1


def test_when_the_writer_does_not_let_go_the_row_is_not_kept_waiting_for_ever() -> None:
    made, grant = with_young_reservation()
    made.decide(100.0)
    for second in range(1, 6):
        answer = made.receive(WRITER, renew(100.0 + second, ("young", grant.generation)), 100.0 + second)
        assert renewed(answer).over == (key("young"),)
        assert made.decide(100.0 + second).actions == []
    actions = made.decide(100.0 + WRITE_LEASE_S + 0.1).actions
    assert list(failures(actions)) == ["old"], "it can only be served elsewhere"


def test_a_preempted_reservation_that_was_handed_off_meanwhile_is_told_by_us_and_its_pages_are_free_at_once() -> None:
    made, grant = with_young_reservation()
    made.decide(100.0)
    actions = made.receive(WRITER, handoff(grant), 100.1)
    assert kinds(actions) == ["TokenBatch"] and failures(actions)["young"].kind == "preempted_error"
    assert len(planned(made.decide(100.1)).decode_rows) == 1


# --- who comes in ----------------------------------------------------------------------------------------------------------


def test_a_page_is_left_for_every_request_that_runs() -> None:
    made = scheduler(total_pages=7)
    for name in ("a", "b", "c"):
        ask(made, name, tokens=4)
        step(made, 100.0)
    assert (made.report().load.pages_free, made.report().load.waiting_requests) == (3, 1), "c needs 2, and 2 others run"
    made.receive(ROUTER, Cancel(key=key("b")), 100.0)
    made.decide(100.0)
    assert made.report().load.waiting_requests == 0


def test_a_request_that_is_alone_may_take_the_last_page() -> None:
    made = scheduler(total_pages=3)
    ask(made, "a", tokens=9, max_new_tokens=3)
    assert len(planned(made.decide(100.0)).starts[0].pages) == 3


def test_who_has_waited_long_is_passed_only_by_who_is_more_urgent() -> None:
    """Also while the head of the line is somebody else."""
    made = scheduler(total_pages=8)
    ask(made, "running", tokens=8)
    made.decide(100.0)
    ask(made, "large", tokens=24, max_new_tokens=4, age_s=5.0)
    ask(made, "small", tokens=1, max_new_tokens=2)
    made.receive(ROUTER, generate("urgent", 1, 2, terms=Terms(priority=-1)), 103.0)
    plan = planned(made.decide(103.0))
    assert [made._requests.in_row[start.row].key.request_id for start in plan.starts] == ["urgent"]


# --- pages that may never come home ----------------------------------------------------------------------------------------


def stuck(total_pages: int = 6) -> DecodeScheduler:
    """A cancelled reservation of 3 pages that its writer does not let go of."""
    made, grant = with_reservation("stuck", tokens=8, now=100.0, total_pages=total_pages)
    made.receive(ROUTER, Cancel(key=key("stuck")), 100.0)
    made.receive(WRITER, renew(105.0, ("stuck", grant.generation)), 105.0)
    return made


def test_pages_that_their_writer_does_not_let_go_of_are_in_quarantine() -> None:
    made = stuck()
    made.tick(105.0)
    assert made.report().load.pages_quarantined == 0
    made.tick(105.1)
    assert made.report().load.pages_quarantined == 3
    settle(made, made.receive(WRITER, Withdraw(key=key("stuck")), 106.0))
    assert is_home(made)


def test_a_request_that_cannot_fit_beside_stuck_pages_waits_a_while_and_is_then_refused() -> None:
    made = stuck()
    made.receive(WRITER, reserve("large", 16, sent_s=105.0), 105.0)
    made.receive(WRITER, reserve("small", 4, sent_s=105.0), 105.0)
    assert granted(made.decide(105.0).actions) == ["small"], "the pages may still come home"
    settle(made, made.receive(WRITER, Withdraw(key=key("small")), 105.05))
    for second in range(106, 126):
        made.receive(WRITER, renew(second, ("stuck", 0), ("large", 0)), float(second))
        assert declined(made.decide(float(second - 1)).actions) == {}, "a silent writer's pages come home within this time"
    actions = made.decide(125.1).actions
    assert declined(actions)["large"].retryable and "lacks memory" in declined(actions)["large"].message
    assert made.report().load.waiting_requests == 0


def test_a_request_waits_on_as_long_as_somebody_holds_pages_and_will_let_go() -> None:
    made = stuck()
    made.receive(WRITER, reserve("large", 16, sent_s=105.0), 105.0)
    made.receive(WRITER, reserve("small", 4, sent_s=105.0), 105.0)
    (small,) = grants(made.decide(105.0).actions)
    for second in range(106, 140):
        made.receive(WRITER, renew(second, ("stuck", 0), ("large", 0), ("small", small.generation)), float(second))
        assert declined(made.decide(float(second)).actions) == {}
    assert made.report().load.waiting_requests == 1


def test_a_request_that_waits_for_pages_which_their_writer_cannot_release_is_refused_when_routers_can_know() -> None:
    made, grant = with_reservation("stuck", tokens=8, now=100.0, total_pages=6)
    made.receive(WRITER, reserve("large", 16, sent_s=100.0), 100.0)
    assert declined(made.decide(100.0).actions) == {}, "they come home as long as nobody says otherwise"
    claims = (Claim(key("stuck"), grant.generation, stuck=True), Claim(key("large"), generation=Generation(0)))
    made.receive(WRITER, Renew(incarnation=WRITERS_LIFE, sent_s=100.5, claims=claims), 100.5)
    made.tick(100.5)
    assert made.report().load.pages_quarantined == 3, "the next heartbeat says so"
    assert declined(made.decide(100.5).actions) == {}
    assert "lacks memory" in declined(made.decide(102.0).actions)["large"].message, "its writer asks elsewhere"
    made.receive(WRITER, reserve("small", 4, sent_s=102.0), 102.0)
    assert granted(made.decide(102.0).actions) == ["small"]
    settle(made, made.receive(WRITER, Withdraw(key=key("small")), 102.5))
    settle(made, made.receive(WRITER, Withdraw(key=key("stuck")), 102.5))
    made.receive(WRITER, reserve("huge", 16, sent_s=102.5), 102.5)
    assert granted(made.decide(102.5).actions) == ["huge"], "the pages are home"


def test_a_request_whose_writer_is_stuck_ends_here_even_if_its_cancel_was_lost() -> None:
    made, grant = with_reservation("stuck", tokens=8, now=100.0, total_pages=6)
    claim = Claim(key("stuck"), grant.generation, stuck=True)
    for second in (101.0, 102.0):
        actions = made.receive(WRITER, Renew(incarnation=WRITERS_LIFE, sent_s=second, claims=(claim,)), second)
        assert failures(actions) == {}, "its writer has told the client"
    assert made.report().load.running_requests == 0
    made.tick(101.0 + WRITE_LEASE_S + 0.1)
    assert made.report().load.pages_quarantined == 3, "they do not come home before its word"
    settle(made, made.receive(WRITER, Withdraw(key=key("stuck")), 108.0))
    assert is_home(made)


def test_a_row_is_free_again_although_the_pages_of_its_request_are_stuck() -> None:
    made, grant = with_reservation("stuck", tokens=8, now=100.0, total_pages=6, max_rows=1)
    made.receive(ROUTER, Cancel(key=key("stuck")), 100.0)
    made.receive(WRITER, renew(100.5, ("stuck", grant.generation)), 100.5)
    made.receive(WRITER, reserve("next", 4, sent_s=100.5), 100.5)
    assert granted(made.decide(100.5).actions) == ["next"]
    settle(made, made.receive(WRITER, Withdraw(key=key("next")), 101.0))
    settle(made, made.receive(WRITER, Withdraw(key=key("stuck")), 101.0))
    assert is_home(made)


def test_a_running_request_that_needs_a_stuck_page_is_preempted_instead_of_waiting() -> None:
    made = stuck(total_pages=5)
    made.receive(ROUTER, generate("a", 4, 12), 105.1)
    for _ in range(5):
        assert failures(step(made, 105.1)) == {}
    assert list(failures(made.decide(105.1).actions)) == ["a"]
    assert made.decide(105.1).plan is None
