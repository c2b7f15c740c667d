"""Schedules of changing weights: a fleet is given new weights and adapters again and again while it serves, and things go wrong
meanwhile.

Owns the draw of a schedule, its run, and what must hold: every token of every answer is the toy's, with all KV of the weights
and the adapter from which the answer says that it came. A failing seed replays exactly:

    python -m tests.life.weight_schedules --first 17 --schedules 1
"""

import argparse
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

from common.config import RouterConfig
from common.errors import Conflict, TandemError, Unavailable
from common.ids import Digest, InstanceId
from common.messages import Finished
from common.messages.variants import FIRST_VERSION, AdapterEntry, WeightsInMemory, WeightsOnDisk
from common.step_cost import StepCost
from router.adapters import Operation, ReplaceMode
from router.weights import Updated, UpdateMode, UpdateOrder
from simulation.network import DELAY_S
from tests.engine.toy import TOY_WEIGHTS, ToyExecutor
from tests.life.client import Client, ReceivedAnswer
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet, World
from tests.life.ranks import ToyInstance, ToySize

WINDOW_S, SETTLE_S, LOOK_S = 8.0, 400.0, 0.3
ORDERS = frozenset(
    (
        "StageWeights",
        "WeightsStaged",
        "SwitchWeights",
        "DropWeights",
        "HoldSteps",
        "DoTask",
        "TaskDone",
        "SetAdapters",
        "AdaptersHeld",
    )
)
ADAPTERS = ("red", "green", "blue", "grey", "pink")
SIZE = ToySize(pages=64, rows=6, chunk_tokens=8, request_timeout_s=300.0, cost=StepCost(0.02, 0.0005, 0.001))


