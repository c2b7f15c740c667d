"""The table of requests: each is accepted once, served until its deadline, ended once, and its key is remembered a while."""

import math

import msgspec
import pytest
from msgspec.structs import replace

from common.ids import DETOKENIZER, ROUTER, InstanceId, shard_of, text_name
from common.instance.ports import RouterJoined, Send
from common.instance.request import Phase, Request
from common.instance.requests import MEMORY_S, RequestTable, read_terms
from common.instance.waiting_line import Rank
from common.messages import Finished, Probe, Probed, Repeat, Standing, Terms, TokenBatch, TokenDelta
from tests.builders import engine, instance, key, limits
from tests.decode.rig import reserve
from tests.prefill.rig import generate

ME = instance("p", "prefill")
LENGTH = Finished("length")


def table() -> RequestTable[Request]:
    made = RequestTable(Request, ME, engine(), limits(request_timeout_s=600.0))
    made.meet_router(RouterJoined(ROUTER, 1))
    return made


def is_accepted(made: RequestTable[Request], now: float, name: str = "r", timeout_s: float | None = None, first: int = 0) -> bool:
    """Whether a request that is well formed is accepted when it comes now."""
    before = made.accepted
    assert made.accept(generate(name, 10, first=first, terms=Terms(timeout_s=timeout_s)), None, 4, now) is None
    return made.accepted == before + 1


def opened(name: str = "r") -> tuple[RequestTable[Request], Request]:
    made = table()
    assert is_accepted(made, 0.0, name)
    return made, made[key(name)]


def finish(made: RequestTable[Request], request: Request, now: float) -> None:
    made.end(request, 1.0)
    made.remove(request, now)


def late(made: RequestTable[Request], now: float) -> list[Request]:
    return [request for request, _ in made.overdue(now)]


def test_a_request_is_open_until_it_is_removed() -> None:
    made, request = opened()
    assert made[key()] is request and made.get(key()) is request and list(made) == [request] and len(made) == 1
    finish(made, request, 1.0)
    assert made.get(key()) is None and list(made) == [] and len(made) == 0 and made.accepted == 1


def test_a_request_ends_once_and_leaves_the_line() -> None:
    made, request = opened()
    assert list(made.waiting) == [request]
    assert [made.end(request, 1.0), made.end(request, 1.0), made.ended] == [Phase.WAITING, None, 1]
    assert len(made.waiting) == 0 and list(made) == [request]


def test_a_request_that_has_not_ended_is_not_removed() -> None:
    made, request = opened()
    with pytest.raises(AssertionError, match="before its end"):
        made.remove(request, 0.0)


def test_a_key_is_served_once_while_it_is_open_and_for_a_while_after() -> None:
    made, request = opened()
    assert not is_accepted(made, 0.0) and made.stale == 1
    finish(made, request, 10.0)
    assert not is_accepted(made, 10.0) and made.stale == 2
    late(made, 10.0 + MEMORY_S - 1e-3)
    assert not is_accepted(made, 10.0)
    late(made, 10.0 + MEMORY_S)
    assert is_accepted(made, 10.0) and made.stale == 3


def test_a_router_that_is_gone_is_worth_a_warning_only_when_requests_end_with_it(caplog: pytest.LogCaptureFixture) -> None:
    made, request = opened()
    router = request.key.router
    made.meet_router(RouterJoined(InstanceId("router-other"), 1))
    assert made.lose_router(InstanceId("router-other")) == [] and not caplog.records
    assert made.lose_router(router) == [request]
    assert [record.getMessage() for record in caplog.records] == [f"{router} is gone: its open requests end here, 1 of them"]


def test_another_attempt_is_another_key() -> None:
    made, _ = opened()
    again = msgspec.structs.replace(generate("r", 10), key=key(attempt=1))
    assert made.accept(again, None, 4, 0.0) is None and made.accepted == 2 and made.stale == 0


def test_a_key_that_is_cancelled_before_it_comes_is_not_accepted_for_a_while() -> None:
    made = table()
    assert made.cancel(key(), 0.0) is None
    assert not is_accepted(made, 0.0) and len(made) == 0
    late(made, MEMORY_S)
    assert is_accepted(made, MEMORY_S)


