"""The detokenizer as the router's child: kept alive, and brought together with the router, with a stub for the former."""

import asyncio
import os
import re
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from common.errors import ConfigError
from launch.router_process import DetokenizerFailed, KeptDetokenizer
from tests.launch.stub import stub_command
from tests.launch.waiting import PATIENCE_S, is_alive
from tests.rig.forks import forked

CONTROL = "tcp://127.0.0.1:9"


class Kept:
    """A kept detokenizer, with a note of all that it says to others."""

    def __init__(self, log: Path) -> None:
        self.said: list[str] = []
        self.moves: list[str] = []
        self.end = asyncio.Event()
        self._log = log
        self.detokenizer = KeptDetokenizer("detokenizer", stub_command("detokenizer", []), self.said.append, self.end.set)

    def meet(self) -> None:
        self.detokenizer.meet(CONTROL, self.moves.append)

    @property
    def pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"detokenizer runs as (\d+)", self._log.read_text())]

    @property
    def meetings(self) -> int:
        return self._log.read_text().count("detokenizer order MeetRouter")

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not holds():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"never happened: {what}; it said {self.said}") from None


def with_detokenizer(**environment: str) -> Callable[[Callable[[Kept], Coroutine[None, None, None]]], Callable[..., None]]:
    """Run a test in a loop of its own, with a kept detokenizer that has this environment. None is left at the end."""

    def make_test(body: Callable[[Kept], Coroutine[None, None, None]]) -> Callable[..., None]:
        async def main(log: Path) -> None:
            kept = Kept(log)
            try:
                await body(kept)
            finally:
                await kept.detokenizer.stop()
            assert not [pid for pid in kept.pids if is_alive(pid)]

        def test(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            with forked():
                asyncio.run(main(log))

        return test

    return make_test


def inbox(pid: int) -> str:
    return f"tcp://127.0.0.1:{pid}"


@with_detokenizer()
async def test_a_detokenizer_that_died_is_started_again_and_each_side_learns_where_the_other_is(kept: Kept) -> None:
    first = await kept.detokenizer.first_inbox(kept.end)
    kept.meet()
    assert first == inbox(kept.pids[0])
    await kept.until(lambda: kept.meetings == 1, "the first detokenizer meets the router")
    assert not kept.moves, "the router was told of the first one when it began"
    os.kill(kept.pids[0], signal.SIGKILL)
    await kept.until(lambda: kept.meetings == 2, "the second detokenizer meets the router")
    assert kept.moves == [inbox(kept.pids[1])] and kept.moves != [first]
    assert "detokenizer ended, and is started again in 0.5 s: killed by SIGKILL" in kept.said
    assert not kept.end.is_set()
    kept.detokenizer.check()


@with_detokenizer()
async def test_one_that_was_told_to_stop_is_started_again_too(kept: Kept) -> None:
    await kept.detokenizer.first_inbox(kept.end)
    kept.meet()
    os.kill(kept.pids[0], signal.SIGTERM)
    await kept.until(lambda: len(kept.moves) == 1, "the router learns of the second")


@with_detokenizer()
async def test_a_detokenizer_that_died_before_the_router_served_is_made_known_when_it_does(kept: Kept) -> None:
    first = await kept.detokenizer.first_inbox(kept.end)
    os.kill(kept.pids[0], signal.SIGKILL)
    await kept.until(lambda: kept.said.count("detokenizer: warming up") == 2, "the second one starts")
    await kept.until(lambda: len(kept.pids) == 2, "the second one runs")
    assert not kept.moves
    kept.meet()
    await kept.until(lambda: kept.moves == [inbox(kept.pids[1])] != [first], "the router learns of the second")
    await kept.until(lambda: kept.meetings == 1, "and the second of the router")


@with_detokenizer(STUB_DETOKENIZER="broken")
async def test_one_that_dies_before_it_is_ready_is_the_end(kept: Kept) -> None:
    assert await kept.detokenizer.first_inbox(kept.end) is None
    with pytest.raises(DetokenizerFailed, match="detokenizer has no water"):
        kept.detokenizer.check()


@with_detokenizer(STUB_DETOKENIZER="unfit")
async def test_one_that_can_never_run_again_is_the_end_and_says_which_flag_it_was(kept: Kept) -> None:
    await kept.detokenizer.first_inbox(kept.end)
    os.kill(kept.pids[0], signal.SIGKILL)
    await asyncio.wait_for(kept.end.wait(), PATIENCE_S)
    with pytest.raises(ConfigError, match="--water"):
        kept.detokenizer.check()


@with_detokenizer()
async def test_one_that_stops_with_the_router_is_not_started_again(kept: Kept) -> None:
    await kept.detokenizer.first_inbox(kept.end)
    await kept.detokenizer.stop()
    await asyncio.sleep(0.7)  # longer than the first back-off
    assert len(kept.pids) == 1 and not any("again" in line for line in kept.said)


@with_detokenizer(STUB_DETOKENIZER="slow")
async def test_a_router_that_is_told_to_stop_does_not_wait_for_its_detokenizer(kept: Kept) -> None:
    await kept.until(lambda: bool(kept.said), "it starts")
    kept.end.set()
    assert await kept.detokenizer.first_inbox(kept.end) is None
    kept.detokenizer.check()
