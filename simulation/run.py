"""A simulation from its first request to its last ending: the load comes, instances may die, and figures are taken.

Owns who asks when, what conversations have said so far, and who is killed when. Measures by way of the clients, the network and
the meters; judges nothing.

What the clients of a simulated fleet measure: times to first tokens, times between tokens, and how answers ended.

Owns the figures, in compact arrays: an hour of load has millions of tokens. Knows no instances.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from common.config import RouterConfig
from common.errors import BadRequest, Overloaded, Unavailable
from common.ids import ID_BYTES, RequestId, Role, pack_ids
from common.messages import AnyMessage, Counters, Ending, Failed, Handoff
from common.sampling_params import SamplingParams
from router.requests import RequestSpec
from simulation.client import Client
from simulation.clock import Clock
from simulation.network import Letter
from simulation.plan import FleetPlan, LoadPlan
from simulation.planned_fleet import VOCAB_SIZE, PlannedFleet
from simulation.workload import ConversationTurn, SimulatedConversation, system_prompt, workload


class ClientFigures:
    """The figures of all clients together, in seconds, tokens and bytes.

    One for each answer that finished, in one order: turn (its number in its conversation, from 0), first_s (to the first token),
    pace_s (mean between its tokens; 0 for an answer of one), prompt_tokens, cached_tokens (of its prompt, not computed by whom it
    was given to), pushed_bytes (of its KV, all attempts).
    between_s: every time between two tokens of one answer, also of those that failed. endings: how many answers ended how.
    """

    def __init__(self) -> None:
        self.turn = array("L")
        self.first_s = array("d")
        self.pace_s = array("d")
        self.prompt_tokens = array("L")
        self.cached_tokens = array("L")
        self.pushed_bytes = array("Q")
        self.between_s = array("d")
        self.endings: Counter[str] = Counter()
        self.prompt_tokens_asked = self.tokens = 0

    def asked(self, prompt_tokens: int) -> None:
        self.prompt_tokens_asked += prompt_tokens

    def ended(self, how: str) -> None:
        self.endings[how] += 1


class MeasuredClient(Client):
    """One request of one choice. It reads what comes as soon as it comes.

    turn: its number in its conversation, from 0. over: called when the answer has ended, with its tokens, or None when it failed.
    """

    def __init__(
        self, spec: RequestSpec, turn: int, clock: Clock, measured: ClientFigures, over: Callable[[list[int] | None], None]
    ) -> None:
        super().__init__(spec.request_id)
        self.request.wake = self._read
        self.pushed_bytes = 0
        self._turn = turn
        self._prompt_tokens = spec.prompt_tokens
        self._clock = clock
        self._measured = measured
        self._over = over
        self._asked_s = self._first_s = self._latest_s = clock.now
        self._said: list[int] = []
        self._cached_tokens = 0

    def _read(self) -> None:
        now, measured = self._clock.now, self._measured
        for delta in self.request.take():
            for token in delta.token_ids:
                if self._said:
                    measured.between_s.append(now - self._latest_s)
                else:
                    self._first_s = now
                self._said.append(token)
                self._latest_s = now
            measured.tokens += len(delta.token_ids)
            self._cached_tokens += delta.cached_tokens
            if delta.ending is not None:
                self._end(delta.ending)

    def _end(self, ending: Ending) -> None:
        if isinstance(ending, Failed):
            self._measured.ended(f"failed: {ending.kind}")
            self._over(None)
            return
        measured = self._measured
        measured.ended(f"finished: {ending.reason}")
        measured.turn.append(self._turn)
        measured.first_s.append(self._first_s - self._asked_s)
        measured.pace_s.append((self._latest_s - self._first_s) / max(1, len(self._said) - 1))
        measured.prompt_tokens.append(self._prompt_tokens)
        measured.cached_tokens.append(self._cached_tokens)
        measured.pushed_bytes.append(self.pushed_bytes)
        self._over(self._said)


PROGRESS_S = 5.0
"""Simulated; how often progress is told."""


@dataclass(slots=True, eq=False)
class Talk:
    """A conversation under way. said: packed tokens of its prompts and answers so far. turn: the number of the next one."""

    conversation: SimulatedConversation
    said: bytes
    turn: int = 0


class Simulation:
    """A fleet and its load. `run` runs it once; then everything can be read. config: of the router."""

    def __init__(self, fleet: FleetPlan, load: LoadPlan, config: RouterConfig) -> None:
        self.plan = fleet
        self.load = load
        self._coming = workload(load)
        """First, because it may be refused, and the fleet takes long."""
        self.fleet = PlannedFleet(fleet, config)
        self.fleet.network.taps.append(self._sent_letter)
        self.measured = ClientFigures()
        self._of_killed: list[tuple[Role, Counters]] = []
        self.killed: Counter[str] = Counter()
        self.cut_short = 0
        """Conversations that ended before their last turn, because an answer failed or was refused."""
        self.began_s = self.fleet.clock.now
        self._system = system_prompt(load, VOCAB_SIZE)
        self._next: SimulatedConversation | None = None
        self._talks = self._sent = 0
        self._open: dict[RequestId, MeasuredClient] = {}
        self._random = np.random.default_rng([load.seed, 1])

    def run(self, progress: Callable[[str], None] = lambda line: None) -> None:
        """Until every request has ended. progress: called with a line now and then."""
        clock = self.fleet.clock
        self._plan_next(self._coming)
        if self.load.kill_every_s:
            self._plan_kill()
        while self._goes_on:
            self._tell(progress)
            ends_s = clock.now + PROGRESS_S
            while clock.next_deadline() < ends_s and self._goes_on:
                clock.turn()
            if self._goes_on:
                clock.now = ends_s

    @property
    def seconds(self) -> float:
        """Simulated, from the beginning of the load to the last ending."""
        return self.fleet.clock.now - self.began_s

    # --- the load ----------------------------------------------------------------------------------------------------------

    @property
    def _goes_on(self) -> bool:
        return self._next is not None or self._talks > 0

    def _plan_next(self, coming: Iterator[SimulatedConversation]) -> None:
        self._next = next(coming, None)
        if self._next is not None:
            self.fleet.clock.at(self.began_s + self._next.at_s, lambda: self._begin(coming))

    def _begin(self, coming: Iterator[SimulatedConversation]) -> None:
        assert self._next is not None
        self._talks += 1
        self._ask(Talk(self._next, self._system))
        self._plan_next(coming)

    def _ask(self, talk: Talk) -> None:
        """The next turn of a conversation, unless its time is over."""
        if talk.turn and self.load.duration_s and self.seconds >= self.load.duration_s:
            self._talks -= 1
            return
        turn, name = talk.conversation.turns[talk.turn], RequestId(f"request-{self._sent}")
        self._sent += 1
        talk.said += turn.prompt(VOCAB_SIZE)
        sampling, session = self._sampling(turn, len(talk.said) // ID_BYTES), talk.conversation.session
        spec = RequestSpec(name, 0, talk.said, sampling, session=session)
        client = MeasuredClient(spec, talk.turn, self.fleet.clock, self.measured, lambda said: self._answered(talk, name, said))
        self.measured.asked(len(talk.said) // ID_BYTES)
        talk.turn += 1
        self._open[name] = client
        try:
            self.fleet.router_process.submit([spec], client)
        except (BadRequest, Overloaded, Unavailable) as error:
            self.measured.ended(f"refused: {error.kind}")
            self._answered(talk, name, None)

    def _answered(self, talk: Talk, name: RequestId, said: list[int] | None) -> None:
        """After an answer comes the next turn. After a failure comes none."""
        del self._open[name]
        is_last = talk.turn == len(talk.conversation.turns)
        if said is None or is_last:
            self.cut_short += not is_last
            self._talks -= 1
            return
        talk.said += pack_ids(said)
        self.fleet.clock.at(self.fleet.clock.now + talk.conversation.turns[talk.turn].pause_s, lambda: self._ask(talk))

    def _sampling(self, turn: ConversationTurn, prompt_tokens: int) -> SamplingParams:
        """Without --max-tokens a request asks for the tokens that it gets. With it, the model ends the answer by itself."""
        if not self.load.max_tokens:
            return SamplingParams(max_new_tokens=turn.output_tokens, temperature=0.0)
        room = max(1, self.plan.context_tokens - prompt_tokens)
        seed = self.fleet.seed_that_ends(prompt_tokens + turn.output_tokens)
        return SamplingParams(max_new_tokens=min(self.load.max_tokens, room), temperature=0.0, seed=seed)

    def _sent_letter(self, letter: Letter, message: AnyMessage, delays: tuple[float, ...]) -> None:
        if isinstance(message, Handoff) and message.key.request_id in self._open:
            self._open[message.key.request_id].pushed_bytes += message.pushed_bytes

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
            self._of_killed.append((role, killed.scheduler.report().counters))
            self.fleet.clock.at(self.fleet.clock.now + self.load.restart_s, lambda: self._start(name, role))
        self._plan_kill()

    def _start(self, name: str, role: Role) -> None:
        self.fleet.start(name, role)

    # --- what is seen ------------------------------------------------------------------------------------------------------

    def _tell(self, progress: Callable[[str], None]) -> None:
        progress(f"{self.seconds:.0f} s: {self._sent} requests, {len(self._open)} open, {self.measured.tokens} tokens")

    def counters(self, role: Role) -> list[Counters]:
        """Of the instances of a role that live and of those that were killed."""
        living = [each.scheduler.report().counters for each in self.fleet.instances.values() if each.name.role == role]
        return [counters for killed, counters in self._of_killed if killed == role] + living
