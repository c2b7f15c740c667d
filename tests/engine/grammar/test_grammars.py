"""Grammars are compiled off the loop, each once, and kept while an open request needs them. What harms others is refused.

Owners take turns at the compilers by work, whatever one of them sends, and what one may have waiting is bounded.
"""

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from xgrammar import CompiledGrammar
from xgrammar.testing import _is_grammar_accept_string

from common.errors import BadRequest, Overloaded, TandemError, Unavailable
from common.executor import FutureWork, Work
from common.sampling_params import Grammar
from engine.grammar.compiler import Compiler, GrammarVocabulary
from engine.grammar.compiler_process import _HEAD, _QUICK, _REFUSED, CompilerProcess, Limits, _Frames, _Served
from engine.grammar.grammars import (
    ANY_TEXT,
    KEPT_GRAMMARS,
    MAX_OWNED,
    MAX_OWNED_S,
    MAX_QUEUED,
    MAX_WHITESPACE,
    CompileQueue,
    Grammars,
    anything_goes,
)
from tests.engine.grammar.judge import COMPILER, TOKENS, allowed, json_schema, structural_tag


class Rig:
    """Grammars whose vocabulary comes when it is let. They are compiled in this process."""

    def __init__(self) -> None:
        self.let, self.made, self.woken = threading.Event(), 0, threading.Semaphore(0)
        self.grammars = Grammars(self._make, Compiler)

    def _make(self) -> GrammarVocabulary:
        assert self.let.wait(10)
        self.made += 1
        return TOKENS

    def prepare(self, grammar: Grammar) -> Work:
        return self.grammars.prepare(grammar, self.woken.release)

    def ended(self, preparation: Work) -> bool:
        assert self.woken.acquire(timeout=20)
        return preparation.poll() is not None


def test_a_grammar_is_ready_when_it_is_compiled_and_the_loop_is_woken_then() -> None:
    rig = Rig()
    first, second = rig.prepare(ANY_TEXT), rig.prepare(ANY_TEXT)
    assert not first.poll() and not second.poll()
    rig.let.set()
    assert rig.ended(first) and second.poll() and rig.prepare(ANY_TEXT).poll()
    assert rig.made == 1 and rig.grammars.compiled(ANY_TEXT) is rig.grammars.compiled(ANY_TEXT)
    rig.grammars.close()


def test_warming_loads_the_vocabulary_before_the_first_request_asks() -> None:
    rig = Rig()
    warming = rig.grammars.warm()
    assert not warming.poll() and rig.made == 0
    rig.let.set()
    warming.wait()
    assert rig.made == 1 and rig.ended(rig.prepare(Grammar("regex", "[0-9]"))) and rig.made == 1
    rig.grammars.close()


