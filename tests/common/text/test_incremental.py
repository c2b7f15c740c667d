"""Incremental detokenizing, compared with decoding everything at once; and the text and bytes of single tokens."""

import functools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from common.text.token_text import PENDING_TOKENS, IncrementalDecoder, TokenText, Vocabulary
from tests.common.text.tiny import TEXTS, sentencepiece_like_tokenizer, tiny_tokenizer

HARD_TEXTS = (*TEXTS, "👩‍👩‍👧‍👦🏽", "e\u0301\u0327", "नमस्ते", "ก็ที่", "\U0010ffff", "a\ufffdb\ufffd", " leading", "tab\tnew\r\nline")
vocabulary_of = functools.cache(Vocabulary)
TOKEN_IDS = st.lists(st.integers(0, tiny_tokenizer().get_vocab_size() - 1), max_size=60)


def pieces(tokenizer: Tokenizer, token_ids: list[int], context: list[int] | None = None, skip: bool = True) -> list[str]:
    """Text after each token, and at last that of the flush."""
    decoder = IncrementalDecoder(vocabulary_of(tokenizer), context or [], skip)
    return [*(decoder.step(token_id) for token_id in token_ids), decoder.flush()]


def byte_ids(data: bytes) -> list[int]:
    """One token per byte."""
    return [id_of(tiny_tokenizer(), _byte_letter(byte)) for byte in data]


def id_of(tokenizer: Tokenizer, token: str) -> int:
    id = tokenizer.token_to_id(token)
    assert id is not None
    return id


