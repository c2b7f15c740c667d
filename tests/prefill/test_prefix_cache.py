"""The prefix cache of a prefill instance: what is there is neither computed nor waited for, and the same is computed once."""

from msgspec.structs import replace

from common.executor import StepPlan
from common.ids import ROUTER, Ticket
from common.messages import Cancel, Generate
from common.messages.transfers import Push, PushDone
from prefill.scheduler import PrefillScheduler
from tests.builders import LAYOUT, key, result
from tests.prefill.rig import DECODE, begun, finish_pushes, generate, grant_for, handoffs, reserves, scheduler, spans
from tests.schedulers import deltas, is_home

PAGE = LAYOUT.page_size


def served(made: PrefillScheduler, request: Generate, token: int = 5) -> StepPlan:
    """The request is computed in one chunk and handed off. Returns the plan."""
    _, decision = begun(request, made, is_granted=True)
    plan = decision.plan
    assert plan is not None
    finish_pushes(made, made.step_done(result(plan, [token]), 0.1))
    return plan


def test_what_is_cached_is_not_computed_again_but_the_last_token_always_is() -> None:
    made = scheduler(chunk_tokens=64)
    pages = served(made, generate("a", 3 * PAGE, salt="")).starts[0].pages
    for name, tokens, there in (
        ("same", 3 * PAGE, 2 * PAGE),
        ("longer", 5 * PAGE + 1, 3 * PAGE),
        ("shorter", 2 * PAGE + 1, 2 * PAGE),
    ):
        _, decision = begun(generate(name, tokens, salt=""), made)
        assert decision.plan is not None
        (start,) = decision.plan.starts
        assert (start.length, start.last_token, spans(decision.plan)) == (there, None, [(there, tokens, True)])
        shared = there // PAGE
        assert start.pages[:shared].tolist() == pages[:shared].tolist(), "the same pages"
        pages = start.pages  # of a page that was computed again the latter copy is kept
        assert len(start.pages) == LAYOUT.pages_for(tokens)
        (reserve,) = reserves(decision.actions)
        (delta,) = deltas(made.step_done(result(decision.plan, [5]), 0.2))
        assert reserve.cached_tokens == delta.cached_tokens == there
        made.receive(ROUTER, Cancel(key=key(name)), 0.3)
    assert is_home(made)
    counters = made.report().counters
    computed = (counters.prompt_tokens_asked, counters.prompt_tokens_hit, counters.prompt_tokens_computed)
    assert computed == (13 * PAGE + 2, 7 * PAGE, 6 * PAGE + 2)


def test_cached_pages_are_pushed_as_soon_as_there_is_a_grant() -> None:
    made = scheduler(chunk_tokens=64)
    cached = served(made, generate("a", 3 * PAGE, salt="")).starts[0].pages
    _, decision = begun(generate("b", 5 * PAGE, salt=""), made)
    grant = grant_for(decision.actions)
    (push,) = [action for action in made.receive(DECODE, grant, 0.2) if isinstance(action, Push)]
    assert push.source_pages.tolist() == cached.tolist(), "before anything was computed"


def test_what_the_decode_instance_has_is_never_pushed() -> None:
    for have in range(6):
        made = scheduler(chunk_tokens=64)
        _, decision = begun(generate("a", 5 * PAGE), made)
        grant = replace(grant_for(decision.actions), have_tokens=have * PAGE)
        made.receive(DECODE, grant, 0.0)
        actions = made.step_done(result(decision.plan, [5]), 0.1)
        pushed = [action for action in actions if isinstance(action, Push)]
        pages = grant.pages[4 * have :]
        assert b"".join(push.target_pages.tobytes() for push in pushed) == pages
        actions += made.handle(PushDone(Ticket(1), len(pages) // 4 * LAYOUT.page_bytes, 0.1), 0.2) if pushed else []
        (handoff,) = handoffs(actions)
        assert (handoff.pushed_pages, made.report().counters.pages_spared) == (5 - have, have)
        assert is_home(made)


def test_the_same_new_prefix_is_computed_once_and_others_pass_those_who_wait_for_it() -> None:
    made = scheduler(chunk_tokens=2 * PAGE)
    for name, tokens, salt in (("first", 4 * PAGE, "x"), ("second", 4 * PAGE + 2, "x"), ("other", 2 * PAGE, "y")):
        made.receive(ROUTER, generate(name, tokens, salt=salt), 0.0)
    begin, end = made.decide(0.0).plan, made.decide(0.0).plan
    assert begin is not None and end is not None
    assert (spans(begin), spans(end)) == ([(0, 2 * PAGE, False)], [(2 * PAGE, 4 * PAGE, True)])
    third = made.decide(0.0).plan
    assert third is not None and spans(third) == [(0, 2 * PAGE, True)], "the other passes"
    assert made.decide(0.0).plan is None
    made.step_done(result(begin), 0.1)
    assert made.decide(0.1).plan is None, "half of what they share is there"
    made.step_done(result(end, [5]), 0.2)
    assert spans(made.decide(0.2).plan) == [(4 * PAGE, 4 * PAGE + 2, True)]


def test_nobody_waits_for_a_prefix_whose_request_has_ended() -> None:
    made = scheduler(chunk_tokens=2 * PAGE)
    for name in ("first", "second"):
        made.receive(ROUTER, generate(name, 5 * PAGE, salt=""), 0.0)
    plan = made.decide(0.0).plan
    made.receive(ROUTER, Cancel(key=key("first")), 0.1)
    made.step_done(result(plan), 0.2)
    assert spans(made.decide(0.3).plan) == [(2 * PAGE, 4 * PAGE, False)], "what was computed before is there"


def test_who_needs_every_position_hits_nothing_and_waits_for_nobody() -> None:
    made = scheduler(chunk_tokens=64)
    served(made, generate("a", 3 * PAGE, salt=""))
    logprobs = generate("b", 3 * PAGE, salt="")
    logprobs = replace(logprobs, sampling=replace(logprobs.sampling, prompt_logprobs=0))
    for request in (logprobs, generate("c", 3 * PAGE, max_new_tokens=1, decodes=(), pooling="mean", salt="")):
        made.receive(ROUTER, request, 0.2)
    assert spans(made.decide(0.2).plan) == [(0, 3 * PAGE, True)] * 2
