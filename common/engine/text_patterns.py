r"""The patterns of a JSON schema's strings, as rules that hold exactly.

Owns the way around xgrammar 0.2's own reading of `pattern`, which takes `(ba+)?` for `(ba+)?|a*`. A schema gets a name in place
of each pattern. The rules that xgrammar makes of the schema get the rules of the pattern in place of that name. Sets of
characters become lists of ranges, without the characters that JSON escapes. The names of sets are read as ECMA-262 reads them.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import count

_LAST, _CARET = 0x10FFFF, 0x5E
_ESCAPED_IN_JSON = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)]
_DIGIT = [(0x30, 0x39)]
_WORD = [*_DIGIT, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE = [(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
_SPACE += [(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
_POINT = [(0, 9), (11, 12), (14, 0x2027), (0x202A, _LAST)]
_NAMED = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROL = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0}
_ESCAPE = r"\\u\{[0-9A-Fa-f]+\}|\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|\\c[A-Za-z]|\\."
_PART = re.compile(rf"{_ESCAPE}|\[(?:{_ESCAPE}|[^\]\\])*\]|\(\?:|.", re.DOTALL)
_IN_SET = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_ANYTHING = r'[^"\\]*'
_CODE = re.compile(r"\\u\{|\\[ux][0-9A-Fa-f]")
_IN_RULES = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\broot(?:_\d+)*\b', re.DOTALL)

Ranges = list[tuple[int, int]]


class NamedPatterns:
    """The patterns of one schema. text: of the schema. No name is a part of it."""

    def __init__(self, text: str) -> None:
        self._patterns: dict[str, int] = {}
        self._name = next(name for at in count() if (name := f"tandem{at}_pattern_") not in text)

    def name(self, pattern: str) -> str:
        """What to write into the schema in its place. Equal patterns have one name: they are compiled once."""
        return f"{self._name}{self._patterns.setdefault(pattern, len(self._patterns))}"

    def written_out(self, rules: str, rules_of: Callable[[str], str]) -> str:
        """The rules of the schema, with those of its patterns. rules_of: the rules of a regular expression, from `root` on."""
        made = [_prefixed(rules_of(_plain(pattern)), f"{self._name}{at}_") for pattern, at in self._patterns.items()]
        written = re.sub(rf'Regex\("{self._name}(\d+)", json_string=true\)', rf"(({self._name}\1_root))", rules)
        assert not re.search(rf"{self._name}\d+\b(?!_)", written), "a name of a pattern is left"
        return "\n".join([written, *made])


def anywhere(pattern: str) -> str:
    """The regular expression of a whole JSON text in which it is found, as `re.search` finds it: any text is added on each
    side that has no anchor, in each of its alternatives. That text holds no character that JSON escapes: xgrammar 0.2 follows one
    set of characters some 20 times as fast as a choice between sets and escapes."""
    found, depth, alternatives = defaultdict[tuple[str, str], list[str]](list), 0, [list[str]()]
    for part in _PART.findall(pattern):
        depth += part.startswith("(") - (part == ")")
        if depth < 0:
            break
        if part == "|" and depth == 0:
            alternatives.append([])
        else:
            alternatives[-1].append(part)
    if depth != 0:
        return pattern  # for xgrammar to refuse
    for parts in alternatives:
        begins, ends = parts[:1] == ["^"], parts[-1:] == ["$"]
        inner = "".join(parts[begins : len(parts) - ends])
        found["" if begins else _ANYTHING, "" if ends else _ANYTHING].append(inner)
    return "|".join(f"{before}(?:{'|'.join(inner)}){after}" for (before, after), inner in found.items())


def as_it_reads(pattern: str) -> str:
    """The regular expression without what xgrammar 0.2 misreads: a set that begins with an escaped caret is a negation to it, a
    point any character at all, and in `\x61b` and `[\u0061b]` it takes the b for a digit of the code."""
    return "".join(map(_read_right, _PART.findall(pattern)))


def _read_right(part: str) -> str:
    if part == ".":
        return _listed(_POINT)
    if part.startswith("[") and (_CODE.search(part) or _has_leading_caret(part)):
        return _listed(_of_set(part))
    return f"\\u00{part[2:]}" if part.startswith("\\x") and len(part) == 4 else part


def _has_leading_caret(part: str) -> bool:
    first = _IN_SET.match(part[1:-1])
    return first is not None and first[0] != "^" and _named(first[0])[0][0] == _CARET


def _prefixed(rules: str, prefix: str) -> str:
    return _IN_RULES.sub(lambda found: found[0] if found[0][0] in '"[' else prefix + found[0], rules)


def _plain(pattern: str) -> str:
    """The expression without names of sets."""
    return "".join(_written(part) for part in _PART.findall(pattern))


def _written(part: str) -> str:
    if part == ".":
        return _set(_POINT)
    if part.startswith("["):
        return _set(_of_set(part))
    return _set(_named(part)) if part.startswith("\\") and part[1:].lower() in _NAMED else _read_right(part)


def _of_set(part: str) -> Ranges:
    """In order. part: with its brackets."""
    inner = part[1:-1]
    others = _others(_ranges(inner.removeprefix("^")))
    return others if inner.startswith("^") else _others(others)


def _ranges(inner: str) -> Ranges:
    ranges: Ranges = []
    parts, at = _IN_SET.findall(inner), 0
    while at < len(parts):
        one = _named(parts[at])
        if parts[at + 1 : at + 2] == ["-"] and at + 2 < len(parts) and len(one) == 1 and one[0][0] == one[0][1]:
            one, at = [(one[0][0], _named(parts[at + 2])[-1][1])], at + 2
        ranges += one
        at += 1
    return ranges


def _named(part: str) -> Ranges:
    """The characters that a character or an escape stands for."""
    if not part.startswith("\\"):
        code = ord(part)
    elif (name := part[1]).lower() in _NAMED:
        return _NAMED[name] if name.islower() else _others(_NAMED[name.lower()])
    elif name in "xu" and len(part) > 2:
        code = int(part[2:].strip("{}"), 16)
    elif name == "c" and len(part) > 2:
        code = ord(part[2]) % 32
    else:
        code = _CONTROL.get(name, ord(name))
    return [(code, code)]


def _others(ranges: Iterable[tuple[int, int]]) -> Ranges:
    others, begin = list[tuple[int, int]](), 0
    for low, high in sorted(ranges):
        if low > begin:
            others.append((begin, low - 1))
        begin = max(begin, high + 1)
    return [*others, (begin, _LAST)] if begin <= _LAST else others


def _set(ranges: Ranges) -> str:
    """Without what JSON escapes."""
    return _listed(_others([*_others(ranges), *_ESCAPED_IN_JSON]))


def _listed(ranges: Ranges) -> str:
    """A set that xgrammar 0.2 reads right. It does not begin with a caret. What is printed stands first: the others become codes
    there, and what is printed would be read as their digits."""
    if not ranges:
        return f"[^\\u{{0}}-\\u{{{_LAST:x}}}]"
    if ranges == [(_CARET, _CARET)]:
        return r"\^"
    caret = r"\^" if any(low == _CARET for low, _ in ranges) else ""
    without = [(low + (low == _CARET), high) for low, high in ranges if (low, high) != (_CARET, _CARET)]
    without.sort(key=lambda one: not 0x20 <= one[1] <= 0x7E)
    inner = "".join(f"\\u{{{low:x}}}" + (f"-\\u{{{high:x}}}" if high > low else "") for low, high in without)
    return f"[{inner}{caret}]"
