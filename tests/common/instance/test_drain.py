"""The times of a drain: what runs may finish, then is handed off, and at last nothing more is waited for."""

from common.ids import InstanceId
from common.instance.requests import LAST_S, Drainage


def begun(now: float = 100.0) -> Drainage:
    drainage = Drainage(InstanceId("d"), timeout_s=30.0)
    drainage.begin(now)
    return drainage


def test_an_instance_that_does_not_leave_waits_for_nothing() -> None:
    drainage = Drainage(InstanceId("d"), timeout_s=30.0)
    assert not drainage.tick(1e9) and drainage.next_deadline() is None
    assert not drainage.began and not drainage.is_over


def test_what_runs_may_finish_and_is_then_handed_off_once() -> None:
    drainage = begun()
    assert drainage.began and drainage.next_deadline() == 130.0
    assert not drainage.tick(129.9)
    assert drainage.tick(130.0)
    assert not drainage.tick(130.0) and drainage.next_deadline() == 130.0 + LAST_S


def test_what_does_not_end_after_it_was_handed_off_is_not_waited_for() -> None:
    drainage = begun()
    drainage.tick(130.0)
    over = []
    for now in (130.0 + LAST_S - 0.1, 130.0 + LAST_S, 1e9):
        assert not drainage.tick(now)
        over.append(drainage.is_over)
    assert over == [False, True, True] and drainage.next_deadline() is None


def test_beginning_the_drain_again_gives_no_more_time() -> None:
    drainage = begun()
    drainage.begin(120.0)
    assert drainage.next_deadline() == 130.0
    drainage.tick(130.0)
    drainage.begin(131.0)
    assert drainage.next_deadline() == 130.0 + LAST_S


def test_requests_that_come_too_late_may_try_elsewhere() -> None:
    drainage = begun()
    refusal = drainage.refusal()
    assert refusal is not drainage.refusal(), "one that was raised holds what its callers held"
    assert (refusal.status, refusal.retryable) == (503, True) and "d is leaving" in str(refusal)
