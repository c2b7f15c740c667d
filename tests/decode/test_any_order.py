"""The decode scheduler under messages in any order: whatever a peer says, and whenever, nothing raises and nothing is lost.

The model is who may write where. A page that a writer may write, or a step in flight, is in no other hands, and nobody reads it
as KV that is final; a request ends at most once here; and when every writer has let go and every step has returned, every page is
home. Requests of one salt hit each other's pages.
"""

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from msgspec.structs import replace

from common.errors import NoRoom
from common.ids import ROUTER, Generation, InstanceId, unpack_ids
from common.instance.ports import Action, Send
from common.messages import Claim, Decline, FlushCache, Grant, Renew, Renewed, Reserve, Terms, Withdraw
from common.messages.transfers import Settle, Settled
from kv_transfer.handoff_reader import OVERRUN_S, WRITE_LEASE_S
from tests.any_order import AGES_S, OWNERS, SECONDS, SELDOM, SETTINGS, AnyOrderMachine
from tests.builders import LAYOUT, instance, key
from tests.decode.rig import WRITERS_LIFE, handoff, renew, reserve, scheduler
from tests.schedulers import drain, generate, meet

TOTAL_PAGES = 7
TOKENS = st.integers(1, 9)
SALTS = st.sampled_from([None, "", "other"])
WRITERS = st.sampled_from([InstanceId("p"), InstanceId("q")])


@dataclass(slots=True, eq=False)
class Writing:
    """A reservation into which its writer may still write."""

    grant: Grant
    writer: InstanceId


class AnyOrder(AnyOrderMachine):
    def __init__(self) -> None:
        super().__init__(scheduler(TOTAL_PAGES, max_rows=3))
        self.writing: dict[str, Writing] = {}
        self.may_write_until_s: dict[InstanceId, float] = {}
        self.settling: list[Settle] = []
        self.declined: list[tuple[str, InstanceId, Reserve]] = []
        """Reservations for which there was no room, at once or after a while."""
        self.meet("p", "q")

    def note(self, action: Action) -> None:
        match action:
            case Settle():
                self.settling.append(action)
            case Send(message=Renewed() | Grant() as answer):
                until_s = answer.sent_s + WRITE_LEASE_S + OVERRUN_S
                self.may_write_until_s[action.to] = max(until_s, self.may_write_until_s.get(action.to, until_s))
                if isinstance(answer, Grant):
                    self.writing.setdefault(answer.key.request_id, Writing(answer, action.to))
            case Send(message=Decline() as decline):
                name = decline.key.request_id
                _, writer, asked = self.asked[name]
                if isinstance(asked, Reserve) and decline.failed.kind == NoRoom.kind:
                    assert writer == action.to and name not in self.writing
                    self.declined.append((name, writer, asked))
            case _:
                pass

    def meet(self, *writers: str) -> None:
        there = tuple(instance(writer, "prefill") for writer in writers)
        self.do(meet(self.made, there, self.now))
        self.turn()

    # --- what peers say --------------------------------------------------------------------------------------------------

    @rule(data=st.data(), tokens=TOKENS, answer=st.integers(2, 18), age_s=AGES_S, writer=WRITERS, waits=st.booleans(), salt=SALTS)
    def a_reserve(
        self, data: st.DataObject, tokens: int, answer: int, age_s: float, writer: InstanceId, waits: bool, salt: str | None
    ) -> None:
        terms = Terms(priority=data.draw(st.integers(0, 1)), age_s=age_s, owner=data.draw(OWNERS))
        asked = reserve(f"r{len(self.asked)}", tokens, answer, sent_s=self.now - age_s, terms=terms, waits=waits, salt=salt)
        self.ask(writer, asked)

    @precondition(lambda self: self.declined)
    @rule()
    def the_same_again_and_it_waits(self) -> None:
        """Nobody else had room."""
        name, writer, asked = self.declined.pop()
        self.asked[name] = (self.now, writer, asked)
        self.hear(writer, replace(asked, waits=True, sent_s=self.now))

    @rule(tokens=TOKENS, answer=st.integers(1, 18), age_s=AGES_S, salt=SALTS, owner=OWNERS)
    def a_generate(self, tokens: int, answer: int, age_s: float, salt: str | None, owner: str) -> None:
        self.ask(ROUTER, generate(f"r{len(self.asked)}", tokens, answer, terms=Terms(age_s=age_s, owner=owner), salt=salt))

    @rule(is_flushed=SELDOM)
    def a_flush(self, is_flushed: bool) -> None:
        if is_flushed:
            self.hear(ROUTER, FlushCache())

    @rule(data=st.data(), age_s=AGES_S, writer=WRITERS, moves=st.booleans())
    def a_move(self, data: st.DataObject, age_s: float, writer: InstanceId, moves: bool) -> None:
        """A writer has asked another reader, and says so: it uses no grant of this one."""
        name = data.draw(st.sampled_from(self.recent()))
        sent_s = self.now - age_s
        is_old = name in self.asked and isinstance(asked := self.asked[name][2], Reserve) and asked.sent_s < sent_s
        if moves and is_old and self.asked[name][1] == writer:
            self.writing.pop(name, None)
            claims = tuple(
                Claim(held.grant.key, held.grant.generation) for held in self.writing.values() if held.writer == writer
            )
            moved = Claim(key(name), Generation(0), moved=True)
            self.hear(writer, Renew(incarnation=WRITERS_LIFE, sent_s=sent_s, claims=(*claims, moved)))

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

    @rule(there=st.sampled_from([("p", "q"), ("p", "q"), ("q",), ()]))
    def peers(self, there: tuple[str, ...]) -> None:
        self.meet(*there)

    # --- what happens here -----------------------------------------------------------------------------------------------

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for name, writing in list(self.writing.items()):
            if self.may_write_until_s[writing.writer] <= self.now:
                del self.writing[name]
        self.turn()

    @precondition(lambda self: self.settling)
    @rule()
    def settled(self) -> None:
        self.do(self.made.handle(Settled(self.settling.pop(0).key), self.now))
        self.turn()

    # --- what must hold --------------------------------------------------------------------------------------------------

    @invariant()
    def a_page_is_in_one_hand(self) -> None:
        written, finished = self.computed_pages(), self.finished_pages()
        for writing in self.writing.values():
            pages, have = unpack_ids(writing.grant.pages).tolist(), writing.grant.have_tokens // LAYOUT.page_size
            written += pages[have:]
            finished.update(pages[:have])
        assert len(written) == len(set(written)), "two write the same page"
        assert not finished.intersection(written), "somebody writes a page whose KV others read"
        in_hands = len(written) + len(finished)
        assert self.made.report().load.pages_free + in_hands <= TOTAL_PAGES, "a page that somebody uses is in the pool"

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
TestAnyOrder.settings = SETTINGS
