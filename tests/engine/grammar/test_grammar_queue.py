"""Owners take turns at the compilers by work, whatever one of them sends, and what one may have waiting is bounded."""

import random
import threading
from queue import SimpleQueue

import pytest
from xgrammar import CompiledGrammar

from common.errors import Overloaded, Unavailable
from common.sampling_params import Grammar
from engine.grammar.grammars import ANY_TEXT, MAX_OWNED, MAX_OWNED_S, MAX_QUEUED, CompiledSoon, CompileQueue, Grammars
from tests.engine.grammar.test_grammars import VOCABULARY, Counted

LONG_S, SHORT_S = 6.0, 0.02


def taken(queue: CompileQueue[str]) -> str:
    item = queue.take()
    assert item is not None
    return item


@pytest.mark.parametrize("flooders", [("alice",), ("alice", "carol"), ("alice", "carol", "dave")])
def test_floods_of_others_delay_a_short_grammar_by_one_compile_at_most(flooders: tuple[str, ...]) -> None:
    """Whenever it comes, and however wrong the estimates are."""
    for seed in range(200):
        chance, queue, running = random.Random(seed), CompileQueue[str](2), list[str]()
        for owner in flooders:
            for number in range(12):
                queue.join(f"{owner}-{number}", owner, LONG_S)
        for _ in range(chance.randrange(10)):
            while (item := queue.take()) is not None:
                running.append(item)
            queue.finish(running.pop(chance.randrange(len(running))), chance.choice([0.0, LONG_S, 5 * LONG_S]))
        while (item := queue.take()) is not None:
            running.append(item)
        queue.join("bob", "bob", SHORT_S)
        if (item := queue.take()) is None:
            queue.finish(running.pop(chance.randrange(len(running))), LONG_S)
            item = queue.take()
        assert item == "bob", seed


def test_owners_that_always_have_something_waiting_get_equal_work_and_not_equal_numbers() -> None:
    queue, work = CompileQueue[tuple[str, int]](1), {"alice": 8.0, "bob": 1.0, "carol": 3.0}
    spent = dict.fromkeys(work, 0.0)
    for owner, work_s in work.items():
        queue.join((owner, 0), owner, work_s)
    for number in range(1, 600):
        item = queue.take()
        assert item is not None
        owner = item[0]
        spent[owner] += work[owner]
        queue.join((owner, number), owner, 2.0)  # the estimates are the same; what each has cost is not
        queue.finish(item, work[owner])
    assert max(spent.values()) - min(spent.values()) <= 2 * max(work.values())


def test_what_an_owner_has_used_alone_is_not_held_against_it() -> None:
    queue = CompileQueue[str](1)
    for number in range(5):
        queue.join(f"a{number}", "alice", LONG_S)
        queue.finish(taken(queue), LONG_S)
    queue.join("a", "alice", LONG_S)
    queue.join("b", "bob", LONG_S)
    assert taken(queue) == "a"


def test_within_an_owner_first_come_is_first_served() -> None:
    queue, order = CompileQueue[int](1), list[int]()
    for number in range(9):
        queue.join(number, "alice", 9.0 - number)
    while (item := queue.take()) is not None:
        order.append(item)
        queue.finish(item, 1.0)
    assert order == list(range(9))


def test_an_owner_leaves_one_compiler_to_the_others_and_without_keys_all_compilers_work() -> None:
    for owner, at_once in (("alice", 1), ("", 2)):
        queue = CompileQueue[str](2)
        for item in ("a", "b", "c"):
            queue.join(item, owner, LONG_S)
        assert [queue.take() is not None for _ in range(3)] == [number < at_once for number in range(3)]
    only = CompileQueue[str](1)
    only.join("a", "alice", LONG_S)
    assert only.take() == "a", "where there is one compiler, everybody uses it"


def test_equal_grammars_of_two_owners_are_compiled_once_at_the_first_of_their_turns() -> None:
    queue = CompileQueue[str](1)
    for number in range(4):
        queue.join(f"a{number}", "alice", LONG_S)
    queue.join("same", "alice", SHORT_S)
    queue.finish(taken(queue), LONG_S)
    queue.join("same", "bob", SHORT_S)
    assert taken(queue) == "same"
    queue.join("same", "carol", SHORT_S)  # it is being compiled
    queue.finish("same", SHORT_S)
    rest = [taken(queue)]
    while len(queue) > 1:
        queue.finish(rest[-1], LONG_S)
        rest.append(taken(queue))
    assert rest == ["a1", "a2", "a3"]


