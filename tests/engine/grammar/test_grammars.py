"""Grammars are compiled off the loop, each once, and kept while an open request needs them. What harms others is refused."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from xgrammar import CompiledGrammar, TokenizerInfo
from xgrammar.testing import _is_grammar_accept_string

from common.errors import BadRequest, TandemError, Unavailable
from common.executor import Preparation
from common.model_path import resolve_model_path
from common.sampling_params import Grammar
from engine.grammar.compiler import Compiler, GrammarVocabulary, vocabulary_of
from engine.grammar.compiler_process import _REFUSED, CompilerProcess, Limits, _Served
from engine.grammar.grammars import ANY_TEXT, KEPT_GRAMMARS, AnythingGoes, CompiledSoon, Grammars
from engine.grammar.structural_tags import MAX_WHITESPACE

VOCABULARY = vocabulary_of(resolve_model_path("demo"), 2683, (2,))


class Rig:
    """Grammars whose vocabulary comes when it is let. They are compiled in this process."""

    def __init__(self) -> None:
        self.let, self.made, self.woken = threading.Event(), 0, threading.Semaphore(0)
        self.grammars = Grammars(self._make, Compiler)

    def _make(self) -> TokenizerInfo:
        assert self.let.wait(10)
        self.made += 1
        return VOCABULARY

    def prepare(self, grammar: Grammar) -> Preparation:
        return self.grammars.prepare(grammar, self.woken.release)

    def ended(self, preparation: Preparation) -> bool:
        assert self.woken.acquire(timeout=20)
        return preparation.poll()


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
        (
            Grammar("structural_tag", '{"type":"structural_tag","format":{"type":"foo"}}'),
            "structural_tag: at format: type 'foo' is not",
        ),
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
    tag = {"type": "structural_tag", "format": {"type": "tags_with_separator", "tags": [call], "separator": ","}}
    for grammar, begin, end in (
        (Grammar("json_schema", json.dumps(array)), "", ""),
        (Grammar("structural_tag", json.dumps(tag)), "<", ">"),
    ):
        compiled = Compiler(VOCABULARY).compile(grammar).grammar
        texts = [f"{begin}[{' ' * spaces}1]{end}" for spaces in (0, MAX_WHITESPACE, MAX_WHITESPACE + 1)]
        assert [_is_grammar_accept_string(compiled, text) for text in texts] == [True, True, False], grammar.kind


def test_a_string_of_a_given_length_holds_the_characters_that_json_allows() -> None:
    short = {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 3}}
    tag = {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": short}, "end": ">"}
    for grammar, begin, end in (
        (Grammar("json_schema", json.dumps(short)), "", ""),
        (Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": tag})), "<", ">"),
    ):
        compiled = Compiler(VOCABULARY).compile(grammar).grammar
        for character in map(chr, [*range(0x30), 0x7F, 0x80, 0x20AC, 0x1F600]):
            text = f'["a{character}b"]'
            assert _is_grammar_accept_string(compiled, f"{begin}{text}{end}") == is_json(text), (grammar.kind, text)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_an_executor_without_a_model_knows_the_grammar_of_any_text_alone() -> None:
    assert AnythingGoes(ANY_TEXT, "the toy").poll()
    with pytest.raises(BadRequest, match="regex: the toy knows no grammars"):
        AnythingGoes(Grammar("regex", "a"), "the toy").poll()


ENDLESS = Grammar(
    "json_schema",
    json.dumps(
        {"type": "object", "properties": {f"a{at}": {"type": "integer", "multipleOf": 1000 + at % 24} for at in range(900)}}
    ),
)


@pytest.fixture(scope="module")
def process() -> Iterator[CompilerProcess]:
    """What it compiles comes as text."""
    process = CompilerProcess(VOCABULARY, Limits(cpu_s=1, quick_s=0.0))
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
    kind, reason = _Served(GrammarVocabulary(VOCABULARY), Limits()).answer(ANY_TEXT)
    assert kind == _REFUSED and b"the compiler fails" in reason


def test_a_closed_compiler_starts_no_process() -> None:
    process = CompilerProcess(VOCABULARY)
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
        Compiler(VOCABULARY).compile(grammar)


class Counted:
    """Compiles one and the same, or fails."""

    any_text = Compiler(VOCABULARY).compile(ANY_TEXT)

    def __init__(self, vocabulary: TokenizerInfo) -> None:
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
    compiler = Counted(VOCABULARY)
    grammars = Grammars(lambda: VOCABULARY, lambda _: compiler)
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
    compiler = Counted(VOCABULARY)
    grammars = Grammars(lambda: VOCABULARY, lambda _: compiler)
    for grammar, times in ((Grammar("regex", "bad"), 1), (Grammar("regex", "odd"), 2)):
        for _ in range(2):
            with pytest.raises(TandemError):
                grammars.prepare(grammar, lambda: None).wait()
        assert compiler.asked.count(grammar.text) == times
    grammars.close()


def test_a_refusal_that_is_asked_for_again_holds_nothing_of_those_who_asked_before() -> None:
    grammars = Grammars(lambda: VOCABULARY, Counted)
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
    rig, again = Rig(), list[CompiledSoon]()
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
    def unreadable() -> TokenizerInfo:
        raise OSError("no tokenizer.json")

    grammars = Grammars(unreadable, Compiler)
    for _ in range(2):
        with pytest.raises(TandemError, match=r"no tokenizer\.json"):
            grammars.prepare(ANY_TEXT, lambda: None).wait()
    grammars.close()
