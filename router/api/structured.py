"""Structured output: the ways in which clients of OpenAI, vLLM and SGLang say what an answer must match, read into one grammar.

Owns the forms of these fields, and what a field of each name asks for. The grammar is checked here as far as that needs no
vocabulary; instances compile it. Fields:
https://platform.openai.com/docs/guides/structured-outputs, https://docs.vllm.ai/en/stable/features/structured_outputs.html,
https://docs.sglang.io/advanced_features/structured_outputs.html.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import asdict

from common.errors import BadRequest
from common.sampling_params import Grammar
from engine.grammar.grammars import check_text
from router.api.bodies import json_in

MAX_CHOICES = 1024

Schema: TypeAlias = Annotated[
    dict[str, Any] | bool | str, Meta(description="A JSON schema, as an object or as its text. The answer validates against it.")
]
Regex: TypeAlias = Annotated[
    str, Meta(description="A regular expression that the whole answer matches; `.` does not match a line break.")
]
Ebnf: TypeAlias = Annotated[str, Meta(description="An EBNF grammar as xgrammar reads it; `root` is what the answer matches.")]
ChoiceOfTexts: TypeAlias = Annotated[
    list[str], Meta(min_length=1, max_length=MAX_CHOICES, description="The answer is one of these texts.")
]
StructuralTag: TypeAlias = Annotated[
    dict[str, Any] | str, Meta(description="One of xgrammar's structural tags, as an object or as its text.")
]


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: Schema
    name: str = ""
    """A label; it changes nothing."""
    description: str | None = None
    """A label; it changes nothing."""
    strict: bool | None = None
    """The answer validates against the schema, whatever this says."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that validates against a schema."""

    json_schema: NamedSchema
    """What the answer must be."""


class FlatSchemaFormat(NamedSchema, frozen=True, tag_field="type", tag="json_schema"):
    """JSON that validates against a schema, which stands beside the type."""


class Structure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """JSON between two marks."""

    begin: str
    """The mark before the JSON."""
    schema: Schema
    end: str
    """The mark behind it."""


class StructuralTagFormat(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="structural_tag"
):
    """Text in which marks begin something that has a format. Either a format of xgrammar's, or triggers with structures."""

    format: dict[str, Any] | None = None
    """The format of a structural tag, as xgrammar reads it."""
    triggers: list[str] = []
    """A structure must follow where one of these texts begins it."""
    structures: list[Structure] = []
    """What may follow."""


ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`. Exactly one of these must be there."""

    json: Schema | None = None
    regex: Regex | None = None
    choice: ChoiceOfTexts | None = None
    grammar: Ebnf | None = None
    json_object: bool | None = None
    """The answer is a JSON object."""
    structural_tag: StructuralTag | None = None


ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


def grammar_of(fields: msgspec.Struct, prefix: str = "") -> tuple[Grammar | None, str]:
    """What the answer must match, and the field that says so; None and "": anything. prefix: in front of the fields' names in
    errors. Raises BadRequest for more than one grammar, and for one that is too large or that no answer can be held to."""
    found = list(_grammars(fields, prefix))
    if not found:
        return None, ""
    if len(found) > 1:
        (one, _), (other, _), *_ = found
        raise BadRequest(f"{one} and {other} both say what the answer must match: send one of them", field=other)
    ((name, grammar),) = found
    check_text(grammar, name)
    return grammar, name


def _grammars(fields: msgspec.Struct, prefix: str) -> Iterator[tuple[str, Grammar]]:
    """The grammars in these fields, each with the field's name. Raises BadRequest."""
    for name, value in asdict(fields).items():
        if isinstance(value, StructuredOutputs):
            inside = list(_grammars(value, f"{prefix}{name}."))
            if not inside:
                fix = "send one of json, regex, choice, grammar, json_object and structural_tag, or leave it out"
                raise BadRequest(f"structured_outputs is empty: {fix}", field="structured_outputs")
            yield from inside
        elif value is not None and name in _MEANINGS and (grammar := _MEANINGS[name](value)) is not None:
            yield prefix + name, grammar


def format_grammar(format: ResponseFormat | NamedSchema | None) -> Grammar | None:
    """What an answer of this format must match; None: anything. Raises BadRequest."""
    match format:
        case JsonObjectFormat():
            return ANY_OBJECT
        case JsonSchemaFormat(json_schema=NamedSchema(schema=schema)) | NamedSchema(schema=schema):
            return _of_json("json_schema", schema)
        case StructuralTagFormat():
            return _of_json("structural_tag", _structural_tag(format))
        case _:
            return None


def checked_format(format: ResponseFormat | NamedSchema | None, field: str) -> Grammar | None:
    """The same, for the field that says it. Raises BadRequest, also for a grammar that no answer can be held to."""
    grammar = format_grammar(format)
    if grammar is not None:
        check_text(grammar, f"{field}.schema")
    return grammar


def one_of(choices: list[str]) -> Grammar:
    """One of these texts. The strings of EBNF are escaped like those of JSON."""
    return Grammar("ebnf", "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def _of_json(kind: Literal["json_schema", "structural_tag"], value: dict[str, Any] | bool | str) -> Grammar:
    return Grammar(kind, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


_SCHEMA, _REGEX, _EBNF = partial(_of_json, "json_schema"), partial(Grammar, "regex"), partial(Grammar, "ebnf")
_MEANINGS: Mapping[str, Callable[[Any], Grammar | None]] = {
    "json_schema": _SCHEMA,
    "guided_json": _SCHEMA,
    "json": _SCHEMA,
    "regex": _REGEX,
    "guided_regex": _REGEX,
    "ebnf": _EBNF,
    "guided_grammar": _EBNF,
    "grammar": _EBNF,
    "choice": one_of,
    "guided_choice": one_of,
    "json_object": lambda is_wanted: ANY_OBJECT if is_wanted else None,
    "structural_tag": partial(_of_json, "structural_tag"),
    "response_format": format_grammar,
}
"""What the value of a field of this name asks for."""


def _structural_tag(format: StructuralTagFormat) -> dict[str, Any]:
    """As xgrammar reads it. Triggers with structures are the older form."""
    if (format.format is None) == (not format.structures):
        fix = "send either format, or triggers and structures"
        raise BadRequest(f"response_format of type structural_tag: {fix}", field="response_format")
    if format.format is not None:
        return {"type": "structural_tag", "format": format.format}
    tags: list[dict[str, Any]] = []
    for index, structure in enumerate(format.structures):
        schema = structure.schema
        if isinstance(schema, str):
            schema = json_in(schema, f"response_format.structures[{index}].schema")
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"begin": structure.begin, "content": content, "end": structure.end})
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": format.triggers, "tags": tags}}
