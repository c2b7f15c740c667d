"""How well a simulated fleet tells what a real one does: the same requests through both, and the error of each figure.

Owns the traces, the ratios, what is compared, and the limits. The real fleets are processes on this machine, with the timed
executor, whose steps take what a flag says, or with the demo model on the CPU; `launch bench serve` sends their load. Run it as
`python -m tests.soak.scorecard` on an idle machine: other work makes the real fleets slower, and not the simulated ones.
"""

import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.client import TimedAnswer
from bench.options import LoadOptions, ResultOptions, ServeOptions, TargetOptions, WorkloadOptions
from bench.report import Goal, say
from bench.serve import measure
from benchmarks.command import Invocation, start
from common.config import DEMO_MODEL, RouterConfig
from common.options import option, require, require_at_least
from common.processes.local_fleet import FleetFailed, local_fleet
from common.processes.router_client import RouterClient
from launch.plan import measured_fleet
from launch.simulate import with_measured_front
from router.timelines import BLOCK_TOKENS, LoadLine
from simulation.plan import FleetPlan, LoadPlan
from simulation.run import Simulation

RATIOS = ("1:1", "1:2", "2:1", "0:2")
"""Prefill and decode instances; 0: decode instances alone serve whole requests."""
CHUNK_TOKENS, MAX_RUNNING = 512, 64
FLAGS = {"timed": ("--executor=timed", "--transport=cma", "--dtype=bfloat16"), "cpu": ("--threads=1",)}
MEAN_LIMIT, P99_LIMIT = 0.05, 0.10
MAX_BATCH = 8
STEADY = "Errors are those of real fleets that had the machine for themselves only where it was idle."
QUICK: dict[str, Any] = {"seconds": 8.0, "traces": "chat", "ratios": "1:1"}


@dataclass(frozen=True, slots=True)
class TraceShape:
    """Made-up traffic: means of exponential lengths, in tokens, and what requests begin with in common."""

    input_tokens: int
    output_tokens: int
    shared_blocks: int
    """Blocks that a request has in common with the others of its group."""
    groups: int


TRACES = {"chat": TraceShape(350, 40, 1, 8), "tool": TraceShape(600, 12, 2, 3), "long": TraceShape(1200, 60, 0, 1)}
"""As those of Mooncake: conversations, agents that share long instructions, and long documents. All fit the demo model."""
LONGEST_PROMPT = 3000


@dataclass(frozen=True, kw_only=True)
class ScorecardOptions:
    """What is compared."""

    traces: str = option("chat,tool,long", "kinds of traffic")
    ratios: str = option("1:1,1:2,2:1,0:2", "prefill and decode instances of the fleets")
    engines: str = option(
        "timed",
        "what computes in the real fleets: timed: a flag says how long steps take; cpu: the demo model, for hosts with a core "
        "for each process, because the simulator gives each one",
    )
    seconds: float = option(30.0, "how long each load lasts")
    share: float = option(0.55, "how much of the time the busier role computes: the rate of the requests follows from it")
    step_cost: str = option("0.008,0.0001,0.0002", "of the timed executor")

    def __post_init__(self) -> None:
        for name, known in (("traces", TRACES), ("ratios", RATIOS), ("engines", FLAGS)):
            require(set(vars(self)[name].split(",")) <= set(known), name, f"some of {','.join(known)}", vars(self)[name])
        require(0 < self.share < 1, "share", "between 0 and 1", self.share)
        require_at_least(self, seconds=2)


class PointFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients of a fleet saw, in milliseconds, and good requests a second."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    e2e_p50: float
    e2e_p99: float
    goodput: float

    @classmethod
    def of(cls, first_s: Sequence[float], gaps_s: Sequence[float], answer_s: Sequence[float], good: float) -> "PointFigures":
        halves = [1e3 * float(each) for kind in (first_s, gaps_s, answer_s) for each in np.percentile(np.asarray(kind), (50, 99))]
        return cls(**dict(zip(cls.__struct_fields__, (*halves, good), strict=True)))


