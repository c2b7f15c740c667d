"""Tools: the functions that an answer may call, as chats, responses and messages name them, and which of them it may or must use.

Owns these fields and their refusals. Does not know how a model writes its calls.
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
    name: str
    """What the model calls it."""
    description: str | None = None
    """For the model: what it does."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; without it: any object."""
    strict: bool | None = None
    """True: calls are sure to match `parameters`. False: not even calls that `tool_choice` demands."""

    def for_template(self) -> dict[str, Any]:
        """What the chat template gets, in the order in which models were trained to read it."""
        fields = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: Function
    """What the model may call."""


class _Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    """The name of the function that is called."""


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: _Named
    """The function that is called."""


class NamedFunction(_Named, frozen=True, tag_field="type", tag="function"):  # as POST /v1/responses has it
    pass


class _Allowed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    """Whether the answer must be a call."""
    tools: Annotated[list[NamedTool], Meta(min_length=1)]
    """The functions that may be called."""


class AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    allowed_tools: _Allowed
    """Which of the tools the model is shown and may call."""


ToolPolicy: TypeAlias = Literal["none", "auto", "required"]
CHOICE_OF_TOOLS = Meta(
    description="none: no calls; auto: the model decides; required: at least one call; or the function that is called."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What an answer may call."""

    shown: tuple[Mapping[str, Any], ...] = ()
    """What the chat template shows the model."""
    callable: tuple[Function, ...] = ()
    """The functions that it may call; without any its answer is only text."""
    required: bool = False
    """Whether the answer must be a call of these."""
    parallel: bool = True
    """Whether it may be more than one call."""


def tool_use(
    functions: Sequence[Function], choice: ToolPolicy | NamedTool | NamedFunction | AllowedTools | None, parallel: bool
) -> ToolUse:
    """What these fields let an answer call. Raises BadRequest."""
    if len(functions) > MAX_TOOLS:
        raise BadRequest(f"tools holds {len(functions)} tools: send at most {MAX_TOOLS}", field="tools")
    for index, function in enumerate(functions):
        if not _NAME.fullmatch(function.name):
            rule = "1 to 128 letters, digits or any of _.:/-"
            raise BadRequest(f"tools[{index}]: the function's name must be {rule}, is {shown(function.name)!r}", field="tools")
    if isinstance(choice, AllowedTools):  # the model sees no others: a call that need not come is not held to names
        names = {tool.function.name for tool in choice.allowed_tools.tools}
        if unknown := names - {function.name for function in functions}:
            problem = f"tool_choice allows {shown(unknown.pop())!r}, which is not among the tools"
            raise BadRequest(problem, field="tool_choice.allowed_tools.tools")
        functions = [function for function in functions if function.name in names]
        choice = choice.allowed_tools.mode
    shown_tools = tuple(function.for_template() for function in functions)
    if isinstance(choice, NamedTool | NamedFunction):
        name = choice.function.name if isinstance(choice, NamedTool) else choice.name
        chosen = tuple(function for function in functions if function.name == name)[:1]
        if not chosen:
            raise BadRequest(f"tool_choice names {shown(name)!r}, which is not among the tools", field="tool_choice")
        return ToolUse(shown=shown_tools, callable=chosen, required=True, parallel=False)
    if choice == "required" and not functions:
        raise BadRequest("tool_choice is required, but there are no tools: send tools", field="tool_choice")
    callable = () if choice == "none" else tuple(functions)
    return ToolUse(shown=shown_tools, callable=callable, required=choice == "required", parallel=parallel)
