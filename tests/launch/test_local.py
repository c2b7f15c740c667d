"""`launch local` with stub children: what it starts, and starts again, what it says, and the order in which it stops.

`tests/e2e/test_supervision.py` has what becomes of real children that are killed or told to stop.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.processes.child import ORDER_FD, REPORT_FD
from launch.child import BAD_FLAG
from tests.launch.waiting import is_alive, wait_for
from tests.rig.forks import module_process


@dataclass(frozen=True)
class Life:
    """One life of a stub."""

    name: str
    pid: int
    flags: list[str]


class Fleet:
    """`launch local` as a process of its own, with its output in files. log: what the stubs have noted."""

    def __init__(
        self, folder: Path, log: Path, prefill: int, decode: int, environment: dict[str, str], inherits: tuple[int, ...]
    ) -> None:
        self._out, self._err, self._log = folder / "out", folder / "err", log
        words = ["tests.launch.stub", "fleet", str(prefill), str(decode)]
        with open(os.devnull) as nothing, self._out.open("w") as out, self._err.open("w") as err:
            files = [each.fileno() for each in (nothing, out, err)]
            self.process = module_process(words, os.environ | environment, files, inherits)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def lives(self, name: str | None = None) -> list[Life]:
        """In the order in which they began."""
        found = re.findall(r"^(\S+) runs as (\d+) with (.*)$", self._log.read_text(), re.MULTILINE)
        return [Life(who, int(pid), flags.split()) for who, pid, flags in found if name in (None, who)]

    def alive(self) -> list[Life]:
        return [life for life in self.lives() if is_alive(life.pid)]

    def stops(self) -> list[str]:
        """The stubs that have stopped in order, and "intake" when the router closed it."""
        found = re.findall(r"^(\S+) (?:stopped|order (CloseIntake))$", self._log.read_text(), re.MULTILINE)
        return ["intake" if intake else name for name, intake in found]

    def wait_until_ready(self) -> None:
        wait_for(lambda: "curl " in self.out or self.process.poll() is not None, "the fleet is ready")
        assert self.process.poll() is None, self.err

    def wait_for_life(self, name: str, number: int) -> None:
        """Until it has begun the life of that number, from 1."""
        wait_for(lambda: len(self.lives(name)) >= number, f"{name} begins life {number}")

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send the signal to the present life of a child."""
        os.kill(self.lives(name)[-1].pid, number)

    def status(self) -> int:
        """Its exit status, when it has ended. No child is left then."""
        wait_for(lambda: self.process.poll() is not None, "it ends")
        assert not self.alive()
        return self.process.wait()

    def stop(self, number: signal.Signals = signal.SIGINT) -> list[str]:
        """Stop it in order. Returns what stopped, in which order."""
        self.process.send_signal(number)
        assert self.status() == 0, self.err
        return self.stops()

    def end(self) -> None:
        """Its children follow."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


Start = Callable[..., Fleet]


@pytest.fixture
def start(tmp_path: Path, log: Path, request: pytest.FixtureRequest) -> Start:
    """Start a fleet. Its environment tells its stubs how to misbehave."""

    def start_fleet(
        prefill: int = 1, decode: int = 1, *, gets_ready: bool = True, inherits: tuple[int, ...] = (), **environment: str
    ) -> Fleet:
        fleet = Fleet(tmp_path, log, prefill, decode, environment, inherits)
        request.addfinalizer(fleet.end)
        if gets_ready:
            fleet.wait_until_ready()
        return fleet

    return start_fleet


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_fleet_starts_prints_a_curl_line_and_stops_in_order(start: Start, number: signal.Signals) -> None:
    fleet = start(2, 2)
    assert re.search(r"curl http://127\.0\.0\.1:\d+/v1/chat/completions .*\"model\": \"stub\"", fleet.out, re.DOTALL)
    for name in ("router", "prefill-0", "prefill-1", "decode-0", "decode-1"):
        assert re.search(rf"^{name} +ready", fleet.out, re.MULTILINE) and f"{name:<12} warming up" in fleet.out
    assert len(fleet.lives()) == 5
    order = fleet.stop(number)
    said = fleet.out.partition("stopping in order; a second Ctrl-C or SIGTERM stops everything at once\n")[2]
    assert re.findall(r"waiting for (.*), \d+ s at most", said) == [
        "the open answers of router",
        "prefill-0, prefill-1",
        "decode-0, decode-1",
        "router",
    ]
    assert said.endswith("\nstopped\n") and "WARNING" not in fleet.err
    assert order[0] == "intake" and order[-1] == "router"
    assert sorted(order[1:3]) == ["prefill-0", "prefill-1"] and sorted(order[3:5]) == ["decode-0", "decode-1"]


def heard(fleet: Fleet, line: str) -> None:
    """Until the router has heard of these instances."""
    wait_for(lambda: f"router hears of {line}" in fleet._log.read_text(), f"the router hears of {line}")


def test_a_router_gets_a_spare_instance_when_it_asks_for_one_and_no_more_than_there_are(start: Start) -> None:
    fleet = start(1, 1, STUB_SPARE="1", STUB_ROUTER="asks")
    heard(fleet, "prefill-0,decode-0 and 1 more")
    heard(fleet, "prefill-0,decode-0,spare-0 and 0 more")
    fleet.wait_for_life("spare-0", 1)
    assert len(fleet.lives()) == 4
    order = fleet.stop()
    assert order[:2] == ["intake", "prefill-0"] and sorted(order[2:4]) == ["decode-0", "spare-0"] and order[4] == "router"


def test_what_has_drained_is_a_spare_instance(start: Start) -> None:
    fleet = start(1, 2)
    heard(fleet, "prefill-0,decode-0,decode-1 and 0 more")
    fleet.kill("decode-1", signal.SIGTERM)
    heard(fleet, "prefill-0,decode-0 and 1 more")


def test_an_instance_that_died_is_kept_and_no_spare_one(start: Start) -> None:
    fleet = start(1, 1)
    fleet.kill("decode-0")
    fleet.wait_for_life("decode-0", 2)
    assert "and 1 more" not in fleet._log.read_text()


def test_a_router_that_died_hears_again_of_what_is_kept(start: Start) -> None:
    fleet = start(1, 1)
    heard(fleet, "prefill-0,decode-0 and 0 more")
    before = fleet._log.read_text().count("router hears of")
    fleet.kill("router")
    fleet.wait_for_life("router", 2)
    wait_for(lambda: fleet._log.read_text().rpartition("router runs as")[2].count("router hears of") > 0, "it hears of them")
    assert before > 0


def test_the_startup_deadline_names_the_part_that_is_late_and_what_it_did(start: Start) -> None:
    """The clock jumps to the deadline when prefill-0 is ready and decode-0 has said what it does: no verdict by speed."""
    fleet = start(gets_ready=False, STUB_DECODE_0="slow", STUB_JUMP_TO_DEADLINE="yes")
    assert fleet.status() == 1
    assert "decode-0 was not ready in time" in fleet.err and "warming up" in fleet.err and "--startup-timeout-s" in fleet.err
    assert "prefill-0 was not ready" not in fleet.err and "curl " not in fleet.out


def test_a_child_that_fails_at_start_is_shown_with_its_words_and_the_others_stop_and_the_reason_is_the_last_line(
    start: Start,
) -> None:
    fleet = start(gets_ready=False, STUB_PREFILL_0="broken")
    assert fleet.status() == 1
    assert "prefill-0 ended: exit status 3" in fleet.err and "prefill-0 has no water" in fleet.err
    assert "router" in fleet.stops()
    assert fleet.err.splitlines()[-1].startswith("failed: prefill-0 ended: exit status 3")


def test_a_child_that_dies_again_and_again_is_given_more_time_each_time(start: Start) -> None:
    fleet = start()
    began = time.monotonic()
    for life in (1, 2, 3):
        fleet.wait_for_life("decode-0", life)
        fleet.kill("decode-0")
    wait_for(lambda: "decode-0     ended, and is started again in 2 s" in fleet.out, "the third end was noticed")
    assert time.monotonic() - began >= 0.5 + 1.0
    assert re.findall(r"started again in (\S+) s", fleet.out) == ["0.5", "1", "2"]


def test_an_instance_that_can_never_run_again_is_left_alone_while_another_does_its_work(start: Start) -> None:
    fleet = start(1, 2, STUB_DECODE_0="unfit")
    fleet.kill("decode-0")
    said = "decode-0     CANNOT RUN as it was started, and is not started again: --water: decode-0 cannot boil it"
    wait_for(lambda: said in fleet.out, "its end was noticed")
    assert fleet.process.poll() is None and len(re.findall("decode-0 .*started again in", fleet.out)) == 1
    fleet.stop(signal.SIGTERM)


def test_the_fleet_ends_with_the_last_of_a_role_that_can_never_run_again(start: Start) -> None:
    fleet = start(STUB_DECODE_0="unfit")
    fleet.kill("decode-0")
    assert fleet.status() == BAD_FLAG
    assert "no decode is left" in fleet.err and (fleet.out + fleet.err).count("decode-0 cannot boil it") == 2, "and at the end"


def test_a_child_that_ends_before_the_fleet_is_complete_takes_it_down(start: Start) -> None:
    fleet = start(gets_ready=False, STUB_PREFILL_0="mortal", STUB_DECODE_0="slow")
    assert fleet.status() == 1
    assert "prefill-0 ended: exit status 0" in fleet.err


def test_a_fleet_that_stops_gives_its_instances_the_time_to_drain(start: Start, log: Path) -> None:
    fleet = start(STUB_PREFILL_0="leisurely")
    assert fleet.stop(signal.SIGTERM) == ["intake", "prefill-0", "decode-0", "router"] and "was killed" not in fleet.err
    granted = re.findall(r"^(\S+) has (\S+) s to stop$", log.read_text(), re.MULTILINE)
    assert granted == [("prefill-0", "15"), ("decode-0", "15"), ("router", "10")], "5 s to drain, and 10 s to stop"


def test_a_second_ctrl_c_kills_at_once(start: Start, log: Path) -> None:
    fleet = start(STUB_PREFILL_0="stubborn")
    fleet.process.send_signal(signal.SIGINT)
    wait_for(lambda: "prefill-0 will not stop" in log.read_text(), "the orderly stop waits for prefill-0")
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.status() == 130
    assert "decode-0" not in fleet.stops()


def test_a_killed_launcher_leaves_no_child(start: Start) -> None:
    fleet = start()
    fleet.end()
    wait_for(lambda: not fleet.alive(), "every child is gone")
    assert set(fleet.stops()) == {"router", "prefill-0", "decode-0"}


def test_a_launcher_whose_parent_is_gone_stops_in_order(start: Start, log: Path) -> None:
    order_fd, parent_fd = os.pipe()
    report_fd, child_fd = os.pipe()
    fleet = start(inherits=(order_fd, child_fd), **{ORDER_FD: str(order_fd), REPORT_FD: str(child_fd)})
    for fd in (order_fd, child_fd, report_fd, parent_fd):
        os.close(fd)
    assert fleet.status() == 0
    assert fleet.stops() == ["intake", "prefill-0", "decode-0", "router"]
