"""What tests of both roles' schedulers ask of one: what it says, to whom, and whether everything has come home.

Owns no scheduler: `tests/prefill/rig.py` and `tests/decode/rig.py` make them. Knows no test.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from common.executor import StepPlan
from common.ids import ROUTER, Incarnation, InstanceId, pack_ids
from common.instance.ports import Action, Decision, PeersChanged, RouterLost, Scheduler, Send
from common.messages import (
    AnyMessage,
    Decline,
    Drain,
    Failed,
    Generate,
    Grant,
    InstanceInfo,
    LinkInfo,
    LinkState,
    Renewed,
    Terms,
    TokenBatch,
    TokenDelta,
)
from common.messages.transfers import LinkChanged, Settle, Settled
from common.sampling_params import Pooling
from decode.scheduler import DecodeScheduler
from prefill.scheduler import PrefillScheduler
from tests.builders import key, sampling


def meet(made: Scheduler[Any], there: Sequence[InstanceInfo], now: float) -> list[Action]:
    """The instances of the other role are these now, and no others."""
    assert isinstance(made, PrefillScheduler | DecodeScheduler)
    known = made._requests.peers
    left = tuple(name for name in known if name not in [info.id for info in there])
    joined = tuple(info for info in there if known.get(info.id) != info.incarnation)
    return made.handle(PeersChanged(joined, left), now) if joined or left else []


def prompt_of(tokens: int) -> bytes:
    return pack_ids([100 + i for i in range(tokens)])


def generate(
    name: str,
    tokens: int,
    max_new_tokens: int = 4,
    *,
    decodes: tuple[InstanceId, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    first: int = 0,
    terms: Terms | None = None,
    pooling: Pooling | None = None,
    salt: str | None = None,
) -> Generate:
    """salt: None: one of its own. All prompts begin alike, and would share cached KV."""
    return Generate(
        key=key(name),
        prompt=prompt_of(tokens),
        sampling=replace(sampling(max_new_tokens, stop_token_ids=stop_token_ids), pooling=pooling),
        decodes=decodes,
        first=first,
        terms=terms or Terms(),
        salt=name if salt is None else salt,
    )


def messages(actions: Sequence[Action]) -> list[AnyMessage]:
    return [action.message for action in actions if isinstance(action, Send)]


def deltas(actions: Sequence[Action]) -> list[TokenDelta]:
    return [delta for message in messages(actions) if isinstance(message, TokenBatch) for delta in message.deltas]


def failures(actions: Sequence[Action]) -> dict[str, Failed]:
    """What clients are told of requests that failed."""
    return {delta.key.request_id: delta.ending for delta in deltas(actions) if isinstance(delta.ending, Failed)}


def grants(actions: Sequence[Action]) -> list[Grant]:
    return [message for message in messages(actions) if isinstance(message, Grant)]


def granted(actions: Sequence[Action]) -> list[str]:
    return [grant.key.request_id for grant in grants(actions)]


def renewed(actions: Sequence[Action]) -> Renewed:
    (answer,) = (message for message in messages(actions) if isinstance(message, Renewed))
    return answer


def declined(actions: Sequence[Action]) -> dict[str, Failed]:
    """What writers are told of requests that failed."""
    return {message.key.request_id: message.failed for message in messages(actions) if isinstance(message, Decline)}


def kinds(actions: Sequence[Action]) -> list[str]:
    """Names of the actions, in order; of a Send, the name of its message."""
    return [type(each.message if isinstance(each, Send) else each).__name__ for each in actions]


def planned(decision: Decision) -> StepPlan:
    assert decision.plan is not None
    return decision.plan


def settle(made: Scheduler[Any], actions: Sequence[Action], now: float = 0.0) -> None:
    """The transfers say Settled to every Settle among `actions`."""
    for action in actions:
        if isinstance(action, Settle):
            assert made.handle(Settled(action.key), now) == []


def drain(made: Scheduler[Any], now: float) -> list[Action]:
    return made.receive(ROUTER, Drain(), now)


def abandon(made: Scheduler[Any], now: float) -> list[Action]:
    """The router is gone."""
    return made.handle(RouterLost(ROUTER), now)


def link_changed(peer: str, state: LinkState, incarnation: str = "1") -> LinkChanged:
    return LinkChanged(LinkInfo(peer=InstanceId(peer), incarnation=Incarnation(incarnation), state=state, detail="cable"))


def is_home(made: Scheduler[Any]) -> bool:
    """Every page is in its pool, and no request is known."""
    load = made.report().load
    counts = (load.pages_free, load.waiting_requests, load.running_requests, load.reservations, load.pages_quarantined)
    return counts == (load.pages_total, 0, 0, 0, 0)
