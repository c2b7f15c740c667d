"""The grammar processor over random logits: what is left matches the grammar, also when a row is carried on."""

import json
import math
import re
from functools import cache
from random import Random

import jsonschema_rs
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast
from xgrammar import GrammarMatcher

from common.errors import BadRequest, TandemError
from common.executor import RowStart
from common.model_path import resolve_model_path
from common.sampling_params import Grammar, SamplingParams
from engine.grammar import masks
from engine.grammar.masks import GrammarProcessor, Utf8
from engine.ports import SampledRows
from tests.engine.grammar.judge import COMPILER, EOS, VOCAB, VOCABULARY, json_schema, next_tokens, structural_tag
from tests.random_schemas import random_schema

TOKENIZER = PreTrainedTokenizerFast.from_pretrained(resolve_model_path("demo"), local_files_only=True)
_NO_PAGES = np.empty(0, dtype=np.int32)
DATE = Grammar("regex", "[0-9]{4}-[0-9]{2}")
POINT = json_schema({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})

AMBIGUOUS = Grammar("regex", "((.*a.*){3}b.*){5}")
"""It can be followed in ever more ways: five times three "a" and a "b", anywhere."""


def processor() -> GrammarProcessor:
    """Without the trial of grammars, which is by CPU time: what is near its limits would be refused now and then."""
    return GrammarProcessor(cache(COMPILER.compile_unchecked), 16, VOCAB, (EOS,), torch.device("cpu"))


def start(row: int, asked: Grammar | None, answer: list[int], stops: tuple[int, ...] = ()) -> RowStart:
    sampling = SamplingParams(max_new_tokens=64, grammar=asked, stop_token_ids=stops)
    token_ids = np.array([7, 8, 9, *answer], dtype=np.int32)
    return RowStart(row, _NO_PAGES, sampling, token_ids=token_ids, answer_tokens=len(answer))


