"""The verdict of a soak, what it must see and what it must not take for something; and the whole hour, with --soak.

`./check` runs its short form, a fixed number of rounds, beside the tests.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from tests.rig.report import Check
from tests.soak.report import HEADER, MIB, Footprint, Period, line, verdict
from tests.soak.transfers import Record

START_S = 120.0
ROOT = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.timeout(2 * 3600)
@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed (it is for Linux only)")
def test_an_hour_of_joins_and_deaths_leaves_nothing_behind(tmp_path: Path) -> None:
    """Slow on purpose: small leaks show only after thousands of pushes."""
    file = tmp_path / "samples.json"
    command = [sys.executable, "-m", "tests.soak.transfers", "--minutes=60", f"--json={file}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600 + START_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = msgspec.json.decode(file.read_bytes(), type=Record)
    assert record.periods and all(period.counts["done"] for period in record.periods)


PERIODS = 60


@dataclass(frozen=True, slots=True)
class Course:
    """The first sender's figures, by the number of the period. The receiver's do not change."""

    resident_mib: Callable[[int], float] = lambda number: 100.0
    files: Callable[[int], int] = lambda number: 20
    threads: Callable[[int], int] = lambda number: 4
    speed: Callable[[int], float] = lambda number: 5e9 + 1e9 * (number % 3)

    def periods(self) -> list[Period]:
        return [self._period(number) for number in range(PERIODS)]

    def _period(self, number: int) -> Period:
        resident_bytes = int(self.resident_mib(number) * MIB)
        return Period(
            minute=number + 1.0,
            sender=Footprint(resident_bytes=resident_bytes, files=self.files(number), threads=self.threads(number)),
            receiver=Footprint(resident_bytes=100 * MIB, files=20, threads=4),
            slow=self.speed(number) / 2,
            median=self.speed(number),
            fast=self.speed(number) * 2,
            counts={"done": 100},
            duty=0.1,
            busy=0.5,
        )


def failures(course: Course, *problems: str) -> list[str]:
    checks: list[Check] = list(verdict(course.periods(), problems))
    return [check.text for check in checks if not check.holds]


@pytest.mark.parametrize(
    "course",
    [
        Course(),
        Course(resident_mib=lambda number: 100 + min(number, 6)),
        Course(resident_mib=lambda number: 100 + number % 2),
        Course(files=lambda number: 20 + number % 2),
        Course(files=lambda number: 30 - number // 6),
        Course(speed=lambda number: 5e9 if number % 2 else 7e9),
        Course(speed=lambda number: 5e9 + 1e8 * number),
    ],
    ids=["flat", "warms up", "breathes", "one file comes and goes", "fewer files", "noise", "faster"],
)
def test_what_is_steady_holds(course: Course) -> None:
    assert failures(course) == []


@pytest.mark.parametrize(
    ("course", "failure"),
    [
        (Course(resident_mib=lambda number: 100 + number / 20), "sender: resident memory +2.40 MiB"),
        (Course(files=lambda number: 20 + number // 40), "sender: open files 20 in the second tenth, 21 in the last"),
        (Course(threads=lambda number: 4 + number // 50), "sender: threads 4 in the second tenth, 5 in the last"),
    ],
    ids=["memory", "files", "threads"],
)
def test_what_creeps_fails(course: Course, failure: str) -> None:
    (text,) = failures(course)
    assert text.startswith(failure)


def test_speed_is_told_and_not_judged() -> None:
    *_, told = verdict(Course(speed=lambda number: 5e9 - 5e7 * number).periods(), [])
    assert told.holds and told.text.startswith("4.53 GB/s in the first third, 2.52 in the last, noise 21%")


def test_a_problem_fails_and_is_named() -> None:
    assert failures(Course(), "a push was lost", "and another") == ["a push was lost; and another"]


def test_a_line_has_a_figure_under_each_name() -> None:
    period = Course().periods()[0]
    assert len(line(period)) == len(HEADER)
    assert line(period).split()[:4] == ["1.0", "100.00", "20", "4"]
