"""Late choice at the router: which candidate decodes an attempt is known when its prefill instance says so."""

import pytest

from common.config import RouterConfig
from common.errors import Preempted, Unavailable
from common.ids import Incarnation, InstanceId, Life
from common.instance.ports import Send
from common.messages import Failed, Load, Probe, Probed, Register, Standing
from router.attempts import ResumeReason
from router.requests import Record
from tests.builders import instance, key
from tests.router.bench import D0, D1, P0, P1, Bench, about_requests, cancels, close, generates, route, spec

FIRST = Incarnation("1")
OF_P0, OF_D0, OF_D1 = (Life(InstanceId(name), FIRST) for name in ("p0", "d0", "d1"))
PREEMPTED = Failed.of(Preempted("an older request needs the memory"))


@pytest.fixture
def bench() -> Bench:
    """A request is on its way through p0 to d0 or d1, and nobody has granted its reservation yet."""
    bench = Bench(P0, D0, D1, places=False).serving()
    assert bench.assigned() == {"p0": 20, "d0": 20, "d1": 0}
    return bench


def record(bench: Bench) -> Record:
    (only,) = bench.core.requests.records()
    return only


def probed(bench: Bench, decode: Life | None, next_token: int | None = None, now: float = 2.1) -> list[Send]:
    """The prefill instance answers a probe."""
    standing = Standing(key(), next_token, decode)
    return bench.core.receive(Probed(id=P0.id, incarnation=FIRST, standings=(standing,), round=bench.probe_round), now)


def probes(sends: list[Send]) -> list[str]:
    return [send.to for send in sends if isinstance(send.message, Probe)]


def test_every_candidate_is_named_best_first() -> None:
    ((to, generate),) = generates(Bench(P0, D0, D1).submit(spec()))
    assert (to, generate.decodes) == ("p0", ("d0", "d1"))


def test_tokens_are_assigned_to_the_best_candidate_and_move_to_the_one_that_grants(bench: Bench) -> None:
    assert bench.placed(OF_P0, OF_D1, 1.0) == []
    assert bench.assigned() == {"p0": 20, "d0": 0, "d1": 20}
    bench.text(0, "ab")
    assert bench.assigned() == {"p0": 0, "d0": 0, "d1": 22}


def test_tokens_that_come_before_it_is_known_who_decodes_move_too(bench: Bench) -> None:
    bench.text(0, "ab")
    assert bench.assigned() == {"p0": 0, "d0": 22, "d1": 0}
    bench.placed(OF_P0, OF_D1, 1.0)
    assert bench.assigned() == {"p0": 0, "d0": 0, "d1": 22}


@pytest.mark.parametrize("candidate", [D0, D1])
def test_a_candidate_that_is_lost_before_it_is_known_who_decodes_concerns_nobody(bench: Bench, candidate: object) -> None:
    assert about_requests(bench.leave(D0 if candidate is D0 else D1, 1.0)) == []


def test_the_loss_of_the_one_that_decodes_resumes_and_that_of_the_others_does_not(bench: Bench) -> None:
    bench.placed(OF_P0, OF_D1, 1.0)
    assert about_requests(bench.leave(D0, 1.1)) == []
    sent = about_requests(bench.leave(D1, 1.2))
    assert sent == [*cancels(P0, D1), close()]
    assert bench.observer.resumes == [ResumeReason.LOST_INSTANCE]


def test_the_loss_of_the_prefill_instance_resumes_while_it_is_not_known_who_decodes_and_every_candidate_is_told() -> None:
    bench = Bench(P0, D0, D1, P1, places=False).serving()
    bench.text(0, "ab")
    sent = about_requests(bench.leave(P0, 1.0))
    assert sent[:4] == [*cancels(P0, D0, D1), close()]
    assert generates(sent)[0][1].first == 2


