"""An instance whose role changes, as its worker carries it out."""

import pytest
from msgspec.structs import replace

from common.ids import ROUTER, Digest, Incarnation, ServingRole
from common.instance.roles import CHANGE_S
from common.messages import (
    AnyMessage,
    Drain,
    Generate,
    Goodbye,
    Heartbeat,
    HoldSteps,
    InstanceInbox,
    Register,
    RoleKept,
    StageWeights,
    TakeRole,
)
from common.messages.variants import DoTask, JoinGroup, WeightsOnDisk
from tests.builders import instance, key, sampling
from tests.common.instance.rig import WELCOME, FakedRig

LIFE = Incarnation("1")


@pytest.fixture
def rig() -> FakedRig:
    rig = FakedRig()
    rig.turn(0.0, WELCOME)
    rig.mail.sent.clear()
    return rig


class Endless:
    """Work that does not end."""

    ends_s = None

    def poll(self) -> None: ...


def order(role: ServingRole, number: int = 1, life: Incarnation = LIFE) -> TakeRole:
    return TakeRole(number=number, role=role, incarnation=life)


def turn(rig: FakedRig, now: float, *messages: InstanceInbox) -> list[AnyMessage]:
    """What is sent when these messages have arrived from the router."""
    rig.mail.arriving += [(ROUTER, message) for message in messages]
    rig.worker.turn(now)
    sent, rig.mail.sent = [message for _, message in rig.mail.sent], []
    return sent


def refusals(sent: list[AnyMessage]) -> list[str]:
    return [message.reason for message in sent if isinstance(message, RoleKept)]


def test_it_says_goodbye_and_registers_as_another_life_when_nothing_is_left(rig: FakedRig) -> None:
    rig.scheduler.steps_to_plan = 1
    rig.turn(0.1, order("decode"))
    rig.scheduler.drained = True
    rig.turn(0.2)
    assert rig.memberships.info.role == "prefill", "a step is in flight"
    rig.executor.finish_one()
    goodbye, register = (message for message in turn(rig, 0.3) if isinstance(message, Goodbye | Register))
    assert isinstance(goodbye, Goodbye) and goodbye.incarnation == LIFE
    assert isinstance(register, Register) and (register.instance.role, register.instance.incarnation) == ("decode", "1.1")
    assert register.instance.started_ns == instance("p", "prefill").started_ns + 1, "a successor of its process comes later"
    (beat,) = (message for message in turn(rig, 0.4, WELCOME) if isinstance(message, Heartbeat))
    assert beat.incarnation == "1.1"


def test_a_late_answer_to_the_former_life_does_not_end_the_registration(rig: FakedRig) -> None:
    rig.scheduler.drained = True
    rig.turn(0.1, order("decode"))
    assert "Register" in rig.turn(0.5, replace(WELCOME, address=""))


def test_what_is_sent_to_the_former_life_or_role_is_dropped_and_counted(rig: FakedRig) -> None:
    rig.scheduler.drained = True
    rig.turn(0.1, order("decode"))
    told = list(rig.scheduler.told)
    late = Generate(key=key(), prompt=bytes(4), sampling=sampling(), incarnation=LIFE)
    rig.turn(0.2, WELCOME, late, order("prefill", 2))
    assert rig.scheduler.told == told
    assert rig.heartbeat(2.0).counters.messages_stale == 2


@pytest.mark.parametrize(
    ("before", "says"),
    [
        (HoldSteps(hold=True), "its steps are held"),
        (StageWeights(update=1, source=WeightsOnDisk(folder="/x")), "its weights are being changed"),
        (Drain(), "it is leaving the fleet"),
        (DoTask(number=1, task=JoinGroup("g", "here", 1, 1, 2, "gloo", 1.0)), "it is in the group g of a trainer"),
    ],
)
def test_what_keeps_it_in_its_role_is_said_at_once_and_also_when_it_begins_meanwhile(before: InstanceInbox, says: str) -> None:
    early, late = FakedRig(), FakedRig()
    for rig in (early, late):
        rig.executor.stage = rig.executor.perform = lambda _: Endless()  # type: ignore[method-assign, assignment]
    assert [says in each for each in refusals(turn(early, 0.0, WELCOME, before, order("decode")))] == [True]
    late.turn(0.0, WELCOME, order("decode"))
    sent = turn(late, 0.1, before)
    late.scheduler.drained = True
    assert [says in each for each in refusals(sent + turn(late, 0.2))] == [True]
    assert late.memberships.info.role == "prefill"


def test_it_stays_when_it_cannot_get_rid_of_what_it_has_and_answers_the_order_once_more(rig: FakedRig) -> None:
    rig.turn(0.1, order("decode"))
    assert rig.worker.next_deadline() <= 0.1 + CHANGE_S
    first = refusals(turn(rig, 0.1 + CHANGE_S))
    assert "it still had" in first[0] and rig.scheduler.told[-1] == "StayInRole"
    assert refusals(turn(rig, 11.0, order("decode"))) == first
    rig.scheduler.drained = True
    rig.turn(11.1, order("decode", 2))
    rig.turn(11.2)
    assert rig.memberships.info.role == "decode", "another order is another try"


def test_who_is_told_to_drain_meanwhile_has_the_time_of_a_drain(rig: FakedRig) -> None:
    rig.turn(0.1, order("decode"))
    assert "leaving the fleet" in refusals(turn(rig, 0.2, Drain()))[0]
    assert rig.scheduler.told[-3:] == ["LeaveRole", "StayInRole", "Drain"]


def test_an_order_that_was_overtaken_by_a_later_one_changes_nothing(rig: FakedRig) -> None:
    rig.scheduler.drained = True
    rig.turn(0.1, order("decode"))
    rig.turn(0.2, WELCOME, order("both", 3, Incarnation("1.1")))
    assert rig.heartbeat(2.0).serves_whole
    assert not rig.heartbeat(4.0, WELCOME, order("decode", 4, Incarnation("1.1"))).serves_whole
    assert not rig.heartbeat(6.0, WELCOME, order("both", 3, Incarnation("1.1"))).serves_whole


def test_nothing_ends_between_decode_and_both(rig: FakedRig) -> None:
    rig.scheduler.drained = True
    rig.turn(0.1, order("both"))
    rig.turn(0.2, WELCOME)
    told = list(rig.scheduler.told)
    assert rig.heartbeat(2.0, order("decode", 2, Incarnation("1.1"))).serves_whole is False
    assert rig.memberships.info.incarnation == "1.1" and "LeaveRole" not in rig.scheduler.told[len(told) :]


def test_the_digest_of_weights_that_were_changed_stays(rig: FakedRig) -> None:
    rig.executor.weights = Digest("b" * 32)
    rig.scheduler.drained = True
    (register,) = (message for message in turn(rig, 0.1, order("decode")) if isinstance(message, Register))
    assert register.weights == "b" * 32 and register.was_welcome
    assert rig.memberships.of(ROUTER) is not None
