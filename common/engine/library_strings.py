r"""How libraries write the schemas of strings, in words of which each can be held by itself.

Owns what pydantic and zod add that restricts nothing more: lengths that a format has anyhow, a pattern beside its format, formats
that no validator knows. What comes back holds no value that the schema forbids. Pure; knows nothing of other types.
"""

import re
from collections.abc import Mapping
from typing import Any

from common.engine.string_formats import FORMATS, PATTERNS

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
"""Of every text of a format: at least so many characters, and at most."""
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
