"""`launch local` with stub children: what it starts, what it says, and the order in which it stops."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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


Start = Callable[..., Fleet]


@pytest.fixture
def start(tmp_path: Path, log: Path, request: pytest.FixtureRequest) -> Start:
    def start_fleet(prefill: int = 1, decode: int = 1, startup_timeout_s: float = PATIENCE_S) -> Fleet:
        fleet = Fleet(tmp_path, prefill, decode, startup_timeout_s)
        request.addfinalizer(fleet.process.kill)  # its children follow
        return fleet

    return start_fleet


def pids(log: Path) -> list[int]:
    return [int(pid) for pid in re.findall(r"runs as (\d+)", log.read_text())]


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
    fleet = start(1, 1, startup_timeout_s=3.0)
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
def test_a_child_that_dies_takes_the_fleet_down(start: Start, log: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"STUB_{name.upper().replace('-', '_')}", "mortal")
    fleet = start()
    assert fleet.wait() == 1
    assert f"{name} ended: exit status 0" in fleet.err
    assert not [pid for pid in pids(log) if is_alive(pid)]


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
