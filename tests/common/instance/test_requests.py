"""The table of requests: each is served once, until its deadline, and its key is remembered a while."""

import math
from dataclasses import dataclass

import pytest

from common.errors import BadRequest
from common.ids import Key
from common.instance.line import Rank
from common.instance.requests import MEMORY_S, RequestTable, read_terms
from common.messages import Standing, Terms
from tests.builders import key


@dataclass(slots=True, eq=False)
class Request:
    key: Key
    standing: int | None = 0


def table(request_timeout_s: float = 600.0) -> RequestTable[Request]:
    return RequestTable(request_timeout_s)


def opened(name: str = "r", now: float = 0.0) -> tuple[RequestTable[Request], Request]:
    made, request = table(), Request(key(name))
    assert made.is_new(request.key)
    made.add(request, None, now)
    return made, request


def test_a_request_is_open_from_add_to_remove() -> None:
    made, request = opened()
    assert made[key()] is request and made.get(key()) is request and list(made) == [request] and len(made) == 1
    made.remove(key(), 1.0)
    assert made.get(key()) is None and list(made) == [] and len(made) == 0 and made.accepted == 1


def test_a_key_is_served_once_while_it_is_open_and_for_a_while_after() -> None:
    made, _ = opened()
    assert not made.is_new(key()) and made.stale == 1
    made.remove(key(), 10.0)
    assert not made.is_new(key()) and made.stale == 2
    made.late(10.0 + MEMORY_S - 1e-3)
    assert not made.is_new(key())
    made.late(10.0 + MEMORY_S)
    assert made.is_new(key()) and made.stale == 3


def test_another_attempt_is_another_key() -> None:
    made, _ = opened()
    assert made.is_new(key(attempt=1)) and made.stale == 0


def test_a_key_that_was_over_before_it_began_is_not_new_for_a_while() -> None:
    made = table()
    made.close_early(key(), 0.0)
    assert not made.is_new(key()) and len(made) == 0
    made.late(MEMORY_S)
    assert made.is_new(key())


@pytest.mark.parametrize(
    ("timeout_s", "limit_s"),
    [(None, 600.0), (5.0, 5.0), (600.0, 600.0), (1e9, 600.0), (math.inf, 600.0), (0.0, 0.0), (-1.0, -1.0)],
)
def test_a_request_lives_as_long_as_it_may_and_no_longer_than_the_instance_allows(
    timeout_s: float | None, limit_s: float
) -> None:
    made, request = table(), Request(key())
    assert made.add(request, timeout_s, 100.0) == 100.0 + limit_s
    assert made.next_deadline() == 100.0 + limit_s
    assert made.late(100.0 + limit_s - 1e-3) == []
    assert made.late(100.0 + limit_s) == [request]
    assert made.late(1000.0) == [], "once"


def test_a_deadline_is_over_when_the_request_is() -> None:
    made, _ = opened("ended")
    made.stop_deadline(key("ended"))
    made.add(Request(key("gone")), None, 0.0)
    made.remove(key("gone"), 1.0)
    assert made.late(1e6) == []


def test_what_is_only_remembered_wakes_nobody() -> None:
    made, _ = opened()
    made.remove(key(), 0.0)
    made.close_early(key("other"), 0.0)
    assert made.next_deadline() is None


def test_requests_may_be_removed_while_one_goes_through_them() -> None:
    made, _ = opened("a")
    made.add(Request(key("b")), None, 0.0)
    for request in made:
        made.remove(request.key, 0.0)
    assert len(made) == 0


def test_standings_say_which_token_comes_next_and_which_keys_are_not_known() -> None:
    made, request = opened("a")
    request.standing = 7
    made.add(Request(key("over")), None, 0.0)
    made.remove(key("over"), 0.0)
    asked = (key("over"), key("a"), key("unknown"))
    assert made.standings(asked) == (Standing(key("over"), None), Standing(key("a"), 7), Standing(key("unknown"), None))


def test_terms_rank_by_priority_and_then_by_when_the_clients_request_arrived() -> None:
    assert read_terms(Terms(priority=3, age_s=2.5), 100.0) == Rank(3, 97.5)
    assert read_terms(Terms(age_s=math.inf), 0.0) < read_terms(Terms(age_s=1e300), 0.0)


@pytest.mark.parametrize("terms", [Terms(age_s=math.nan), Terms(timeout_s=math.nan)])
def test_terms_that_have_no_order_are_refused(terms: Terms) -> None:
    with pytest.raises(BadRequest, match="must be numbers"):
        read_terms(terms, 0.0)
