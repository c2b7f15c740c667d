"""python -m tests.soak.transfers: the command line of a soak, its periods, and its end. Exit status 0 only for a good verdict.

Owns the flags and the order of things. Knows neither how members are reached nor what is a good figure.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import get_args

import msgspec

from common.options import add_flags, option, read_config
from tests.rig.report import Check, percentile, print_checks, say
from tests.soak.fleet import AWAY_S, Fleet, Shape, Strike
from tests.soak.report import HEADER, LISTED, Footprint, Pace, Period, busy_s, cpu_s, line, verdict

PERIOD_S = 60.0
LEAST_PERIODS = 20
"""So that a tenth of a run is two of them at least."""
TURN_S = 0.25
"""Also while nothing may be spent, the places are looked after so often."""
STRIKE_EVERY = 4
"""With --rounds: a strike takes the place of each fourth round."""


@dataclass(frozen=True, kw_only=True)
class Soak:
    """How long a soak is, who takes part, and how hard it is."""

    minutes: float = option(60.0, "length of the run")
    rounds: int = option(
        0, "the short form: this many rounds of pushes, judged by correctness alone, without a clock; 0: by minutes"
    )
    duty: float = option(0.12, "share of one core that everything together may use")
    strike_s: float = option(20.0, "average time between strikes")
    senders: int = option(2, "number of senders; the first of them stays")
    receivers: int = option(2, "number of receivers; the first of them stays")
    seed: int = option(1, "of what happens")
    json: str = option("", "write the samples to this file, period by period")

    @property
    def shape(self) -> Shape:
        return Shape(self.senders, self.receivers)

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


def run(soak: Soak, folder: Path, report: Callable[[Period], None]) -> list[str]:
    """Returns the problems. Raises AssertionError when a member that should live is gone, or does not answer."""
    random = Random(soak.seed)
    fleet = Fleet(soak.shape, folder, random, min(AWAY_S, soak.period_s))
    try:
        fleet.join()
        course = Course(soak, fleet, random)
        for number in range(1, soak.periods + 1):
            report(course.period(number))
        fleet.close()
    finally:
        fleet.kill()
    return fleet.problems


def run_rounds(soak: Soak, folder: Path) -> tuple[list[str], Counter[str]]:
    """The short form: a fixed number of rounds, as fast as they go. Returns the problems, and how often each thing happened.

    After a strike, one round runs while nobody knows of it; then the place is taken again.
    """
    fleet = Fleet(soak.shape, folder, Random(soak.seed))
    tally = fleet.new_tally()
    try:
        fleet.join()
        for number in range(soak.rounds):
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
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.transfers", description="Transfers between processes that join, leave and die all along."
    )
    add_flags(parser, Soak)
    soak = read_config(Soak, parser.parse_args())
    record = Record(flags=sys.argv[1:], periods=[], checks=[])

    def write() -> None:
        if soak.json:
            Path(soak.json).write_bytes(msgspec.json.format(msgspec.json.encode(record)))

    def report(period: Period) -> None:
        say(line(period))
        record.periods.append(period)
        write()  # at once: an hour is long

    if soak.rounds:
        return print_checks(_short(soak))
    say(HEADER)
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as folder:
        problems = run(soak, Path(folder), report)
    record.checks += verdict(record.periods, problems)
    write()
    if strikes := missing(record.periods):
        record.checks.append(Check(holds=False, text=f"of some strikes there was none: {', '.join(strikes)}"))
    return print_checks(record.checks)


def _short(soak: Soak) -> Iterator[Check]:
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as folder:
        problems, counts = run_rounds(soak, Path(folder))
    yield Check(holds=not problems, text="; ".join(problems[:LISTED]) or "every push ended as it should")
    yield Check(
        holds=all(counts[strike] for strike in get_args(Strike)), text=f"in {soak.rounds} rounds: {dict(sorted(counts.items()))}"
    )


if __name__ == "__main__":
    sys.exit(main())
