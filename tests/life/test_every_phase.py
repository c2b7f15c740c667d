"""Every phase of a request's life, and everything that can befall it there: one ending, the right tokens, every page at home.

The request is served to its end whatever fails, unless its client does not want it any more or its time is over.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from common.ids import InstanceId
from common.messages import Ending, Failed, Finished
from kv_transfer.handoff_reader import MARGIN_S, WRITE_LEASE_S
from router.timelines import ResumeReason
from tests.life.expected import undisturbed
from tests.life.ranks import transport_of
from tests.life.scenes import MAX_TOKENS, PROMPT, Phase, Scene

TIMEOUT_S = 2.5
"""Longer than any phase takes to come about, and short enough that an instance that does nothing meanwhile is not given up."""
SETTLE_S = WRITE_LEASE_S + MARGIN_S + 15.0
PUSH_S = 10.0
"""Within which a push that is to fail begins."""


def is_served(ending: Ending) -> bool:
    return ending == Finished(reason="length")


def is_cancelled(ending: Ending) -> bool:
    return ending == Finished(reason="cancelled")


def is_failed_with(status: int) -> Callable[[Ending], bool]:
    return lambda ending: isinstance(ending, Failed) and ending.status == status


def drain(scene: Scene, name: str) -> None:
    scene.fleet.router_process.drain_instance(InstanceId(name))


def fail_transfer(scene: Scene, quiescent: bool) -> None:
    """The pushes fail that are in flight, or that come next."""
    scene.hold_pushes()
    scene.until_pushing(PUSH_S)
    transport_of(scene.at_prefill).fail("cable", quiescent)


def let_time_pass(scene: Scene) -> None:
    """Those who serve the request do nothing until its deadline has passed."""
    for instance in (scene.at_prefill, scene.at_decode):
        instance.stop_until(scene.fleet.clock.now + TIMEOUT_S)
    scene.fleet.run_for(TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Event:
    """What happens, and how the request must end then."""

    title: str
    happen: Callable[[Scene], object]
    ends: Callable[[Ending], bool] = is_served


EVENTS = (
    Event("is cancelled", lambda scene: scene.fleet.leave("r"), is_cancelled),
    Event("loses its client", lambda scene: scene.client.stop_reading(), is_failed_with(408)),
    Event("its prefill instance dies", lambda scene: scene.fleet.kill(scene.prefill)),
    Event("its decode instance dies", lambda scene: scene.fleet.kill(scene.decode)),
    Event("its prefill instance drains", lambda scene: drain(scene, scene.prefill)),
    Event("its decode instance drains", lambda scene: drain(scene, scene.decode)),
    Event("its deadline passes", let_time_pass, is_failed_with(504)),
)
TRANSFER_FAILS = Event("its transfer fails", lambda scene: fail_transfer(scene, quiescent=True))
CASES = [*itertools.product(Phase, EVENTS), *((phase, TRANSFER_FAILS) for phase in Phase if phase.pushes)]


@pytest.mark.parametrize(("phase", "event"), [pytest.param(*case, id=f"{case[0].title}, {case[1].title}") for case in CASES])
def test_whatever_befalls_a_request_it_ends_once_as_it_should_and_everything_comes_home(phase: Phase, event: Event) -> None:
    scene = phase.scene(TIMEOUT_S if event.happen is let_time_pass else None)
    before, serving = set(scene.fleet.instances), {scene.prefill, scene.decode}
    event.happen(scene)
    scene.let_pushes_go()
    fleet, client = scene.fleet, scene.client
    fleet.turn_until(lambda: client.ended and all(other.ended for other, _ in scene.others), SETTLE_S)
    fleet.turn_until(lambda: fleet.is_home() and not fleet.detokenizer.open_answers, SETTLE_S)
    (ending,) = client.endings
    if event is TRANSFER_FAILS:
        assert scene.attempts == 2, "it was served again"
        assert fleet.observer.resumes == [ResumeReason.FAILED_ATTEMPT]
    assert event.ends(ending), ending
    answer = undisturbed(PROMPT, MAX_TOKENS)
    assert client.token_ids == (answer if is_served(ending) else answer[: len(client.token_ids)])
    for other, expected in scene.others:
        assert other.token_ids == expected and [is_served(ending) for ending in other.endings] == [True]
    assert len(fleet.observer.endings) == 1 + len(scene.others)
    assert all(member.assigned_tokens == 0 for member in fleet.router.fleet.members())
    assert before - set(fleet.instances) <= serving and all(reason == "drained" for _, reason in fleet.ends)


@pytest.mark.parametrize("phase", [pytest.param(phase, id=phase.title) for phase in Phase if phase.pushes])
def test_pages_under_a_transfer_that_is_not_proven_to_have_ended_stay_away_on_both_sides(phase: Phase) -> None:
    scene = phase.scene()
    prefill, decode = scene.at_prefill, scene.at_decode
    fail_transfer(scene, quiescent=False)
    scene.let_pushes_go()
    scene.fleet.turn_until(lambda: scene.client.ended and all(other.ended for other, _ in scene.others), SETTLE_S)
    assert [is_served(ending) for ending in scene.client.endings] == [True]
    assert scene.fleet.observer.resumes == [ResumeReason.FAILED_ATTEMPT]
    assert scene.client.token_ids == undisturbed(PROMPT, MAX_TOKENS)
    scene.fleet.run_for(SETTLE_S)
    for instance in scene.fleet.instances.values():
        load = instance.scheduler.report().load
        # Of 19 tokens the prompt takes 5 pages; a reservation has one more, for the answer.
        away = 5 if instance is prefill else 6 if instance is decode else 0
        assert load.pages_total - load.pages_free == load.pages_quarantined == away
