"""What recording a trace costs the processes of a fleet: `python -m tests.life.trace_cost`.

Owns the comparison. A simulated fleet computes nothing, so what it spends is what router, schedulers, workers and detokenizers
spend. It serves the same load again and again, traced and not traced in turn, and the CPU time of each pair gives a ratio.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from random import Random

from common.config import RouterConfig
from common.ids import RequestId, pack_ids
from common.sampling_params import SamplingParams
from router.requests import ClientRequest, RequestSpec
from simulation.plan import FleetPlan
from simulation.planned_fleet import VOCAB_SIZE, PlannedFleet

PROMPT_TOKENS, ANSWER_TOKENS = 1_000, 200
LONGEST_S = 600.0


def serve(fleet: PlannedFleet, requests: int, name: str) -> float:
    """CPU seconds of this process for so many requests at once, none of which finds its prompt in a cache."""
    sampling = SamplingParams(max_new_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    random = Random(name)
    prompts = [pack_ids([random.randrange(20, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]) for _ in range(requests)]
    began_s = time.process_time()
    for number, prompt in enumerate(prompts):
        spec = RequestSpec(RequestId(f"{name}-{number}"), 0, prompt, sampling)
        fleet.router_process.submit(ClientRequest(), [spec])
    while len(fleet.router_process.core.requests):
        fleet.run_for(1.0)
    spent_s = time.process_time() - began_s
    fleet.run_for(1.0)  # every page comes home
    return spent_s


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.life.trace_cost")
    parser.add_argument("--requests", type=int, default=32, help="how many are served at once")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of a load that is not traced and one that is")
    flags = parser.parse_args(arguments)
    fleet = PlannedFleet(FleetPlan(prefill=1, decode=1), RouterConfig())
    router = fleet.router_process
    traces = router.core.traces
    serve(fleet, flags.requests, "warm up")
    ratios: list[float] = []
    spans = plain_s = traced_s = 0.0
    for number in range(flags.rounds):
        plain = serve(fleet, flags.requests, f"plain-{number}")
        router.deliver(traces.start(LONGEST_S, fleet.clock.now))
        traced = serve(fleet, flags.requests, f"traced-{number}")
        spans += sum(process.spans for process in traces.status(fleet.clock.now).processes)
        router.deliver(traces.end(fleet.clock.now))
        fleet.run_for(1.0)
        ratios.append(traced / plain)
        plain_s, traced_s = plain_s + plain, traced_s + traced
    tokens = flags.rounds * flags.requests * ANSWER_TOKENS
    least, most, middle = min(ratios), max(ratios), statistics.median(ratios)
    sys.stdout.write(
        f"not traced: {1e6 * plain_s / tokens:.1f} µs of CPU time for each token of {flags.requests} answers at once\n"
        f"traced: {middle:.3f} times as much ({least:.3f} … {most:.3f} in {flags.rounds} pairs)\n"
        f"{spans / flags.rounds:.0f} spans a load, {1e6 * (traced_s - plain_s) / spans:.1f} µs of CPU time for each\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
