"""`launch local` with stub children: what it starts, and starts again, what it says, and the order in which it stops."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.fleet_page import FleetPage
from tests.launch.waiting import PATIENCE_S, is_alive, wait_for


class Fleet:
    """`launch local` as a process of its own, with its output in files."""

    def __init__(self, folder: Path, prefill: int, decode: int, startup_timeout_s: float) -> None:
        self._out, self._err = folder / "out", folder / "err"
        command = [sys.executable, "-m", "tests.launch.stub", "fleet", str(prefill), str(decode), str(startup_timeout_s)]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_until_ready(self) -> None:
        wait_for(lambda: "curl " in self.out or self.process.poll() is not None, "the fleet is ready")
        assert self.process.poll() is None, self.err

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        """Its children follow."""
        self.process.kill()
        self.wait()


Start = Callable[..., Fleet]


@pytest.fixture
def start(tmp_path: Path, log: Path, request: pytest.FixtureRequest) -> Start:
    def start_fleet(prefill: int = 1, decode: int = 1, startup_timeout_s: float = PATIENCE_S) -> Fleet:
        fleet = Fleet(tmp_path, prefill, decode, startup_timeout_s)
        request.addfinalizer(fleet.end)
        return fleet

    return start_fleet


@dataclass(frozen=True)
class Life:
    """One life of a stub."""

    name: str
    pid: int
    flags: list[str]


def lives(log: Path, name: str | None = None) -> list[Life]:
    """In the order in which they began."""
    found = re.findall(r"^(\S+) runs as (\d+) with (.*)$", log.read_text(), re.MULTILINE)
    return [Life(who, int(pid), flags.split()) for who, pid, flags in found if name in (None, who)]


def wait_for_life(log: Path, name: str, number: int) -> None:
    """Until it has begun the life of that number, from 1."""
    wait_for(lambda: len(lives(log, name)) >= number, f"{name} begins life {number}")


def pids(log: Path) -> list[int]:
    return [life.pid for life in lives(log)]


def stops(log: Path) -> list[str]:
    lines = log.read_text().splitlines()
    return [
        line.split()[0] if line.endswith(" stopped") else "intake" for line in lines if re.search("stopped$|CloseIntake$", line)
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_fleet_starts_prints_a_curl_line_and_stops_in_order(start: Start, log: Path, number: signal.Signals) -> None:
    fleet = start(2, 2)
    fleet.wait_until_ready()
    assert re.search(r"curl http://127\.0\.0\.1:\d+/v1/chat/completions .*\"model\": \"stub\"", fleet.out, re.DOTALL)
    for name in ("router", "prefill-0", "prefill-1", "decode-0", "decode-1"):
        assert re.search(rf"^{name} +ready", fleet.out, re.MULTILINE) and f"{name:<12} warming up" in fleet.out
    family = pids(log)
    assert len(family) == 5
    fleet.signal(number)
    assert fleet.wait() == 0, fleet.err
    order = stops(log)
    assert order[0] == "intake" and order[-1] == "router"
    assert sorted(order[1:3]) == ["prefill-0", "prefill-1"] and sorted(order[3:5]) == ["decode-0", "decode-1"]
    assert not [pid for pid in family if is_alive(pid)]


def test_a_fleet_without_prefill_is_one_of_decode_alone(start: Start, log: Path) -> None:
    fleet = start(0, 1)
    fleet.wait_until_ready()
    fleet.signal(signal.SIGINT)
    assert fleet.wait() == 0
    assert stops(log) == ["intake", "decode-0", "router"]


def test_the_startup_deadline_names_the_part_that_is_late_and_what_it_did(
    start: Start, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_DECODE_0", "slow")
    fleet = start(1, 1, startup_timeout_s=10.0)
    assert fleet.wait() == 1
    assert "decode-0 was not ready in time" in fleet.err and "warming up" in fleet.err and "--startup-timeout-s" in fleet.err
    assert "prefill-0 was not ready" not in fleet.err and "curl " not in fleet.out
    assert not [pid for pid in pids(log) if is_alive(pid)]


def test_a_child_that_fails_at_start_is_shown_with_its_words_and_the_others_stop(
    start: Start, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_PREFILL_0", "broken")
    fleet = start()
    assert fleet.wait() == 1
    assert "prefill-0 ended: exit status 3" in fleet.err and "prefill-0 has no water" in fleet.err
    assert "router stopped" in log.read_text()
    assert not [pid for pid in pids(log) if is_alive(pid)]


@pytest.mark.parametrize("name", ["router", "decode-0"])
def test_a_child_that_was_killed_is_started_again_as_it_was(start: Start, log: Path, name: str) -> None:
    fleet = start(1, 2)
    fleet.wait_until_ready()
    (first,) = lives(log, name)
    os.kill(first.pid, signal.SIGKILL)
    wait_for_life(log, name, 2)
    _, second = lives(log, name)
    assert second.pid != first.pid and is_alive(second.pid)
    if name != "router":
        assert second.flags == first.flags and f"--name={name}" in first.flags
    said = "ended, and is started again in 0.5 s: killed by SIGKILL"
    assert re.search(rf"^{name} +{said}$", fleet.out, re.MULTILINE) and f"{name} {said}" in fleet.err
    wait_for(lambda: len(re.findall(rf"^{name} +ready", fleet.out, re.MULTILINE)) == 2, f"{name} is ready again")
    assert fleet.process.poll() is None
    fleet.signal(signal.SIGINT)
    assert fleet.wait() == 0, fleet.err
    assert stops(log)[0] == "intake" and stops(log)[-1] == "router"
    assert not [pid for pid in pids(log) if is_alive(pid)]


def test_a_router_that_was_killed_comes_back_on_the_ports_that_it_had_chosen(start: Start, log: Path) -> None:
    fleet = start()
    fleet.wait_until_ready()
    (first,) = lives(log, "router")
    assert first.flags == ["--port=0", "--control-port=0"]
    (port,) = re.findall(r"curl http://127\.0\.0\.1:(\d+)/", fleet.out)
    os.kill(first.pid, signal.SIGKILL)
    page = FleetPage(f"http://127.0.0.1:{port}")
    wait_for(lambda: len(lives(log, "router")) == 2 and page.get("/v1/models") is not None, "the router answers again")
    assert lives(log, "router")[1].flags == [f"--port={port}", "--control-port=2"], "2 is what the stub calls its port"
    assert len(lives(log, "decode-0")) == 1


def test_a_child_that_dies_again_and_again_is_given_more_time_each_time(start: Start, log: Path) -> None:
    fleet = start()
    fleet.wait_until_ready()
    began = time.monotonic()
    for life in (1, 2, 3):
        wait_for_life(log, "decode-0", life)
        os.kill(lives(log, "decode-0")[-1].pid, signal.SIGKILL)
    wait_for(lambda: "decode-0     ended, and is started again in 2 s" in fleet.out, "the third end was noticed")
    assert time.monotonic() - began >= 0.5 + 1.0
    assert re.findall(r"started again in (\S+) s", fleet.out) == ["0.5", "1", "2"]


def test_an_instance_that_ended_in_order_is_not_started_again(start: Start, log: Path) -> None:
    fleet = start(1, 2)
    fleet.wait_until_ready()
    os.kill(lives(log, "decode-0")[0].pid, signal.SIGTERM)
    wait_for(lambda: "decode-0     has left as it was told, and is not started again" in fleet.out, "its end was noticed")
    os.kill(lives(log, "decode-1")[0].pid, signal.SIGKILL)
    wait_for_life(log, "decode-1", 2)  # the fleet goes on, for longer than a back-off
    assert len(lives(log, "decode-0")) == 1
    fleet.signal(signal.SIGINT)
    assert fleet.wait() == 0


def test_an_instance_that_can_never_run_again_is_left_alone_while_another_does_its_work(
    start: Start, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_DECODE_0", "unfit")
    fleet = start(1, 2)
    fleet.wait_until_ready()
    os.kill(lives(log, "decode-0")[0].pid, signal.SIGKILL)
    said = "decode-0     CANNOT RUN as it was started, and is not started again: --water: decode-0 cannot boil it"
    wait_for(lambda: said in fleet.out, "its end was noticed")
    assert fleet.process.poll() is None and len(re.findall("decode-0 .*started again in", fleet.out)) == 1
    fleet.signal(signal.SIGTERM)
    assert fleet.wait() == 0


def test_the_fleet_ends_with_the_last_of_a_role_that_can_never_run_again(
    start: Start, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_DECODE_0", "unfit")
    fleet = start()
    fleet.wait_until_ready()
    os.kill(lives(log, "decode-0")[0].pid, signal.SIGKILL)
    assert fleet.wait() == 1
    assert "no decode is left" in fleet.err and "decode-0 cannot boil it" in fleet.err
    assert not [pid for pid in pids(log) if is_alive(pid)]


def test_a_child_that_ends_before_the_fleet_is_complete_takes_it_down(
    start: Start, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_PREFILL_0", "mortal")
    monkeypatch.setenv("STUB_DECODE_0", "slow")
    fleet = start()
    assert fleet.wait() == 1
    assert "prefill-0 ended: exit status 0" in fleet.err
    assert not [pid for pid in pids(log) if is_alive(pid)]


def test_a_fleet_that_stops_gives_its_instances_the_time_to_drain(
    start: Start, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_STOP_S", "0.5")
    monkeypatch.setenv("STUB_PREFILL_0", "leisurely")
    fleet = start()
    fleet.wait_until_ready()
    fleet.signal(signal.SIGTERM)
    assert fleet.wait() == 0
    assert stops(log) == ["intake", "prefill-0", "decode-0", "router"] and "was killed" not in fleet.err


def test_a_second_ctrl_c_kills_at_once(start: Start, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_PREFILL_0", "stubborn")
    fleet = start()
    fleet.wait_until_ready()
    fleet.signal(signal.SIGINT)
    wait_for(lambda: "prefill-0 will not stop" in log.read_text(), "the orderly stop waits for prefill-0")
    fleet.signal(signal.SIGINT)
    assert fleet.wait() == 130
    assert "decode-0 stopped" not in log.read_text()
    assert not [pid for pid in pids(log) if is_alive(pid)]


def test_a_killed_launcher_leaves_no_child(start: Start, log: Path) -> None:
    fleet = start()
    fleet.wait_until_ready()
    fleet.signal(signal.SIGKILL)
    fleet.wait()
    wait_for(lambda: not any(is_alive(pid) for pid in pids(log)), "every child is gone")
    assert set(stops(log)) == {"router", "prefill-0", "decode-0"}
