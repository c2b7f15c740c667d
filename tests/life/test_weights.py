"""Weights that change while a fleet serves, and what is refused instead."""

from collections import Counter
from unittest.mock import Mock

import pytest

from common.config import RouterConfig
from common.errors import Conflict, MemoryShort, TandemError, Unavailable
from common.ids import Digest, InstanceId, RequestId, pack_ids
from common.messages import Finished
from common.messages.variants import (
    FIRST_VERSION,
    AnnouncedWeight,
    WeightsFromGroup,
    WeightsInMemory,
    WeightsOnDisk,
    WeightsSource,
)
from common.sampling_params import SamplingParams
from common.step_cost import StepCost
from router.requests import RequestSpec
from router.weights import Updated, UpdateMode, UpdateOrder
from tests.engine import toy
from tests.engine.toy import TOY_WEIGHTS, ToyExecutor, ToyStaging
from tests.life.client import Client
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet
from tests.life.ranks import ToySize
from tests.life.weight_schedules import run_schedule

SIZE = ToySize(rows=8, cost=StepCost(0.02, 0.0, 0.0))
PROMPT = [100 + n for n in range(19)]


def make_fleet(prefill: int = 2, decode: int = 2, routers: int = 1) -> ToyFleet:
    return ToyFleet(prefill, decode, RouterConfig(request_timeout_s=300.0), SIZE, routers=routers)


def update(
    fleet: ToyFleet, name: str, mode: UpdateMode = "recompute", version: str = "", seat: int = 0, keeps_pause: bool = False
) -> list[Updated | TandemError]:
    """What came of it, once that is known."""
    came: list[Updated | TandemError] = []
    router, now = fleet.routers[seat], fleet.clock.now
    order = UpdateOrder(WeightsOnDisk(name), mode, version, 60.0, keeps_pause)
    router.deliver(router.core.apply(router.core.fleet.weights.begin(order, came.append, now), now))
    return came


def until_updated(
    fleet: ToyFleet, name: str, mode: UpdateMode = "recompute", version: str = "", keeps_pause: bool = False
) -> Updated | TandemError:
    came = update(fleet, name, mode, version, keeps_pause=keeps_pause)
    fleet.turn_until(lambda: bool(came))
    fleet.run_for(1.0)
    (outcome,) = came
    return outcome


def go_on(fleet: ToyFleet) -> None:
    router = fleet.router_process
    router.deliver(router.core.apply(router.core.fleet.weights.go_on(), fleet.clock.now))


def engine_of(fleet: ToyFleet, name: str) -> ToyExecutor:
    engine = fleet.instances[name].rank.engine
    assert isinstance(engine, ToyExecutor)
    return engine


def weights_of(fleet: ToyFleet) -> dict[str, Digest]:
    return {name: instance.rank.engine.weights for name, instance in fleet.instances.items()}


def die(fleet: ToyFleet, *names: str) -> None:
    for name in names:
        fleet.kill(name)
        fleet.connection_broken(name)


def start_anew(fleet: ToyFleet, name: str) -> None:
    """The instance dies, and another one of its name starts."""
    die(fleet, name)
    fleet.start(name, "decode")


def streaming(fleet: ToyFleet, tokens: int, begun: int = 5, name: str = "r") -> Client:
    """A request for so many tokens, of which some have come."""
    client = fleet.submit(name, PROMPT, tokens)
    until_it_streams(fleet, client, begun)
    return client


def until_it_streams(fleet: ToyFleet, client: Client, tokens: int = 5) -> None:
    fleet.turn_until(lambda: len(client.token_ids) >= tokens)


def test_whatever_goes_wrong_each_token_comes_from_the_weights_that_its_answer_names() -> None:
    reached = Counter[str]()
    for seed in (5, 7, 8, 10):
        _, problems, counts = run_schedule(seed)
        assert not problems, f"seed {seed}: {problems}"
        reached += counts
    wanted = {"updates: recompute", "updates: finish", "updates: abort", "failed updates", "refused updates", "pauses"}
    wanted |= {"kills", "ranks killed", "answers of several weights", "adapters: refused 400", "adapters: refused 503"}
    assert wanted <= set(reached)


