"""The waiting line, compared with a list that is sorted again and again."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.ids import ROUTER, Key, RequestId
from common.instance.waiting_line import Rank, WaitingLine
from tests.builders import key

RANKS = st.builds(Rank, priority=st.integers(-1, 2), arrived_s=st.sampled_from([0.0, 1.0, 1.5, float("inf")]))


class LineAgainstSortedList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.line: WaitingLine[str] = WaitingLine()
        self.waiting: list[tuple[Rank, int, Key]] = []
        self.serial = 0

    @rule(rank=RANKS)
    def join(self, rank: Rank) -> None:
        self.serial += 1
        joined = Key(RequestId(str(self.serial % 7)), self.serial, ROUTER)  # keys are not in the order of joining
        self.line.join(joined, rank, f"item {joined}")
        self.waiting = sorted([*self.waiting, (rank, self.serial, joined)], key=lambda place: place[:2])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.waiting))
        assert self.line.leave(place[2])
        assert not self.line.leave(place[2])
        self.waiting.remove(place)

    @rule()
    def an_unknown_key_leaves(self) -> None:
        assert not self.line.leave(key("stranger"))

    @invariant()
    def agrees(self) -> None:
        items = [f"item {place[2]}" for place in self.waiting]
        assert list(self.line) == items and len(self.line) == len(items)
        assert self.line.head() == (items[0] if items else None)


TestLineAgainstSortedList = LineAgainstSortedList.TestCase
TestLineAgainstSortedList.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_order_is_by_priority_then_age_then_arrival() -> None:
    line: WaitingLine[str] = WaitingLine()
    for name, rank in (("d", Rank(0, 2.0)), ("e", Rank(0, 2.0)), ("c", Rank(0, 1.0)), ("f", Rank(1, 0.0)), ("a", Rank(-1, 9.0))):
        line.join(key(name), rank, name)
    assert list(line) == ["a", "c", "d", "e", "f"]


def test_the_line_may_change_while_it_is_iterated() -> None:
    line: WaitingLine[str] = WaitingLine()
    for name in "abc":
        line.join(key(name), Rank(0, 0.0), name)
    for name in line:
        line.leave(key(name))
    assert len(line) == 0 and line.head() is None
