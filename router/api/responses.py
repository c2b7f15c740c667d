"""POST /v1/responses: its fields, which become a conversation, and its answer, a list of items.

Owns the items. Nothing is stored: every request brings its whole conversation. The same parts make the events of a stream and the
items of a whole answer:

    created, in_progress ─► for each item: added ─► deltas ─► done ─► completed, or incomplete when the limit cut it

Fields and events: https://platform.openai.com/docs/api-reference/responses, …/responses-streaming.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, assert_never

import msgspec
from msgspec import Meta

from common.errors import BadRequest
from common.messages import Finished
from engine.grammar.grammars import check_text
from router.api.answers import AnswerShape, PromptDetails, VersionSpan
from router.api.bodies import object_in
from router.api.chat import ChatFields, ChatRequest, Effort, call_for_template
from router.api.fields import (
    CHOICE_OF_TOOLS,
    CacheSalt,
    Function,
    Label,
    NamedFunction,
    Priority,
    SamplingFields,
    Stream,
    Timeout,
    TokenChoice,
    Tokens,
    ToolPolicy,
    TopLogprobs,
    Unsupported,
    read_fields,
    tool_use,
)
from router.api.logprobs import ChatLogprob
from router.api.parsing.parser import AnswerParser, AnswerPart, PartKind
from router.api.structured import JsonObjectFormat, NamedSchema, TextFormat, format_grammar
from router.outbox import ChoiceDelta


class InputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    text: Annotated[str, Meta(description="A piece of the message.")]


class OutputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    """A part of an answer that is sent back."""

    text: Annotated[str, Meta(description="A piece of the message.")]
    annotations: Annotated[list[Any], Meta(description="As the answer had them. They change nothing.")] = []
    logprobs: Annotated[list[Any] | None, Meta(description="As the answer had them. They change nothing.")] = None


class ThoughtText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"):
    text: Annotated[str, Meta(description="A piece of the thoughts.")]


class _InputItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    id: Annotated[str | None, Meta(description="As the answer had it. It changes nothing.")] = None
    status: Annotated[str | None, Meta(description="As the answer had it. It changes nothing.")] = None


class MessageItem(_InputItem, frozen=True, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[str | list[InputText | OutputText], Meta(description="The text.")]
    phase: Annotated[str | None, Meta(description="As the answer had it. It changes nothing.")] = None


class FunctionCallItem(_InputItem, frozen=True, tag="function_call"):
    call_id: Annotated[str, Meta(description="The id of the call.")]
    name: Annotated[str, Meta(description="Which function was called.")]
    arguments: Annotated[str, Meta(description="A JSON object, as text.")]


class FunctionOutputItem(_InputItem, frozen=True, tag="function_call_output"):
    """What a call of the model returned."""

    call_id: Annotated[str, Meta(description="The id of the call.")]
    output: Annotated[str | list[InputText], Meta(description="What it returned, as text.")]


class ReasoningItem(_InputItem, frozen=True, tag="reasoning"):
    """Thoughts of an answer that are sent back."""

    summary: Annotated[list[Any], Meta(description="Changes nothing.")] = msgspec.field(default_factory=list)
    content: Annotated[list[ThoughtText] | None, Meta(description="The thoughts.")] = None


Item: TypeAlias = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem


class ResponseTool(Function, frozen=True, tag_field="type", tag="function"):
    """A function, described beside its type."""


class FlatSchemaFormat(NamedSchema, frozen=True, tag_field="type", tag="json_schema"):
    """JSON that validates against a schema, which stands beside the type."""


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Annotated[
        TextFormat | JsonObjectFormat | FlatSchemaFormat | None, Meta(description="What the text must be; without it: any text.")
    ] = None
    verbosity: Annotated[Literal["medium"] | None, Meta(description="What it is without this field.")] = None


class ReasoningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Effort = None


RESPONSE = Unsupported(
    {
        **dict.fromkeys(("previous_response_id", "conversation", "prompt", "prompt_cache_retention"), ()),
        **dict.fromkeys(("max_tool_calls", "context_management"), ()),
        **dict.fromkeys(("store", "background"), (False,)),
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

    model: Annotated[str, Meta(description="The model's name, as GET /v1/models lists it.")]
    input: Annotated[str | list[Item], Meta(description="The question, or the whole conversation.")]
    instructions: Annotated[str | None, Meta(description="A system message before the input.")] = None
    stream: Stream = False
    max_output_tokens: Annotated[Tokens | None, Meta(description="Longest answer, thoughts included.")] = None
    tools: Annotated[list[ResponseTool], Meta(description="Functions that the model may call.")] = []
    tool_choice: Annotated[ToolPolicy | NamedFunction | None, CHOICE_OF_TOOLS] = None
    parallel_tool_calls: Annotated[bool, Meta(description="False: at most one call in an answer.")] = True
    text: Annotated[TextConfig | None, Meta(description="What the text of the answer must be.")] = None
    reasoning: Annotated[ReasoningConfig | None, Meta(description="How the model thinks first.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any], Meta(description="Names that the chat template reads, such as enable_thinking, and their values.")
    ] = {}
    include: Annotated[
        list[Literal["message.output_text.logprobs"]],
        Meta(description="What else the answer has: how likely each token of its text was, if it is text alone."),
    ] = []
    top_logprobs: Annotated[
        TopLogprobs, Meta(description="With include: also send so many of the likeliest tokens in each place.")
    ] = 0
    timeout: Timeout = None
    priority: Priority = 0
    cache_salt: CacheSalt = None
    user: Label = ""
    metadata: Annotated[dict[str, str], Meta(description="Labels, which the answer repeats.")] = {}
    safety_identifier: Label = ""
    prompt_cache_key: Label = ""


_SHARED = set(SamplingFields.__struct_fields__) & set(ResponseFields.__struct_fields__)


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
    read = read_fields(raw, ResponseFields, RESPONSE)
    messages = _messages(read)
    if not messages:
        raise BadRequest("input is empty: send a text or at least one item", field="input")
    if read.top_logprobs and not read.include:
        fix = 'leave it out or send include=["message.output_text.logprobs"]'
        raise BadRequest(f"top_logprobs is for log probabilities only: {fix}", field="top_logprobs")
    grammar = None if read.text is None else format_grammar(read.text.format)
    if grammar is not None:
        check_text(grammar, "text.format.schema")
    return ResponseRequest(
        fields=ChatFields(
            messages=[],
            chat_template_kwargs=read.chat_template_kwargs,
            reasoning_effort=None if read.reasoning is None else read.reasoning.effort,
            **{name: getattr(read, name) for name in _SHARED},
        ),
        max_tokens=read.max_output_tokens,
        max_tokens_field="max_output_tokens",
        logprobs=read.top_logprobs if read.include else None,
        text_alone_field="include" if read.include else "",
        grammar=grammar,
        grammar_field="text.format",
        messages=messages,
        tools=tool_use(read.tools, read.tool_choice, read.parallel_tool_calls),
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
                call = call_for_template(item.call_id, item.name, item.arguments, f"input[{index}].arguments")
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


Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]
ItemKind: TypeAlias = Literal["message", "reasoning", "function_call"]
_encode = msgspec.json.Encoder().encode


class OutputPart(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: Sequence[ChatLogprob] = ()


class ThoughtPart(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageOutput(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: Status
    content: Sequence[OutputPart]
    role: str = "assistant"


class ReasoningOutput(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    id: str
    status: Status
    content: Sequence[ThoughtPart]
    summary: tuple[()] = ()


class CallOutput(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


Output: TypeAlias = MessageOutput | ReasoningOutput | CallOutput


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class OutputDetails(msgspec.Struct, frozen=True):
    """Thoughts are not counted apart."""

    reasoning_tokens: int = 0


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
    status: Status
    model: str
    output: Sequence[Output]
    usage: ResponseUsage | None
    error: None = None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ReasoningConfig
    store: bool = False
    temperature: float
    text: TextConfig
    tool_choice: Literal["none", "auto", "required"] | NamedFunction
    tools: list[ResponseTool]
    top_p: float
    truncation: str = "disabled"
    user: str | None


_REPEATED = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature", "tools", "top_p")


@dataclass(slots=True)
class OutputItem:
    """An item of the answer, as far as it has come."""

    kind: ItemKind
    id: str
    texts: list[str] = field(default_factory=list)
    """The text or the arguments, in pieces."""
    logprobs: list[ChatLogprob] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    """The name of the function that is called."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self, text: str) -> OutputPart | ThoughtPart:
        """Its content part, with this text."""
        return ThoughtPart(text) if self.kind == "reasoning" else OutputPart(text, logprobs=self.logprobs if text else ())

    def output(self, status: Status) -> Output:
        """As clients get it: an item in progress is empty."""
        texts = () if status == "in_progress" else (self.text,)
        match self.kind:
            case "message":
                return MessageOutput(self.id, status, [OutputPart(text, logprobs=self.logprobs) for text in texts])
            case "reasoning":
                return ReasoningOutput(self.id, status, [ThoughtPart(text) for text in texts])
            case "function_call":
                return CallOutput(self.id, status, self.call_id, self.name, "".join(texts))
            case _:
                assert_never(self.kind)


