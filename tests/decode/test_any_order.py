"""The decode scheduler under messages in any order: whatever a peer says, and whenever, nothing raises and nothing is lost.

The model is who may write where. A page that a writer may write, or a step in flight, is in no other hands; a request ends at
most once here; and when every writer has let go and every step has returned, every page is home.
"""

from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.engine.plan import Plan
from common.ids import ROUTER, InstanceId, unpack_ids
from common.instance.ports import Action, Send, Settle, Settled
from common.messages import Cancel, Generate, Grant, Peers, Probe, Renewed, Reserve, Terms, Withdraw
from decode.scheduler import DecodeMessage
from kv_transfer.write_lease import OVERRUN_S, WRITE_LEASE_S
from tests.builders import EOS, instance, key, result
from tests.decode.rig import generate, handoff, renew, reserve, scheduler
from tests.schedulers import abandon, deltas, drain

TOTAL_PAGES = 7
LATE_S = 30.0
"""The longest that a message about a request is on its way, less than its key is remembered."""
TOKENS = st.integers(1, 9)
AGES_S = st.floats(0.0, 3.0)
WRITERS = st.sampled_from([InstanceId("p"), InstanceId("q")])
SECONDS = st.sampled_from([0.0, 0.4, 0.4, 1.1, 1.1, 6.0, 21.0])
SELDOM = st.integers(0, 9).map(lambda drawn: drawn == 9)


