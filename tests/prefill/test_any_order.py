"""The prefill scheduler under messages in any order: whatever a peer says, and whenever, nothing raises and nothing is lost.

The model is who reads and writes which page. A page of a push or step in flight is in no other hands; a request ends at most
once here; nothing is withdrawn or handed off while a push is in flight; and when every push and step has ended, every page is
home, but for those of pushes that were never proven to have ended.
"""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.engine.plan import Plan
from common.ids import ROUTER, Generation, InstanceId, pack_ids, unpack_ids
from common.instance.ports import Action, Allow, Connect, Push, PushDone, PushFailed, Send
from common.messages import (
    Cancel,
    Decline,
    Failed,
    Generate,
    Grant,
    Handoff,
    LinkState,
    Peers,
    Probe,
    Renew,
    Renewed,
    Reserve,
    Terms,
    Withdraw,
)
from kv_transfer.write_lease import WRITE_LEASE_S
from prefill.scheduler import PrefillMessage
from tests.builders import EOS, LAYOUT, instance, key, result
from tests.prefill.rig import generate, scheduler
from tests.schedulers import abandon, deltas, drain, link_changed

TOTAL_PAGES = 8
LATE_S = 30.0
"""The longest that a message about a request is on its way, less than its key is remembered."""
DECODERS = ("d", "e")
ONE_DECODER = st.sampled_from(DECODERS).map(InstanceId)
AGES_S = st.floats(0.0, 3.0)


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.made = scheduler(TOTAL_PAGES, max_rows=3)
        self.now = 100.0
        self.lives = dict.fromkeys(DECODERS, 1)
        self.asked: dict[str, tuple[float, Generate]] = {}
        self.reserved: dict[str, tuple[InstanceId, Reserve]] = {}
        self.in_flight: list[Plan] = []
        self.pages: dict[int, list[int]] = {}
        """Of each row."""
        self.pushes: dict[int, tuple[str, Push]] = {}
        """In flight, by ticket, with the name of the request."""
        self.stuck: set[int] = set()
        self.endings: Counter[str] = Counter()
        self.meet()

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(message=Reserve() as reserve):
                    self.reserved[reserve.key.request_id] = (action.to, reserve)
                case Send(message=Withdraw() | Handoff() as last):
                    name = str(last.key.request_id)
                    assert name not in [pushing for pushing, _ in self.pushes.values()], "its pages are still being read"
                    assert self.reserved.pop(name)[0] == action.to, "a handoff is closed once"
                case Send(message=Renew(claims=claims)):
                    claimed = {claim.key.request_id for claim in claims}
                    for name, push in self.pushes.values():
                        is_there = push.peer == action.to and push.incarnation == str(self.lives[push.peer])
                        assert not is_there or name in claimed, "what is being written is claimed"
                case Push():
                    assert action.ticket not in self.pushes
                    self.pushes[action.ticket] = (self.name_of(action), action)
                case _:
                    assert isinstance(action, Send | Allow | Connect)
        for delta in deltas(actions):
            assert self.endings[delta.key.request_id] == 0, "nothing follows the ending"
            self.endings[delta.key.request_id] += delta.ending is not None

    def name_of(self, push: Push) -> str:
        """Whose pages are pushed: target pages are granted so that they say."""
        return f"r{int(push.target_pages[0]) // 100}"

    def hear(self, sender: InstanceId, message: PrefillMessage) -> None:
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
        if decision.plan is None:
            return False
        for start in decision.plan.starts:
            self.pages[start.row] = start.pages.tolist()
        self.in_flight.append(decision.plan)
        return True

    def recent(self) -> list[str]:
        """Requests about which a message may be on its way."""
        return [name for name, (asked_s, _) in self.asked.items() if self.now - asked_s < LATE_S] or ["unknown"]

    def meet(self, *gone: str) -> None:
        there = tuple(instance(name, "decode", str(self.lives[name])) for name in DECODERS if name not in gone)
        self.hear(ROUTER, Peers(instances=there))

    # --- what peers say --------------------------------------------------------------------------------------------------

    def ask(self, message: Generate) -> None:
        self.asked.setdefault(message.key.request_id, (self.now, message))
        self.hear(ROUTER, message)

    @rule(tokens=st.integers(1, 14), answer=st.integers(1, 5), decoder=ONE_DECODER, age_s=AGES_S, priority=st.integers(0, 1))
    def a_generate(self, tokens: int, answer: int, decoder: InstanceId, age_s: float, priority: int) -> None:
        terms = Terms(priority=priority, age_s=age_s)
        to = decoder if answer > 1 else None
        self.ask(generate(f"r{len(self.asked)}", tokens, answer, decode=to, terms=terms))

    @rule(data=st.data())
    def the_same_again(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.recent()))
        if name in self.asked:
            self.ask(self.asked[name][1])

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), is_sound=st.sampled_from([True, True, True, False]), twice=st.booleans())
    def a_grant(self, data: st.DataObject, is_sound: bool, twice: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.reserved)))
        decoder, reserve = self.reserved[name]
        pages = LAYOUT.pages_for(len(unpack_ids(reserve.prompt))) + (not is_sound)
        ids = [100 * int(name[1:]) + number for number in range(pages)]
        grant = Grant(
            key=reserve.key,
            generation=Generation(1),
            pages=pack_ids(ids),
            sent_s=reserve.sent_s,
            write_lease_s=WRITE_LEASE_S,
        )
        for _ in range(1 + twice):
            self.hear(decoder, grant)

    @rule(data=st.data(), decoder=ONE_DECODER)
    def a_decline(self, data: st.DataObject, decoder: InstanceId) -> None:
        name = data.draw(st.sampled_from(self.recent()))
        self.hear(decoder, Decline(key=key(name), failed=Failed(message="no")))

    @rule(data=st.data(), decoder=ONE_DECODER, age_s=st.floats(-1.0, 3.0))
    def a_renewed(self, data: st.DataObject, decoder: InstanceId, age_s: float) -> None:
        over = data.draw(st.sets(st.sampled_from(self.recent())))
        keys = tuple(key(name) for name in sorted(over))
        self.hear(decoder, Renewed(sent_s=self.now - age_s, write_lease_s=WRITE_LEASE_S, over=keys))

    @rule(data=st.data())
    def a_cancel(self, data: st.DataObject) -> None:
        self.hear(ROUTER, Cancel(key=key(data.draw(st.sampled_from(self.recent())))))

    @rule(data=st.data())
    def a_probe(self, data: st.DataObject) -> None:
        self.hear(ROUTER, Probe(keys=(key(data.draw(st.sampled_from(self.recent()))),)))

    @rule(gone=st.sampled_from(["", "", "d", "e"]), restarted=st.sampled_from(["", "", "d", "e"]))
    def peers(self, gone: str, restarted: str) -> None:
        if restarted:
            self.lives[restarted] += 1
        self.meet(gone)

    @rule(is_gone=st.integers(0, 9).map(lambda drawn: drawn == 9))
    def the_router_goes(self, is_gone: bool) -> None:
        if is_gone:
            self.do(abandon(self.made, self.now))

    # --- what happens here -----------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.4, 1.1, 6.0, 21.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.turn()

    @precondition(lambda self: self.in_flight)
    @rule(steps=st.integers(1, 4), token=st.sampled_from([60, 60, 60, EOS]))
    def steps_return(self, steps: int, token: int) -> None:
        for _ in range(steps):
            if not self.in_flight:
                return
            plan = self.in_flight.pop(0)
            self.do(self.made.step_done(result(plan, [token] * len(plan.sampled_rows)), self.now))
            self.turn()

    @precondition(lambda self: self.pushes)
    @rule(data=st.data(), how=st.sampled_from(["done", "done", "failed", "stuck"]))
    def a_push_ends(self, data: st.DataObject, how: str) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.pushes)))
        self.end_push(ticket, how)

    def end_push(self, ticket: int, how: str) -> None:
        _, push = self.pushes.pop(ticket)
        if how == "done":
            self.do(self.made.handle(PushDone(push.ticket, len(push.source_pages), 0.1), self.now))
        else:
            self.stuck |= set(push.source_pages.tolist()) if how == "stuck" else set()
            self.do(self.made.handle(PushFailed(push.ticket, "cable", quiescent=how != "stuck"), self.now))
        self.turn()

    @rule(name=st.sampled_from(DECODERS), state=st.sampled_from(["lost", "ready", "connecting"]))
    def a_link_changes(self, name: str, state: LinkState) -> None:
        self.do(self.made.handle(link_changed(name, state, str(self.lives[name])), self.now))
        self.turn()

    # --- what must hold --------------------------------------------------------------------------------------------------

    @invariant()
    def a_page_that_is_used_is_in_no_other_hands(self) -> None:
        rows = {row for plan in self.in_flight for row in plan.rows.tolist()}
        by_rows = [page for row in rows for page in self.pages[row]]
        assert len(by_rows) == len(set(by_rows)), "two rows write the same page"
        read = {page for _, push in self.pushes.values() for page in push.source_pages.tolist()}
        used = read | set(by_rows) | self.stuck
        assert self.made.report().load.pages_free + len(used) <= TOTAL_PAGES, "a page that is used is in the pool"

    def teardown(self) -> None:
        """The calm: every push and step ends, and then everything is home."""
        self.do(drain(self.made, self.now))
        for _ in range(70):
            self.now += 1.0
            self.turn()
            self.steps_return(4, 60)
            for ticket in list(self.pushes):
                self.end_push(ticket, "done")
            self.a_page_that_is_used_is_in_no_other_hands()
        load = self.made.report().load
        assert load.pages_free + load.pages_quarantined == TOTAL_PAGES and load.pages_quarantined >= len(self.stuck)
        assert (load.waiting_requests, load.running_requests, self.made.report().drained) == (0, 0, True)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