def test_a_stream_goes_on_with_the_new_weights_and_says_from_which_token_on() -> None:
    fleet = make_fleet(1, 1)
    client = streaming(fleet, 30)
    came = update(fleet, "w1", version="step-1")
    fleet.run(client)
    (begin, name), (at, version) = client.answers[0].versions
    assert (begin, name, version) == (0, FIRST_VERSION, "step-1") and 5 <= at < 30
    tokens = client.token_ids
    assert tokens[:at] == undisturbed(PROMPT, at)
    assert tokens[at:] == undisturbed(PROMPT + tokens[:at], 30 - at, weights=Digest("w1"))
    (done,) = came
    assert isinstance(done, Updated) and (done.weights, done.version, done.instances) == ("w1", "step-1", 2)
    assert 0 < done.held_s < 1.0


def test_with_finish_no_stream_changes_its_weights_and_somebody_always_serves() -> None:
    fleet = make_fleet()
    old = [streaming(fleet, 60, 1, f"old-{n}") for n in range(4)]
    came = update(fleet, "w1", "finish")
    new: list[Client] = []
    while not came:
        fleet.run_for(0.2)
        new.append(fleet.submit(f"new-{len(new)}", PROMPT, 3))
        fleet.run_for(0.3)
        assert new[-1].ended, "it had to wait"
    new.append(fleet.submit("newest", PROMPT, 3))
    fleet.run(*old, *new)
    assert all(client.token_ids == undisturbed(PROMPT, 60) for client in old)
    weights = [client.answers[0].versions[0][1] for client in new]
    assert {FIRST_VERSION, "w1"} == set(weights) and weights == sorted(weights), "none goes back"
    assert set(weights_of(fleet).values()) == {"w1"}


def test_with_abort_what_was_dispatched_ends_and_what_comes_meanwhile_waits() -> None:
    fleet = make_fleet(1, 1)
    running = streaming(fleet, 60)
    came = update(fleet, "w1", "abort")
    fleet.turn_until(lambda: running.ended)
    late = fleet.submit("late", PROMPT, 4)
    fleet.run(late)
    assert running.endings == [Finished(reason="cancelled")] and len(came) == 1
    assert late.token_ids == undisturbed(PROMPT, 4, weights=Digest("w1"))


def test_an_update_to_the_same_weights_ends_and_names_as_any_other() -> None:
    fleet = make_fleet(1, 1)
    running = streaming(fleet, 60)
    until_updated(fleet, TOY_WEIGHTS, "abort", version="again")
    next_one = fleet.submit("next", PROMPT, 3)
    fleet.run(running, next_one)
    assert running.endings == [Finished(reason="cancelled")]
    assert next_one.answers[0].versions == [(0, "again")]


def test_who_joins_while_the_others_change_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = make_fleet(1, 2)
    streaming(fleet, 200)
    came, weights = update(fleet, "w1"), fleet.router.fleet.weights
    fleet.turn_until(lambda: weights.update is not None and weights.update.is_switching)
    monkeypatch.setattr(toy, "STAGE_S", 90.0)
    fleet.start(InstanceId("decode-9"), "decode")
    fleet.turn_until(lambda: bool(came))
    assert isinstance(came[0], Updated) and came[0].held_s < 5.0
    fleet.turn_until(lambda: set(weights_of(fleet).values()) == {"w1"}, 120.0)


def test_requests_that_stay_where_they_are_in_a_pause_are_computed_anew_if_the_weights_change() -> None:
    fleet = make_fleet(1, 1)
    client = streaming(fleet, 20)
    router = fleet.router_process
    router.deliver(router.core.apply(router.core.fleet.weights.pause(holds_steps=True), fleet.clock.now))
    fleet.run_for(2.0)
    held = len(client.token_ids)
    fleet.run_for(2.0)
    assert len(client.token_ids) == held < 20
    until_updated(fleet, "w1")
    fleet.run_for(2.0)
    assert len(client.token_ids) == held, "the pause goes on"
    go_on(fleet)
    fleet.run(client)
    tokens = client.token_ids
    assert tokens == undisturbed(PROMPT, held) + undisturbed(PROMPT + tokens[:held], 20 - held, weights=Digest("w1"))


def test_a_host_with_other_files_is_named_and_nothing_changes() -> None:
    fleet = make_fleet()
    odd = engine_of(fleet, "decode-1")
    whole, odd.stage = odd.stage, lambda source: whole(WeightsOnDisk("w1-of-another-day"))  # type: ignore[method-assign]
    client = fleet.submit("r", PROMPT, 20)
    came = until_updated(fleet, "w1")
    fleet.run(client)
    assert isinstance(came, TandemError) and came.status == 400
    assert "w1-of-another-day on decode-1" in str(came) and "w1 on decode-0" in str(came)
    assert client.token_ids == undisturbed(PROMPT, 20)
    assert set(weights_of(fleet).values()) == {TOY_WEIGHTS} and not fleet.router.fleet.weights.is_held


