"""A scheduler of either role under messages in any order: the base of both machines, with what a peer of any role may do.

Owns the clock, the steps in flight, and the law that nothing follows the ending of a request. The machine of a role adds what the
peers of that role say, and who may use which page.
"""

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.executor import StepPlan
from common.ids import ROUTER, InstanceId
from common.instance.ports import Action, Scheduler
from common.messages import Cancel, Generate, Probe, Reserve
from tests.builders import EOS, LAYOUT, key, result
from tests.schedulers import abandon, deltas

LATE_S = 30.0
"""The longest that a message about a request is on its way, less than its key is remembered."""
AGES_S = st.floats(0.0, 3.0)
SECONDS = st.sampled_from([0.0, 0.4, 0.4, 1.1, 1.1, 6.0, 21.0])
OWNERS = st.sampled_from(["", "alice", "bob"])
SELDOM = st.integers(0, 9).map(lambda drawn: drawn == 9)
SETTINGS = settings(max_examples=50 if settings().derandomize else 150, stateful_step_count=60, deadline=None)
"""Fewer where each run makes the same examples: those would find in the tenth run what they found in the first."""


class AnyOrderMachine(RuleBasedStateMachine):
    def __init__(self, made: Scheduler[Any]) -> None:
        super().__init__()
        self.made = made
        self.now = 100.0
        self.asked: dict[str, tuple[float, InstanceId, Reserve | Generate]] = {}
        """By the name of the request: when it was asked for, by whom, and how."""
        self.in_flight: list[StepPlan] = []
        self.pages: dict[int, list[int]] = {}
        """The pages that each row's RowStart and growth have named."""
        self.length: dict[int, int] = {}
        """How many tokens of each row have KV that no step writes any more. Others may read their whole pages too."""
        self.endings: Counter[str] = Counter()

    # --- what a role adds ------------------------------------------------------------------------------------------------

    def note(self, action: Action) -> None:
        """The scheduler wants this done."""
        raise NotImplementedError

    @invariant()
    def a_page_is_in_one_hand(self) -> None:
        raise NotImplementedError

    # --- what every peer may do ------------------------------------------------------------------------------------------

    def ask(self, sender: InstanceId, message: Reserve | Generate) -> None:
        self.asked.setdefault(message.key.request_id, (self.now, sender, message))
        self.hear(sender, message)

    def recent(self) -> list[str]:
        """Requests about which a message may be on its way."""
        return [name for name, (asked_s, _, _) in self.asked.items() if self.now - asked_s < LATE_S] or ["unknown"]

    @rule(data=st.data())
    def the_same_again(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.recent()))
        if name in self.asked:
            self.ask(*self.asked[name][1:])

    @rule(data=st.data())
    def a_cancel(self, data: st.DataObject) -> None:
        self.hear(ROUTER, Cancel(key=key(data.draw(st.sampled_from(self.recent())))))

    @rule(data=st.data())
    def a_probe(self, data: st.DataObject) -> None:
        self.hear(ROUTER, Probe(round=1, keys=(key(data.draw(st.sampled_from(self.recent()))),)))

    @rule(is_gone=SELDOM)
    def the_router_goes(self, is_gone: bool) -> None:
        if is_gone:
            self.do(abandon(self.made, self.now))

    # --- what happens here -----------------------------------------------------------------------------------------------

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            self.note(action)
        for delta in deltas(actions):
            assert self.endings[delta.key.request_id] == 0, "nothing follows the ending"
            self.endings[delta.key.request_id] += delta.ending is not None

    def hear(self, sender: InstanceId, message: Any) -> None:
        """A turn of the worker in which this has arrived."""
        self.do(self.made.receive(sender, message, self.now))
        self.turn()

    def turn(self) -> None:
        self.do(self.made.tick(self.now))
        while len(self.in_flight) < 2 and self.decide():
            pass

    def decide(self) -> bool:
        """False when there is nothing to do."""
        decision = self.made.decide(self.now)
        self.do(decision.actions)
        plan = decision.plan
        if plan is None:
            return False
        for start in plan.starts:
            self.pages[start.row] = start.pages.tolist()
            self.length[start.row] = start.length
        for row, page in zip(plan.grown_rows.tolist(), plan.grown_pages.tolist(), strict=True):
            self.pages[row].append(page)
        self.in_flight.append(plan)
        return True

    @precondition(lambda self: self.in_flight)
    @rule(steps=st.integers(1, 6), token=st.sampled_from([60, 60, 60, EOS]))
    def steps_return(self, steps: int, token: int) -> None:
        for _ in range(steps):
            if not self.in_flight:
                return
            plan = self.in_flight.pop(0)
            self.length.update((chunk.row, chunk.start + len(chunk.token_ids)) for chunk in plan.chunks)
            self.length.update((row, self.length[row] + 1) for row in plan.decode_rows.tolist())
            self.do(self.made.step_done(result(plan, [token] * len(plan.sampled_rows)), self.now))
            self.turn()
            self.a_page_is_in_one_hand()

    def computed_pages(self) -> list[int]:
        """Those that the steps in flight may write."""
        return [page for row in self._rows() for page in self.pages[row][self.length[row] // LAYOUT.page_size :]]

    def finished_pages(self) -> set[int]:
        """Those that the steps in flight only read."""
        return {page for row in self._rows() for page in self.pages[row][: self.length[row] // LAYOUT.page_size]}

    def _rows(self) -> set[int]:
        return {row for plan in self.in_flight for row in plan.rows.tolist()}
