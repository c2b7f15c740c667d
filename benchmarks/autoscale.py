"""A fleet that shapes itself against fixed ones, on simulated time, under a load whose prompts and answers change their ratio
fourfold: in every second phase prompts have half of their tokens, and answers have twice as many.

Owns the load and the comparison. The fleet, its router and what decides are the real ones.
"""

import asyncio
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from bench.report import Column, Goal, table_of
from benchmarks.command import Invocation, start
from common.config import RouterConfig
from common.errors import Conflict, TandemError
from common.ids import InstanceId
from common.options import option, parse_numbers, require, require_above_0, require_at_least
from launch.autoscale import Autoscaler, whom
from launch.fleet_options import ScalingConfig
from router.live import cluster_page
from router.members import Member
from router.timelines import BLOCK_TOKENS, LoadLine
from simulation.plan import FleetPlan, LoadPlan
from simulation.planned_fleet import PlannedFleet
from simulation.report import figures
from simulation.run import Simulation
from simulation.workload import SimulatedConversation, random_load, read_trace

LENGTHS = {"conversation": (12_035, 343), "synthetic": (15_325, 149), "toolagent": (8_596, 182)}
"""Mean tokens of prompts and answers in Mooncake's traces (https://github.com/kvcache-ai/Mooncake, FAST25-release)."""
PAGE_TOKENS = 128
MOST_HOLDS = 1.15
REST_S = 60.0
"""After the load an answer that comes in time may go on for so long. What waits for longer is late anyway."""
QUICK = {"phase_s": 20.0, "phases": 2, "instances": 3, "rate": 2.0}


@dataclass(frozen=True, kw_only=True)
class ShiftBench:
    """The load and the fleet."""

    lengths: Literal["conversation", "synthetic", "toolagent"] = option("conversation", "whose mean lengths the prompts have")
    trace: str = option("", "take the requests from this trace instead, in Mooncake's format")
    rate: float = option(5.0, "without --trace: requests per second")
    phase_s: float = option(120.0, "seconds of a phase")
    phases: int = option(4, "how many phases")
    instances: int = option(6, "how many instances the fleet has")
    fixed: str = option("", "prefill instances of each fixed fleet, as in 0,3,4 (0: colocated); every division without it")
    kv_pages: int = option(1_000, "assumed: KV pages of an instance, of 128 tokens")
    step_cost: str = option(
        FleetPlan().step_cost, "assumed: seconds of a step, and what each prompt token, decode row and token that rows hold adds"
    )
    seed: int = option(0, "of all that is random")

    def __post_init__(self) -> None:
        require_above_0(self, "rate", "phase_s")
        require_at_least(self, phases=1, instances=2, kv_pages=1)
        require(all(0 <= each < self.instances for each in self.layouts), "fixed", "below --instances", self.fixed)

    @property
    def layouts(self) -> tuple[int, ...]:
        """How many prefill instances the fixed fleets have."""
        return parse_numbers(self.fixed, "fixed", int) if self.fixed else tuple(range(self.instances))


class LayoutFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients of one layout got."""

    layout: Annotated[str, Column("layout")]
    good_per_s: Annotated[float, Column("good answers/s", ".2f")]
    good_share: Annotated[float, Column("of all", ".1%")]
    first_token_p90_s: Annotated[float, Column("first token p90, s", ".2f")]
    between_p90_s: Annotated[float, Column("mean between tokens p90, ms", ".1f", 1e3)]
    flips: Annotated[int, Column("changes of role")]


def requests(bench: ShiftBench) -> Iterator[SimulatedConversation]:
    """Before any shift: each is one turn."""
    mean_input, mean_output = LENGTHS[bench.lengths]
    made_up = LoadPlan(rate=bench.rate, mean_input=mean_input, mean_output=mean_output, seed=bench.seed)
    return read_trace(bench.trace) if bench.trace else random_load(made_up)


def write_trace(bench: ShiftBench, path: Path) -> None:
    least, until_s = 1 if bench.trace else 2, bench.phases * bench.phase_s
    lines: list[LoadLine] = []
    for each in takewhile(lambda each: each.at_s < until_s, requests(bench)):
        (turn,) = each.turns
        prompt, answer = max(least, turn.input_tokens), max(least, turn.output_tokens)
        if int(each.at_s // bench.phase_s) % 2:
            prompt, answer = max(1, prompt // 2), 2 * answer
        lines.append(LoadLine(1000 * each.at_s, prompt, answer, turn.blocks[: -(-prompt // BLOCK_TOKENS)]))
    path.write_bytes(msgspec.json.Encoder().encode_lines(lines))


class SimulatedAutoscaler:
    """Looks at the fleet's own page, as `launch autoscale` does, at times of the simulated clock."""

    def __init__(self, fleet: PlannedFleet, config: ScalingConfig) -> None:
        self._fleet, self._interval_s, self._autoscaler = fleet, config.interval_s, Autoscaler(config)
        self.flips = 0
        self._look()

    def _changed(self, outcome: Member | TandemError) -> None:
        self.flips += isinstance(outcome, Member)

    def _look(self) -> None:
        fleet = self._fleet
        page = msgspec.json.decode(msgspec.json.encode(asyncio.run(cluster_page(fleet.router_process.core))))
        choice = self._autoscaler.decide(page, None, fleet.clock.now)
        if choice.action == "flip" and choice.role is not None:
            for name in whom(page, choice):
                router, now = fleet.router_process, fleet.clock.now
                with suppress(Conflict):
                    router.deliver(router.core.fleet.change_role(InstanceId(name), choice.role, self._changed, now))
        fleet.clock.at(fleet.clock.now + self._interval_s, self._look)


def run_layout(bench: ShiftBench, scaling: ScalingConfig, trace: Path, prefill: int | None) -> LayoutFigures:
    """prefill: how many instances of a fixed fleet compute prompts; None: the fleet shapes itself, from equal halves."""
    of_prefill = bench.instances // 2 if prefill is None else prefill
    layout = FleetPlan(
        prefill=of_prefill,
        decode=bench.instances - of_prefill,
        step_cost=bench.step_cost,
        kv_pages=bench.kv_pages,
        page_size=PAGE_TOKENS,
        skip_steps="on",
    )
    load = LoadPlan(trace=str(trace), slo_ttft_s=scaling.slo_ttft_s, slo_itl_s=scaling.slo_itl_s)
    router = RouterConfig(max_requests=FleetPlan().max_requests)
    simulation = Simulation(layout, load, router)
    autoscaler = SimulatedAutoscaler(simulation.fleet, scaling) if prefill is None else None
    clock = simulation.fleet.clock
    clock.at(clock.now + bench.phases * bench.phase_s + REST_S, simulation.stop)
    simulation.run()
    found = figures(simulation)
    name = "colocated" if prefill == 0 else "autoscale" if prefill is None else f"{prefill} + {bench.instances - prefill}"
    return LayoutFigures(
        layout=name,
        good_per_s=found.good_requests / (bench.phases * bench.phase_s),
        good_share=found.good_requests / max(1, len(trace.read_bytes().splitlines())),
        first_token_p90_s=found.first_token_s.p90,
        between_p90_s=found.mean_between_tokens_s.p90,
        flips=autoscaler.flips if autoscaler else 0,
    )


def run(invocation: Invocation) -> int:
    bench, scaling = invocation.config(ShiftBench, QUICK), invocation.config(ScalingConfig, {})
    with tempfile.TemporaryDirectory() as folder:
        write_trace(bench, trace := Path(folder, "trace.jsonl"))
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(partial(run_layout, bench, scaling, trace), (None, *bench.layouts)))
    best = max(found[1:], key=lambda each: each.good_per_s)
    gain = found[0].good_per_s / max(best.good_per_s, 1e-9)
    goal = Goal.of(f"good answers, as a multiple of those of the best fixed fleet ({best.layout})", gain, ".2f", least=MOST_HOLDS)
    limits = f"good: the first token within {scaling.slo_ttft_s:g} s and {1e3 * scaling.slo_itl_s:g} ms a token"
    body = invocation.style.section("Layouts, prefill + decode", table_of(LayoutFigures, found))
    invocation.publish(limits, "all but the time it took", body, [goal], layouts=found)
    return 0


EXPLANATION = "Compare a fleet that shapes itself with fixed ones, on simulated time."

if __name__ == "__main__":
    decided = ("router", "control_key", "tls_cert", "dry_run", "scale", "kube_url", "kube_account", "kube_prefill", "kube_decode")
    sys.exit(start("autoscale", EXPLANATION, run, ShiftBench, ScalingConfig, without=decided))
