"""LoRA adapters that come and go while a fleet serves, and what is refused instead."""

from typing import Literal
from unittest import mock

import pytest

from common.config import RouterConfig
from common.errors import BadRequest, NotFound, TandemError, Unavailable
from common.ids import Digest, InstanceId, ServingRole
from common.messages import Finished
from common.messages.variants import FIRST_VERSION, AdapterEntry, ReadAdapter
from common.step_cost import StepCost
from router.adapters import READ_S, ReplaceMode
from router.weights import FleetWeights
from tests.engine.toy import TOY_ADAPTERS, ToyExecutor
from tests.life.client import Client
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet, World
from tests.life.ranks import ToySize
from tests.life.test_weights import die, engine_of, until_it_streams, update

SIZE = ToySize(rows=8, cost=StepCost(0.02, 0.0, 0.0))
PROMPT = [100 + n for n in range(19)]


def make_fleet(prefill: int = 2, decode: int = 2, routers: int = 1, ranks: int = 1) -> ToyFleet:
    """Its clock has gone for a while, as that of a host."""
    of_roles: dict[Literal["prefill", "decode"], int] = {"prefill": ranks, "decode": ranks}
    world = World()
    world.clock.now = 5_000.0
    return ToyFleet(prefill, decode, RouterConfig(request_timeout_s=300.0), SIZE, world, routers, of_roles)


def begin_load(
    fleet: ToyFleet,
    name: str,
    folder: str,
    *,
    is_pinned: bool = False,
    replaces: bool = False,
    mode: ReplaceMode = "finish",
    seat: int = 0,
) -> list[AdapterEntry | TandemError]:
    return fleet.adapt(lambda adapters: adapters.load(name, folder, is_pinned=is_pinned, replaces=replaces, mode=mode), seat)


def load(fleet: ToyFleet, name: str, folder: str, *, is_pinned: bool = False, replaces: bool = False) -> AdapterEntry:
    came = begin_load(fleet, name, folder, is_pinned=is_pinned, replaces=replaces)
    fleet.turn_until(lambda: bool(came))
    (outcome,) = came
    if isinstance(outcome, TandemError):
        raise outcome
    return outcome


def unload(fleet: ToyFleet, name: str, seat: int = 0) -> list[AdapterEntry | TandemError]:
    return fleet.adapt(lambda adapters: adapters.unload(name), seat)


def load_all(fleet: ToyFleet, count: int) -> None:
    """Adapters n0, n1 and so on, from a0, a1 and so on."""
    for n in range(count):
        load(fleet, f"n{n}", f"a{n}")


def reload(fleet: ToyFleet, name: str) -> AdapterEntry | TandemError:
    came = fleet.adapt(lambda adapters: adapters.reload(name))
    fleet.turn_until(lambda: bool(came))
    return came[0]


def streaming(fleet: ToyFleet, adapter: str, tokens: int = 60, name: str = "s") -> Client:
    client = fleet.submit(name, PROMPT, tokens, adapter)
    until_it_streams(fleet, client)
    return client


def names(fleet: ToyFleet, seat: int = 0) -> list[str]:
    return [entry.name for entry in fleet.routers[seat].core.fleet.adapters.entries()]


