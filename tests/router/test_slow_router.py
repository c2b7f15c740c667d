"""A router whose turns take seconds, or that was stopped: who lives is a member, and who is dead is noticed all the same."""

import pytest

from common.config import RouterConfig
from common.ids import ROUTER
from common.messages import DetokenizerHeartbeat, Register
from router.core import RouterCore
from tests.router.bench import D0, P0
from tests.router.fakes import Unobserved, beat

CONFIG = RouterConfig(heartbeat_s=0.5, dead_after_s=3.0)
STOPPED_S = 10.0


def new_core() -> RouterCore:
    core = RouterCore(ROUTER, ["tcp://detokenizer:1"], CONFIG, Unobserved())
    for info in (P0, D0):
        core.receive(Register(instance=info), 0.0)
    core.receive(DetokenizerHeartbeat(open_answers=0, early_answers=0, dropped=0), 0.0)
    return core


def members(core: RouterCore) -> set[str]:
    return {member.info.id for member in core.fleet.members()}


@pytest.mark.parametrize("turn_s", [0.05, 0.3, 0.6, 1.0, 1.4, 2.0, 2.9])
def test_a_death_is_noticed_within_two_heartbeats_and_two_turns_more_than_it_should_be(turn_s: float) -> None:
    """Turns read all mail, then act on deadlines. p0 lives; d0 and the detokenizer are dead from the beginning."""
    core, now = new_core(), 0.0
    lost_s = silent_s = 0.0
    while now < 30.0:
        now += turn_s
        core.receive(beat(P0), now)
        core.tick(now)
        assert P0.id in members(core)
        lost_s = lost_s or now * (D0.id not in members(core))
        silent_s = silent_s or now * core.detokenizers[0].silent
    assert CONFIG.dead_after_s <= lost_s <= CONFIG.dead_after_s + 2 * CONFIG.heartbeat_s + 2 * turn_s
    assert CONFIG.dead_after_s <= silent_s <= CONFIG.dead_after_s + 3.0 + 2 * turn_s


def test_a_router_that_is_stopped_again_and_again_loses_nobody_whose_mail_arrives_a_moment_after_it_goes_on() -> None:
    core, now = new_core(), 0.0
    for _ in range(5):
        now += STOPPED_S
        core.tick(now)
        now += 0.05
        for info in (P0, D0):
            core.receive(beat(info), now)
        core.receive(DetokenizerHeartbeat(open_answers=0, early_answers=0, dropped=0), now)
        core.tick(now)
    assert members(core) == {"p0", "d0"} and not core.detokenizers[0].silent


def test_a_backlog_that_takes_longer_to_read_than_silence_may_last_uses_up_nobodys_time() -> None:
    core = new_core()
    for tenth in range(10, 100):
        core.tick(tenth / 10, caught_up=False)
    core.tick(10.0)
    assert members(core) == {"p0", "d0"}
