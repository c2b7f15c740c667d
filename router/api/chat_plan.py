"""What a chat asks of the served model: what its template gets, and how its answer is read.

Owns the refusals of what the model's chat template or its format cannot do. Does not know fields, tokens or the fleet.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from msgspec import structs

from common.config import RouterConfig
from common.errors import BadRequest
from common.text.tokenizer_manager import ChatOptions
from router.api.chat import ChatRequest
from router.api.errors import shown
from router.api.parsing.formats import THINK_MARKS, AnswerFormat, ToolFormat, answer_format, answer_grammar
from router.api.parsing.parser import PLAIN_TEXT, THINK, THINK_END, AnswerParser, AnswerReading
from router.requests import RequestSpec

TAIL_TOKENS = 16
"""The end of a prompt: it holds the mark with which the prompt opens the answer's thoughts, if it does."""


class ChatTemplate(Protocol):
    """What `common.text.tokenizer_manager.TokenizerManager` knows of its chat template."""

    @property
    def chat_template(self) -> str: ...

    @property
    def special_tokens(self) -> Mapping[str, int]: ...

    @property
    def reads_tools(self) -> bool: ...

    def reads(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """How a chat's prompt is written, and how its answer is read."""

    request: ChatRequest
    options: ChatOptions
    """What the chat template gets beside the messages."""
    thinks: bool
    """Whether the answer may begin with thoughts."""
    tools: ToolFormat | None
    """The format of the calls; None: there are none."""
    shown: tuple[int, ...]
    """The marks that are special tokens: the detokenizer must show these, though it skips others."""

    def reading(self, opened: bool) -> AnswerReading:
        """opened: see `opens_thoughts`."""
        format, separates = self.tools, self.thinks and self.request.separate_reasoning
        if format is None and not separates:
            return PLAIN_TEXT
        new_parser = partial(
            AnswerParser,
            thinks=separates,
            opened=opened,
            read_tools=None if format is None else format.read,
        )
        return AnswerReading(new_parser=new_parser, new_id=str if format is None else format.new_id)

    def completed(self, specs: Sequence[RequestSpec], opened: bool) -> tuple[RequestSpec, ...]:
        """The request's specs with what follows from the answer's format. Raises BadRequest."""
        grammar = answer_grammar(self.request.tools, self.tools, self.request.grammar, thinks=self.thinks, opened=opened)
        return tuple(
            dataclasses.replace(spec, sampling=structs.replace(spec.sampling, grammar=grammar), shown=self.shown)
            for spec in specs
        )

    def opens_thoughts(self, prompt_tail: str) -> bool:
        """Whether the answer begins within thoughts. prompt_tail: the text of the prompt's last TAIL_TOKENS tokens. A user's
        message may hold the mark too, so it counts at the very end."""
        if self.request.continue_final_message:
            text = str(self.request.messages[-1].get("content"))
            return text.rfind(THINK) > text.rfind(THINK_END)
        return prompt_tail.rstrip().endswith(THINK)


class ChatPlanner:
    """Plans chats with one model, named `model` in errors."""

    def __init__(self, template: ChatTemplate, model: str, config: RouterConfig) -> None:
        self._template = template
        self._model = model
        self._format: AnswerFormat = answer_format(template.chat_template, config.tool_parser, config.reasoning_parser)

    def plan(self, request: ChatRequest) -> ChatPlan:
        """Raises BadRequest for what the model's template does not do, and for calls in a format that is not known."""
        options = self.options(request)
        if request.tools.callable and self._format.tools is None:
            fix = "leave tools out, or start the router with --tool-parser"
            raise BadRequest(f"the format of the tool calls of {self._model} is not known: {fix}", field="tools")
        tools = self._format.tools if request.tools.callable else None
        marks = (THINK_MARKS if self._format.thinks else ()) + (() if tools is None else tools.marks)
        shown = tuple(self._template.special_tokens[mark] for mark in marks if mark in self._template.special_tokens)
        return ChatPlan(request=request, options=options, thinks=self._format.thinks, tools=tools, shown=shown)

    def options(self, request: ChatRequest) -> ChatOptions:
        """What the template gets. Raises BadRequest for what the model's template does not do."""
        if request.tools.shown and not self._template.reads_tools:
            fix = "leave tools out, or start the router with a --chat-template that does"
            raise BadRequest(f"the chat template of {self._model} does not show tools to the model: {fix}", field="tools")
        return ChatOptions(
            tools=request.tools.shown,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            arguments=self._arguments(request),
        )

    def _arguments(self, request: ChatRequest) -> Mapping[str, Any]:
        for name in request.template_arguments:
            if not self._template.reads(name):
                message = f"the chat template of {self._model} does not read {shown(name)!r}: leave it out"
                raise BadRequest(message, field=f"chat_template_kwargs.{shown(name)}")
        effort = request.reasoning_effort
        if effort is None or (effort == "none" and not self._template.reads("reasoning_effort")):
            return request.template_arguments
        if not self._template.reads("reasoning_effort"):
            message = f"the chat template of {self._model} does not use reasoning_effort: leave it out"
            raise BadRequest(message, field=request.effort_field, code="unsupported_parameter")
        return {"reasoning_effort": effort, **request.template_arguments}
