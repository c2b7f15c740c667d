"""The table of requests: each is accepted once, served until its deadline, ended once, and its key is remembered a while.

Also the chunks of prompts under a token budget, what is emitted into the text pipeline, and the times of a drain: what runs may
finish, then is handed off, and at last nothing more is waited for.
"""

import math
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.ids import DETOKENIZER, ROUTER, InstanceId, Life, shard_of, text_name
from common.instance.ports import Action, RouterJoined, RouterLost, Send
from common.instance.request import LEAST_CHUNK_TOKENS, ChunkLimit, PromptProgress, Request, RequestPhase, next_chunks
from common.instance.requests import LAST_S, MEMORY_S, RequestTable
from common.instance.token_memory import emit_tokens
from common.instance.waiting_line import Rank
from common.messages import Drain, Ending, Finished, Probe, Probed, Repeat, Standing, Terms, TokenBatch, TokenDelta
from common.step_cost import StepCost
from tests.builders import engine, instance, key, limits, sampling
from tests.decode.rig import WRITERS_LIFE, reserve
from tests.prefill.rig import generate
from tests.schedulers import declined, deltas, failures

ME = instance("d", "decode")
WRITER = Life(InstanceId("p"), WRITERS_LIFE)
LENGTH = Finished("length")


class Table(RequestTable[Request]):
    """A table whose requests end at once, and which notes them."""

    def __init__(self) -> None:
        super().__init__(Request, ME, engine(), limits(request_timeout_s=600.0), self.end_at_once)
        self.noted: list[Request] = []
        self.handle(RouterJoined(ROUTER, 1), 0.0)

    def end_at_once(self, request: Request, ending: Ending | None, now: float) -> list[Action]:
        self.noted.append(request)
        self.close(request, now)
        return []


def is_accepted(made: Table, now: float, name: str = "r", timeout_s: float | None = None, first: int = 0) -> bool:
    """Whether a request that is well formed is accepted when it comes now."""
    joined, actions = made.accept(generate(name, 10, first=first, terms=Terms(timeout_s=timeout_s)), None, now)
    assert actions == []
    return joined is not None


def opened(name: str = "r") -> tuple[Table, Request]:
    made = Table()
    assert is_accepted(made, 0.0, name)
    return made, made[key(name)]


def finish(made: Table, request: Request, now: float) -> None:
    made.close(request, 1.0)
    made.release(request, now)


def late(made: Table, now: float) -> list[Request]:
    made.noted = []
    made.tick(now)
    return made.noted


def test_a_request_is_open_until_it_is_removed() -> None:
    made, request = opened()
    assert made[key()] is request and made.get(key()) is request and list(made) == [request] and len(made) == 1
    finish(made, request, 1.0)
    assert made.get(key()) is None and list(made) == [] and len(made) == 0 and made.counters.requests_accepted == 1


def test_a_request_ends_once_and_leaves_the_line() -> None:
    made, request = opened()
    assert list(made.waiting) == [request]
    assert [made.close(request, 1.0), made.close(request, 1.0), made.counters.requests_ended] == [RequestPhase.WAITING, None, 1]
    assert len(made.waiting) == 0 and list(made) == [request]


def test_a_request_that_has_not_ended_or_is_in_transfer_is_not_removed() -> None:
    made, request = opened()
    made.release(request, 0.0)
    assert list(made) == [request]
    made.close(request, 0.0)
    request.in_transfer = True
    made.release(request, 0.0)
    assert list(made) == [request]


def test_a_key_is_served_once_while_it_is_open_and_for_a_while_after() -> None:
    made, request = opened()
    assert not is_accepted(made, 0.0) and made.counters.messages_stale == 1
    finish(made, request, 10.0)
    assert not is_accepted(made, 10.0) and made.counters.messages_stale == 2
    late(made, 10.0 + MEMORY_S - 1e-3)
    assert not is_accepted(made, 10.0)
    late(made, 10.0 + MEMORY_S)
    assert is_accepted(made, 10.0) and made.counters.messages_stale == 3


