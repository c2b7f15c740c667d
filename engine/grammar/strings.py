"""The strings of a grammar: patterns, lengths and formats of JSON strings, as rules that hold exactly, and how large regular
expressions, EBNF grammars and JSON texts may be, so that they compile soon.

Owns the ways around xgrammar 0.2's own reading. It takes `(ba+)?` for `(ba+)?|a*`: so a schema gets a name in place of each
pattern, and the rules that xgrammar makes of the schema get the rules of the pattern in place of that name. Sets of characters
become lists of ranges, without the characters that JSON escapes; the names of sets are read as ECMA-262 reads them.

Its strings of a given length hold no escape, so no quotation mark and no end of a line
(https://github.com/mlc-ai/xgrammar/issues/800). Here one rule stands for "at most so many characters more". All strings of a
grammar share these rules, so a grammar with several such strings compiles about as fast as with one. Long strings are counted in
blocks.

Owns as well what pydantic and zod write that restricts nothing more (lengths that a format has anyhow, a pattern beside its
format, formats that no validator knows), and the formats as regular expressions whose every match a validator accepts: xgrammar's
own date has 30 February, its json-pointer bare quotation marks. They may leave out rare values that are right (leap seconds, very
long names), and hold none that is wrong. Pure; knows nothing of other types.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any, Literal, TypeAlias

from common.errors import BadRequest

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


_YEAR, _DAY_OF_MONTH = "[0-9]{4}", "0[1-9]|[12][0-9]"
_LEAP_YEAR = "[0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00"
_MONTH_DAY = f"(0[13578]|1[02])-({_DAY_OF_MONTH}|3[01])|(0[469]|11)-({_DAY_OF_MONTH}|30)|02-(0[1-9]|1[0-9]|2[0-8])"
_DATE = f"({_YEAR}-({_MONTH_DAY})|({_LEAP_YEAR})-02-29)"
_HOUR_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](\.[0-9]{{1,9}}|)(Z|[+\-]{_HOUR_MINUTE})"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
_IPV4 = rf"{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}"
_HEX = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        f"({_HEX}:){{7}}{_HEX}",
        f"({_HEX}:){{1,7}}:",
        *(f"({_HEX}:){{1,{left}}}(:{_HEX}){{1,{7 - left}}}" for left in range(1, 7)),
        f":((:{_HEX}){{1,7}}|:)",
        f"::([fF]{{4}}:)?{_IPV4}",
    ]
)
_SIGN, _INNER = "[A-Za-z0-9]", r"[A-Za-z0-9\-]"


def _label(most: int) -> str:
    """A label of a host's name, of at most so many characters. The third and fourth are not both hyphens: behind "xn--" stands a
    code whose right values no expression tells."""
    long = rf"{_INNER}({_SIGN}{_INNER}|-{_SIGN}){_INNER}{{0,{most - 5}}}{_SIGN}"
    return f"{_SIGN}({_INNER}?{_SIGN}|{_INNER}{{2}}{_SIGN}|{long})?"


_LABELS = _label(63), rf"(\.{_label(37)})"
"""The first, and another: names of six are no longer than 253."""
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]"
_LOCAL = rf"({_ATOM}{{1,30}}(\.{_ATOM}{{1,16}}){{0,2}}|{_ATOM}{{1,16}}(\.{_ATOM}{{1,7}}){{3,6}})"
_POINTER = r"(/([^/~\"\\\x00-\x1f]|~[01])*)*"

PATTERNS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "hostname": "".join(_LABELS) + "{0,5}",
    "email": f"{_LOCAL}@{_LABELS[0]}{_LABELS[1]}{{1,4}}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(0|[1-9][0-9]{{0,8}})(#|{_POINTER})",
}
FORMATS = frozenset(PATTERNS) | {"duration", "uuid", "uri", "uri-reference", "uri-template"}
"""xgrammar's own of the others are right."""


