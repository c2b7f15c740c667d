"""POST /v1/messages: Anthropic's fields, which become a conversation, and its answer, a list of blocks.

Owns the blocks. Nothing is stored: every request brings its whole conversation, and the signature of a thought that the client
does not want to see brings the thought back. Fields and events: https://platform.claude.com/docs/en/api/messages,
https://platform.claude.com/docs/en/build-with-claude/streaming. What Claude Code sends and does not mean for a model is taken as
what it is: hints and labels change nothing.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, assert_never

import msgspec
from msgspec import Meta, structs

from common.errors import BadRequest
from common.messages import Failed
from router.api.answers import Block, BlockShape, NamedEvents, named_event
from router.api.bodies import object_in
from router.api.chat import ChatFields, ChatRequest, Conversation, Effort, TemplateArguments, Thinking, call_for_template
from router.api.errors import detail_of_failure, messages_error
from router.api.fields import (
    CacheSalt,
    Priority,
    StopField,
    Stream,
    Temperature,
    Timeout,
    Tokens,
    TopK,
    TopP,
    Unsupported,
    read_fields,
    shared_fields,
)
from router.api.routes import TokenizeFields, TokenizeRequest
from router.api.structured import FlatSchemaFormat, checked_format
from router.api.tools import Function, NamedFunction, ToolUse, tool_use

_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
"""A line for Anthropic's accounts with which Claude Code begins its system prompt. It differs from request to request, so no two
prompts would share any KV."""
_SIGNATURE = "tandem."
"""What signatures of thoughts begin with. Where a thought is omitted, its text follows."""
_INVALID = "INVALID_JSON"
"""Anthropic's own name for what stands in place of arguments that are no JSON object, as those of a call that is cut off."""
CacheHint: TypeAlias = Annotated[
    dict[str, Any] | None, Meta(description="A hint that changes nothing: KV of every prompt is kept while there is room.")
]


class _Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type"):
    cache_control: CacheHint = None


class TextBlock(_Block, frozen=True, tag="text"):
    text: str
    """A piece of the message."""


class ThinkingBlock(_Block, frozen=True, tag="thinking"):
    thinking: str
    """What the model thought."""
    signature: str = ""
    """As the answer had it. It holds thoughts that were omitted."""


class RedactedBlock(_Block, frozen=True, tag="redacted_thinking"):
    """A thought that only Anthropic can read: the model does not get it."""

    data: str
    """Changes nothing."""


class ToolUseBlock(_Block, frozen=True, tag="tool_use"):
    id: str
    """The id of the call."""
    name: str
    """Which tool was called."""
    input: dict[str, Any]
    """The arguments of the call."""


class ToolResultBlock(_Block, frozen=True, tag="tool_result"):
    """What a call of the model returned."""

    tool_use_id: str
    """The id of the call."""
    content: str | list[TextBlock] = ""
    """What it returned, as text."""
    is_error: bool = False
    """The call failed: the model reads "Error: " before the text."""


class UserTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", tag="user"):
    content: str | list[TextBlock | ToolResultBlock]
    """Texts, and results of calls."""


class AssistantTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    """What the model wrote. As the last message it is the beginning of the answer."""

    content: str | list[TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock]
    """Its blocks."""


class SystemTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", tag="system"):
    """A note to the model in the middle of the conversation. It is written at the end of the user's turn where it stands."""

    content: str | list[TextBlock]
    """The text."""


Turn: TypeAlias = UserTurn | AssistantTurn | SystemTurn


class MessageTool(Function, frozen=True, kw_only=True, forbid_unknown_fields=True):
    parameters: dict[str, Any] = msgspec.field(name="input_schema")
    """JSON schema of the arguments."""
    type: Literal["custom"] | None = None
    """The only kind of tool."""
    cache_control: CacheHint = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """auto: the model decides; any: at least one call; tool: a call of that one; none: no calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    """With `tool`: which tool is called."""
    disable_parallel_tool_use: bool = False
    """True: at most one call in an answer."""


class ThinkingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Thinking
    """adaptive: the model thinks if it can."""
    budget_tokens: int | None = None
    """A hint that changes nothing: only `max_tokens` ends thoughts."""
    display: Literal["summarized", "omitted", "updates"] | None = None
    """omitted, updates: thoughts have no text."""


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    effort: Effort = None
    format: FlatSchemaFormat | None = None
    """What the text must be; without it: any text."""


_ANSWERED = Unsupported(
    {"citations": ([],), "caller": ({"type": "direct"},), "toolset_name": (), "parsed_output": ()}, nullable=("is_error",)
)
"""What the blocks of answers have when a client sends them back."""
MESSAGE = Unsupported(
    {
        **dict.fromkeys(("container", "inference_geo"), ()),
        "fallbacks": ("default",),
        "speed": ("standard",),
        "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"),
        "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    },
    inside={
        "messages": Unsupported(inside={"content": replace(_ANSWERED, inside={"content": _ANSWERED})}),
        "system": _ANSWERED,
        "tools": Unsupported(
            {"eager_input_streaming": (True, False), "allowed_callers": (["direct"],), "defer_loading": (False,)}
        ),
    },
    hints=(
        (re.compile(r"\brole$"), "use user, assistant or system"),
        (re.compile(r"^tools\[.*\btype$"), "use custom, or leave it out: tools that run on the server are not supported"),
        (re.compile(r"^tool_choice\.type$"), "use auto, any, tool or none"),
        (re.compile(r"content\[.*\btype$"), "texts, thoughts and calls with their results are all that is read"),
    ),
)
"""Arguments of calls always come as they are written, so tools may ask for that or not."""


class CountFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/messages/count_tokens."""

    model: str
    """The model's name, as GET /v1/models lists it."""
    messages: list[Turn]
    """The conversation so far."""
    system: str | list[TextBlock] = ""
    """What the model is told before the conversation."""
    tools: list[MessageTool] = []
    """Tools that the model may call."""
    tool_choice: ToolChoice | None = None
    """What the model may or must call."""
    thinking: ThinkingConfig | None = None
    """Whether the model thinks first."""
    output_config: OutputConfig | None = None
    """What the answer is to be."""
    cache_control: CacheHint = None
    chat_template_kwargs: TemplateArguments = {}


