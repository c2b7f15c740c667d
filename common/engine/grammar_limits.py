"""How large regular expressions, EBNF grammars and JSON texts may be, so that they compile soon and their masks are made fast.

Owns the limits. Counts what is outside of literals, in time that grows with the text's length alone. Pure; knows no vocabulary.
"""

import re
from typing import Literal, TypeAlias

from common.errors import BadRequest

Language: TypeAlias = Literal["json_schema", "structural_tag", "regex", "ebnf"]

MAX_GRAMMAR_CHARS = 64 * 1024
MAX_DEPTH = {"json_schema": 32, "structural_tag": 48, "regex": 16, "ebnf": 16}
"""Brackets within brackets. The time that a mask takes grows with the depth of repetitions, that to compile far more."""
MAX_QUANTIFIERS = 256
"""So many of * + ? { in a regular expression or EBNF grammar: the time to compile them grows faster than their number."""
MAX_REPEATS = 10_000
"""What the numbers of `{3,5}` within each other may multiply to."""

# No text may make these patterns slow. So whatever follows a repeat without a bound may be missing: a match that has come so far
# cannot fail, so nothing is read twice.
_JSON_LITERAL = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_CLASS = r"\[[^\]\\]*(?:\\.[^\]\\]*)*\]?"
_LITERALS = {
    "json_schema": _JSON_LITERAL,
    "structural_tag": _JSON_LITERAL,
    "regex": re.compile(rf"\\u\{{[^}}]{{0,8}}\}}|\\.|{_CLASS}", re.DOTALL),
    "ebnf": re.compile(rf"{_JSON_LITERAL.pattern}|{_CLASS}|#[^\n]*", re.DOTALL),
}
_REPEAT = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*))?")
"""The bracket that ends it does not count."""


def check_size(name: str, language: Language, text: str) -> None:
    """Raises BadRequest for a text that is too long, too deep or repeats too much. name: of the field, for the message."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise BadRequest(f"{name} has {len(text)} characters: send at most {MAX_GRAMMAR_CHARS}", field=name)
    bare = _LITERALS[language].sub("_", text)
    _check_depth(name, bare, MAX_DEPTH[language])
    if language in ("regex", "ebnf"):
        _check_repeats(name, bare)


def _check_depth(name: str, bare: str, most: int) -> None:
    depth = 0
    for character in bare:
        depth += (character in "([{") - (character in ")]}")
        if depth > most:
            raise BadRequest(f"{name} has more than {most} brackets within each other", field=name)


def _check_repeats(name: str, bare: str) -> None:
    """Numbers of repetition multiply when one is in another. All are taken for nested, so the check errs on the safe side."""
    quantifiers = sum(bare.count(each) for each in "*+?{")
    if quantifiers > MAX_QUANTIFIERS:
        raise BadRequest(f"{name} has {quantifiers} repetitions: use at most {MAX_QUANTIFIERS}", field=name)
    product = 1
    for low, high in _REPEAT.findall(bare):
        digits = (high or low or "1").lstrip("0") or "1"
        product *= int(digits) if len(digits) <= 9 else 10**9
        if product > (MAX_REPEATS if "(" in bare else 2**31):
            raise BadRequest(f"{name}: its repetitions multiply to more than {MAX_REPEATS}: lower them", field=name)