def test_a_router_that_is_gone_is_worth_a_warning_only_when_requests_end_with_it(caplog: pytest.LogCaptureFixture) -> None:
    made, request = opened()
    router = request.key.router
    made.handle(RouterJoined(InstanceId("router-other"), 1), 0.0)
    made.handle(RouterLost(InstanceId("router-other")), 0.0)
    assert made.noted == [] and not caplog.records
    made.handle(RouterLost(router), 0.0)
    assert made.noted == [request]
    assert [record.getMessage() for record in caplog.records] == [f"{router} is gone: its open requests end here, 1 of them"]


def test_another_attempt_is_another_key() -> None:
    made, _ = opened()
    again = msgspec.structs.replace(generate("r", 10), key=key(attempt=1))
    assert made.accept(again, None, 0.0)[0] is made[again.key]
    assert (made.counters.requests_accepted, made.counters.messages_stale) == (2, 0)


def test_a_key_that_is_cancelled_before_it_comes_is_not_accepted_for_a_while() -> None:
    made = Table()
    assert made.cancel(key(), 0.0) is None
    assert not is_accepted(made, 0.0) and len(made) == 0
    late(made, MEMORY_S)
    assert is_accepted(made, MEMORY_S)


@pytest.mark.parametrize(
    ("timeout_s", "limit_s"),
    [(None, 600.0), (5.0, 5.0), (600.0, 600.0), (1e9, 600.0), (math.inf, 600.0), (0.0, 0.0), (-1.0, -1.0)],
)
def test_a_request_lives_until_its_own_time_is_over_or_the_instances_limit(timeout_s: float | None, limit_s: float) -> None:
    made = Table()
    assert is_accepted(made, 100.0, timeout_s=timeout_s)
    request = made[key()]
    assert request.deadline_s == 100.0 + limit_s
    assert made.next_deadline() == 100.0 + limit_s
    assert late(made, 100.0 + limit_s - 1e-3) == []
    assert late(made, 100.0 + limit_s) == [request]
    assert late(made, 1000.0) == [], "once"


def test_a_deadline_is_over_when_the_request_is() -> None:
    made, ended = opened("ended")
    made.close(ended, 1.0)
    is_accepted(made, 0.0, "gone")
    finish(made, made[key("gone")], 1.0)
    assert late(made, 1e6) == []


def test_a_remembered_key_wakes_nobody() -> None:
    made, request = opened()
    finish(made, request, 0.0)
    made.cancel(key("other"), 0.0)
    assert made.next_deadline() is None


def test_a_probe_is_answered_with_the_next_token_or_none_for_keys_that_are_not_known() -> None:
    made, _ = opened("over")
    finish(made, made[key("over")], 0.0)
    is_accepted(made, 0.0, "a", first=7)
    answers = made.receive(ROUTER, Probe(keys=(key("over"), key("a"), key("unknown")), round=3), 0.0)
    standings = (Standing(key("over"), None), Standing(key("a"), 7), Standing(key("unknown"), None))
    assert answers == [Send(DETOKENIZER, Probed(id=ME.id, incarnation=ME.incarnation, standings=standings, round=3))]


def test_answers_to_a_probe_go_the_way_of_the_tokens_to_each_detokenizer() -> None:
    made = Table()
    made.handle(RouterJoined(ROUTER, 2), 0.0)
    keys = tuple(key(f"r{number}") for number in range(20))
    stranger = replace(key("r"), router=InstanceId("stranger"))
    sends = made.receive(ROUTER, Probe(keys=(*keys, stranger), round=1), 0.0)
    probed = [(send.to, send.message) for send in sends if isinstance(send, Send) and isinstance(send.message, Probed)]
    told = {to: [standing.key for standing in message.standings] for to, message in probed}
    assert told == {text_name(ROUTER, shard): [key for key in keys if shard_of(key, 2) == shard] for shard in (0, 1)}


def repeated(made: Table, first: int, *names: str) -> list[TokenDelta]:
    return deltas(made.receive(ROUTER, Repeat(tokens=tuple((key(name), first) for name in names)), 0.0))


