"""A simulation from its first request to its last ending: the load comes, instances may die, and figures are taken.

Owns who asks when, what conversations have said so far, who is killed when, and what the clients measure: times to first tokens,
times between tokens, and how answers ended. Judges nothing.
"""

import gc
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from common.config import RouterConfig
from common.errors import BadRequest, Overloaded, Unavailable
from common.ids import ID_BYTES, RequestId, Role, pack_ids
from common.messages import AnyMessage, Counters, Ending, Failed, Handoff
from common.sampling_params import SamplingParams
from router.requests import ClientRequest, RequestSpec
from simulation.network import Letter
from simulation.plan import FleetPlan, LoadPlan
from simulation.planned_fleet import VOCAB_SIZE, PlannedFleet
from simulation.processes import RouterProcess
from simulation.stretch import LateTokens
from simulation.workload import ConversationTurn, SimulatedConversation, system_prompt, workload


class ClientFigures:
    """The figures of all clients together, in compact arrays: an hour of load has millions of tokens.

    The arrays from `turn` to `pushed_bytes` have an item for each answer that finished, in one order.
    """

    def __init__(self) -> None:
        self.turn = array("L")
        """The number of the answer in its conversation, from 0."""
        self.first_s = array("d")
        """Seconds to the first token."""
        self.pace_s = array("d")
        """Mean seconds between its tokens; 0 for an answer of one."""
        self.answer_s = array("d")
        """Seconds to the last token."""
        self.prompt_tokens = array("L")
        self.cached_tokens = array("L")
        """Tokens of the prompt that the instance which was given the request did not compute."""
        self.pushed_bytes = array("Q")
        """Bytes of KV that were pushed, over all attempts."""
        self.between_s = array("d")
        """Every time between two tokens of one answer, also of those that failed."""
        self.endings: Counter[str] = Counter()
        """How many answers ended how."""
        self.prompt_tokens_asked = self.tokens = 0


class MeasuredClient:
    """One request of one choice. It reads what comes as soon as it comes.

    turn: its number in its conversation, from 0. ended: called with the tokens of the answer, or None when it failed.
    """

    def __init__(
        self,
        spec: RequestSpec,
        turn: int,
        router: RouterProcess,
        measured: ClientFigures,
        late_s: LateTokens,
        ended: Callable[[list[int] | None], None],
    ) -> None:
        self.request = ClientRequest(wake=self._read)
        self.pushed_bytes = 0
        self._turn = turn
        self._prompt_tokens = spec.prompt_tokens
        self._id, self._late_s = spec.request_id, late_s
        self._router = router
        self._measured = measured
        self._ended = ended
        self._sent_s = self._first_s = self._latest_s = router.clock.now
        self._token_ids: list[int] = []
        self._cached_tokens = 0

    def _read(self) -> None:
        measured = self._measured
        for delta in self.request.take():
            tokens = len(delta.token_ids)
            if tokens:
                before = len(self._token_ids)
                self._token_ids += delta.token_ids
                late_s = self._late_s.pop((self._id, before + tokens), None)
                at_s = self._router.sends_s() - (late_s or 0.0)
                if not before:
                    self._first_s = at_s
                elif late_s is None:  # tokens of one event come together
                    measured.between_s.append(at_s - self._latest_s)
                else:
                    measured.between_s.extend([(at_s - self._latest_s) / tokens] * tokens)
                if not before or late_s is None:
                    measured.between_s.extend([0.0] * (tokens - 1))
                self._latest_s = at_s
            measured.tokens += tokens
            self._cached_tokens += delta.cached_tokens
            if delta.ending is not None:
                self._end(delta.ending)

    def _end(self, ending: Ending) -> None:
        measured = self._measured
        if isinstance(ending, Failed):
            measured.endings[f"failed: {ending.kind}"] += 1
            self._ended(None)
            return
        measured.endings[f"finished: {ending.reason}"] += 1
        measured.turn.append(self._turn)
        measured.first_s.append(self._first_s - self._sent_s)
        measured.pace_s.append((self._latest_s - self._first_s) / max(1, len(self._token_ids) - 1))
        measured.answer_s.append(self._latest_s - self._sent_s)
        measured.prompt_tokens.append(self._prompt_tokens)
        measured.cached_tokens.append(self._cached_tokens)
        measured.pushed_bytes.append(self.pushed_bytes)
        self._ended(self._token_ids)


COLLECTED_AFTER = 100_000, 20, 100
"""Thresholds of the garbage collector. Prefix caches hold millions of objects that stay, and to look at them as often as Python
does by itself takes a fifth of the time."""
PROGRESS_S = 5.0
"""Simulated seconds between two lines of progress."""


@dataclass(slots=True, eq=False)
class OpenConversation:
    """A conversation under way."""

    conversation: SimulatedConversation
    context: bytes
    """The packed tokens of its prompts and answers so far."""
    turn: int = 0
    """The number of its next turn."""


