"""POST /v1/chat/completions: its fields, the conversation that they hold, and its answer.

Owns the messages and their roles, and the shape of the answer: content, thoughts and calls, whole or as they come. Does not know
chat templates, nor the formats in which models write thoughts and calls. Fields:
https://platform.openai.com/docs/api-reference/chat; those of chat templates:
https://docs.vllm.ai/en/stable/serving/openai_compatible_server.html.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, assert_never

import msgspec
from msgspec import Meta

from common.errors import BadRequest
from common.messages import TokenLogprob
from router.api.answers import OpenAIFinish, OpenAIShape, TokenIds, finish_of
from router.api.bodies import json_in, object_in
from router.api.fields import (
    ONLY_OPENAI,
    STREAM_OPTIONS,
    ReadRequest,
    SamplingFields,
    Tokens,
    TopLogprobs,
    Unsupported,
    read_fields,
)
from router.api.logprobs import ChatLogprobs, PromptLogprobs
from router.api.parsing.parser import AnswerParser, AnswerPart
from router.api.structured import grammar_of
from router.api.tools import CHOICE_OF_TOOLS, AllowedTools, FunctionTool, NamedTool, ToolPolicy, ToolUse, tool_use
from router.requests import ChoiceDelta

EFFORT_CHARS = 64
Thinking: TypeAlias = Literal["enabled", "adaptive", "disabled"]
"""adaptive: the model thinks if it can."""
MESSAGE_CHARS = 16
"""What a message counts besides its texts: the chat template's work, and what it writes around each message."""


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str
    """A piece of the message."""


MessageText: TypeAlias = Annotated[str | list[TextPart] | None, Meta(description="The text. Null is an empty text.")]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", kw_only=True):
    name: str | None = None
    """Who speaks, for chat templates that use it."""
    content: MessageText

    def for_template(self, path: str) -> dict[str, Any]:
        """The message as chat templates read it. path: where it is in the body. Raises BadRequest."""
        role, content = self.__struct_config__.tag, self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        message = {"role": "system" if role == "developer" else role, "content": text}
        return message if self.name is None else message | {"name": self.name}


class SystemMessage(_Message, frozen=True, tag="system"):
    pass


class DeveloperMessage(_Message, frozen=True, tag="developer"):
    """OpenAI's newer name of `system`; chat templates know the older one."""


class UserMessage(_Message, frozen=True, tag="user"):
    pass


class FunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    """Which function was called."""
    arguments: str = "{}"
    """A JSON object, as text."""
    parsed_arguments: Any = None
    """As OpenAI's client reads the arguments. It changes nothing."""


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that an answer made."""

    function: FunctionCall
    """What was called."""
    id: str = ""
    """The id of the call, to which a tool message answers."""
    type: Literal["function"] = "function"
    """The only kind of call."""
    index: int | None = None
    """As a streamed answer has it. It changes nothing."""


def call_for_template(call_id: str, name: str, arguments: str | dict[str, Any], path: str = "") -> dict[str, Any]:
    """A call in OpenAI's form, with its arguments as text. path: where the arguments are in the body. Raises BadRequest when they
    are no JSON object."""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not isinstance(json_in(arguments or "{}", path), dict):
        raise BadRequest(f"{path} must be a JSON object, as text", field=path, code="invalid_value")
    call = {"type": "function", "function": {"name": name, "arguments": arguments or "{}"}}
    return {"id": call_id} | call if call_id else call


class Conversation(list[dict[str, Any]]):
    """The messages as the chat template gets them, made of pieces. What the assistant thought, said and called, piece after
    piece, is one message."""

    def add(self, role: str, text: str) -> None:
        before = self[-1] if self else {}
        if role == before.get("role") == "assistant" and not before["content"] and "tool_calls" not in before:
            before["content"] = text
        else:
            self.append({"role": role, "content": text})

    def add_thought(self, text: str) -> None:
        self.append({"role": "assistant", "content": "", "reasoning_content": text})

    def add_call(self, call: Mapping[str, Any]) -> None:
        if not self or self[-1]["role"] != "assistant":
            self.add("assistant", "")
        self[-1].setdefault("tool_calls", []).append(call)

    def add_result(self, call_id: str, text: str) -> None:
        self.append({"role": "tool", "content": text, "tool_call_id": call_id})


class AssistantMessage(_Message, frozen=True, tag="assistant"):
    content: MessageText = None
    parsed: Any = None
    """As OpenAI's client reads the content. It changes nothing."""
    tool_calls: list[ToolCall] = []
    """What the assistant called."""
    reasoning_content: str | None = None
    """What the model thought, for templates that use it."""
    reasoning: str | None = None
    """Another name of reasoning_content."""

    def for_template(self, path: str) -> dict[str, Any]:
        message = super().for_template(path)
        thought = self.reasoning_content if self.reasoning is None else self.reasoning
        if thought is not None:
            message["reasoning_content"] = thought
        if self.tool_calls:
            message["tool_calls"] = [
                call_for_template(
                    call.id, call.function.name, call.function.arguments, f"{path}.tool_calls[{index}].function.arguments"
                )
                for index, call in enumerate(self.tool_calls)
            ]
        return message


