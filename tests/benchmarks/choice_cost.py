"""What the choice of instances for a request costs a router, by the policy of both roles and with conditional dispatch.

    python -m tests.benchmarks.choice_cost --instances 1000

Half of the instances are prefill, each linked with all of the other role. One in ten has a prompt in its cache. Microseconds of
CPU for one choice, the best of some rounds. Judges nothing.
"""

import argparse
import sys
import time

from common.config import RouterConfig
from router.cost import Demand
from router.policies import POLICIES
from tests.builders import instance
from tests.router.bench import Bench, placer_of

PROMPT_TOKENS, ANSWER_TOKENS, BLOCKS = 160, 40, 7
ROUNDS, CHOICES = 5, 100
HELD = 10
"""One instance in so many has a prompt in its cache."""


def blocks_of(prompt: int) -> range:
    """The names of a prompt's blocks."""
    return range(BLOCKS * prompt, BLOCKS * (prompt + 1))


def choose_us(instances: int) -> dict[str, float]:
    config = RouterConfig(dispatch="conditional")
    infos = [instance(f"i-{number:04d}", "decode" if number % 2 else "prefill") for number in range(instances)]
    bench = Bench(*infos, config=config)
    fleet = bench.core.fleet
    while not fleet.peering.settled:  # until then prefill instances have no links, and a choice looks at all of them
        bench.beat(0.0)
    bench.beat(0.0)
    assert all(member.usable for member in fleet.members("prefill"))
    for number, member in enumerate(fleet.members()):
        for prompt in range(number % HELD, CHOICES, HELD):
            fleet.caches.expect([member], blocks_of(prompt), 0.0)
    configs = {each: RouterConfig(prefill_policy=each, decode_policy=each) for each in POLICIES} | {"conditional": config}
    taken: dict[str, float] = {}
    for name, each in configs.items():
        placer, rounds = placer_of(fleet, each), list[float]()
        overlaps = [fleet.caches.match(blocks_of(number)) for number in range(CHOICES)]
        demands = [Demand(PROMPT_TOKENS, ANSWER_TOKENS, held, session=f"session {at}") for at, held in enumerate(overlaps)]
        for _ in range(ROUNDS):
            began = time.thread_time()
            for demand in demands:
                placer.choose(demand)
            rounds.append((time.thread_time() - began) / CHOICES)
        taken[name] = 1e6 * min(rounds)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--instances", type=int, default=1000)
    for name, figure in choose_us(parser.parse_args().instances).items():
        sys.stdout.write(f"{name:>15}: {figure:.0f} us\n")


if __name__ == "__main__":
    main()
