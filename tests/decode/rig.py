"""A decode scheduler for tests, and the messages that come to it.

Owns their shapes. Knows no test.
"""

from dataclasses import replace

from common.drafting import Drafting
from common.ids import ROUTER, Generation, Incarnation, InstanceId, unpack_ids
from common.instance.ports import Action, RouterJoined
from common.messages import Claim, Grant, Handoff, Renew, Reserve, Terms
from decode.reservations import MEASURED_S
from decode.scheduler import DecodeScheduler
from kv_transfer.handoff_reader import DigestPages
from tests.builders import LAYOUT, engine, instance, key, limits, result, sampling
from tests.schedulers import generate as generate
from tests.schedulers import grants, meet, planned, prompt_of

ME, WRITER = InstanceId("d"), InstanceId("p")
LIFE, WRITERS_LIFE = Incarnation("d1"), Incarnation("1")


def scheduler(
    total_pages: int = 64,
    max_rows: int = 4,
    chunk_tokens: int = 8,
    max_waiting: int = 16,
    digest: DigestPages | None = None,
    drafting: Drafting | None = None,
) -> DecodeScheduler:
    bounds = replace(limits(chunk_tokens=chunk_tokens, max_waiting=max_waiting), drafting=drafting)
    made = DecodeScheduler(instance(ME, "decode", LIFE), engine(total_pages, max_rows), bounds, digest)
    made.handle(RouterJoined(ROUTER, 1), 0.0)
    met_s = -2 * MEASURED_S  # the writer's link was measured long ago
    meet(made, [instance("p", "prefill")], met_s)
    return made


def reserve(
    name: str,
    tokens: int,
    max_new_tokens: int = 4,
    sent_s: float = 0.0,
    first: int = 0,
    terms: Terms | None = None,
    incarnation: Incarnation = WRITERS_LIFE,
    waits: bool = True,
    salt: str | None = None,
) -> Reserve:
    """salt: see `generate`."""
    return Reserve(
        key=key(name),
        incarnation=incarnation,
        prompt=prompt_of(tokens),
        sampling=sampling(max_new_tokens, ignore_eos=False),
        sent_s=sent_s,
        first=first,
        terms=terms or Terms(),
        waits=waits,
        salt=name if salt is None else salt,
    )


def renew(sent_s: float, *claims: tuple[str, int], incarnation: Incarnation = WRITERS_LIFE) -> Renew:
    """claims: names of requests and the generations of their reservations."""
    claimed = tuple(Claim(key(name), Generation(generation)) for name, generation in claims)
    return Renew(incarnation=incarnation, sent_s=sent_s, claims=claimed)


def handoff(grant: Grant, first_token: int = 50, digests: bytes = b"") -> Handoff:
    pages = len(unpack_ids(grant.pages)) - grant.have_tokens // LAYOUT.page_size
    return Handoff(
        key=grant.key,
        generation=grant.generation,
        first_token=first_token,
        pushed_pages=pages,
        pushed_bytes=pages * LAYOUT.page_bytes,
        digests=digests,
    )


# --- on the way ------------------------------------------------------------------------------------------------------------


def reserved(made: DecodeScheduler, name: str = "a", tokens: int = 6, max_new_tokens: int = 4, now: float = 0.0) -> Grant:
    """A reservation that was asked for and granted."""
    assert made.receive(WRITER, reserve(name, tokens, max_new_tokens, sent_s=now), now) == []
    (grant,) = grants(made.decide(now).actions)
    return grant


def with_reservation(
    name: str = "a",
    tokens: int = 6,
    max_new_tokens: int = 4,
    now: float = 0.0,
    total_pages: int = 64,
    max_rows: int = 4,
    digest: DigestPages | None = None,
) -> tuple[DecodeScheduler, Grant]:
    """A scheduler with one reservation that was granted, and its grant."""
    made = scheduler(total_pages, max_rows, digest=digest)
    return made, reserved(made, name, tokens, max_new_tokens, now)


def decoding(name: str = "a", tokens: int = 6, total_pages: int = 64, max_rows: int = 4) -> DecodeScheduler:
    """A scheduler with one request that was handed off to it."""
    made, grant = with_reservation(name, tokens, total_pages=total_pages, max_rows=max_rows)
    assert made.receive(WRITER, handoff(grant), 0.0) == []
    return made


def step(made: DecodeScheduler, now: float, token: int = 60) -> list[Action]:
    """One forward, planned and returned, in which every row samples the same token: all that comes of it."""
    decision = made.decide(now)
    plan = planned(decision)
    return [*decision.actions, *made.step_done(result(plan, [token] * len(plan.sampled_rows)), now)]
