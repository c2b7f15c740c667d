"""Instances that change their role while streams run: nothing is lost, nothing is repeated, and the prefix cache stays."""

import pytest

from common.config import RouterConfig
from common.errors import Conflict, NotFound, TandemError
from common.ids import Incarnation, InstanceId, ServingRole
from common.messages import LinkInfo, unpack_spans
from common.messages.transfers import LinkChanged
from router.members import Member
from tests.life.client import Client
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet
from tests.life.ranks import transport_of

PROMPT = [100 + n for n in range(19)]
BRING_S = 20.0


def told(fleet: ToyFleet, name: str, role: ServingRole) -> list[Member | TandemError]:
    """What comes of it, as soon as it has come."""
    answers: list[Member | TandemError] = []
    fleet.router_process.tell_role(InstanceId(name), role, answers.append)
    return answers


def changed(fleet: ToyFleet, name: str, role: ServingRole) -> Member:
    answers = told(fleet, name, role)
    fleet.turn_until(lambda: bool(answers), BRING_S)
    assert isinstance(answers[0], Member), answers[0]
    return answers[0]


def ask(fleet: ToyFleet, count: int, max_tokens: int) -> list[tuple[Client, list[int]]]:
    """Clients, each with what it must get."""
    prompts = [[*PROMPT, number] for number in range(count)]
    return [
        (fleet.submit(f"r-{number}", prompt, max_tokens=max_tokens), undisturbed(prompt, max_tokens))
        for number, prompt in enumerate(prompts)
    ]


def check(fleet: ToyFleet, asked: list[tuple[Client, list[int]]]) -> None:
    for client, expected in asked:
        fleet.run(client)
        assert client.token_ids == expected
    fleet.turn_until(fleet.is_home, BRING_S)


@pytest.mark.parametrize(("name", "role"), [("prefill-1", "decode"), ("decode-1", "prefill"), ("decode-1", "both")])
def test_streams_go_on_while_an_instance_changes_its_role(name: str, role: ServingRole) -> None:
    fleet = ToyFleet(2, 2)
    asked = ask(fleet, 8, 30)
    fleet.turn_until(lambda: all(len(client.token_ids) > 3 for client, _ in asked[:4]), BRING_S)
    began_s = fleet.clock.now
    member = changed(fleet, name, role)
    assert fleet.clock.now - began_s < 1.0 + 0.5  # a heartbeat says it
    assert member.role == role and member.info.id == name
    check(fleet, asked)
    check(fleet, [(fleet.submit("later", PROMPT, max_tokens=9), undisturbed(PROMPT, 9))])


def test_it_serves_in_the_new_role_and_comes_back() -> None:
    fleet = ToyFleet(1, 2)
    assert changed(fleet, "decode-1", "prefill").info.role == "prefill"
    changed(fleet, "prefill-0", "decode")
    fleet.turn_until(lambda: not fleet.router_process.core.degraded(), BRING_S)
    client = fleet.submit("r", PROMPT, max_tokens=5)
    fleet.run(client)
    assert client.token_ids == undisturbed(PROMPT, 5)
    assert ("decode-1", "Handoff") in {(sender, kind) for sender, kind, _ in fleet.network.log}, "it computes prompts for pairs"
    life = changed(fleet, "decode-1", "decode").life
    assert life.incarnation.endswith(".2")


def test_the_prefix_cache_stays() -> None:
    fleet = ToyFleet(1, 2)
    fleet.run(fleet.submit("first", PROMPT, max_tokens=5))
    holder = next(name for name in ("decode-0", "decode-1") if fleet.instances[name].pool.cached_pages)
    changed(fleet, "prefill-0", "decode")
    changed(fleet, holder, "prefill")
    fleet.turn_until(lambda: not fleet.router_process.core.degraded(), BRING_S)
    fleet.run(fleet.submit("second", PROMPT, max_tokens=5))
    assert fleet.instances[holder].scheduler.report().counters.prompt_tokens_hit == 16


def test_whole_requests_go_to_an_instance_whose_role_is_both_when_it_is_cheaper() -> None:
    fleet = ToyFleet(1, 1)
    changed(fleet, "decode-0", "both")
    members = fleet.router_process.core.fleet
    assert list(members.candidates.whole) == [next(members.members("decode"))]
    changed(fleet, "decode-0", "decode")
    assert not members.candidates.whole


