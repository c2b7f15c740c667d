"""python -m tests.soak.transfers: the command line of a soak, its periods, and its end. Exit status 0 only for a good verdict.

Owns the flags and the order of things. Knows neither how members are reached nor what is a good figure.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import get_args

import msgspec

from tests.chaos.report import percentile
from tests.soak.fleet import AWAY_S, Fleet, Shape, Strike
from tests.soak.report import HEADER, LISTED, Check, Period, line, verdict
from tests.soak.samples import Footprint, Pace, busy_s, cpu_s

PERIOD_S = 60.0
LEAST_PERIODS = 20
"""So that a tenth of a run is two of them at least."""
TURN_S = 0.25
"""Also while nothing may be spent, the places are looked after so often."""
STRIKE_EVERY = 4
"""With --rounds: a strike takes the place of each fourth round."""


@dataclass(frozen=True, slots=True)
class Soak:
    """duty: share of one core that everything together may use. strike_s: average time from one strike to the next."""

    minutes: float = 60.0
    duty: float = 0.12
    strike_s: float = 20.0
    seed: int = 1
    shape: Shape = field(default_factory=Shape)

    @property
    def periods(self) -> int:
        return max(LEAST_PERIODS, round(self.minutes * 60 / PERIOD_S))

    @property
    def period_s(self) -> float:
        return self.minutes * 60 / self.periods


class Record(msgspec.Struct, kw_only=True):
    """Everything that a run brought, as it is written to a file."""

    flags: list[str]
    periods: list[Period]
    checks: list[Check]


class Course:
    """The fleet, and when what is done with it."""

    def __init__(self, soak: Soak, fleet: Fleet, random: Random) -> None:
        self._soak, self._fleet, self._random = soak, fleet, random
        self._began = self._strike_at = time.monotonic()
        self._pace = Pace(soak.duty, fleet.pids)

    def period(self, number: int) -> Period:
        """The next period, from 1."""
        fleet, tally = self._fleet, self._fleet.new_tally()
        began, began_cpu_s, began_busy_s = time.monotonic(), cpu_s(fleet.pids), busy_s()
        while (left_s := self._began + number * self._soak.period_s - time.monotonic()) > 0:
            fleet.mend()
            wait_s = self._pace.wait_s(fleet.pids)
            if wait_s:
                time.sleep(min(wait_s, left_s, TURN_S))
            else:
                self._act()
        fleet.mend(everything=True)
        fleet.over_every_link()
        ended = time.monotonic()
        return Period(
            minute=(ended - self._began) / 60,
            sender=Footprint.of(fleet.senders[0].member.pid),
            receiver=Footprint.of(fleet.receivers[0].member.pid),
            slow=percentile(tally.speeds, 0.1),
            median=percentile(tally.speeds, 0.5),
            fast=percentile(tally.speeds, 0.9),
            counts=dict(tally.counts),
            duty=(cpu_s(fleet.pids) - began_cpu_s) / (ended - began),
            busy=(busy_s() - began_busy_s) / (ended - began),
        )

    def _act(self) -> None:
        now = time.monotonic()
        if now < self._strike_at:
            self._fleet.round()
        else:
            self._fleet.strike()
            self._strike_at = now + self._random.uniform(0.5, 1.5) * self._soak.strike_s


def run(soak: Soak, folder: Path, say: Callable[[Period], None]) -> list[str]:
    """Returns the problems. Raises AssertionError when a member that should live is gone, or does not answer."""
    random = Random(soak.seed)
    fleet = Fleet(soak.shape, folder, random, min(AWAY_S, soak.period_s))
    try:
        fleet.join()
        course = Course(soak, fleet, random)
        for number in range(1, soak.periods + 1):
            say(course.period(number))
        fleet.close()
    finally:
        fleet.kill()
    return fleet.problems


def run_rounds(rounds: int, soak: Soak, folder: Path) -> tuple[list[str], Counter[str]]:
    """The short form: a fixed number of rounds, as fast as they go. Returns the problems, and how often each thing happened.

    After a strike, one round runs while nobody knows of it; then the place is taken again.
    """
    fleet = Fleet(soak.shape, folder, Random(soak.seed))
    tally = fleet.new_tally()
    try:
        fleet.join()
        for number in range(rounds):
            if number % STRIKE_EVERY:
                fleet.round()
                fleet.mend(everything=True)
            else:
                fleet.strike()
        fleet.over_every_link()
        fleet.close()
    finally:
        fleet.kill()
    return fleet.problems, tally.counts


def missing(periods: Sequence[Period]) -> list[str]:
    """What should have happened and did not: a run must be longer."""
    return [strike for strike in get_args(Strike) if not any(period.counts.get(strike) for period in periods)]


def main() -> int:
    flags = _parser().parse_args()
    soak = Soak(flags.minutes, flags.duty, flags.strike_s, flags.seed, Shape(flags.senders, flags.receivers))
    record = Record(flags=sys.argv[1:], periods=[], checks=[])

    def write() -> None:
        if flags.json is not None:
            flags.json.write_bytes(msgspec.json.format(msgspec.json.encode(record)))

    def say(period: Period) -> None:
        _print(line(period))
        record.periods.append(period)
        write()  # at once: an hour is long

    if flags.rounds:
        return _print_checks(_short(flags.rounds, soak))
    _print(HEADER)
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as folder:
        problems = run(soak, Path(folder), say)
    record.checks += verdict(record.periods, problems)
    write()
    if strikes := missing(record.periods):
        record.checks.append(Check(holds=False, text=f"of some strikes there was none: {', '.join(strikes)}"))
    return _print_checks(record.checks)


def _short(rounds: int, soak: Soak) -> Iterator[Check]:
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as folder:
        problems, counts = run_rounds(rounds, soak, Path(folder))
    yield Check(holds=not problems, text="; ".join(problems[:LISTED]) or "every push ended as it should")
    yield Check(
        holds=all(counts[strike] for strike in get_args(Strike)), text=f"in {rounds} rounds: {dict(sorted(counts.items()))}"
    )


def _print_checks(checks: Iterable[Check]) -> int:
    """Print the verdict. Returns the exit status."""
    is_good = True
    for check in checks:
        _print(f"{'holds' if check.holds else 'FAILS'}: {check.text}")
        is_good &= check.holds
    return 0 if is_good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.transfers", description="Transfers between processes that join, leave and die all along."
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="default: %(default)s")
    parser.add_argument(
        "--rounds", type=int, help="the short form: so many rounds of pushes, judged by correctness alone, without a clock"
    )
    parser.add_argument(
        "--duty", type=float, default=0.12, help="share of one core for everything together (default: %(default)s)"
    )
    parser.add_argument("--strike-s", type=float, default=20.0, help="average time between strikes (default: %(default)s)")
    parser.add_argument("--senders", type=int, default=2, help="the first of them stays (default: %(default)s)")
    parser.add_argument("--receivers", type=int, default=2, help="the first of them stays (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of what happens (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the samples go, period by period")
    return parser


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
