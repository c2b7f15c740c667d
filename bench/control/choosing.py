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

PROMPT_TOKENS, ANSWER_TOKENS = 1000, 200
ROUNDS, CHOICES = 5, 100


def choose_us(infos: Sequence[InstanceInfo]) -> dict[str, float]:
    """Microseconds for one choice among these instances, each linked with all of the other role, by the policy of both roles: the
    best of some rounds."""
    core = _filled(infos)
    return {policy: _choose_us(core, RouterConfig(prefill_policy=policy, decode_policy=policy)) for policy in POLICIES}


def _choose_us(core: RouterCore, config: RouterConfig) -> float:
    placer, rounds = Placer(core.fleet.candidates, config), list[float]()
    asks = [Ask(PROMPT_TOKENS, ANSWER_TOKENS, session=f"session {number}") for number in range(CHOICES)]
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for ask in asks:
            placer.choose(ask)
        rounds.append((time.perf_counter() - began) / CHOICES)
    return 1e6 * min(rounds)


def _filled(infos: Sequence[InstanceInfo]) -> RouterCore:
    core = RouterCore(ROUTER, ["tcp://127.0.0.1:1"], RouterConfig(), RouterMetrics())
    for info in infos:
        core.receive(Register(instance=info), 0.0)
    told: dict[InstanceId, Peers] = {}
    while not core.fleet.settled:
        told.update((send.to, send.message) for send in core.flush(0.0) if isinstance(send.message, Peers))
    for info in infos:
        peers = told[info.id]
        links = tuple(_link(peer) for peer in peers.joined)
        core.receive(LinkReport(id=info.id, incarnation=info.incarnation, version=1, links=links), 0.0)
        load = Load(pages_free=info.total_pages, pages_total=info.total_pages)
        beat = Heartbeat(
            id=info.id,
            incarnation=info.incarnation,
            load=load,
            counters=Counters(),
            peers_version=peers.version,
            links_version=1,
        )
        core.receive(beat, 0.0)
    return core


def _link(peer: InstanceInfo) -> LinkInfo:
    return LinkInfo(peer=peer.id, incarnation=peer.incarnation, state="ready")
