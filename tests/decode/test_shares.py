"""Owners share a decode instance: whoever holds less than another one gets room at once, and everybody advances.

`Owners` is the router to them: what is preempted comes again, with its tokens and its age.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.ids import ROUTER, pack_ids, unpack_ids
from common.messages import Cancel, Generate, Terms
from decode.scheduler import DecodeScheduler
from tests.builders import key, result
from tests.decode.rig import WRITER, handoff, reserve, scheduler, step
from tests.schedulers import declined, deltas, failures, generate, grants, is_home


@dataclass
class Owners:
    """steps: that were made. ended: at which step each request was answered whole. preempted: how often each was."""

    made: DecodeScheduler
    now: float = 100.0
    steps: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    preempted: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    asked: dict[str, tuple[Generate, float]] = field(default_factory=dict)

    def ask(self, owner: str, name: str, tokens: int, answer: int, priority: int = 0) -> None:
        self.asked[name] = generate(name, tokens, answer, terms=Terms(owner=owner, priority=priority)), self.now
        self.hear(self.asked[name][0])

    def hear(self, message: Generate) -> None:
        assert self.made.receive(ROUTER, message, self.now) == []

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.steps += 1
            self.now += 0.01
            self.made.tick(self.now)
            decision = self.made.decide(self.now)
            actions = list(decision.actions)
            if decision.plan is not None:
                actions += self.made.step_done(result(decision.plan, [60] * len(decision.plan.sampled_rows)), self.now)
            again: list[Generate] = []
            for delta in deltas(actions):
                name = str(delta.key.request_id)
                generate, asked_s = self.asked[name]
                assert delta.first == self.tokens[name], "a token is sent once, and none is left out"
                self.tokens[name] += len(delta.token_ids)
                if delta.ending is None:
                    continue
                if self.tokens[name] == self.asked[name][0].first + generate.sampling.max_new_tokens:
                    assert name not in self.ended
                    self.ended[name] = self.steps
                    continue
                assert failures([*actions])[name].kind == "preempted_error"
                self.preempted[name] += 1
                again.append(self.resumed(name))
                self.asked[name] = again[-1], asked_s
            for message in again:
                self.hear(message)

    def resumed(self, name: str) -> Generate:
        """The next attempt."""
        before, asked_s = self.asked[name]
        got = self.tokens[name] - before.first
        return replace(
            before,
            key=key(name, before.key.attempt + 1),
            prompt=pack_ids([*unpack_ids(before.prompt).tolist(), *[60] * got]),
            sampling=replace(before.sampling, max_new_tokens=before.sampling.max_new_tokens - got),
            first=self.tokens[name],
            terms=replace(before.terms, age_s=self.now - asked_s),
        )

    def rows(self) -> Counter[str]:
        return Counter(request.owner for request in self.made._requests.in_row.values())

    def pages(self) -> Counter[str]:
        pages: Counter[str] = Counter()
        for request in self.made._requests.in_row.values():
            pages[request.owner] += len(request.lease or ()) - (request.lease.found if request.lease else 0)
        return pages


def flooded(total_pages: int = 64, rows: int = 4, tokens: int = 4, answer: int = 60, count: int = 12) -> Owners:
    """All rows, or all pages, are alice's, and she has more waiting."""
    owners = Owners(scheduler(total_pages, rows, chunk_tokens=64, max_waiting=1000))
    for number in range(count):
        owners.ask("alice", f"a{number}", tokens, answer)
        owners.now += 0.001
    owners.step(3)
    return owners


def test_one_owner_alone_may_have_everything() -> None:
    owners = flooded()
    assert owners.rows() == {"alice": 4} and not owners.preempted


@pytest.mark.parametrize("flood", [lambda: flooded(rows=4), lambda: flooded(total_pages=12, rows=40, tokens=8, answer=8)])
def test_another_owner_gets_a_row_and_pages_within_a_few_steps(flood: Callable[[], Owners]) -> None:
    owners = flood()
    waiting = owners.made.report().load.waiting_requests
    assert waiting > 0, "there is no room"
    owners.ask("bob", "b", 3, 3)
    began = owners.steps
    owners.step(6)
    assert owners.ended["b"] - began <= 5
    assert sum(owners.preempted.values()) == 1


def test_its_room_is_taken_from_the_youngest_of_the_owner_that_holds_the_most() -> None:
    owners = flooded(rows=6, count=4)
    owners.ask("carol", "c0", 3, 60)
    owners.ask("carol", "c1", 3, 60)
    owners.step(2)
    owners.ask("bob", "b", 3, 3)
    owners.step(1)
    assert owners.preempted == {"a3": 1}


def test_two_owners_that_want_everything_get_half_each_and_nobody_takes_it_back() -> None:
    owners = flooded(rows=6, answer=40)
    for number in range(12):
        owners.ask("bob", f"b{number}", 4, 40)
    owners.step(4)
    assert owners.rows() == {"alice": 3, "bob": 3} and owners.preempted.total() == 3
    owners.step(30)
    assert owners.rows() == {"alice": 3, "bob": 3} and owners.preempted.total() == 3