NAMES = PointFigures.__struct_fields__
TAILS = tuple(name for name in NAMES if name.endswith("p99"))


class ScorecardPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One load through one fleet, real and simulated."""

    point: str
    requests: int
    real: PointFigures
    simulated: PointFigures

    def error(self, name: str) -> float:
        """As a share of the real figure; above 0 where the simulated one is larger."""
        real, simulated = getattr(self.real, name), getattr(self.simulated, name)
        return float(simulated / real - 1) if real else float(simulated != real)


def run(invocation: Invocation) -> int:
    """Returns the exit status: 1 where a limit is not kept."""
    bench = invocation.config(ScorecardOptions, QUICK)
    points = [
        measure_point(bench, engine, trace, ratio)
        for engine in bench.engines.split(",")
        for trace in bench.traces.split(",")
        for ratio in bench.ratios.split(",")
    ]
    goals = list(goals_of(points))
    body = [invocation.style.table(lines_of(points)), invocation.style.table(error_lines(points))]
    invocation.publish("all processes on these cores", STEADY, body, goals, points=points)
    return 0 if all(goal.met for goal in goals) else 1


def measure_point(bench: ScorecardOptions, engine: str, kind: str, ratio: str) -> ScorecardPoint:
    say(f"{engine}, {kind}, {ratio}")
    prefill, decode = map(int, ratio.split(":"))
    flags = (f"--prefill={prefill}", f"--decode={decode}", f"--chunk-tokens={CHUNK_TOKENS}", f"--max-running={MAX_RUNNING}")
    cost = (f"--step-cost={bench.step_cost}",) if engine == "timed" else ()
    with local_fleet(*FLAGS[engine], *cost, *flags, "--log-level=warning") as fleet, tempfile.TemporaryDirectory() as folder:
        client = RouterClient(fleet.url)
        warm, trace = Path(folder, "warm.jsonl"), Path(folder, "trace.jsonl")
        write_trace(warm, TRACES[kind], 2.0, 4.0, seed=1)
        send(fleet.url, warm)
        time.sleep(1.0)  # the last heartbeats tell what steps cost
        plan = FleetPlan(**measured_fleet(client), chunk_tokens=CHUNK_TOKENS, front="measure")
        if engine == "timed":
            plan = replace(plan, step_cost=bench.step_cost, decode_step_cost="")
        rate = rate_of(plan, TRACES[kind], bench.share)
        write_trace(trace, TRACES[kind], rate, bench.seconds, seed=2)
        client.post("/flush_cache", {})
        answers = send(fleet.url, trace)
        ttft_s, itl_s = limits_of(plan, TRACES[kind])
        simulated = simulate(with_measured_front(plan), str(trace), (ttft_s, itl_s))
    good = sum(each.ttft_s <= ttft_s and (each.tpot_s or 0.0) <= itl_s for each in answers)
    seconds = max(each.last_s for each in answers) - min(each.began_s for each in answers)
    gaps_s = [gap for each in answers for gap in each.gaps_s]
    real = PointFigures.of([e.ttft_s for e in answers], gaps_s, [e.e2el_s for e in answers], good / seconds)
    return ScorecardPoint(point=f"{engine} {kind} {ratio}", requests=len(answers), real=real, simulated=simulated)


def write_trace(path: Path, shape: TraceShape, rate: float, seconds: float, seed: int) -> None:
    """In Mooncake's format. Requests of a group begin with the same blocks; the rest is nobody else's."""
    random, at_s = np.random.default_rng(seed), 0.0
    fresh = shape.groups * shape.shared_blocks + seed * 2**20
    lines: list[LoadLine] = []
    while (at_s := at_s + float(random.exponential(1 / rate))) < seconds:
        tokens = int(np.clip(random.exponential(shape.input_tokens), 16, LONGEST_PROMPT))
        group = int(random.integers(shape.groups)) * shape.shared_blocks
        blocks = [*range(group, group + shape.shared_blocks), *range(fresh, fresh + tokens // BLOCK_TOKENS + 1)]
        fresh += tokens // BLOCK_TOKENS + 1
        output = max(2, round(random.exponential(shape.output_tokens)))
        lines.append(LoadLine(round(1000 * at_s), shape.shared_blocks * BLOCK_TOKENS + tokens, output, tuple(blocks)))
    path.write_bytes(msgspec.json.Encoder().encode_lines(lines))


def rate_of(plan: FleetPlan, shape: TraceShape, share: float) -> float:
    """Requests a second with which the instances that compute prompts are busy for this share of the time, about."""
    cost = plan.cost("prefill" if plan.prefill else "decode")
    decoding_s = 0.0 if plan.prefill else shape.output_tokens * cost.step_s / MAX_BATCH
    return share * (plan.prefill or plan.decode) / (cost.seconds(shape.input_tokens, 0) + decoding_s)


def limits_of(plan: FleetPlan, shape: TraceShape) -> tuple[float, float]:
    """Limits for the first token and for the mean between tokens that most answers keep, and some do not."""
    first_s, step_s = plan.cost("prefill").seconds(shape.input_tokens, 0), plan.cost("decode").seconds(0, 4)
    return 8 * first_s, 1.6 * step_s


def simulate(plan: FleetPlan, trace: str, limits_s: tuple[float, float]) -> PointFigures:
    load = LoadPlan(trace=trace, slo_ttft_s=limits_s[0], slo_itl_s=limits_s[1])
    simulation = Simulation(plan, load, RouterConfig())
    simulation.run()
    measured = simulation.measured
    return PointFigures.of(measured.first_s, measured.between_s, measured.answer_s, simulation.good / simulation.seconds)


def send(url: str, trace: Path) -> list[TimedAnswer]:
    load = ServeOptions(
        target=TargetOptions(base_url=url, model=DEMO_MODEL),
        workload=WorkloadOptions(dataset_name="trace", dataset_path=str(trace)),
        load=LoadOptions(),
        results=ResultOptions(),
    )
    answers = measure(load).answers
    failed = [answer for answer in answers if answer.error]
    if failed:
        raise FleetFailed(f"{len(failed)} of {len(answers)} requests failed: {failed[0].message}")
    return answers


def lines_of(points: Sequence[ScorecardPoint]) -> list[tuple[str, ...]]:
    """Each figure as it was, and as it was simulated."""
    lines: list[tuple[str, ...]] = [("", "requests", *(f"{name.replace('_', ' ')}" for name in NAMES))]
    for point in points:
        pairs = (f"{getattr(point.real, name):.1f} / {getattr(point.simulated, name):.1f}" for name in NAMES)
        lines.append((point.point, str(point.requests), *pairs))
    return lines


def error_lines(points: Sequence[ScorecardPoint]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("error", *(name.replace("_", " ") for name in NAMES))]
    lines += [(point.point, *(f"{point.error(name):+.1%}" for name in NAMES)) for point in points]
    means = (f"{mean_error(points, [name]):.1%}" for name in NAMES)
    return [*lines, ("mean, whatever the sign", *means)]


def mean_error(points: Iterable[ScorecardPoint], names: Sequence[str]) -> float:
    return float(np.mean([abs(point.error(name)) for point in points for name in names]))


def goals_of(points: Sequence[ScorecardPoint]) -> Iterator[Goal]:
    """The limits, for each engine by itself."""
    for engine in dict.fromkeys(point.point.split()[0] for point in points):
        those = [point for point in points if point.point.startswith(engine)]
        others = [name for name in NAMES if name not in TAILS]
        for what, names, limit in (("medians and goodput", others, MEAN_LIMIT), ("99th percentiles", TAILS, P99_LIMIT)):
            error = mean_error(those, names)
            yield Goal(rule=f"{engine}: mean error of {what} at most {limit:.0%}", met=error <= limit, figure=f"{error:.1%}")


EXPLANATION = "Send the same requests through real and simulated fleets, and show how far the figures are apart."

if __name__ == "__main__":
    sys.exit(start("scorecard", EXPLANATION, run, ScorecardOptions))
