"""The prefill scheduler under messages in any order: whatever a peer says, and whenever, nothing raises and nothing is lost.

The model is who reads and writes which page. A page of a push or step in flight is in no other hands; a request ends at most
once here; nothing is withdrawn or handed off while a push is in flight; and when every push and step has ended, every page is
home, but for those of pushes that were never proven to have ended. A handoff moves only before its grant, and nothing is ever
written where a former candidate said.
"""

from collections import defaultdict

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from common.errors import NoRoom, Overloaded, Unavailable
from common.ids import ROUTER, Generation, InstanceId, pack_ids, unpack_ids
from common.instance.ports import Action, Send
from common.messages import Decline, Failed, Grant, Handoff, LinkState, Placed, Renew, Renewed, Reserve, Terms, Withdraw
from common.messages.transfers import Allow, Connect, Push, PushDone, PushFailed
from kv_transfer.handoff_reader import WRITE_LEASE_S
from tests.any_order import AGES_S, OWNERS, SECONDS, SETTINGS, AnyOrderMachine
from tests.builders import LAYOUT, instance, key
from tests.prefill.rig import generate, scheduler
from tests.schedulers import drain, link_changed, meet

TOTAL_PAGES = 8
DECODERS = ("d", "e")
ONE_DECODER = st.sampled_from(DECODERS).map(InstanceId)
SOME_DECODERS = st.lists(ONE_DECODER, min_size=1, max_size=2, unique=True).map(tuple)
LATE_PAGES = 50
"""Target pages from this number on, of each hundred, are those of a grant that comes too late."""
FULL, NO_ROOM = Failed.of(Overloaded("its line is full")), Failed.of(NoRoom("no room now"))
DECLINES = (NO_ROOM, Failed(message="no"), Failed.of(Unavailable("it leaves")), FULL)


