"""What a router says of deleting an instance, and that an older release is not told what it does not know."""

import asyncio

import pytest
from msgspec.structs import replace

from common.errors import Conflict, NotFound, TandemError
from common.ids import Incarnation, InstanceId, Life
from common.messages import SINCE, WIRE_VERSION, DoTask, Finished, Goodbye, Load, Register, TextBatch, TextDelta
from common.messages.variants import LeaveGroup, ReadWeight, Task
from router.fleet import Members
from tests.router.bench import D0, P0
from tests.router.calls import completion, get, post, until
from tests.router.fakes import EchoFleet, Site, beat
from tests.router.test_fleet import DEAD_AFTER_S, new_fleet

HOME = Load(pages_free=64, pages_total=64, pages_cached=10)
"""All pages are at home; some of them hold KV that may be hit again."""


@pytest.fixture
def fleet() -> Members:
    fleet = new_fleet(P0, D0)
    fleet.drain(D0.id, 1.0)
    return fleet


def reasons(fleet: Members, load: Load = HOME, *, draining: bool = True) -> list[str]:
    fleet.heartbeat(beat(D0, load, draining), 1.1)
    return fleet.why_keep(D0.id)


def test_a_drained_instance_with_all_pages_at_home_may_be_deleted(fleet: Members) -> None:
    assert reasons(fleet) == []


def test_an_instance_that_takes_requests_may_not_be_deleted_however_idle_it_is() -> None:
    fleet = new_fleet(P0, D0)
    assert reasons(fleet, draining=False) == ["it does not drain: POST /cluster/d0/drain"]


def test_an_instance_that_was_told_to_drain_is_needed_until_it_says_that_it_does(fleet: Members) -> None:
    assert reasons(fleet, draining=False) == ["it does not drain: POST /cluster/d0/drain"]


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (replace(HOME, waiting_requests=2), "2 requests wait there"),
        (replace(HOME, running_requests=1), "1 requests run there"),
        (replace(HOME, reservations=3), "3 reservations wait for their handoff"),
        (replace(HOME, pushes_in_flight=4), "4 pushes are in flight"),
        (replace(HOME, pages_free=60, pages_quarantined=4), "4 pages are in use"),
    ],
)
def test_what_is_left_there_is_named_whichever_routers_it_is(fleet: Members, load: Load, reason: str) -> None:
    assert reasons(fleet, load) == [reason]
    assert reasons(fleet) == []


def test_a_new_life_of_its_name_is_judged_and_not_the_former_one(fleet: Members) -> None:
    assert reasons(fleet) == []
    fleet.register(Register(instance=replace(D0, incarnation=Incarnation("2"))), 2.0)
    assert fleet.why_keep(D0.id)[0].startswith("it does not drain")


@pytest.mark.parametrize(
    ("goodbye", "told"),
    [
        (Goodbye(id=D0.id, incarnation=D0.incarnation, is_quiet=True), []),
        (Goodbye(id=D0.id, incarnation=D0.incarnation), ["it is gone (left), and has not said that its transfers have ended"]),
        (
            Goodbye(id=D0.id, incarnation=D0.incarnation, reason="rank 1 ended"),
            ["it is gone (rank 1 ended), and has not said that its transfers have ended"],
        ),
    ],
    ids=["quiet", "an older version", "failed"],
)
def test_of_an_instance_that_has_left_its_last_word_counts(fleet: Members, goodbye: Goodbye, told: list[str]) -> None:
    fleet.goodbye(goodbye, 2.0)
    assert fleet.why_keep(D0.id) == told


def test_what_is_not_known_of_an_instance_that_died_is_no(fleet: Members) -> None:
    assert reasons(fleet) == []
    fleet.tick(DEAD_AFTER_S + 2.0)
    assert fleet.why_keep(D0.id) == ["it is gone (not heard of in time), and has not said that its transfers have ended"]
    with pytest.raises(NotFound, match="'d9'"):
        fleet.why_keep(InstanceId("d9"))


@pytest.mark.anyio
async def test_the_page_tells_whether_and_why_not() -> None:
    async with Site(EchoFleet(stall_at=3)) as site:
        fleet, decode, records = site.fleet, site.fleet.decode, site.core.requests.records
        assert (await get(site, "/cluster/d9/safe_to_delete")).status_code == 404
        answer = asyncio.create_task(post(site, "/v1/completions", completion()))
        await until(lambda: any(len(record.token_ids) == 3 for record in records()))
        await post(site, "/cluster/d0/drain", {})
        fleet.say(beat(decode, HOME, draining=True))
        await until(lambda: next(site.core.fleet.members("decode")).reports_draining)
        page = (await get(site, "/cluster/d0/safe_to_delete")).json()
        assert page == {"id": "d0", "safe_to_delete": False, "reasons": ["1 requests of this router are assigned to it"]}
        (record,) = records()
        assert record.attempt is not None
        rest = TextDelta(record.attempt.key, 3, tuple(map(ord, "lo")), "lo", Finished(reason="length"))
        fleet.say(TextBatch(deltas=(rest,)))
        assert (await answer).status_code == 200
        assert (await get(site, "/cluster/d0/safe_to_delete")).json() == {"id": "d0", "safe_to_delete": True, "reasons": []}


def test_a_task_that_an_older_release_does_not_know_is_refused_by_name_and_others_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SINCE, "ReadWeight", WIRE_VERSION)
    fleet = new_fleet(P0, replace(D0, wire_version=WIRE_VERSION - 1))
    outcome: list[dict[Life, str] | TandemError] = []

    def begin(task: Task) -> list[str]:
        tasks = {member.life: task for member in fleet.members()}
        return [send.to for send in fleet.tasks.begin(tasks, outcome.append, 9.0) if isinstance(send.message, DoTask)]

    with pytest.raises(
        Conflict, match=f"d0 has wire version {WIRE_VERSION - 1}, and ReadWeight came with {WIRE_VERSION}"
    ) as refused:
        begin(ReadWeight(name="w", rows=1))
    assert refused.value.status == 409 and not outcome
    assert begin(LeaveGroup(group="g")) == ["p0", "d0"]
