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
from common.ids import Incarnation, unpack_ids
from common.instance.ports import Action, Settle, Settled
from common.messages import Cancel, Generate, Grant, Peers, Probe, Renewed, Reserve, Terms, Withdraw
from kv_transfer.lease import LEASE_S, OVERRUN_S
from tests.builders import EOS, instance, key, result
from tests.decode.rig import (
    ROUTER,
    WRITER,
    deltas,
    generate,
    handoff,
    messages,
    renew,
    reserve,
    scheduler,
)

TOTAL_PAGES = 7
LATE_S = 30.0
"""The longest that a message about a request is on its way, less than its key is remembered."""
TOKENS = st.integers(1, 14)
AGES_S = st.floats(0.0, 3.0)
LIVES = st.sampled_from([Incarnation("1"), Incarnation("2")])
SECONDS = st.sampled_from([0.0, 0.4, 1.1, 6.0, 21.0])


@dataclass(slots=True, eq=False)
class Writing:
    """A reservation into which its writer may still write. life: the writer's."""

    grant: Grant
    life: Incarnation


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.made = scheduler(TOTAL_PAGES, max_rows=3)
        self.now = 100.0
        self.asked: dict[str, tuple[float, Reserve | Generate]] = {}
        """By the name of the request: when it was asked for, and how."""
        self.in_flight: list[Plan] = []
        self.pages: dict[int, list[int]] = {}
        """Of each row: what its RowStart and growth have named."""
        self.writing: dict[str, Writing] = {}
        self.may_write_until_s: dict[Incarnation, float] = {}
        self.settling: list[Settle] = []
        self.endings: Counter[str] = Counter()

    def do(self, actions: list[Action], life: Incarnation | None = None) -> None:
        """life: of the writer that is answered."""
        self.settling += [action for action in actions if isinstance(action, Settle)]
        for message in messages(actions):
            if isinstance(message, Renewed) and life is not None:
                self.allow(life, message.sent_s)
            if isinstance(message, Grant):
                asked = self.asked[message.key.request_id][1]
                assert isinstance(asked, Reserve)
                self.writing.setdefault(message.key.request_id, Writing(message, asked.incarnation))
                self.allow(asked.incarnation, message.sent_s)
        for delta in deltas(actions):
            assert self.endings[delta.key.request_id] == 0, "nothing follows the ending"
            self.endings[delta.key.request_id] += delta.ending is not None

    def allow(self, life: Incarnation, sent_s: float) -> None:
        until_s = sent_s + LEASE_S + OVERRUN_S
        self.may_write_until_s[life] = max(until_s, self.may_write_until_s.get(life, until_s))

    def recent(self) -> list[str]:
        """Requests about which a message may be on its way."""
        return [name for name, (asked_s, _) in self.asked.items() if self.now - asked_s < LATE_S] or ["unknown"]

    # --- what peers say --------------------------------------------------------------------------------------------------

    def ask(self, message: Reserve | Generate) -> None:
        self.asked.setdefault(message.key.request_id, (self.now, message))
        self.do(self.made.receive(WRITER, message, self.now))

    @rule(tokens=TOKENS, answer=st.integers(2, 12), age_s=AGES_S, life=LIVES, priority=st.integers(0, 1))
    def a_reserve(self, tokens: int, answer: int, age_s: float, life: Incarnation, priority: int) -> None:
        name, terms = f"r{len(self.asked)}", Terms(priority=priority, age_s=age_s)
        self.ask(reserve(name, tokens, answer, sent_s=self.now - age_s, incarnation=life, terms=terms))

    @rule(tokens=TOKENS, answer=st.integers(1, 12), age_s=AGES_S)
    def a_generate(self, tokens: int, answer: int, age_s: float) -> None:
        self.ask(generate(f"r{len(self.asked)}", tokens, answer, terms=Terms(age_s=age_s)))

    @rule(data=st.data())
    def the_same_again(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.recent()))
        if name in self.asked:
            self.ask(self.asked[name][1])

    @rule(data=st.data(), age_s=AGES_S, life=LIVES, knows_grants=st.booleans())
    def a_renew(self, data: st.DataObject, age_s: float, life: Incarnation, knows_grants: bool) -> None:
        """A writer claims what it has not let go of, and more: so it may say when this was sent, or claim in vain."""
        claims = dict.fromkeys(data.draw(st.sets(st.sampled_from(self.recent()))), 0)
        for name, writing in self.writing.items():
            if writing.life == life:
                claims[name] = int(writing.grant.generation) if knows_grants else 0
        self.do(self.made.receive(WRITER, renew(self.now - age_s, *claims.items(), incarnation=life), self.now), life)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), first_token=st.sampled_from([50, -1]), twice=st.booleans())
    def a_handoff(self, data: st.DataObject, first_token: int, twice: bool) -> None:
        writing = self.writing.pop(data.draw(st.sampled_from(sorted(self.writing))))
        for _ in range(1 + twice):
            self.do(self.made.receive(WRITER, handoff(writing.grant, first_token), self.now))

    @rule(data=st.data(), is_lost=st.booleans())
    def a_withdraw(self, data: st.DataObject, is_lost: bool) -> None:
        name = data.draw(st.sampled_from(self.recent()))
        self.writing.pop(name, None)
        if not is_lost:
            self.do(self.made.receive(WRITER, Withdraw(key=key(name)), self.now))

    @rule(data=st.data())
    def a_cancel(self, data: st.DataObject) -> None:
        self.do(self.made.receive(ROUTER, Cancel(key=key(data.draw(st.sampled_from(self.recent())))), self.now))

    @rule(data=st.data())
    def a_probe(self, data: st.DataObject) -> None:
        self.do(self.made.receive(ROUTER, Probe(keys=(key(data.draw(st.sampled_from(self.recent()))),)), self.now))

    @rule(lives=st.sets(LIVES, max_size=1))
    def peers(self, lives: set[str]) -> None:
        there = tuple(instance("p", "prefill", life) for life in lives)
        self.do(self.made.receive(ROUTER, Peers(instances=there), self.now))

    @rule(drains=st.booleans())
    def the_router_or_the_instance_goes(self, drains: bool) -> None:
        if self.now > 200.0:
            self.do(self.made.drain(self.now) if drains else self.made.abandon(self.now))

    # --- what happens here -----------------------------------------------------------------------------------------------

    @rule(seconds=SECONDS)
    def tick(self, seconds: float) -> None:
        self.now += seconds
        for name, writing in list(self.writing.items()):
            if self.may_write_until_s[writing.life] <= self.now:
                del self.writing[name]
        self.do(self.made.tick(self.now))

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def decide(self) -> None:
        decision = self.made.decide(self.now)
        self.do(decision.actions)
        plan = decision.plan
        if plan is None:
            return
        for start in plan.starts:
            self.pages[start.row] = start.pages.tolist()
        for row, page in zip(plan.grown_rows.tolist(), plan.grown_pages.tolist(), strict=True):
            self.pages[row].append(page)
        self.in_flight.append(plan)

    @precondition(lambda self: self.in_flight)
    @rule(token=st.sampled_from([60, 60, 60, EOS]))
    def a_step_returns(self, token: int) -> None:
        plan = self.in_flight.pop(0)
        self.do(self.made.step_done(result(plan, [token] * len(plan.sampled_rows)), self.now))

    @precondition(lambda self: self.settling)
    @rule()
    def settled(self) -> None:
        self.do(self.made.transfer_event(Settled(self.settling.pop(0).key), self.now))

    # --- what must hold --------------------------------------------------------------------------------------------------

    @invariant()
    def a_page_is_in_one_hand(self) -> None:
        written = [page for writing in self.writing.values() for page in unpack_ids(writing.grant.pages).tolist()]
        rows = {row for plan in self.in_flight for row in plan.rows.tolist()}
        written += [page for row in rows for page in self.pages[row]]
        assert len(written) == len(set(written)), "two write the same page"
        assert self.made.load().pages_free + len(written) <= TOTAL_PAGES, "a page that may be written is in the pool"

    def teardown(self) -> None:
        """The calm: whoever can let go does, and then everything is home."""
        for second in range(70):
            self.now += 1.0
            for name in list(self.writing):
                del self.writing[name]
                self.do(self.made.receive(WRITER, Withdraw(key=key(name)), self.now))
            self.do(self.made.tick(self.now))
            self.decide()
            while self.in_flight:
                self.a_step_returns(60)
            while self.settling:
                self.settled()
            self.a_page_is_in_one_hand()
            if second == 20:
                self.do(self.made.abandon(self.now))
        load = self.made.load()
        counts = (load.waiting_requests, load.running_requests, load.reservations)
        assert load.pages_free == TOTAL_PAGES and counts == (0, 0, 0)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