def step(
    one: GrammarProcessor, rows: list[int], seed: int, at: list[int] | None = None, failed: dict[int, TandemError] | None = None
) -> list[int]:
    """The likeliest tokens of random logits. at: where the rows' logits are; None: in their order. failed: gets the rows that
    cannot go on; None: there are none."""
    places = np.array(at or range(len(rows)))
    logits = torch.randn(int(places.max()) + 1, VOCAB, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    host = np.array(rows)
    sampled = SampledRows(host, torch.from_numpy(host), places, torch.from_numpy(places))
    one.apply(logits, sampled)
    if failed is None:
        assert sampled.failed == {}
    else:
        failed |= sampled.failed
    others = [place for place in range(len(logits)) if place not in places]
    assert torch.equal(logits[others], before[others]), "rows of others are as they were"
    tokens = logits[sampled.at].argmax(dim=-1)
    one.sampled(sampled, tokens)
    return tokens.tolist()


def text(tokens: list[int]) -> str:
    decoded = TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert isinstance(decoded, str)
    return decoded


def answers(one: GrammarProcessor, row: int, seed: int, so_far: list[int]) -> list[int]:
    """The answer until its end. Noise is a function of (seed, position)."""
    answer = list(so_far)
    while not answer or answer[-1] != EOS:
        answer += step(one, [row], seed * 1000 + len(answer))
        assert len(answer) < 400
    return answer


def test_an_answer_to_random_logits_matches_its_grammar_and_ends() -> None:
    one = processor()
    for seed in range(5):
        one.start([start(3, DATE, []), start(4, None, [])])
        assert one.concerns[[4, 3]].tolist() == [False, True]
        assert re.fullmatch(DATE.text, text(answers(one, 3, seed, [])))


@pytest.mark.parametrize(
    ("asked", "begin"),
    [
        (Grammar("json_schema", '{"type": "string"}'), b'"'),
        (Grammar("json_schema", '{"type": "string", "maxLength": 9}'), b'"'),
        (Grammar("json_schema", '{"type": "string", "pattern": "^[^a]{9}$"}'), b'"'),
        (Grammar("regex", ".{9}"), b""),
    ],
)
def test_an_answer_stays_utf_8(asked: Grammar, begin: bytes) -> None:
    one = processor()
    for first in range(0xC2, 0xF5):
        one.start([start(0, asked, [VOCABULARY.index(bytes([byte])) for byte in (*begin, first)])])
        left = allowed(one, 0)
        rest = bytes([0x80] * ((first >= 0xE0) + (first >= 0xF0)))
        for byte in range(0x80, 0xC0):
            character = bytes([first, byte]) + rest
            assert (VOCABULARY.index(bytes([byte])) in left) == is_utf8(character), character


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def allowed(one: GrammarProcessor, row: int) -> set[int]:
    """The tokens that may follow."""
    logits, at = torch.zeros(1, VOCAB), np.array([0])
    host = np.array([row])
    one.apply(logits, SampledRows(host, torch.from_numpy(host), at, torch.from_numpy(at)))
    return set(torch.isfinite(logits[0]).nonzero().ravel().tolist())


def test_tokens_that_hold_no_utf_8_are_never_allowed() -> None:
    tokens = [b"a", b"\xed", b"\xed\xa0", b"\xed\x9f", b"a\xe0\x80", b"\xf0\x8f", b"\xa0b", b"\x9f", b"a\xe0"]
    guard = Utf8(tokens, 1)

    def left(before: int | None) -> list[int]:
        mask = np.array([-1], dtype=np.int32)
        guard.narrow(mask, before)
        return [token for token in range(len(tokens)) if int(mask[0]) >> token & 1]

    assert left(None) == left(0) == [0, 1, 3, 6, 7, 8]
    assert left(1) == [0, 1, 3, 7, 8] and left(8) == [0, 1, 3, 6, 8]


def test_an_answer_that_is_carried_on_elsewhere_goes_on_as_it_would_have() -> None:
    one = processor()
    one.start([start(0, POINT, [])])
    whole = answers(one, 0, seed=1, so_far=[])
    assert isinstance(json.loads(text(whole))["x"], int)
    for cut in range(len(whole)):
        other = processor()
        other.start([start(5, POINT, whole[:cut])])
        assert answers(other, 5, seed=1, so_far=whole[:cut]) == whole


def test_rows_of_a_batch_follow_their_own_grammars_at_their_own_places() -> None:
    one, rows = processor(), list(range(12))
    one.start([start(row, Grammar("regex", f"{row % 10}{{20}}"), []) for row in rows])
    digits = ["" for _ in rows]
    for number in range(3):
        for row, token in zip(rows, step(one, rows, number, at=[2 * row for row in rows]), strict=True):
            digits[row] += text([token])
    assert all(set(written) == {str(row % 10)} for row, written in zip(rows, digits, strict=True))


def test_a_row_that_begins_anew_hears_nothing_of_the_row_before() -> None:
    one = processor()
    one.start([start(0, DATE, [])])
    step(one, [0], seed=0)
    one.start([start(0, Grammar("regex", "xyz"), [])])
    assert text(answers(one, 0, 1, [])) == "xyz"


def test_rows_whose_requests_have_ended_keep_no_grammar() -> None:
    one = GrammarProcessor(COMPILER.compile, 4, VOCAB, (EOS,), torch.device("cpu"))
    ended, open = Grammar("regex", "[a-z]+"), Grammar("regex", "[0-9]+")
    one.start([start(0, ended, []), start(1, open, [])])
    del ended
    one.start([start(2, None, [])])
    assert set(one._rows) == {1}
    failed: dict[int, TandemError] = {}
    _, going = step(one, [0, 1], seed=0, failed=failed)
    assert set(failed) == {0} and text([going]).isdigit(), "a plan may still name the ended row"
    assert open is not None


def test_a_token_that_the_grammar_refuses_fails_the_row_and_nothing_else() -> None:
    one, failed = processor(), dict[int, TandemError]()
    letters = [5, 6]  # special to the tokenizer or letters: no digits in any case
    one.start([start(0, DATE, letters), start(1, DATE, [])])
    _, going = step(one, [0, 1], seed=0, failed=failed)
    assert set(failed) == {0} and "does not match" in str(failed[0]) and going != EOS
    failed.clear()
    step(one, [0, 1], seed=1, failed=failed)
    assert set(failed) == {0}, "also when it is asked again"


@pytest.mark.parametrize("rows", [1, 6])
def test_a_row_whose_grammar_takes_too_much_work_fails_with_its_field_and_the_others_go_on(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, failed = processor(), dict[int, TandemError]()
    one.start([start(row, AMBIGUOUS if row == 0 else DATE, []) for row in range(rows)])
    monkeypatch.setattr(masks, "_FEW_STATES", 0)
    monkeypatch.setattr(masks, "MAX_WORK", 20)
    for number in range(6):
        last = step(one, list(range(rows)), number, failed=failed)
    assert list(failed) == [0] and isinstance(failed[0], BadRequest) and failed[0].field == "regex"
    assert all(token != EOS for token in last[1:])


def test_an_answer_never_stops_where_it_does_not_match_and_fails_at_the_same_token_when_it_is_carried_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python's `re` judges. A smaller limit than the product's makes it fast. Only the count decides: the limit of CPU time is no
    verdict that others repeat, and a collection of garbage in a large process can reach it."""
    monkeypatch.setattr(masks, "MAX_WORK", 2**11)
    monkeypatch.setattr(masks, "SLOW_S", math.inf)
    verdicts = []
    for seed in range(4):
        answer, failed = carried_on(seed, [])
        verdicts.append(failed)
        assert failed or re.fullmatch(AMBIGUOUS.text, text(answer))
        for cut in (1, len(answer) // 2, len(answer)):
            assert carried_on(seed, answer[: cut - failed]) == (answer, failed)
    assert any(verdicts)


def carried_on(seed: int, so_far: list[int]) -> tuple[list[int], bool]:
    """The answer, and whether it failed in place of a next token."""
    one, answer, failed = processor(), list(so_far), dict[int, TandemError]()
    one.start([start(0, AMBIGUOUS, answer)])
    while not answer or answer[-1] != EOS:
        (token,) = step(one, [0], seed * 1000 + len(answer), failed=failed)
        if failed:
            return answer, True
        answer.append(token)
    return answer, False


def test_the_count_of_work_is_small_for_everyday_grammars() -> None:
    """Far below the limit, so that none of them ever meets it."""
    everyday = (DATE, POINT, Grammar("json_schema", '{"type":"object"}'), Grammar("regex", r"[a-z]{3,12}( [a-z]{2,9}){2,6}"))
    for asked in everyday:
        matcher = GrammarMatcher(COMPILER.compile(asked))
        for number in range(60):
            may = next_tokens(matcher)
            assert matcher.accept_token(may[number % len(may)])
            if matcher.is_terminated():
                break
            assert masks.count_work(matcher) <= 64


def test_stop_tokens_of_the_request_end_the_answer_where_the_grammar_allows_it() -> None:
    stop = 40
    one = processor()
    one.start([start(0, Grammar("regex", "7"), [], (stop,))])
    (first,) = step(one, [0], seed=0)
    assert text([first]) == "7" and first != stop
    assert {step(one, [0], seed)[0] for seed in (1,)} <= {stop, EOS}


def test_special_tokens_are_text_to_no_grammar_but_to_one_that_names_them() -> None:
    """Token 1 is <|im_start|>, which gives no text."""
    begun = {"type": "tag", "begin": "<|im_start|>x", "content": {"type": "regex", "pattern": "a"}, "end": ""}
    anything = {
        "type": "sequence",
        "elements": [{"type": "any_text", "excludes": ["foo"]}, {"type": "const_string", "value": "foo"}],
    }
    expected = {
        Grammar("regex", ".*"): False,
        Grammar("json_schema", '{"type": "string", "minLength": 5}'): False,
        Grammar("regex", r"<\|im_start\|>x"): False,
        structural_tag(anything): False,
        structural_tag({"type": "any_tokens"}): False,
        structural_tag({"type": "token", "token": 1}): True,
        structural_tag({"type": "token", "token": "<|im_start|>"}): True,
        structural_tag(begun): True,
    }
    for asked, is_allowed in expected.items():
        one = processor()
        one.start([start(0, asked, TOKENIZER.encode('"') if asked.kind == "json_schema" else [])])
        assert allowed(one, 0) & {0, 1} == ({1} if is_allowed else set()), asked


def test_the_padding_of_the_vocabulary_is_never_left() -> None:
    one = processor()
    one.start([start(0, json_schema({}), [])])
    assert 0 < max(allowed(one, 0)) < VOCAB - 40


def test_answers_of_random_logits_to_random_schemas_validate() -> None:
    rows, random = 12, Random(5)
    schemas = [random_schema(random) for _ in range(rows)]
    one = processor()
    one.start([start(row, json_schema(schema), []) for row, schema in enumerate(schemas)])
    answers: list[list[int]] = [[] for _ in schemas]
    going, number = list(range(rows)), 0
    while going and number < 600:
        for row, token in zip(list(going), step(one, going, number), strict=True):
            answers[row].append(token)
            if token == EOS:
                going.remove(row)
        number += 1
    ended = [row for row in range(rows) if row not in going]
    assert len(ended) > rows // 2, "most end: random logits prefer long answers"
    for row in ended:
        assert jsonschema_rs.is_valid(schemas[row], json.loads(text(answers[row]))), (schemas[row], text(answers[row]))


# --- matchers that raise -----------------------------------------------------------------------------------------------------


class BrokenMatcher:
    """Raises, where `at` says, what the library raises."""

    def __init__(self, at: str) -> None:
        self._at = at

    @property
    def _handle(self) -> object:
        raise RuntimeError("the matcher is lost")  # in a batch

    def accept_token(self, token: int) -> bool:
        if self._at == "accept":
            raise RuntimeError("the matcher is lost")
        return True

    def is_terminated(self) -> bool:
        return False

    def _debug_print_internal_state(self) -> str:
        return ""

    def fill_next_token_bitmask(self, bits: object, row: int) -> None:
        if self._at == "fill":
            raise RuntimeError("the matcher is lost")


@pytest.mark.parametrize("at", ["accept", "fill"])
@pytest.mark.parametrize("count", [2, masks.FEW_ROWS + 3])
def test_a_matcher_that_raises_ends_its_row_alone(at: str, count: int) -> None:
    rows = list(range(count))
    quiet, one = processor(), processor()
    for each in (quiet, one):
        each.start([start(row, DATE, []) for row in rows])
    first = step(quiet, rows, seed=1)
    assert step(one, rows, seed=1) == first
    one._rows[1].matcher = BrokenMatcher(at)  # type: ignore[assignment]
    failed: dict[int, TandemError] = {}
    for seed in range(2, 6):
        expected, tokens = step(quiet, rows, seed), step(one, rows, seed, failed=failed)
        assert tokens[:1] + tokens[2:] == expected[:1] + expected[2:]
        assert failed.keys() == {1} and "matcher failed: the matcher is lost" in str(failed[1])


def test_a_grammar_that_no_matcher_can_be_made_of_ends_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(grammar: Grammar) -> object:
        if grammar is POINT:
            raise RuntimeError("no such rule")
        return COMPILER.compile_unchecked(grammar)

    one = GrammarProcessor(compiled, 16, VOCAB, (EOS,), torch.device("cpu"))  # type: ignore[arg-type]
    one.start([start(0, DATE, []), start(1, POINT, []), start(2, DATE, [])])
    failed: dict[int, TandemError] = {}
    step(one, [0, 1, 2], seed=1, failed=failed)
    assert failed.keys() == {1} and "json_schema: its matcher failed: no such rule" in str(failed[1])