def held(fleet: ToyFleet) -> list[set[Digest]]:
    """What each rank of each instance holds."""
    ranks = [
        rank for instance in fleet.instances.values() for rank in (instance.rank, *(each.rank for each in instance.followers))
    ]
    return [engine.held for rank in ranks if isinstance(engine := rank.engine, ToyExecutor)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_get_their_own_adapter_and_no_kv_of_another_one(ranks: int) -> None:
    fleet = make_fleet(1, 1, ranks=ranks)
    load(fleet, "red", "a1")
    load(fleet, "blue", "a2")
    for adapter, digest in (("red", "a1"), ("blue", "a2"), ("", ""), ("red", "a1")):  # one after the other, so that caches meet
        client = fleet.submit(f"{adapter}-{fleet.clock.now}", PROMPT, 20, adapter)
        fleet.run(client)
        assert client.token_ids == undisturbed(PROMPT, 20, adapter=Digest(digest))
        assert client.answers[0].versions == [(0, f"{FIRST_VERSION}+{digest}" if digest else FIRST_VERSION)]
    together = [fleet.submit(f"t{n}", PROMPT, 30, ("red", "blue", "")[n % 3]) for n in range(6)]
    fleet.run(*together)
    for n, client in enumerate(together):
        assert client.token_ids == undisturbed(PROMPT, 30, adapter=Digest(("a1", "a2", "")[n % 3]))


def test_a_request_for_an_adapter_that_is_not_there_is_refused_by_name() -> None:
    fleet = make_fleet(1, 1)
    with pytest.raises(NotFound, match="'red' was unloaded"):
        fleet.submit("r", PROMPT, 4, "red")
    load(fleet, "red", "a1")
    (gone,) = unload(fleet, "blue")
    assert isinstance(gone, BadRequest) and "'blue'" in str(gone)
    with pytest.raises(BadRequest, match="loaded already, from a1"):
        load(fleet, "red", "a2")


@pytest.mark.parametrize(
    ("where", "reads", "reason"),
    [
        ("decode-1", "bad a1", "decode-1: bad a1"),
        ("prefill-1", "a1-other", "not the same everywhere: .*a1-other on prefill-1"),
    ],
    ids=["cannot be used", "differs"],
)
def test_an_adapter_that_one_instance_cannot_use_or_whose_files_differ_between_hosts_is_on_none(
    where: str, reads: str, reason: str
) -> None:
    fleet = make_fleet()
    odd = engine_of(fleet, where)
    whole, odd.perform = odd.perform, lambda task: whole(ReadAdapter(reads))  # type: ignore[method-assign]
    with pytest.raises(BadRequest, match=reason):
        load(fleet, "red", "a1")
    fleet.run_for(2.0)
    assert names(fleet) == [] and held(fleet) == [set()] * 4


def test_an_adapter_that_only_some_ranks_read_alike_is_held_by_none_of_them() -> None:
    """One that all hold already stays."""
    fleet = make_fleet(1, 1, ranks=2)
    load(fleet, "red", "a1")
    (follower,) = fleet.instances["prefill-0"].followers
    odd = follower.rank.engine
    assert isinstance(odd, ToyExecutor)
    whole = odd.perform
    for folder in ("a2-other", "a1", "bad a3"):
        odd.perform = lambda task, folder=folder: whole(ReadAdapter(folder))  # type: ignore[method-assign,misc]
        with pytest.raises(TandemError):
            load(fleet, "blue", "a2")
        fleet.run_for(2.0)
        assert names(fleet) == ["red"] and held(fleet) == [{"a1"}] * 4


def test_the_adapter_that_was_used_longest_ago_makes_room_and_is_read_again_when_it_is_asked_for() -> None:
    fleet = make_fleet(1, 1)
    for n in range(TOY_ADAPTERS):
        load(fleet, f"n{n}", f"a{n}", is_pinned=n == 0)
        fleet.run(fleet.submit(f"r{n}", PROMPT, 2, f"n{n}"))
    fleet.run(fleet.submit("again", PROMPT, 2, "n1"))
    load(fleet, "new", "a9")
    assert held(fleet) == [{"a0", "a1", "a9"}] * 2, "n0 is pinned, and n1 was used later than n2"
    reload(fleet, "n2")
    client = fleet.submit("back", PROMPT, 9, "n2")
    fleet.run(client)
    assert client.token_ids == undisturbed(PROMPT, 9, adapter=Digest("a2"))
    assert held(fleet) == [{"a0", "a9", "a2"}] * 2 or held(fleet) == [{"a0", "a1", "a2"}] * 2


def test_when_requests_have_all_places_another_adapter_is_refused_by_name() -> None:
    fleet = make_fleet(1, 1)
    load_all(fleet, TOY_ADAPTERS)
    running = [fleet.submit(f"r{n}", PROMPT, 60, f"n{n}") for n in range(TOY_ADAPTERS)]
    with pytest.raises(TandemError, match="--max-loaded-loras"):
        load(fleet, "new", "a9")
    fleet.run(*running)
    for n, client in enumerate(running):
        assert client.token_ids == undisturbed(PROMPT, 60, adapter=Digest(f"a{n}"))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("name", "role"), [("prefill-1", "decode"), ("decode-1", "prefill")])
