"""The grammar processor over random logits: what is left matches the grammar, also when a row is carried on."""

import json
import re
from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from common.engine.grammar_compiler import Compiler, vocabulary_of
from common.engine.logits.grammar import GrammarProcessor
from common.engine.logits.port import SampledRows
from common.engine.logits.utf8 import Utf8
from common.engine.plan import RowStart
from common.model_path import resolve_model_path
from common.sampling_params import Grammar, SamplingParams

VOCAB, EOS = 2683, 2
TOKENS = vocabulary_of(resolve_model_path("demo"), VOCAB, (EOS,))
COMPILER = Compiler(TOKENS)
VOCABULARY: list[bytes] = TOKENS.decoded_vocab
TOKENIZER = PreTrainedTokenizerFast.from_pretrained(resolve_model_path("demo"), local_files_only=True)
_NO_PAGES = np.empty(0, dtype=np.int32)
DATE = Grammar("regex", "[0-9]{4}-[0-9]{2}")
POINT = Grammar("json_schema", json.dumps({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}))


def processor(token_s: float = 60.0) -> GrammarProcessor:
    return GrammarProcessor(cache(COMPILER.compile), 16, VOCAB, (EOS,), torch.device("cpu"), token_s)


def start(row: int, grammar: Grammar | None, answer: list[int], stops: tuple[int, ...] = ()) -> RowStart:
    sampling = SamplingParams(max_new_tokens=64, grammar=grammar, stop_token_ids=stops)
    token_ids = np.array([7, 8, 9, *answer], dtype=np.int32)
    return RowStart(row, _NO_PAGES, sampling, token_ids=token_ids, answer_tokens=len(answer))


def step(one: GrammarProcessor, rows: list[int], seed: int, at: list[int] | None = None) -> list[int]:
    """The likeliest tokens of random logits. at: where the rows' logits are; None: in their order."""
    places = np.array(at or range(len(rows)))
    logits = torch.randn(int(places.max()) + 1, VOCAB, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    host = np.array(rows)
    sampled = SampledRows(host, torch.from_numpy(host), places, torch.from_numpy(places))
    one.apply(logits, sampled)
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
        assert one.concerns(np.array([4, 3])).tolist() == [False, True]
        assert re.fullmatch(DATE.text, text(answers(one, 3, seed, [])))


@pytest.mark.parametrize(
    ("grammar", "begin"),
    [
        (Grammar("json_schema", '{"type": "string"}'), b'"'),
        (Grammar("json_schema", '{"type": "string", "maxLength": 9}'), b'"'),
        (Grammar("json_schema", '{"type": "string", "pattern": "^[^a]{9}$"}'), b'"'),
        (Grammar("regex", ".{9}"), b""),
    ],
)
def test_an_answer_stays_utf_8(grammar: Grammar, begin: bytes) -> None:
    one = processor()
    for first in range(0xC2, 0xF5):
        one.start([start(0, grammar, [VOCABULARY.index(bytes([byte])) for byte in (*begin, first)])])
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
        mask = np.array([-1], dtype=np.int64)
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
    one = GrammarProcessor(COMPILER.compile, 4, VOCAB, (EOS,), torch.device("cpu"), 60.0)
    ended, open = Grammar("regex", "[a-z]+"), Grammar("regex", "[0-9]+")
    one.start([start(0, ended, []), start(1, open, [])])
    del ended
    one.start([start(2, None, [])])
    assert set(one._rows) == {1}
    last, going = step(one, [0, 1], seed=0)
    assert last == EOS and text([going]).isdigit(), "a plan may still name the ended row"
    assert open is not None


def test_a_token_that_the_grammar_refuses_ends_the_row_and_nothing_else() -> None:
    one = processor()
    letters = [5, 6]  # special to the tokenizer or letters: no digits in any case
    one.start([start(0, DATE, letters), start(1, DATE, [])])
    ended, going = step(one, [0, 1], seed=0)
    assert ended == EOS and going != EOS
    assert step(one, [0, 1], seed=1)[0] == EOS, "also when it is asked again"


def test_a_row_whose_grammar_takes_too_long_ends_and_the_others_go_on() -> None:
    """No mask takes less than no time."""
    for rows in (1, 6):
        one = processor(token_s=-1.0)
        one.start([start(row, Grammar("regex", "[a-z]+"), []) for row in range(rows)])
        for number in range(2):
            last = step(one, list(range(rows)), number)
        assert last == [EOS] * rows


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
    allowed = {
        Grammar("regex", ".*"): False,
        Grammar("json_schema", '{"type": "string", "minLength": 5}'): False,
        Grammar("regex", r"<\|im_start\|>x"): False,
        _tag(anything): False,
        _tag({"type": "any_tokens"}): False,
        _tag({"type": "token", "token": 1}): True,
        _tag({"type": "token", "token": "<|im_start|>"}): True,
        _tag(begun): True,
    }
    for grammar, is_allowed in allowed.items():
        one = processor()
        one.start([start(0, grammar, TOKENIZER.encode('"') if grammar.kind == "json_schema" else [])])
        logits = torch.zeros(1, VOCAB)
        host = np.array([0])
        one.apply(logits, SampledRows(host, torch.from_numpy(host), host, torch.from_numpy(host)))
        assert torch.isfinite(logits[0, :2]).tolist() == [False, is_allowed], grammar


def _tag(format: Mapping[str, object]) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": format}))


def test_the_padding_of_the_vocabulary_is_never_left() -> None:
    one = processor()
    one.start([start(0, Grammar("json_schema", "{}"), [])])
    logits = torch.zeros(1, VOCAB)
    host = np.array([0])
    one.apply(logits, SampledRows(host, torch.from_numpy(host), host, torch.from_numpy(host)))
    assert torch.isneginf(logits[0, VOCAB - 40 :]).all() and torch.isfinite(logits).any()
