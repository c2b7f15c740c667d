"""The supervisor on a hand-turned clock: what is started again and when, what is not, and when all is over."""

import logging
import signal

import pytest

from common.processes.child import Broken, Exited, Progress, Ready, Reported
from launch.child import BAD_FLAG, RoleEvent
from launch.supervisor import GivenUp, SupervisedChild, Supervisor

PARTS = (
    SupervisedChild("router", "router", drains=False),
    SupervisedChild("prefill-0", "prefill", drains=True),
    SupervisedChild("decode-0", "decode", drains=True),
    SupervisedChild("decode-1", "decode", drains=True),
)


class Watched:
    """A supervisor, its clock, and what it did: what it told of whom and why, the parts that it started, and how it gave up."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str, int]] = []
        self.starts: list[str] = []
        self.given_up: GivenUp | None = None
        self.cannot_start = False
        self.supervisor = Supervisor(PARTS, self._start, lambda *told: self.told.append(told))
        self.now = 1_000.0

    def complete(self) -> None:
        for part in PARTS:
            self.ready(part.name)
        self.supervisor.started()

    def ready(self, name: str) -> None:
        self.supervisor.turn(Reported(name, Ready(addresses={})), self.now)

    def ends(self, name: str, status: int = -signal.SIGKILL) -> None:
        try:
            self.supervisor.turn(Exited(name, status, f"status {status}\n  last lines"), self.now)
        except GivenUp as error:
            self.given_up = error

    def backoff_s(self, name: str, status: int = -signal.SIGKILL) -> float:
        """It ends now; the time goes on until it is started again."""
        self.ends(name, status)
        ended = self.now
        self.wait_for_start(name)
        return self.now - ended

    def wait_for_start(self, name: str) -> None:
        at = self.supervisor.next_deadline()
        assert at is not None
        for self.now, started in ((at - 0.001, []), (at, [name]), (at, [])):
            self.starts.clear()
            self.supervisor.turn(None, self.now)
            assert self.starts == started, "not before its time, and once"

    def _start(self, name: str) -> None:
        if self.cannot_start:
            raise OSError("no memory")
        self.starts.append(name)


@pytest.fixture
def watched() -> Watched:
    made = Watched()
    made.complete()
    return made


def test_the_back_off_doubles_from_half_a_second_to_thirty(watched: Watched) -> None:
    waits = [watched.backoff_s("decode-0") for _ in range(9)]
    assert waits == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30, 30])


def test_a_part_that_was_ready_for_a_minute_begins_anew(watched: Watched) -> None:
    assert [watched.backoff_s("decode-0") for _ in range(3)] == pytest.approx([0.5, 1, 2])
    watched.ready("decode-0")
    watched.now += 59.9
    assert watched.backoff_s("decode-0") == pytest.approx(4)
    watched.ready("decode-0")
    watched.now += 60.0
    assert watched.backoff_s("decode-0") == pytest.approx(0.5)
    assert watched.backoff_s("decode-0") == pytest.approx(1)


def test_a_minute_that_was_spent_starting_does_not_count(watched: Watched) -> None:
    assert watched.backoff_s("decode-0") == pytest.approx(0.5)
    watched.supervisor.turn(Reported("decode-0", Progress(text="loading")), watched.now)
    watched.now += 600
    assert watched.backoff_s("decode-0") == pytest.approx(1)


def test_the_back_offs_of_two_parts_have_nothing_to_do_with_each_other(watched: Watched) -> None:
    assert [watched.backoff_s("decode-0") for _ in range(2)] == pytest.approx([0.5, 1])
    watched.ends("decode-0")  # again in 2 s
    watched.ends("router")  # again in 0.5 s
    watched.wait_for_start("router")
    watched.wait_for_start("decode-0")
    assert watched.supervisor.next_deadline() is None


@pytest.mark.parametrize(("name", "status"), [("decode-0", 1), ("decode-0", -signal.SIGSEGV), ("router", 0), ("router", 1)])
def test_whatever_else_ends_is_started_again_and_it_is_said_why_and_when(watched: Watched, name: str, status: int) -> None:
    assert watched.backoff_s(name, status) == pytest.approx(0.5)
    assert watched.told == [(name, "ended, and is started again in 0.5 s", f"status {status}\n  last lines", logging.ERROR)]
    assert not watched.given_up


def test_a_part_that_cannot_be_started_counts_as_one_that_ended(watched: Watched) -> None:
    watched.ends("decode-0")
    watched.cannot_start, watched.now = True, watched.now + 0.5
    watched.supervisor.turn(None, watched.now)
    assert watched.told[1:] == [
        ("decode-0", "ended, and is started again in 1 s", "it cannot be started: no memory", logging.ERROR)
    ]
    watched.cannot_start = False
    watched.wait_for_start("decode-0")


def test_an_instance_that_ended_in_order_is_not_started_again_which_is_no_error_and_nothing_else_happens(
    watched: Watched,
) -> None:
    for name in ("decode-0", "decode-1", "prefill-0"):
        watched.ends(name, 0)
    assert watched.supervisor.next_deadline() is None and not watched.given_up
    assert [name for name, *_ in watched.told] == ["decode-0", "decode-1", "prefill-0"]
    assert all("not started again" in became and level == logging.INFO for _, became, _, level in watched.told)


def test_a_part_that_can_never_run_is_given_up_while_others_of_its_role_live(watched: Watched) -> None:
    watched.ends("decode-0", BAD_FLAG)
    assert watched.supervisor.next_deadline() is None and not watched.given_up
    ((_, became, account, level),) = watched.told
    assert "CANNOT RUN" in became and account.startswith("status 2") and level == logging.ERROR


def test_one_that_waits_to_be_started_again_is_alive(watched: Watched) -> None:
    watched.ends("decode-1")
    watched.ends("decode-0", BAD_FLAG)
    assert not watched.given_up
    watched.wait_for_start("decode-1")


@pytest.mark.parametrize("name", ["prefill-0", "router"])
def test_the_last_of_a_role_that_can_never_run_is_the_end_of_all(watched: Watched, name: str) -> None:
    watched.ends(name, BAD_FLAG)
    assert watched.given_up is not None and watched.given_up.exit_status == BAD_FLAG and not watched.told
    assert name in str(watched.given_up) and "status 2" in str(watched.given_up)


def test_one_that_was_drained_does_not_count_as_alive(watched: Watched) -> None:
    watched.ends("decode-1", 0)
    assert not watched.given_up
    watched.ends("decode-0", BAD_FLAG)
    assert watched.given_up is not None and watched.given_up.exit_status == BAD_FLAG


@pytest.mark.parametrize("status", [0, 1, BAD_FLAG, -signal.SIGKILL])
def test_during_the_first_start_any_end_is_the_end_of_all(status: int) -> None:
    watched = Watched()
    watched.ready("decode-0")
    watched.ends("decode-0", status)
    assert watched.given_up is not None and watched.given_up.exit_status == (BAD_FLAG if status == BAD_FLAG else 1)
    assert str(watched.given_up) == f"decode-0 ended: status {status}\n  last lines"
    assert watched.supervisor.next_deadline() is None


@pytest.mark.parametrize("event", [Reported("decode-0", Progress(text="x")), Reported("decode-0", Broken(reason="x"))])
def test_what_a_child_says_before_it_ends_calls_for_nothing(watched: Watched, event: RoleEvent) -> None:
    watched.supervisor.turn(event, watched.now)
    assert not watched.told and not watched.starts and watched.supervisor.next_deadline() is None
