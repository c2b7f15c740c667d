"""Who is refused, and how strangers are remembered, as lists of messages.

Also a router that starts again and meets an odd instance first: real memberships ask, on a clock turned by hand, and the fleet is
whole again.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from common.config import RouterConfig
from common.errors import PeerRefused
from common.ids import ROUTER, Incarnation, InstanceId
from common.instance.membership import SELDOM_EVERY_S, Memberships
from common.messages import WIRE_VERSION, Counters, Heartbeat, InstanceInfo, Load, Refused, Register, Welcome
from router import fleet as router_fleet
from router.fleet import REFUSED_REMEMBERED, VOTE_S, Members
from tests.builders import instance
from tests.router.bench import D0, D1, P0
from tests.router.test_fleet import DEAD_AFTER_S, ids, new_fleet, refusal_of


@pytest.fixture
def fleet() -> Members:
    return new_fleet(P0, D0)


def d1(path: str, value: object) -> InstanceInfo:
    """d1 with another value at this path; of a tuple, in its first member."""

    def changed(struct: Any, name: str, *below: str) -> Any:
        if isinstance(struct, tuple):
            return (changed(struct[0], name, *below), *struct[1:])
        return replace(struct, **{name: changed(getattr(struct, name), *below) if below else value})

    info: InstanceInfo = changed(D1, *path.split("."))
    return info


def ranked(ranks: int, kv_heads: int, **changes: object) -> InstanceInfo:
    """d1 of so many ranks, which has so many KV heads in all; changes: of its last pool."""
    pool, rank = D1.pools[0], D1.ranks[0]
    layout = replace(pool.layout, kv_heads=max(1, kv_heads // ranks))
    pools = [replace(pool, layout=layout, first_head=rank * kv_heads // ranks) for rank in range(ranks)]
    pools[-1] = replace(pools[-1], **changes)
    model = replace(D1.model, kv_heads=kv_heads)
    return replace(D1, model=model, ranks=tuple(replace(rank, rank=n) for n in range(ranks)), pools=tuple(pools))


@pytest.mark.parametrize(
    ("asking", "names"),
    [
        (d1("id", "detokenizer"), "detokenizer"),
        (d1("id", "router"), "router"),
        (d1("id", "router-0123456789abcdef"), "router-"),
        (d1("id", "router-1.text-0"), "router"),
        (d1("id", ""), "name must be"),
        (d1("id", "a b"), "'a b'"),
        (d1("id", "d1\n"), "name must be"),
        (d1("id", "d" * 65), "1 to 64"),
        (d1("id", "é"), "letters"),
        (d1("incarnation", ""), "incarnation"),
        (d1("incarnation", "x" * 100_000), "incarnation"),
        (d1("pools.address", 2**63 - 1), f"address {2**63 - 1}"),
        (d1("pools.device", "cuda"), "device must be cpu or cuda:N, is 'cuda'"),
        (d1("pools.device", "cuda:-1"), "device must be"),
        (d1("pools.device", "tpu:0"), "device must be"),
        (d1("pools.device", "x" * 100_000), "device must be"),
        (d1("pools.wire", bytes(2**20 + 1)), "transport descriptors"),
        (d1("model.fingerprint", "g"), "model fingerprint is g"),
        (d1("model.dtype", "bfloat16"), "dtype is bfloat16"),
        (d1("model.vocab_size", 5), "vocabulary is 5"),
        (d1("model.context_tokens", 64), "context is 64"),
        (d1("pools.layout.page_size", 8), "page size is 8"),
        (d1("pools.layout.version", 9), "layout version is 9"),
        (d1("pools.layout.order", "head"), "page order is head"),
        (d1("pools.layout.kv_heads", 4), "KV layout is (2, 4, 4)"),
        (d1("pools.backend", "other"), "transport is other"),
        (d1("verifies_pages", True), "--verify-pages is on, but that of p0 in this fleet is off: give every instance the same"),
        (d1("holds_grammars", False), "--grammar is off, but that of p0 in this fleet is on: give every instance the same"),
        (d1("wire_version", WIRE_VERSION + 2), f"wire version {WIRE_VERSION + 2}"),
        (replace(ranked(2, 2), ranks=D1.ranks), "it has 1 ranks and 2 pools"),
        (ranked(2, 2, wire=bytes(2**20 + 1)), "transport descriptors"),
        (ranked(2, 2, total_pages=63), "rank 0 has 64, rank 1 has 63"),
        (ranked(2, 2, backend="pigeons"), "rank 1 has 'pigeons'"),
        (ranked(2, 2, layout=replace(D1.pools[0].layout, kv_heads=1, page_size=8)), "its ranks must have one KV layout"),
        (ranked(2, 2, first_head=0), "its rank 1 must hold 1 KV heads from 1 on, holds 1 from 0 on"),
        (ranked(2, 4, first_head=1), "its rank 1 must hold 2 KV heads from 2 on, holds 2 from 1 on"),
        (ranked(3, 8), "its 8 KV heads cannot be divided among 3 ranks"),
        (d1("model.kv_heads", 4), "its rank 0 must hold 4 KV heads from 0 on, holds 2 from 0 on"),
    ],
)
def test_an_instance_that_is_absurd_or_fits_neither_itself_nor_the_fleet_is_refused_and_told_why(
    fleet: Members, asking: InstanceInfo, names: str
) -> None:
    fleet.take_moves()
    to, reason = refusal_of(fleet, asking)
    assert names in reason and len(reason) <= 500
    assert to not in ("detokenizer", "router") and len(to) <= 129
    assert fleet.take_moves() == [(to, asking.inbox)]
    assert (ids(fleet), fleet.refusals) == (["p0", "d0"], 1)


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "page_size"])
def test_a_layout_of_huge_numbers_is_refused(field: str) -> None:
    asking = d1(f"pools.layout.{field}", 2**30)
    asking = replace(asking, pools=(replace(asking.pools[0], total_pages=2**31 - 1, address=2**62),))
    assert "64-bit" in refusal_of(new_fleet(), asking)[1]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("max_running", 0),
        ("model.context_tokens", 0),
        ("model.vocab_size", 2**31),
        ("model.kv_heads", -4),
        ("pools.total_pages", -1),
        ("pools.address", -1),
        ("pools.layout.kv_heads", 2**31),
        ("pools.first_head", -1),
    ],
)
def test_a_description_with_a_number_out_of_range_is_no_message(path: str, value: int) -> None:
    absurd = msgspec.msgpack.encode(Register(instance=d1(path, value)))
    with pytest.raises(msgspec.ValidationError, match=path.rpartition(".")[2]):
        msgspec.msgpack.decode(absurd, type=Register)


def test_a_newcomer_that_is_absurd_does_not_evict_the_member_of_its_name(fleet: Members) -> None:
    absurd = replace(d1("pools.device", "tpu"), id=D0.id, incarnation=Incarnation("2"))
    assert fleet.register(Register(instance=absurd), 1.0).lost == []
    assert ids(fleet) == ["p0", "d0"]


@pytest.mark.parametrize("inbox", ["", "tcp://", "tcp://host", "tcp://host:70000", "ipc:///tmp/x", "tcp://[::1]:5", "x" * 10_000])
def test_an_instance_without_a_valid_address_is_refused_where_people_see_it(inbox: str) -> None:
    fleet = new_fleet(P0)
    change = fleet.register(Register(instance=replace(D1, inbox=inbox)), 1.0)
    assert (change.sends, ids(fleet), fleet.refusals) == ([], ["p0"], 1)
    assert [address for _, address in fleet.take_moves()] == [P0.inbox, None]
    assert ["is not an address" in refusal.reason or len(refusal.reason) == 500 for refusal in fleet.refused.values()] == [True]


def test_an_instance_whose_vocabulary_is_not_the_routers_is_refused() -> None:
    fleet = Members(ROUTER, ["tcp://detokenizer:1"], RouterConfig(heartbeat_s=0.5, dead_after_s=DEAD_AFTER_S), vocab_size=5)
    assert "the router's model is 5" in refusal_of(fleet, P0)[1]
    fleet.register(Register(instance=d1("model.vocab_size", 5)), 1.0)
    assert ids(fleet) == ["d1"]


def test_a_neighbouring_wire_version_is_welcome() -> None:
    fleet = new_fleet(P0, replace(D0, wire_version=WIRE_VERSION + 1))
    assert ids(fleet) == ["p0", "d0"]


def test_when_everyone_has_left_another_model_may_come() -> None:
    fleet = new_fleet(P0)
    fleet.tick(DEAD_AFTER_S)
    fleet.register(Register(instance=d1("model.fingerprint", "g")), 5.0)
    assert fleet.model is not None and fleet.model.fingerprint == "g"


def test_the_fleet_remembers_a_bounded_number_of_strangers() -> None:
    fleet, stranger = new_fleet(P0), d1("pools.layout.page_size", 8)
    routes = dict(fleet.take_moves())
    for number in range(3 * REFUSED_REMEMBERED):
        fleet.register(Register(instance=replace(stranger, incarnation=Incarnation(str(number)))), 1.0)
        routes |= fleet.take_moves()
    assert len([address for address in routes.values() if address is not None]) == REFUSED_REMEMBERED + 1


def test_a_refusal_that_is_repeated_changes_no_address_unless_it_comes_from_another() -> None:
    fleet, stranger = new_fleet(P0), d1("pools.layout.page_size", 8)
    to, _ = refusal_of(fleet, stranger)
    assert fleet.take_moves() == [(P0.id, P0.inbox), (to, stranger.inbox)]
    refusal_of(fleet, stranger)
    assert fleet.take_moves() == []
    refusal_of(fleet, replace(stranger, inbox="tcp://127.0.0.1:77"))
    assert fleet.take_moves() == [(to, "tcp://127.0.0.1:77")]


# --- ranks -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_members_may_differ_in_their_number_of_ranks_if_their_models_have_as_many_heads(ranks: int) -> None:
    heads = D0.pools[0].layout.kv_heads
    fleet = new_fleet(P0, D0)
    fleet.register(Register(instance=ranked(ranks, heads)), 1.0)
    assert ids(fleet) == ["p0", "d0", "d1"]
    reason = refusal_of(new_fleet(P0, D0), ranked(ranks, 8 * heads))[1]
    assert f"its KV layout is (2, {8 * heads}, 4), but that of p0 in this fleet is (2, {heads}, 4)" in reason


AT = "tcp://127.0.0.1:7"
HEALED_S = 2 * SELDOM_EVERY_S


def good(number: int) -> InstanceInfo:
    return instance(f"d{number}", "decode")


def odd(number: int) -> InstanceInfo:
    info = instance(f"odd{number}", "decode")
    return replace(info, model=replace(info.model, context_tokens=64))


class World:
    """Instances that register and report at one router, each when it is due; mail takes no time. exited: those that gave up."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lives = 0
        self.instances: dict[InstanceId, Memberships] = {}
        self.exited: set[str] = set()
        self.new_router()

    def new_router(self, *first: InstanceInfo) -> None:
        """The former life is gone, and everybody knows. These ask before all others."""
        self.lives += 1
        self.fleet = Members(InstanceId(f"router-{self.lives}"), (), RouterConfig(heartbeat_s=0.5, dead_after_s=3.0))
        for each in self.instances.values():
            each.gone([next(iter(each)).name], self.now)
        for info in first:
            self._ask(info.id)

    def start(self, *infos: InstanceInfo) -> None:
        for info in infos:
            self.instances[info.id] = Memberships(info, [AT], 1e9, self.now)
            self._ask(info.id)

    def run_for(self, seconds: float) -> None:
        ends_s = self.now + seconds
        while self.now < ends_s:
            name = min(self.instances, key=lambda each: self.instances[each].next_deadline)
            self.now = max(self.now, self.instances[name].next_deadline)
            self.fleet.tick(self.now)
            self._ask(name)

    def members(self) -> set[str]:
        return {member.info.id for member in self.fleet.members()}

    def _ask(self, name: InstanceId) -> None:
        asking = self.instances[name]
        me = asking.info
        beat = Heartbeat(id=me.id, incarnation=me.incarnation, load=Load(), counters=Counters(), peers_version=0)
        for sent in next(iter(asking)).due(self.now, beat, lambda: None, 0, reachable=True):
            assert isinstance(sent.message, Register | Heartbeat)
            if isinstance(sent.message, Register):
                change = self.fleet.register(sent.message, self.now)
            else:
                change = self.fleet.heartbeat(sent.message, self.now)
            for send in change.sends:
                if isinstance(send.message, Welcome | Refused) and name in self.instances:
                    try:
                        asking.receive(send.message, self.now)
                    except PeerRefused:
                        self.exited.add(name)
                        del self.instances[name]


