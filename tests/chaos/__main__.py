"""python -m tests.chaos: the command line of a run, and the table of recovery latencies by heartbeat settings.

Owns the flags and what is printed. Exit status 0 only if everything holds.
"""

import argparse
import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path

from common.options import add_flags, read_config
from tests.chaos.faults import KINDS, Kind, Plan
from tests.chaos.fleet import Shape
from tests.chaos.report import LATENCY_HEADER, Outcome, latency_line, summary
from tests.chaos.run import run
from tests.rig.report import say

SETTINGS = ((0.5, 3.0), (0.25, 1.5), (0.1, 0.5))
"""--heartbeat-s and --dead-after-s of each line of the table."""
FAULTS, KILLS = 50, 10
QUIET_S = 2.0
"""A killed instance is started again so long after everybody knows: a process that starts takes the machine from the others,
which the table is not about. For the same reason it has fewer requests open at once."""
AT_ONCE, AT_ONCE_LATENCY = 12, 6
LISTED = 30
"""Lines of each list that are printed."""


def main() -> int:
    flags = _parser().parse_args()
    if flags.keep_logs is not None:
        logs = Path(flags.keep_logs)
        logs.mkdir(parents=True, exist_ok=True)
    else:
        logs = Path(tempfile.mkdtemp(prefix="tandem-chaos-"))
    is_good = False
    try:
        is_good = asyncio.run(_until_told((_latency if flags.latency else _chaos)(_plan(flags), logs)))
    finally:
        if is_good and flags.keep_logs is None:
            shutil.rmtree(logs)
        else:
            say(f"logs: {logs}")
    return 0 if is_good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="A fleet under load whose instances are struck.")
    parser.add_argument("--requests", type=int, default=500, help="different requests (default: %(default)s)")
    parser.add_argument("--faults", type=int, help=f"default: {FAULTS}; with --latency {KILLS} for each setting")
    parser.add_argument("--seed", type=int, default=1, help="of requests and faults (default: %(default)s)")
    parser.add_argument(
        "--at-once", type=int, help=f"requests open at the same time (default: {AT_ONCE}; with --latency {AT_ONCE_LATENCY})"
    )
    parser.add_argument("--kinds", type=_kinds, default=KINDS, help=f"some of {','.join(KINDS)} (default: all)")
    parser.add_argument("--keep-logs", metavar="DIR", help="where the processes' logs go and stay")
    parser.add_argument("--latency", action="store_true", help="kill decode instances only, for several heartbeat settings")
    add_flags(parser, Shape)
    return parser


def _kinds(text: str) -> tuple[Kind, ...]:
    kinds = tuple(kind for kind in KINDS if kind in text.split(","))
    if len(kinds) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(KINDS)}")
    return kinds


def _plan(flags: argparse.Namespace) -> Plan:
    plan = Plan(shape=read_config(Shape, flags), requests=flags.requests, seed=flags.seed)
    if flags.latency:
        at_once, faults = flags.at_once or AT_ONCE_LATENCY, flags.faults or KILLS
        return replace(plan, at_once=at_once, faults=faults, roles=("decode",), kinds=("kill",), is_compared=False)
    return replace(plan, at_once=flags.at_once or AT_ONCE, faults=flags.faults or FAULTS, kinds=flags.kinds)


async def _until_told(work: Coroutine[None, None, bool]) -> bool:
    """SIGTERM ends it as Ctrl-C does: with every process that it started."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        return await task
    return False


async def _chaos(plan: Plan, logs: Path) -> bool:
    outcome = await run(plan, logs, say)
    say(*_listed(outcome), "", *summary(outcome))
    return outcome.is_good


async def _latency(plan: Plan, logs: Path) -> bool:
    outcomes = []
    for heartbeat_s, dead_after_s in SETTINGS:
        say(f"--heartbeat-s {heartbeat_s:g} --dead-after-s {dead_after_s:g}")
        folder = logs / f"{heartbeat_s:g}-{dead_after_s:g}"
        folder.mkdir(exist_ok=True)
        shape = replace(plan.shape, heartbeat_s=heartbeat_s, dead_after_s=dead_after_s)
        outcomes.append(await run(replace(plan, shape=shape, away_s=dead_after_s + QUIET_S), folder, say))
        say(*_listed(outcomes[-1]))
    say("", LATENCY_HEADER, *map(latency_line, outcomes))
    return all(outcome.is_good for outcome in outcomes)


def _listed(outcome: Outcome) -> Iterator[str]:
    lists = {
        "errors that clients saw": outcome.errors,
        "answers that differ from the run without faults": [str(difference) for difference in outcome.differences],
        "other problems": outcome.problems,
    }
    for name, lines in lists.items():
        if lines:
            yield f"\n{name}: {len(lines)}"
            yield from (f"  {line[:1000]}" for line in lines[:LISTED])
            if len(lines) > LISTED:
                yield f"  and {len(lines) - LISTED} more"


if __name__ == "__main__":
    sys.exit(main())
