"""The compiler: a grammar becomes what a matcher needs, and is tried before any row uses it.

Owns the calls of xgrammar's compiler, the trial, and which tokens are text to a grammar: all but special tokens, which give no
text in an answer. A structural tag may name special tokens in its marks, as the calls of some models do: these are text to it,
and the router shows those of calls and thoughts. Does not know processes, caches or models. It runs in a process of its own
(`compiler_process.py`), for xgrammar may crash, and may take hours.
"""

import json
import random
import re
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import numpy as np

from common.errors import BadRequest
from common.sampling_params import Grammar
from engine.grammar.grammars import MAX_WHITESPACE, check_text
from engine.grammar.json_schemas import name_patterns
from engine.grammar.strings import NamedPatterns, as_it_reads, with_counted_strings

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, TokenizerInfo
    from xgrammar import Grammar as Rules


_OPAQUE = {"json_schema", "pattern", "grammar"}
"""Keys of a structural tag that hold no marks."""
_TOKENS = {"token", "trigger_tokens", "rules"}
"""Keys that may hold ids of tokens."""


class GrammarVocabulary:
    """A model's vocabulary, and which of its tokens are special. Stop tokens are not: xgrammar never takes them for text."""

    def __init__(self, info: "TokenizerInfo", special: Collection[int]) -> None:
        self.info = info
        self.texts: list[bytes] = info.decoded_vocab
        self.special = frozenset(token for token in special if token < len(self.texts)) - set(info.stop_token_ids)
        self._plain = self._showing(())

    def of(self, grammar: Grammar) -> "TokenizerInfo":
        """What this grammar takes for text."""
        named = self._named(grammar)
        return self._showing(named) if named else self._plain

    def _showing(self, named: Collection[int]) -> "TokenizerInfo":
        """The vocabulary in which only these special tokens are text: xgrammar never allows a token without bytes."""
        from xgrammar import TokenizerInfo, VocabType

        hidden = self.special.difference(named)
        return TokenizerInfo(
            [b"" if token in hidden else text for token, text in enumerate(self.texts)],
            VocabType.RAW,
            vocab_size=self.info.vocab_size,
            stop_token_ids=self.info.stop_token_ids,
            add_prefix_space=self.info.add_prefix_space,
        )

    def _named(self, grammar: Grammar) -> list[int]:
        if grammar.kind != "structural_tag":
            return []
        named = set(_named(json.loads(grammar.text)))
        marks = "\0".join(each for each in named if isinstance(each, str)).encode(errors="replace")
        return [token for token in self.special if token in named or (self.texts[token] and self.texts[token] in marks)]


def _named(tag: Any, key: str = "") -> Iterator[str | int]:
    """The texts and the ids of tokens that a structural tag names. key: where it stands."""
    match tag:
        case str():
            yield tag
        case int() if key in _TOKENS:
            yield tag
        case list():
            for each in tag:
                yield from _named(each, key)
        case dict():
            for at, each in tag.items():
                if at not in _OPAQUE:
                    yield from _named(each, at)


THREADS = 2
WALKS, WALK_TOKENS = 6, 48
"""The trial writes so many answers of so many tokens."""


LONGEST_S, MEAN_S = 0.1, 0.005
"""CPU time that a token may take: the longest, and the mean of a walk."""


class Compiler:
    """Compiles in this process. vocabulary: as `vocabulary_of` makes it."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary

    def compile(self, grammar: Grammar) -> "CompiledGrammar":
        """Raises BadRequest for a grammar that cannot be compiled, that no text matches, or that is slow to follow."""
        check_text(grammar)
        compiled = self.compile_unchecked(grammar)
        self.try_out(grammar, compiled)
        return compiled

    def compile_unchecked(self, grammar: Grammar) -> "CompiledGrammar":
        """Without the trial, and whatever it takes. Raises BadRequest for a grammar that cannot be compiled."""
        from xgrammar import GrammarCompiler

        try:
            return _compile(GrammarCompiler(self._vocabulary.of(grammar), max_threads=THREADS, cache_enabled=False), grammar)
        except (RuntimeError, ValueError, TypeError) as error:
            raise BadRequest(f"{grammar.kind}: {_reason(str(error))}", field=grammar.kind) from error

    def close(self) -> None:
        """Holds nothing."""

    def try_out(self, grammar: Grammar, compiled: "CompiledGrammar") -> None:
        """Write some answers: with the first of the tokens that may follow, the last, the token before again, any. Raises
        BadRequest."""
        from xgrammar import GrammarMatcher

        vocab_size, stops = compiled.tokenizer_info.vocab_size, compiled.tokenizer_info.stop_token_ids
        mask = np.zeros((1, (vocab_size + 31) // 32), dtype=np.int32)
        for walk in range(WALKS):
            matcher, chance, before, spent_s = GrammarMatcher(compiled), random.Random(walk), -1, 0.0
            for written in range(WALK_TOKENS):
                begun = time.thread_time()
                matcher.fill_next_token_bitmask(mask)
                token_s = time.thread_time() - begun
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
                if not bits.any():
                    raise BadRequest(f"{grammar.kind}: no text matches it, or not every beginning can be ended", grammar.kind)
                bits[stops] = 0
                tokens = np.flatnonzero(bits)
                if not len(tokens):
                    break
                if walk == 2 and before >= 0 and bits[before]:
                    token = before
                else:
                    token = int(tokens[{0: 0, 1: -1}.get(walk, chance.randrange(len(tokens)))])
                begun = time.thread_time()
                matcher.accept_token(token)
                token_s += time.thread_time() - begun
                before = token
                spent_s += token_s
                if token_s > LONGEST_S or spent_s > MEAN_S * max(WALK_TOKENS / 2, written + 1):
                    raise BadRequest(
                        f"{grammar.kind}: it takes too long to follow: write it so that a text matches in fewer ways, with fewer "
                        "repetitions within each other",
                        field=grammar.kind,
                    )


def vocabulary_of(path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarVocabulary:
    """The vocabulary of a checkpoint. vocab_size: the model's, which may have more ids than its tokenizer. Raises BadRequest, and
    what the reader of the tokenizer's files raises."""
    from transformers import PreTrainedTokenizerFast
    from xgrammar import TokenizerInfo

    if not eos_token_ids:
        raise BadRequest("a grammar needs a model with an end-of-text token, and this model has none", field="grammar")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids))
    return GrammarVocabulary(info, special)