def test_an_adapter_is_loaded_while_an_instance_is_told_to_take_another_role(name: str, role: ServingRole, ranks: int) -> None:
    for turns in (0, 1, 3, 6, 12, 25):
        fleet = make_fleet(2, 3, ranks=ranks)
        came, roles = begin_load(fleet, "red", "a1"), list[object]()
        for _ in range(turns):
            fleet.clock.turn()
        fleet.router_process.tell_role(InstanceId(name), role, roles.append)
        fleet.turn_until(lambda came=came, roles=roles: bool(came and roles), 30.0)  # type: ignore[misc]
        assert isinstance(came[0], AdapterEntry), came
        fleet.run_for(2.0)
        assert held(fleet) == [{"a1"}] * len(held(fleet))


def test_an_adapter_that_is_unloaded_while_it_is_read_again_does_not_come_back() -> None:
    fleet = make_fleet(1, 1)
    load_all(fleet, TOY_ADAPTERS + 1)
    again = fleet.adapt(lambda adapters: adapters.reload("n0"))
    gone = unload(fleet, "n0")
    fleet.turn_until(lambda: bool(again and gone))
    assert isinstance(again[0], NotFound) and isinstance(gone[0], AdapterEntry)
    assert "n0" not in names(fleet)
    fleet.turn_until(lambda: all(Digest("a0") not in each for each in held(fleet)))


def test_a_request_for_an_evicted_adapter_whose_files_are_being_written_may_try_again() -> None:
    fleet = make_fleet(1, 1)
    load_all(fleet, TOY_ADAPTERS + 1)
    odd = engine_of(fleet, "decode-0")
    whole, odd.perform = odd.perform, lambda task: whole(ReadAdapter("bad a0"))  # type: ignore[method-assign]
    first = reload(fleet, "n0")
    assert isinstance(first, Unavailable) and "'n0' was evicted" in str(first) and "bad a0" in str(first)
    odd.perform = whole  # type: ignore[method-assign]
    assert isinstance(reload(fleet, "n0"), AdapterEntry) and "a0" in held(fleet)[0]


def test_an_adapter_that_a_pinned_name_has_too_is_not_evicted_by_its_other_name() -> None:
    fleet = make_fleet(1, 1)
    load(fleet, "pinned", "a0", is_pinned=True)
    load(fleet, "alias", "a0")
    for n in range(1, TOY_ADAPTERS + 1):
        load(fleet, f"n{n}", f"a{n}")
    entries = {entry.name: entry for entry in fleet.router.fleet.adapters.entries()}
    assert entries["alias"].is_loaded and not entries["n1"].is_loaded


def test_an_adapter_that_comes_back_by_another_name_does_not_hold_up_its_unloading() -> None:
    fleet = make_fleet(1, 1)
    load(fleet, "red", "a1")
    stream = streaming(fleet, "red", 30)
    gone = unload(fleet, "red")
    load(fleet, "blue", "a1")
    fleet.run(stream)
    fleet.turn_until(lambda: bool(gone))
    assert isinstance(gone[0], AdapterEntry) and names(fleet) == ["blue"]


def test_the_place_of_a_replaced_adapter_is_free_before_another_one_is_read() -> None:
    """Another one comes in the moment in which the router hears that the last request with the former one is over."""
    fleet = make_fleet(1, 1)
    load_all(fleet, TOY_ADAPTERS)
    stream = streaming(fleet, "n0", 30)
    load(fleet, "n0", "a7", replaces=True)
    fleet.run(stream)
    assert Digest("a0") in held(fleet)[0]
    load(fleet, "new", "a8")
    assert {"n0", "new"} < set(names(fleet)) and {Digest("a7"), Digest("a8")} < held(fleet)[0]


def test_an_adapter_is_replaced_with_all_places_in_use_while_new_requests_for_it_wait() -> None:
    """As one that was evicted is: what they wait for is `reload`."""
    fleet = make_fleet(1, 1)
    load_all(fleet, TOY_ADAPTERS)
    running = [fleet.submit(f"r{n}", PROMPT, 60, f"n{n}") for n in range(TOY_ADAPTERS)]
    came = begin_load(fleet, "n0", "a9", replaces=True)
    with pytest.raises(Unavailable, match="not loaded at this moment"):
        fleet.submit("early", PROMPT, 9, "n0")
    assert isinstance(reload(fleet, "n0"), AdapterEntry) and came
    late = fleet.submit("late", PROMPT, 9, "n0")
    fleet.run(*running, late)
    assert late.token_ids == undisturbed(PROMPT, 9, adapter=Digest("a9"))
    for n, client in enumerate(running):
        assert client.token_ids == undisturbed(PROMPT, 60, adapter=Digest(f"a{n}"))


