"""Masks of vocabularies of other sizes than the demo's: what is left is what may follow, to the last token.

Owns vocabularies made of bytes and words, and judges that need no parser: texts of a finite language, of which an answer is a
beginning or not. Sizes are those at which a mask's last word is full, holds one token, or is half of 64; and real ones.
"""

import re
from random import Random

import numpy as np
import pytest
import torch
from xgrammar import TokenizerInfo, VocabType

from common.executor import RowStart
from common.sampling_params import Grammar, SamplingParams
from engine.grammar.compiler import Compiler, GrammarVocabulary
from engine.grammar.masks import FEW_ROWS, GrammarProcessor
from engine.ports import SampledRows

STOP, UNUSED = 0, 5
"""The token that ends answers; and how many of the model's last ids the tokenizer lacks."""
OTHER = b"w"
"""Begins the words that no grammar knows."""
MONTH = Grammar("regex", "[0-9]{4}-(0[1-9]|1[0-2])")
WORDS = ["naïve", "nächste", "日本語", "日曜", "no"]
ANSWERS = {MONTH: ["", "2", "2024", "2024-", "2024-1", "2024-12"], Grammar("regex", "|".join(WORDS)): ["", "na", "日", "日本語"]}
"""For each grammar, beginnings of answers."""


def is_left(grammar: Grammar, answer: bytes, token: bytes | None) -> bool:
    """Whether the token may follow; None: the one that ends the answer."""
    if token is None:
        return re.fullmatch(grammar.text.encode(), answer) is not None
    text = answer + token
    if grammar != MONTH:
        return any(word.encode().startswith(text) for word in WORDS)
    return any(re.fullmatch(MONTH.text.encode(), text + rest[len(text) :]) for rest in (b"0000-01", b"0000-10"))


def tokens_of(size: int) -> list[bytes]:
    """The stop token, all bytes, and words that grammars know among others that they do not, in any order. The last is one that
    they know."""
    known = [str(number).encode() for number in range(10, 100)]
    known += [
        b"2024",
        b"24-",
        b"-1",
        b"4-12",
        b"-12x",
        "日本".encode(),
        "本語".encode(),
        b"\xe6\x97",
        b"\xa5\xe6",
        "aïve".encode(),
    ]
    others = [OTHER + b"%d" % number for number in range(size - 258 - len(known))]
    mixed = [bytes([byte]) for byte in range(256)] + known + others
    Random(size).shuffle(mixed)
    return [b"</s>", *mixed, b"2"]


def left(one: GrammarProcessor, rows: list[int], size: int) -> list[list[int]]:
    """The tokens that may follow in each row. Their logits stand at every second place."""
    logits, at = torch.zeros(2 * len(rows), size), np.arange(1, 2 * len(rows), 2)
    host = np.array(rows)
    sampled = SampledRows(host, torch.from_numpy(host), at, torch.from_numpy(at))
    one.apply(logits, sampled)
    assert sampled.failed == {} and torch.isfinite(logits[0::2]).all()
    return [torch.isfinite(logits[place]).nonzero().ravel().tolist() for place in at]


@pytest.mark.parametrize("size", [640, 641, 672, 673, 32_001, 49_155, 50_257, 151_936, 262_145])
def test_a_mask_leaves_exactly_what_may_follow_in_a_vocabulary_of_any_size(size: int) -> None:
    tokens = tokens_of(size - UNUSED)
    info = TokenizerInfo(tokens, VocabType.RAW, vocab_size=size, stop_token_ids=[STOP])
    compiler = Compiler(GrammarVocabulary(info, ()))
    compiled = {grammar: compiler.compile(grammar) for grammar in ANSWERS}
    one = GrammarProcessor(compiled.__getitem__, 64, size, (STOP,), torch.device("cpu"))
    ids, asked = {token: number for number, token in enumerate(tokens)}, list[tuple[Grammar, bytes]]()
    for grammar, answers in ANSWERS.items():
        asked += [(grammar, answer.encode()) for answer in answers]
    one.start(
        [
            RowStart(
                row,
                np.empty(0, dtype=np.int32),
                SamplingParams(max_new_tokens=64, grammar=grammar),
                token_ids=np.array([ids[bytes([byte])] for byte in answer], dtype=np.int32),
                answer_tokens=len(answer),
            )
            for row, (grammar, answer) in enumerate(asked)
        ]
    )
    candidates = [(number, token) for number, token in enumerate(tokens) if not token.startswith(OTHER)]
    expected = [
        [number for number, token in candidates if is_left(grammar, answer, token if number != STOP else None)]
        for grammar, answer in asked
    ]
    rows = list(range(len(asked)))
    assert left(one, rows, size) == expected, "all at once"
    for first in rows[:: FEW_ROWS - 1]:
        few = rows[first : first + FEW_ROWS - 1]
        assert left(one, few, size) == expected[first : first + len(few)], "one by one"