class AnyOrder(AnyOrderMachine):
    def __init__(self) -> None:
        super().__init__(scheduler(TOTAL_PAGES, max_rows=3))
        self.lives = dict.fromkeys(DECODERS, 1)
        self.reserved: dict[str, tuple[InstanceId, Reserve]] = {}
        self.latest: dict[str, InstanceId] = {}
        """Who was asked for a reservation last."""
        self.former: dict[str, set[InstanceId]] = defaultdict(set)
        """Who was asked for a reservation before."""
        self.placed: set[str] = set()
        self.pushes: dict[int, tuple[str, Push]] = {}
        """In flight, by ticket, with the name of the request."""
        self.stuck: set[int] = set()
        self.meet()

    def note(self, action: Action) -> None:
        match action:
            case Send(message=Reserve() as reserve):
                name = str(reserve.key.request_id)
                assert name not in self.placed, "after the grant nothing moves"
                if name in self.reserved:
                    self.former[name].add(self.reserved[name][0])
                self.reserved[name], self.latest[name] = (action.to, reserve), action.to
            case Send(message=Placed() as placed):
                name = str(placed.key.request_id)
                assert name not in self.placed, "it is said once"
                assert placed.decode == (self.latest[name], str(self.lives[placed.decode.id]))
                self.placed.add(name)
            case Send(message=Withdraw() as last) if self.is_former(str(last.key.request_id), action.to):
                pass
            case Send(message=Withdraw() | Handoff() as last):
                name = str(last.key.request_id)
                assert name not in [pushing for pushing, _ in self.pushes.values()], "its pages are still being read"
                assert self.reserved.pop(name)[0] == action.to, "a handoff is closed once"
                self.former[name].add(action.to)
            case Send(message=Renew(claims=claims)):
                claimed = {claim.key.request_id for claim in claims}
                for name, push in self.pushes.values():
                    is_there = push.peer == action.to and push.incarnation == str(self.lives[push.peer])
                    assert not is_there or name in claimed, "what is being written is claimed"
            case Push():
                assert action.ticket not in self.pushes
                assert int(action.target_pages[0]) % 100 < LATE_PAGES, "a former candidate's pages are never written"
                self.pushes[action.ticket] = (self.name_of(action), action)
            case _:
                assert isinstance(action, Send | Allow | Connect)

    def is_former(self, name: str, decoder: InstanceId) -> bool:
        return decoder in self.former[name] and (name not in self.reserved or self.reserved[name][0] != decoder)

    def name_of(self, push: Push) -> str:
        """Whose pages are pushed: target pages are granted so that they say."""
        return f"r{int(push.target_pages[0]) // 100}"

    def meet(self, *gone: str) -> None:
        there = tuple(instance(name, "decode", str(self.lives[name])) for name in DECODERS if name not in gone)
        self.do(meet(self.made, there, self.now))
        self.turn()

    # --- what peers say --------------------------------------------------------------------------------------------------

    @rule(
        tokens=st.integers(1, 14),
        answer=st.integers(1, 5),
        decoders=SOME_DECODERS,
        age_s=AGES_S,
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "", "", None]),
        owner=OWNERS,
    )
    def a_generate(
        self,
        tokens: int,
        answer: int,
        decoders: tuple[InstanceId, ...],
        age_s: float,
        priority: int,
        salt: str | None,
        owner: str,
    ) -> None:
        """salt: with the same one, the shorter of two prompts is the beginning of the longer."""
        terms = Terms(priority=priority, age_s=age_s, owner=owner)
        to = decoders if answer > 1 else ()
        self.ask(ROUTER, generate(f"r{len(self.asked)}", tokens, answer, decodes=to, terms=terms, salt=salt))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), is_sound=st.sampled_from([True, True, True, False]), twice=st.booleans(), have=st.integers(0, 4))
    def a_grant(self, data: st.DataObject, is_sound: bool, twice: bool, have: int) -> None:
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
            have_tokens=min(have, pages) * LAYOUT.page_size,
        )
        for _ in range(1 + twice):
            self.hear(decoder, grant)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), why=st.sampled_from([FULL, *DECLINES]))
    def its_candidate_declines(self, data: st.DataObject, why: Failed) -> None:
        name = data.draw(st.sampled_from(sorted(self.reserved)))
        decoder, reserve = self.reserved[name]
        self.hear(decoder, Decline(key=reserve.key, failed=why, sent_s=reserve.sent_s))

    @rule(data=st.data(), decoder=ONE_DECODER)
    def a_late_grant(self, data: st.DataObject, decoder: InstanceId) -> None:
        """A grant of a candidate that was asked before the present one."""
        name = data.draw(st.sampled_from(self.recent()))
        if self.is_former(name, decoder):
            _, _, generate = self.asked[name]
            pages = [100 * int(name[1:]) + LATE_PAGES + n for n in range(LAYOUT.pages_for(len(unpack_ids(generate.prompt))))]
            late = Grant(
                key=key(name), generation=Generation(1), pages=pack_ids(pages), sent_s=self.now, write_lease_s=WRITE_LEASE_S
            )
            self.hear(decoder, late)

    @rule(data=st.data(), decoder=ONE_DECODER, why=st.sampled_from(DECLINES))
    def a_decline(self, data: st.DataObject, decoder: InstanceId, why: Failed) -> None:
        name = data.draw(st.sampled_from(self.recent()))
        self.hear(decoder, Decline(key=key(name), failed=why))

    @rule(data=st.data(), decoder=ONE_DECODER, age_s=st.floats(-1.0, 3.0))
    def a_renewed(self, data: st.DataObject, decoder: InstanceId, age_s: float) -> None:
        over = data.draw(st.sets(st.sampled_from(self.recent())))
        keys = tuple(key(name) for name in sorted(over))
        self.hear(decoder, Renewed(sent_s=self.now - age_s, write_lease_s=WRITE_LEASE_S, over=keys))

    @rule(gone=st.sampled_from(["", "", "d", "e"]), restarted=st.sampled_from(["", "", "d", "e"]))
    def peers(self, gone: str, restarted: str) -> None:
        if restarted:
            self.lives[restarted] += 1
        self.meet(gone)

    # --- what happens here -----------------------------------------------------------------------------------------------

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
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
    def a_page_is_in_one_hand(self) -> None:
        by_rows = self.computed_pages()
        assert len(by_rows) == len(set(by_rows)), "two rows write the same page"
        read = {page for _, push in self.pushes.values() for page in push.source_pages.tolist()}
        finished = self.finished_pages()
        assert finished.isdisjoint(by_rows), "a row writes what another one attends to"
        used = read | set(by_rows) | finished | self.stuck
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
            self.a_page_is_in_one_hand()
        load = self.made.report().load
        assert load.pages_free + load.pages_quarantined == TOTAL_PAGES and load.pages_quarantined >= len(self.stuck)
        assert (load.waiting_requests, load.running_requests, self.made.report().drained) == (0, 0, True)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = SETTINGS