class Simulation:
    """A fleet and its load. `run` runs it once; then everything can be read. config: of the router."""

    def __init__(self, fleet: FleetPlan, load: LoadPlan, config: RouterConfig) -> None:
        self.plan = fleet
        self.load = load
        self._conversations = workload(load)
        """First, because it may be refused, and the fleet takes long."""
        self.fleet = PlannedFleet(fleet, config)
        self.fleet.network.taps.append(self._count_pushed)
        self.measured = ClientFigures()
        self.killed: Counter[str] = Counter()
        self.cut_short = 0
        """Conversations that ended before their last turn, because an answer failed or was refused."""
        self.began_s = self.fleet.clock.now
        self._system = system_prompt(load, VOCAB_SIZE)
        self.stopped = False
        self._next: SimulatedConversation | None = None
        self._open_conversations = self._sent = 0
        self._open: dict[RequestId, MeasuredClient] = {}
        self._random = np.random.default_rng([load.seed, 1])

    def run(self, progress: Callable[[str], object] = lambda line: None) -> None:
        """Until every request has ended, or `stop` was called. progress: called with a line now and then."""
        self._plan_next()
        if self.load.kill_every_s:
            self._plan_kill()
        self._show(progress)
        before = gc.get_threshold()
        gc.set_threshold(*COLLECTED_AFTER)
        try:
            while self._is_running and not self.stopped:
                self.fleet.clock.turn()
        finally:
            gc.set_threshold(*before)

    def stop(self) -> None:
        """Whoever runs it knows enough."""
        self.stopped = True

    @property
    def seconds(self) -> float:
        """Simulated seconds from the beginning of the load to the last ending."""
        return self.fleet.clock.now - self.began_s

    # --- the load ----------------------------------------------------------------------------------------------------------

    @property
    def _is_running(self) -> bool:
        return self._next is not None or self._open_conversations > 0

    def _plan_next(self) -> None:
        self._next = next(self._conversations, None)
        if self._next is not None:
            self.fleet.clock.at(self.began_s + self._next.at_s, self._begin)

    def _begin(self) -> None:
        assert self._next is not None
        self._open_conversations += 1
        self._ask(OpenConversation(self._next, self._system))
        self._plan_next()

    def _ask(self, chat: OpenConversation) -> None:
        """The next turn of a conversation, unless its time is over."""
        if chat.turn and self.load.duration_s and self.seconds >= self.load.duration_s:
            self._open_conversations -= 1
            return
        turn, name = chat.conversation.turns[chat.turn], RequestId(f"request-{self._sent}")
        self._sent += 1
        chat.context += turn.prompt(VOCAB_SIZE)
        sampling, session = self._sampling(turn, len(chat.context) // ID_BYTES), chat.conversation.session
        spec = RequestSpec(name, 0, chat.context, sampling, session=session)
        ended: Callable[[list[int] | None], None] = lambda token_ids: self._answered(chat, name, token_ids)  # noqa: E731
        fleet, router = self.fleet, self.fleet.router_process
        client = MeasuredClient(spec, chat.turn, router, self.measured, fleet.late_s, ended)
        self.measured.prompt_tokens_asked += len(chat.context) // ID_BYTES
        chat.turn += 1
        self._open[name] = client
        submit = partial(self._submit, chat, spec, fleet.clock.now)
        fleet.clock.at(router.reads_s(spec.prompt_tokens), submit)

    def _submit(self, chat: OpenConversation, spec: RequestSpec, received_s: float) -> None:
        name = spec.request_id
        try:
            self.fleet.router_process.submit(self._open[name].request, [spec], received_s)
        except (BadRequest, Overloaded, Unavailable) as error:
            self.measured.endings[f"refused: {error.kind}"] += 1
            self._answered(chat, name, None)

    def _answered(self, chat: OpenConversation, name: RequestId, token_ids: list[int] | None) -> None:
        """After an answer comes the next turn. After a failure comes none."""
        del self._open[name]
        is_last = chat.turn == len(chat.conversation.turns)
        if token_ids is None or is_last:
            self.cut_short += not is_last
            self._open_conversations -= 1
            return
        chat.context += pack_ids(token_ids)
        self.fleet.clock.at(self.fleet.clock.now + chat.conversation.turns[chat.turn].pause_s, lambda: self._ask(chat))

    def _sampling(self, turn: ConversationTurn, prompt_tokens: int) -> SamplingParams:
        """Without --max-tokens a request asks for the tokens that it gets. With it, the model ends the answer by itself."""
        if not self.load.max_tokens:
            return SamplingParams(max_new_tokens=turn.output_tokens, temperature=0.0)
        room = max(1, self.plan.context_tokens - prompt_tokens)
        seed = self.fleet.seed_that_ends(prompt_tokens + turn.output_tokens)
        return SamplingParams(max_new_tokens=min(self.load.max_tokens, room), temperature=0.0, seed=seed)

    def _count_pushed(self, letter: Letter, message: AnyMessage, delays: tuple[float, ...]) -> None:
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
            self.fleet.clock.at(self.fleet.clock.now + self.load.restart_s, lambda: self.fleet.start(name, role))
        self._plan_kill()

    # --- what is seen ------------------------------------------------------------------------------------------------------

    def _show(self, progress: Callable[[str], object]) -> None:
        progress(f"{self.seconds:.0f} s: {self._sent} requests, {len(self._open)} open, {self.measured.tokens} tokens")
        self.fleet.clock.at(self.fleet.clock.now + PROGRESS_S, lambda: self._show(progress))

    @property
    def good(self) -> int:
        """Answers that finished and kept both limits."""
        measured, load = self.measured, self.load
        is_good = np.less_equal(measured.first_s, load.slo_ttft_s) & np.less_equal(measured.pace_s, load.slo_itl_s)
        return int(np.count_nonzero(is_good))

    def counters(self, role: Role) -> list[Counters]:
        """The counters of every instance of a role that there was."""
        return [each.scheduler.report().counters for each in self.fleet.lives if each.name.role == role]
