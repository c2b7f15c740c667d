"""`launch bench router`: fleets with the timed executor, and a load generator before them.

Owns the order of measurements, the flags of each fleet, and the report. Prints only its progress, on stderr.
"""

import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from bench.hardware import this_hardware
from bench.processes import below, command_of, cpu_s
from bench.router.figures import (
    FirstToken,
    Open,
    Requests,
    RouterOutcome,
    Streams,
    first_token_of,
    judge,
    open_of,
    requests_of,
    streams_of,
)
from bench.router.lines import Load, Loaded
from bench.router.plan import RouterBench
from bench.router.report import tables
from bench.tables import markdown_report, markdown_table, publish, say, text_report, text_table
from common.config import DEMO_MODEL
from common.processes.child import KILL_S, ChildEnded, Respondent
from common.processes.local_fleet import FleetFailed, local_fleet

LOAD_S = 600.0
LONGEST_ANSWER = 2000
"""Tokens of one answer at most: prompt and answer must fit the demo model's context."""
REQUESTS_AT_ONCE = 64
BESIDE = 64
BESIDE_STEP_S, OPEN_STEP_S = 0.01, 1.0
"""In which each of the streams beside, and each of those that are open at once, gets a token."""
LEAST_STEP_S = 0.0005
"""Steps that are shorter outrun the decode instance's own loop, and then tokens do not come one by one."""
MOST_ROWS = 4096
FLAGS = ("--executor=timed", "--transport=cma", "--dtype=bfloat16", "--log-level=warning")
STEADY = "CPU times per token and per request are affected least."


def run(bench: RouterBench, command: str, markdown: bool) -> int:
    """Measure, print the report and write the file. Returns the exit status: 0 also when a goal is not met.

    Raises FleetFailed."""
    hardware = this_hardware()
    first_token, requests = _measure_requests(bench)
    streams = [_measure_streams(bench, number) for number in bench.numbers]
    opened = _measure_open(bench) if bench.open else None
    outcome = RouterOutcome(
        command=command,
        hardware=hardware,
        goals=judge(first_token, requests, streams, opened),
        routers=bench.routers,
        first_token=first_token,
        requests=requests,
        streams=streams,
        open=opened,
    )
    settings = f"{bench.routers} router{'s' * (bench.routers > 1)}, instances without a model, all processes on these cores"
    table = markdown_table if markdown else text_table
    body = [table(lines) for lines in tables(outcome)]
    publish(outcome, (markdown_report if markdown else text_report)(outcome, settings, STEADY, body), bench.json)
    return 0


def _measure_requests(bench: RouterBench) -> tuple[list[FirstToken], Requests]:
    few = max(4, bench.requests // 4)
    say(f"requests: one by one, many at once, and beside {BESIDE} streams")
    # Prompts take no time, so all that the first token takes is added to the executor's time.
    with _fleet(bench, f"0,0,{BESIDE_STEP_S / BESIDE}") as fleet, _generator() as load, _generator() as others:
        load.carry_out(fleet.load(20, 4, 8))  # what is made at the first use is made
        alone = first_token_of(load.carry_out(fleet.load(few, 1, 1)), 0)
        requests = requests_of(load.carry_out(fleet.load(bench.requests, REQUESTS_AT_ONCE, 1)), REQUESTS_AT_ONCE)
        others.begin(fleet.load(BESIDE, BESIDE, min(LONGEST_ANSWER, 4 * few)))
        beside = first_token_of(load.carry_out(fleet.load(few, 1, 1)), BESIDE)
        others.end()
    return [alone, beside], requests


def _measure_streams(bench: RouterBench, number: int) -> Streams:
    say(f"{number} streams")
    tokens = max(2, min(LONGEST_ANSWER, int(bench.rate * bench.seconds / number)))
    with _fleet(bench, f"{max(LEAST_STEP_S, number / bench.rate)},0,0", number) as fleet, _generator() as load:
        load.carry_out(fleet.load(20, 4, 8))
        before_s = sum(map(cpu_s, fleet.detokenizers))
        loaded = load.carry_out(fleet.load(number, number, tokens))
        return streams_of(loaded, number, sum(map(cpu_s, fleet.detokenizers)) - before_s)


def _measure_open(bench: RouterBench) -> Open:
    say(f"{bench.open} streams open at once")
    decodes = math.ceil(bench.open / MOST_ROWS)
    with (
        _fleet(bench, f"{OPEN_STEP_S},0,0", bench.open, f"--decode={decodes}", "--chunk-tokens=8192") as fleet,
        _generator() as load,
    ):
        load.carry_out(fleet.load(4, 4, 2))
        return open_of(load.carry_out(fleet.load(bench.open, bench.open, int(bench.open_s / OPEN_STEP_S))), bench.open)


@dataclass(frozen=True, slots=True)
class _Fleet:
    """A running fleet. pids: of its routers. detokenizers: their pids."""

    url: str
    pids: tuple[int, ...]
    detokenizers: tuple[int, ...]

    def load(self, requests: int, parallel: int, tokens: int) -> Load:
        return Load(url=self.url, model=DEMO_MODEL, requests=requests, parallel=parallel, tokens=tokens, pids=self.pids)


@contextlib.contextmanager
def _fleet(bench: RouterBench, cost: str, streams: int = 256, *flags: str) -> Iterator[_Fleet]:
    """cost: of each step, as --step-cost takes it. streams: as many as may be open."""
    own = (
        f"--step-cost={cost}",
        f"--max-running={min(MOST_ROWS, max(REQUESTS_AT_ONCE, streams))}",
        f"--max-waiting={2 * max(streams, 1024)}",
        f"--max-requests={2 * max(streams, 1024)}",
        f"--routers={bench.routers}",
    )
    with local_fleet(*FLAGS, *own, *flags) as fleet:
        commands = {pid: command_of(pid) for pid in below(fleet.pid)}
        routers, detokenizers = (
            tuple(pid for pid, words in commands.items() if role in words) for role in ("router", "detokenizer")
        )
        if len(routers) != bench.routers:
            raise FleetFailed(f"{len(routers)} processes of this fleet are routers, not {bench.routers}")
        yield _Fleet(fleet.url, routers, detokenizers)


class _Generator:
    """The load generator, as a child of this process."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", "bench.router.load"]
        self._child: Respondent[Load, Loaded] = Respondent("load", command, msgspec.json.Decoder[Loaded](Loaded))

    def begin(self, order: Load) -> None:
        self._child.order(order)

    def end(self) -> Loaded:
        """What came of the order that was begun. Raises FleetFailed."""
        try:
            loaded = self._child.next_report(LOAD_S)
        except ChildEnded as error:
            raise FleetFailed(str(error)) from error
        if loaded is None or not loaded.ttft_s:
            raise FleetFailed(f"the load came to nothing: {'no report' if loaded is None else '; '.join(loaded.reasons)}")
        for reason in loaded.reasons:
            say(f"failed: {reason}")
        return loaded

    def carry_out(self, order: Load) -> Loaded:
        self.begin(order)
        return self.end()

    def close(self) -> None:
        self._child.kill()
        self._child.wait(KILL_S)


@contextlib.contextmanager
def _generator() -> Iterator[_Generator]:
    with contextlib.closing(_Generator()) as generator:
        yield generator