def test_what_was_emitted_is_told_again_until_the_request_is_forgotten() -> None:
    made, request = opened()
    assert repeated(made, 0, "r", "unknown") == []
    request.add_token(40)
    request.add_token(41)
    assert repeated(made, 1, "r") == [TokenDelta(key(), 1, (41,))]
    made.tell(request, LENGTH)
    finish(made, request, 1.0)
    for now in (1.0, 1.0 + MEMORY_S - 0.1):
        made.tick(now)
        assert repeated(made, 0, "unknown", "r") == [TokenDelta(key(), 0, (40, 41), LENGTH)]
    made.tick(1.0 + MEMORY_S)
    assert repeated(made, 0, "r") == []


def test_a_refusal_is_told_again_by_the_one_who_told_it() -> None:
    made = Table()
    joined, actions = made.accept(generate("r", 10, max_new_tokens=10_000), None, 0.0)
    ((name, refused),) = failures(actions).items()
    assert (joined, name) == (None, "r") and repeated(made, 0, "r") == [TokenDelta(key(), 0, (), refused)]
    joined, actions = made.accept(reserve("other", 10, max_new_tokens=10_000), WRITER, 0.0)
    assert joined is None and list(declined(actions)) == ["other"]
    assert repeated(made, 0, "other") == [], "its writer tells the client"


def test_terms_rank_by_priority_and_then_by_when_the_clients_request_arrived() -> None:
    made = Table()
    for name, terms in (("a", Terms(priority=3, age_s=2.5)), ("b", Terms(age_s=9.0)), ("c", Terms(age_s=8.0))):
        made.accept(generate(name, 10, terms=terms), None, 100.0)
    assert made[key("a")].rank == Rank(3, 97.5)
    assert [request.key.request_id for request in made.waiting] == ["b", "c", "a"]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    budget=st.integers(1, 50),
    works=st.lists(st.integers(1, 9), min_size=6, max_size=6),
)
def test_every_token_is_planned_once_in_order_within_the_budget(lengths: list[int], budget: int, works: list[int]) -> None:
    """A token may count as several. One of them is planned, however many it counts as."""
    prompts = [
        PromptProgress(row, np.arange(length, dtype=np.int32), token_work=works[row]) for row, length in enumerate(lengths)
    ]
    seen: dict[int, list[int]] = {row: [] for row in range(len(lengths))}
    while chunks := next_chunks(prompts, budget):
        counts = [len(chunk.token_ids) * works[chunk.row] for chunk in chunks]
        assert sum(counts[:-1]) <= budget and (sum(counts) <= budget or len(chunks[-1].token_ids) == 1)
        for chunk in chunks:
            assert chunk.start == len(seen[chunk.row])
            seen[chunk.row] += chunk.token_ids.tolist()
            assert chunk.last == (len(seen[chunk.row]) == lengths[chunk.row])
    assert all(seen[row] == list(range(length)) for row, length in enumerate(lengths))


@pytest.mark.parametrize(("vocab_size", "work"), [(500, 1), (32_000, 1), (151_936, 5), (262_144, 9)])
def test_a_position_whose_log_probabilities_are_told_counts_by_its_vocabulary(vocab_size: int, work: int) -> None:
    for asked, expected in ((replace(sampling(), prompt_logprobs=0), work), (sampling(), 1)):
        made = Table()
        request, _ = made.accept(replace(generate("r", 10), sampling=asked), None, 0.0)
        assert request is not None
        request.row = 3
        assert request.begin_prompt(0, vocab_size).token_work == expected


def test_the_tokens_of_one_step_are_one_message_for_each_detokenizer() -> None:
    deltas = [TokenDelta(key(name), 0, (5,)) for name in "abc"]
    other = text_name(ROUTER, 1)
    assert emit_tokens([], []) == []
    assert emit_tokens(deltas, [DETOKENIZER] * 3) == [Send(DETOKENIZER, TokenBatch(deltas=tuple(deltas)))]
    assert emit_tokens(deltas, [other, DETOKENIZER, other]) == [
        Send(other, TokenBatch(deltas=(deltas[0], deltas[2]))),
        Send(DETOKENIZER, TokenBatch(deltas=(deltas[1],))),
    ]


