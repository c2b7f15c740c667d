"""The driver in simulated time: what is sent when, and that a server that stalls cannot hide it."""

import heapq
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from bench.serve.answers import Answer
from bench.serve.driver import Driver
from bench.serve.figures import figures_of
from bench.serve.workloads.sessions import Session, Turn

METRICS = {"metrics": ("ttft", "itl", "e2el"), "percentiles": (50.0, 99.0), "limits_ms": {}}
ONE = Session((Turn("?", 1),))


class World:
    """A clock, and a server behind it that serves one request after another. stall_s: it does nothing in this time."""

    def __init__(self, service_s: float, stall_s: tuple[float, float] = (0.0, 0.0)) -> None:
        self._calls: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._now_s = 0.0
        self._service_s, self._stall_s, self._free_s = service_s, stall_s, 0.0
        self.sent: list[tuple[float, int, list[str]]] = []
        self.fails: set[tuple[int, int]] = set()

    def now_s(self) -> float:
        return self._now_s

    def call_at(self, at_s: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._calls, (max(at_s, self._now_s), next(self._numbers), call))

    def send(self, session: Session, said: list[str], answer: Answer, ended: Callable[[Answer], object]) -> None:
        self.sent.append((self._now_s, answer.session, said))
        done_s = max(self._now_s, self._free_s) + self._service_s
        if self._stall_s[0] < done_s < self._stall_s[1]:
            done_s = self._stall_s[1] + self._service_s
        self._free_s = done_s

        def end() -> None:
            answer.arrived(self._now_s, 1)
            answer.text = f"answer {answer.turn}"
            answer.ended(self._now_s, "5xx" if (answer.session, answer.turn) in self.fails else "")
            ended(answer)

        self.call_at(done_s, end)

    def drive(self, sessions: list[Session], due_s: list[float], *, most_open: int = 0, is_open: bool = True) -> Driver:
        over: list[float] = []
        driver = Driver(
            sessions, due_s, self, self.send, lambda: over.append(self._now_s), most_open=most_open, counts_from_due=is_open
        )
        driver.start()
        while self._calls:
            self._now_s, _, call = heapq.heappop(self._calls)
            call()
        assert over == [self._now_s], "it is over once, when the last answer has ended"
        assert driver.open == 0 and driver.elapsed_s == self._now_s
        return driver


def test_an_open_load_is_sent_when_it_is_due_whatever_is_open() -> None:
    world = World(service_s=100.0)
    world.drive([ONE] * 4, [0.0, 1.0, 1.0, 2.5])
    assert [(at_s, number) for at_s, number, _ in world.sent] == [(0.0, 0), (1.0, 1), (1.0, 2), (2.5, 3)]


@pytest.mark.parametrize("most_open", [0, 1], ids=["open", "with a limit on open requests"])
def test_a_server_that_stalls_for_two_seconds_shows_in_p99(most_open: int) -> None:
    # 100 requests a second for 10 s, 1 ms each; nothing is answered from 4 s to 6 s. The 200 that are due in these 2 s wait, and
    # with them those that are due while they are served: more than 1 % of all.
    world = World(0.001, stall_s=(4.0, 6.0))
    driver = world.drive([ONE] * 1000, [0.01 * i for i in range(1000)], most_open=most_open)
    figures = figures_of(driver.answers, driver.elapsed_s, **METRICS)  # type: ignore[arg-type]
    assert figures["p50_ttft_ms"] == pytest.approx(1.0)
    queue_s, free_s = [], 0.0
    for i in range(1000):  # the waiting of each request by Lindley's recursion
        done_s = max(0.01 * i, free_s) + 0.001
        free_s = 6.001 if 4.0 < done_s < 6.0 else done_s
        queue_s.append(free_s - 0.01 * i)
    assert figures["p99_ttft_ms"] == pytest.approx(1000 * np.percentile(queue_s, 99))
    assert figures["p99_ttft_ms"] > 1900


def test_a_closed_load_has_as_many_open_as_it_may_and_its_times_count_from_the_sending() -> None:
    world = World(service_s=1.0)
    driver = world.drive([ONE] * 4, [0.0] * 4, most_open=2, is_open=False)
    assert [at_s for at_s, _, _ in world.sent] == [0.0, 0.0, 1.0, 2.0]
    assert [answer.ttft_s for answer in driver.answers] == [1.0, 2.0, 2.0, 2.0], "the server serves one at a time"


def test_a_turn_is_sent_when_the_one_before_has_ended_with_the_answers_so_far_and_keeps_its_place() -> None:
    world = World(service_s=1.0)
    world.drive([Session((Turn("a", 1), Turn("b", 1))), ONE], [0.0, 0.0], most_open=1)
    assert world.sent == [(0.0, 0, []), (1.0, 0, ["answer 0"]), (2.0, 1, [])]


def test_a_turn_that_fails_ends_its_conversation() -> None:
    world = World(service_s=1.0)
    world.fails = {(0, 0)}
    driver = world.drive([Session((Turn("a", 1), Turn("b", 1))), ONE], [0.0, 5.0])
    assert [(answer.session, answer.error) for answer in driver.answers] == [(0, "5xx"), (1, "")]
