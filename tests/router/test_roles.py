"""An instance is told to serve in another role: what the router sends, waits for, shows and refuses."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from common.config import RouterConfig
from common.errors import Conflict, DeadlinePassed, TandemError
from common.ids import Incarnation, ServingRole
from common.messages import Drain, Goodbye, InstanceInfo, Register, RoleKept, TakeRole
from router.members import Member
from router.tasks import LATEST_S
from tests.router.bench import D0, D1, P0, Bench
from tests.router.calls import assert_error, get, post, until
from tests.router.fakes import EchoFleet, Site, beat


class Roles:
    """A bench, and what came of the orders."""

    def __init__(self) -> None:
        self.bench = Bench(P0, D0, D1)
        self.fleet = self.bench.core.fleet
        self.answers: list[Member | TandemError] = []

    def order(self, member: InstanceInfo, role: ServingRole, now: float = 1.0) -> list[Any]:
        return [send.message for send in self.fleet.change_role(member.id, role, self.answers.append, now)]

    def beat(self, member: InstanceInfo, now: float = 2.0, *, whole: bool = False, draining: bool = False) -> list[Any]:
        said = replace(beat(member, draining=draining), serves_whole=whole)
        return [send.message for send in self.bench.core.receive(said, now)]

    def member(self, name: str) -> Member:
        return next(member for member in self.fleet.members() if member.info.id == name)


def other_life(info: InstanceInfo, role: Any) -> InstanceInfo:
    return replace(info, role=role, incarnation=Incarnation(f"{info.incarnation}.1"), started_ns=info.started_ns + 1)


def test_the_order_is_repeated_until_another_life_serves_in_the_role() -> None:
    roles = Roles()
    (order,) = roles.order(D0, "prefill")
    assert order == TakeRole(number=1, role="prefill", incarnation=D0.incarnation)
    assert roles.member("d0").trouble is not None and "takes the role prefill" in str(roles.member("d0").trouble)
    assert order in roles.beat(D0, draining=True) and not roles.answers
    roles.bench.core.receive(Goodbye(id=D0.id, incarnation=D0.incarnation), 2.5)
    successor = other_life(D0, "prefill")
    roles.bench.core.receive(Register(instance=successor), 2.5)
    assert not roles.answers, "it has not said yet that it serves"
    roles.beat(successor, 2.6)
    assert [each.life for each in roles.answers if isinstance(each, Member)] == [roles.member("d0").life]
    assert order not in roles.beat(successor, 3.0)


def test_whole_requests_are_a_matter_of_the_next_heartbeat() -> None:
    roles = Roles()
    roles.order(D0, "both")
    assert roles.member("d0").trouble is None, "it serves on"
    roles.beat(D0, whole=True)
    assert roles.answers == [roles.member("d0")] and roles.member("d0").role == "both"
    assert list(roles.fleet.candidates.whole) == [roles.member("d0")]


def test_a_refusal_is_told_and_the_member_takes_requests_again() -> None:
    roles = Roles()
    roles.order(D0, "prefill")
    roles.beat(D0, draining=True)
    late = RoleKept(id=D0.id, incarnation=D0.incarnation, number=0, reason="of another order")
    roles.bench.core.receive(late, 3.0)
    assert not roles.answers
    roles.bench.core.receive(replace(late, number=1, reason="a push does not end"), 3.0)
    (refusal,) = roles.answers
    assert isinstance(refusal, Conflict) and "d0 stays in the role decode: a push does not end" in str(refusal)
    roles.beat(D0, 3.5)
    assert roles.member("d0").trouble is None


def test_an_order_that_nobody_answers_ends() -> None:
    roles = Roles()
    roles.order(D0, "prefill")
    assert (roles.fleet.next_deadline() or 0) <= 1.0 + LATEST_S
    for second in range(2, 17):
        for member in (P0, D0, D1):
            roles.beat(member, float(second))
    roles.fleet.tick(1.0 + LATEST_S)
    assert isinstance(roles.answers[0], DeadlinePassed)
    assert roles.member("d0").trouble is None


def test_an_instance_that_is_started_anew_meanwhile_does_not_take_it() -> None:
    roles = Roles()
    roles.order(D0, "prefill")
    successor = replace(D0, incarnation=Incarnation("2"), started_ns=2)
    roles.bench.core.receive(Register(instance=successor), 2.5)
    roles.beat(successor, 2.6)
    assert isinstance(roles.answers[0], Conflict) and "was started anew meanwhile, as decode" in str(roles.answers[0])


@pytest.mark.parametrize("is_one_process", [True, False])
def test_an_order_to_drain_that_comes_too_late_for_the_former_role_is_for_the_next_one(is_one_process: bool) -> None:
    roles = Roles()
    roles.order(D0, "prefill")
    roles.fleet.drain(D0.id, 2.0)
    roles.bench.core.receive(Goodbye(id=D0.id, incarnation=D0.incarnation), 2.5)
    successor = other_life(D0, "prefill")
    if not is_one_process:
        successor = replace(successor, incarnation=Incarnation("another"))
    roles.bench.core.receive(Register(instance=successor), 2.5)
    told = Drain(incarnation=successor.incarnation) in roles.beat(successor, 2.6)
    assert told == roles.member("d0").draining == is_one_process


def test_a_member_that_is_back_after_a_silence_is_told_again_and_leaves_no_ghost() -> None:
    roles = Roles()
    roles.order(D0, "prefill")
    for second in range(2, 6):
        for member in (P0, D1):
            roles.beat(member, float(second))
        roles.bench.core.tick(float(second))
    assert {member.info.id for member in roles.fleet.members()} == {"p0", "d1"}
    assert TakeRole(number=1, role="prefill", incarnation=D0.incarnation) in roles.beat(D0, 5.5)
    assert "takes the role prefill" in str(roles.member("d0").trouble)
    kept = RoleKept(id=D0.id, incarnation=D0.incarnation, number=1, reason="busy")
    roles.bench.core.receive(kept, 5.6)
    assert set(roles.fleet.candidates.lines["decode"]) == set(roles.fleet.members("decode"))


def test_the_same_role_is_there_already() -> None:
    roles = Roles()
    assert roles.order(D0, "decode") == [] and roles.answers == [roles.member("d0")]


@pytest.mark.anyio
async def test_http_answers_when_the_instance_serves() -> None:
    async with Site() as site:
        site.fleet.decode = replace(site.fleet.decode)
        answer = await changed(site, "/cluster/d0/role", {"role": "both"})
        assert {"id": "d0", "role": "both", "incarnation": str(site.fleet.decode.incarnation)}.items() <= answer.items()
        assert [one["role"] for one in (await get(site, "/cluster")).json()["instances"]] == ["prefill", "both"]
        assert (await changed(site, "/pd_role_switch", {"new_role": "both", "instance": "d0"}))["seconds"] < 1


async def changed(site: Site, path: str, body: dict[str, str]) -> dict[str, Any]:
    asked = asyncio.create_task(post(site, path, body))
    await until(lambda: asked.done() or any(isinstance(message, TakeRole) for _, message in site.fleet.sent))
    site.fleet.say(replace(beat(site.fleet.decode), serves_whole=True))
    reply = await asyncio.wait_for(asked, 5)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body", "status", "field", "says"),
    [
        ("/cluster/d0/role", {"role": "prefill"}, 409, "role", "the only decode instance"),
        ("/cluster/d0/role", {"role": "router"}, 400, "role", "prefill"),
        ("/cluster/d0/role", {}, 400, "role", "role"),
        ("/cluster/d9/role", {"role": "decode"}, 404, None, "'d9'"),
        ("/pd_role_switch", {"new_role": "decode"}, 400, "instance", "instance"),
        ("/pd_role_switch", {"new_role": "decode", "instance": "d0", "prepare_only": True}, 400, "prepare_only", "prepare_only"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(path: str, body: Any, status: int, field: str | None, says: str) -> None:
    async with Site(EchoFleet(), RouterConfig(dead_after_s=60.0)) as site:
        assert says in assert_error(await post(site, path, body), status, "invalid_request_error", field)
