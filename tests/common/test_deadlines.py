"""The deadline wheel, compared with a dictionary that is searched through."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.deadlines import SPARE_ENTRIES, DeadlineWheel

KEYS = st.integers(0, 5)
TIMES = st.integers(0, 20).map(float)


class WheelAgainstDictionary(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.wheel: DeadlineWheel[int] = DeadlineWheel()
        self.known: dict[int, float] = {}

    @rule(key=KEYS, at_s=TIMES)
    def set(self, key: int, at_s: float) -> None:
        self.wheel.set(key, at_s)
        self.known[key] = at_s

    @rule(key=KEYS, at_s=TIMES)
    def hasten(self, key: int, at_s: float) -> None:
        self.wheel.hasten(key, at_s)
        if key in self.known:
            self.known[key] = min(at_s, self.known[key])

    @rule(key=KEYS)
    def clear(self, key: int) -> None:
        self.wheel.clear(key)
        self.known.pop(key, None)

    @rule(now=TIMES)
    def turn(self, now: float) -> None:
        passed = self.wheel.expired(now)
        assert set(passed) == {key for key, at_s in self.known.items() if at_s <= now}
        assert len(passed) == len(set(passed))
        times = [self.known.pop(key) for key in passed]
        assert times == sorted(times)

    @invariant()
    def agrees(self) -> None:
        assert len(self.wheel) == len(self.known)
        assert [key for key in range(6) if key in self.wheel] == sorted(self.known)
        assert self.wheel.next_deadline() == min(self.known.values(), default=None)


TestWheelAgainstDictionary = WheelAgainstDictionary.TestCase
TestWheelAgainstDictionary.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_deadlines_at_the_same_time_pass_in_the_order_in_which_they_were_set() -> None:
    wheel: DeadlineWheel[object] = DeadlineWheel()
    keys = [object(), "c", "a", "b", object()]  # need not be comparable
    for key in keys:
        wheel.set(key, 1.0)
    assert wheel.expired(1.0) == keys


def test_a_deadline_that_is_moved_for_ever_takes_no_more_memory() -> None:
    wheel: DeadlineWheel[int] = DeadlineWheel()
    for turn in range(10_000):
        wheel.set(turn % 3, 1e9 + turn)
        wheel.set(-1 - turn, 2e9)
        wheel.clear(-1 - turn)
    assert len(wheel) == 3
    assert len(wheel._heap) <= 2 * 4 + SPARE_ENTRIES
    assert wheel.expired(3e9) == [turn % 3 for turn in range(9_997, 10_000)]


def test_what_is_left_after_a_sweep_keeps_its_order() -> None:
    wheel: DeadlineWheel[int] = DeadlineWheel()
    for key in range(50):
        wheel.set(key, float(50 - key))
    for _ in range(500):
        wheel.set(99, 100.0)
    assert wheel.expired(60.0) == list(range(49, -1, -1))
