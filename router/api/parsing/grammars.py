"""Grammars that hold an answer to a format: calls, thoughts, and what else a client asks for, as one structural tag.

Owns which calls an answer may or must have, and how arguments look that are no JSON. Structural tags
(https://xgrammar.mlc.ai/docs/tutorials/structural_tag) are built as plain data: the instances' xgrammar reads them. What a
grammar lets through, the reader of the same format reads as calls. What a format cannot be held to is refused by name.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, assert_never

import msgspec

from common.errors import BadRequest
from common.sampling_params import Grammar
from engine.grammar.grammars import check_text
from engine.grammar.json_schemas import as_object, check_schema
from engine.grammar.strings import MAX_GRAMMAR_CHARS
from router.api.parsing.formats import AnswerFormat
from router.api.parsing.readers import ToolFormat, around, followed, kinds_in
from router.api.tools import Function, ToolUse

Format: TypeAlias = Mapping[str, Any]
Functions: TypeAlias = Sequence[tuple[str, Format]]
"""Names, and schemas of arguments."""
_ANY_OBJECT = {"type": "object"}
_ANY_TEXT = {"type": "any_text"}
_NOTHING = {"type": "grammar", "grammar": 'root ::= ""'}


def answer_grammar(use: ToolUse, format: AnswerFormat, response: Grammar | None, *, field: str, opened: bool) -> Grammar | None:
    """What the answer must match; None: anything.

    response: what its content must match; where calls are required there is none. field: the
    client's field that holds `response`. opened: the answer begins within thoughts. Raises BadRequest
    for a schema that no answer can be held to, and for one that the format cannot be held to.
    """
    tools, thoughts = format.tools if use.callable else None, format.thoughts
    answer = None if tools is None else _answer(use, tools, format.before_content, response)
    if answer is None:
        if response is None or (thoughts is None and not format.before_content):
            return response
        answer = _after(format.before_content, _format_of(response))
    if thoughts is not None:
        thought = _tag("" if opened else thoughts.begin, _ANY_TEXT | {"excludes": [thoughts.begin, thoughts.end]}, thoughts.end)
        blank = _const(thoughts.then) if thoughts.then else {"type": "regex", "pattern": r"\n{0,2}"}
        before = _one_after_other(thought, blank)
        answer = _one_after_other(before if opened else _optional(before), answer)
    grammar = Grammar("structural_tag", msgspec.json.encode({"type": "structural_tag", "format": answer}).decode())
    check_text(grammar, field if tools is None else "tools")
    return grammar


def _answer(use: ToolUse, format: ToolFormat, before_content: str, response: Grammar | None) -> Format | None:
    """The content with its calls; None when both may be anything."""
    parallel = use.parallel and format.separator is not None
    if use.required or response is not None:
        calls = _calls(format, [(one.name, _schema(one, one.strict is not False)) for one in use.callable], parallel=parallel)
        return calls if response is None or use.required else _either(calls, _after(before_content, _format_of(response)))
    if use.parallel and not any(one.strict for one in use.callable):
        return None
    functions = [(one.name, _schema(one, one.strict is True)) for one in use.callable]
    if not format.stands_alone:
        return _text_and_calls(format, functions, parallel=parallel)
    bare = [f"{around(format.all)[0]}{name}{format.brackets[0]}" for name, _ in functions] if format.brackets else []
    text = _ANY_TEXT | {"excludes": [*(mark for mark in format.opens if mark.strip()), *bare]}
    return _either(_calls(format, functions, parallel=parallel), _after(before_content, text))


def _schema(function: Function, is_strict: bool) -> Format:
    return function.parameters if is_strict and function.parameters is not None else _ANY_OBJECT


def _calls(format: ToolFormat, functions: Functions, *, parallel: bool) -> dict[str, Any]:
    """One call of these functions or more, and nothing else."""
    many = {
        "type": "tags_with_separator",
        "tags": _call_tags(format, functions),
        "separator": format.separator or "",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    before, after = around(format.all)
    return _tag(before, many, after) if before else many


def _text_and_calls(format: ToolFormat, functions: Functions, *, parallel: bool) -> dict[str, Any]:
    """Any text, in which what begins as a call is one call of these functions or more."""
    calls, (trigger, *others) = _calls(format, functions, parallel=parallel), format.opens
    tags = [calls] if around(format.all)[0] else _call_tags(format, functions)
    text = {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": not parallel}
    if not format.bare[0]:
        return text | ({"excludes": others} if others else {})
    bare = around(format.call)[0].removesuffix(': "')
    text["triggers"] = [trigger, "\n" + bare]
    text["tags"] = [tag | {"begin": start + tag["begin"]} for tag in tags for start in format.opens]
    text["excludes"] = [between + bare for between in ("; ", ", ", "[")]  # what the reader would read as calls too
    first = {"type": "regex", "pattern": r"[^{<\[\s]"}
    return _either(calls, _one_after_other(first, text), text | {"at_least_one": True})


def _call_tags(format: ToolFormat, functions: Functions) -> list[dict[str, Any]]:
    tags, (before_name, *after_name, end) = [], around(format.call)
    for name, schema in functions:
        arguments = _arguments(format, name, schema) if format.argument else _json(schema)
        for after_number in after_name[1:]:
            arguments = _one_after_other({"type": "regex", "pattern": "[0-9]{1,4}"}, _const(after_number), arguments)
        tags.append(_tag(f"{before_name}{name}{after_name[0]}{format.brackets[:1]}", arguments, format.brackets[1:] + end))
    return tags


def _arguments(format: ToolFormat, function: str, schema: Format) -> Format:
    """Arguments that are written one by one, in the order of the schema. Raises BadRequest."""
    before_key, after_key, _ = around(format.argument)
    check_schema(schema, "tools")
    for key in sorted(schema.keys() & _OF_ALL):
        raise _refusal(format, function, f"{key} of all arguments")
    others, named = schema.get("additionalProperties"), as_object(schema.get("properties"))
    if len(named) * len(msgspec.json.encode(_defs(schema))) > MAX_GRAMMAR_CHARS:
        raise _refusal(format, function, "so many arguments with $defs of that size")
    if format.comma and len(named) > _MOST_OPTIONAL and not schema.get("required"):
        raise _refusal(format, function, f"more than {_MOST_OPTIONAL} arguments of which none is required")
    if "properties" in schema or others is False:
        parts = []
        for key, each in named.items():
            if not _KEY.fullmatch(key):
                raise _refusal(format, function, f"the name {key[:64]!r}")
            value = _argument(format, f"{function}.{key}", f"{before_key}{key}{after_key}", each, schema)
            parts.append((value, key in schema.get("required", [])))
        return _joined(parts, format.comma)
    any_key = {"type": "regex", "pattern": _KEY.pattern}
    value = _argument(format, function, "", others, schema)
    each = _one_after_other(_tag(before_key, any_key, after_key), value)
    return _optional(_one_after_other(each, {"type": "star", "content": _after(format.comma, each)}))


def _joined(parts: Sequence[tuple[Format, bool]], separator: str) -> Format:
    """These parts, each with whether it must be there, and the separator between those that are."""
    rest = [_after(separator, part) if is_required else _optional(_after(separator, part)) for part, is_required in parts]
    if not separator or not parts:
        return _one_after_other(*rest or (_NOTHING,))
    must = next((at for at, (_, is_required) in enumerate(parts) if is_required), None)
    if must is None:
        return _optional(_either(*(_one_after_other(part, *rest[at + 1 :]) for at, (part, _) in enumerate(parts))))
    first = (_optional(_one_after_other(part, _const(separator))) for part, _ in parts[:must])
    return _one_after_other(*first, parts[must][0], *rest[must + 1 :])


def _argument(format: ToolFormat, where: str, begin: str, schema: Any, root: Format) -> Format:
    """A value with what stands around it. begin: what stands before it. where: the argument, for errors. Raises BadRequest."""
    defs = _defs(root)
    value, kinds, end = _json(as_object(schema) | defs), kinds_in(schema, root), around(format.argument)[-1]
    schema = followed(schema, root)
    if format.brackets and not format.quote:
        return _tag(begin, _python(schema, defs), "")
    if kinds and "string" not in kinds:
        if format.quote and kinds & {"array", "object"}:
            raise _refusal(format, where, "an array or an object")
        return _tag(begin, value, end)
    end = end or format.quote
    texts = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(texts, list) and all(isinstance(text, str) and end.strip() not in text for text in texts):
        return _either(*(_const(begin + format.quote + text + end) for text in texts))
    options = [followed(option, root) for option in schema.get("anyOf") or schema.get("oneOf") or [schema]]
    for option in options:
        if not option.keys() <= _PLAIN or kinds_in(option, root) & {"array", "object"}:
            raise _refusal(format, where, f"{', '.join(sorted(option.keys() - _PLAIN)) or 'a structure'} beside texts")
    text, others = _tag(begin + format.quote, _ANY_TEXT, end.strip()), sorted((kinds or _SCALARS) - {"string"})
    if format.quote:
        return _either(text, _tag(begin, _json({"type": others}), "")) if others else text
    return _one_after_other(text, _const(end[len(end.rstrip()) :])) if end != end.rstrip() else text


def _python(schema: Format, defs: Format) -> Format:
    """A value in Python; within lists and dictionaries, which the reader reads in JSON too, words are those of JSON."""
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return _either(*(_python(option, defs) for option in options))
    words = _WORDS.get(str(schema.get("type"))) if schema.keys() <= _PLAIN else None
    return _either(*map(_const, words)) if words else _json({**schema, **defs})


def _defs(schema: Format) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


_MOST_OPTIONAL = 16
_WORDS = {"boolean": ("True", "False"), "null": ("None",)}
_OF_ALL = {"$ref", "anyOf", "oneOf", "allOf", "enum", "const", "patternProperties", "minProperties", "maxProperties"}
_SCALARS = {"boolean", "null", "number"}
_PLAIN = {"type", "title", "description", "default", "examples"}
_KEY = re.compile("[A-Za-z_][A-Za-z0-9_.-]{0,63}")


def _refusal(format: ToolFormat, where: str, what: str) -> BadRequest:
    message = f"tools: {where}: calls of the format {format.names[0]} cannot be held to {what}: leave it out or send strict=false"
    return BadRequest(message, field="tools")


def _format_of(grammar: Grammar) -> Format:
    match grammar.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": msgspec.json.decode(grammar.text)}
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case "structural_tag":
            return dict(msgspec.json.decode(grammar.text)["format"])
        case _:
            assert_never(grammar.kind)


def _tag(begin: str, content: Format, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _either(*options: Format) -> dict[str, Any]:
    return {"type": "or", "elements": options}


def _one_after_other(*parts: Format) -> dict[str, Any]:
    return {"type": "sequence", "elements": parts}


def _json(schema: Format) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _optional(part: Format) -> dict[str, Any]:
    return {"type": "optional", "content": part}


def _after(text: str, part: Format) -> Format:
    """The part, with this text before it."""
    return _one_after_other(_const(text), part) if text else part
