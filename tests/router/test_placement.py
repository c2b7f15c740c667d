"""The choice of instances for fleets of a few members, and late choice: which candidate decodes an attempt.

That is known when its prefill instance says so. The choice among few is held against one that looks at everybody; the choice
among many against what it promises.
"""

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from random import Random

import pytest
from msgspec.structs import replace

from common.config import Dispatch, RouterConfig
from common.errors import BadRequest, Preempted, Unavailable
from common.ids import Incarnation, InstanceId, Life, Role
from common.messages import Failed, Goodbye, InstanceInfo, Load, Register
from common.sampling_params import ANSWER_TOKENS
from router.attempts import Record
from router.cost import Demand
from router.fleet import Members
from router.members import Member
from router.placement import REASONS, Placer
from router.policies import CANDIDATES, SAMPLE, least_loaded
from router.timelines import ResumeReason
from tests.builders import instance
from tests.router.bench import (
    D0,
    D1,
    P0,
    P1,
    Bench,
    about_requests,
    cancels,
    close,
    generates,
    new_fleet,
    placer_of,
    probes,
    route,
)
from tests.router.fakes import beat, hear


def placer(fleet: Members, dispatch: Dispatch = "auto") -> Placer:
    return placer_of(fleet, RouterConfig(dispatch=dispatch))


DISPATCHES: tuple[Dispatch, ...] = ("auto", "colocated")


def chosen(
    fleet: Members,
    dispatch: Dispatch = "auto",
    prompt_tokens: int = 10,
    max_new_tokens: int = 5,
    avoid: Sequence[InstanceInfo] = (),
) -> tuple[str, str | None]:
    lives = {Life(info.id, info.incarnation) for info in avoid}
    choice = placer(fleet, dispatch).choose(Demand(prompt_tokens, max_new_tokens, avoid=lives))
    return choice.first.info.id, None if choice.decode is None else choice.decode.info.id


@pytest.fixture
def fleet() -> Members:
    return new_fleet(P0, D0)


def test_a_report_counts_what_all_routers_gave_and_what_is_assigned_later_comes_on_top() -> None:
    fleet = new_fleet(P0, P1, D0)
    member = next(member for member in fleet.members() if member.info.id == "p0")
    member.assigned_tokens = 30
    hear(fleet, P0, D0, now=1.0, load=Load(waiting_tokens=100))  # 30 are ours, 70 those of another router
    hear(fleet, P1, D0, now=1.0, load=Load(waiting_tokens=105))
    assert chosen(fleet) == ("p0", "d0")
    member.assigned_tokens += 10
    assert chosen(fleet) == ("p1", "d0")
    member.assigned_tokens -= 30
    assert chosen(fleet) == ("p0", "d0")


def test_a_pair_is_used_only_when_both_ends_report_the_link() -> None:
    fleet = new_fleet(P0, D0, D1, linked=False)
    hear(fleet, P0, D0, D1, now=1.0)
    assert chosen(fleet)[1] is None
    hear(fleet, D1, P0, now=1.0)
    assert chosen(fleet) == ("p0", "d1")


def test_a_link_to_a_former_incarnation_is_no_link(fleet: Members) -> None:
    successor = instance("d0", "decode", incarnation="2")
    fleet.register(Register(instance=successor), 1.0)
    hear(fleet, successor, P0, now=1.0)
    assert chosen(fleet) == ("d0", None)
    hear(fleet, P0, successor, now=1.0)
    assert chosen(fleet) == ("p0", "d0")


WORN = Load(pages_quarantined=17, pages_total=64)
WELL = Load(pages_quarantined=16, pages_total=64, oldest_step_s=30.0, oldest_transfer_s=30.0)


