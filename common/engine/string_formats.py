r"""The formats of strings, as regular expressions whose every match a validator accepts.

Owns the patterns, and which formats are left to xgrammar: its own date has 30 February, its json-pointer bare quotation marks.
A pattern may leave out rare values that are right (leap seconds, very long names); it holds none that is wrong.
"""

from collections.abc import Mapping

_YEAR, _DAY = "[0-9]{4}", "0[1-9]|[12][0-9]"
_LEAP_YEAR = "[0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00"
_MONTH_DAY = f"(0[13578]|1[02])-({_DAY}|3[01])|(0[469]|11)-({_DAY}|30)|02-(0[1-9]|1[0-9]|2[0-8])"
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
    """Of a host's name: at most so many characters. The third and fourth are not both hyphens: behind "xn--" stands a code whose
    right values no expression tells."""
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