def test_an_adapter_in_use_whose_place_does_not_get_free_in_time_stays() -> None:
    fleet = make_fleet(1, 1)
    load_all(fleet, TOY_ADAPTERS)
    running = [fleet.submit(f"r{n}", PROMPT, 60, f"n{n}") for n in range(TOY_ADAPTERS)]
    adapters = fleet.routers[0].core.fleet.adapters
    came = begin_load(fleet, "n0", "a9", replaces=True)
    adapters.proceed(fleet.clock.now + READ_S + 1.0)
    assert isinstance(came[0], Unavailable) and "--max-loaded-loras" in str(came[0])
    late = fleet.submit("late", PROMPT, 9, "n0")
    fleet.run(*running, late)
    assert late.token_ids == undisturbed(PROMPT, 9, adapter=Digest("a0"))


def test_a_request_whose_adapter_is_not_loaded_is_not_parked_without_it_while_the_weights_settle() -> None:
    fleet = make_fleet(1, 1)
    load_all(fleet, TOY_ADAPTERS + 1)
    (evicted,) = (each.name for each in fleet.routers[0].core.fleet.adapters.entries() if not each.is_loaded)
    with mock.patch.object(FleetWeights, "is_settling", True), pytest.raises(Unavailable, match="not loaded at this moment"):
        fleet.submit("r", PROMPT, 4, evicted)


def test_more_different_adapters_than_a_batch_can_have_wait_for_each_other_and_none_starves() -> None:
    fleet = make_fleet(1, 1)
    load_all(fleet, 3)
    clients = [fleet.submit(f"r{n}", PROMPT, 20, f"n{n % 3}") for n in range(12)]
    fleet.run(*clients)
    for n, client in enumerate(clients):
        assert client.token_ids == undisturbed(PROMPT, 20, adapter=Digest(f"a{n % 3}"))


@pytest.mark.parametrize("mode", ["finish", "recompute", "abort"])
def test_what_becomes_of_streams_whose_adapter_is_replaced(mode: ReplaceMode) -> None:
    fleet = make_fleet()
    load(fleet, "red", "a1")
    streams = [streaming(fleet, "red", name=f"s{n}") for n in range(4)]
    bystander = streaming(fleet, "", name="base")
    came = begin_load(fleet, "red", "a2", replaces=True, mode=mode)
    fleet.turn_until(lambda: bool(came))
    late = fleet.submit("late", PROMPT, 10, "red")
    fleet.run(*streams, bystander, late)
    assert late.token_ids == undisturbed(PROMPT, 10, adapter=Digest("a2"))
    assert bystander.token_ids == undisturbed(PROMPT, 60)
    for client in streams:
        tokens, versions = client.token_ids, client.answers[0].versions
        if mode == "abort":
            assert client.endings == [Finished(reason="cancelled")]
        elif mode == "finish":
            assert tokens == undisturbed(PROMPT, 60, adapter=Digest("a1")) and len(versions) == 1
        else:
            (_, _), (at, version) = versions
            assert version == f"{FIRST_VERSION}+a2" and tokens[:at] == undisturbed(PROMPT, at, adapter=Digest("a1"))
            assert tokens[at:] == undisturbed(PROMPT + tokens[:at], 60 - at, adapter=Digest("a2"))
    fleet.turn_until(lambda: held(fleet) == [{"a2"}] * 4)


def test_an_adapter_is_unloaded_when_its_streams_are_over_and_no_new_one_begins() -> None:
    fleet = make_fleet()
    load(fleet, "red", "a1")
    stream = streaming(fleet, "red")
    came = unload(fleet, "red")
    with pytest.raises(NotFound):
        fleet.submit("late", PROMPT, 4, "red")
    fleet.run_for(0.3)
    assert not came and held(fleet) == [{"a1"}] * 4
    fleet.run(stream)
    assert stream.token_ids == undisturbed(PROMPT, 60, adapter=Digest("a1"))
    fleet.turn_until(lambda: bool(came))
    assert held(fleet) == [set()] * 4 and names(fleet) == []


