"""What the schedulers of both roles do alike: limits, what comes twice, deadlines, and the end of the instance."""

from collections.abc import Callable
from typing import Any

import pytest

from common.ids import ROUTER, InstanceId
from common.instance.ports import Scheduler
from common.instance.requests import LAST_S
from common.messages import Cancel, Generate, Probe, Probed, Reserve
from tests.builders import key
from tests.decode import rig as decode
from tests.prefill import rig as prefill
from tests.schedulers import declined, drain, failures, messages

Make = Callable[[], Scheduler[Any]]


def with_open_push() -> Scheduler[Any]:
    made, _ = prefill.pushing()
    return made


def with_open_reservation() -> Scheduler[Any]:
    made, _ = decode.with_reservation(now=20.0)
    return made


ROLES = pytest.mark.parametrize("role", [prefill, decode], ids=["prefill", "decode"])
ASKED = pytest.mark.parametrize(
    ("role", "sender", "ask"),
    [(prefill, ROUTER, prefill.generate), (decode, ROUTER, decode.generate), (decode, decode.WRITER, decode.reserve)],
    ids=["prefill-generate", "decode-generate", "decode-reserve"],
)
PAGES_IN_USE = pytest.mark.parametrize("make", [with_open_push, with_open_reservation])
"""Request "a" has pages here that somebody else reads or writes."""


# --- who is taken in -------------------------------------------------------------------------------------------------------


@ASKED
def test_a_request_that_finds_the_line_full_is_refused_and_may_try_again(
    role: Any, sender: InstanceId, ask: Callable[..., Generate | Reserve]
) -> None:
    made = role.scheduler(max_waiting=1)
    made.receive(ROUTER, role.generate("a", 5), 0.0)
    actions = made.receive(sender, ask("b", 5), 0.0)
    refused = {**failures(actions), **declined(actions)}["b"]
    assert (refused.status, refused.retryable) == (429, True) and made.report().counters.requests_accepted == 1


@ASKED
def test_a_request_that_was_refused_is_not_begun_when_its_message_comes_again(
    role: Any, sender: InstanceId, ask: Callable[..., Generate | Reserve]
) -> None:
    made = role.scheduler(max_waiting=1)
    made.receive(ROUTER, role.generate("a", 5), 0.0)
    made.receive(sender, ask("b", 5), 0.0)
    made.receive(ROUTER, Cancel(key=key("a")), 0.0)
    assert made.receive(sender, ask("b", 5), 0.1) == []
    decision = made.decide(0.1)
    assert (decision.plan, decision.actions, made.report().counters.messages_stale) == (None, [], 1)


@PAGES_IN_USE
def test_a_request_that_has_ended_is_not_known_any_more_although_its_pages_are_not_home(
    make: Callable[[], Scheduler[Any]],
) -> None:
    """Its failure may have been lost: a router that asks must learn that nobody serves it."""
    made = make()
    made.receive(ROUTER, Cancel(key=key("a")), 20.1)
    (answer,) = messages(made.receive(ROUTER, Probe(round=1, keys=(key("a"),)), 20.2))
    role = prefill if make is with_open_push else decode
    assert isinstance(answer, Probed) and (answer.id, answer.incarnation) == (role.ME, role.LIFE)
    assert [(standing.key, standing.next_token) for standing in answer.standings] == [(key("a"), None)]
    assert made.report().load.pages_free < made.report().load.pages_total


# --- the end of the instance -----------------------------------------------------------------------------------------------


@PAGES_IN_USE
def test_a_drain_does_not_wait_for_ever_for_pushes_or_writers_that_do_not_end(make: Make) -> None:
    made = make()
    drain(made, 0.0)
    made.tick(30.0)
    drained = [made.report().drained]
    made.tick(30.0 + LAST_S)
    assert [*drained, made.report().drained] == [False, True]


@ROLES
def test_an_idle_instance_has_drained_at_once_and_one_that_was_not_told_never(role: Any) -> None:
    made = role.scheduler()
    made.tick(1e6)
    drained = [made.report().drained]
    drain(made, 1e6)
    assert [*drained, made.report().drained] == [False, True]
