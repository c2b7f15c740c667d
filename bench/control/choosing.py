"""How long the router's choice of instances takes, for fleets of different sizes.

The one module of bench that looks inside the router: a request over HTTP takes a hundred times as long as the choice, so nobody
sees it from outside. Owns a router core without sockets, filled with members that are all linked.
"""

import time
from collections.abc import Sequence

from common.config import POLICIES, RouterConfig
from common.ids import ROUTER, InstanceId
from common.messages import Counters, Heartbeat, InstanceInfo, LinkReport, Load, Peers, Register
from common.messages.heartbeats import LinkInfo
from router.ask import Ask
from router.core import RouterCore
from router.metrics import RouterMetrics
from router.placer import Placer

PROMPT_TOKENS, ANSWER_TOKENS, BLOCKS = 1000, 200, 7
ROUNDS, CHOICES = 5, 100
HELD = 10
"""One instance in so many has a prompt in its cache."""


def choose_us(infos: Sequence[InstanceInfo]) -> dict[str, float]:
    """Microseconds of CPU for one choice among these instances, each linked with all of the other role, by the policy of both
    roles, and with conditional dispatch: the best of some rounds."""
    core = _filled(infos)
    of_policies = {policy: _choose_us(core, RouterConfig(prefill_policy=policy, decode_policy=policy)) for policy in POLICIES}
    return of_policies | {"conditional": _choose_us(core, RouterConfig(dispatch="conditional"))}


def _choose_us(core: RouterCore, config: RouterConfig) -> float:
    placer, rounds, caches = Placer(core.fleet.candidates, config), list[float](), core.fleet.caches
    overlaps = [caches.match(_blocks(number)) for number in range(CHOICES)]
    asks = [Ask(PROMPT_TOKENS, ANSWER_TOKENS, each, session=f"session {number}") for number, each in enumerate(overlaps)]
    for _ in range(ROUNDS):
        began = time.thread_time()
        for ask in asks:
            placer.choose(ask)
        rounds.append((time.thread_time() - began) / CHOICES)
    return 1e6 * min(rounds)


def _filled(infos: Sequence[InstanceInfo]) -> RouterCore:
    core = RouterCore(ROUTER, ["tcp://127.0.0.1:1"], RouterConfig(dispatch="conditional"), RouterMetrics())
    for info in infos:
        core.receive(Register(instance=info), 0.0)
    told: dict[InstanceId, Peers] = {}
    while not core.fleet.settled:
        told.update((send.to, send.message) for send in core.flush(0.0) if isinstance(send.message, Peers))
    for info in infos:
        peers = told[info.id]
        links = tuple(_link(peer) for peer in peers.joined)
        core.receive(LinkReport(id=info.id, incarnation=info.incarnation, version=1, links=links), 0.0)
        pages = info.total_pages
        load = Load(pages_free=pages, pages_total=pages, step_s=0.006, chunk_token_s=0.00004, decode_row_s=0.0001)
        beat = Heartbeat(
            id=info.id,
            incarnation=info.incarnation,
            load=load,
            counters=Counters(),
            peers_version=peers.version,
            links_version=1,
        )
        core.receive(beat, 0.0)
    for number, member in enumerate(core.fleet.members()):
        for prompt in range(number % HELD, CHOICES, HELD):
            core.fleet.caches.expect(member, _blocks(prompt), 0.0)
    return core


def _blocks(prompt: int) -> range:
    """The names of a prompt's blocks."""
    return range(BLOCKS * prompt, BLOCKS * (prompt + 1))


def _link(peer: InstanceInfo) -> LinkInfo:
    return LinkInfo(peer=peer.id, incarnation=peer.incarnation, state="ready")