def left(made: Table, now: float) -> tuple[list[Request], bool]:
    """The requests that end now, and whether the instance has left."""
    ended = late(made, now)
    return ended, made.report().drained


def test_what_runs_may_finish_is_then_ended_once_and_is_waited_for_a_while_more() -> None:
    made, request = opened()
    made.waiting.leave(request.key)
    assert left(made, 99.0) == ([], False) and made.next_deadline() == 600.0
    made.receive(ROUTER, Drain(), 100.0)
    made.receive(ROUTER, Drain(), 120.0)  # gives no more time
    assert made.noted == [] and made.next_deadline() == 130.0 and left(made, 129.9) == ([], False)
    assert left(made, 130.0) == ([request], False)
    assert made.next_deadline() == 130.0 + LAST_S
    assert left(made, 130.0 + LAST_S - 0.1) == ([], False)
    made.receive(ROUTER, Drain(), 131.0)
    assert left(made, 130.0 + LAST_S)[1] and made.next_deadline() is None
    made, _ = opened()
    made.receive(ROUTER, Drain(), 100.0)
    assert [left(made, now)[1] for now in (500.0, 500.0 + LAST_S - 0.1, 500.0 + LAST_S)] == [False, False, True], "it was held up"


def test_an_instance_that_leaves_refuses_what_waits_and_what_comes_and_has_left_when_nothing_is_open() -> None:
    made, request = opened()
    made.receive(ROUTER, Drain(), 100.0)
    assert made.noted == [request] and not made.report().drained
    joined, actions = made.accept(generate("late", 10), None, 100.0)
    refused = failures(actions)["late"]
    assert joined is None and (refused.status, refused.retryable) == (503, True) and "d is leaving" in refused.message
    made.release(request, 100.0)
    assert made.report().drained and made.report().draining


@pytest.mark.parametrize(
    ("limit_s", "cost", "decode_rows", "tokens"),
    [
        (math.inf, StepCost(), 0, sys.maxsize),
        (0.05, StepCost(0.01, 0.0, 0.001), 4, 8000),
        (0.05, StepCost(0.01, 0.00001, 0.001), 0, 4000),
        (0.05, StepCost(0.01, 0.00001, 0.001), 20, 2000),
        (0.05, StepCost(0.01, 0.00001, 0.0005, 0.00001), 20, 2000),
        (0.05, StepCost(0.01, 0.00001, 0.001), 200, LEAST_CHUNK_TOKENS),
        (0.05, StepCost(0.01, 0.001, 0.001), 0, LEAST_CHUNK_TOKENS),
        (0.05, StepCost(0.01, 5e-324, 0.0), 0, 8000),
        (0.05, StepCost(0.06, 5e-324, 0.0), 0, LEAST_CHUNK_TOKENS),
    ],
)
def test_a_step_has_as_many_prompt_tokens_as_its_limit_leaves_time_for(
    limit_s: float, cost: StepCost, decode_rows: int, tokens: int
) -> None:
    limit = ChunkLimit(limit_s)
    limit.launched(4000)
    limit.measured()
    limit.cost = cost
    assert abs(limit.tokens(decode_rows, 50 * decode_rows) - tokens) <= 1


def test_chunks_grow_twofold_with_each_measurement_where_tokens_seem_to_cost_nothing() -> None:
    limit, sizes = ChunkLimit(0.05), list[int]()
    for _ in range(4):
        sizes.append(limit.tokens(0))
        limit.launched(sizes[-1])
        assert limit.tokens(0) == sizes[-1], "before it is measured"
        limit.cost = StepCost(0.005, 0.0, 0.0)
        limit.measured()
    assert sizes == [LEAST_CHUNK_TOKENS * 2**turn for turn in range(4)]
