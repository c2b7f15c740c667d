"""What an answer with calls must look like, as a grammar: so that required calls come, and strict arguments match their schemas.

Owns the formats' syntax as structural tags (https://xgrammar.mlc.ai/docs/tutorials/structural_tag). Builds them as plain data:
the instances' xgrammar reads them. What it lets through, the reader of the same format reads as calls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

import msgspec

from common.errors import BadRequest
from common.sampling_params import Grammar
from engine.grammar.grammars import check_text
from router.api.output.parser import THINK, THINK_END
from router.api.output.tool_formats import ARGS, CALL, CALL_END, PYTHON_TAG, TOOL_CALLS
from router.api.tools import Function, ToolUse

Format: TypeAlias = Mapping[str, Any]
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """How calls are written. before_name, after_name: what stands before the arguments. separator: between calls. frame: what
    stands around all of them. trigger: what free text cannot hold without a call behind it. starts_bare: an answer of nothing but
    calls begins without the trigger, which other text needs; a new line serves there too."""

    before_name: str
    after_name: str
    end: str
    trigger: str
    separator: str = ""
    frame: tuple[str, str] = ("", "")
    starts_bare: bool = False

    def calls(self, functions: Sequence[tuple[str, Format]], *, parallel: bool) -> dict[str, Any]:
        """One call of these functions or more, and nothing else. functions: names, and schemas of arguments."""
        many = {
            "type": "tags_with_separator",
            "tags": self._tags(functions),
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        return _tag(self.frame[0], many, self.frame[1]) if any(self.frame) else many

    def text_and_calls(self, functions: Sequence[tuple[str, Format]], *, parallel: bool) -> dict[str, Any]:
        """Any text, in which what begins as a call is one call of these functions or more."""
        calls = self.calls(functions, parallel=parallel)
        tags = [calls] if any(self.frame) else self._tags(functions)
        text = {"type": "triggered_tags", "triggers": [self.trigger], "tags": tags, "stop_after_first": not parallel}
        if not self.starts_bare:
            return text
        starts, bare = (self.trigger, "\n"), self.before_name.removesuffix(': "')
        text["triggers"] = [self.trigger, "\n" + bare]
        text["tags"] = [tag | {"begin": start + tag["begin"]} for tag in tags for start in starts]
        text["excludes"] = [between + bare for between in ("; ", ", ", "[")]  # what the reader would read as calls too
        first = {"type": "regex", "pattern": r"[^{<\[\s]"}
        return _either(calls, _one_after_other(first, text), text | {"at_least_one": True})

    def _tags(self, functions: Sequence[tuple[str, Format]]) -> list[dict[str, Any]]:
        return [
            _tag(f"{self.before_name}{name}{self.after_name}", {"type": "json_schema", "json_schema": schema}, self.end)
            for name, schema in functions
        ]


HERMES_SYNTAX = CallSyntax(
    before_name=CALL + '\n{"name": "', after_name='", "arguments": ', end="}\n" + CALL_END, trigger=CALL, separator="\n"
)
LLAMA3_SYNTAX = CallSyntax(
    before_name='{"name": "', after_name='", "parameters": ', end="}", trigger=PYTHON_TAG, separator="; ", starts_bare=True
)
MISTRAL_SYNTAX = CallSyntax(
    before_name='{"name": "',
    after_name='", "arguments": ',
    end="}",
    trigger=TOOL_CALLS,
    separator=", ",
    frame=(TOOL_CALLS + "[", "]"),
)
MISTRAL_ARGS_SYNTAX = CallSyntax(before_name=TOOL_CALLS, after_name=ARGS, end="", trigger=TOOL_CALLS)
"""Of newer models, whose templates write [ARGS]."""


def answer_grammar(
    use: ToolUse, syntax: CallSyntax | None, response: Grammar | None, *, thinks: bool, opened: bool
) -> Grammar | None:
    """What the answer must match; None: anything. syntax: None when it may hold no calls. response: what its content must match;
    where calls are required there is none. thinks: thoughts may come first; opened: they will. Raises BadRequest when `response`
    cannot be joined with the rest, or for a schema that no answer can be held to."""
    answer: Format | None = None if syntax is None else _calls(use, syntax, response)
    if answer is None:
        if response is None or not thinks:
            return response
        answer = _format_of(response)
    if thinks:
        thoughts = _tag("" if opened else THINK, {"type": "any_text", "excludes": [THINK, THINK_END]}, THINK_END)
        blank = {"type": "regex", "pattern": r"\n{0,2}"}
        before = _one_after_other(thoughts, blank)
        answer = _one_after_other(before if opened else {"type": "optional", "content": before}, answer)
    grammar = Grammar("structural_tag", msgspec.json.encode({"type": "structural_tag", "format": answer}).decode())
    check_text(grammar, "response_format" if syntax is None else "tools")
    return grammar


def _calls(use: ToolUse, syntax: CallSyntax, response: Grammar | None) -> dict[str, Any] | None:
    """The content with its calls; None when both may be anything."""
    if use.required or response is not None:
        calls = syntax.calls([(one.name, _schema(one, one.strict is not False)) for one in use.callable], parallel=use.parallel)
        return calls if use.required or response is None else _either(calls, _format_of(response))
    if use.parallel and not any(one.strict for one in use.callable):
        return None
    functions = [(one.name, _schema(one, one.strict is True)) for one in use.callable]
    return syntax.text_and_calls(functions, parallel=use.parallel)


def _schema(function: Function, is_strict: bool) -> Format:
    return function.parameters if is_strict and function.parameters is not None else _ANY_OBJECT


def _format_of(grammar: Grammar) -> Format:
    match grammar.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": msgspec.json.decode(grammar.text)}
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case "structural_tag":
            tag = msgspec.json.decode(grammar.text)
            if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
                fix = 'send {"type": "structural_tag", "format": …}'
                raise BadRequest(f"with tools or thoughts, a structural tag must have a format: {fix}", field="response_format")
            return dict(tag["format"])
        case _:
            assert_never(grammar.kind)


def _tag(begin: str, content: Format, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _either(*options: Format) -> dict[str, Any]:
    return {"type": "or", "elements": options}


def _one_after_other(*parts: Format) -> dict[str, Any]:
    return {"type": "sequence", "elements": parts}
