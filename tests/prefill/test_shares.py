"""Owners share a prefill instance: its forwards, its memory and its line."""

from common.ids import ROUTER
from common.messages import Terms
from prefill.scheduler import PrefillScheduler
from tests.builders import key, result
from tests.prefill.rig import DECODE, finish_pushes, generate, grant_for, handoffs, reserves, scheduler, spans
from tests.schedulers import deltas, failures, kinds, planned


def ask(made: PrefillScheduler, owner: str, name: str, tokens: int, now: float = 0.0, priority: int = 0) -> list[object]:
    terms = Terms(owner=owner, priority=priority)
    return list(made.receive(ROUTER, generate(name, tokens, terms=terms), now))


def step(made: PrefillScheduler, now: float = 0.0) -> tuple[list[tuple[int, int, bool]], list[object]]:
    """What a forward computes, and what comes of it."""
    decision = made.decide(now)
    plan = planned(decision)
    return spans(plan), [*decision.actions, *made.step_done(result(plan, [5] * len(plan.sampled_rows)), now)]


def full_of_alice(pages: int = 8) -> PrefillScheduler:
    """Her prompts are computed, nobody grants a reservation, and no page is free."""
    made = scheduler(total_pages=pages, chunk_tokens=64)
    for number in range(pages):
        ask(made, "alice", f"a{number}", 8, number / 1000)
    step(made)
    assert made.decide(0.0).plan is None
    assert made.report().load.pages_free == 0 and made.report().load.waiting_requests == pages // 2
    return made


def test_a_short_prompt_joins_the_next_forward_beside_a_long_one_of_another_owner() -> None:
    made = scheduler(chunk_tokens=8)
    ask(made, "alice", "long", 100)
    assert step(made)[0] == [(0, 8, False)]
    ask(made, "bob", "b", 3)
    assert step(made)[0] == [(8, 13, False), (0, 3, True)]
    ask(made, "bob", "b2", 20)
    assert step(made)[0] == [(13, 17, False), (0, 4, False)]
    assert step(made)[0] == [(17, 21, False), (4, 8, False)]


def test_one_owner_has_one_line_and_the_whole_forward() -> None:
    for owner in ("", "alice"):
        made = scheduler(chunk_tokens=8)
        ask(made, owner, "long", 20)
        ask(made, owner, "short", 3)
        assert [step(made)[0] for _ in range(3)] == [[(0, 8, False)], [(8, 16, False)], [(16, 20, True), (0, 3, True)]]


def test_owners_take_turns_in_the_line() -> None:
    made = scheduler(chunk_tokens=4)
    for number in range(8):
        ask(made, "alice", f"a{number}", 4)
    ask(made, "bob", "b", 4)
    served = [str(reserve.key.request_id) for _ in range(3) for reserve in reserves(step(made)[1])]  # type: ignore[arg-type]
    assert served.index("b") < 2


def test_pages_that_wait_for_a_grant_go_to_an_owner_that_holds_less() -> None:
    made = full_of_alice()
    ask(made, "bob", "b", 8)
    decision = made.decide(0.0)
    assert list(failures(decision.actions)) == ["a3"] and failures(decision.actions)["a3"].kind == "preempted_error"
    assert kinds(decision.actions) == ["TokenBatch", "Withdraw", "Reserve"]
    assert deltas(decision.actions)[0].first == 1, "its first token has gone out"
    assert spans(decision.plan) == [(0, 8, True)]
    assert made.report().counters.preemptions == 1


def test_who_would_hold_more_than_the_other_takes_nothing() -> None:
    made = full_of_alice()
    for name, tokens, priority in (("half", 20, 0), ("less urgent", 4, 1)):
        ask(made, "bob", name, tokens, priority=priority)
        decision = made.decide(0.0)
        assert decision.plan is None and not failures(decision.actions)


def test_a_prompt_that_is_being_pushed_is_not_given_up() -> None:
    made = scheduler(total_pages=4, chunk_tokens=64)
    for name in ("a0", "a1"):
        ask(made, "alice", name, 8)
    _, actions = step(made)
    granted = [action for action in actions if kinds([action]) == ["Reserve"]]  # type: ignore[list-item]
    pushes = made.receive(DECODE, grant_for([granted[1]]), 0.0)  # type: ignore[list-item]
    ask(made, "bob", "b", 4)
    assert list(failures(made.decide(0.0).actions)) == ["a0"]
    assert [each.key for each in handoffs(finish_pushes(made, pushes))] == [key("a1")]


def test_one_owner_leaves_places_in_the_line_for_others() -> None:
    made = scheduler(max_waiting=10)
    refused = [name for name in range(10) if failures(ask(made, "alice", f"a{name}", 8))]  # type: ignore[arg-type]
    assert refused == [8, 9]
    assert not ask(made, "bob", "b", 8)
    made = scheduler(max_waiting=10)
    assert not any(ask(made, "", f"r{name}", 8) for name in range(10)), "without keys all places are everybody's"