def names(infos: Sequence[InstanceInfo]) -> set[str]:
    return {info.id for info in infos}


@pytest.mark.parametrize(("most", "odds"), [(1, 1), (2, 1), (5, 1), (5, 3)])
def test_a_fleet_that_served_before_is_whole_again_soon_though_newcomers_that_differ_came_first(most: int, odds: int) -> None:
    world, fleet, others = World(), [good(number) for number in range(most)], [odd(number) for number in range(odds)]
    world.start(*fleet)
    world.run_for(60.0)
    world.new_router()
    for other in others:
        world.start(other)
    assert world.members() & names(others)
    world.run_for(HEALED_S)
    assert world.members() == names(fleet) and not world.exited & names(fleet)
    world.new_router(*others)
    world.run_for(HEALED_S)
    if most > odds:
        assert world.members() == names(fleet), "though a former life welcomed the others too"
    world.run_for(60.0)
    assert not world.exited & names(fleet)


def test_those_that_no_life_of_the_router_welcomed_push_nobody_out_and_exit() -> None:
    world, fleet, crowd = World(), [good(0)], [odd(number) for number in range(9)]
    world.start(*fleet, *crowd)
    world.run_for(60.0)
    assert world.members() == names(fleet) and world.exited == names(crowd)


def test_one_that_is_left_of_a_former_fleet_pushes_no_larger_new_one_out() -> None:
    world, former, fleet = World(), odd(0), [good(number) for number in range(3)]
    world.start(former)
    world.run_for(60.0)
    kept = world.instances.pop(former.id)
    world.new_router()
    kept.gone([next(iter(kept)).name], world.now)
    world.start(*fleet)
    world.instances[former.id] = kept
    world.run_for(60.0)
    assert world.members() == names(fleet) and not world.exited