_ITEM_KINDS: Mapping[PartKind, ItemKind] = {
    "content": "message",
    "reasoning": "reasoning",
    "call": "function_call",
    "arguments": "function_call",
}
_TEXT_EVENTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
_ID_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
_Events: TypeAlias = Iterator[tuple[str, dict[str, Any]]]


@dataclass(slots=True, kw_only=True, eq=False)
class ResponseShape(AnswerShape[ResponseRequest]):
    """The answer of POST /v1/responses."""

    _parser: AnswerParser | None = field(default=None, init=False)
    _items: list[OutputItem] = field(default_factory=list, init=False)
    _is_open: bool = field(default=False, init=False)
    """Whether the last item goes on."""
    _ending: Finished = field(default=Finished(reason="stop"), init=False)
    _untold: list[ChatLogprob] = field(default_factory=list, init=False)
    """How likely tokens were whose text is still to come."""
    _sent: int = field(default=0, init=False)
    """Events so far: each says its number."""

    def __post_init__(self) -> None:
        new_parser = self.accepted.reading.new_parser
        self._parser = None if new_parser is None else new_parser()

    def events(self, delta: ChoiceDelta, *, opens: bool) -> bytes:
        self.count(delta.index, delta)
        return b"".join(self._event(kind, fields) for kind, fields in self._delta_events(delta, opens=opens))

    def last_events(self) -> bytes:
        return self._event(f"response.{self._status}", {"response": self._body(self._status)})

    def whole(self, choices: Sequence[ChoiceDelta]) -> bytes:
        (choice,) = choices
        self.count(0, choice)
        for _ in self._delta_events(choice, opens=False):
            pass  # the events of a stream; the items are what is wanted
        return _encode(self._body(self._status))

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        data = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        return b"event: " + kind.encode() + b"\ndata: " + _encode(data) + b"\n\n"

    def _delta_events(self, delta: ChoiceDelta, *, opens: bool) -> _Events:
        if opens:
            yield "response.created", {"response": self._body("in_progress")}
            yield "response.in_progress", {"response": self._body("in_progress")}
        if delta.logprobs:
            self._untold += self.logprob_writer(self.request.logprobs).chat(delta.logprobs).content
        if self._parser is None:
            parts = [AnswerPart("content", delta.text)] if delta.text else []
        else:
            parts = self._parser.push(delta.text) + (self._parser.finish() if isinstance(delta.ending, Finished) else [])
        for part in parts:
            yield from self._part_events(part)
        if isinstance(delta.ending, Finished):
            self._ending = delta.ending
            if not self._items:
                yield from self._begin("message")
            yield from self._end(self._status)

    def _part_events(self, part: AnswerPart) -> _Events:
        """The part goes on with the last item, or begins another."""
        kind = _ITEM_KINDS[part.kind]
        if part.kind == "call" or not self._is_open or self._items[-1].kind != kind:
            yield from self._end("completed")
            yield from self._begin(kind, part.text)
        if part.kind != "call":
            self._items[-1].texts.append(part.text)
            more: dict[str, Any] = {}
            if kind == "message":
                more["logprobs"], self._untold = self._untold, []
                self._items[-1].logprobs += more["logprobs"]
            yield f"response.{_TEXT_EVENTS[kind]}.delta", self._place() | {"delta": part.text} | more

    def _begin(self, kind: ItemKind, name: str = "") -> _Events:
        """Begin an item. name: of the function, for a call."""
        item = OutputItem(kind, _ID_PREFIXES[kind] + secrets.token_hex(12))
        self._items.append(item)
        self._is_open = True
        if kind == "function_call":
            item.call_id, item.name = self.accepted.reading.new_id(), name
        yield "response.output_item.added", {"output_index": len(self._items) - 1, "item": item.output("in_progress")}
        if kind != "function_call":
            yield "response.content_part.added", self._place() | {"part": item.part("")}

    def _end(self, status: Status) -> _Events:
        """End the last item, if it goes on."""
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        text, name = item.text, f"response.{_TEXT_EVENTS[item.kind]}.done"
        if item.kind == "function_call":
            yield name, self._place() | {"arguments": text, "name": item.name}
        else:
            item.logprobs += self._untold
            yield name, self._place() | {"text": text} | ({"logprobs": item.logprobs} if item.kind == "message" else {})
            yield "response.content_part.done", self._place() | {"part": item.part(text)}
        yield "response.output_item.done", {"output_index": len(self._items) - 1, "item": item.output(status)}

    def _place(self) -> dict[str, Any]:
        """Where the last item is. Only texts have content parts, one each."""
        item = self._items[-1]
        place = {"item_id": item.id, "output_index": len(self._items) - 1}
        return place if item.kind == "function_call" else place | {"content_index": 0}

    @property
    def _status(self) -> Status:
        """How the answer ends; its last item ends so too."""
        return "completed" if self._ending.reason == "stop" else "incomplete"

    def _body(self, status: Status) -> ResponseBody:
        """The response object. status: of the answer; its items are in it when it has ended."""
        fields, usage = self.request.body, self.usage()
        ended, last = status != "in_progress", len(self._items) - 1
        was_cut = status == "incomplete" and self._ending.reason == "length"
        outputs = [item.output(status if number == last else "completed") for number, item in enumerate(self._items)]
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
        )
