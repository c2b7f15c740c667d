"""The body of POST /v1/chat/completions, and the normal form of every request that is a conversation.

Owns its own fields. Fields: https://platform.openai.com/docs/api-reference/chat; those of chat templates:
https://docs.vllm.ai/en/stable/serving/openai_compatible_server.html.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from common.errors import BadRequest
from router.api.chat_messages import ChatMessage
from router.api.fields import (
    ReadRequest,
    SamplingFields,
    Tokens,
    TopLogprobs,
    checked_stops,
    convert,
    neutral_options,
    object_in,
    require_logprobs_for_ids,
)
from router.api.neutral import NEUTRAL_CHAT_VALUES, NEUTRAL_MESSAGE_VALUES, drop_neutral
from router.api.structured import grammar_of
from router.api.tools import NO_TOOLS, FunctionTool, NamedTool, ToolChoice, ToolUse, tool_use

MAX_EFFORT_CHARS = 64
MESSAGE_CHARS = 16
"""What a message counts besides its texts: the chat template's work, and what it writes around each message."""

Effort: TypeAlias = Annotated[
    Annotated[str, Meta(max_length=MAX_EFFORT_CHARS)] | None,
    Meta(description="How much to think, for chat templates that use it."),
]


class ChatFields(SamplingFields, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(description="The conversation so far.")]
    max_completion_tokens: Annotated[Tokens | None, Meta(description="Another name of max_tokens.")] = None
    logprobs: Annotated[bool, Meta(description="Send how likely each token of the answer was.")] = False
    top_logprobs: Annotated[
        TopLogprobs | None, Meta(description="With `logprobs`, also send so many of the likeliest tokens in each place.")
    ] = None
    tools: Annotated[list[FunctionTool], Meta(description="Functions that the model may call.")] = msgspec.field(
        default_factory=list
    )
    tool_choice: ToolChoice = None
    parallel_tool_calls: Annotated[bool, Meta(description="False: at most one call in an answer.")] = True
    chat_template_kwargs: Annotated[
        dict[str, Any], Meta(description="Names that the chat template reads, such as enable_thinking, and their values.")
    ] = msgspec.field(default_factory=dict)
    add_generation_prompt: Annotated[bool, Meta(description="The prompt ends where the assistant's answer begins.")] = True
    continue_final_message: Annotated[
        bool, Meta(description="The answer continues the last message. Send add_generation_prompt=false with it.")
    ] = False
    reasoning_effort: Effort = None
    separate_reasoning: Annotated[
        bool, Meta(description="False: what the model thinks stays in `content`, between its marks.")
    ] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ReadRequest):
    """messages: as the chat template gets them. template_arguments: what else it gets. reasoning_effort: None: the template's
    own. separate_reasoning: the answer tells thoughts apart from content. prompt_field, effort_field: the
    fields that held the messages and the effort."""

    messages: tuple[Mapping[str, Any], ...]
    tools: ToolUse = NO_TOOLS
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    separate_reasoning: bool = True
    prompt_field: str = "messages"
    effort_field: str = "reasoning_effort"

    def texts(self) -> Iterator[str]:
        """Everything that the chat template may write into the prompt."""
        for message in self.messages:
            for value in message.values():
                yield value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for tool in self.tools.for_template():
            yield msgspec.json.encode(tool).decode()
        for argument in self.template_arguments.values():
            yield argument if isinstance(argument, str) else msgspec.json.encode(argument).decode()
        if self.reasoning_effort is not None:
            yield self.reasoning_effort

    def size_chars(self, texts: Iterable[str]) -> int:
        """The size of the conversation. texts: those of `texts`."""
        return sum(map(len, texts)) + MESSAGE_CHARS * len(self.messages)


def read_chat(body: bytes, context_tokens: int | None = None) -> ChatRequest:
    """The body of POST /v1/chat/completions. Raises BadRequest."""
    raw = drop_neutral(object_in(body), NEUTRAL_CHAT_VALUES, ChatFields.__struct_encode_fields__)
    return chat_request(convert(neutral_messages(neutral_options(raw)), ChatFields))


def neutral_messages(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields, with messages that lack what asks for nothing. Raises BadRequest."""
    messages = raw.get("messages")
    if not isinstance(messages, list):
        return raw
    return raw | {
        "messages": [
            drop_neutral(message, NEUTRAL_MESSAGE_VALUES, ("tool_calls",), path=f"messages[{index}].")
            if isinstance(message, dict)
            else message
            for index, message in enumerate(messages)
        ]
    }


def chat_request(fields: ChatFields) -> ChatRequest:
    """The request that these fields make. Raises BadRequest."""
    if not fields.messages:
        raise BadRequest("messages is empty: send at least one message", field="messages")
    limit, name = fields.max_tokens, "max_tokens"
    if fields.max_completion_tokens is not None:
        if limit is not None and limit != fields.max_completion_tokens:
            raise BadRequest("max_tokens and max_completion_tokens differ: send one of them", field="max_tokens")
        limit, name = fields.max_completion_tokens, "max_completion_tokens"
    if fields.top_logprobs and not fields.logprobs:
        raise BadRequest("top_logprobs is for logprobs only: leave it out or send logprobs=true", field="top_logprobs")
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    require_logprobs_for_ids(fields, logprobs, fields.prompt_logprobs)
    if fields.continue_final_message and fields.add_generation_prompt:
        fix = "send add_generation_prompt=false with it"
        raise BadRequest(f"continue_final_message goes on with the last message: {fix}", field="continue_final_message")
    return ChatRequest(
        fields=fields,
        stop=checked_stops(fields),
        max_tokens=limit,
        max_tokens_field=name,
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        grammar=grammar_of(fields),
        messages=tuple(message.for_template(f"messages[{index}]") for index, message in enumerate(fields.messages)),
        tools=_tools(fields),
        template_arguments=fields.chat_template_kwargs,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        reasoning_effort=fields.reasoning_effort,
        separate_reasoning=fields.separate_reasoning,
    )


def _tools(fields: ChatFields) -> ToolUse:
    functions, choice = [tool.function for tool in fields.tools], fields.tool_choice
    if isinstance(choice, NamedTool):
        return tool_use(functions, choice.function.name, fields.parallel_tool_calls, named=True)
    return tool_use(functions, choice, fields.parallel_tool_calls, named=False)
