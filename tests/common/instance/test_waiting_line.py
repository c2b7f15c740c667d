"""The waiting line, compared with a list that is searched again and again."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.ids import ROUTER, AttemptId, RequestId
from common.instance.waiting_line import REMEMBERED, Rank, Shares, WaitingLine
from tests.builders import key

RANKS = st.builds(Rank, priority=st.integers(-1, 2), arrived_s=st.sampled_from([0.0, 1.0, 1.5, float("inf")]))
ROWS, PAGES = 8, 100


@dataclass(slots=True, eq=False)
class Item:
    key: AttemptId
    owner: str = ""
    rank: Rank = Rank(0, 0.0)
    held_rows: int = 0
    held_pages: int = 0


def a_line() -> WaitingLine[Item]:
    return WaitingLine(Shares(ROWS, PAGES))


class LineAgainstSearchedList(RuleBasedStateMachine):
    """owners: of the line. With one of them it is a list sorted by rank."""

    owners: tuple[str, ...] = ("", "alice", "bob")

    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares(ROWS, PAGES)
        self.line: WaitingLine[Item] = WaitingLine(self.shares)
        self.waiting: list[tuple[Rank, int, Item]] = []
        self.work = dict.fromkeys(self.owners, 0)
        self.last_turn = 0
        self.serial = 0

    @rule(rank=RANKS, data=st.data())
    def join(self, rank: Rank, data: st.DataObject) -> None:
        self.serial += 1
        joined = AttemptId(RequestId(str(self.serial % 7)), self.serial, ROUTER)  # keys are not in the order of joining
        item = Item(joined, data.draw(st.sampled_from(self.owners)), rank)
        self.line.join(item)
        self.waiting.append((rank, self.serial, item))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.waiting))
        assert self.line.leave(place[2].key)
        assert not self.line.leave(place[2].key)
        self.waiting.remove(place)

    @rule(rows=st.integers(0, 2), pages=st.integers(0, 30), data=st.data())
    def somebody_runs(self, rows: int, pages: int, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        self.shares.hold(Item(key(), owner), rows, pages)

    @rule(count=st.integers(0, 6), work=st.integers(1, 50), drops=st.booleans())
    def turns_are_taken(self, count: int, work: int, drops: bool) -> None:
        """Each of some turns is given a row, or the owner is passed by from there on."""
        expected, passed = list(self.waiting), set[str]()
        turns = self.line.turns(passed)
        for item, _ in zip(turns, range(count), strict=False):
            place = min((each for each in expected if each[2].owner not in passed), key=self.turn)
            assert item is place[2]
            expected.remove(place)
            if drops and item.owner == self.owners[-1]:
                passed.add(item.owner)
                continue
            self.line.leave(item.key)
            self.waiting.remove(place)
            self.shares.hold(item, 1, 0)
            self.shares.given(item.owner, work)
            self.last_turn = max(self.work[item.owner], self.last_turn)
            self.work[item.owner] = self.last_turn + work

    def turn(self, place: tuple[Rank, int, Item]) -> tuple[object, ...]:
        rank, serial, item = place
        held = max(self.shares.rows[item.owner] / ROWS, self.shares.pages[item.owner] / PAGES)
        return rank.priority, held, max(self.work[item.owner], self.last_turn), rank, serial

    @invariant()
    def agrees(self) -> None:
        by_owner = {owner: [place for place in self.waiting if place[2].owner == owner] for owner in self.owners}
        rest, items = dict(by_owner), []
        for places in rest.values():
            places.sort(key=lambda place: place[:2])
        while any(rest.values()):
            first = min((places[0] for places in rest.values() if places), key=self.turn)
            items.append(rest[first[2].owner].pop(0)[2])
        assert list(self.line.turns()) == items and len(self.line) == len(items)
        assert set(self.line) == set(items) and next(self.line.turns(), None) == (items[0] if items else None)
        assert self.line.owners == {item.owner for item in items}


class LineOfOneOwner(LineAgainstSearchedList):
    owners = ("alice",)

    def turn(self, place: tuple[Rank, int, Item]) -> tuple[object, ...]:
        return place[:2]


TestLineAgainstSearchedList = LineAgainstSearchedList.TestCase
TestLineAgainstSearchedList.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestLineOfOneOwner = LineOfOneOwner.TestCase
TestLineOfOneOwner.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def test_the_line_may_change_while_it_is_iterated() -> None:
    line = a_line()
    for name in "abc":
        line.join(Item(key(name)))
    for item in line:
        line.leave(item.key)
    assert len(line) == 0 and next(line.turns(), None) is None


def test_owners_that_hold_the_same_take_turns_by_the_work_that_they_were_given() -> None:
    """Prompts of one owner are four times as long, so it gets one turn in five."""
    shares = Shares(ROWS, PAGES)
    line = WaitingLine[Item](shares)
    for owner, serial in ((owner, serial) for owner in ("long", "short") for serial in range(40)):
        line.join(Item(key(f"{owner}{serial}"), owner, Rank(0, float(serial))))
    served = []
    for _ in range(30):
        item = next(line.turns(), None)
        assert item is not None
        line.leave(item.key)
        served.append(item.owner)
        shares.given(item.owner, 400 if item.owner == "long" else 100)
    assert served.count("long") == pytest.approx(30 / 5, abs=1)


def test_an_owner_gets_no_credit_for_the_time_in_which_it_wanted_nothing() -> None:
    shares = Shares(ROWS, PAGES)
    for _ in range(100):
        shares.given("busy", 100)
    shares.given("late", 100)
    assert shares.work_of("late") >= shares.work_of("busy") - 100


def test_what_is_remembered_of_owners_is_bounded() -> None:
    shares = Shares(ROWS, PAGES)
    for number in range(2 * REMEMBERED):
        shares.given(f"owner-{number}", 10)
    assert len(shares._work) == REMEMBERED
