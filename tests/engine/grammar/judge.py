"""What grammars allow with the demo model's vocabulary, to be compared with a validator or with Python's `re`.

Owns the vocabulary, the compiler, and answers written at random. Judges nothing.
"""

import json
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
from xgrammar import CompiledGrammar, GrammarMatcher

from common.model_path import resolve_model_path
from common.sampling_params import Grammar
from engine.grammar.compiler import Compiler, vocabulary_of

VOCAB, EOS, QUOTE = 2683, 2, 4
TOKENS = vocabulary_of(resolve_model_path("demo"), VOCAB, (EOS,))
VOCABULARY = TOKENS.texts
COMPILER = Compiler(TOKENS)


def json_schema(schema: object) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def structural_tag(form: object) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


def allowed(grammar: Grammar, texts: Sequence[str]) -> list[bool]:
    """Whether each of these texts is a whole answer."""
    compiled = COMPILER.compile_unchecked(grammar)
    matchers = [(text, GrammarMatcher(compiled, terminate_without_stop_token=True)) for text in texts]
    return [matcher.accept_string(text) and matcher.is_completed() for text, matcher in matchers]


def next_tokens(matcher: GrammarMatcher) -> list[int]:
    mask = np.zeros((1, (VOCAB + 31) // 32), dtype=np.int32)
    matcher.fill_next_token_bitmask(mask)
    tokens: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]).tolist()
    return tokens


def random_answers(compiled: CompiledGrammar, random: Random, walks: int) -> Iterator[bytes]:
    """Strings that end within 60 tokens, short ones and longer ones."""
    for _ in range(walks):
        matcher, text, most = GrammarMatcher(compiled), b"", random.choice([1, 30])
        for written in range(60):
            tokens = next_tokens(matcher)
            if EOS in tokens:
                yield text
                break
            token = QUOTE if QUOTE in tokens and written >= most else random.choice(tokens)
            matcher.accept_token(token)
            text += VOCABULARY[token]
