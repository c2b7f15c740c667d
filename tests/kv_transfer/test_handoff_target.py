"""The receiving end of the handoff: generations, fences and leases."""

from common.ids import Generation, Incarnation, InstanceId, pack_ids
from common.messages import Grant, Handoff
from common.pages.pool import Lease, PagePool
from kv_transfer.handoff_target import HandoffTarget
from tests.builders import key

WRITER, OTHER, LIFE = InstanceId("p"), InstanceId("q"), Incarnation("1")


def granted() -> tuple[HandoffTarget, PagePool, Lease, Grant]:
    pool, target = PagePool(8), HandoffTarget()
    lease = pool.lease(3)
    assert lease is not None
    send = target.grant(key(), WRITER, LIFE, lease, prompt_pages=2)
    assert send.to == WRITER and isinstance(send.message, Grant)
    return target, pool, lease, send.message


def handoff(generation: int) -> Handoff:
    return Handoff(key=key(), generation=Generation(generation), first_token=1, pushed_pages=2, pushed_bytes=2)


def test_a_grant_names_the_prompt_pages_only() -> None:
    _, _, lease, grant = granted()
    assert grant.pages == pack_ids(lease.pages[:2])


def test_a_handoff_passes_the_lease_to_the_caller_once() -> None:
    target, _, lease, grant = granted()
    landed = target.land(WRITER, handoff(grant.generation))
    assert landed is not None and landed.lease is lease
    assert target.land(WRITER, handoff(grant.generation)) is None
    assert target.stale == 1


def test_a_handoff_of_an_older_generation_is_dropped_and_counted() -> None:
    target, _, _, grant = granted()
    assert target.land(WRITER, handoff(grant.generation - 1)) is None
    assert target.stale == 1 and key() in target


def test_a_handoff_or_withdrawal_of_another_writer_is_dropped() -> None:
    target, _, _, grant = granted()
    assert target.land(OTHER, handoff(grant.generation)) is None
    assert target.withdraw(OTHER, key()) is None
    assert target.stale == 2 and len(target) == 1


def test_generations_are_never_used_twice() -> None:
    target, pool, _, grant = granted()
    reservation = target.withdraw(WRITER, key())
    assert reservation is not None
    lease = pool.lease(2)
    assert lease is not None
    again = target.grant(key(), WRITER, LIFE, lease, prompt_pages=2).message
    assert isinstance(again, Grant) and again.generation != grant.generation


def test_a_cancelled_reservation_keeps_its_lease_until_the_writer_speaks() -> None:
    target, pool, _, _ = granted()
    assert target.cancel(key())
    assert pool.free_pages == 5 and len(target) == 1
    assert target.withdraw(WRITER, key()) is not None
    assert not target.cancel(key())
