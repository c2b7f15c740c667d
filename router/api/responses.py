"""POST /v1/responses: its fields, which become a conversation, and its answer, a list of items.

Owns the items. What is stored of an answer, and computed without its client, is in `stored_responses.py`. The same parts make the
events of a stream and the items of a whole answer:

    created (queued), in_progress ─► for each item: added ─► deltas ─► done ─► completed, or incomplete when the limit cut it

Fields and events: https://platform.openai.com/docs/api-reference/responses, …/responses-streaming.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, assert_never

import msgspec

from common.errors import BadRequest
from router.api.answers import Block, BlockShape, NamedEvents, PromptDetails, VersionSpan, named_event
from router.api.bodies import object_in
from router.api.chat import ChatFields, ChatRequest, Conversation, Effort, TemplateArguments, call_for_template
from router.api.fields import (
    CacheSalt,
    Label,
    Labels,
    Priority,
    Stream,
    Timeout,
    TokenChoice,
    Tokens,
    TopLogprobs,
    Unsupported,
    read_fields,
    shared_fields,
)
from router.api.logprobs import ChatLogprob
from router.api.structured import FlatSchemaFormat, JsonObjectFormat, TextFormat, checked_format
from router.api.tools import CHOICE_OF_TOOLS, Function, NamedFunction, ToolPolicy, tool_use
from router.requests import ChoiceDelta


class InputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    text: str
    """A piece of the message."""


class OutputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    """A part of an answer that is sent back."""

    text: str
    """A piece of the message."""
    annotations: list[Any] = []
    """As the answer had them. They change nothing."""
    logprobs: list[Any] | None = None
    """As the answer had them. They change nothing."""


class ThoughtText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"):
    text: str
    """A piece of the thoughts."""


class _InputItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    id: str | None = None
    """As the answer had it. It changes nothing."""
    status: str | None = None
    """As the answer had it. It changes nothing."""


class MessageItem(_InputItem, frozen=True, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText]
    """The text."""
    phase: str | None = None
    """As the answer had it. It changes nothing."""


class FunctionCallItem(_InputItem, frozen=True, tag="function_call"):
    call_id: str
    """The id of the call."""
    name: str
    """Which function was called."""
    arguments: str
    """A JSON object, as text."""


class FunctionOutputItem(_InputItem, frozen=True, tag="function_call_output"):
    """What a call of the model returned."""

    call_id: str
    """The id of the call."""
    output: str | list[InputText]
    """What it returned, as text."""


class ReasoningItem(_InputItem, frozen=True, tag="reasoning"):
    """Thoughts of an answer that are sent back."""

    summary: list[Any] = msgspec.field(default_factory=list)
    """Changes nothing."""
    content: list[ThoughtText] | None = None
    """The thoughts."""


Item: TypeAlias = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem


class ResponseTool(Function, frozen=True, tag_field="type", tag="function"):
    """A function, described beside its type."""


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | FlatSchemaFormat | None = None
    """What the text must be; without it: any text."""
    verbosity: Literal["medium"] | None = None
    """What it is without this field."""


class ReasoningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Effort = None


RESPONSE = Unsupported(
    {
        **dict.fromkeys(("conversation", "prompt", "prompt_cache_retention"), ()),
        **dict.fromkeys(("max_tool_calls", "context_management"), ()),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
        "stream_options": ({}, {"include_obfuscation": False}),
    },
    inside={
        # there are no summaries, thoughts are in `content`
        "reasoning": Unsupported({"summary": (), "generate_summary": ()}),
        # what OpenAI's client adds to the items of our own answers when it sends them back
        "input": Unsupported(
            {"async": (False,), "async_": (False,), "caller": (), "namespace": (), "encrypted_content": ()},
        ),
    },
)


class ResponseFields(TokenChoice, msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/responses. user, metadata, safety_identifier and prompt_cache_key label it and change nothing."""

    model: str
    """The model's name, as GET /v1/models lists it."""
    input: str | list[Item]
    """The question, or the whole conversation."""
    instructions: str | None = None
    """A system message before the input."""
    stream: Stream = False
    max_output_tokens: Tokens | None = None
    """Longest answer, thoughts included."""
    tools: list[ResponseTool] = []
    """Functions that the model may call."""
    tool_choice: Annotated[ToolPolicy | NamedFunction | None, CHOICE_OF_TOOLS] = None
    parallel_tool_calls: bool = True
    """False: at most one call in an answer."""
    text: TextConfig | None = None
    """What the text of the answer must be."""
    reasoning: ReasoningConfig | None = None
    """How the model thinks first."""
    chat_template_kwargs: TemplateArguments = {}
    include: list[Literal["message.output_text.logprobs"]] = []
    """What else the answer has: how likely each token of its text was, if it is text alone."""
    top_logprobs: TopLogprobs = 0
    """With include: also send so many of the likeliest tokens in each place."""
    timeout: Timeout = None
    priority: Priority = 0
    cache_salt: CacheSalt = None
    user: Label = ""
    metadata: Labels = {}
    """Labels, which the answer repeats."""
    safety_identifier: Label = ""
    prompt_cache_key: Label = ""
    store: bool | None = None
    """Keep the answer for later requests. Without it: where the router has `--store`."""
    background: bool = False
    """Compute the answer without its client, who asks for it later."""
    previous_response_id: str | None = None
    """A stored answer: its conversation stands before the input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest(ChatRequest):
    """A conversation of items."""

    body: ResponseFields
    """What the answer repeats."""


def read_response(body: bytes, context_tokens: int | None = None) -> ResponseRequest:
    """The body of POST /v1/responses. Raises BadRequest."""
    raw = object_in(body)
    if isinstance(items := raw.get("input"), list):
        raw["input"] = [{"type": "message"} | item if isinstance(item, dict) else item for item in items]
    return response_request(read_fields(raw, ResponseFields, RESPONSE))


def response_request(read: ResponseFields) -> ResponseRequest:
    """What these fields ask for. Raises BadRequest."""
    messages = _messages(read)
    if not messages:
        raise BadRequest("input is empty: send a text or at least one item", field="input")
    if read.top_logprobs and not read.include:
        fix = 'leave it out or send include=["message.output_text.logprobs"]'
        raise BadRequest(f"top_logprobs is for log probabilities only: {fix}", field="top_logprobs")
    return ResponseRequest(
        fields=ChatFields(
            messages=[],
            chat_template_kwargs=read.chat_template_kwargs,
            reasoning_effort=None if read.reasoning is None else read.reasoning.effort,
            **shared_fields(read),
        ),
        max_tokens=read.max_output_tokens,
        max_tokens_field="max_output_tokens",
        logprobs=read.top_logprobs if read.include else None,
        text_alone_field="include" if read.include else "",
        grammar=checked_format(None if read.text is None else read.text.format, "text.format"),
        grammar_field="text.format",
        messages=messages,
        tools=tool_use(read.tools, read.tool_choice, read.parallel_tool_calls),
        effort_field="reasoning.effort",
        prompt_field="input",
        body=read,
    )


def _messages(read: ResponseFields) -> tuple[Mapping[str, Any], ...]:
    """As the chat template gets them."""
    conversation = Conversation([{"role": "system", "content": read.instructions}] if read.instructions else [])
    if isinstance(read.input, str):
        conversation.add("user", read.input)
        return tuple(conversation)
    for index, item in enumerate(read.input):
        match item:
            case MessageItem():
                conversation.add("system" if item.role == "developer" else item.role, _text(item.content))
            case FunctionCallItem():
                path = f"input[{index}].arguments"
                conversation.add_call(call_for_template(item.call_id, item.name, item.arguments, path))
            case FunctionOutputItem():
                conversation.add_result(item.call_id, _text(item.output))
            case ReasoningItem():
                conversation.add_thought("".join(part.text for part in item.content or ()))
    return tuple(conversation)


def _text(content: str | list[InputText] | list[InputText | OutputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


ResponseStatus: TypeAlias = Literal["queued", "in_progress", "completed", "incomplete", "failed"]


class OutputPart(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: Sequence[ChatLogprob] = ()


class MessageOutput(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: ResponseStatus
    content: Sequence[OutputPart]
    role: str = "assistant"


class ReasoningOutput(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    id: str
    status: ResponseStatus
    content: Sequence[ThoughtText]
    summary: tuple[()] = ()


class CallOutput(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    status: ResponseStatus
    call_id: str
    name: str
    arguments: str


Output: TypeAlias = MessageOutput | ReasoningOutput | CallOutput


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0
    """Tokens of thoughts and of the marks around them."""


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: PromptDetails
    output_tokens_details: OutputDetails = OutputDetails()
    weight_versions: list[VersionSpan] | msgspec.UnsetType = msgspec.UNSET


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """An answer. What it repeats of the request has the same name there."""

    id: str
    object: str = "response"
    created_at: int
    status: ResponseStatus
    model: str
    output: Sequence[Output]
    usage: ResponseUsage | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningConfig
    store: bool
    background: bool
    temperature: float
    text: TextConfig
    tool_choice: Literal["none", "auto", "required"] | NamedFunction
    tools: list[ResponseTool]
    top_p: float
    truncation: str = "disabled"
    user: str | None


_REPEATED = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature", "tools", "top_p"),
    *("background", "previous_response_id"),
)


def _output(block: Block, status: ResponseStatus, logprobs: Sequence[ChatLogprob]) -> Output:
    """The item as clients get it: an item in progress is empty. logprobs: of its text."""
    id, texts = _id_of(block), () if status == "in_progress" else (block.text,)
    match block.kind:
        case "content":
            return MessageOutput(id, status, [OutputPart(text, logprobs=logprobs) for text in texts])
        case "reasoning":
            return ReasoningOutput(id, status, [ThoughtText(text) for text in texts])
        case "call":
            return CallOutput(id, status, block.call_id, block.name, "".join(texts))
        case _:
            assert_never(block.kind)


def _part(block: Block, text: str, logprobs: Sequence[ChatLogprob] = ()) -> OutputPart | ThoughtText:
    """The item's content part, with this text."""
    return ThoughtText(text) if block.kind == "reasoning" else OutputPart(text, logprobs=logprobs)


