"""What a planner reads of a fleet, held against sums by hand, and what it tells and asks of a router.

An instance is told to serve in another role: what the router sends, waits for, shows and refuses.
"""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from common.config import RouterConfig
from common.errors import Conflict, DeadlinePassed, TandemError
from common.ids import ROUTER, Incarnation, InstanceId, ServingRole
from common.messages import Counters, Drain, Goodbye, Heartbeat, InstanceInfo, Load, Register, RoleKept, TakeRole
from router.cost import ASSUMED
from router.fleet import Members
from router.members import Member
from router.scaling import REMEMBERED, role_figures
from router.tasks import LATEST_S
from tests.builders import instance
from tests.router.bench import D0, D1, P0, P1, Bench
from tests.router.calls import assert_error, get, post, until
from tests.router.fakes import EchoFleet, Site, beat


@pytest.fixture
def fleet() -> Members:
    fleet = Members(ROUTER, ["tcp://detokenizer:1"], RouterConfig())
    for info in (P0, P1, D0):
        fleet.register(Register(instance=info), 1.0)
    return fleet


def report(
    fleet: Members, of: Any, now: float, load: Load | None = None, done: dict[str, int] | None = None, draining: bool = False
) -> None:
    fleet.heartbeat(replace(beat(of, load, draining), counters=Counters(**(done or {}))), now)