def test_weights_that_an_instance_cannot_use_and_a_second_update_are_refused_by_name() -> None:
    fleet = make_fleet()
    came = update(fleet, "bad weights")
    with pytest.raises(Conflict, match="under way"):
        update(fleet, "w1")
    fleet.run_for(2.0)
    (error,) = came
    assert isinstance(error, TandemError) and "cannot use the new weights: bad weights holds no toy weights" in str(error)
    assert set(weights_of(fleet).values()) == {TOY_WEIGHTS}
    until_updated(fleet, "w1")
    assert set(weights_of(fleet).values()) == {"w1"}


def test_an_instance_that_comes_back_is_given_the_weights_of_the_fleet_before_it_serves() -> None:
    fleet = make_fleet(1, 2)
    until_updated(fleet, "w1", version="step-1")
    start_anew(fleet, "decode-0")
    fleet.run_for(3.0)
    assert weights_of(fleet)["decode-0"] == "w1"
    clients = [fleet.submit(f"r{n}", PROMPT, 8) for n in range(6)]
    fleet.run(*clients)
    assert all(client.token_ids == undisturbed(PROMPT, 8, weights=Digest("w1")) for client in clients)
    assert {client.answers[0].versions[0][1] for client in clients} == {"step-1"}


def test_a_newcomer_that_is_short_of_memory_is_asked_again_with_its_heartbeats_and_people_hear_why() -> None:
    fleet = make_fleet(1, 2)
    until_updated(fleet, "w1", version="step-1")
    start_anew(fleet, "decode-0")
    engine = engine_of(fleet, "decode-0")
    whole, stagings = engine.stage, list[ToyStaging]()

    def short(source: WeightsSource) -> ToyStaging:
        stagings.append(whole(source))
        stagings[-1].poll = Mock(side_effect=MemoryShort("no room"))  # type: ignore[method-assign]
        return stagings[-1]

    engine.stage = short  # type: ignore[method-assign]
    fleet.run_for(10.0)
    (member,) = (each for each in fleet.router.fleet.members() if each.info.id == "decode-0")
    assert "cannot be given the weights of the fleet, w1: no room" in member.misfit
    assert 2 <= len(stagings) <= 40, "once with each heartbeat"
    engine.stage = whole  # type: ignore[method-assign]
    fleet.run_for(5.0)
    assert weights_of(fleet)["decode-0"] == "w1" and member.misfit == ""


def test_an_update_that_changes_nothing_leaves_the_way_to_weights_that_newcomers_are_given() -> None:
    fleet = make_fleet(1, 1)
    until_updated(fleet, "w1")
    came: list[Updated | TandemError] = []
    change = fleet.router.fleet.weights.begin(UpdateOrder(WeightsInMemory(("w1",))), came.append, fleet.clock.now)
    fleet.routers[0].deliver(fleet.routers[0].core.apply(change, fleet.clock.now))
    fleet.turn_until(lambda: bool(came))
    assert isinstance(came[0], Updated)
    start_anew(fleet, "decode-0")
    asked = Mock(wraps=fleet.instances["decode-0"].rank.engine.stage)
    fleet.instances["decode-0"].rank.engine.stage = asked  # type: ignore[method-assign]
    fleet.run_for(3.0)
    assert weights_of(fleet)["decode-0"] == "w1" and asked.call_args.args == (WeightsOnDisk("w1"),)


def test_a_fleet_whose_instances_all_died_comes_back_with_its_weights() -> None:
    fleet = make_fleet(1, 1)
    until_updated(fleet, "w1", version="step-1")
    die(fleet, "prefill-0", "decode-0")
    fleet.run_for(5.0)
    assert not list(fleet.router.fleet.members())
    fleet.start("prefill-0", "prefill")
    fleet.start("decode-0", "decode")
    fleet.run_for(5.0)
    client = fleet.submit("r", PROMPT, 8)
    fleet.run(client)
    assert client.token_ids == undisturbed(PROMPT, 8, weights=Digest("w1"))
    assert client.answers[0].versions == [(0, "step-1")]


def test_a_fleet_that_came_back_and_cannot_be_given_its_weights_is_given_others_when_people_say_so() -> None:
    fleet = make_fleet(1, 1)
    until_updated(fleet, "w1")
    die(fleet, "prefill-0", "decode-0")
    fleet.run_for(5.0)
    for name in ("prefill-0", "decode-0"):
        fleet.start(name, "prefill" if name == "prefill-0" else "decode")
        engine = engine_of(fleet, name)
        whole = engine.stage
        engine.stage = lambda source, whole=whole: whole(WeightsOnDisk("bad") if source == WeightsOnDisk("w1") else source)  # type: ignore[method-assign,misc]
    fleet.run_for(5.0)
    assert all("cannot be given the weights of the fleet, w1" in member.misfit for member in fleet.router.fleet.members())
    assert isinstance(until_updated(fleet, "w2"), Updated)
    assert set(weights_of(fleet).values()) == {"w2"}