KEYWORDS = ("pattern", "format", "minLength", "maxLength")
_UNHELD = {"regex", "idn-email", "idn-hostname", "iri", "iri-reference"}
"""Formats that validators check, and that are not supported. All others are annotations."""
LENGTHS: Mapping[str, tuple[int, int | None]] = {
    "date": (10, 10),
    "time": (9, 24),
    "date-time": (20, 35),
    "uuid": (36, 36),
    "ipv4": (7, 15),
    "ipv6": (2, 39),
    "email": (3, None),
    "hostname": (1, None),
    "uri": (2, None),
}
"""The length of every text of a format: at least so many characters, and at most."""
_MORE = r"(%[0-9A-F]{2}[A-Za-z0-9._~!$&'()*+,;=:@/\-]{0,24}){0,4}"
_LINE = rf"[A-Za-z0-9._~!$&'()*+,;=:@/\-]{{0,600}}{_MORE}"
SHORT_URI = rf"[A-Za-z][A-Za-z0-9+.\-]{{0,15}}://[A-Za-z0-9.\-]{{1,100}}(:[0-9]{{1,4}})?(/{_LINE})?(\?{_LINE})?(#[A-Za-z0-9._~=\-]{{0,60}})?"
SHORT_URI_LENGTH = 1700
_UUID = re.compile(r"uuid[1-8]")
_UUID_PATTERN = re.compile(
    r"\^\((\[0-9a-fA-F\]\{8\}-\[0-9a-fA-F\]\{4\}-([1-8]|\[1-8\])\[0-9a-fA-F\]\{3\}-\[89abAB\]\[0-9a-fA-F\]\{3\}-\[0-9a-fA-F\]\{12\})"
    r"(\|[0f]{8}(-[0f]{4}){3}-[0f]{12})*\)\$"
)
"""zod's patterns of UUIDs. Each text of theirs is one."""
_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_OWN_EMAIL = (
    r"[A-Za-z0-9_+\-]{1,24}(\.[A-Za-z0-9_+\-]{1,12}){0,3}@([A-Za-z0-9]{1,20}(-[A-Za-z0-9]{1,16}){0,2}\.){1,3}[A-Za-z]{2,10}"
)
_DAY = (
    r"(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])-"
    r"(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))"
)
_MINUTE = r"(?:[01]\d|2[0-3]):[0-5]\d"
PATTERNS_FOR: Mapping[tuple[str | None, str], str] = {
    (None, _DECIMAL): r"^[+\-]?([0-9]+\.?[0-9]*|\.[0-9]+)$",
    ("email", _EMAIL): f"^{_OWN_EMAIL}$",
    ("date", f"^{_DAY}$"): f"^({PATTERNS['date']})$",
    ("date-time", rf"^{_DAY}T(?:{_MINUTE}(?::[0-5]\d(?:\.\d+)?)?(?:Z))$"): (
        rf"^{PATTERNS['date']}T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,9}}|)Z$"
    ),
}
"""By a format and a pattern of zod's, or pydantic's: a pattern whose texts match both."""


def plain_keywords(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What to write in place of a string's pattern, format and lengths. They may still be too many to be held."""
    kept = {key: schema[key] for key in KEYWORDS if key in schema}
    if kept.get("minLength") == 0:
        del kept["minLength"]
    form, pattern = kept.get("format"), kept.get("pattern")
    if form is not None and form not in FORMATS | _UNHELD:
        del kept["format"]
        if _UUID.fullmatch(form) and not kept:
            kept["pattern"] = f"^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{form[-1]}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
        return kept
    if pattern is not None and (form, pattern) in PATTERNS_FOR:
        del kept["pattern"]
        kept = {"pattern": PATTERNS_FOR[form, pattern]} | {key: kept[key] for key in kept if key != "format"}
    elif form == "uuid" and pattern is not None and _UUID_PATTERN.fullmatch(pattern):
        del kept["format"]
    if form is None or form not in LENGTHS:
        return kept
    shortest, longest = LENGTHS[form]
    if kept.get("minLength", 0) <= shortest:
        kept.pop("minLength", None)
    if "maxLength" in kept and longest is not None and kept["maxLength"] >= longest:
        del kept["maxLength"]
    if form == "uri" and kept.keys() == {"format", "maxLength"} and kept["maxLength"] >= SHORT_URI_LENGTH:
        return {"pattern": f"^{SHORT_URI}$"}
    return kept


_LAST, _CARET = 0x10FFFF, 0x5E
_ESCAPED_IN_JSON = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)]
_DIGIT = [(0x30, 0x39)]
_WORD_CLASS = [*_DIGIT, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE = [(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
_SPACE += [(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
_POINT = [(0, 9), (11, 12), (14, 0x2027), (0x202A, _LAST)]
_NAMED = {"d": _DIGIT, "w": _WORD_CLASS, "s": _SPACE}
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
