"""Structured output: the ways in which clients of OpenAI, vLLM and SGLang say what an answer must match, read into one grammar.

Owns these fields. The grammar is checked here as far as that needs no vocabulary; instances compile it. Fields:
https://platform.openai.com/docs/guides/structured-outputs, https://docs.vllm.ai/en/stable/features/structured_outputs.html,
https://docs.sglang.io/advanced_features/structured_outputs.html.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from common.errors import BadRequest
from common.sampling_params import Grammar
from engine.grammar.grammars import check_text
from router.api.bodies import json_in

MAX_CHOICES = 1024

Schema: TypeAlias = Annotated[
    dict[str, Any] | bool | str, Meta(description="A JSON schema, as an object or as its text. The answer validates against it.")
]
Regex: TypeAlias = Annotated[
    str, Meta(description="A regular expression that the whole answer matches; `.` is no end of a line.")
]
Ebnf: TypeAlias = Annotated[str, Meta(description="An EBNF grammar as xgrammar reads it; `root` is what the answer matches.")]
Choices: TypeAlias = Annotated[
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
    name: Annotated[str, Meta(description="A label; it changes nothing.")] = ""
    description: Annotated[str | None, Meta(description="A label; it changes nothing.")] = None
    strict: Annotated[bool | None, Meta(description="The answer validates against the schema, whatever this says.")] = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that validates against a schema."""

    json_schema: Annotated[NamedSchema, Meta(description="What the answer must be.")]


class Structure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """JSON between two marks."""

    begin: Annotated[str, Meta(description="The mark before the JSON.")]
    schema: Schema
    end: Annotated[str, Meta(description="The mark behind it.")]


class StructuralTagFormat(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="structural_tag"
):
    """Text in which marks begin something that has a format. Either a format of xgrammar's, or triggers with structures."""

    format: Annotated[dict[str, Any] | None, Meta(description="The format of a structural tag, as xgrammar reads it.")] = None
    triggers: Annotated[list[str], Meta(description="A structure must follow where one of these texts begins it.")] = []
    structures: Annotated[list[Structure], Meta(description="What may follow.")] = []


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`. Exactly one of these must be there."""

    json: Schema | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Ebnf | None = None
    json_object: Annotated[bool | None, Meta(description="The answer is a JSON object.")] = None
    structural_tag: StructuralTag | None = None


class GrammarFields(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's fields."""

    json_schema: Schema | None = None
    regex: Regex | None = None
    ebnf: Ebnf | None = None

    def asked(self) -> Iterator[tuple[str, Grammar]]:
        """The grammars that are asked for, each with its field. Raises BadRequest."""
        if self.json_schema is not None:
            yield "json_schema", Grammar("json_schema", _text(self.json_schema))
        if self.regex is not None:
            yield "regex", Grammar("regex", self.regex)
        if self.ebnf is not None:
            yield "ebnf", Grammar("ebnf", self.ebnf)


class StructuredFields(GrammarFields, frozen=True, kw_only=True):
    """The fields of the endpoints of OpenAI's API."""

    response_format: Annotated[
        TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat | None,
        Meta(description="What the answer must be; without it: any text."),
    ] = None
    structured_outputs: Annotated[StructuredOutputs | None, Meta(description="What the answer must match, as in vLLM.")] = None
    guided_json: Annotated[Schema | None, Meta(description="Older name of structured_outputs.json.")] = None
    guided_regex: Annotated[Regex | None, Meta(description="Older name of structured_outputs.regex.")] = None
    guided_choice: Annotated[Choices | None, Meta(description="Older name of structured_outputs.choice.")] = None
    guided_grammar: Annotated[Ebnf | None, Meta(description="Older name of structured_outputs.grammar.")] = None

    def asked(self) -> Iterator[tuple[str, Grammar]]:
        yield from super().asked()
        match self.response_format:
            case JsonObjectFormat():
                yield "response_format", ANY_OBJECT
            case JsonSchemaFormat(json_schema=named):
                yield "response_format", Grammar("json_schema", _text(named.schema))
            case StructuralTagFormat():
                yield "response_format", Grammar("structural_tag", _text(_structural_tag(self.response_format)))
        if self.structured_outputs is not None:
            yield from _asked_of_vllm(self.structured_outputs)
        if self.guided_json is not None:
            yield "guided_json", Grammar("json_schema", _text(self.guided_json))
        if self.guided_regex is not None:
            yield "guided_regex", Grammar("regex", self.guided_regex)
        if self.guided_choice is not None:
            yield "guided_choice", one_of(self.guided_choice)
        if self.guided_grammar is not None:
            yield "guided_grammar", Grammar("ebnf", self.guided_grammar)


ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


def grammar_of(fields: GrammarFields, prefix: str = "") -> Grammar | None:
    """What the answer must match; None: anything. prefix: in front of the fields' names in errors. Raises BadRequest for more
    than one grammar, and for one that is too large or asks for what no answer can be held to."""
    asked = list(fields.asked())
    if not asked:
        return None
    if len(asked) > 1:
        (one, _), (other, _), *_ = asked
        message = f"{prefix}{one} and {prefix}{other} both say what the answer must match: send one of them"
        raise BadRequest(message, field=prefix + other)
    ((name, grammar),) = asked
    check_text(grammar, prefix + name)
    return grammar


def schema_grammar(schema: dict[str, Any] | bool | str) -> Grammar:
    return Grammar("json_schema", _text(schema))


def structural_tag_of(tag: dict[str, Any] | str) -> Grammar:
    return Grammar("structural_tag", _text(tag))


def one_of(choices: list[str]) -> Grammar:
    """One of these texts. The strings of EBNF are escaped like those of JSON."""
    return Grammar("ebnf", "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def _asked_of_vllm(asked: StructuredOutputs) -> Iterator[tuple[str, Grammar]]:
    found: list[tuple[str, Grammar]] = []
    if asked.json is not None:
        found.append(("json", Grammar("json_schema", _text(asked.json))))
    if asked.regex is not None:
        found.append(("regex", Grammar("regex", asked.regex)))
    if asked.choice is not None:
        found.append(("choice", one_of(asked.choice)))
    if asked.grammar is not None:
        found.append(("grammar", Grammar("ebnf", asked.grammar)))
    if asked.json_object:
        found.append(("json_object", ANY_OBJECT))
    if asked.structural_tag is not None:
        found.append(("structural_tag", structural_tag_of(asked.structural_tag)))
    if not found:
        fix = "send one of json, regex, choice, grammar, json_object and structural_tag, or leave it out"
        raise BadRequest(f"structured_outputs is empty: {fix}", field="structured_outputs")
    for name, grammar in found:
        yield f"structured_outputs.{name}", grammar


def _structural_tag(asked: StructuralTagFormat) -> dict[str, Any]:
    """As xgrammar reads it. Triggers with structures are the older form."""
    if (asked.format is None) == (not asked.structures):
        fix = "send either format, or triggers and structures"
        raise BadRequest(f"response_format of type structural_tag: {fix}", field="response_format")
    if asked.format is not None:
        return {"type": "structural_tag", "format": asked.format}
    tags = [
        {"begin": each.begin, "content": {"type": "json_schema", "json_schema": _parsed(each.schema, index)}, "end": each.end}
        for index, each in enumerate(asked.structures)
    ]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": asked.triggers, "tags": tags}}


def _parsed(schema: dict[str, Any] | bool | str, index: int) -> Any:
    return json_in(schema, f"response_format.structures[{index}].schema") if isinstance(schema, str) else schema


def _text(value: dict[str, Any] | bool | str) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
