"""The choice among few is held against one that looks at everybody; the choice among many against what it promises."""

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from random import Random

from msgspec.structs import replace

from common.config import Dispatch, RouterConfig
from common.errors import BadRequest, Unavailable
from common.ids import InstanceId, Life, Role
from common.messages import Goodbye, Load, Register
from common.sampling_params import ANSWER_TOKENS
from router.cost import Demand
from router.fleet import Members
from router.members import Member
from router.placement import REASONS, Placer
from router.policies import CANDIDATES, SAMPLE, least_loaded
from tests.builders import instance
from tests.router.bench import placer_of
from tests.router.fakes import beat

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


def placer(fleet: Members, dispatch: Dispatch = "auto") -> Placer:
    return placer_of(fleet, RouterConfig(dispatch=dispatch))


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