def test_equal_halves_do_not_push_each_other_out() -> None:
    world, halves = World(), ([good(number) for number in range(3)], [odd(number) for number in range(3)])
    for half in halves:
        world.new_router()
        world.instances.clear()
        world.start(*half)
    world.instances |= {info.id: Memberships(info, [AT], 1e9, world.now) for info in halves[0]}
    for each in world.instances.values():
        next(iter(each)).receive(Welcome(router=InstanceId("router-0"), detokenizers=(), heartbeat_s=0.5), world.now)
    world.new_router(*halves[1])
    seen = set[frozenset[str]]()
    for _ in range(60):
        world.run_for(1.0)
        seen.add(frozenset(world.members()))
    assert seen == {frozenset(names(halves[1]))} and not world.exited


def test_a_vote_counts_once_for_a_while_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def outvoted(votes: Sequence[tuple[int, float]]) -> bool:
        """Whether three members are pushed out, after these welcome ones asked: each with a number, and when."""
        members = Members(InstanceId("router"), (), RouterConfig(heartbeat_s=0.5, dead_after_s=3.0))
        for number in range(3):
            members.register(Register(instance=good(number)), 0.0)
        for number, at_s in votes:
            members.register(Register(instance=odd(number), was_welcome=True), at_s)
        return all(member.info.id.startswith("odd") for member in members.members())

    assert outvoted([(0, 0.0), (1, 1.0), (2, 2.0)])
    assert not outvoted([(0, 0.0), (0, 1.0), (1, 2.0), (1, 3.0)]), "one instance has one vote"
    assert not outvoted([(0, 0.0), (1, 1.0), (2, 0.0 + VOTE_S)]), "the first vote is too old"
    assert outvoted([(0, 0.0), (1, 1.0), (0, 2.0), (2, 0.5 + VOTE_S)]), "it was given again"
    monkeypatch.setattr(router_fleet, "VOTES_COUNTED", 2)
    assert not outvoted([(0, 0.0), (1, 1.0), (2, 2.0)]), "only the newest are kept"