def test_a_link_that_changes_while_its_instance_becomes_another_says_nothing() -> None:
    fleet = ToyFleet(2, 2)
    changed(fleet, "prefill-1", "decode")
    former = LinkInfo(peer=InstanceId("decode-0"), incarnation=Incarnation("decode-0-2"), state="ready")
    assert fleet.instances["prefill-1"].scheduler.handle(LinkChanged(former), 0.0) == []


def test_the_last_decode_instance_keeps_its_role() -> None:
    fleet = ToyFleet(2, 1)
    with pytest.raises(Conflict, match="the only decode instance"):
        told(fleet, "decode-0", "prefill")
    with pytest.raises(NotFound):
        told(fleet, "decode-9", "prefill")


def test_two_orders_at_once_are_one_too_many() -> None:
    fleet = ToyFleet(2, 2)
    told(fleet, "decode-0", "prefill")
    with pytest.raises(Conflict, match="taking the role prefill at this moment"):
        told(fleet, "decode-0", "both")


@pytest.mark.parametrize(("name", "role"), [("prefill-1", "decode"), ("decode-1", "prefill")])
def test_an_instance_that_is_told_to_drain_while_it_changes_its_role_leaves(name: str, role: ServingRole) -> None:
    for turns in range(0, 40, 8):
        fleet = ToyFleet(2, 3)
        asked = ask(fleet, 6, 30)
        fleet.turn_until(lambda asked=asked: all(len(client.token_ids) > 3 for client, _ in asked[:3]), BRING_S)  # type: ignore[misc]
        told(fleet, name, role)
        for _ in range(turns):
            fleet.clock.turn()
        fleet.router_process.apply(fleet.router.fleet.drain(InstanceId(name), fleet.clock.now))
        check(fleet, asked)
        fleet.turn_until(lambda fleet=fleet: name not in fleet.instances, BRING_S)  # type: ignore[misc]


def test_what_a_life_has_done_is_in_the_trace_of_a_fleet_whose_roles_change() -> None:
    fleet = ToyFleet(2, 2)
    fleet.router_process.trace(5.0)
    asked = ask(fleet, 6, 30)
    fleet.turn_until(lambda: all(len(client.token_ids) > 3 for client, _ in asked[:3]), BRING_S)
    former = fleet.instances["decode-1"].scheduler
    changed(fleet, "decode-1", "prefill")
    check(fleet, asked)
    traces = fleet.router.traces
    fleet.turn_until(lambda: traces.status(fleet.clock.now).state == "over", BRING_S)
    processes = traces.status(fleet.clock.now).processes
    place = next(number for number, each in enumerate(processes) if each.id == "decode-1")
    spans = [span for frame in traces.frames() if frame.process == place for span in unpack_spans(frame.packed)]
    assert sum(span.track == "steps" for span in spans) == former.report().counters.steps > 0
    assert processes[place].over


def test_an_instance_whose_push_does_not_end_stays_what_it_was_and_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.instance.roles.CHANGE_S", 5.0)  # before the push is given up as stalled
    fleet = ToyFleet(2, 2, config=RouterConfig())
    fleet.memory.hold = True
    client = fleet.submit("r", PROMPT, max_tokens=9)
    fleet.turn_until(lambda: any(i.scheduler.report().load.pushes_in_flight for i in fleet.instances.values()), BRING_S)
    name = next(name for name, i in fleet.instances.items() if i.scheduler.report().load.pushes_in_flight)
    before = fleet.instances[name].info.incarnation
    answers, began_s = told(fleet, name, "decode"), fleet.clock.now
    fleet.turn_until(lambda: bool(answers), BRING_S)
    orders = sum(kind == "TakeRole" for _, kind, _ in fleet.network.log)
    assert orders <= 3 + (fleet.clock.now - began_s) / RouterConfig().heartbeat_s, (
        "it comes with heartbeats, not with answers to it"
    )
    assert isinstance(answers[0], Conflict) and "stays in the role prefill" in str(answers[0])
    fleet.memory.hold = False
    for instance in fleet.instances.values():
        transport_of(instance).release()
    check(fleet, [(client, undisturbed(PROMPT, 9))])
    assert fleet.instances[name].info.incarnation == before
    assert all(member.trouble is None for member in fleet.router_process.core.fleet.members())