class MessageFields(CountFields, frozen=True, kw_only=True):
    """The body of POST /v1/messages. metadata and diagnostics label it and change nothing."""

    max_tokens: Tokens
    """Longest answer, thoughts included; or what the context leaves, if less."""
    stream: Stream = False
    stop_sequences: StopField = []
    """Strings before which the answer ends."""
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    metadata: dict[str, Any] = {}
    """Labels, such as user_id."""
    diagnostics: dict[str, Any] | None = None
    """For Anthropic's cache; it changes nothing."""
    timeout: Timeout = None
    priority: Priority = 0
    cache_salt: CacheSalt = None


class TokenCount(msgspec.Struct, frozen=True):
    """The answer of POST /v1/messages/count_tokens."""

    input_tokens: int


def read_message(body: bytes, context_tokens: int | None = None) -> ChatRequest:
    """The body of POST /v1/messages. Raises BadRequest."""
    read = read_fields(object_in(body), MessageFields, MESSAGE)
    return _request(read, read.max_tokens, read.stop_sequences)


def read_count(body: bytes, context_tokens: int | None = None) -> TokenizeRequest:
    """The body of POST /v1/messages/count_tokens. Raises BadRequest."""
    read = read_fields(object_in(body), CountFields, MESSAGE)
    return TokenizeRequest(fields=TokenizeFields(model=read.model), prompt=_request(read, None, []))


def _request(read: CountFields, max_tokens: int | None, stops: list[str]) -> ChatRequest:
    messages = _messages(read)
    if not messages or messages[-1]["role"] == "system":
        raise BadRequest("messages is empty: send at least one message of the user", field="messages")
    continues = messages[-1]["role"] == "assistant"
    if continues and not isinstance(read.messages[-1], AssistantTurn):
        raise BadRequest("messages ends with a message without content: send its text", field="messages")
    if continues and ("tool_calls" in messages[-1] or not messages[-1]["content"]):
        fix = "send the results of the calls, or another message"
        raise BadRequest(f"messages ends with an answer that has no text to go on with: {fix}", field="messages")
    config, thinking = read.output_config or OutputConfig(), read.thinking
    return ChatRequest(
        fields=ChatFields(
            messages=[],
            stop=stops,
            reasoning_effort=config.effort,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            chat_template_kwargs=read.chat_template_kwargs,
            **shared_fields(read),
        ),
        max_tokens=max_tokens,
        ends_with_context=True,
        grammar=checked_format(config.format, "output_config.format"),
        grammar_field="output_config.format",
        messages=tuple(messages),
        tools=_tools(read),
        effort_field="",
        thinking=None if thinking is None else thinking.type,
        omits_thoughts=thinking is not None and thinking.display in ("omitted", "updates"),
    )


def _tools(read: CountFields) -> ToolUse:
    """What the answer may call. Raises BadRequest."""
    choice = read.tool_choice or ToolChoice(type="auto")
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        return tool_use(read.tools, NamedFunction(choice.name), parallel)
    return tool_use(read.tools, "required" if choice.type == "any" else choice.type, parallel)


def _messages(read: CountFields) -> Conversation:
    """As the chat template gets them: the turns of one side, one behind the other, are one turn. Raises BadRequest."""
    notes = list(takewhile(lambda turn: isinstance(turn, SystemTurn), read.messages))
    texts = [block.text for content in (read.system, *(turn.content for turn in notes)) for block in _blocks(content)]
    system = _joined(_BILLING.sub("", text) for text in texts)
    conversation = Conversation([{"role": "system", "content": system}] if system else [])
    turns = groupby(read.messages[len(notes) :], lambda turn: isinstance(turn, AssistantTurn))
    for is_answer, turn in turns:
        (_add_answer if is_answer else _add_question)(conversation, turn)
    return conversation


