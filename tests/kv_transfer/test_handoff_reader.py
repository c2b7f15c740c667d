"""The receiving end of the handoff: generations, renewals, fences and leases; and digests, compared with what was sent."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import Generation, Incarnation, InstanceId, Life, pack_ids
from common.messages import Claim, Grant, Handoff, Renew, Renewed, Withdraw
from common.pages.pool import PageLease, PagePool
from kv_transfer.handoff_reader import MARGIN_S, WRITE_LEASE_S, HandoffReader, Renewal, corrupt_pages
from tests.builders import key

P, Q = InstanceId("p"), InstanceId("q")
WRITER, SUCCESSOR, OTHER = Life(P, Incarnation("1")), Life(P, Incarnation("2")), Life(Q, Incarnation("1"))
SILENCE_S = WRITE_LEASE_S + MARGIN_S
CLOCKS_S = 1000.0
"""How much less the writers' clocks show than the reader's."""


class Reader:
    """A target with its pool, which hears what is sent at once."""

    def __init__(self, incarnation: str = "1") -> None:
        self.pool, self.target, self.now = PagePool(16), HandoffReader(Incarnation(incarnation)), CLOCKS_S

    @property
    def writers_now(self) -> float:
        return self.now - CLOCKS_S

    def reserve(self, name: str = "r", writer: Life = WRITER) -> tuple[Grant, PageLease]:
        """A reservation of 3 pages, of which the prompt needs 2."""
        self.target.contacted(writer, self.writers_now, self.now)
        lease = self.pool.lease(3)
        assert lease is not None
        send = self.target.grant(key(name), writer, lease, prompt_pages=2, asked_s=self.writers_now)
        assert send.to == writer.id and isinstance(send.message, Grant)
        return send.message, lease

    def renew(self, *claims: tuple[str, int], writer: Life = WRITER, waits: tuple[str, ...] = (), age_s: float = 0.0) -> Renewal:
        """A Renew arrives, `age_s` after it was sent."""
        renew = Renew(
            incarnation=writer.incarnation,
            sent_s=self.writers_now - age_s,
            claims=tuple(Claim(key(name), Generation(generation)) for name, generation in claims),
        )
        waiting = {key(name) for name in waits}
        return self.target.renew(writer.id, renew, self.now, lambda asked: asked in waiting)

    def later(self, seconds: float) -> None:
        self.now += seconds

    def fenced(self) -> list[str]:
        return [reservation.key.request_id for reservation in self.target.fenced(self.now)]


def reserved(*, is_cancelled: bool = False, later_s: float = 0.0) -> tuple[Reader, Grant, PageLease]:
    """A reader with one reservation, so long ago. is_cancelled: it was cancelled at once."""
    reader = Reader()
    grant, lease = reader.reserve()
    if is_cancelled:
        reader.target.cancel(key(), reader.now)
    reader.later(later_s)
    return reader, grant, lease


def answer(renewal: Renewal) -> Renewed:
    """What the writer is told first: for how long it may write, and what is over."""
    renewed = renewal.sends[0].message
    assert isinstance(renewed, Renewed)
    return renewed


def over(renewal: Renewal) -> list[str]:
    return [key.request_id for key in answer(renewal).over]


def grants(renewal: Renewal) -> list[Grant]:
    return [send.message for send in renewal.sends[1:] if isinstance(send.message, Grant)]


def lost(renewal: Renewal) -> list[str]:
    return [reservation.key.request_id for reservation in renewal.lost]


def handoff(generation: int) -> Handoff:
    return Handoff(key=key(), generation=Generation(generation), first_token=1, pushed_pages=2, pushed_bytes=2)


def withdraw(incarnation: Incarnation = WRITER.incarnation, generation: int = 0) -> Withdraw:
    return Withdraw(key=key(), incarnation=incarnation, generation=Generation(generation))


# --- reservations ----------------------------------------------------------------------------------------------------------


def test_a_grant_names_the_prompt_pages_only_and_the_word_that_it_answers() -> None:
    grant, lease = Reader().reserve()
    assert grant.pages == pack_ids(lease.pages[:2])
    assert (grant.sent_s, grant.write_lease_s, grant.have_tokens) == (0.0, WRITE_LEASE_S, 0)


def test_a_handoff_passes_the_lease_to_the_caller_once() -> None:
    reader, grant, lease = reserved()
    landed = reader.target.land(P, handoff(grant.generation))
    assert landed is not None and landed.lease is lease
    assert reader.target.land(P, handoff(grant.generation)) is None
    assert reader.target.stale == 1 and key() not in reader.target.open


@pytest.mark.parametrize(
    ("sender", "message", "later"),
    [
        (P, handoff, -1),
        (Q, handoff, 0),
        (P, partial(withdraw, SUCCESSOR.incarnation), 0),
        (P, partial(withdraw, WRITER.incarnation), -1),
        (Q, partial(withdraw, WRITER.incarnation), 0),
    ],
    ids=["a handoff of before", "another's handoff", "another life's", "a withdrawal of before", "another's withdrawal"],
)
def test_what_is_about_another_reservation_or_from_another_writer_is_dropped_and_counted(
    sender: InstanceId, message: Callable[[int], Handoff | Withdraw], later: int
) -> None:
    """later: how much later its generation is than that of the reservation."""
    reader, grant, _ = reserved()
    sent = message(grant.generation + later)
    taken = reader.target.land(sender, sent) if isinstance(sent, Handoff) else reader.target.withdraw(sender, sent)
    assert taken is None and reader.target.stale == 1 and key() in reader.target.open
    assert reader.target.withdraw(P, withdraw(generation=grant.generation)) is not None


def test_grants_and_answers_name_the_lives_and_the_generations_that_they_are_about() -> None:
    reader, grant, _ = reserved(is_cancelled=True, later_s=1.0)
    assert (grant.incarnation, grant.writer) == (Incarnation("1"), WRITER.incarnation)
    renewed = answer(reader.renew(("r", 0), ("unknown", 7)))
    assert (renewed.incarnation, renewed.writer) == (Incarnation("1"), WRITER.incarnation)
    assert (renewed.over, renewed.generations) == ((key(), key("unknown")), (grant.generation, 7))


def test_generations_are_never_used_twice() -> None:
    reader, grant, _ = reserved()
    assert reader.target.withdraw(P, withdraw()) is not None
    again, _ = reader.reserve()
    other_life, _ = Reader("2").reserve()
    assert len({grant.generation, again.generation, other_life.generation}) == 3, "nor by another life of the reader"


def test_a_cancelled_reservation_keeps_its_lease_until_the_writer_speaks() -> None:
    reader, _, lease = reserved(is_cancelled=True)
    assert reader.pool.free_pages == 13 and len(reader.target.open) == 1
    withdrawn = reader.target.withdraw(P, withdraw())
    assert withdrawn is not None and withdrawn.lease is lease
    reader.target.cancel(key(), reader.now)
    assert len(reader.target.open) == 0


# --- renewals --------------------------------------------------------------------------------------------------------------


def test_a_renewal_is_answered_with_the_time_at_which_it_was_sent() -> None:
    reader = Reader()
    reader.later(7.0)
    renewal = reader.renew()
    assert renewal.sends[0].to == P and renewal.lost == []
    assert answer(renewal) == Renewed(
        sent_s=7.0, write_lease_s=WRITE_LEASE_S, incarnation=Incarnation("1"), writer=WRITER.incarnation
    )


def test_a_grant_that_the_writer_has_not_got_is_sent_again_under_its_latest_word() -> None:
    reader, grant, _ = reserved(later_s=1.0)
    (again,) = grants(reader.renew(("r", 0)))
    assert (again.key, again.generation, again.pages) == (grant.key, grant.generation, grant.pages)
    assert (grant.sent_s, again.sent_s) == (0.0, 1.0)


def test_a_reservation_that_is_not_claimed_any_more_is_lost() -> None:
    """Its Handoff or its Withdraw did not arrive: no write for it is under way."""
    reader = Reader()
    kept, _ = reader.reserve("kept")
    _, lease = reader.reserve("a")
    reader.later(1.0)
    renewal = reader.renew(("kept", kept.generation))
    assert lost(renewal) == ["a"] and renewal.lost[0].lease is lease
    assert len(reader.target.open) == 1 and lost(reader.renew(("kept", kept.generation))) == []


@pytest.mark.parametrize("age_s", [0.0, 0.5])
def test_a_renewal_that_is_no_newer_than_a_reserve_says_nothing_of_it(age_s: float) -> None:
    """It was overtaken on its way."""
    reader = Reader()
    reader.later(10.0)
    reader.reserve()
    assert lost(reader.renew(age_s=age_s)) == [] and len(reader.target.open) == 1
    reader.later(1e-3)
    assert lost(reader.renew()) == ["r"]


def test_a_claim_of_an_unknown_key_is_over_unless_it_waits() -> None:
    assert over(Reader().renew(("a", 0), ("b", 3))) == ["a", "b"]
    renewal = Reader().renew(("a", 0), ("b", 0), waits=("a",))
    assert over(renewal) == ["b"] and grants(renewal) == []


@pytest.mark.parametrize(("is_cancelled", "generation"), [(False, None), (True, 0), (True, 1)])
def test_a_reservation_that_is_claimed_stays_and_is_over_if_it_was_cancelled(is_cancelled: bool, generation: int | None) -> None:
    """generation: that of the claim; None: that of the grant."""
    reader, grant, _ = reserved(is_cancelled=is_cancelled, later_s=1.0)
    renewal = reader.renew(("r", grant.generation if generation is None else generation))
    assert (over(renewal), grants(renewal), lost(renewal)) == (["r"] if is_cancelled else [], [], [])
    assert key() in reader.target.open
    reader.later(1.0)
    assert lost(reader.renew()) == ["r"] and not reader.target.open, "when it is claimed no more"


@pytest.mark.parametrize("writer", [SUCCESSOR, OTHER])
def test_a_renewal_of_another_life_or_instance_claims_and_loses_nothing_of_this_one(writer: Life) -> None:
    reader, grant, _ = reserved(later_s=1.0)
    assert lost(reader.renew(writer=writer)) == []
    renewal = reader.renew(("r", grant.generation), writer=writer)
    assert (over(renewal), grants(renewal), lost(renewal)) == (["r"], [], [])
    assert key() in reader.target.open


# --- silence ---------------------------------------------------------------------------------------------------------------


def test_the_reservations_of_a_writer_that_fell_silent_are_fenced_when_it_cannot_write_any_more() -> None:
    reader = Reader()
    reader.reserve("a")
    reader.reserve("b")
    assert reader.target.next_deadline() == CLOCKS_S + SILENCE_S
    reader.later(SILENCE_S - 1e-3)
    assert reader.fenced() == [] and reader.target.is_current(WRITER)
    reader.later(1e-3)
    assert reader.fenced() == ["a", "b"]
    assert len(reader.target.open) == 0 and not reader.target.is_current(WRITER) and reader.target.next_deadline() is None


def test_every_newer_word_puts_the_fence_off() -> None:
    reader, grant, _ = reserved(is_cancelled=True)
    for _ in range(5):
        reader.later(SILENCE_S - 1.0)
        assert reader.fenced() == []
        reader.renew(("r", grant.generation))
    reader.later(3.0)
    reader.reserve("another")
    assert reader.target.next_deadline() == reader.now + SILENCE_S, "a Reserve is a word as well"
    reader.later(SILENCE_S)
    assert reader.fenced() == ["r", "another"], "whether it was cancelled or not"


def test_a_word_that_was_overtaken_puts_no_fence_off_and_gives_no_lease() -> None:
    """What was sent before the latest word proves nothing about the time after it."""
    reader = Reader()
    reader.later(5.0)
    reader.reserve("a")
    reader.later(1.0)
    (again,) = grants(reader.renew(("a", 0), age_s=2.0))
    assert again.sent_s == 5.0
    assert reader.target.next_deadline() == reader.now - 1.0 + SILENCE_S


def test_each_life_of_each_writer_is_silent_on_its_own() -> None:
    reader = Reader()
    reader.reserve("a")
    reader.reserve("b", OTHER)
    reader.later(1.0)
    reader.reserve("c", SUCCESSOR)
    reader.later(SILENCE_S - 1.0)
    assert reader.fenced() == ["a", "b"]
    reader.later(1.0)
    assert reader.fenced() == ["c"]


def test_a_writer_that_speaks_again_after_its_fence_is_heard_again_and_told_what_is_over() -> None:
    reader, grant, _ = reserved(later_s=SILENCE_S)
    reader.fenced()
    assert over(reader.renew(("r", grant.generation))) == ["r"]
    assert reader.target.is_current(WRITER) and reader.target.next_deadline() == reader.now + SILENCE_S
    assert reader.target.land(P, handoff(grant.generation)) is None


@pytest.mark.parametrize("sent_s", [math.nan, math.inf, -math.inf])
def test_a_word_at_no_time_is_fenced_as_any_other(sent_s: float) -> None:
    reader = Reader()
    reader.target.contacted(WRITER, sent_s, reader.now)
    reader.later(SILENCE_S)
    reader.target.fenced(reader.now)
    assert not reader.target.is_current(WRITER)


# --- stuck reservations ----------------------------------------------------------------------------------------------------


def is_stuck(reader: Reader) -> bool:
    return reader.target.is_stuck(key(), reader.now)


def test_a_cancelled_reservation_is_stuck_when_its_writer_does_not_let_go_of_it_for_a_lease() -> None:
    reader, grant, _ = reserved(is_cancelled=True)
    for _ in range(5):
        assert not is_stuck(reader)
        reader.later(1.0)
        reader.renew(("r", grant.generation))
        reader.target.cancel(key(), reader.now)
    assert not is_stuck(reader)
    reader.later(1e-3)
    assert is_stuck(reader)
    reader.target.withdraw(P, withdraw())
    assert not is_stuck(reader), "what has no reservation is not stuck"


def test_a_reservation_is_stuck_while_its_writer_is_silent_and_not_any_more_when_it_speaks() -> None:
    reader, grant, _ = reserved(later_s=WRITE_LEASE_S)
    assert not is_stuck(reader)
    reader.later(1.0)
    assert is_stuck(reader)
    reader.renew(("r", grant.generation))
    assert not is_stuck(reader)


def test_a_reservation_that_its_writer_gave_up_and_cannot_let_go_keeps_its_pages() -> None:
    reader, grant, lease = reserved()
    claim = Claim(key(), grant.generation, stuck=True)
    stale = Claim(key("unknown"), Generation(1), stuck=True)
    renew = Renew(incarnation=WRITER.incarnation, sent_s=reader.writers_now, claims=(claim, stale))
    renewal = reader.target.renew(P, renew, reader.now, lambda asked: False)
    assert [reservation.lease for reservation in renewal.stuck] == [lease]
    assert lost(renewal) == [] and over(renewal) == ["unknown"] and key() in reader.target.open


WORDS = st.lists(st.integers(0, 2**32 - 1), max_size=8)


def packed(digests: list[int]) -> bytes:
    return b"".join(digest.to_bytes(4, "little") for digest in digests)


@given(sent=WORDS, landed=WORDS)
def test_a_page_is_corrupt_when_its_digests_differ_or_one_is_missing(sent: list[int], landed: list[int]) -> None:
    alike = sum(ours == theirs for ours, theirs in zip(sent, landed, strict=False))
    assert corrupt_pages(packed(sent), packed(landed)) == max(len(sent), len(landed)) - alike
    assert corrupt_pages(packed(sent), packed(sent)) == 0


@pytest.mark.parametrize("byte", range(8))
def test_every_byte_of_a_digest_counts(byte: int) -> None:
    landed = np.arange(8, dtype=np.uint8)
    sent = landed.copy()
    sent[byte] ^= 1
    assert corrupt_pages(sent.tobytes(), landed.tobytes()) == 1


def test_an_incomplete_digest_counts_as_missing() -> None:
    assert corrupt_pages(packed([1]) + packed([2])[:3], packed([1, 2])) == 1