@pytest.mark.parametrize(
    ("grammar", "where"),
    [
        (Grammar("ebnf", "root ::= foo"), 'ebnf: EBNF parser error at line 1, column 10: Rule "foo" is not defined'),
        (Grammar("regex", "(a"), "regex: Regex parsing error at position 3"),
        (Grammar("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}'), "json_schema: minLength 5"),
        (structural_tag({"type": "foo"}), "structural_tag: at format: type 'foo' is not"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_place(grammar: Grammar, where: str) -> None:
    rig = Rig()
    rig.let.set()
    preparation = rig.prepare(grammar)
    assert rig.woken.acquire(timeout=20)
    for _ in range(2):
        with pytest.raises(BadRequest, match=where):
            preparation.poll()
    rig.grammars.close()


def test_white_space_has_an_end_in_json_and_in_the_json_of_a_call() -> None:
    array = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 1}
    content = {"type": "json_schema", "json_schema": array, "max_whitespace_cnt": None}
    call = {"type": "tag", "begin": "<", "content": content, "end": ">"}
    tag = structural_tag({"type": "tags_with_separator", "tags": [call], "separator": ","})
    for grammar, begin, end in ((json_schema(array), "", ""), (tag, "<", ">")):
        texts = [f"{begin}[{' ' * spaces}1]{end}" for spaces in (0, MAX_WHITESPACE, MAX_WHITESPACE + 1)]
        assert allowed(grammar, texts) == [True, True, False], grammar.kind


def test_an_executor_without_a_model_knows_the_grammar_of_any_text_alone() -> None:
    assert anything_goes(ANY_TEXT, "the toy").poll()
    with pytest.raises(BadRequest, match="regex: the toy knows no grammars"):
        anything_goes(Grammar("regex", "a"), "the toy").poll()


MULTIPLES = {f"a{at}": {"type": "integer", "multipleOf": 1000 + at % 24} for at in range(900)}
ENDLESS = json_schema({"type": "object", "properties": MULTIPLES})


@pytest.fixture(scope="module")
def process() -> Iterator[CompilerProcess]:
    """What it compiles comes as text."""
    process = CompilerProcess(TOKENS, Limits(cpu_s=1, quick_s=0.0))
    yield process
    process.close()


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (Grammar("ebnf", "root ::= root{0}"), "cannot compile"),
        (ENDLESS, "too long to compile"),
        (Grammar("regex", "(a"), "Regex parsing error"),
    ],
    ids=["crash", "endless", "wrong"],
)
def test_what_ends_the_compiler_is_refused_and_the_next_grammar_is_compiled(
    process: CompilerProcess, grammar: Grammar, why: str
) -> None:
    with pytest.raises(BadRequest, match=why):
        process.compile(grammar)
    compiled = process.compile(Grammar("regex", "ab"))
    assert [_is_grammar_accept_string(compiled.grammar, text) for text in ("ab", "a")] == [True, False]


def test_a_compiler_that_something_from_outside_ends_or_freezes_condemns_no_grammar(
    process: CompilerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = process._started().pid
    children = Path(f"/proc/{pid}/task/{pid}/children")

    def kill_fork() -> None:
        while not (forks := children.read_text().split()):
            time.sleep(0.001)
        os.kill(int(forks[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill_fork)
    killer.start()
    with pytest.raises(Unavailable, match="from outside"):
        process.compile(ENDLESS)
    killer.join()
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(process, "_limits", Limits(wall_s=0.1))
    with pytest.raises(Unavailable, match="does not answer"):
        process.compile(ANY_TEXT)


def test_an_error_of_the_compiler_condemns_the_grammar_as_it_would_come_again_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiler, "compile_unchecked", lambda *_: 1 / 0)
    kind, reason = _Served(TOKENS, Limits()).answer(ANY_TEXT)
    assert kind == _REFUSED and b"the compiler fails" in reason


def test_a_compiler_that_answers_in_pieces_has_no_longer_than_one_that_does_not_answer() -> None:
    ours, theirs = socket.socketpair()

    def write_slowly() -> None:
        theirs.sendall(_HEAD.pack(_REFUSED, 40))
        for _ in range(39):
            time.sleep(0.05)
            theirs.sendall(b"x")

    writer = threading.Thread(target=write_slowly)
    writer.start()
    with pytest.raises(TimeoutError):
        _Frames(ours).receive(0.2)
    assert writer.is_alive()
    writer.join()
    for end in (ours, theirs):
        end.close()


def test_what_the_process_compiles_quickly_is_compiled_once_more_here(monkeypatch: pytest.MonkeyPatch) -> None:
    process = CompilerProcess(TOKENS)
    there = SimpleNamespace(send=lambda *frame: None, receive=lambda wait_s: (_QUICK, b""))
    monkeypatch.setattr(process, "_started", lambda: there)
    compiled = process.compile(Grammar("regex", "ab"))
    assert [_is_grammar_accept_string(compiled.grammar, text) for text in ("ab", "a")] == [True, False]


def test_a_closed_compiler_starts_no_process() -> None:
    process = CompilerProcess(TOKENS)
    process.close()
    with pytest.raises(TandemError, match="stops"):
        process.compile(ANY_TEXT)


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (Grammar("regex", "((.*){1,100}){1,100}"), "too long to follow"),
        (Grammar("json_schema", '{"anyOf": [{"$ref": "#"}]}'), "no text matches"),
        (Grammar("ebnf", "root ::= root"), "no text matches"),
        (Grammar("regex", "[^\\u{0}-\\u{10FFFF}]x"), "no text matches"),
    ],
)
def test_a_grammar_that_is_slow_to_follow_or_that_nothing_matches_is_refused(grammar: Grammar, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        COMPILER.compile(grammar)


class Counted:
    """Compiles one and the same, or fails."""

    any_text = COMPILER.compile(ANY_TEXT)

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.asked: list[str] = []

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        self.asked.append(grammar.text)
        if grammar.text == "bad":
            raise BadRequest("no")
        if grammar.text == "odd":
            raise OSError("of no kind that was thought of")
        return self.any_text

    def close(self) -> None:
        """Holds nothing."""


def test_a_grammar_is_kept_while_its_request_is_open_and_no_longer() -> None:
    compiler = Counted(TOKENS)
    grammars = Grammars(lambda: TOKENS, lambda _: compiler)
    held, left = Grammar("regex", "held"), Grammar("regex", "left")
    for grammar in (held, left):
        grammars.prepare(grammar, lambda: None).wait()
    del grammar, left
    for number in range(KEPT_GRAMMARS + 8):
        other = Grammar("regex", str(number))
        grammars.prepare(other, lambda: None).wait()
    assert grammars.compiled(Grammar("regex", "held")) is Counted.any_text
    with pytest.raises(BadRequest, match="not prepared"):
        grammars.compiled(Grammar("regex", "left"))
    grammars.close()


def test_a_refusal_is_remembered_and_a_failure_of_the_compiler_is_not() -> None:
    compiler = Counted(TOKENS)
    grammars = Grammars(lambda: TOKENS, lambda _: compiler)
    for grammar, times in ((Grammar("regex", "bad"), 1), (Grammar("regex", "odd"), 2)):
        for _ in range(2):
            with pytest.raises(TandemError):
                grammars.prepare(grammar, lambda: None).wait()
        assert compiler.asked.count(grammar.text) == times
    grammars.close()


def test_a_refusal_that_is_asked_for_again_holds_nothing_of_those_who_asked_before() -> None:
    grammars = Grammars(lambda: TOKENS, Counted)
    bad = Grammar("regex", "bad")
    preparation = grammars.prepare(bad, lambda: None)
    errors = []
    for ask in (preparation.wait, preparation.poll, partial(grammars.compiled, bad)):
        with pytest.raises(BadRequest) as raised:
            ask()
        errors.append(raised.value)
    assert len(set(errors)) == 3 and len({str(error) for error in errors}) == 1
    grammars.close()


def test_a_request_that_comes_while_an_equal_grammar_is_dropped_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, again = Rig(), list[FutureWork[CompiledGrammar]]()
    gone, came = Grammar("regex", "same"), Grammar("regex", "same")

    class Dropped(Unavailable):
        def __init__(self, message: str) -> None:
            super().__init__(message)
            if not again:
                again.append(rig.grammars.prepare(came, lambda: None))

    monkeypatch.setattr("engine.grammar.grammars.Unavailable", Dropped)
    dropped = rig.grammars.prepare(gone, lambda: None)
    del gone
    rig.let.set()
    with pytest.raises(Unavailable, match="has ended"):
        dropped.wait()
    again[0].wait()
    rig.grammars.close()


def test_a_vocabulary_that_cannot_be_read_ends_the_request_alone() -> None:
    def unreadable() -> GrammarVocabulary:
        raise OSError("no tokenizer.json")

    grammars = Grammars(unreadable, Compiler)
    for _ in range(2):
        with pytest.raises(TandemError, match=r"no tokenizer\.json"):
            grammars.prepare(ANY_TEXT, lambda: None).wait()
    grammars.close()


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
    assert queue.drop(lambda item, owner: item == 0) == [0]
    queue.join(most + 1, "alice", work_s)
    unnamed = CompileQueue[int](2)
    for number in range(MAX_QUEUED):
        unnamed.join(number, "", work_s)


class Held(Counted):
    """Compiles short texts at once, and long ones when it is let. begun: the texts, in their order."""

    def __init__(self, begun: "SimpleQueue[str]", let: threading.Semaphore) -> None:
        super().__init__(TOKENS)
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
        self.grammars = Grammars(lambda: TOKENS, lambda _: Held(self.begun, self.let))

    def ask(self, grammar: Grammar, owner: str) -> FutureWork[CompiledGrammar]:
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
