"""How a tokenizer spells a word: no text that holds the word is written without one of its spellings."""

import random
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from common.text.spellings import Spellings
from common.text.token_text import TokenText
from tests.common.text.tiny import tiny_tokenizer

CORPUS = [
    'say help, "help" (help) .help help! help; \'help x_help 1help',
    "C++ C++; (C++) use C++: a,C++",
    'New York, "New York".',
] * 4


def byte_level() -> Tokenizer:
    """Its words may begin with a mark, as those of GPT-4 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(r"[^\p{L}\p{N}]?\p{L}+|\p{N}+|[^\p{L}\p{N}]+", "isolated", invert=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """It puts a space before every text, as Llama 2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    letters = sorted({"▁", "\n", *"".join(CORPUS).replace(" ", "")})
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=110, initial_alphabet=letters, show_progress=False))
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like, tiny_tokenizer])
@pytest.mark.parametrize("word", ["help", "C++", "New York"])
def test_every_text_that_holds_a_word_holds_one_of_its_spellings(make: Callable[[], Tokenizer], word: str) -> None:
    tokenizer, choose = make(), random.Random(1)
    found = Spellings(tokenizer, TokenText(tokenizer)).of(word)
    others = ["", " ", "\n", '"', "'", "(", ",", ".", ":", ";", "!", "_", "say ", " use", "1"]
    for _ in range(300):
        before, behind = "".join(choose.choices(others, k=2)), "".join(choose.choices(others, k=2))
        if before[-1:].isalnum() or behind[:1].isalnum():
            continue  # another word
        ids = tokenizer.encode(before + word + behind, add_special_tokens=False).ids
        assert any(tuple(ids[at : at + len(spelled)]) == spelled for spelled in found for at in range(len(ids)))


def test_a_spelling_is_found_although_it_has_fewer_tokens_behind_a_space() -> None:
    tokenizer = tiny_tokenizer()
    found = Spellings(tokenizer, TokenText(tokenizer)).of("and")
    assert {tuple(map(tokenizer.id_to_token, ids)) for ids in found} == {("a", "nd"), ("Ġand",)}