def _id_of(block: Block) -> str:
    return _ID_PREFIXES[block.kind] + block.unique


_TEXT_EVENTS = {"content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
_ID_PREFIXES = {"content": "msg_", "reasoning": "rs_", "call": "fc_"}


@dataclass(slots=True, kw_only=True, eq=False)
class ResponseShape(BlockShape[ResponseRequest]):
    """The answer of POST /v1/responses."""

    _sent: int = field(default=0, init=False)
    """Events so far: each says its number."""
    _told: list[ChatLogprob] = field(default_factory=list, init=False)
    """How likely the tokens of the text were: only answers that are text alone have these."""
    _untold: list[ChatLogprob] = field(default_factory=list, init=False)
    """Those of tokens whose text is still to come."""

    def _delta_events(self, delta: ChoiceDelta, *, opens: bool) -> NamedEvents:
        if delta.logprobs:
            self._untold += self.logprob_writer(self.request.logprobs).chat(delta.logprobs).content
        yield from super(ResponseShape, self)._delta_events(delta, opens=opens)

    def _tell(self) -> list[ChatLogprob]:
        told, self._untold = self._untold, []
        self._told += told
        return told

    def first_events(self) -> list[bytes]:
        """Events that may come before the answer's first news."""
        return [self.event(f"response.{kind}", {"response": self.body_as("queued")}) for kind in ("created", "queued")]

    def failed_event(self, error: ResponseError) -> bytes:
        """The last event of an answer that failed."""
        return self.event("response.failed", {"response": self.body_as("failed", error)})

    def last_events(self) -> bytes:
        return self.event(f"response.{self._status}", {"response": self.body()})

    def event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        self._sent += 1
        return named_event(kind, {"sequence_number": self._sent - 1, **fields})

    def opening(self) -> NamedEvents:
        if not self._sent:
            yield "response.created", {"response": self.body_as("in_progress")}
        yield "response.in_progress", {"response": self.body_as("in_progress")}

    def begun(self, block: Block) -> NamedEvents:
        yield "response.output_item.added", {"output_index": len(self.blocks) - 1, "item": _output(block, "in_progress", ())}
        if block.kind != "call":
            yield "response.content_part.added", self._place() | {"part": _part(block, "")}

    def grown(self, block: Block, text: str) -> NamedEvents:
        more: dict[str, Any] = {"logprobs": self._tell()} if block.kind == "content" else {}
        yield f"response.{_TEXT_EVENTS[block.kind]}.delta", self._place() | {"delta": text} | more

    def ended(self, block: Block, *, is_last: bool) -> NamedEvents:
        text, name = block.text, f"response.{_TEXT_EVENTS[block.kind]}.done"
        if block.kind == "call":
            yield name, self._place() | {"arguments": text, "name": block.name}
        else:
            self._tell()
            yield name, self._place() | {"text": text} | ({"logprobs": self._told} if block.kind == "content" else {})
            yield "response.content_part.done", self._place() | {"part": _part(block, text, self._told)}
        item = _output(block, self._status if is_last else "completed", self._told)
        yield "response.output_item.done", {"output_index": len(self.blocks) - 1, "item": item}

    def _place(self) -> dict[str, Any]:
        """Where the last item is. Only texts have content parts, one each."""
        block = self.blocks[-1]
        place = {"item_id": _id_of(block), "output_index": len(self.blocks) - 1}
        return place if block.kind == "call" else place | {"content_index": 0}

    def body(self) -> ResponseBody:
        return self.body_as(self._status)

    @property
    def was_aborted(self) -> bool:
        """Somebody else than its client has ended the answer."""
        return self.ending.reason == "cancelled"

    @property
    def _status(self) -> ResponseStatus:
        """How the answer ends; its last item ends so too."""
        return "completed" if self.ending.reason == "stop" else "incomplete"

    def body_as(self, status: ResponseStatus, error: ResponseError | None = None) -> ResponseBody:
        """The response object. status: of the answer; its items are in it when it has ended."""
        fields, usage = self.request.body, self.usage()
        ended, last = status not in ("queued", "in_progress"), len(self.blocks) - 1
        was_cut = status == "incomplete" and self.ending.reason == "length"
        outputs = [
            _output(block, status if number == last else "completed", self._told) for number, block in enumerate(self.blocks)
        ]
        return ResponseBody(
            id=self.id,
            created_at=self.created,
            status=status,
            model=self.model,
            output=outputs if ended else (),
            usage=ResponseUsage(
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.total_tokens,
                usage.prompt_tokens_details,
                OutputDetails(self.thought_tokens.total()),
                weight_versions=usage.weight_versions,
            )
            if ended
            else None,
            incomplete_details=IncompleteDetails("max_output_tokens") if was_cut else None,
            **{name: getattr(fields, name) for name in _REPEATED},
            reasoning=fields.reasoning or ReasoningConfig(),
            text=TextConfig(TextFormat()) if fields.text is None or fields.text.format is None else fields.text,
            tool_choice=fields.tool_choice or "auto",
            user=fields.user or None,
            store=bool(fields.store),
            error=error,
        )