@pytest.mark.parametrize(("work_s", "most"), [(0.1, MAX_OWNED), (40.0, 3), (10 * MAX_OWNED_S, 1)])
def test_an_owner_with_too_much_waiting_is_refused_and_the_others_are_not(work_s: float, most: int) -> None:
    queue = CompileQueue[int](2)
    for number in range(most):
        queue.join(number, "alice", work_s)
    with pytest.raises(Overloaded, match=rf"{most} grammars wait .* the API key alice"):
        queue.join(most, "alice", work_s)
    queue.join(0, "alice", work_s)  # it waits already
    queue.join(most, "bob", work_s)
    queue.leave(0, "alice")
    queue.join(most + 1, "alice", work_s)
    unnamed = CompileQueue[int](2)
    for number in range(MAX_QUEUED):
        unnamed.join(number, "", work_s)


class Held(Counted):
    """Compiles short texts at once, and long ones when it is let. begun: the texts, in their order."""

    def __init__(self, begun: "SimpleQueue[str]", let: threading.Semaphore) -> None:
        super().__init__(VOCABULARY)
        self._begun, self._let = begun, let

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        if grammar != ANY_TEXT:
            self._begun.put(grammar.text)
        if len(grammar.text) > 100:
            assert self._let.acquire(timeout=30)
        return super().compile(grammar)


class HeldGrammars:
    def __init__(self) -> None:
        self.begun, self.let = SimpleQueue[str](), threading.Semaphore(0)
        self.grammars = Grammars(lambda: VOCABULARY, lambda _: Held(self.begun, self.let))

    def ask(self, grammar: Grammar, owner: str) -> CompiledSoon:
        return self.grammars.prepare(grammar, lambda: None, owner)

    def next_begun(self) -> str:
        return self.begun.get(timeout=30)


def test_twenty_long_schemas_of_one_key_let_the_short_one_of_another_pass() -> None:
    rig = HeldGrammars()
    flood = [Grammar("regex", f"{number:02}" + "a" * 60_000) for number in range(25)]
    prepared = [rig.ask(flood[0], "alice")]
    assert rig.next_begun() == flood[0].text
    prepared += [rig.ask(grammar, "alice") for grammar in flood[1:]]
    for each in prepared[20:]:
        with pytest.raises(Overloaded, match=r"19 grammars wait .* the API key alice"):
            each.poll()
    asked = Grammar("json_schema", '{"type": "boolean"}')
    rig.ask(asked, "bob").wait()  # none of the long ones is let
    assert rig.next_begun() == asked.text and not any(each.poll() for each in prepared[:20])
    for each in prepared[:20]:
        rig.let.release()
        each.wait()
    assert [rig.next_begun() for _ in range(19)] == [grammar.text for grammar in flood[1:20]]
    rig.grammars.close()


def test_cancelled_requests_give_up_their_turns_and_places_but_not_for_others_who_want_the_same() -> None:
    rig = HeldGrammars()
    running, other, shared = Grammar("regex", "a" * 101), Grammar("regex", "b" * 101), Grammar("regex", "1")
    alice, carol = rig.ask(running, "alice"), rig.ask(other, "carol")
    assert {rig.next_begun(), rig.next_begun()} == {"a" * 101, "b" * 101}
    wanted = [Grammar("regex", str(number)) for number in range(MAX_OWNED)]
    gone = [rig.ask(grammar, "alice") for grammar in wanted]
    bob = rig.ask(shared, "bob")
    with pytest.raises(Overloaded):
        rig.ask(Grammar("regex", "one more"), "alice").poll()
    wanted.clear()
    last = Grammar("regex", "last")
    ended = rig.ask(last, "alice")
    for number, each in enumerate(gone):
        if number != 1:
            with pytest.raises(Unavailable, match="has ended"):
                each.poll()
    assert not bob.poll()
    rig.let.release(2)
    for each in (alice, carol, bob, gone[1], ended):
        each.wait()
    assert {rig.next_begun(), rig.next_begun()} == {"1", "last"} and rig.begun.empty()
    rig.grammars.close()


def test_whoever_waits_when_the_compilers_close_is_told_and_so_is_who_comes_then() -> None:
    rig = HeldGrammars()
    running, waiting, late = Grammar("regex", "a" * 101), Grammar("regex", "b"), Grammar("regex", "c")
    rig.ask(running, "alice")
    rig.next_begun()
    waits = rig.ask(waiting, "alice")
    rig.grammars.close()
    for preparation in (waits, rig.ask(late, "bob")):
        with pytest.raises(Unavailable, match="stops"):
            preparation.wait()
    rig.let.release()