class ToolMessage(_Message, frozen=True, tag="tool"):
    """What a call of the model returned."""

    tool_call_id: str = ""
    """The id of the call."""

    def for_template(self, path: str) -> dict[str, Any]:
        message = super().for_template(path)
        return message | {"tool_call_id": self.tool_call_id} if self.tool_call_id else message


ChatMessage: TypeAlias = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
Effort: TypeAlias = Annotated[
    Annotated[str, Meta(max_length=EFFORT_CHARS)] | None,
    Meta(description="How much to think, for chat templates that use it."),
]
MESSAGES = Unsupported(
    {"refusal": (), "audio": (), "annotations": ([],), "function_call": ()},
    nullable=("tool_calls",),
)
"""Fields that the messages of our own answers have when a client sends them back."""
TemplateArguments: TypeAlias = Annotated[
    dict[str, Any], Meta(description="Names that the chat template reads, such as enable_thinking, and their values.")
]
CHAT = Unsupported(
    {
        **ONLY_OPENAI,
        **dict.fromkeys(("audio", "prediction", "web_search_options", "chat_template"), ()),
        **dict.fromkeys(("functions", "documents"), ([],)),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
    },
    inside={"stream_options": STREAM_OPTIONS, "messages": MESSAGES},
)


class ChatFields(SamplingFields, msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    """The conversation so far."""
    max_completion_tokens: Tokens | None = None
    """Another name of max_tokens."""
    logprobs: bool = False
    """Send how likely each token of the answer was."""
    top_logprobs: TopLogprobs | None = None
    """With `logprobs`, also send so many of the likeliest tokens in each place."""
    tools: list[FunctionTool] = []
    """Functions that the model may call."""
    tool_choice: Annotated[ToolPolicy | NamedTool | AllowedTools | None, CHOICE_OF_TOOLS] = None
    parallel_tool_calls: bool = True
    """False: at most one call in an answer."""
    chat_template_kwargs: TemplateArguments = {}
    add_generation_prompt: bool = True
    """The prompt ends where the assistant's answer begins."""
    continue_final_message: bool = False
    """The answer continues the last message. Send add_generation_prompt=false with it."""
    reasoning_effort: Effort = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """How much to say, for chat templates that use it."""
    separate_reasoning: bool = True
    """False: what the model thinks stays in `content`, between its marks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ReadRequest):
    """A conversation, whatever its API."""

    fields: ChatFields
    messages: tuple[Mapping[str, Any], ...]
    """The messages as the chat template gets them."""
    tools: ToolUse
    prompt_field: str = "messages"
    effort_field: str = "reasoning_effort"
    """The field that held the effort; "": it is a hint, for templates that use it."""
    text_alone_field: str = ""
    """A field that is only for answers without calls and thoughts of their own; "": there is none."""
    thinking: Thinking | None = None
    """Whether the answer begins with thoughts; None: as the chat template does by itself."""
    omits_thoughts: bool = False
    """Whether the client gets the text of thoughts only to send it back."""

    def texts(self) -> Iterator[str]:
        """Everything that the chat template may write into the prompt."""
        values = [value for message in self.messages for value in message.values()]
        arguments = self.fields.chat_template_kwargs.values()
        for value in (*values, *self.tools.shown, *arguments, self.fields.reasoning_effort or ""):
            yield value if isinstance(value, str) else msgspec.json.encode(value).decode()

    def size_chars(self, texts: Iterable[str]) -> int:
        """The size of the conversation. texts: those of `texts`."""
        return sum(map(len, texts)) + MESSAGE_CHARS * len(self.messages)


def read_chat(body: bytes, context_tokens: int | None = None) -> ChatRequest:
    """The body of POST /v1/chat/completions. Raises BadRequest."""
    return chat_request(read_fields(object_in(body), ChatFields, CHAT))


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
    if fields.continue_final_message and fields.add_generation_prompt:
        fix = "send add_generation_prompt=false with it"
        raise BadRequest(f"continue_final_message goes on with the last message: {fix}", field="continue_final_message")
    grammar, grammar_field = grammar_of(fields)
    return ChatRequest(
        fields=fields,
        max_tokens=limit,
        max_tokens_field=name,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        prompt_logprobs=fields.prompt_logprobs,
        grammar=grammar,
        grammar_field=grammar_field,
        messages=tuple(message.for_template(f"messages[{index}]") for index, message in enumerate(fields.messages)),
        tools=tool_use([tool.function for tool in fields.tools], fields.tool_choice, fields.parallel_tool_calls),
    )


class _ChunkChoice(msgspec.Struct, frozen=True):
    """A choice of a chunk. delta: what is new of the message."""

    index: int
    delta: dict[str, Any]
    finish_reason: OpenAIFinish | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: TokenIds = msgspec.UNSET


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class _Call(msgspec.Struct, frozen=True):
    id: str
    function: _Function
    type: str = "function"


class _ChatMessage(msgspec.Struct, frozen=True):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: Sequence[_Call] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: _ChatMessage
    finish_reason: OpenAIFinish
    logprobs: ChatLogprobs | None = None
    token_ids: TokenIds = msgspec.UNSET


@dataclass(slots=True, kw_only=True, eq=False)
class ChatShape(OpenAIShape[ChatRequest]):
    """/v1/chat/completions. A choice's first chunk says the role."""

    chunk_object: ClassVar[str] = "chat.completion.chunk"
    whole_object: ClassVar[str] = "chat.completion"

    _parsers: dict[int, AnswerParser] = field(default_factory=dict, init=False)
    """The parsers of choices, in a stream whose text has parts."""
    _calls: Counter[int] = field(default_factory=Counter, init=False)
    """How many calls have begun in each choice of a stream."""

    def _is_content(self, index: int) -> bool:
        if self.accepted.reading.new_parser is None:
            return True
        return index in self._parsers and self._parsers[index].is_plain

    def _chunk_choices(self, delta: ChoiceDelta, *, opens: bool) -> Iterable[msgspec.Struct]:
        index, ids, finish = delta.index, self._ids(delta.token_ids), finish_of(delta.ending)
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        chunks = [_ChunkChoice(index, {"role": "assistant", "content": ""})] if opens else []
        pieces = [self._piece(index, part) for part in self._parts(index, delta.text, is_last=finish is not None)]
        if not pieces and (logprobs is not None or ids):
            pieces.append({"content": ""})
        for piece in pieces:  # the tokens behind the text go with its first piece
            chunks.append(_ChunkChoice(index, piece, logprobs=logprobs, token_ids=ids))
            logprobs, ids = None, self._ids(())
        if finish is not None:
            chunks.append(_ChunkChoice(index, {}, "tool_calls" if self._calls[index] and finish == "stop" else finish))
        return chunks

    def _parts(self, index: int, text: str, *, is_last: bool) -> Sequence[AnswerPart]:
        """The text as content, or the parts of it that are settled."""
        if self._is_content(index):
            return [AnswerPart("content", text)] if text else []
        new_parser, parser = self.accepted.reading.new_parser, self._parsers.get(index)
        assert new_parser is not None
        if parser is None:
            parser = self._parsers[index] = new_parser()
        return parser.push(text) + (parser.finish() if is_last else [])

    def _piece(self, index: int, part: AnswerPart) -> dict[str, Any]:
        """The part as clients get it. reasoning: vLLM's newer name of reasoning_content."""
        call: dict[str, Any]
        match part.kind:
            case "content":
                return {"content": part.text}
            case "reasoning":
                return {"reasoning_content": part.text, "reasoning": part.text}
            case "call":
                function = {"arguments": "", "name": part.text}
                call_id = self.accepted.reading.new_id(part.text, self._calls[index])
                call = {"function": function, "id": call_id, "type": "function"}
                self._calls[index] += 1
            case "arguments":
                call = {"function": {"arguments": part.text}}
            case _:
                assert_never(part.kind)
        return {"tool_calls": [{"index": self._calls[index] - 1, **call}]}

    def _whole_choice(self, index: int, choice: ChoiceDelta) -> msgspec.Struct:
        logprobs = self._logprobs(choice.logprobs) if self.request.logprobs is not None else None
        ids, finish, reading = self._ids(choice.token_ids), finish_of(choice.ending) or "stop", self.accepted.reading
        answer = reading.whole(choice.text)
        calls = [
            _Call(reading.new_id(call.name, number), _Function(call.name, call.arguments))
            for number, call in enumerate(answer.calls)
        ]
        message = _ChatMessage(
            content=None if calls and not answer.content else answer.content,
            tool_calls=calls or msgspec.UNSET,
            reasoning_content=answer.reasoning or msgspec.UNSET,
            reasoning=answer.reasoning or msgspec.UNSET,
        )
        return ChatChoice(index, message, "tool_calls" if calls and finish == "stop" else finish, logprobs, ids)

    def _prompt_logprobs(self, choices: Sequence[ChoiceDelta]) -> PromptLogprobs | msgspec.UnsetType:
        if self.request.prompt_logprobs is None:
            return msgspec.UNSET
        return self.logprob_writer(self.request.prompt_logprobs).prompt(choices[0].prompt_logprobs)

    def _logprobs(self, tokens: Iterable[TokenLogprob]) -> ChatLogprobs:
        return self.logprob_writer(self.request.logprobs).chat(tokens)
