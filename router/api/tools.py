"""The functions that a model may call: how clients describe them, and which of them the answer may or must call.

Owns the fields `tools`, `tool_choice` and `parallel_tool_calls`, as OpenAI's API has them. Does not know how a model writes its
calls.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from common.errors import BadRequest
from router.api.errors import shown

MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(description="What the model calls it.")]
    description: Annotated[str | None, Meta(description="For the model: what it does.")] = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="JSON schema of the arguments; without it: any object.")] = None
    strict: Annotated[
        bool | None,
        Meta(description="True: calls are sure to match `parameters`. False: not even calls that `tool_choice` demands."),
    ] = None

    def for_template(self) -> dict[str, Any]:
        """What the chat template gets, in the order in which models were trained to read it."""
        fields = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: Annotated[Function, Meta(description="What the model may call.")]


class _Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(description="The name of the function that is called.")]


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: Annotated[_Named, Meta(description="The function that is called.")]


ToolChoice: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | NamedTool | None,
    Meta(description="none: no calls; auto: the model decides; required: at least one call; or the function that is called."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What an answer may call. shown: what the chat template shows the model. callable: what it may call; none: its answer is
    only text. required: the answer is one call of these or more. parallel: it may be more than one."""

    shown: tuple[Function, ...] = ()
    callable: tuple[Function, ...] = ()
    required: bool = False
    parallel: bool = True

    def for_template(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(function.for_template() for function in self.shown)


NO_TOOLS = ToolUse()


def tool_use(
    functions: Sequence[Function], choice: Literal["none", "auto", "required"] | str | None, parallel: bool, *, named: bool
) -> ToolUse:
    """choice: a policy, or with `named` a function's name. Raises BadRequest."""
    if len(functions) > MAX_TOOLS:
        raise BadRequest(f"tools holds {len(functions)} tools: send at most {MAX_TOOLS}", field="tools")
    for index, function in enumerate(functions):
        if not _NAME.fullmatch(function.name):
            rule = "1 to 128 letters, digits or any of _.:/-"
            raise BadRequest(f"tools[{index}]: the function's name must be {rule}, is {shown(function.name)!r}", field="tools")
    if named:
        chosen = tuple(function for function in functions if function.name == choice)[:1]
        if not chosen:
            raise BadRequest(f"tool_choice names {shown(str(choice))!r}, which is not among the tools", field="tool_choice")
        return ToolUse(shown=tuple(functions), callable=chosen, required=True, parallel=False)
    if choice == "required" and not functions:
        raise BadRequest("tool_choice is required, but there are no tools: send tools", field="tool_choice")
    callable = () if choice == "none" else tuple(functions)
    return ToolUse(shown=tuple(functions), callable=callable, required=choice == "required", parallel=parallel)
