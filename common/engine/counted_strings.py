r"""Rules for strings with a least and a largest length, with every character that JSON can write.

Owns the way around xgrammar 0.2's own rules, which let such a string hold no escape, so no quotation mark and no end of a line
(https://github.com/mlc-ai/xgrammar/issues/800). One rule stands for "at most so many characters more". All strings of a grammar
share these rules, so a grammar with several such strings compiles about as fast as with one. Long strings are counted in blocks.
"""

import re

_BLOCK = 128
"""A rule for each number up to this. It takes time to compile one, and to follow the end of a block."""
_MOST = 16_384
"""Longer texts than this, beyond the least length, are left out."""
_AT_ONCE = 8
"""So many characters that must come are in one rule with those that may: a rule's end is slow to follow."""
_ANY_CHARACTER = r"[^\"\\\r\n]"
"""xgrammar's own, which stands alone where the most is one."""
_CHARACTERS = re.compile(rf"^(\w+_characters) ::= \(\({re.escape(_ANY_CHARACTER)}\)\)\n", re.MULTILINE)
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|(\w+)(?:\{(\d+), (-?\d+)\})?')
"""A literal, or the name of a rule and how often it comes."""
_PREFIX = "tandem_text_"
_ESCAPES = rf"""
{_PREFIX}escape ::= (([\"\\/bfnrt]) | ("u" {_PREFIX}code))
{_PREFIX}code ::= (({_PREFIX}one {_PREFIX}hex {_PREFIX}hex) | ([Dd] [89ABab] {_PREFIX}hex {_PREFIX}hex {_PREFIX}low))
{_PREFIX}one ::= (([0-9A-CE-Fa-ce-f] {_PREFIX}hex) | ([Dd] [0-7]))
{_PREFIX}low ::= (("\\u" [Dd] [C-Fc-f] {_PREFIX}hex {_PREFIX}hex))
{_PREFIX}hex ::= (([0-9A-Fa-f]))
"""
"""Two escapes that are a surrogate pair are one character."""


def with_counted_strings(rules: str) -> str:
    """The rules of a schema, with ours for its strings that have a length."""
    counted = set(_CHARACTERS.findall(rules))
    made = _Rules()

    def ours(word: re.Match[str]) -> str:
        if word[0] == _ANY_CHARACTER:
            return made.between(1, 1)
        return made.between(int(word[2]), int(word[3])) if word[2] and word[1] in counted else word[0]

    written = _WORD.sub(ours, _CHARACTERS.sub("", rules))
    return rules if written == rules else f"{written}\n{made}{_ESCAPES}"


class _Rules:
    """The rules that are needed, each once."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}

    def __str__(self) -> str:
        return "\n".join(f"{name} ::= ({body})" for name, body in self._bodies.items())

    def between(self, least: int, most: int) -> str:
        """What stands for a text of so many characters. most: -1 is any number."""
        more = min(most - least, _MOST) if most >= 0 else -1
        if least <= _AT_ONCE:
            return self._then(least, more)
        blocks, left = divmod(least, _BLOCK)
        return f"{self._then(_BLOCK, 0)}{{{blocks}, {blocks}}} {self._then(left, 0)} {self._then(0, more)}"

    def _then(self, least: int, more: int) -> str:
        """The rule for so many characters and at most so many more, with those that it needs. more: -1 is any number."""
        name = at = _name(least, more)
        while at not in self._bodies:
            if not least and more > _BLOCK:
                self._bodies[at] = ""  # its place: the rules that it needs come behind it
                self._bodies[at] = f"({self._then(0, _BLOCK - 1)}) | ({self._then(_BLOCK, 0)} {self._then(0, more - _BLOCK)})"
            elif not least and not more:
                self._bodies[at] = '""'
            else:
                least, more, is_end = max(least - 1, 0), more if least or more < 0 else more - 1, not least
                after = _name(least, more)
                one = rf'([^\0-\x1f\"\\] {after}) | ("\\" {_PREFIX}escape {after})'
                self._bodies[at] = f'"" | {one}' if is_end else one
                at = after
        return name


def _name(least: int, more: int) -> str:
    return f"{_PREFIX}{least}_{more if more >= 0 else 'any'}"
