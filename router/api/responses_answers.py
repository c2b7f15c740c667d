"""The answers of POST /v1/responses as JSON: a list of items, whole or as typed events.

Owns their shape. The same parts make the events of a stream and the items of a whole answer:

    created, in_progress ─► for each item: added ─► deltas ─► done ─► completed, or incomplete when the limit cut it

Events: https://platform.openai.com/docs/api-reference/responses-streaming.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, assert_never

import msgspec

from common.messages import Failed, Finished
from router.api.answers import AnswerShape, PromptDetails, WholeChoice
from router.api.parsing.parser import AnswerParser, Arguments, CallBegins, Content, Part, Reasoning
from router.api.responses import NamedFunction, ReasoningConfig, ResponseRequest, ResponseTool, TextConfig
from router.api.structured import TextFormat
from router.outbox import ChoiceDelta

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]
_Kind: TypeAlias = Literal["message", "reasoning", "function_call"]
_encode = msgspec.json.Encoder().encode


class OutputPart(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


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


@dataclass(slots=True)
class _Item:
    """An item of the answer, as far as it has come. kind: its type. texts: in pieces. call_id, name: of a call."""

    kind: _Kind
    id: str
    texts: list[str] = field(default_factory=list)
    call_id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self, text: str) -> OutputPart | ThoughtPart:
        """Its content part, with this text."""
        return ThoughtPart(text) if self.kind == "reasoning" else OutputPart(text)

    def output(self, status: Status) -> Output:
        """As clients get it: an item in progress is empty."""
        is_empty = status == "in_progress"
        text = "" if is_empty else self.text
        match self.kind:
            case "message":
                return MessageOutput(self.id, status, () if is_empty else (OutputPart(text),))
            case "reasoning":
                return ReasoningOutput(self.id, status, () if is_empty else (ThoughtPart(text),))
            case "function_call":
                return CallOutput(self.id, status, self.call_id, self.name, text)
            case _:
                assert_never(self.kind)


_TEXT_EVENTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
_ID_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
_Events: TypeAlias = Iterator[tuple[str, dict[str, Any]]]


@dataclass(slots=True, kw_only=True, eq=False)
class ResponseShape(AnswerShape[ResponseRequest]):
    """/v1/responses"""

    _parser: AnswerParser | None = field(default=None, init=False)
    _items: list[_Item] = field(default_factory=list, init=False)
    _is_open: bool = field(default=False, init=False)
    """Whether the last item goes on."""
    _ending: Finished = field(default=Finished(reason="stop"), init=False)
    _sent: int = field(default=0, init=False)
    """Events so far: each says its number."""

    def __post_init__(self) -> None:
        new_parser = self.accepted.reading.new_parser
        self._parser = None if new_parser is None else new_parser()

    def events(self, delta: ChoiceDelta, *, opens: bool) -> bytes:
        self.count(delta.index, delta)
        return b"".join(self._event(kind, fields) for kind, fields in self._news(delta, opens=opens))

    def last_events(self) -> bytes:
        body = self._body(self._status)
        return self._event(f"response.{body.status}", {"response": body})

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        (choice,) = choices
        self.count(0, choice)
        for _ in self._news(ChoiceDelta(0, choice.text, (), choice.ending), opens=False):
            pass  # the events of a stream; the items are what is wanted
        return _encode(self._body(self._status))

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        data = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        return b"event: " + kind.encode() + b"\ndata: " + _encode(data) + b"\n\n"

    def _news(self, delta: ChoiceDelta, *, opens: bool) -> _Events:
        if opens:
            yield "response.created", {"response": self._body("in_progress")}
            yield "response.in_progress", {"response": self._body("in_progress")}
        if isinstance(delta.ending, Finished):
            self._ending = delta.ending
        ends = delta.ending is not None and not isinstance(delta.ending, Failed)
        for part in self._parts(delta.text, ends=ends):
            yield from self._told(part)
        if ends:
            if not self._items:
                yield from self._begin(_Item("message", self._new_id("message")))
            yield from self._end(self._status)

    def _parts(self, text: str, *, ends: bool) -> list[Part]:
        if self._parser is None:
            return [Content(text)] if text else []
        return self._parser.push(text) + (self._parser.finish() if ends else [])

    def _told(self, part: Part) -> _Events:
        """The events of one part. It goes on with the last item, or begins another."""
        match part:
            case Content(text):
                yield from self._text("message", text)
            case Reasoning(text):
                yield from self._text("reasoning", text)
            case CallBegins(name):
                yield from self._end("completed")
                call_id = self.accepted.reading.new_id()
                yield from self._begin(_Item("function_call", self._new_id("function_call"), call_id=call_id, name=name))
            case Arguments(text):
                yield from self._text("function_call", text)
            case _:
                assert_never(part)

    def _text(self, kind: _Kind, text: str) -> _Events:
        if not self._is_open or self._items[-1].kind != kind:
            yield from self._end("completed")
            yield from self._begin(_Item(kind, self._new_id(kind)))
        self._items[-1].texts.append(text)
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield f"response.{_TEXT_EVENTS[kind]}.delta", self._place() | {"delta": text} | more

    def _begin(self, item: _Item) -> _Events:
        self._items.append(item)
        self._is_open = True
        yield "response.output_item.added", {"output_index": len(self._items) - 1, "item": item.output("in_progress")}
        if item.kind != "function_call":
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
            yield name, self._place() | {"text": text} | ({"logprobs": []} if item.kind == "message" else {})
            yield "response.content_part.done", self._place() | {"part": item.part(text)}
        yield "response.output_item.done", {"output_index": len(self._items) - 1, "item": item.output(status)}

    def _place(self) -> dict[str, Any]:
        """Where the last item is. Only texts have content parts, one each."""
        item = self._items[-1]
        place = {"item_id": item.id, "output_index": len(self._items) - 1}
        return place if item.kind == "function_call" else place | {"content_index": 0}

    def _new_id(self, kind: _Kind) -> str:
        return _ID_PREFIXES[kind] + secrets.token_hex(12)

    @property
    def _status(self) -> Status:
        """How the answer ends; its last item ends so too."""
        return "completed" if self._ending.reason == "stop" else "incomplete"

    def _usage(self) -> ResponseUsage:
        usage = self.usage()
        return ResponseUsage(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.prompt_tokens_details)

    def _body(self, status: Status) -> ResponseBody:
        """The response object. status: of the answer; its items are in it when it has ended."""
        asked = self.asked.body
        ended, last = status != "in_progress", len(self._items) - 1
        was_cut = status == "incomplete" and self._ending.reason == "length"
        outputs = [item.output(status if number == last else "completed") for number, item in enumerate(self._items)]
        return ResponseBody(
            id=self.id,
            created_at=self.created,
            status=status,
            model=self.model,
            output=outputs if ended else (),
            usage=self._usage() if ended else None,
            incomplete_details=IncompleteDetails("max_output_tokens") if was_cut else None,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata,
            parallel_tool_calls=asked.parallel_tool_calls,
            reasoning=asked.reasoning or ReasoningConfig(),
            temperature=asked.temperature,
            text=TextConfig(TextFormat()) if asked.text is None or asked.text.format is None else asked.text,
            tool_choice=asked.tool_choice or "auto",
            tools=asked.tools,
            top_p=asked.top_p,
            user=asked.user or None,
        )