@pytest.mark.parametrize(
    ("load", "draining", "state"),
    [
        (Load(), True, "draining"),
        (Load(oldest_step_s=30.5), False, "stuck"),
        (Load(oldest_transfer_s=31.0), False, "stuck"),
        (WORN, False, "quarantined: 17 of 64"),
    ],
)
def test_an_instance_in_trouble_gets_nothing_new_and_a_fleet_of_such_is_unready(load: Load, draining: bool, state: str) -> None:
    fleet = new_fleet(P0, P1, D0, D1)
    hear(fleet, P0, D0, D1, load=load, draining=draining, now=1.0)
    hear(fleet, D0, P0, P1, load=load, draining=draining, now=1.0)
    assert chosen(fleet) == chosen(fleet) == ("p1", "d1") and placer(fleet).unready() == []
    hear(fleet, D1, P0, P1, load=load, draining=draining, now=1.0)
    with pytest.raises(Unavailable, match=state):
        chosen(fleet)
    for dispatch in DISPATCHES:
        (reason,) = placer(fleet, dispatch).unready()
        assert f"d0 is {state}" in reason and f"d1 is {state}" in reason and "no decode instance takes requests" in reason
    hear(fleet, D0, P0, P1, load=WELL, now=2.0)
    assert chosen(fleet) == ("p1", "d0") and placer(fleet).unready() == []


def test_a_fleet_whose_every_prefill_instance_has_quarantined_pages_serves_without_them_and_says_so(fleet: Members) -> None:
    hear(fleet, P0, D0, load=WORN, now=1.0)
    assert chosen(fleet) == ("d0", None) and placer(fleet).unready() == []
    assert ["p0 is quarantined: 17 of 64" in reason for reason in placer(fleet).degraded()] == [True]
    assert placer(fleet, "colocated").degraded() == []


def test_a_placement_names_the_next_best_decode_instances_too() -> None:
    others = [instance(f"d{number}", "decode") for number in range(6)]
    fleet = new_fleet(P0, *others)
    for info, tokens in zip(others, (50, 10, 60, 30, 20, 40), strict=True):
        hear(fleet, info, P0, load=Load(running_tokens=tokens), now=1.0)
    placement = placer(fleet).choose(Demand(10, 5))
    assert [member.info.id for member in placement.decodes] == ["d1", "d4", "d3", "d5"]
    assert placement.decode is placement.decodes[0]


def test_a_request_that_no_memory_could_ever_hold_is_the_clients_error(fleet: Members) -> None:
    capacity = D0.total_pages * D0.page_size
    assert chosen(fleet, prompt_tokens=capacity - 4, max_new_tokens=5) == ("p0", "d0")
    with pytest.raises(BadRequest) as raised:
        chosen(fleet, prompt_tokens=capacity - 4, max_new_tokens=6)
    assert raised.value.field == "max_tokens"


@pytest.mark.parametrize(("members", "reason"), [((), "no instance is live"), ((P0,), "no decode instance is live")])
def test_a_fleet_that_cannot_serve_says_why(members: tuple[InstanceInfo, ...], reason: str) -> None:
    fleet = new_fleet(*members)
    with pytest.raises(Unavailable, match=reason):
        chosen(fleet)
    assert [reason in said for said in placer(fleet).unready()] == [True]


def test_without_a_link_a_decode_instance_serves_alone_and_the_fleet_is_ready_but_degraded() -> None:
    fleet = new_fleet(P0, D0, linked=False)
    assert chosen(fleet) == ("d0", None) and placer(fleet).unready() == []
    assert placer(fleet).degraded() == ["no prefill instance has a ready link to a decode instance"]
    assert placer(fleet, "colocated").degraded() == []


def test_a_fleet_whose_prefill_instances_drain_is_ready_without_them(fleet: Members) -> None:
    fleet.drain(P0.id, 0.0)
    assert chosen(fleet) == ("d0", None)
    assert placer(fleet).unready() == []


# --- where it failed before ----------------------------------------------------------------------------------------------


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
    assert probes(bench.text(0, "a")) == {}
    assert list(probes(bench.text(1, "b"))) == ["p0"]
    assert probes(bench.text(2, "c")) == {}
    assert bench.probed(P0, None, 2.1, decode=OF_D1) == []
    assert bench.assigned() == {"p0": 0, "d0": 0, "d1": 23}
    assert about_requests(bench.leave(P0, 3.0)) == [], "it was handed off"