def test_a_router_that_knows_no_way_to_its_weights_refuses_an_instance_with_others() -> None:
    fleet = make_fleet()
    until_updated(fleet, "w1")
    fleet.restart_router()
    fleet.run_for(5.0)
    assert fleet.router.fleet.weights.target == "w1", "those of its members"
    fleet.start("decode-2", "decode")
    fleet.run_for(2.0)
    (refused,) = fleet.router.fleet.refused.values()
    assert "have the digest toy, but those of this fleet have w1" in refused.reason
    update(fleet, "w2")
    fleet.run_for(8.0)
    assert set(weights_of(fleet).values()) == {"w2"}, "after an update it knows the way"


def test_another_router_follows_the_one_that_leads() -> None:
    fleet = make_fleet(2, 2, routers=2)
    came = update(fleet, "w1", version="step-1")
    fleet.run_for(3.0)
    assert len(came) == 1 and {router.core.fleet.weights.target for router in fleet.routers} == {"w1"}
    assert {router.core.fleet.weights.version for router in fleet.routers} == {"step-1"}
    assert all(not router.core.unready() for router in fleet.routers)


@pytest.mark.parametrize("decode", [1, 2])
def test_requests_at_another_router_wait_while_the_weights_change_and_none_is_refused(decode: int) -> None:
    """It learns of the update from heartbeats alone."""
    fleet = make_fleet(1, decode, routers=2)
    clients: list[Client] = []
    for number in range(4):
        came = update(fleet, f"w{number}", seat=0)
        for step in range(60):
            sampling = SamplingParams(max_new_tokens=3, temperature=0.0)
            spec = RequestSpec(RequestId(f"r{number}-{step}"), 0, pack_ids(PROMPT), sampling)
            clients.append(fleet.ask(spec, seat=1))
            fleet.run_for(0.05)
            assert fleet.routers[1].core.unready() == [] and fleet.routers[0].core.unready() == []
        assert len(came) == 1 and isinstance(came[0], Updated)
    fleet.turn_until(lambda: all(client.ended for client in clients), seconds=60.0)
    assert {type(client.endings[0]) for client in clients} == {Finished}


@pytest.mark.parametrize("name", ["prefill-0", "decode-1"])
def test_an_update_from_a_group_ends_when_one_of_its_members_goes_and_names_it(name: str) -> None:
    fleet = make_fleet()
    came: list[Updated | TandemError] = []
    source = WeightsFromGroup("group", "bucket-1", (AnnouncedWeight(name="w", dtype="float32", shape=(1,)),))
    for instance in fleet.instances.values():
        engine = instance.rank.engine
        assert isinstance(engine, ToyExecutor)
        engine.stage = lambda source: Mock(ends_s=None, poll=lambda: None)  # type: ignore[method-assign]
    router, now = fleet.router_process, fleet.clock.now
    begun = router.core.fleet.weights.begin(UpdateOrder(source), came.append, now)
    router.deliver(router.core.apply(begun, now))
    fleet.run_for(3.0)
    assert came == []
    die(fleet, name)
    fleet.run_for(5.0)
    (error,) = came
    assert isinstance(error, Unavailable) and f"{name} has left, and was of the group" in str(error)
    assert router.core.fleet.weights.update is None, "the next one may begin"


def test_two_routers_that_change_the_weights_at_once_do_not_harm_each_other() -> None:
    """One of them, or none, succeeds; no instance is lost, and the next update does."""
    for delay_s in (0.0, 0.002, 0.03, 0.05, 0.052):
        fleet = make_fleet(routers=2)
        clients = [fleet.submit(f"r{n}", PROMPT, 40) for n in range(3)]
        until_it_streams(fleet, clients[0])
        first = update(fleet, "w1")
        fleet.run_for(delay_s)
        second = update(fleet, "w2", seat=1)
        fleet.run_for(5.0)
        assert len(first) == len(second) == 1 and len(fleet.instances) == 4
        failed = [one for one in (*first, *second) if isinstance(one, TandemError)]
        assert all("change its weights at this moment" in str(one) for one in failed), failed
        assert len(set(weights_of(fleet).values())) == 1
        last = update(fleet, "w3", seat=1)
        fleet.run(*clients)
        fleet.run_for(3.0)
        assert isinstance(last[0], Updated) and set(weights_of(fleet).values()) == {"w3"}
        assert all(not router.core.unready() for router in fleet.routers)