@functools.cache
def _byte_letter(byte: int) -> str:
    """The printable letter by which byte-level BPE writes a byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_pieces_are_the_text_and_none_of_them_breaks_a_character(text: str) -> None:
    token_ids = byte_ids(text.encode())
    got = pieces(tiny_tokenizer(), token_ids)
    assert "".join(got) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in got)


@given(st.text(max_size=40))
def test_any_text_comes_back(text: str) -> None:
    tokenizer = tiny_tokenizer()
    assert "".join(pieces(tokenizer, tokenizer.encode(text).ids, skip=False)) == text


@given(TOKEN_IDS, st.booleans())
@example([255] * 200, True)
@example([*[200] * 70, 104], False)
def test_any_tokens_give_what_decoding_at_once_gives(token_ids: list[int], skip: bool) -> None:
    """Random tokens are mostly bytes that are no characters: the flush and the bound must agree with the library too."""
    tokenizer = tiny_tokenizer()
    assert "".join(pieces(tokenizer, token_ids, skip=skip)) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@given(TOKEN_IDS, TOKEN_IDS)
def test_a_context_decides_how_tokens_are_decoded_and_is_not_returned(context: list[int], token_ids: list[int]) -> None:
    tokenizer = tiny_tokenizer()
    before, whole = tokenizer.decode(context[-16:]), tokenizer.decode(context[-16:] + token_ids)
    got = "".join(pieces(tokenizer, token_ids, context))
    if whole.startswith(before):
        assert got == whole.removeprefix(before)
    else:  # the answer changes the end of the context, a character that was not complete: that end is returned too
        kept = next(length for length in range(len(before), -1, -1) if whole.startswith(before[:length]))
        assert whole.endswith(got)
        assert len(got) >= len(whole) - kept


def test_a_character_that_the_context_began_is_completed() -> None:
    ids = byte_ids("a🙂b".encode())
    assert "".join(pieces(tiny_tokenizer(), ids[3:], context=ids[:3])) == "🙂b"


def test_a_replacement_character_at_the_end_of_the_context_is_not_repeated() -> None:
    context, ids = byte_ids("a\ufffd".encode()), byte_ids(b"bc")
    assert "".join(pieces(tiny_tokenizer(), ids, context)) == "bc"


def test_a_broken_tail_appears_at_the_flush_only() -> None:
    got = pieces(tiny_tokenizer(), byte_ids("ok🙂".encode()[:-1]))
    assert got == ["o", "k", "", "", "", "\ufffd"]


@given(st.lists(st.sampled_from([0, 1, *range(40, 60)]), max_size=20), st.sampled_from([(), (0,), (1,), (0, 1)]))
def test_of_special_tokens_only_those_that_are_named_are_shown_and_text_that_looks_like_one_stays(
    token_ids: list[int], shown: tuple[int, ...]
) -> None:
    tokenizer = tiny_tokenizer()
    token_ids += byte_ids(b"</s><|im_start|><|im_end|>")
    decoder = IncrementalDecoder(vocabulary_of(tokenizer), (), shown=shown)
    got = "".join([*map(decoder.step, token_ids), decoder.flush()])
    kept = [token_id for token_id in token_ids if token_id > 1 or token_id in shown]
    assert got == tokenizer.decode(kept, skip_special_tokens=False) and got.endswith("</s><|im_start|><|im_end|>")


def test_ids_that_the_tokenizer_lacks_have_no_text() -> None:
    assert "".join(pieces(tiny_tokenizer(), [-1, 5_000, *byte_ids(b"a"), 2**31, 2**40, *byte_ids(b"b")])) == "ab"


def test_bytes_that_never_become_a_character_are_shown_after_a_bound() -> None:
    got = pieces(tiny_tokenizer(), byte_ids(b"\xe2" * 500))
    longest_silence = max(map(len, "".join("x" if piece else "." for piece in got).split("x")))
    assert longest_silence < PENDING_TOKENS
    assert "".join(got) == "\ufffd" * 500


def test_a_leading_space_is_dropped_at_the_start_of_an_answer_and_kept_after_a_context() -> None:
    tokenizer = sentencepiece_like_tokenizer()
    hello, world = id_of(tokenizer, "▁hello"), id_of(tokenizer, "▁world")
    assert pieces(tokenizer, [hello, world]) == ["hello", " world", ""]
    assert pieces(tokenizer, [world], context=[hello]) == [" world", ""]


def test_text_that_was_returned_stays_when_the_decoder_would_rewrite_it() -> None:
    """Byte fallback turns a whole run of bytes into U+FFFD once one of them is no character."""
    tokenizer = sentencepiece_like_tokenizer()
    ids = [id_of(tokenizer, piece) for piece in ("a", "<0x41>", "<0xFF>", "b", "▁world")]
    assert "".join(pieces(tokenizer, ids)) == "aA\ufffdb world"


@given(st.lists(st.integers(0, sentencepiece_like_tokenizer().get_vocab_size() - 1), max_size=60))
def test_no_tokens_of_a_byte_fallback_tokenizer_raise(token_ids: list[int]) -> None:
    tokenizer = sentencepiece_like_tokenizer()
    got = "".join(pieces(tokenizer, token_ids))
    whole = tokenizer.decode(token_ids)
    if "\ufffd" not in whole:
        assert got == whole


BYTE_LEVEL = TokenText(tiny_tokenizer())
FALLING_BACK = TokenText(sentencepiece_like_tokenizer())


@given(st.text(max_size=30))
def test_the_bytes_of_an_encoded_text_are_those_of_its_tokens(text: str) -> None:
    ids = tiny_tokenizer().encode(text).ids
    assert b"".join(BYTE_LEVEL.bytes(id) for id in ids) == text.encode()


def test_each_byte_level_token_has_the_text_that_it_decodes_to() -> None:
    for token_id in range(tiny_tokenizer().get_vocab_size()):
        text = tiny_tokenizer().decode([token_id], skip_special_tokens=False)
        assert BYTE_LEVEL.text(token_id) == text
        if "\ufffd" not in text:
            assert BYTE_LEVEL.bytes(token_id) == text.encode()


@pytest.mark.parametrize(
    ("written", "text", "utf8"),
    [
        ("▁hello", " hello", b" hello"),
        ("▁", " ", b" "),
        ("a", "a", b"a"),
        ("语", "语", "语".encode()),
        ("<0xE2>", "\ufffd", b"\xe2"),
        ("<0x41>", "A", b"A"),
        ("</s>", "</s>", b"</s>"),
    ],
)
def test_a_token_of_a_tokenizer_that_falls_back_to_bytes_has_its_space_and_its_byte(written: str, text: str, utf8: bytes) -> None:
    token_id = id_of(sentencepiece_like_tokenizer(), written)
    assert (FALLING_BACK.text(token_id), FALLING_BACK.bytes(token_id)) == (text, utf8)


def test_the_bytes_of_a_character_that_fell_back_are_together_its_own() -> None:
    ids = [id_of(sentencepiece_like_tokenizer(), f"<0x{byte:02X}>") for byte in "🙂".encode()]
    assert b"".join(FALLING_BACK.bytes(id) for id in ids).decode() == "🙂"


def test_a_token_that_looks_like_a_byte_is_text_where_no_byte_falls_back() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<0x41>": 0}, unk_token="<0x41>"))
    assert TokenText(tokenizer).bytes(0).strip() == b"<0x41>"


def test_an_id_that_the_tokenizer_lacks_has_no_text() -> None:
    assert (BYTE_LEVEL.text(10**6), BYTE_LEVEL.bytes(10**6)) == ("", b"")
