"""A prefill scheduler for tests, and the messages that come to it.

Owns their shapes. Knows no test.
"""

from functools import partial

from common.executor import StepPlan
from common.ids import ROUTER, Generation, Incarnation, InstanceId, pack_ids, unpack_ids
from common.instance.ports import Action, Decision, RouterJoined
from common.messages import Generate, Grant, Handoff, Reserve
from common.messages.transfers import Push, PushDone
from kv_transfer.handoff_reader import WRITE_LEASE_S, DigestPages
from prefill.scheduler import PrefillScheduler
from tests import schedulers
from tests.builders import LAYOUT, engine, instance, limits, result
from tests.schedulers import kinds, messages

ME, DECODE = InstanceId("p"), InstanceId("d")
LIFE = Incarnation("p1")


def scheduler(
    total_pages: int = 64,
    max_rows: int = 4,
    chunk_tokens: int = 8,
    max_waiting: int = 16,
    digest: DigestPages | None = None,
    prefix_cache: bool = True,
) -> PrefillScheduler:
    bounds = limits(chunk_tokens=chunk_tokens, max_waiting=max_waiting, prefix_cache=prefix_cache)
    made = PrefillScheduler(instance(ME, "prefill", LIFE), engine(total_pages, max_rows), bounds, digest)
    made.handle(RouterJoined(ROUTER, 1), 0.0)
    schedulers.meet(made, [instance("d", "decode")], 0.0)
    made.tick(0.0)
    return made


generate = partial(schedulers.generate, decodes=(DECODE,))


def reserves(actions: list[Action]) -> list[Reserve]:
    return [message for message in messages(actions) if isinstance(message, Reserve)]


def grant_for(actions: list[Action], first_page: int = 40) -> Grant:
    """What the decode instance would answer to the first Reserve among `actions`."""
    reserve = reserves(actions)[0]
    pages = range(first_page, first_page + LAYOUT.pages_for(len(unpack_ids(reserve.prompt))))
    return Grant(
        key=reserve.key, generation=Generation(1), pages=pack_ids(list(pages)), sent_s=reserve.sent_s, write_lease_s=WRITE_LEASE_S
    )


def handoffs(actions: list[Action]) -> list[Handoff]:
    return [message for message in messages(actions) if isinstance(message, Handoff)]


def spans(plan: StepPlan | None) -> list[tuple[int, int, bool]]:
    assert plan is not None
    return [(chunk.start, chunk.start + len(chunk.token_ids), chunk.last) for chunk in plan.chunks]


def finish_pushes(made: PrefillScheduler, actions: list[Action], now: float = 1.0) -> list[Action]:
    """Every push among `actions` completes: what comes of it."""
    more: list[Action] = []
    for push in [action for action in actions if isinstance(action, Push)]:
        more += made.handle(PushDone(push.ticket, len(push.source_pages) * LAYOUT.page_bytes, 0.1), now)
    return more


def begun(request: Generate, made: PrefillScheduler | None = None, is_granted: bool = False) -> tuple[PrefillScheduler, Decision]:
    """A scheduler that has begun its only request. is_granted: the decode instance has answered the Reserve."""
    made = made or scheduler()
    made.receive(ROUTER, request, 0.0)
    decision = made.decide(0.0)
    if is_granted:
        made.receive(DECODE, grant_for(decision.actions), 0.0)
    return made, decision


def pushing(
    name: str = "a", total_pages: int = 64, chunk_tokens: int = 8, digest: DigestPages | None = None
) -> tuple[PrefillScheduler, list[Action]]:
    """A scheduler with one request, whose only push is in flight and whose first token is out; and that push."""
    made = scheduler(total_pages, chunk_tokens=chunk_tokens, digest=digest)
    _, decision = begun(generate(name, 4), made, is_granted=True)
    actions = made.step_done(result(decision.plan, [5]), 0.1)
    assert kinds(actions) == ["TokenBatch", "Push"]
    return made, actions
