"""The prefix cache of a decode instance: what is there is neither sent nor computed, and answers stay for the next turn."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from common.executor import RowStart
from common.ids import ROUTER, pack_ids, unpack_ids
from common.messages import Cancel, Failed, FlushCache, Generate, Grant, Repeat, Reserve, Terms, TokenDelta, Withdraw
from decode.scheduler import DecodeScheduler
from tests.builders import EOS, LAYOUT, key, result
from tests.decode.rig import WRITER, handoff, reserve, scheduler, step
from tests.schedulers import deltas, failures, generate, grants, is_home, planned, prompt_of, settle

PAGE = LAYOUT.page_size


def known(name: str, ids: list[int] | int, max_new_tokens: int = 4) -> Reserve:
    """A reservation that may hit what others have left. ids: of its prompt; or their number, of the prompt that all have."""
    asked = reserve(name, 1, max_new_tokens, salt="")
    return replace(asked, prompt=prompt_of(ids) if isinstance(ids, int) else pack_ids(ids))


def granted_to(made: DecodeScheduler, asked: Reserve, now: float = 0.0) -> Grant:
    """Those that decode already take a step meanwhile."""
    assert made.receive(WRITER, asked, now) == []
    decision = made.decide(now)
    (grant,) = grants(decision.actions)
    if decision.plan is not None:
        made.step_done(result(decision.plan, [60] * len(decision.plan.sampled_rows)), now)
    return grant


def answered(made: DecodeScheduler, asked: Reserve, tokens: list[int]) -> list[int]:
    """Hand the request off and let it decode to its end. tokens: of its answer. Returns all that it said here."""
    made.receive(WRITER, handoff(granted_to(made, asked), tokens[0]), 0.0)
    said = [delta for token in tokens[1:] for delta in deltas(step(made, 0.1, token))]
    assert said[-1].ending is not None
    return [token for delta in said for token in delta.token_ids]


def starts(made: DecodeScheduler) -> tuple[RowStart, ...]:
    return planned(made.decide(0.5)).starts


@pytest.mark.parametrize("tokens", [3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1])
def test_whole_pages_of_a_prompt_that_landed_are_granted_as_there_and_not_written_again(tokens: int) -> None:
    made = scheduler()
    first = granted_to(made, known("a", tokens))
    assert first.have_tokens == 0
    made.receive(WRITER, handoff(first), 0.0)
    second = granted_to(made, known("b", tokens))
    whole = tokens // PAGE
    assert second.have_tokens == whole * PAGE
    shared, own = unpack_ids(second.pages)[:whole], unpack_ids(second.pages)[whole:]
    assert shared.tolist() == unpack_ids(first.pages)[:whole].tolist()
    assert not set(own.tolist()) & set(unpack_ids(first.pages).tolist())
    complete = handoff(second, first_token=50)
    assert complete.pushed_pages == LAYOUT.pages_for(tokens) - whole, "a prompt of whole pages transfers nothing"
    assert made.receive(WRITER, complete, 0.1) == []
    start = starts(made)[-1]
    assert (start.length, start.last_token) == (tokens, 50)
    assert start.pages[: len(second.pages) // 4].tolist() == unpack_ids(second.pages).tolist()
    assert made.pool.leased_pages == whole + 2 * (len(start.pages) - whole), "what two share counts once"


@pytest.mark.parametrize("stays", [False, True])
def test_what_two_were_sent_at_once_is_kept_once(stays: bool) -> None:
    """So one that is alone is never preempted for a page that holds what it has already. stays: the first still runs when the
    second lands."""
    made = scheduler(total_pages=14)
    grants_of = [granted_to(made, known(name, 5 * PAGE, limit)) for name, limit in (("a", 2), ("b", 8 * PAGE))]
    pages = [set(unpack_ids(grant.pages).tolist()) for grant in grants_of]
    assert not pages[0] & pages[1]
    made.receive(WRITER, handoff(grants_of[0]), 0.0)
    if stays:
        made.receive(WRITER, handoff(grants_of[1]), 0.1)
        assert made.pool.leased_pages == 5 + 2, "and a page for the answer of each"
    made.receive(ROUTER, Cancel(key=key("a")), 0.2)
    if not stays:
        made.receive(WRITER, handoff(grants_of[1]), 0.3)
    (start,) = [each for each in starts(made) if each.last_token == 50]
    assert set(start.pages[:5].tolist()) == pages[0 if stays else 1]
    assert (made.pool.leased_pages, made.pool.cached_pages) == (6, 0)


def test_a_handoff_that_claims_to_have_written_what_was_there_is_refused() -> None:
    made = scheduler()
    made.receive(WRITER, handoff(granted_to(made, known("a", 3 * PAGE))), 0.0)
    grant = granted_to(made, known("b", 3 * PAGE))
    wrong = replace(handoff(grant), pushed_pages=3, pushed_bytes=3 * LAYOUT.page_bytes)
    actions = made.receive(WRITER, wrong, 0.1)
    assert "3 pages and" in failures(actions)["b"].message
    settle(made, actions)


@pytest.mark.parametrize("answer", [2, PAGE, 2 * PAGE + 1])
@pytest.mark.parametrize("stops", [False, True])
def test_the_next_turn_of_a_conversation_finds_the_prompt_and_the_answer(answer: int, stops: bool) -> None:
    """The last token of an answer is never fed back, so it has no KV."""
    prompt = [*range(100, 106)]
    tokens = [*range(200, 200 + answer - 1), EOS if stops else 300]
    made = scheduler()
    assert answered(made, known("a", prompt, 60 if stops else answer), tokens) == tokens[1:]
    while made._requests.in_row:  # a step that is wasted on a row that has ended
        step(made, 0.2)
    assert made.pool.leased_pages == 0 and is_home(made)
    grant = granted_to(made, known("b", [*prompt, *tokens, *range(400, 410)]))
    assert grant.have_tokens == (len(prompt) + answer - 1) // PAGE * PAGE


def test_a_preempted_request_finds_its_kv_when_it_is_resumed_here() -> None:
    made = scheduler(total_pages=7)
    for age_s, asked in ((50.0, known("old", 4, 24)), (0.0, known("young", [*range(300, 304)], 24))):
        made.receive(WRITER, handoff(granted_to(made, replace(asked, terms=Terms(age_s=age_s)))), 0.0)
    said: list[int] = [50]
    while "young" not in (failed := failures(actions := step(made, 0.1))):
        said += [token for delta in deltas(actions) if delta.key == key("young") for token in delta.token_ids]
    assert failed["young"].kind == "preempted_error"
    made.receive(ROUTER, Cancel(key=key("old")), 0.2)
    while made._requests.in_row:
        step(made, 0.2)
    resumed = replace(known("young", [*range(300, 304), *said], 12), key=key("young", 1), first=len(said))
    assert granted_to(made, resumed, 0.3).have_tokens == (4 + len(said) - 1) // PAGE * PAGE > PAGE


def withdrawn(made: DecodeScheduler, grant: Grant) -> None:
    settle(made, made.receive(WRITER, Withdraw(key=grant.key), 0.1))


def corrupt(made: DecodeScheduler, grant: Grant) -> None:
    settle(made, made.receive(WRITER, replace(handoff(grant), pushed_bytes=1), 0.1))


@pytest.mark.parametrize("ends", [withdrawn, corrupt])
def test_kv_that_did_not_land_whole_is_not_cached(ends: Callable[[DecodeScheduler, Grant], None]) -> None:
    made = scheduler()
    ends(made, granted_to(made, known("a", 3 * PAGE)))
    assert made.pool.free_pages == made.pool.total_pages
    assert granted_to(made, known("b", 3 * PAGE)).have_tokens == 0


def test_kv_that_lands_for_a_request_that_has_ended_is_cached() -> None:
    made = scheduler()
    grant = granted_to(made, known("a", 3 * PAGE))
    made.receive(ROUTER, Cancel(key=grant.key), 0.1)
    made.receive(WRITER, handoff(grant), 0.2)
    assert is_home(made) and granted_to(made, known("b", 3 * PAGE)).have_tokens == 3 * PAGE


def alone(name: str, tokens: int, **asks: int) -> Generate:
    asked = generate(name, tokens, salt="")
    return replace(asked, sampling=replace(asked.sampling, **asks))


def test_a_prompt_that_is_computed_here_begins_behind_what_is_there_and_says_so_with_its_first_token() -> None:
    made = scheduler(chunk_tokens=64)
    made.receive(WRITER, handoff(granted_to(made, known("a", 3 * PAGE, 2))), 0.0)
    step(made, 0.1)
    for name, tokens, there in (
        ("same", 3 * PAGE, 2 * PAGE),
        ("longer", 5 * PAGE, 3 * PAGE),
        ("longer again", 5 * PAGE, 4 * PAGE),
    ):
        made.receive(ROUTER, alone(name, tokens), 0.2)
        plan = planned(made.decide(0.2))
        assert [(start.length, start.last_token) for start in plan.starts] == [(there, None)]
        assert [(chunk.start, len(chunk.token_ids), chunk.last) for chunk in plan.chunks] == [(there, tokens - there, True)]
        first = TokenDelta(key(name), 0, (60,), cached_tokens=there)
        assert deltas(made.step_done(result(plan, [60]), 0.3)) == [first]
        assert deltas(made.receive(ROUTER, Repeat(tokens=((key(name), 0),)), 0.3)) == [first]
        made.receive(ROUTER, Cancel(key=key(name)), 0.4)
    assert is_home(made)
    counters = made.report().counters
    computed = counters.prompt_tokens_asked, counters.prompt_tokens_hit, counters.prompt_tokens_computed
    assert computed == (13 * PAGE, 9 * PAGE, 4 * PAGE)


def test_the_same_new_prompt_is_computed_once_and_others_pass_who_waits_for_it() -> None:
    made = scheduler(chunk_tokens=2 * PAGE)
    other = generate("other", PAGE)
    for asked in (alone("first", 4 * PAGE), alone("second", 4 * PAGE), other):
        made.receive(ROUTER, asked, 0.0)
    computed: list[tuple[int, int]] = []
    for _ in range(4):
        plan = planned(made.decide(0.0))
        computed += [(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in plan.chunks]
        made.step_done(result(plan, [60] * len(plan.sampled_rows)), 0.1)
    first = [(0, 2 * PAGE), (2 * PAGE, 4 * PAGE)]
    assert computed == [*first, (0, PAGE), (3 * PAGE, 4 * PAGE)], "the second one computes its last page only"


def test_the_prefill_instances_cached_tokens_are_told_again_with_token_0() -> None:
    made = scheduler()
    grant = granted_to(made, replace(known("a", 3 * PAGE), cached_tokens=2 * PAGE))
    made.receive(WRITER, handoff(grant, 50), 0.0)
    told = deltas(made.receive(ROUTER, Repeat(tokens=((key("a"), 0),)), 0.1))
    assert told == [TokenDelta(key("a"), 0, (50,), cached_tokens=2 * PAGE)]


def test_another_salt_and_a_flush_leave_nothing_to_hit() -> None:
    made = scheduler()
    made.receive(WRITER, handoff(granted_to(made, known("a", 3 * PAGE))), 0.0)
    assert granted_to(made, replace(known("b", 3 * PAGE), salt="other")).have_tokens == 0
    assert granted_to(made, known("c", 3 * PAGE)).have_tokens == 3 * PAGE
    assert made.receive(ROUTER, FlushCache(), 0.1) == []
    assert granted_to(made, known("d", 3 * PAGE)).have_tokens == 0


def test_pages_that_others_hold_take_no_room_and_bring_none_when_their_request_is_preempted() -> None:
    """The first takes 9 of 12 pages: eight of its prompt, and one for its answer. Another with the same prompt needs one more.
    Each grows by two pages, for which there is room only once."""
    made = scheduler(total_pages=12)
    made.receive(WRITER, handoff(granted_to(made, replace(known("old", 8 * PAGE, 13), terms=Terms(age_s=9.0)))), 0.0)
    assert made.pool.available_pages == 3
    made.receive(WRITER, handoff(granted_to(made, known("young", 8 * PAGE, 13))), 0.0)
    assert made.pool.available_pages == 2
    endings: list[tuple[str, str]] = []
    while made._requests.in_row:
        for delta in deltas(step(made, 0.1)):
            if delta.ending is not None:
                kind = delta.ending.kind if isinstance(delta.ending, Failed) else delta.ending.reason
                endings.append((delta.key.request_id, kind))
    assert endings == [("young", "preempted_error"), ("old", "length")] and is_home(made)
