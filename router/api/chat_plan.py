"""What a chat asks of the served model: what its template gets, and how its answer is read.

Owns the refusals of what the model's chat template or its format cannot do. Does not know fields or the fleet.
"""

import dataclasses
from typing import Any

from msgspec import structs

from common.config import RouterConfig
from common.errors import BadRequest
from common.ids import ID_BYTES, unpack_ids
from common.text.tokenizer_manager import ChatOptions, TokenizerManager
from router.api.answers import Accepted
from router.api.chat import ChatRequest
from router.api.errors import shown
from router.api.parsing.formats import answer_format
from router.api.parsing.grammars import answer_grammar
from router.api.parsing.parser import AnswerReading

TAIL_TOKENS = 16
"""The end of a prompt: it holds the mark with which the prompt opens the answer's thoughts, if it does."""
_SWITCHES = ("enable_thinking", "thinking")
"""What chat templates call the switch for thoughts (Qwen 3 and GLM 4.5; DeepSeek V3.1)."""


class ChatPlanner:
    """Plans chats with one model, named `model` in errors."""

    def __init__(self, tokenizer: TokenizerManager, model: str, config: RouterConfig) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._format = answer_format(tokenizer.chat_template, config.tool_parser, config.reasoning_parser)

    def options(self, request: ChatRequest) -> ChatOptions:
        """What the template gets. Raises BadRequest for what the model's template does not do."""
        if request.tools.shown and not self._tokenizer.reads_tools:
            fix = "leave tools out, or start the router with a --chat-template that does"
            raise BadRequest(f"the chat template of {self._model} does not show tools to the model: {fix}", field="tools")
        arguments, effort = request.fields.chat_template_kwargs, request.fields.reasoning_effort
        for name in arguments:
            if not self._tokenizer.reads(name):
                message = f"the chat template of {self._model} does not read {shown(name)!r}: leave it out"
                raise BadRequest(message, field=f"chat_template_kwargs.{shown(name)}")
        verbosity = request.fields.verbosity
        hints = ("reasoning_effort", effort, "none", request.effort_field), ("verbosity", verbosity, "medium", "verbosity")
        for name, hint, usual, field in hints:
            if hint is not None and self._tokenizer.reads(name):
                arguments = {name: hint, **arguments}
            elif hint not in (None, usual) and field:
                message = f"the chat template of {self._model} does not use {name}: leave it out"
                raise BadRequest(message, field=field, code="unsupported_parameter")
        return ChatOptions(
            tools=request.tools.shown,
            add_generation_prompt=request.fields.add_generation_prompt,
            continue_final_message=request.fields.continue_final_message,
            arguments=arguments if request.thinking is None else self._thinking(request) | arguments,
        )

    def _thinking(self, request: ChatRequest) -> dict[str, Any]:
        """What tells the template whether the model is to think. Raises BadRequest when it must and cannot, or the other way."""
        wanted = request.thinking != "disabled"
        switches = {name: wanted for name in _SWITCHES if self._tokenizer.reads(name)}
        if not switches and (self._format.thoughts is not None) != wanted and request.thinking != "adaptive":
            problem = "does not let the model think" if wanted else "always lets the model think"
            raise BadRequest(f"the chat template of {self._model} {problem}: leave thinking out", field="thinking")
        return switches

    def require_known_calls(self, request: ChatRequest) -> None:
        """Raises BadRequest for calls in a format that is not known."""
        if request.tools.callable and self._format.tools is None:
            fix = "leave tools out, or start the router with --tool-parser"
            raise BadRequest(f"the format of the tool calls of {self._model} is not known: {fix}", field="tools")

    def completed(self, request: ChatRequest, accepted: Accepted) -> Accepted:
        """The accepted request with what follows from the format of its answers: their grammar, the marks that the detokenizer
        must show though it skips other special tokens, and how their texts are read. Raises BadRequest."""
        tools = self._format.tools if request.tools.callable else None
        marks = self._format.marks(calls=tools is not None)
        if not marks:
            return accepted
        opened = self._opens_thoughts(request, accepted.specs[0].prompt)
        grammar = answer_grammar(request.tools, self._format, request.grammar, opened=opened)
        special = self._tokenizer.special_tokens.items()
        shown_marks = tuple(token for text, token in special if any(text in mark for mark in marks))
        specs = tuple(
            dataclasses.replace(spec, sampling=structs.replace(spec.sampling, grammar=grammar), shown=shown_marks)
            for spec in accepted.specs
        )
        separates = request.fields.separate_reasoning
        new_parser = self._format.new_parser(request.tools.callable, separates=separates, opened=opened)
        if new_parser is None:
            return dataclasses.replace(accepted, specs=specs)
        if request.text_alone_field:
            problem = "is for answers of text alone: leave it out, or use POST /v1/chat/completions"
            raise BadRequest(f"{request.text_alone_field} {problem}", field=request.text_alone_field)
        reading = AnswerReading(new_parser)
        if tools is not None:
            earlier = sum(len(message.get("tool_calls", ())) for message in request.messages)
            reading = AnswerReading(new_parser, lambda name, number: tools.new_id(name, earlier + number))
        return dataclasses.replace(accepted, specs=specs, reading=reading)

    def _opens_thoughts(self, request: ChatRequest, prompt: bytes) -> bool:
        """Whether the answer begins within thoughts. A user's message may hold the mark too, so it counts at the very end."""
        thoughts = self._format.thoughts
        if thoughts is None or thoughts.always:
            return thoughts is not None
        if request.fields.continue_final_message:
            text = str(request.messages[-1].get("content"))
            return text.rfind(thoughts.begin) > text.rfind(thoughts.end)
        tail = self._tokenizer.decode(unpack_ids(prompt[-TAIL_TOKENS * ID_BYTES :]).tolist(), skip_special_tokens=False)
        return tail.rstrip().endswith(thoughts.begin)
