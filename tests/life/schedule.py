"""A schedule of a simulation: the fleet, what clients ask for, what fails and when, all drawn from one seed.

Owns the draw and its ranges. Pure data: the same seed is the same schedule. Knows no fleet.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import get_args

from common.config import Dispatch, PolicyName
from common.drafting import Drafting
from common.ids import DETOKENIZER, ROUTER, Role, ServingRole
from common.sampling_params import ANSWER_TOKENS
from common.step_cost import StepCost
from router.peering import AT_LEAST
from simulation.network import KNOCKS_S
from tests.life.asks import Ask, draw_asks, with_embeddings, with_extras, with_owners, with_shared_prompts
from tests.life.deeds import (
    ChangeRole,
    Deed,
    Flush,
    Hang,
    HangRank,
    Kill,
    KillDetokenizer,
    KillRank,
    KillRouter,
    Leave,
    Part,
    PartRanks,
    Slow,
    Stall,
    Supplant,
    Watch,
)
from tests.life.ranks import ToySize
from tests.life.weather import Chances

WINDOW_S = 12.0
"""Faults begin within it; the weather is bad during it."""
FEW_PEERS = 2
FEWEST_PAGES, MOST_PAGES = 19, 32
"""The fewest hold the longest prompt with the longest answer."""
LONGEST_HANG_S = 22.0
"""So long that what the instance had in flight must not go on."""
SLOW_STEPS = StepCost(step_s=0.25, chunk_token_s=0.001, decode_row_s=0.001)
"""With which an answer of 30 tokens outlives its router by far, if nobody ends it."""
TRIGGERS = (
    *("Generate", "Reserve", "Grant", "Decline", "Placed", "Handoff", "TokenBatch"),
    *("Renew", "Renewed", "Withdraw", "Cancel", "Probe"),
)
"""Kinds of letters upon which a fault may strike, so that it strikes within the protocol."""
TEXT_TRIGGERS = ("ExpectAnswer", "TokenBatch", "TextBatch", "Repeat")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """At a time; with a trigger, upon the first letter of that kind from then on."""

    at_s: float
    deed: Deed
    trigger: str | None = None


@dataclass(frozen=True, kw_only=True)
class Rough:
    """Chances for writes. by_hand: they move only when their writer polls. buffered: they are taken in when their reader does."""

    slow: float
    fails: float
    unproven: float
    by_hand: float
    buffered: bool


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """heartbeat_s: of the instances. peers_per_instance: few, or more than there are. survivor: a decode
    instance that nothing befalls but the weather, if there is one. only_routers: nothing befalls anybody else. strangers: so many
    that serve another model ask first at a router that starts again. policy: of both roles. ranks: of each prefill and each
    decode instance."""

    seed: int
    prefill: int
    decode: int
    size: ToySize
    heartbeat_s: float
    peers_per_instance: int
    chances: Chances
    rough: Rough
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    survivor: str | None
    routers: int = 1
    detokenizers: int = 1
    only_routers: bool = False
    strangers: int = 0
    policy: PolicyName = "least_loaded"
    dispatch: Dispatch = "auto"
    ranks: tuple[int, int] = (1, 1)


def draw_schedule(seed: int) -> Schedule:
    schedule = _with_routers(_draw(seed), Random(f"routers {seed}"))
    asks = with_embeddings(with_extras(schedule.asks, Random(f"extras {seed}")), Random(f"embeddings {seed}"))
    asks = with_shared_prompts(asks, Random(f"shared {seed}"))
    schedule = _with_owners(replace(schedule, asks=asks), Random(f"owners {seed}"))
    text_faults = _text_faults(schedule, Random(f"detokenizer {seed}"))
    slowness, returns = _slowness(schedule, Random(f"slow {seed}")), _returns(schedule, Random(f"returns {seed}"))
    watches = _watches(schedule, Random(f"watches {seed}"))
    flushes = _flushes(schedule, Random(f"flushes {seed}"))
    roles = _roles(schedule, Random(f"roles {seed}"))
    faults = (*schedule.faults, *text_faults, *slowness, *returns, *watches, *flushes, *roles)
    strangers = Random(f"strangers {seed}").choice((0, 0, 1, 3))
    schedule = replace(schedule, faults=faults, strangers=strangers)
    schedule = _with_caches(_with_grammars(schedule, Random(f"grammars {seed}")), Random(f"caches {seed}"))
    return _with_drafts(_with_ranks(schedule, Random(f"ranks {seed}")), Random(f"drafts {seed}"))


def _with_drafts(schedule: Schedule, random: Random) -> Schedule:
    """Half of them: decode instances draft tokens."""
    return replace(schedule, size=replace(schedule.size, drafting=random.choice((None, Drafting()))))


def _draw(seed: int) -> Schedule:
    """With one router."""
    random = Random(seed)
    prefill, decode = random.randint(2, 4), random.randint(2, 4)
    peers_per_instance = Random(f"partners {seed}").choice((64, 64, FEW_PEERS))
    if peers_per_instance == FEW_PEERS:
        prefill += AT_LEAST  # otherwise every prefill instance is among the favourites of each decode instance
    survivor = "decode-0" if random.random() < 0.8 else None
    names = [f"prefill-{n}" for n in range(prefill)] + [f"decode-{n}" for n in range(decode)]
    victims = [name for name in names if name != survivor]
    return Schedule(
        seed=seed,
        prefill=prefill,
        decode=decode,
        size=_size(random, verify_pages=seed % 2 == 0, apart=seed % 3 == 0),
        heartbeat_s=random.choice((0.5, 1.0, 1.0, 1.0)),  # rare ones are cheaper
        peers_per_instance=peers_per_instance,
        chances=_chances(random),
        rough=_rough(random),
        asks=draw_asks(random, WINDOW_S),
        faults=(
            *(_fault(random, names, victims, survivor) for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4)))),
            *_stalls(Random(f"stalls {seed}")),
        ),
        survivor=survivor,
    )


def _size(random: Random, verify_pages: bool, apart: bool) -> ToySize:
    return ToySize(
        pages=random.randint(FEWEST_PAGES, MOST_PAGES),
        rows=random.randint(2, 6),
        chunk_tokens=random.choice((4, 8, 16)),
        max_waiting=random.choice((4, 64)),
        request_timeout_s=90.0,
        drain_timeout_s=random.choice((0.0, 2.0, 30.0)),
        cost=StepCost(step_s=random.choice((0.01, 0.03, 0.1)), chunk_token_s=0.001, decode_row_s=0.001),
        verify_pages=verify_pages,
        apart=apart,
        answer_tokens=random.choice((0, ANSWER_TOKENS)),
    )


def _chances(random: Random) -> Chances:
    if random.random() < 0.2:
        return Chances(lost=0.0, twice=0.0, slow=0.0, overtaking=False)
    return Chances(
        lost=random.choice((0.0, 0.01, 0.03)),
        twice=random.choice((0.0, 0.02)),
        slow=random.choice((0.0, 0.05, 0.2)),
        overtaking=random.random() < 0.5,
    )


def _rough(random: Random) -> Rough:
    if random.random() < 0.3:
        return Rough(slow=0.0, fails=0.0, unproven=0.0, by_hand=0.0, buffered=False)
    return Rough(
        slow=random.choice((0.0, 0.1)),
        fails=random.choice((0.0, 0.01, 0.03)),
        unproven=random.choice((0.0, 0.5)),
        by_hand=random.choice((0.0, 0.5, 1.0)),
        buffered=random.random() < 0.5,
    )


def _fault(random: Random, names: list[str], victims: list[str], survivor: str | None) -> Fault:
    return Fault(
        at_s=random.uniform(0.1, WINDOW_S),
        trigger=random.choice(TRIGGERS) if random.random() < 0.6 else None,
        deed=_deed(random, names, victims, survivor),
    )


def _stalls(random: Random) -> tuple[Fault, ...]:
    if random.random() < 0.7:
        return ()
    seconds = random.choice((random.uniform(0.2, 3.0), random.uniform(3.0, 12.0)))
    return (Fault(at_s=random.uniform(0.1, WINDOW_S), deed=Stall(seconds=seconds)),)


def _deed(random: Random, names: list[str], victims: list[str], survivor: str | None) -> Deed:
    name = random.choice(victims)
    match random.choice(("kill", "kill", "hang", "hang", "leave", "part")):
        case "kill":
            noticed_s = random.choice((0.01, random.uniform(0.1, 9.0)))
            return Kill(
                name=name,
                noticed_s=noticed_s,
                back_s=random.uniform(0.3, 6.0),
                inherits=random.random() < 0.5,
                breaks=random.random() < 0.5,
            )
        case "hang":
            seconds = random.choice((random.uniform(0.5, 3.0), random.uniform(3.0, 12.0), random.uniform(0.5, LONGEST_HANG_S)))
            return Hang(name=name, seconds=seconds)
        case "leave":
            return Leave(name=name, by_signal=random.random() < 0.5)
        case _:
            one, other = random.choice(victims), random.choice([ROUTER, DETOKENIZER, *names])
            if other == one or (other in (ROUTER, DETOKENIZER) and one == survivor):
                other = "router"
            return Part(
                one=one, other=other, seconds=random.uniform(0.5, 8.0), queued=random.random() < 0.5, breaks=random.random() < 0.5
            )


def _with_grammars(schedule: Schedule, random: Random) -> Schedule:
    """In a third of the fleets, some answers have a grammar, which takes up to seconds to be ready."""
    if random.random() < 0.67:
        return schedule
    asks: list[Ask] = []
    for ask in schedule.asks:
        has_grammar = random.random() < 0.5 and all(choice.min_tokens == 0 for choice in ask.choices)
        asks.append(replace(ask, choices=tuple(replace(choice, has_grammar=has_grammar) for choice in ask.choices)))
    size = replace(schedule.size, prepare_s=random.choice((0.0, 0.05, random.uniform(0.1, 1.0), random.uniform(1.0, 5.0))))
    return replace(schedule, asks=tuple(asks), size=size)


def _with_owners(schedule: Schedule, random: Random) -> Schedule:
    """In a quarter of the schedules there are few rows, steps are slow, and one key takes them all."""
    floods = random.random() < 0.25
    size = replace(schedule.size, rows=2, max_waiting=64, cost=SLOW_STEPS) if floods else schedule.size
    return replace(schedule, size=size, asks=with_owners(schedule.asks, random, floods))


def _with_caches(schedule: Schedule, random: Random) -> Schedule:
    """In half of the fleets the routers follow prefix caches. Faults strike upon the messages about these, and many are lost."""
    if random.random() < 0.5:
        return schedule

    def moved(fault: Fault) -> Fault:
        is_moved = fault.trigger is not None and random.random() < 0.3
        return replace(fault, trigger=random.choice(("TellCache", "CacheChanges"))) if is_moved else fault

    chances = replace(schedule.chances, caches_lost=random.choice((0.0, 0.2, 0.5)))
    policy: PolicyName = random.choice(("least_loaded", "cache_aware", "cache_aware"))
    dispatch: Dispatch = "conditional" if policy == "least_loaded" else random.choice(("auto", "conditional"))
    return replace(schedule, policy=policy, dispatch=dispatch, faults=tuple(map(moved, schedule.faults)), chances=chances)


def _with_routers(schedule: Schedule, random: Random) -> Schedule:
    """A third of the fleets have two routers, and something befalls these. Routers have one detokenizer or two."""
    detokenizers, routers = random.choice((1, 1, 1, 2)), random.choice((1, 1, 2))
    schedule = replace(schedule, routers=routers, detokenizers=detokenizers)
    if routers == 1:
        return schedule
    schedule = replace(
        schedule,
        asks=tuple(replace(ask, router=random.randrange(routers)) for ask in schedule.asks),
        faults=tuple(replace(fault, deed=_at_router(random, fault.deed)) for fault in schedule.faults),
    )
    if random.random() < 0.4:
        schedule = replace(
            schedule,
            size=replace(schedule.size, max_waiting=64, cost=SLOW_STEPS),
            chances=Chances(lost=0.0, twice=0.0, slow=0.0, overtaking=False),
            rough=Rough(slow=0.0, fails=0.0, unproven=0.0, by_hand=0.0, buffered=False),
            faults=(),
            only_routers=True,
        )
    more = (_strikes(random, _router_deed(random, schedule)) for _ in range(random.choice((1, 1, 2))))
    return replace(schedule, faults=(*schedule.faults, *more))


def _text_faults(schedule: Schedule, random: Random) -> tuple[Fault, ...]:
    """Detokenizers die. The next one may die while the answers are opened again there."""
    if random.random() < 0.7:
        return ()
    return tuple(
        Fault(
            at_s=random.uniform(0.1, WINDOW_S),
            trigger=random.choice(TEXT_TRIGGERS) if random.random() < 0.5 else None,
            deed=KillDetokenizer(
                router=random.randrange(schedule.routers),
                shard=random.randrange(schedule.detokenizers),
                back_s=random.choice((random.uniform(0.01, 1.0), random.uniform(1.0, 8.0))),
            ),
        )
        for _ in range(random.choice((1, 1, 2, 3)))
    )


def _slowness(schedule: Schedule, random: Random) -> tuple[Fault, ...]:
    """In one of ten schedules a router is busy most of the time."""
    if random.random() < 0.9:
        return ()
    router, turn_s = random.randrange(schedule.routers), random.choice((0.3, 0.6, 1.5, 2.0))
    return (Fault(at_s=0.0, deed=Slow(seconds=2 * WINDOW_S, turn_s=turn_s, router=router)),)


def _watches(schedule: Schedule, random: Random) -> tuple[Fault, ...]:
    """In a third of the schedules the fleet is traced, by some routers once or twice."""
    if random.random() < 0.67:
        return ()
    return tuple(
        Fault(
            at_s=random.uniform(0.0, WINDOW_S),
            deed=Watch(seconds=random.uniform(0.01, WINDOW_S), router=random.randrange(schedule.routers)),
        )
        for _ in range(random.choice((1, 1, 2, 4)))
    )


def _flushes(schedule: Schedule, random: Random) -> tuple[Fault, ...]:
    """In a quarter of the schedules somebody flushes the prefix caches, once or twice."""
    if random.random() < 0.75:
        return ()
    return tuple(_strikes(random, Flush(router=random.randrange(schedule.routers))) for _ in range(random.choice((1, 1, 2))))


def _roles(schedule: Schedule, random: Random) -> tuple[Fault, ...]:
    """In half of the schedules instances are told to serve in another role, up to six times."""
    if random.random() < 0.5 or schedule.only_routers:
        return ()
    names = [f"prefill-{n}" for n in range(schedule.prefill)] + [f"decode-{n}" for n in range(schedule.decode)]
    victims, roles = [name for name in names if name != schedule.survivor], get_args(ServingRole)
    return tuple(
        _strikes(
            random, ChangeRole(name=random.choice(victims), role=random.choice(roles), router=random.randrange(schedule.routers))
        )
        for _ in range(random.choice((1, 2, 3, 6)))
    )


def _returns(schedule: Schedule, random: Random) -> tuple[Fault, ...]:
    """In one of ten schedules a former life returns that has a successor. A router may have started meanwhile."""
    if random.random() < 0.9 or schedule.only_routers:
        return ()
    at_s, seconds, next_s = random.uniform(0.1, 3.0), random.uniform(2.0, LONGEST_HANG_S), random.uniform(0.1, 1.5)
    name = f"prefill-{random.randrange(schedule.prefill)}"  # a survivor is a decode instance
    supplant = Fault(at_s=at_s, deed=Supplant(name=name, next_s=next_s, seconds=seconds))
    if schedule.routers == 1 or random.random() < 0.5:
        return (supplant,)
    kill = KillRouter(router=random.randrange(2), back_s=random.uniform(0.0, 2.0))
    return supplant, Fault(at_s=at_s + random.uniform(next_s, seconds), deed=kill)


def _with_ranks(schedule: Schedule, random: Random) -> Schedule:
    """In a third of the fleets, prefill or decode instances have several ranks, and often something befalls one."""
    ranks = random.choice((1, 2, 4)), random.choice((1, 2, 4))
    if random.random() < 0.6 or ranks == (1, 1):
        return schedule
    schedule = replace(schedule, ranks=ranks, size=replace(schedule.size, verify_pages=False))
    if schedule.only_routers:
        return schedule
    roles: tuple[tuple[Role, int, int], ...] = (("prefill", schedule.prefill, ranks[0]), ("decode", schedule.decode, ranks[1]))
    victims = [(f"{role}-{n}", of) for role, number, of in roles for n in range(number) if of > 1]
    victims = [(name, of) for name, of in victims if name != schedule.survivor]
    faults = [
        _strikes(random, _rank_deed(random, *random.choice(victims))) for _ in range(random.choice((0, 1, 1, 2, 3))) if victims
    ]
    lost = random.choice((0.0, 0.0, 0.0005))
    if schedule.survivor is not None and lost:
        schedule = replace(schedule, survivor=None)
    return replace(schedule, faults=(*schedule.faults, *faults), chances=replace(schedule.chances, ranks_lost=lost))


def _rank_deed(random: Random, name: str, ranks: int) -> Deed:
    match random.choice(("kill", "kill", "hang", "part")):
        case "kill":
            noticed_s, back_s = random.choice((0.01, random.uniform(0.1, 9.0))), random.uniform(0.3, 6.0)
            return KillRank(name=name, rank=random.randrange(ranks), noticed_s=noticed_s, back_s=back_s)
        case "hang":
            seconds = random.choice((random.uniform(0.2, 2.5), random.uniform(2.5, 12.0), random.uniform(2.5, LONGEST_HANG_S)))
            return HangRank(name=name, rank=random.randrange(ranks), seconds=seconds)
        case _:
            seconds, queued = random.uniform(0.2, 8.0), random.random() < 0.5
            return PartRanks(name=name, rank=random.randrange(1, ranks), seconds=seconds, queued=queued)


def _strikes(random: Random, deed: Deed) -> Fault:
    trigger = random.choice(TRIGGERS) if random.random() < 0.6 else None
    return Fault(at_s=random.uniform(0.1, 0.5 * WINDOW_S), trigger=trigger, deed=deed)


def _at_router(random: Random, deed: Deed) -> Deed:
    """The same at any of two routers."""
    return replace(deed, router=random.randrange(2)) if isinstance(deed, Stall | Part) else deed


def _router_deed(random: Random, schedule: Schedule) -> Deed:
    router = random.randrange(2)
    match random.choice(("kill", "kill", "stall", "part")):
        case "stall":
            return Stall(seconds=random.uniform(0.5, 12.0), router=router)
        case "part" if not schedule.only_routers:
            one = f"prefill-{random.randrange(schedule.prefill)}"  # a survivor is a decode instance
            seconds, queued, breaks = random.uniform(0.5, 8.0), random.random() < 0.5, random.random() < 0.5
            return Part(one=one, other=ROUTER, seconds=seconds, queued=queued, breaks=breaks, router=router)
        case _:
            # One that is back before its connections are refused is not missed until it does not answer.
            soonest_s = 2 * KNOCKS_S if schedule.only_routers else 0.0
            return KillRouter(
                router=router, back_s=random.choice((soonest_s, random.uniform(1.0, 6.0), random.uniform(4.0, 12.0)))
            )