def _add_question(conversation: Conversation, turns: Iterable[Turn]) -> None:
    """Results of calls come first, so that they follow the calls. A note behind nothing but results ends the last of them: a
    message of its own would be a question, and templates drop the thoughts before the last question."""
    blocks = [(turn, block) for turn in turns for block in _blocks(turn.content)]
    results = [block for _, block in blocks if isinstance(block, ToolResultBlock)]
    for result in results:
        text = _joined(block.text for block in _blocks(result.content))
        conversation.add_result(result.tool_use_id, f"{'Error: ' * result.is_error}{text}")
    text = _joined(block.text for _, block in blocks if isinstance(block, TextBlock))
    if results and all(isinstance(turn, SystemTurn) for turn, block in blocks if isinstance(block, TextBlock)):
        conversation[-1]["content"] = _joined((conversation[-1]["content"], text))
    elif blocks:
        conversation.add("user", text)


def _add_answer(conversation: Conversation, turns: Iterable[Turn]) -> None:
    """The model wrote its texts without a gap, so they are joined without one: the prompt shares the KV of the answer."""
    for kind, blocks in groupby((block for turn in turns for block in _blocks(turn.content)), type):
        if kind is TextBlock:
            conversation.add("assistant", "".join(block.text for block in blocks))
        elif kind is ThinkingBlock and (thought := "".join(map(_thought, blocks))):
            conversation.add_thought(thought)
        elif kind is ToolUseBlock:
            for block in blocks:
                conversation.add_call(call_for_template(block.id, block.name, block.input))


def _blocks(content: str | list[Any]) -> list[Any]:
    return [TextBlock(text=content)] if isinstance(content, str) else content


def _joined(texts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, texts))


def _thought(block: ThinkingBlock) -> str:
    """Its text, also where the answer had it only in the signature."""
    mark, _, omitted = block.signature.partition(_SIGNATURE)
    return block.thinking or ("" if mark else omitted)


class MessageUsage(msgspec.Struct, frozen=True):
    """The prompt has `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


class MessageBody(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: str = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


_DELTAS = {"content": "text", "reasoning": "thinking", "call": "input_json"}


@dataclass(slots=True, kw_only=True, eq=False)
class MessageShape(BlockShape[ChatRequest]):
    """The answer of POST /v1/messages."""

    keep_alive: ClassVar[bytes] = named_event("ping", {})

    def opening(self) -> NamedEvents:
        yield "message_start", {"message": MessageBody(id=self.id, model=self.model, content=[], usage=self._usage())}

    def begun(self, block: Block) -> NamedEvents:
        yield "content_block_start", self._place() | {"content_block": self._output(block, "")}

    def grown(self, block: Block, text: str) -> NamedEvents:
        if block.kind != "reasoning" or not self.request.omits_thoughts:
            name = _DELTAS[block.kind]
            delta = {"type": f"{name}_delta", "partial_json" if block.kind == "call" else name: text}
            yield "content_block_delta", self._place() | {"delta": delta}

    def ended(self, block: Block, *, is_last: bool) -> NamedEvents:
        if block.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": self._signature(block)}
            yield "content_block_delta", self._place() | {"delta": delta}
        yield "content_block_stop", self._place()

    def last_events(self) -> bytes:
        return self.event("message_delta", {"delta": self._stop(), "usage": self._usage()}) + self.event("message_stop", {})

    def failure_event(self, failed: Failed) -> bytes:
        return self.event("error", structs.asdict(messages_error(failed.status, detail_of_failure(failed), self.id)))

    def body(self) -> MessageBody:
        content = [self._output(block, self._signature(block)) for block in self.blocks]
        return MessageBody(id=self.id, model=self.model, content=content, usage=self._usage(), **self._stop())

    def _place(self) -> dict[str, Any]:
        return {"index": len(self.blocks) - 1}

    def _output(self, block: Block, signature: str) -> TextBlock | ThinkingBlock | ToolUseBlock:
        """The block as far as it has come."""
        match block.kind:
            case "content":
                return TextBlock(text=block.text)
            case "reasoning":
                return ThinkingBlock(thinking="" if self.request.omits_thoughts else block.text, signature=signature)
            case "call":
                return ToolUseBlock(id=block.call_id, name=block.name, input=_input(block.text))
            case _:
                assert_never(block.kind)

    def _signature(self, block: Block) -> str:
        return _SIGNATURE + (block.text if self.request.omits_thoughts else "")

    def _stop(self) -> dict[str, Any]:
        """Why the answer ended, and the stop sequence if it was one."""
        match self.ending.reason, self.ending.matched:
            case "stop", str(sequence):
                return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
            case "stop", _:
                reason = "tool_use" if any(block.kind == "call" for block in self.blocks) else "end_turn"
            case "length", _:
                is_cut = self.accepted.specs[0].sampling.max_new_tokens < (self.request.max_tokens or 0)
                reason = "model_context_window_exceeded" if is_cut else "max_tokens"
            case _:  # POST /abort_request: the client may send the answer back to go on with it
                reason = "pause_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> MessageUsage:
        return MessageUsage(self.accepted.prompt_tokens - self.cached_tokens, self.cached_tokens, self.tokens)


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call, which may have none."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {_INVALID: arguments}
