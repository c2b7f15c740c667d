"""Which structural tags an answer can be held to: xgrammar's formats with the keys that it reads, and what they hold.

Owns the allow-list. xgrammar ignores a key that it does not know, so such a tag is refused, with the place in it. Left out are
the XML forms of JSON, whose white space has no end, and keys with which parts of a schema are not enforced. Pure.
https://xgrammar.mlc.ai/docs/tutorials/structural_tag
"""

from collections.abc import Mapping
from typing import Any

from common.errors import BadRequest
from engine.grammar.json_schemas import as_list, check_regex, check_schema
from engine.grammar.strings import check_size

MAX_WHITESPACE = 16
"""So many characters of white space at most between two parts of a JSON text. Without a limit, a model may write nothing else."""
_CALLS = {"tags", "at_least_one", "stop_after_first"}
_KEYS: Mapping[str, set[str]] = {
    "const_string": {"value"},
    "json_schema": {"json_schema", "style", "any_order", "max_whitespace_cnt"},
    "any_text": {"excludes", "max_tokens", "max_chars"},
    "token": {"token"},
    "exclude_token": {"exclude_tokens"},
    "any_tokens": {"exclude_tokens", "max_tokens"},
    "grammar": {"grammar"},
    "regex": {"pattern"},
    "sequence": {"elements"},
    "or": {"elements"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": _CALLS | {"triggers", "excludes"},
    "token_triggered_tags": _CALLS | {"trigger_tokens", "exclude_tokens"},
    "tags_with_separator": _CALLS | {"separator"},
    "optional": {"content"},
    "plus": {"content"},
    "star": {"content"},
    "repeat": {"content", "min", "max"},
    "dispatch": {"rules", "loop", "excludes"},
    "token_dispatch": {"rules", "loop", "exclude_tokens"},
}
_ONLY: Mapping[str, Any] = {"style": "json", "any_order": False}
"""Keys with the one value that is supported."""


def check_structural_tag(tag: Any, name: str) -> None:
    """Raises BadRequest for a structural tag that answers could not be held to. name: of the field, for the message."""
    if not isinstance(tag, dict) or tag.keys() != {"type", "format"} or tag["type"] != "structural_tag":
        raise BadRequest(f'{name} must be {{"type": "structural_tag", "format": …}}', field=name)
    _check(tag["format"], name, "format")


def _check(form: Any, name: str, where: str, default: str | None = None) -> None:
    """default: the type where none is given."""

    def refusal(problem: str) -> BadRequest:
        return BadRequest(f"{name}: at {where[-256:]}: {problem}", field=name)

    if not isinstance(form, dict):
        raise refusal("a format must be an object")
    kind = form.get("type", default)
    if not isinstance(kind, str) or kind not in _KEYS:
        raise refusal(f"type {str(kind)[:64]!r} is not supported: use one of {', '.join(sorted(_KEYS))}")
    for key in sorted(form.keys() - _KEYS[kind] - {"type"}):
        raise refusal(f"{key[:64]} is not supported in a format of type {kind}: leave it out")
    for key, only in _ONLY.items():
        if form.get(key, only) != only:
            raise refusal(f"{key} is supported as {only!r}: leave it out")
    match kind:
        case "json_schema":
            spaces = form.get("max_whitespace_cnt")
            if spaces is not None and not (type(spaces) is int and 1 <= spaces <= MAX_WHITESPACE):
                raise refusal(f"max_whitespace_cnt must be 1 to {MAX_WHITESPACE}")
            check_schema(form.get("json_schema"), name)
        case "regex" if isinstance(form.get("pattern"), str):
            check_regex(form["pattern"], name)
        case "grammar" if isinstance(form.get("grammar"), str):
            check_size(name, "ebnf", form["grammar"])
    for key, each, inner in _parts(form):
        _check(each, name, f"{where}.{key}", inner)


def _parts(form: dict[str, Any]) -> list[tuple[str, Any, str | None]]:
    """The formats in a format: where, what, and the type of one that gives none. What is no format at all xgrammar refuses."""
    parts: list[tuple[str, Any, str | None]] = [("content", form["content"], None)] if "content" in form else []
    parts += [(key, form[key], "token") for key in ("begin", "end") if isinstance(form.get(key), dict)]
    for key, default in (("elements", None), ("tags", "tag")):
        parts += [(f"{key}[{at}]", each, default) for at, each in enumerate(as_list(form.get(key)))]
    for at, rule in enumerate(as_list(form.get("rules"))):
        parts.append((f"rules[{at}][1]", rule[1] if isinstance(rule, list) and len(rule) == 2 else None, None))
    return parts