def test_a_silent_attempt_is_probed_at_its_prefill_instance_until_it_is_known_who_decodes() -> None:
    bench = Bench(P0, D0, D1, config=RouterConfig(heartbeat_s=100.0, dead_after_s=1000.0), places=False).serving()
    assert list(probes(bench.tick(2.0))) == ["p0"]
    assert bench.probed(P0, 0, 2.1, decode=OF_D1) == []
    assert list(probes(bench.tick(4.0))) == ["p0", "d1"]


def test_a_prefill_instance_that_has_handed_off_is_not_taken_for_one_that_knows_nothing() -> None:
    bench = Bench(P0, D0, D1, config=RouterConfig(heartbeat_s=100.0, dead_after_s=1000.0), places=False).serving()
    bench.text(0, "ab", now=0.1)
    for now in (2.1, 4.1):
        bench.tick(now)
        assert bench.probed(P0, None, now, decode=OF_D1) == []
    assert bench.observer.resumes == []


def test_an_attempt_of_which_its_prefill_instance_knows_nothing_at_all_is_resumed() -> None:
    bench = Bench(P0, D0, D1, config=RouterConfig(heartbeat_s=100.0, dead_after_s=1000.0), places=False).serving()
    bench.tick(2.0)
    assert bench.probed(P0, None, 2.1) == []
    bench.tick(2.1)  # its tokens are asked for again
    bench.tick(4.1)
    assert len(generates(bench.probed(P0, None, 4.1))) == 1
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


# --- few and many members -------------------------------------------------------------------------------------------------------


PAGE_TOKENS = instance("p", "prefill").page_size
ROLES: tuple[Role, ...] = ("prefill", "decode")
Outcome = tuple[str, tuple[str, ...]] | type[BadRequest] | type[Unavailable]


@dataclass(frozen=True, slots=True)
class Asked:
    dispatch: Dispatch
    prompt_tokens: int
    max_new_tokens: int
    avoid: Set[Life] = frozenset()


def reference(members: list[Member], asked: Asked) -> Outcome:
    """Look at everybody. `choose` says the rules in words."""

    def burden(member: Member) -> tuple[bool, float, int]:
        load, info = member.load, member.info
        here = load.waiting_tokens + load.running_tokens + member.assigned_tokens - member.assigned_before
        here = max(here, member.assigned_tokens)
        if member.info.role == "prefill":
            return False, (here + asked.prompt_tokens) / (info.total_pages * PAGE_TOKENS), member.chosen
        need = asked.prompt_tokens + min(asked.max_new_tokens, ANSWER_TOKENS)
        free = load.pages_free * PAGE_TOKENS - (member.assigned_tokens - member.assigned_before)
        free = min(free, info.total_pages * PAGE_TOKENS - member.assigned_tokens) - member.growth_tokens
        return free < need, (here + member.growth_tokens + need) / (info.total_pages * PAGE_TOKENS), member.chosen

    healthy = sorted((member for member in members if member.trouble is None), key=burden)
    sizes = {"prefill": asked.prompt_tokens, "decode": asked.prompt_tokens + asked.max_new_tokens - 1}
    able = [member for member in healthy if member.info.total_pages * PAGE_TOKENS >= sizes[member.info.role]]
    prefills = [member for member in able if member.info.role == "prefill" and asked.dispatch == "auto"]
    holders = [member for member in able if member.info.role == "decode"]
    fresh = [member for member in prefills if member.life not in asked.avoid]
    if asked.max_new_tokens == 1 and (fresh or (prefills and not holders)):
        return (fresh or prefills)[0].info.id, ()
    if not holders:
        decodes = [member for member in members if member.info.role == "decode"]
        stays = [member for member in decodes if not member.draining]
        large = [member for member in stays if member.info.total_pages * PAGE_TOKENS >= sizes["decode"]]
        return Unavailable if large or all(member.trouble for member in decodes) else BadRequest
    holders = [member for member in holders if member.life not in asked.avoid] or holders
    for prefill in fresh:
        if linked := [decode for decode in holders if decode in prefill.usable]:
            return prefill.info.id, tuple(decode.info.id for decode in linked[:CANDIDATES])
    return holders[0].info.id, ()


