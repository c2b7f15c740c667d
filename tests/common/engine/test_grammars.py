"""Grammars are compiled on threads, each once, and kept."""

import json
import threading

import pytest
from xgrammar import GrammarCompiler
from xgrammar.testing import _is_grammar_accept_string

from common.engine.grammars import ANY_TEXT, MAX_WHITESPACE, AnythingGoes, Grammars, Preparation, compiler_of
from common.errors import BadRequest
from common.model_path import resolve_model_path
from common.sampling_params import Grammar


class Rig:
    """Grammars whose compiler comes when it is let."""

    def __init__(self) -> None:
        self.let, self.made, self.woken = threading.Event(), 0, threading.Semaphore(0)
        self.grammars = Grammars(self._make)

    def _make(self) -> GrammarCompiler:
        assert self.let.wait(10)
        self.made += 1
        return compiler_of(resolve_model_path("demo"), 2683, (2,))

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


@pytest.mark.parametrize(
    ("grammar", "where"),
    [
        (Grammar("ebnf", "root ::= foo"), 'ebnf: EBNF parser error at line 1, column 10: Rule "foo" is not defined'),
        (Grammar("regex", "(a"), "regex: Regex parsing error at position 3"),
        (Grammar("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}'), "json_schema: minLength 5"),
        (Grammar("structural_tag", '{"type":"structural_tag","format":{"type":"foo"}}'), "structural_tag: .*not recognized: foo"),
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
    rig = Rig()
    rig.let.set()
    array = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 1}
    call = {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": array}, "end": ">"}
    tag = {"type": "structural_tag", "format": {"type": "tags_with_separator", "tags": [call], "separator": ","}}
    for grammar, begin, end in (
        (Grammar("json_schema", json.dumps(array)), "", ""),
        (Grammar("structural_tag", json.dumps(tag)), "<", ">"),
    ):
        compiled = rig.grammars.compiled(grammar).grammar
        texts = [f"{begin}[{' ' * spaces}1]{end}" for spaces in (0, MAX_WHITESPACE, MAX_WHITESPACE + 1)]
        assert [_is_grammar_accept_string(compiled, text) for text in texts] == [True, True, False], grammar.kind
    rig.grammars.close()


def test_an_executor_without_a_model_knows_the_grammar_of_any_text_alone() -> None:
    assert AnythingGoes(ANY_TEXT, "the toy").poll()
    with pytest.raises(BadRequest, match="regex: the toy knows no grammars"):
        AnythingGoes(Grammar("regex", "a"), "the toy").poll()