@pytest.mark.parametrize(
    ("timeout_s", "limit_s"),
    [(None, 600.0), (5.0, 5.0), (600.0, 600.0), (1e9, 600.0), (math.inf, 600.0), (0.0, 0.0), (-1.0, -1.0)],
)
def test_a_request_lives_until_its_own_time_is_over_or_the_instances_limit(timeout_s: float | None, limit_s: float) -> None:
    made = table()
    assert is_accepted(made, 100.0, timeout_s=timeout_s)
    request = made[key()]
    assert request.deadline_s == 100.0 + limit_s
    assert made.next_deadline() == 100.0 + limit_s
    assert late(made, 100.0 + limit_s - 1e-3) == []
    assert late(made, 100.0 + limit_s) == [request]
    assert late(made, 1000.0) == [], "once"


def test_a_deadline_is_over_when_the_request_is() -> None:
    made, ended = opened("ended")
    made.end(ended, 1.0)
    is_accepted(made, 0.0, "gone")
    finish(made, made[key("gone")], 1.0)
    assert late(made, 1e6) == []


def test_a_remembered_key_wakes_nobody() -> None:
    made, request = opened()
    finish(made, request, 0.0)
    made.cancel(key("other"), 0.0)
    assert made.next_deadline() is None


def test_requests_may_be_removed_while_the_table_is_iterated() -> None:
    made, _ = opened("a")
    is_accepted(made, 0.0, "b")
    for request in made:
        finish(made, request, 0.0)
    assert len(made) == 0


def test_a_probe_is_answered_with_the_next_token_or_none_for_keys_that_are_not_known() -> None:
    made, _ = opened("over")
    finish(made, made[key("over")], 0.0)
    is_accepted(made, 0.0, "a", first=7)
    answers = made.answer(Probe(keys=(key("over"), key("a"), key("unknown")), round=3))
    standings = (Standing(key("over"), None), Standing(key("a"), 7), Standing(key("unknown"), None))
    assert answers == [Send(DETOKENIZER, Probed(id=ME.id, incarnation=ME.incarnation, standings=standings, round=3))]


def test_answers_to_a_probe_go_the_way_of_the_tokens_to_each_detokenizer() -> None:
    made = table()
    made.meet_router(RouterJoined(ROUTER, 2))
    keys = tuple(key(f"r{number}") for number in range(20))
    sends = made.answer(Probe(keys=(*keys, replace(key("r"), router=InstanceId("stranger"))), round=1))
    told = {send.to: [standing.key for standing in send.message.standings] for send in sends if isinstance(send.message, Probed)}
    assert told == {text_name(ROUTER, shard): [key for key in keys if shard_of(key, 2) == shard] for shard in (0, 1)}


def repeated(made: RequestTable[Request], first: int, *names: str) -> list[TokenDelta]:
    sends = made.repeat(Repeat(tokens=tuple((key(name), first) for name in names)))
    return [delta for send in sends if isinstance(send.message, TokenBatch) for delta in send.message.deltas]


def test_what_was_emitted_is_told_again_until_the_request_is_forgotten() -> None:
    made, request = opened()
    assert repeated(made, 0, "r", "unknown") == []
    request.note(40)
    request.note(41)
    assert repeated(made, 1, "r") == [TokenDelta(key(), 1, (41,))]
    made.tell(request, LENGTH)
    finish(made, request, 1.0)
    for now in (1.0, 1.0 + MEMORY_S - 0.1):
        made.overdue(now)
        assert repeated(made, 0, "unknown", "r") == [TokenDelta(key(), 0, (40, 41), LENGTH)]
    made.overdue(1.0 + MEMORY_S)
    assert repeated(made, 0, "r") == []


def test_a_refusal_is_told_again_by_the_one_who_told_it() -> None:
    made = table()
    refused = made.accept(generate("r", 10), None, 10_000, 0.0)
    assert refused is not None and repeated(made, 0, "r") == [TokenDelta(key(), 0, (), refused)]
    assert made.accept(reserve("other", 10), None, 10_000, 0.0) is not None
    assert repeated(made, 0, "other") == [], "its writer tells the client"


def test_terms_rank_by_priority_and_then_by_when_the_clients_request_arrived() -> None:
    assert read_terms(Terms(priority=3, age_s=2.5), 100.0) == Rank(3, 97.5)
    assert read_terms(Terms(age_s=9.0), 0.0) < read_terms(Terms(age_s=8.0), 0.0)