def outcome(fleet: Members, asked: Asked) -> Outcome:
    try:
        placement = placer(fleet, asked.dispatch).choose(Demand(asked.prompt_tokens, asked.max_new_tokens, avoid=asked.avoid))
    except (BadRequest, Unavailable) as error:
        return type(error)
    return placement.first.info.id, tuple(member.info.id for member in placement.decodes)


class Population:
    """A fleet whose members come, go, report, and get requests, by chance."""

    def __init__(self, seed: int, most: int) -> None:
        self.chance = Random(seed)
        self.fleet = Members(
            InstanceId(f"router-{seed}"), ["tcp://detokenizer:1"], RouterConfig(heartbeat_s=0.5, dead_after_s=3.0)
        )
        self._most = most

    @property
    def members(self) -> list[Member]:
        return list(self.fleet.members())

    def happen(self) -> None:
        role = self.chance.choice(ROLES)
        name, life = f"{role}-{self.chance.randrange(self._most)}", str(self.chance.randrange(3))
        info = instance(name, role, incarnation=life)
        pages = self.chance.choice((4, 16, 16, 64))
        self.fleet.register(Register(instance=replace(info, pools=(replace(info.pools[0], total_pages=pages),))), 0.0)
        for member in self.fleet.members():
            if not member.chosen:  # so that there are no ties
                self.fleet.candidates.chose(member)
        member = self.chance.choice(self.members)
        match self.chance.choice(("leave", "drain", "report", "report", "report", "link", "link", "link", "assign")):
            case "leave":
                self.fleet.goodbye(Goodbye(id=member.info.id, incarnation=member.info.incarnation), 1.0)
            case "drain":
                self.fleet.drain(member.info.id, 1.0)
            case "report":
                self.fleet.heartbeat(beat(member.info, load=self._load(member)), 0.0)
            case "link":
                for decode in self.fleet.members("decode"):
                    for prefill in self.fleet.members("prefill"):
                        (prefill.usable.add if self.chance.random() < 0.3 else prefill.usable.discard)(decode)
            case "assign":
                self.fleet.candidates.chose(member)
                member.assigned_tokens += self.chance.randrange(40)
                member.growth_tokens += self.chance.randrange(40)
        for prefill in self.fleet.members("prefill"):
            for decode in list(prefill.usable):
                if self.fleet.find(decode.life) is None:
                    prefill.usable.discard(decode)

    def _load(self, member: Member) -> Load:
        pages = member.info.total_pages
        return Load(
            waiting_tokens=self.chance.choice((0, 0, 7, 50)),
            running_tokens=self.chance.choice((0, 20, 50)),
            pages_free=self.chance.randrange(pages + 1),
            pages_quarantined=self.chance.choice((0, 0, 0, pages)),
            oldest_step_s=self.chance.choice((0.0, 0.0, 0.0, 99.0)),
        )

    def ask(self) -> Asked:
        lives = [member.life for member in self.members]
        return Asked(
            self.chance.choice(("auto", "auto", "auto", "colocated")),
            self.chance.choice((1, 10, 30, 60, 250, 300)),
            self.chance.choice((1, 1, 5, 20)),
            frozenset(self.chance.sample(lives, self.chance.randrange(len(lives) // 2 + 1))),
        )


def test_a_choice_among_few_is_the_best_for_everyone_who_looks_at_all() -> None:
    seen = Counter[object]()
    for seed in range(18):
        population = Population(seed, most=5)
        for _ in range(60):
            population.happen()
            asked = population.ask()
            expected = reference(population.members, asked)
            assert outcome(population.fleet, asked) == expected, (seed, asked)
            seen[expected if isinstance(expected, type) else len(expected[1])] += 1
            if all(member.trouble is not None for member in population.members):
                assert placer(population.fleet, asked.dispatch).unready()
    assert all(seen[kind] >= 10 for kind in (BadRequest, Unavailable, 0, 1, 2)), seen


# --- many members --------------------------------------------------------------------------------------------------------


def crowd(seed: int = 1, pages: Sequence[int] = (64,)) -> Members:
    """A hundred of each role, all linked."""
    fleet = Members(InstanceId(f"router-{seed}"), ["tcp://detokenizer:1"], RouterConfig(heartbeat_s=0.5, dead_after_s=3.0))
    for number in range(100):
        for role in ROLES:
            info = instance(f"{role}-{number:02}", role)
            pool = replace(info.pools[0], total_pages=pages[number % len(pages)])
            fleet.register(Register(instance=replace(info, pools=(pool,))), 0.0)
    for prefill in fleet.members("prefill"):
        for decode in fleet.members("decode"):
            prefill.usable.add(decode)
    return fleet


def test_a_choice_among_many_looks_at_a_sample_and_is_the_best_of_it() -> None:
    fleet = crowd()
    looked: list[Member] = []
    line = fleet.candidates.lines["prefill"].holding(10)

    def suits(member: Member) -> bool:
        looked.append(member)
        return True

    for member in line:
        member.assigned_tokens = 7 * len(member.info.id) + sum(map(ord, member.info.id)) % 13
    group = next(least_loaded(fleet.candidates, "prefill")(line, suits, Demand(10, 5), None))
    assert len(set(looked)) == len(looked) == SAMPLE < len(line)
    assert sorted(group, key=looked.index) == looked
    assert [member.tokens_to_do for member in group] == sorted(member.tokens_to_do for member in looked)


def test_the_same_seed_draws_the_same_and_everybody_is_drawn_at_some_time() -> None:
    def served(fleet: Members) -> list[str]:
        placed = [placer(fleet).choose(Demand(10, 5)) for _ in range(300)]
        return [member.info.id for one in placed for member in (one.first, *one.decodes[:1])]

    one, again, other = served(crowd(1)), served(crowd(1)), served(crowd(2))
    assert one == again != other
    assert len(set(one)) == 200


def test_loaded_members_of_a_crowd_get_less_than_idle_ones() -> None:
    fleet = crowd()
    loaded = {f"{role}-{number:02}" for role in ROLES for number in range(50)}
    for member in list(fleet.members()):
        if member.info.id in loaded:
            fleet.heartbeat(beat(member.info, load=Load(waiting_tokens=200, pages_free=64)), 0.0)
    placed = [placer(fleet).choose(Demand(10, 5)) for _ in range(300)]
    chosen = [name for one in placed if one.decode is not None for name in (one.first.info.id, one.decode.info.id)]
    assert len(chosen) == 600 and sum(name in loaded for name in chosen) < 30


def test_the_only_one_that_can_serve_is_found_in_a_crowd() -> None:
    fleet = crowd(pages=(4,) * 99 + (64,))
    assert outcome(fleet, Asked("auto", 100, 20)) == ("prefill-99", ("decode-99",))
    assert outcome(fleet, Asked("auto", 10, 1, frozenset(life(fleet, "prefill", but=3)))) == ("prefill-03", ())
    assert outcome(fleet, Asked("colocated", 5, 5, frozenset(life(fleet, "decode", but=3)))) == ("decode-03", ())
    assert outcome(fleet, Asked("auto", 250, 20)) is BadRequest
    for prefill in fleet.members("prefill"):
        if prefill.info.id != "prefill-42":
            for decode in list(prefill.usable):
                prefill.usable.discard(decode)
    assert {placed[0] for _ in range(20) if isinstance(placed := outcome(fleet, Asked("auto", 5, 5)), tuple)} == {"prefill-42"}


def life(fleet: Members, role: Role, but: int) -> list[Life]:
    """All lives of this role except that of one number."""
    return [member.life for member in fleet.members(role) if member.info.id != f"{role}-{but:02}"]


def test_a_fleet_in_trouble_names_some_of_its_members_and_counts_the_rest() -> None:
    fleet = crowd()
    for member in list(fleet.members("decode")):
        fleet.heartbeat(beat(member.info, load=Load(oldest_step_s=99.0)), 0.0)
    (reason,) = placer(fleet).unready()
    assert reason.count("is stuck") == REASONS and reason.endswith(f"and {100 - REASONS} more)")
