"""The router's core under thousands of events in any order: each request ends once, and nothing of it is left over."""

from collections import Counter
from functools import cache

import pytest

from common.config import RouterConfig
from common.errors import TandemError
from common.messages import Failed, Finished
from router import request_book
from router.attempts import ResumeReason
from tests.router.fakes import Unobserved
from tests.router.world import ERRORS, World

SEEDS = range(100)
EVENTS = 250
ROUGH = RouterConfig(heartbeat_s=0.5, dead_after_s=1.6, request_timeout_s=20.0, resume_wait_s=1.5, max_attempts=8)


def something_happens(world: World) -> None:
    """One event of any kind, also such as can only come late."""
    chance = world.random
    tries = list(world.tries.values())
    recent = [one for one in tries if not world.clients[one.key.request_id].endings] or tries
    one = chance.choice(recent if chance.random() < 0.9 else tries) if tries else None
    kind = chance.choices(
        ("submit", "tokens", "failure", "cancel", "read", "restart", "leave", "probes", "detokenizer"),
        (6, 40, 8, 1, 3, 1, 1, 12, 1),
    )[0]
    match kind:
        case "submit":
            try:
                world.submit(chance.randint(1, 12), chance.choice((100, 100_000)))
            except TandemError:
                return
        case "tokens" if one is not None:
            world.emit(one, chance.randint(1, 3))
        case "failure" if one is not None:
            world.emit(one, chance.randint(0, 1), chance.choice(ERRORS))
        case "cancel" if world.clients:
            world.take(world.core.requests.cancel([chance.choice(list(world.clients))], world.now))
        case "read" if world.clients:
            chance.choice(list(world.clients.values())).take()
        case "restart":
            world.start(chance.choice(("p0", "p1", "d0", "d1")))
        case "leave" if world.members:
            world.leave(chance.choice(list(world.members)))
        case "probes":
            world.answer_probes()
            if chance.random() < 0.7:
                world.beat_detokenizer()
        case "detokenizer":
            (world.move_detokenizer if chance.random() < 0.3 else world.beat_detokenizer)()
        case _:
            return


@cache
def rough_run(seed: int) -> Unobserved:
    """What the router's observer saw of it."""
    world = World(seed, ROUGH, loss=0.1)
    for _ in range(EVENTS):
        something_happens(world)
        world.check_books()
        world.beat(silent=0.2, odd=0.03)
        world.pass_time(world.random.choice((0.0, 0.01, 0.1, 0.5)))
        world.check_books()
    while len(world.core.requests):
        world.pass_time(1.0)
    world.check_over()
    return world.observer


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_in_whatever_order_each_request_ends_once_and_nothing_is_left(seed: int) -> None:
    rough_run(seed)


def test_the_schedules_reach_every_kind_of_resume_and_of_ending() -> None:
    resumes: Counter[ResumeReason] = Counter()
    endings: Counter[str] = Counter()
    for seed in range(20):
        observer = rough_run(seed)
        resumes.update(observer.resumes)
        endings.update(one.kind if isinstance(one, Failed) else one.reason for one in observer.endings)
    assert set(resumes) == set(ResumeReason)
    wanted = {"length", "cancelled", "invalid_request_error", "unavailable_error", "timeout_error", "slow_client"}
    assert wanted <= set(endings)


@pytest.mark.parametrize("seed", range(30))
def test_while_instances_live_every_answer_is_whole_however_many_messages_are_lost(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_book, "FRUITLESS_ATTEMPTS", 1000)
    world = World(seed, RouterConfig(max_attempts=1000), loss=0.15)
    clients = [world.submit(answer_tokens) for answer_tokens in (1, 2, 5, 12, 30)]
    while not all(client.endings for client in clients):
        assert world.now < 300.0, "lost messages come to light within seconds"
        for one in list(world.tries.values()):
            if one.known:
                world.emit(one, 1)
        world.answer_probes()
        world.beat_detokenizer()
        world.beat()
        world.pass_time(0.5)
    assert [client.endings for client in clients] == [[Finished(reason="length")]] * len(clients)
    assert [client.tokens for client in clients] == [1, 2, 5, 12, 30]
    world.check_over()
