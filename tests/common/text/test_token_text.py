"""The text and bytes of single tokens, compared with the text that their tokenizer decodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from common.text.token_text import TokenText
from tests.common.text.tiny import sentencepiece_like_tokenizer, tiny_tokenizer

BYTE_LEVEL = TokenText(tiny_tokenizer())
FALLING_BACK = TokenText(sentencepiece_like_tokenizer())


def id_of(tokenizer: Tokenizer, written: str) -> int:
    found: int | None = tokenizer.token_to_id(written)
    assert found is not None
    return found


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
