"""What a planner reads of a fleet, held against sums by hand, and what it tells and asks of a router."""

from typing import Any

import pytest
from msgspec.structs import replace

from common.config import RouterConfig
from common.ids import ROUTER, InstanceId
from common.messages import Counters, Heartbeat, Load, Register
from router.cost import ASSUMED
from router.fleet import Members
from router.scaling import REMEMBERED, role_figures
from tests.builders import instance
from tests.router.bench import D0, P0, P1
from tests.router.calls import get, post
from tests.router.fakes import Site, beat


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