def test_a_name_that_one_router_gives_is_told_once_and_the_other_takes_it() -> None:
    fleet = make_fleet(routers=2)
    router = fleet.router_process
    router.deliver(router.core.apply(router.core.fleet.weights.rename("step-7"), fleet.clock.now))
    fleet.run_for(10.0)
    assert {router.core.fleet.weights.version for router in fleet.routers} == {"step-7"}
    assert sum(kind == "SwitchWeights" for _, kind, _ in fleet.network.log) <= 2 * len(fleet.instances)
    update(fleet, "w1", version="step-8")
    with pytest.raises(Conflict):
        router.core.fleet.weights.rename("mine")


def test_a_pause_is_kept_after_an_update_that_succeeds_and_not_after_one_that_is_refused() -> None:
    fleet = make_fleet()
    update(fleet, "bad", keeps_pause=True)
    fleet.run(fleet.submit("before", PROMPT, 3))
    until_updated(fleet, "w1", keeps_pause=True)
    client = fleet.submit("r", PROMPT, 3)
    fleet.run_for(5.0)
    assert not client.ended
    go_on(fleet)
    fleet.run(client)
    assert client.token_ids == undisturbed(PROMPT, 3, weights=Digest("w1"))


@pytest.mark.parametrize("when", ["leaves first", "leaves during"])
def test_one_decode_instance_that_stays_beside_one_that_leaves_keeps_requests_waiting_and_refuses_none(when: str) -> None:
    fleet = make_fleet(1, 2)
    streaming(fleet, 60, name="long")
    leaving = next(
        name for name, one in fleet.instances.items() if one.scheduler.report().load.running_requests and "decode" in name
    )
    is_first = {"leaves during": False, "leaves first": True}[when]
    came = [] if is_first else update(fleet, "w1", "finish")
    fleet.run_for(0.0 if is_first else 0.5)
    if not is_first:
        leaving = next(member.info.id for member in fleet.router.fleet.members("decode") if not member.misfit)
    fleet.router_process.drain_instance(InstanceId(leaving))
    if is_first:
        fleet.run_for(0.1)
        came = update(fleet, "w1", "finish")
    fleet.run_for(0.1)
    client = fleet.submit("r", PROMPT, 3)
    fleet.turn_until(lambda: client.ended and bool(came))
    assert [ending.reason for ending in client.endings if isinstance(ending, Finished)] == ["length"]


def test_when_the_half_that_serves_is_lost_what_comes_waits_for_the_half_that_changes() -> None:
    fleet = make_fleet(1, 2)
    until_updated(fleet, "w0")
    long = [fleet.submit(f"long-{n}", PROMPT, 60) for n in range(4)]
    until_it_streams(fleet, long[0])
    came = update(fleet, "w1", "finish")
    fleet.turn_until(lambda: any("idle" in (member.misfit or "") for member in fleet.router.fleet.members("decode")))
    lost = next(member.info.id for member in fleet.router.fleet.members("decode") if not member.misfit)
    instance = fleet.kill(lost)
    fleet.connection_broken(lost)
    fleet.start(lost, instance.name.role)
    fleet.run_for(1.0)
    assert not came and instance.name.id in fleet.instances
    client = fleet.submit("r", PROMPT, 3)
    fleet.turn_until(lambda: client.ended and bool(came))
    assert [ending.reason for ending in client.endings if isinstance(ending, Finished)] == ["length"]
    assert client.token_ids == undisturbed(PROMPT, 3, weights=Digest("w1"))


def test_a_request_for_other_weights_is_refused_by_the_instance_and_resumed() -> None:
    """The router has not heard yet that the instance has changed."""
    fleet = make_fleet(1, 1)
    stale = {member: member.weights for member in fleet.router.fleet.members()}
    until_updated(fleet, "w1")
    weights = fleet.router.fleet.weights
    for member, former in stale.items():
        member.weights = former
    weights.target = TOY_WEIGHTS
    client = fleet.submit("r", PROMPT, 6)
    for member in stale:
        member.weights = Digest("w1")
    weights.target = Digest("w1")
    fleet.run(client)
    assert client.token_ids == undisturbed(PROMPT, 6, weights=Digest("w1"))
    assert "weights" in fleet.observer.resumes
