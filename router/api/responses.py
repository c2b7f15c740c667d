"""The body of POST /v1/responses, as a conversation.

Owns its own fields and items. Nothing is stored: every request brings its whole conversation. Fields:
https://platform.openai.com/docs/api-reference/responses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from common.errors import BadRequest
from common.sampling_params import Grammar
from engine.grammar.grammars import check_text
from router.api.chat import ChatRequest, Effort, arguments_of
from router.api.fields import (
    NEUTRAL_ITEM_VALUES,
    NEUTRAL_REASONING_VALUES,
    NEUTRAL_RESPONSE_VALUES,
    CacheSalt,
    Function,
    Label,
    MinP,
    Priority,
    SamplingFields,
    Seed,
    Stream,
    Temperature,
    Timeout,
    Tokens,
    ToolUse,
    TopK,
    TopP,
    checked_stops,
    convert,
    drop_neutral,
    object_in,
    tool_use,
)
from router.api.structured import ANY_OBJECT, JsonObjectFormat, NamedSchema, TextFormat, schema_grammar


class InputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    text: Annotated[str, Meta(description="A piece of the message.")]


class OutputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    """A part of an answer that is sent back."""

    text: Annotated[str, Meta(description="A piece of the message.")]
    annotations: Annotated[list[Any], Meta(description="As the answer had them. They change nothing.")] = []
    logprobs: Annotated[list[Any] | None, Meta(description="As the answer had them. They change nothing.")] = None


class ThoughtText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"):
    text: Annotated[str, Meta(description="A piece of the thoughts.")]


class _Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    id: Annotated[str | None, Meta(description="As the answer had it. It changes nothing.")] = None
    status: Annotated[str | None, Meta(description="As the answer had it. It changes nothing.")] = None


class MessageItem(_Item, frozen=True, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[str | list[InputText | OutputText], Meta(description="The text.")]
    phase: Annotated[str | None, Meta(description="As the answer had it. It changes nothing.")] = None


class FunctionCallItem(_Item, frozen=True, tag="function_call"):
    call_id: Annotated[str, Meta(description="The id of the call.")]
    name: Annotated[str, Meta(description="Which function was called.")]
    arguments: Annotated[str, Meta(description="A JSON object, as text.")]


class FunctionOutputItem(_Item, frozen=True, tag="function_call_output"):
    """What a call of the model returned."""

    call_id: Annotated[str, Meta(description="The id of the call.")]
    output: Annotated[str | list[InputText], Meta(description="What it returned, as text.")]


class ReasoningItem(_Item, frozen=True, tag="reasoning"):
    """Thoughts of an answer that are sent back."""

    summary: Annotated[list[Any], Meta(description="Changes nothing.")] = msgspec.field(default_factory=list)
    content: Annotated[list[ThoughtText] | None, Meta(description="The thoughts.")] = None


Item: TypeAlias = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem


class ResponseTool(Function, frozen=True, tag_field="type", tag="function"):
    """A function, described beside its type."""


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    name: Annotated[str, Meta(description="The name of the function that is called.")]


class FlatSchemaFormat(NamedSchema, frozen=True, tag_field="type", tag="json_schema"):
    """JSON that validates against a schema, which stands beside the type."""


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Annotated[
        TextFormat | JsonObjectFormat | FlatSchemaFormat | None, Meta(description="What the text must be; without it: any text.")
    ] = None
    verbosity: Annotated[Literal["medium"] | None, Meta(description="What it is without this field.")] = None


class ReasoningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Effort = None


class ResponseFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/responses. user, metadata, safety_identifier and prompt_cache_key label it and change nothing."""

    model: Annotated[str, Meta(description="The model's name, as GET /v1/models lists it.")]
    input: Annotated[str | list[Item], Meta(description="The question, or the whole conversation.")]
    instructions: Annotated[str | None, Meta(description="A system message before the input.")] = None
    stream: Stream = False
    max_output_tokens: Annotated[Tokens | None, Meta(description="Longest answer, thoughts included.")] = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    seed: Seed = None
    tools: Annotated[list[ResponseTool], Meta(description="Functions that the model may call.")] = []
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunction | None,
        Meta(description="none: no calls; auto: the model decides; required: at least one call; or the function that is called."),
    ] = None
    parallel_tool_calls: Annotated[bool, Meta(description="False: at most one call in an answer.")] = True
    text: Annotated[TextConfig | None, Meta(description="What the text of the answer must be.")] = None
    reasoning: Annotated[ReasoningConfig | None, Meta(description="How the model thinks first.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any], Meta(description="Names that the chat template reads, such as enable_thinking, and their values.")
    ] = {}
    timeout: Timeout = None
    priority: Priority = 0
    cache_salt: CacheSalt = None
    user: Label = ""
    metadata: Annotated[dict[str, str], Meta(description="Labels, which the answer repeats.")] = {}
    safety_identifier: Label = ""
    prompt_cache_key: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest(ChatRequest):
    """body: what the answer repeats."""

    body: ResponseFields

    @property
    def grammar_field(self) -> str:
        return "text.format"


def read_response(body: bytes, context_tokens: int | None = None) -> ResponseRequest:
    """The body of POST /v1/responses. Raises BadRequest."""
    raw = drop_neutral(object_in(body), NEUTRAL_RESPONSE_VALUES, ResponseFields.__struct_encode_fields__)
    items, reasoning = raw.get("input"), raw.get("reasoning")
    if isinstance(reasoning, dict):
        raw["reasoning"] = drop_neutral(reasoning, NEUTRAL_REASONING_VALUES, path="reasoning.")
    if isinstance(items, list):
        raw["input"] = [
            {"type": "message"} | drop_neutral(item, NEUTRAL_ITEM_VALUES, path=f"input[{index}].")
            if isinstance(item, dict)
            else item
            for index, item in enumerate(items)
        ]
    read = convert(raw, ResponseFields)
    messages = _messages(read)
    if not messages:
        raise BadRequest("input is empty: send a text or at least one item", field="input")
    fields = SamplingFields(
        model=read.model,
        stream=read.stream,
        temperature=read.temperature,
        top_p=read.top_p,
        top_k=read.top_k,
        min_p=read.min_p,
        seed=read.seed,
        timeout=read.timeout,
        priority=read.priority,
        cache_salt=read.cache_salt,
    )
    return ResponseRequest(
        fields=fields,
        stop=checked_stops(fields),
        max_tokens=read.max_output_tokens,
        max_tokens_field="max_output_tokens",
        grammar=_grammar(read.text),
        messages=messages,
        tools=_tools(read),
        template_arguments=read.chat_template_kwargs,
        reasoning_effort=None if read.reasoning is None else read.reasoning.effort,
        effort_field="reasoning.effort",
        prompt_field="input",
        body=read,
    )


def _messages(read: ResponseFields) -> tuple[Mapping[str, Any], ...]:
    """As the chat template gets them. What the assistant thought, said and called, item after item, is one message."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": read.instructions}] if read.instructions else []
    if isinstance(read.input, str):
        return (*messages, {"role": "user", "content": read.input})
    for index, item in enumerate(read.input):
        match item:
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                content = _text(item.content)
                before = messages[-1] if messages else {}
                if role == before.get("role") == "assistant" and not before["content"] and "tool_calls" not in before:
                    before["content"] = content
                else:
                    messages.append({"role": role, "content": content})
            case FunctionCallItem():
                arguments = arguments_of(item.arguments, f"input[{index}].arguments")
                function = {"name": item.name, "arguments": arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case FunctionOutputItem():
                messages.append({"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id})
            case ReasoningItem():
                thought = "".join(part.text for part in item.content or ())
                messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    return tuple(messages)


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end, which is made if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: str | list[InputText] | list[InputText | OutputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tools(read: ResponseFields) -> ToolUse:
    choice = read.tool_choice
    if isinstance(choice, NamedFunction):
        return tool_use(read.tools, choice.name, read.parallel_tool_calls, named=True)
    return tool_use(read.tools, choice, read.parallel_tool_calls, named=False)


def _grammar(text: TextConfig | None) -> Grammar | None:
    """Raises BadRequest for a schema that no answer can be held to."""
    match None if text is None else text.format:
        case FlatSchemaFormat(schema=schema):
            grammar = schema_grammar(schema)
            check_text(grammar, "text.format.schema")
            return grammar
        case JsonObjectFormat():
            return ANY_OBJECT
        case _:
            return None