@dataclass(slots=True, eq=False)
class Writing:
    """A reservation into which its writer may still write."""

    grant: Grant
    writer: InstanceId


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.made = scheduler(TOTAL_PAGES, max_rows=3)
        self.now = 100.0
        self.asked: dict[str, tuple[float, InstanceId, Reserve | Generate]] = {}
        """By the name of the request: when it was asked for, by whom, and how."""
        self.in_flight: list[Plan] = []
        self.pages: dict[int, list[int]] = {}
        """Of each row: what its RowStart and growth have named."""
        self.writing: dict[str, Writing] = {}
        self.may_write_until_s: dict[InstanceId, float] = {}
        self.settling: list[Settle] = []
        self.endings: Counter[str] = Counter()

        self.meet("p", "q")

    def do(self, actions: list[Action]) -> None:
        self.settling += [action for action in actions if isinstance(action, Settle)]
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, Renewed | Grant):
                until_s = action.message.sent_s + WRITE_LEASE_S + OVERRUN_S
                self.may_write_until_s[action.to] = max(until_s, self.may_write_until_s.get(action.to, until_s))
            if isinstance(action, Send) and isinstance(action.message, Grant):
                self.writing.setdefault(action.message.key.request_id, Writing(action.message, action.to))
        for delta in deltas(actions):
            assert self.endings[delta.key.request_id] == 0, "nothing follows the ending"
            self.endings[delta.key.request_id] += delta.ending is not None

    def hear(self, sender: InstanceId, message: DecodeMessage) -> None:
        """A turn of the worker in which this has arrived."""
        self.do(self.made.receive(sender, message, self.now))
        self.turn()

    def turn(self) -> None:
        self.do(self.made.tick(self.now))
        while len(self.in_flight) < 2 and self.decide():
            pass

    def meet(self, *writers: str) -> None:
        there = tuple(instance(writer, "prefill") for writer in writers)
        self.hear(ROUTER, Peers(instances=there))

    def recent(self) -> list[str]:
        """Requests about which a message may be on its way."""
        return [name for name, (asked_s, _, _) in self.asked.items() if self.now - asked_s < LATE_S] or ["unknown"]

    # --- what peers say --------------------------------------------------------------------------------------------------

    def ask(self, sender: InstanceId, message: Reserve | Generate) -> None:
        self.asked.setdefault(message.key.request_id, (self.now, sender, message))
        self.hear(sender, message)

    @rule(tokens=TOKENS, answer=st.integers(2, 18), age_s=AGES_S, writer=WRITERS, priority=st.integers(0, 1))
    def a_reserve(self, tokens: int, answer: int, age_s: float, writer: InstanceId, priority: int) -> None:
        terms = Terms(priority=priority, age_s=age_s)
        self.ask(writer, reserve(f"r{len(self.asked)}", tokens, answer, sent_s=self.now - age_s, terms=terms))

    @rule(tokens=TOKENS, answer=st.integers(1, 18), age_s=AGES_S)
    def a_generate(self, tokens: int, answer: int, age_s: float) -> None:
        self.ask(ROUTER, generate(f"r{len(self.asked)}", tokens, answer, terms=Terms(age_s=age_s)))

    @rule(data=st.data())
    def the_same_again(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.recent()))
        if name in self.asked:
            self.ask(*self.asked[name][1:])

    @rule(data=st.data(), age_s=AGES_S, writer=WRITERS, knows_grants=st.booleans())
    def a_renew(self, data: st.DataObject, age_s: float, writer: InstanceId, knows_grants: bool) -> None:
        """A writer claims what it has not let go of, and more: it may have claimed in vain, or let go since."""
        claims = dict.fromkeys(data.draw(st.sets(st.sampled_from(self.recent()))), 0)
        for name, writing in self.writing.items():
            if writing.writer == writer:
                claims[name] = int(writing.grant.generation) if knows_grants else 0
        self.hear(writer, renew(self.now - age_s, *claims.items()))

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), first_token=st.sampled_from([50, -1]), twice=st.booleans())
    def a_handoff(self, data: st.DataObject, first_token: int, twice: bool) -> None:
        writing = self.writing.pop(data.draw(st.sampled_from(sorted(self.writing))))
        for _ in range(1 + twice):
            self.hear(writing.writer, handoff(writing.grant, first_token))

    @rule(data=st.data(), is_lost=st.booleans())
    def a_withdraw(self, data: st.DataObject, is_lost: bool) -> None:
        name = data.draw(st.sampled_from(self.recent()))
        self.writing.pop(name, None)
        if name in self.asked and not is_lost:
            self.hear(self.asked[name][1], Withdraw(key=key(name)))

    @rule(data=st.data())
    def a_cancel(self, data: st.DataObject) -> None:
        self.hear(ROUTER, Cancel(key=key(data.draw(st.sampled_from(self.recent())))))

    @rule(data=st.data())
    def a_probe(self, data: st.DataObject) -> None:
        self.hear(ROUTER, Probe(keys=(key(data.draw(st.sampled_from(self.recent()))),)))

    @rule(there=st.sampled_from([("p", "q"), ("p", "q"), ("q",), ()]))
    def peers(self, there: tuple[str, ...]) -> None:
        self.meet(*there)

    @rule(is_gone=SELDOM)
    def the_router_goes(self, is_gone: bool) -> None:
        if is_gone:
            self.do(abandon(self.made, self.now))

    # --- what happens here -----------------------------------------------------------------------------------------------

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for name, writing in list(self.writing.items()):
            if self.may_write_until_s[writing.writer] <= self.now:
                del self.writing[name]
        self.turn()

    def decide(self) -> bool:
        """False when there is nothing to do."""
        decision = self.made.decide(self.now)
        self.do(decision.actions)
        plan = decision.plan
        if plan is None:
            return False
        for start in plan.starts:
            self.pages[start.row] = start.pages.tolist()
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
            self.do(self.made.step_done(result(plan, [token] * len(plan.sampled_rows)), self.now))
            self.turn()
            self.a_page_is_in_one_hand()

    @precondition(lambda self: self.settling)
    @rule()
    def settled(self) -> None:
        self.do(self.made.handle(Settled(self.settling.pop(0).key), self.now))
        self.turn()

    # --- what must hold --------------------------------------------------------------------------------------------------

    @invariant()
    def a_page_is_in_one_hand(self) -> None:
        written = [page for writing in self.writing.values() for page in unpack_ids(writing.grant.pages).tolist()]
        rows = {row for plan in self.in_flight for row in plan.rows.tolist()}
        written += [page for row in rows for page in self.pages[row]]
        assert len(written) == len(set(written)), "two write the same page"
        assert self.made.report().load.pages_free + len(written) <= TOTAL_PAGES, "a page that may be written is in the pool"

    def teardown(self) -> None:
        """The calm: whoever can let go does, and then everything is home."""
        for second in range(70):
            self.now += 1.0
            for name in list(self.writing):
                self.hear(self.writing.pop(name).writer, Withdraw(key=key(name)))
            self.turn()
            while self.in_flight:
                self.steps_return(2, 60)
            while self.settling:
                self.settled()
            self.a_page_is_in_one_hand()
            if second == 5:
                self.do(drain(self.made, self.now))
        load = self.made.report().load
        counts = (load.waiting_requests, load.running_requests, load.reservations)
        assert load.pages_free == TOTAL_PAGES and counts == (0, 0, 0) and self.made.report().drained


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
