"""Which format a model's answers have: by flag, or by what its chat template writes.

Owns the names of the formats. Does not know requests.
"""

import secrets
import string
from dataclasses import dataclass, replace

from common.config import ReasoningParserName, ToolParserName
from router.api.output.grammars import (
    HERMES_SYNTAX,
    LLAMA3_SYNTAX,
    MISTRAL_ARGS_SYNTAX,
    MISTRAL_SYNTAX,
    CallSyntax,
)
from router.api.output.parser import THINK, THINK_END, ToolReader
from router.api.output.tool_formats import (
    ARGS,
    CALL,
    CALL_END,
    CALL_ID,
    PYTHON_TAG,
    TOOL_CALLS,
    read_hermes,
    read_llama3,
    read_mistral,
)

THINK_MARKS = (THINK, THINK_END)
_OTHER_FORMATS = ("<function=", "<arg_key>")
"""What models write in <tool_call> that is not Hermes' JSON: Qwen 3 Coder's and GLM's formats."""
_SHORT_ID = string.ascii_letters + string.digits
_SHORT_ID_CHARS = 9
"""Mistral's templates refuse longer ids of calls."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """marks: what stands around its calls; where these are special tokens, the detokenizer must show those. syntax: how calls
    that a grammar demands are written. has_short_ids: its calls need ids of nine letters and digits."""

    name: ToolParserName
    read: ToolReader
    marks: tuple[str, ...]
    syntax: CallSyntax
    has_short_ids: bool = False

    def new_id(self) -> str:
        if self.has_short_ids:
            return "".join(secrets.choice(_SHORT_ID) for _ in range(_SHORT_ID_CHARS))
        return "call_" + secrets.token_hex(12)


HERMES = ToolFormat("hermes", read_hermes, (CALL, CALL_END), HERMES_SYNTAX)
LLAMA3 = ToolFormat("llama3", read_llama3, (PYTHON_TAG,), LLAMA3_SYNTAX)
MISTRAL = ToolFormat("mistral", read_mistral, (TOOL_CALLS, CALL_ID, ARGS), MISTRAL_SYNTAX, has_short_ids=True)
MISTRAL_ARGS = replace(MISTRAL, syntax=MISTRAL_ARGS_SYNTAX)
TOOL_FORMATS = {format.name: format for format in (HERMES, LLAMA3, MISTRAL)}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """tools: None when the model's calls cannot be read. thinks: its answers may begin with thoughts."""

    tools: ToolFormat | None
    thinks: bool


def answer_format(chat_template: str, tool_parser: ToolParserName, reasoning_parser: ReasoningParserName) -> AnswerFormat:
    """chat_template: its source."""
    tools = _format_in(chat_template) if tool_parser == "auto" else TOOL_FORMATS.get(tool_parser)
    if tools is MISTRAL and ARGS in chat_template:
        tools = MISTRAL_ARGS
    has_thoughts = any(mark in chat_template for mark in THINK_MARKS)
    return AnswerFormat(tools, has_thoughts if reasoning_parser == "auto" else reasoning_parser == "think")


def _format_in(chat_template: str) -> ToolFormat | None:
    if TOOL_CALLS in chat_template:
        return MISTRAL
    if CALL in chat_template and not any(mark in chat_template for mark in _OTHER_FORMATS):
        return HERMES
    if PYTHON_TAG in chat_template or ("<|start_header_id|>" in chat_template and '"parameters": ' in chat_template):
        return LLAMA3
    return None
