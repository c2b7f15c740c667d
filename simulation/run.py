"""A simulation from its first request to its last ending: the load comes, instances may die, and figures are taken.

Owns who asks when, and who is killed when. Measures by way of the clients, the network and the meters; judges nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from common.config import RouterConfig
from common.errors import BadRequest, Overloaded, Unavailable
from common.ids import RequestId, Role
from common.messages import Counters
from common.sampling_params import SamplingParams
from router.requests import RequestSpec
from simulation.measured import Measured, MeasuredClient
from simulation.plan import FleetPlan, LoadPlan
from simulation.planned_fleet import VOCAB_SIZE, PlannedFleet
from simulation.workload import Asked, workload

PROGRESS_S = 5.0
"""Simulated; how often progress is told."""


class Simulation:
    """A fleet and its load. `run` runs it once; then everything can be read. config: of the router."""

    def __init__(self, fleet: FleetPlan, load: LoadPlan, config: RouterConfig) -> None:
        self.plan = fleet
        self.load = load
        self._asked = workload(load)
        """First, because it may be refused, and the fleet takes long."""
        self.fleet = PlannedFleet(fleet, config)
        self.measured = Measured()
        self._of_killed: list[Counters] = []
        self.killed: Counter[str] = Counter()
        self.began_s = self.fleet.clock.now
        self._next: Asked | None = None
        self._sent = 0
        self._random = np.random.default_rng([load.seed, 1])

    def run(self, progress: Callable[[str], None] = lambda line: None) -> None:
        """Until every request has ended. progress: called with a line now and then."""
        clock = self.fleet.clock
        self._plan_next(self._asked)
        if self.load.kill_every_s:
            self._plan_kill()
        while self._next is not None or self.measured.open:
            self._tell(progress)
            ends_s = clock.now + PROGRESS_S
            while clock.next_deadline() < ends_s and (self._next is not None or self.measured.open):
                clock.turn()
            if self._next is not None or self.measured.open:
                clock.now = ends_s

    @property
    def seconds(self) -> float:
        """Simulated, from the beginning of the load to the last ending."""
        return self.fleet.clock.now - self.began_s

    # --- the load ----------------------------------------------------------------------------------------------------------

    def _plan_next(self, asked: Iterator[Asked]) -> None:
        self._next = next(asked, None)
        if self._next is not None:
            self.fleet.clock.at(self.began_s + self._next.at_s, lambda: self._ask(asked))

    def _ask(self, asked: Iterator[Asked]) -> None:
        request = self._next
        assert request is not None
        now, name = self.fleet.clock.now, RequestId(f"request-{self._sent}")
        self._sent += 1
        sampling = self._sampling(request)
        client = MeasuredClient(name, self.fleet.clock, self.measured)
        self.measured.asked(now, request.input_tokens)
        try:
            self.fleet.router_process.submit([RequestSpec(name, 0, request.prompt(VOCAB_SIZE), sampling)], client)
        except (BadRequest, Overloaded, Unavailable) as error:
            self.measured.ended(now, f"refused: {error.kind}")
        self._plan_next(asked)

    def _sampling(self, request: Asked) -> SamplingParams:
        """Without --max-tokens a request asks for the tokens that it gets. With it, the model ends the answer by itself."""
        if not self.load.max_tokens:
            return SamplingParams(max_new_tokens=request.output_tokens, temperature=0.0)
        room = max(1, self.plan.context_tokens - request.input_tokens)
        seed = self.fleet.seed_that_ends(request.input_tokens + request.output_tokens)
        return SamplingParams(max_new_tokens=min(self.load.max_tokens, room), temperature=0.0, seed=seed)

    # --- deaths ------------------------------------------------------------------------------------------------------------

    def _plan_kill(self) -> None:
        pause_s = float(self._random.exponential(self.load.kill_every_s))
        self.fleet.clock.at(self.fleet.clock.now + pause_s, self._kill)

    def _kill(self) -> None:
        names = sorted(self.fleet.instances)
        if names:
            killed = self.fleet.kill(names[int(self._random.integers(len(names)))])
            name, role = killed.name.id, killed.name.role
            self.killed[role] += 1
            self._of_killed.append(killed.scheduler.report().counters)
            self.fleet.clock.at(self.fleet.clock.now + self.load.restart_s, lambda: self._start(name, role))
        self._plan_kill()

    def _start(self, name: str, role: Role) -> None:
        self.fleet.start(name, role)

    # --- what is seen ------------------------------------------------------------------------------------------------------

    def _tell(self, progress: Callable[[str], None]) -> None:
        progress(f"{self.seconds:.0f} s: {self._sent} requests, {self.measured.open} open, {self.measured.tokens} tokens")

    def counters(self) -> list[Counters]:
        """Of the instances that live and of those that were killed."""
        return [*self._of_killed, *(each.scheduler.report().counters for each in self.fleet.instances.values())]
