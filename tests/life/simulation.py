"""The simulation: thousands of seeded schedules of faults, and what must hold after each of them.

Owns the run of a schedule and the command line. A seed that fails replays exactly:

    python -m tests.life.simulation --seed 17 --trace
    python -m tests.life.simulation --schedules 10000 --first 0 --jobs 2
"""

import argparse
import multiprocessing
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from common.errors import TandemError
from common.messages import AnyMessage, Failed
from tests.life.checks import misanswered, misplaced, unsettled
from tests.life.network import MEMBERSHIP, Letter
from tests.life.schedule import draw_schedule
from tests.life.trial import Trial

LOOK_S = 0.5
SETTLE_S = 240.0
"""After the faults, within which everything must have come to its end."""
CHUNK = 16
"""Schedules that a job takes at once."""
_BUGS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, TandemError)
"""What is raised on nobody's purpose: a finding of its seed."""


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a schedule. problems: nothing that must hold is broken when there are none."""

    seed: int
    problems: tuple[str, ...]
    counts: Counter[str] = field(default_factory=Counter)


def run_schedule(seed: int, trace: bool = False) -> Report:
    """Carry out the schedule of this seed, let everything settle, and look."""
    schedule = draw_schedule(seed)
    trial = Trial(schedule)
    if trace:
        _say(str(schedule))
        trial.network.taps.append(lambda *letter: _say_letter(trial, *letter))
        trial.on_event = _say
    try:
        trial.run_window()
        _settle(trial)
        trial.ask_once_more()
        _settle(trial)
        problems = [*unsettled(trial), *misanswered(trial), *misplaced(trial)]
    except _BUGS:
        problems = [traceback.format_exc()]
    return Report(seed, tuple(problems), _counts(trial))


def _settle(trial: Trial) -> None:
    ends_s = trial.clock.now + SETTLE_S
    while trial.clock.now < ends_s and any(True for _ in unsettled(trial)):
        trial.run_for(LOOK_S)


def _counts(trial: Trial) -> Counter[str]:
    """What the schedule came to, so that it can be seen that everything happens."""
    counts: Counter[str] = Counter(letters=trial.network.letters, schedules=1, simulated_s=int(trial.clock.now))
    for ending in trial.observer.endings:
        counts[f"failed: {ending.kind}" if isinstance(ending, Failed) else f"finished: {ending.reason}"] += 1
    for resume in trial.observer.resumes:
        counts[f"resumed: {resume}"] += 1
    for life in trial.lives:
        total = life.scheduler.counters()
        counts["preemptions"] += total.preemptions
        counts["handoffs lost"] += total.handoffs_lost
        counts["pushes failed"] += total.pushes_failed
    counts["lives"] += len(trial.lives)
    counts["unproven writes"] += len(trial.fabric.unproven)
    counts["unserved for a while"] += sum(asked.unserved for asked in trial.asked)
    for _, reason in trial.ends:
        counts[f"ended by itself: {reason.split(':')[0]}"] += 1
    return counts


def _say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def _say_letter(trial: Trial, letter: Letter, message: AnyMessage, delays: tuple[float, ...]) -> None:
    if letter.kind not in MEMBERSHIP:
        arrives = " ".join(f"{trial.clock.now + delay:.4f}" for delay in delays) or "lost"
        _say(f"{trial.clock.now:9.4f}  {letter.sender} -> {letter.to} [{arrives}] {message}")


def run_schedules(seeds: Iterable[int], jobs: int, until_s: float = float("inf")) -> Iterator[Report]:
    """Reports in any order. until_s: on `time.monotonic`, when no more are begun."""
    if jobs == 1:
        for seed in seeds:
            if time.monotonic() >= until_s:
                return
            yield run_schedule(seed)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for report in pool.imap_unordered(run_schedule, seeds, CHUNK):
            yield report
            if time.monotonic() >= until_s:
                pool.terminate()
                return


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs schedules of faults in simulated fleets, and says what does not hold.")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="print every message of it")
    parser.add_argument("--schedules", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="processes at once")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no more after so long")
    flags = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the other processes end too
    if flags.seed is not None:
        report = run_schedule(flags.seed, flags.trace)
        _say(*(report.problems or ("everything holds",)))
        return bool(report.problems)
    return _run_many(range(flags.first, flags.first + flags.schedules), flags.jobs, flags.seconds)


def _run_many(seeds: range, jobs: int, seconds: float) -> int:
    began_s = time.monotonic()
    total: Counter[str] = Counter()
    failing: list[int] = []
    for report in run_schedules(seeds, jobs, began_s + seconds):
        total += report.counts
        if report.problems:
            failing.append(report.seed)
            _say(f"seed {report.seed}:", *(f"    {problem}" for problem in report.problems))
    _say(*(f"{name}: {count}" for name, count in sorted(total.items())))
    took_s = time.monotonic() - began_s
    _say(f"{total['schedules']} schedules in {took_s:.1f} s, {len(failing)} with problems: {sorted(failing)[:50]}")
    return bool(failing)


if __name__ == "__main__":
    sys.exit(main())