def test_a_successor_of_an_instance_gets_the_adapters_of_the_fleet_and_streams_go_on() -> None:
    fleet = make_fleet(1, 2)
    load(fleet, "red", "a1")
    streams = [streaming(fleet, "red", name=f"s{n}") for n in range(4)]
    for name, role in (("decode-0", "decode"), ("decode-1", "decode"), ("prefill-0", "prefill")):
        die(fleet, name)
        fleet.start(name, role)  # type: ignore[arg-type]
        fleet.run_for(1.0)
    fleet.run(*streams)
    for client in streams:
        assert client.token_ids == undisturbed(PROMPT, 60, adapter=Digest("a1"))
    assert held(fleet) == [{"a1"}] * 3


def test_a_router_that_begins_anew_and_one_beside_it_know_the_adapters() -> None:
    fleet = make_fleet(1, 1, routers=2)
    fleet.turn_until(lambda: all(len(list(router.core.fleet.members())) == 2 for router in fleet.routers))
    load(fleet, "red", "a1")
    fleet.turn_until(lambda: names(fleet, seat=1) == ["red"])
    fleet.kill_router(0)
    fleet.start_router(0)
    fleet.turn_until(lambda: names(fleet, seat=0) == ["red"])
    (gone,) = [unload(fleet, "red", seat=1)]
    fleet.turn_until(lambda: bool(gone))
    fleet.turn_until(lambda: names(fleet, seat=0) == [] and held(fleet) == [set()] * 2)


def test_the_weights_change_under_streams_with_adapters() -> None:
    fleet = make_fleet(1, 1)
    load(fleet, "red", "a1")
    stream = streaming(fleet, "red", 40)
    came = update(fleet, "w1", version="step-1")
    fleet.run(stream)
    assert len(came) == 1 and [version for _, version in stream.answers[0].versions] == [f"{FIRST_VERSION}+a1", "step-1+a1"]
    (_, _), (at, _) = stream.answers[0].versions
    tokens = stream.token_ids
    assert tokens[at:] == undisturbed(PROMPT + tokens[:at], 40 - at, weights=Digest("w1"), adapter=Digest("a1"))


def test_an_instance_reads_its_own_adapters_before_it_joins() -> None:
    fleet = make_fleet(1, 1)
    fleet.size = ToySize(rows=8, cost=StepCost(0.02, 0.0, 0.0), adapters={"red": "a1"})
    fleet.start("decode-9", "decode")
    fleet.turn_until(lambda: names(fleet) == ["red"])
    fleet.turn_until(lambda: held(fleet) == [{"a1"}] * 3)
    client = fleet.submit("r", PROMPT, 10, "red")
    fleet.run(client)
    assert client.token_ids == undisturbed(PROMPT, 10, adapter=Digest("a1"))


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ({"red": "a2"}, "the adapter red of decode-9 has the digest a2, and that of this fleet a1"),
        ({"blue": "a2", "green": "a3", "grey": "a4"}, "with blue, green, grey of decode-9 the fleet has more than 3 adapters"),
    ],
    ids=["another one of a name", "more than there is room for"],
)
def test_an_instance_whose_own_adapters_do_not_fit_those_of_the_fleet_is_refused_by_name(
    own: dict[str, str], reason: str
) -> None:
    fleet = make_fleet(1, 1)
    fleet.size = ToySize(rows=8, cost=StepCost(0.02, 0.0, 0.0), adapters={"red": "a1"})
    fleet.start("decode-1", "decode")
    fleet.turn_until(lambda: held(fleet) == [{"a1"}] * 3)
    fleet.size = ToySize(rows=8, cost=StepCost(0.02, 0.0, 0.0), adapters=own)
    fleet.start("decode-9", "decode")
    fleet.run_for(10.0)
    assert "decode-9" not in {member.info.id for member in fleet.router.fleet.members()}
    assert any(reason in refused.reason for refused in fleet.router.fleet.refused.values())


def test_replacing_an_adapter_concerns_requests_of_its_name_alone() -> None:
    fleet = make_fleet(1, 1)
    load(fleet, "red", "a1")
    load(fleet, "blue", "a1")
    red, blue = streaming(fleet, "red", name="red"), streaming(fleet, "blue", name="blue")
    begin_load(fleet, "red", "a2", replaces=True, mode="abort")
    fleet.run(red, blue)
    assert red.endings == [Finished(reason="cancelled")]
    assert blue.token_ids == undisturbed(PROMPT, 60, adapter=Digest("a1"))