def test_an_owner_keeps_its_only_request_and_a_less_urgent_one_takes_nothing() -> None:
    owners = flooded(rows=1, count=1)
    owners.ask("bob", "b", 3, 3)
    owners.step(5)
    assert not owners.preempted
    owners = flooded(rows=4)
    owners.ask("bob", "b", 3, 3, priority=1)
    owners.step(5)
    assert not owners.preempted and "b" not in owners.ended


def test_who_lacks_a_page_to_grow_takes_it_from_the_owner_that_holds_the_most() -> None:
    """bob's is the youngest; alone it would be the victim."""
    owners = Owners(scheduler(total_pages=8, chunk_tokens=64))
    for owner, name in (("alice", "a0"), ("alice", "a1"), ("bob", "b")):
        owners.ask(owner, name, 4, 16)
        owners.now += 0.001
    while not owners.preempted:
        owners.step()
    assert owners.preempted == {"a1": 1} and owners.rows() == {"alice": 1, "bob": 1}


def test_a_reservation_takes_room_when_it_may_wait_and_is_granted_at_once_where_no_step_has_the_row() -> None:
    owners = flooded()
    made, now = owners.made, owners.now
    hasty = reserve("b", 4, sent_s=now, waits=False, terms=Terms(owner="bob"))
    made.receive(WRITER, hasty, now)
    actions = step(made, now)
    assert "b" in declined(actions) and not failures(actions)
    made.receive(WRITER, replace(hasty, waits=True), now)
    actions = step(made, now)
    assert list(failures(actions)) == ["a3"] and not declined(actions)
    (grant,) = grants(actions)
    assert grant.key.request_id == "b" and made.receive(WRITER, handoff(grant), now) == []


def test_cached_pages_that_nobody_else_has_count_as_those_of_the_owner_that_takes_them() -> None:
    """Else one that asks again and again for the same would hold the instance's memory as if it were nothing."""
    owners = Owners(scheduler(64, 4, chunk_tokens=64))
    for name in ("first", "second", "third"):
        message = generate(name, 20, 40, terms=Terms(owner="alice"), salt="alice's")
        owners.asked[name] = message, owners.now
        owners.hear(message)
        owners.step(2)
        if name == "first":
            owners.made.receive(ROUTER, Cancel(key=key(name)), owners.now)
            owners.step(2)
    lease = next(request.lease for request in owners.made._requests.in_row.values() if request.key == key("second"))
    assert lease is not None and lease.found, "it is cached"
    assert owners.made._requests.shares.pages["alice"] == 64 - owners.made.pool.available_pages


def test_the_oldest_of_an_owner_goes_on_whatever_reservations_it_has_beside() -> None:
    """Room of running requests is free sooner than that of reservations, but the oldest must advance."""
    owners = flooded(rows=4, count=1)
    for number in range(3):
        late = reserve(f"r{number}", 4, sent_s=owners.now, terms=Terms(owner="alice"))
        owners.made.receive(WRITER, late, owners.now)
        owners.now += 0.001
    owners.step()
    assert owners.rows() == {"alice": 4}
    owners.made.receive(ROUTER, generate("b", 3, 3, terms=Terms(owner="bob")), owners.now)
    actions = step(owners.made, owners.now)
    assert "a0" not in failures(actions) and declined(actions).keys() == {"r2"}


ASKS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 12), st.integers(1, 14), st.integers(0, 5)), min_size=4, max_size=30
)


@given(asks=ASKS, rows=st.integers(2, 6), pages=st.integers(8, 20))
@settings(max_examples=60)
def test_everybody_advances_and_every_page_comes_home(asks: list[tuple[str, int, int, int]], rows: int, pages: int) -> None:
    owners = Owners(scheduler(pages, rows, chunk_tokens=16, max_waiting=1000))
    for number, (owner, tokens, answer, pause) in enumerate(asks):
        owners.ask(owner, f"{owner}{number}", tokens, answer)
        owners.step(pause)
        held = owners.made._requests.shares
        assert {owner: held.rows[owner] for owner in held.rows} == dict(owners.rows())
    for _ in range(4000):
        if len(owners.ended) == len(asks):
            break
        owners.step()
    assert len(owners.ended) == len(asks) and is_home(owners.made)
    assert not owners.made._requests.shares.rows and not owners.made._requests.shares.pages


@given(rows=st.integers(2, 12), wants=st.lists(st.integers(1, 12), min_size=1, max_size=4))
@settings(max_examples=60)
def test_rows_are_max_min_fair(rows: int, wants: list[int]) -> None:
    """Owners come one after another, and each wants so many rows for long."""
    owners = Owners(scheduler(200, rows, chunk_tokens=64, max_waiting=1000))
    for number, want in enumerate(wants):
        for each in range(want):
            owners.ask(f"o{number}", f"o{number}-{each}", 2, 25)
        owners.step(2)
    owners.step(4)
    got = owners.rows()
    assert sum(got.values()) == min(rows, sum(wants)), "no row is idle while somebody waits"
    for number, want in enumerate(wants):
        if got[f"o{number}"] < want:
            assert got[f"o{number}"] >= max(got.values()) - 1, (got, wants)