def _compile(compiler: "GrammarCompiler", grammar: Grammar) -> "CompiledGrammar":
    from xgrammar import Grammar as Rules

    match grammar.kind:
        case "json_schema":
            schema = json.loads(grammar.text)
            patterns = name_patterns(schema, grammar.kind)
            rules = Rules.from_json_schema(json.dumps(schema), max_whitespace_cnt=MAX_WHITESPACE)
            mended = _mended(_written(rules), patterns)
            return compiler.compile_grammar(rules if mended is None else Rules.from_ebnf(mended))
        case "regex":
            return compiler.compile_regex(as_it_reads(grammar.text))
        case "ebnf":
            return compiler.compile_grammar(grammar.text)
        case "structural_tag":
            return compiler.compile_structural_tag(json.dumps(_with_mended_schemas(json.loads(grammar.text))))
        case _:
            assert_never(grammar.kind)


def _with_mended_schemas(tag: Any) -> Any:
    """The structural tag with the limit on white space in each of its JSON schemas that has none, with exact formats in them, and
    with the rules of a schema in place of the schema where they had to be mended. Regular expressions hold nothing that
    xgrammar misreads."""
    from xgrammar import Grammar as Rules

    match tag:
        case list():
            return [_with_mended_schemas(each) for each in tag]
        case {"type": "json_schema", "json_schema": asked}:
            schema, patterns = dict(tag), name_patterns(asked, "structural_tag")
            if schema.get("max_whitespace_cnt") is None:
                schema["max_whitespace_cnt"] = MAX_WHITESPACE
            rules = Rules.from_structural_tag(json.dumps({"type": "structural_tag", "format": schema}))
            mended = _mended(_written(rules), patterns)
            return schema if mended is None else {"type": "grammar", "grammar": mended}
        case {"type": "regex", "pattern": str(pattern)}:
            return {**tag, "pattern": as_it_reads(pattern)}
        case dict():
            return {key: _with_mended_schemas(each) for key, each in tag.items()}
        case _:
            return tag


_CODE = re.compile(r"\\(?:x([0-9a-f]{2})|.)", re.DOTALL)


def _written(rules: "Rules") -> str:
    """Their text, to be read again. xgrammar writes "éa" as "\\xe9a", and would read one character of three digits."""
    return _CODE.sub(lambda code: rf"\u00{code[1]}" if code[1] else code[0], str(rules))


_OTHER_NAMES = re.compile(r"^(?!basic_)\w+ ::= .*\bbasic_escape basic_string_sub\b.*$", re.MULTILINE)
_USE_OF_NUMBERS = re.compile(r"^(?!basic_)\w+ ::= .*\bbasic_(?:any|array|number|object)\b", re.MULTILINE)
_EXPONENT = re.compile(r"(\[eE\] \w+ \w+)\{1, -1\}")
_ESCAPE_IN_NAME = r"""
tandem_escape_in_name ::= (([\"\\bfnrt]) | ("u00" [01] [0-9A-Fa-f]))
"""


def _mended(rules: str, patterns: NamedPatterns) -> str | None:
    """The rules of a JSON schema with those of its patterns, its strings of a given length, its numbers, and its other names;
    None: they are right as they are.

    xgrammar 0.2 tells an object's other names from the named ones letter by letter, and knows a letter's escape for no letter. So
    while a name is like a named one, only characters that no named one has are escaped. Its numbers may be larger than any that
    readers of JSON know: exponents have two digits at most here.
    """
    from xgrammar import Grammar as Rules

    mended = _OTHER_NAMES.sub(lambda found: found[0].replace("basic_escape", "tandem_escape_in_name"), rules)
    if mended != rules:
        mended += _ESCAPE_IN_NAME
    if _USE_OF_NUMBERS.search(rules):
        mended = _EXPONENT.sub(r"\1{1, 2}", mended)
    mended = patterns.written_out(with_counted_strings(mended), lambda pattern: _written(Rules.from_regex(pattern)))
    return mended if mended != rules else None


_WHERE_IN_XGRAMMAR = re.compile(r"^\[[\d:]+\] \S+: (Check failed: \(.*?\) is false: )?", re.DOTALL)


def _reason(message: str) -> str:
    """xgrammar's message without the line of its source: "[07:15:38] /project/cpp/regex_converter.cc:83: Regex parsing …"."""
    return " ".join(_WHERE_IN_XGRAMMAR.sub("", message).split())[:500]
