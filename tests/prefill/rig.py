"""A prefill scheduler for tests, and the messages that come to it.

Owns their shapes. Knows no test.
"""

from common.engine.plan import Plan
from common.ids import Generation, Incarnation, InstanceId, pack_ids, unpack_ids
from common.instance.ports import Action, Allow, Push, PushDone, Send, Settle
from common.messages import AnyMessage, Failed, Generate, Grant, Handoff, Peers, Reserve, Terms, TokenBatch, TokenDelta
from kv_transfer.digests import Digest
from kv_transfer.write_lease import WRITE_LEASE_S
from prefill.scheduler import PrefillScheduler
from tests.builders import LAYOUT, engine, instance, key, limits, sampling

ME, ROUTER, DECODE = InstanceId("p"), InstanceId("router"), InstanceId("d")
LIFE = Incarnation("p1")


def scheduler(
    total_pages: int = 64, max_rows: int = 4, chunk_tokens: int = 8, max_waiting: int = 16, digest: Digest | None = None
) -> PrefillScheduler:
    bounds = limits(chunk_tokens=chunk_tokens, max_waiting=max_waiting)
    made = PrefillScheduler(ME, LIFE, engine(total_pages, max_rows), bounds, digest)
    made.receive(ROUTER, Peers(instances=(instance("d", "decode"),)), 0.0)
    return made


def generate(
    name: str,
    tokens: int,
    max_new_tokens: int = 4,
    decode: InstanceId | None = DECODE,
    first: int = 0,
    terms: Terms | None = None,
) -> Generate:
    prompt = pack_ids([100 + i for i in range(tokens)])
    return Generate(
        key=key(name),
        prompt=prompt,
        sampling=sampling(max_new_tokens),
        decode=decode,
        first=first,
        terms=terms or Terms(),
    )


def messages(actions: list[Action]) -> list[AnyMessage]:
    return [action.message for action in actions if isinstance(action, Send)]


def reserves(actions: list[Action]) -> list[Reserve]:
    return [message for message in messages(actions) if isinstance(message, Reserve)]


def grant_for(actions: list[Action], first_page: int = 40) -> Grant:
    """What the decode instance would answer to the first Reserve among `actions`."""
    reserve = reserves(actions)[0]
    pages = range(first_page, first_page + LAYOUT.pages_for(len(unpack_ids(reserve.prompt))))
    return Grant(
        key=reserve.key,
        generation=Generation(1),
        pages=pack_ids(list(pages)),
        sent_s=reserve.sent_s,
        write_lease_s=WRITE_LEASE_S,
    )


def handoffs(actions: list[Action]) -> list[Handoff]:
    return [message for message in messages(actions) if isinstance(message, Handoff)]


def spans(plan: Plan | None) -> list[tuple[int, int, bool]]:
    assert plan is not None
    return [(chunk.start, chunk.start + len(chunk.token_ids), chunk.last) for chunk in plan.chunks]


def deltas(actions: list[Action]) -> list[TokenDelta]:
    return [delta for message in messages(actions) if isinstance(message, TokenBatch) for delta in message.deltas]


def failures(actions: list[Action]) -> dict[str, Failed]:
    """What is told of requests that failed."""
    return {delta.key.request_id: delta.ending for delta in deltas(actions) if isinstance(delta.ending, Failed)}


def kinds(actions: list[Action]) -> list[str]:
    """Names of what is to be done, in order."""
    names = []
    for action in actions:
        match action:
            case Send():
                names.append(type(action.message).__name__)
            case Push() | Allow() | Settle():
                names.append(type(action).__name__)
    return names


def finish_pushes(made: PrefillScheduler, actions: list[Action], now: float = 1.0) -> list[Action]:
    """Every push among `actions` completes: what comes of it."""
    more: list[Action] = []
    for push in [action for action in actions if isinstance(action, Push)]:
        more += made.transfer_event(PushDone(push.ticket, len(push.source_pages) * LAYOUT.page_bytes, 0.1), now)
    return more


def is_home(made: PrefillScheduler) -> bool:
    """Every page is in its pool, and no request is known."""
    load = made.load()
    return (load.pages_free, load.waiting_requests, load.running_requests) == (load.pages_total, 0, 0)