def test_the_figures_of_a_role_are_those_of_its_members_that_take_requests(fleet: Members) -> None:
    pages = P0.total_pages
    load = Load(tokens_to_compute=3000, waiting_requests=2, running_requests=3, pages_free=pages // 2, chunk_token_s=0.001)
    report(fleet, P0, 2.0, load)
    report(fleet, P1, 2.0, Load(tokens_to_compute=1000, pages_free=pages, chunk_token_s=0.001))
    found = role_figures(fleet, "prefill")
    assert (found.instances, found.tokens_to_compute, found.waiting_requests, found.running_requests) == (2, 4000, 2, 3)
    assert found.queue_s == pytest.approx(4000 * 0.001 / 2)
    assert found.capacity_tokens == 2 * pages * P0.page_size and found.tokens_held == (pages - pages // 2) * P0.page_size
    assert found.occupancy == pytest.approx(found.tokens_held / found.capacity_tokens)
    assert found.predicted_ttft_s == pytest.approx(1000 * 0.001, abs=0.05), "the next one goes where the queue is shorter"
    report(fleet, P0, 3.0, load, draining=True)
    assert role_figures(fleet, "prefill").instances == 1 and role_figures(fleet, "prefill").queue_s == pytest.approx(1.0)


def test_a_role_without_members_or_measurements_has_figures_too(fleet: Members) -> None:
    fleet.drain(InstanceId("d0"), 2.0)
    found = role_figures(fleet, "decode")
    assert (found.instances, found.occupancy, found.queue_s, found.predicted_ttft_s) == (0, 0.0, 0.0, 0.0)
    assert (found.step_s, found.chunk_token_s) == (ASSUMED.step_s, ASSUMED.chunk_token_s)


def test_totals_count_what_was_done_since_the_router_knows_a_member_and_never_fall(fleet: Members) -> None:
    done = {"requests_accepted": 500, "requests_ended": 400, "prompt_tokens_computed": 90_000, "tokens_generated": 400}
    report(fleet, P0, 2.0, done=done)  # another router had it before
    assert role_figures(fleet, "prefill").totals.prompt_tokens == 0
    report(fleet, P0, 2.5, done={name: count + 10 for name, count in done.items()})
    report(fleet, P1, 2.5)
    report(fleet, P1, 3.0, done={"prompt_tokens_computed": 5})
    totals = role_figures(fleet, "prefill").totals
    assert (totals.requests, totals.requests_ended, totals.prompt_tokens, totals.answer_tokens) == (10, 10, 15, 10)
    fleet.tick(100.0)
    later = instance("p0", "prefill")
    fleet.register(Register(instance=replace(later, incarnation="another")), 101.0)
    fleet.heartbeat(Heartbeat(id=later.id, incarnation="another", load=Load(), counters=Counters()), 101.5)  # type: ignore[arg-type]
    assert role_figures(fleet, "prefill").totals.prompt_tokens == 15
    assert role_figures(fleet, "decode").totals.prompt_tokens == 0


DECISION = {"action": "flip", "instance": "d0", "role": "prefill", "reason": "prompts wait"}


@pytest.mark.anyio
async def test_decisions_are_remembered_with_their_reasons_and_counted(site: Site) -> None:
    assert (await post(site, "/cluster/decisions", DECISION)).status_code == 200
    for number in range(3):
        await post(site, "/cluster/decisions", {"action": "stay", "reason": f"all is well {number}"})
    found = (await get(site, "/cluster/decisions")).json()["decisions"]
    assert [(each["action"], each["reason"]) for each in found] == [("flip", "prompts wait"), ("stay", "all is well 2")]
    assert found[0]["at"] > 1e9 and found[0]["instance"] == "d0"
    metrics = (await get(site, "/metrics")).text
    assert 'tandem_scaling_decisions_total{action="flip"} 1.0' in metrics
    assert 'tandem_scaling_decisions_total{action="stay"} 3.0' in metrics


@pytest.mark.anyio
async def test_a_bounded_number_of_decisions_is_remembered(site: Site) -> None:
    for number in range(REMEMBERED + 5):
        await post(site, "/cluster/decisions", DECISION | {"reason": str(number)})
    found = (await get(site, "/cluster/decisions")).json()["decisions"]
    assert [each["reason"] for each in found] == [str(number) for number in range(5, REMEMBERED + 5)]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("change", "field"),
    [({"action": "jump"}, "action"), ({"reason": ""}, "reason"), ({"reason": "x" * 1001}, "reason"), ({"colour": 1}, "colour")],
)
async def test_a_wrong_decision_is_refused_by_the_name_of_its_field(site: Site, change: Any, field: str) -> None:
    answer = await post(site, "/cluster/decisions", DECISION | change)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    assert (await get(site, "/cluster/decisions")).json()["decisions"] == []


@pytest.mark.anyio
async def test_an_instance_is_started_by_whoever_started_the_router_if_one_is_spare(site: Site) -> None:
    asked: list[str] = []
    site.core.scaling.starts = asked.append
    alone = await post(site, "/cluster/instances", {"role": "decode"})
    assert alone.status_code == 409 and "launch local" in alone.json()["error"]["message"]
    site.core.scaling.keeps(["p0", "d0"], 0)
    none_left = await post(site, "/cluster/instances", {"role": "decode"})
    assert none_left.status_code == 409 and "--spare" in none_left.json()["error"]["message"] and not asked
    site.core.scaling.keeps(["p0", "d0"], 1)
    assert (await post(site, "/cluster/instances", {"role": "decode"})).status_code == 200 and asked == ["decode"]
    assert (await get(site, "/cluster")).json()["kept"] == {"names": ["p0", "d0"], "spare": 0}
    assert (await post(site, "/cluster/instances", {"role": "prefill"})).status_code == 409 and asked == ["decode"]
    assert (await post(site, "/cluster/instances", {"role": "both"})).json()["error"]["param"] == "role"


@pytest.mark.anyio
async def test_the_page_and_the_metrics_tell_the_same_of_a_role(site: Site) -> None:
    page, metrics = (await get(site, "/cluster")).json()["roles"], (await get(site, "/metrics")).text
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("tandem_role_"))
    for role in ("prefill", "decode"):
        for name in ("instances", "queue_s", "occupancy", "predicted_ttft_s", "waiting_requests", "running_requests"):
            assert float(lines[f'tandem_role_{name}{{role="{role}"}}']) == page[role][name]
        for name in ("requests", "prompt_tokens", "answer_tokens"):
            assert float(lines[f'tandem_role_{name}_total{{role="{role}"}}']) == page[role]["totals"][name]


# --- roles ----------------------------------------------------------------------------------------------------------------------


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
