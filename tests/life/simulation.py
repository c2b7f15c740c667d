"""The simulation: thousands of seeded schedules of faults, and what must hold after each of them.

Owns the run of a schedule and the command line. A failing seed replays exactly:

    python -m tests.life.simulation --seed 17 --trace
    python -m tests.life.simulation --schedules 10000 --first 0 --jobs 2
"""

import argparse
import logging
import multiprocessing
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

import decode.scheduler
from common.errors import TandemError
from common.messages import AnyMessage, Failed
from common.messages.ranks import TransferOrder
from common.messages.transfers import Connect
from common.pages import radix_cache
from simulation.network import Letter
from tests.life.checks import disturbed, misanswered, misinformed, misplaced, mistimed, needless, unsettled
from tests.life.drafts import SeeingSpeculation
from tests.life.letters import MEMBERSHIP
from tests.life.schedule import Schedule, draw_schedule
from tests.life.trial import Trial

LOOK_S = 0.5
SETTLE_S = 240.0
"""Simulated time after the faults, within which everything must have ended."""
CHUNK = 16
"""Schedules that a job takes at once."""
_BUGS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, TandemError)
"""Exceptions that only a bug raises: a finding of its seed."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a schedule. problems: the laws that it broke; empty when everything holds."""

    seed: int
    problems: tuple[str, ...]
    counts: Counter[str] = field(default_factory=Counter)


def run_schedule(seed: int, trace: bool = False) -> Report:
    """Run the schedule of this seed, let everything settle, and check what must hold."""
    drafts = patch.object(decode.scheduler, "Speculation", SeeingSpeculation)
    with patch.object(radix_cache, "BLOCK_PAGES", 1), drafts:  # prompts are short
        return _run(draw_schedule(seed), trace)


def _run(schedule: Schedule, trace: bool) -> Report:
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
        checks = (unsettled, misanswered, misplaced, disturbed, needless, mistimed, misinformed)
        problems = [problem for check in checks for problem in check(trial)]
    except _BUGS:
        problems = [traceback.format_exc()]
    return Report(schedule.seed, tuple(problems), _counts(trial))


def _settle(trial: Trial) -> None:
    ends_s = trial.clock.now + SETTLE_S
    while trial.clock.now < ends_s and any(True for _ in unsettled(trial)):
        trial.run_for(LOOK_S)


def _counts(trial: Trial) -> Counter[str]:
    """How often each thing happened in the schedule. A run is worth something only if everything happens somewhere."""
    counts: Counter[str] = Counter(letters=trial.network.letters, schedules=1, simulated_s=int(trial.clock.now))
    for ending in trial.observer.endings:
        counts[f"failed: {ending.kind}" if isinstance(ending, Failed) else f"finished: {ending.reason}"] += 1
    for resume in trial.observer.resumes:
        counts[f"resumed: {resume}"] += 1
    for life in trial.lives:
        total = life.scheduler.report().counters
        counts["preemptions"] += total.preemptions
        counts["tokens drafted"] += total.tokens_drafted
        counts["tokens accepted"] += total.tokens_accepted
        counts["handoffs lost"] += total.handoffs_lost
        counts["reservations moved"] += total.reservations_moved
        counts["pushes failed"] += total.pushes_failed
        counts["prompt tokens hit"] += total.prompt_tokens_hit
        counts["pages evicted"] += total.pages_evicted
        counts["pages spared"] += total.pages_spared
        counts["caches flushed"] += life.pool.cache.epoch
    for outcome in trial.roles_answered:
        counts["roles kept" if isinstance(outcome, TandemError) else f"roles taken: {outcome.role}"] += 1
    for kind, letters in trial.cache_letters.items():
        counts[f"letters about caches: {kind}"] += letters
    for router in trial.routers:
        counts["cached blocks known"] += sum(len(told.held) for told in router.core.fleet.caches.of_members.values())
    counts["lives"] += len(trial.lives)
    counts["timelines told"] += trial.told.total()
    counts["timelines taken"] += len(trial.observer.durations)
    counts["schedules with several routers"] += len(trial.routers) > 1
    counts["schedules with ranks"] += trial.schedule.ranks != (1, 1)
    counts["ranks that ended by themselves"] += len(trial.rank_ends)
    counts["routers killed"] += trial.routers_killed
    counts["requests of a dead router"] += trial.orphans
    counts["clients cut off"] += sum(asked.client is not None and asked.client.cut_off for asked in trial.asked)
    counts["detokenizers killed"] += trial.detokenizers_killed
    counts["quiet goodbyes"] += trial.quiet_goodbyes
    counts["unproven writes"] += len(trial.fabric.unproven)
    counts["unserved for a while"] += sum(asked.unserved for asked in trial.asked)
    for _, reason in trial.ends:
        counts[f"ended by itself: {reason.split(':')[0]}"] += 1
    return counts


def _say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def _say_letter(trial: Trial, letter: Letter, message: AnyMessage, delays: tuple[float, ...]) -> None:
    tells_peers = isinstance(message, TransferOrder) and isinstance(message.order, Connect)  # as Peers: with addresses of memory
    if letter.kind not in MEMBERSHIP and not tells_peers:
        arrives = " ".join(f"{trial.clock.now + delay:.4f}" for delay in delays) or "lost"
        _say(f"{trial.clock.now:9.4f}  {letter.sender} -> {letter.to} [{arrives}] {message}")


def run_schedules(seeds: Iterable[int], jobs: int) -> Iterator[Report]:
    """Reports in any order. Each seed is run, however long that takes: the clock of a schedule is turned by hand."""
    if jobs == 1:
        yield from map(run_schedule, seeds)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(run_schedule, seeds, CHUNK)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs schedules of faults in simulated fleets, and reports what does not hold.")
    parser.add_argument("--seed", type=int, help="run only the schedule of this seed")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every message")
    parser.add_argument("--schedules", type=int, default=1000, help="how many schedules (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first schedule (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="processes (default: all cores)")
    flags = parser.parse_args()
    logging.disable(logging.WARNING)  # deaths are what schedules are made of
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # SystemExit ends the pool with its processes
    if flags.seed is not None:
        report = run_schedule(flags.seed, flags.trace)
        _say(*(report.problems or ("everything holds",)))
        return bool(report.problems)
    return _run_many(range(flags.first, flags.first + flags.schedules), flags.jobs)


def _run_many(seeds: range, jobs: int) -> int:
    began_s = time.monotonic()
    total: Counter[str] = Counter()
    failing: list[int] = []
    for report in run_schedules(seeds, jobs):
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
