"""python -m tests.soak.plan_choice: whether `launch plan` chooses the division that real fleets confirm.

For each kind of traffic and each pair of limits the search of `launch plan` chooses among all divisions of some devices. Then the
load, at the rate that the choice bears, goes through a real fleet of each ratio and of the choice. The fleets are processes on
this machine with timed engines: run it on an idle machine. Exit status 1: a choice serves over 3 % less than the best real fleet.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.client import TimedAnswer
from bench.report import say
from common.config import RouterConfig
from common.processes.local_fleet import local_fleet
from common.processes.router_client import RouterClient
from launch.plan import SPAWN, measured_fleet, run_in
from launch.simulate import with_measured_front
from simulation.plan import FleetPlan, LoadPlan, SearchPlan
from simulation.search import Candidate, FleetSearch
from tests.soak.scorecard import CHUNK_TOKENS, FLAGS, MAX_RUNNING, TRACES, send, write_trace

STEP_COST = "0.016,0.0002,0.0004"
"""Long steps: four instances, a router and the clients share the cores."""
LIMITS = {"chat": ((0.6, 0.030), (2.0, 0.022)), "tool": ((0.8, 0.030), (2.5, 0.022)), "long": ((1.5, 0.030), (4.0, 0.022))}
"""Seconds to the first token and between tokens: a short wait, and a steady stream."""
CLOSE = 0.03
Limits = tuple[float, float]


def flags_of(each: Candidate) -> tuple[str, ...]:
    dispatch = "auto" if each.decode else "conditional" if each.prefill else "colocated"
    sizes = f"--prefill={each.prefill}", f"--decode={each.decode + each.both}"
    limits = f"--chunk-tokens={CHUNK_TOKENS}", f"--max-running={MAX_RUNNING}"
    return (*FLAGS["timed"], f"--step-cost={STEP_COST}", *sizes, *limits, f"--dispatch={dispatch}", "--log-level=warning")


def plan_of_a_fleet(kind: str) -> FleetPlan:
    """What a real fleet says of itself."""
    pair = Candidate(prefill=1, decode=1, chunk_tokens=CHUNK_TOKENS, policy="least_loaded")
    with local_fleet(*flags_of(pair)) as fleet, tempfile.TemporaryDirectory() as folder:
        write_trace(warm := Path(folder, "warm.jsonl"), TRACES[kind], 2.0, 4.0, seed=1)
        send(fleet.url, warm)
        time.sleep(1.0)  # the last heartbeats tell what links carry
        plan = FleetPlan(**measured_fleet(RouterClient(fleet.url)), chunk_tokens=CHUNK_TOKENS, front="measure")
    return with_measured_front(replace(plan, step_cost=STEP_COST, decode_step_cost=""))


def chosen(search: FleetSearch) -> tuple[Candidate, float]:
    """With the rate that it bears."""
    with SPAWN.Pool(2) as pool:
        best = search.best(partial(run_in, pool))[0]
    return best.candidate, min(borne.best.rate for borne in best.windows if borne.best is not None)


def goodput(each: Candidate, trace: Path, limits: Limits, seconds: float) -> float:
    """Good answers a second of a real fleet."""
    with local_fleet(*flags_of(each)) as fleet, tempfile.TemporaryDirectory() as folder:
        write_trace(warm := Path(folder, "warm.jsonl"), TRACES["chat"], 2.0, 2.0, seed=1)
        send(fleet.url, warm)
        RouterClient(fleet.url).post("/flush_cache", {})
        answers = send(fleet.url, trace)
    return sum(is_good(answer, limits) for answer in answers) / seconds


def is_good(answer: TimedAnswer, limits: Limits) -> bool:
    return answer.ttft_s <= limits[0] and (answer.tpot_s or 0.0) <= limits[1]


def points(kinds: Sequence[str], devices: int, seconds: float) -> Iterator[float]:
    """The goodput of each choice as a share of the best real fleet's."""
    for kind in kinds:
        plan = plan_of_a_fleet(kind)
        for limits in LIMITS[kind]:
            with tempfile.TemporaryDirectory() as folder:
                write_trace(long := Path(folder, "long.jsonl"), TRACES[kind], 10.0, 600.0, seed=3)
                load = LoadPlan(trace=str(long), slo_ttft_s=limits[0], slo_itl_s=limits[1])
                asked = SearchPlan(devices=devices, seconds=seconds, windows=2, page="")
                began_s = time.monotonic()
                choice, rate = chosen(FleetSearch(asked, plan, load, RouterConfig()))
                took_s = time.monotonic() - began_s
                say(f"{kind} {limits}: {choice.shown} at {rate:.2f} requests/s, chosen in {took_s:.0f} s")
                write_trace(trace := Path(folder, "trace.jsonl"), TRACES[kind], rate, seconds, seed=4)
                ratios = [
                    Candidate(prefill=n, decode=devices - n, chunk_tokens=CHUNK_TOKENS, policy="least_loaded")
                    for n in range(1, devices)
                ]
                ratios.append(Candidate(prefill=0, both=devices, chunk_tokens=CHUNK_TOKENS, policy="least_loaded"))
                found = {each: goodput(each, trace, limits, seconds) for each in dict.fromkeys((choice, *ratios))}
                for each, good in found.items():
                    say(f"    {each.shown}: {good:.2f} good/s")
                share = found[choice] / max(found.values())
                say(f"    the choice has {share:.1%} of the best")
                yield share


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(TRACES), choices=list(TRACES))
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args(arguments)
    shares = list(points(given.kinds, given.devices, given.seconds))
    return 1 if min(shares) < 1 - CLOSE else 0


if __name__ == "__main__":
    sys.exit(main())