class LostOrders:
    """Some letters about weights are lost, and some are late."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.lost = random.choice((0.0, 0.0, 0.2))
        self.late = random.choice((0.0, 0.1))

    def delays(self, sender: InstanceId, to: InstanceId, now: float, kind: str) -> tuple[float, ...]:
        if kind in ORDERS and self._random.random() < self.lost:
            return ()
        if ".rank-" in sender + to:  # a line between ranks keeps its order
            return (DELAY_S,)
        return (DELAY_S + (self._random.random() * 0.3 if self._random.random() < self.late else 0.0),)


@dataclass(slots=True, eq=False)
class Asked:
    client: Client
    prompt: list[int]
    max_tokens: int
    adapter: str


class WeightsTrial:
    """A fleet under the schedule of a seed."""

    def __init__(self, seed: int) -> None:
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        random = self.random = Random(f"weights {seed}")
        self.weather = LostOrders(random)
        ranks = {"prefill": random.choice((1, 1, 2)), "decode": random.choice((1, 1, 2))}
        config = RouterConfig(
            request_timeout_s=300.0,
            resume_wait_s=60.0,
            max_attempts=64,
            prefill_policy="cache_aware",
            decode_policy="cache_aware",
        )
        self.fleet = ToyFleet(
            random.choice((1, 2, 3)),
            random.choice((1, 2, 3)),
            config=config,
            size=SIZE,
            world=World(weather=self.weather),
            ranks=ranks,  # type: ignore[arg-type]
        )
        self.asked: list[Asked] = []
        self.known = {FIRST_VERSION: TOY_WEIGHTS}
        """The weights that each version names."""
        self.aborts = False
        self.open_updates = self.open_loads = 0

    def run(self) -> None:
        deeds = [self._ask] * 20 + [self._update] * self.random.choice((3, 6, 9)) + [self._kill] * self.random.choice((0, 1, 2))
        deeds += [self._pause] * self.random.choice((0, 0, 2))
        deeds += [self._load] * self.random.choice((0, 6, 12)) + [self._unload] * self.random.choice((0, 0, 3))
        begins_s = self.fleet.clock.now
        for at_s, deed in sorted(((self.random.uniform(0.0, WINDOW_S), number), deed) for number, deed in enumerate(deeds)):
            self._run_until(begins_s + at_s[0])
            deed()
        self._run_until(self.fleet.clock.now + 5.0)
        self.weather.lost = self.weather.late = 0.0
        self._continue()
        self.fleet.turn_until(
            lambda: self.open_updates + self.open_loads == 0 and all(each.client.ended for each in self.asked), SETTLE_S
        )
        self.fleet.turn_until(self.fleet.is_home, SETTLE_S)
        self._check()

    def _is_over(self) -> bool:
        return self.open_updates + self.open_loads == 0 and all(each.client.ended for each in self.asked)

    def _run_until(self, until_s: float) -> None:
        """An instance that a rank's death ends gets a successor."""
        while self.fleet.clock.now < until_s:
            self.fleet.run_for(min(LOOK_S, until_s - self.fleet.clock.now))
            for life in self.fleet.lives:
                if life.name.id not in self.fleet.instances:
                    self.fleet.start(life.name.id, life.name.role)

    # --- deeds ---------------------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        random = self.random
        prompt = [random.randrange(10, 1000) for _ in range(random.choice((3, 8, 20, 41)))]
        if self.asked and random.random() < 0.4:  # what begins alike is in a cache
            prompt = self.asked[0].prompt[:16] + prompt
        max_tokens = random.choice((1, 2, 12, 40, 80))
        entries = list(self.fleet.router.fleet.adapters.entries())
        adapter = random.choice(entries).name if entries and random.random() < 0.7 else ""
        try:
            client = self.fleet.submit(f"r{len(self.asked)}", prompt, max_tokens, adapter)
        except Unavailable:
            self.counts["refused"] += 1
            if adapter:
                self._adapt(adapter, self.fleet.router.fleet.adapters.reload(adapter))
            return
        self.asked.append(Asked(client, prompt, max_tokens, adapter))

    def _load(self) -> None:
        random = self.random
        name, folder = random.choice(ADAPTERS), random.choice((f"a{random.randrange(6)}", f"a{random.randrange(6)}", "bad"))
        mode: ReplaceMode = random.choice(("finish", "recompute", "abort"))
        self.aborts = self.aborts or mode == "abort"
        pinned, replaces = random.random() < 0.2, random.random() < 0.8
        adapters = self.fleet.router.fleet.adapters
        self._adapt(folder, adapters.load(name, folder, is_pinned=pinned, replaces=replaces, mode=mode))

    def _unload(self) -> None:
        name = self.random.choice(ADAPTERS)
        self._adapt(name, self.fleet.router.fleet.adapters.unload(name))

    def _adapt(self, what: str, operation: Operation) -> None:
        self.open_loads += 1

        def came(outcome: AdapterEntry | TandemError) -> None:
            self.open_loads -= 1
            if what == "bad" and not isinstance(outcome, TandemError):
                self.problems.append("a bad adapter was loaded")
            kind = f"refused {outcome.status}" if isinstance(outcome, TandemError) else "done"
            self.counts[f"adapters: {kind}"] += 1

        router = self.fleet.router_process
        router.deliver(router.core.adapt(operation, came, self.fleet.clock.now))

    def _update(self) -> None:
        random, router = self.random, self.fleet.router_process
        mode: UpdateMode = random.choice(("recompute", "recompute", "finish", "finish", "abort"))
        name = random.choice((f"w{random.randrange(4)}", f"w{random.randrange(4)}", "bad"))
        version = random.choice(("", f"step-{random.randrange(10**6)}"))
        source = WeightsOnDisk(name) if random.random() < 0.7 else WeightsInMemory((name,))
        finish_s = random.choice((0.5, 60.0))
        weights = router.core.fleet.weights
        answer = partial(self._updated, mode, name, version)
        try:
            change = weights.begin(UpdateOrder(source, mode, version, finish_s), answer, self.fleet.clock.now)
        except (Conflict, Unavailable):
            self.counts["refused updates"] += 1
            return
        self.open_updates += 1
        self.aborts = self.aborts or mode == "abort"
        self.known[version or name] = Digest(name)
        router.deliver(router.core.apply(change, self.fleet.clock.now))

    def _updated(self, mode: str, name: str, version: str, came: Updated | TandemError) -> None:
        self.open_updates -= 1
        if isinstance(came, TandemError):
            self.counts["failed updates"] += 1
            if name != "bad" and came.status == 400:
                self.problems.append(f"an update to {name} failed: {came}")
            return
        self.counts[f"updates: {mode}"] += 1
        if name == "bad" or came.weights != name:
            self.problems.append(f"an update to {name} has brought {came}")

    def _kill(self) -> None:
        random = self.random
        name = random.choice(sorted(self.fleet.instances))
        if random.random() < 0.5 and self.fleet.instances[name].followers:
            self.fleet.kill_rank(name, 1)
            self.counts["ranks killed"] += 1
            return
        instance = self.fleet.kill(name)
        self.fleet.connection_broken(name)
        self.counts["kills"] += 1
        self.fleet.run_for(random.uniform(0.0, 1.0))
        self.fleet.start(name, instance.name.role)

    def _pause(self) -> None:
        router, now = self.fleet.router_process, self.fleet.clock.now
        weights, in_place = router.core.fleet.weights, self.random.random() < 0.5
        if weights.is_paused:
            self._continue()
            return
        router.deliver(router.core.apply(weights.pause(holds_steps=in_place), now))
        if not in_place:
            router.deliver(router.core.requests.set_back_all(now))
        self.counts["pauses"] += 1

    def _continue(self) -> None:
        router = self.fleet.router_process
        router.deliver(router.core.apply(router.core.fleet.weights.go_on(), self.fleet.clock.now))

    # --- what must hold --------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        weights = self.fleet.router.fleet.weights
        instances = self.fleet.instances
        self.fleet.turn_until(lambda: all(one.rank.engine.weights == weights.target for one in instances.values()), SETTLE_S)
        if weights.is_held or weights.update is not None:
            self.problems.append("the fleet is held at the end")
        adapters = self.fleet.router.fleet.adapters
        named = adapters.table.held
        self.fleet.turn_until(lambda: all(self._held(one) == named for one in instances.values()), SETTLE_S)
        for asked in self.asked:
            for answer in asked.client.answers:
                self.problems += self._faults(asked, answer)

    @staticmethod
    def _held(instance: ToyInstance) -> set[Digest]:
        """What all its ranks hold."""
        engines = [instance.rank.engine, *(follower.rank.engine for follower in instance.followers)]
        return {digest for engine in engines if isinstance(engine, ToyExecutor) for digest in engine.held}

    def _faults(self, asked: Asked, answer: ReceivedAnswer) -> Iterator[str]:
        name, tokens = answer.request_id, answer.token_ids
        if len(answer.endings) != 1:
            yield f"{name} ended {len(answer.endings)} times"
            return
        (ending,) = answer.endings
        if not isinstance(ending, Finished) or (ending.reason == "cancelled" and not self.aborts):
            yield f"{name} ended with {ending}"
        elif ending.reason == "length" and len(tokens) != asked.max_tokens:
            yield f"{name} has {len(tokens)} of {asked.max_tokens} tokens"
        if tokens and (not answer.versions or answer.versions[0][0] != 0):
            yield f"{name} does not say what its first token came from: {answer.versions}"
            return
        self.counts["answers"] += 1
        weights = [(self.known[version.partition("+")[0]], Digest(version.partition("+")[2])) for _, version in answer.versions]
        self.counts["answers of several weights"] += len({one for one, _ in weights}) > 1
        self.counts["answers with an adapter"] += bool(asked.adapter)
        self.counts["answers of several adapters"] += len({adapter for _, adapter in weights}) > 1
        if any(bool(adapter) != bool(asked.adapter) for _, adapter in weights):
            yield f"{name} asked for {asked.adapter!r} and got {weights}"
        if not answer.versions:
            return
        ends = [*(begin for begin, _ in answer.versions[1:]), len(tokens)]
        for (begin, version), end, (base, adapter) in zip(answer.versions, ends, weights, strict=True):
            context = asked.prompt + tokens[:begin]
            if tokens[begin:end] != undisturbed(context, end - begin, weights=base, adapter=adapter):
                yield f"{name} has tokens {begin} to {end} that {version} does not give"


def run_schedule(seed: int) -> tuple[int, list[str], Counter[str]]:
    try:
        trial = WeightsTrial(seed)
        trial.run()
    except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError, TandemError) as error:
        return seed, [f"{type(error).__name__}: {error}"], Counter()
    return seed, trial.problems, trial.counts


def main() -> int:
    parser = argparse.ArgumentParser(description="Changes the weights of simulated fleets that serve, and checks every token.")
    parser.add_argument("--schedules", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="processes (default: all cores)")
    args = parser.parse_args()
    counts, failed = Counter[str](), 0
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
        for seed, problems, counted in pool.imap_unordered(run_schedule, range(args.first, args.first + args.schedules), 8):
            counts += counted
            failed += bool(problems)
            for problem in problems:
                sys.stdout.write(f"seed {seed}: {problem}\n")
    sys.stdout.writelines(f"{name}: {count}\n" for name, count in sorted(counts.items()))
    sys.stdout.write(f"{args.schedules} schedules, {failed} with problems\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