@pytest.mark.parametrize("how", ["left", "another life", "stuck"])
def test_a_grant_of_an_instance_that_is_lost_meanwhile_resumes_at_once(bench: Bench, how: str) -> None:
    match how:
        case "left":
            bench.leave(D1, 1.0)
        case "another life":
            bench.core.receive(Register(instance=instance("d1", "decode", "2")), 1.0)
        case _:
            bench.report(D1, 1.0, Load(oldest_step_s=31.0))
    sent = about_requests(bench.placed(OF_P0, OF_D1, 1.1))
    assert sent[:4] == [*cancels(P0, D0, D1), close()] and len(generates(sent)) == 1
    assert bench.observer.resumes == [ResumeReason.LOST_INSTANCE]


@pytest.mark.parametrize("by", [Life(P0.id, Incarnation("0")), Life(P1.id, FIRST)], ids=["a former life", "another instance"])
def test_only_its_own_prefill_instance_says_who_decodes_an_attempt(bench: Bench, by: Life) -> None:
    bench.placed(by, OF_D1, 1.0)
    assert bench.assigned() == {"p0": 20, "d0": 20, "d1": 0} and bench.core.requests.stale == 1


def test_what_is_said_about_an_attempt_that_is_over_is_dropped(bench: Bench) -> None:
    bench.text(0, "", Failed.of(Unavailable("the push failed")))
    before = bench.assigned()
    assert bench.placed(OF_P0, OF_D1, 1.1) == []
    assert bench.assigned() == before and bench.core.requests.stale == 1


# --- when Placed is lost ---------------------------------------------------------------------------------------------------


def test_the_second_token_without_a_word_of_who_decodes_makes_the_router_ask_once(bench: Bench) -> None:
    assert probes(bench.text(0, "a")) == []
    assert probes(bench.text(1, "b")) == ["p0"]
    assert probes(bench.text(2, "c")) == []
    assert probed(bench, OF_D1) == []
    assert bench.assigned() == {"p0": 0, "d0": 0, "d1": 23}
    assert about_requests(bench.leave(P0, 3.0)) == [], "it was handed off"


def test_a_silent_attempt_is_probed_at_its_prefill_instance_until_it_is_known_who_decodes() -> None:
    bench = Bench(P0, D0, D1, config=RouterConfig(heartbeat_s=100.0, dead_after_s=1000.0), places=False).serving()
    assert probes(bench.tick(2.0)) == ["p0"]
    assert probed(bench, OF_D1, 0) == []
    assert probes(bench.tick(4.0)) == ["p0", "d1"]


def test_a_prefill_instance_that_has_handed_off_is_not_taken_for_one_that_knows_nothing() -> None:
    bench = Bench(P0, D0, D1, config=RouterConfig(heartbeat_s=100.0, dead_after_s=1000.0), places=False).serving()
    bench.text(0, "ab", now=0.1)
    for now in (2.1, 4.1):
        bench.tick(now)
        assert probed(bench, OF_D1, None, now) == []
    assert bench.observer.resumes == []


def test_an_attempt_of_which_its_prefill_instance_knows_nothing_at_all_is_resumed() -> None:
    bench = Bench(P0, D0, D1, config=RouterConfig(heartbeat_s=100.0, dead_after_s=1000.0), places=False).serving()
    bench.tick(2.0)
    assert probed(bench, None, None, 2.1) == []
    bench.tick(2.1)  # its tokens are asked for again
    bench.tick(4.1)
    assert len(generates(probed(bench, None, None, 4.1))) == 1
    assert bench.observer.resumes == [ResumeReason.LOST_MESSAGES]


# --- what is avoided -------------------------------------------------------------------------------------------------------


def test_a_preemption_is_avoided_where_it_happened_if_that_is_known(bench: Bench) -> None:
    bench.placed(OF_P0, OF_D0, 1.0)
    assert route(bench.text(0, "ab", PREEMPTED)) == ("p0", "d1")
    assert record(bench).crowded == {OF_D0}


def test_a_preemption_of_which_nobody_knows_where_it_happened_avoids_nobody(bench: Bench) -> None:
    bench.text(0, "ab", PREEMPTED)
    assert record(bench).crowded == set()


def test_a_failure_before_the_grant_is_the_prefill_instances(bench: Bench) -> None:
    bench.text(0, "", Failed.of(Unavailable("p0 reaches none of the decode instances")))
    assert record(bench).avoid == {OF_P0}
