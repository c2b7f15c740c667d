"""The messages of a chat: their fields, and what the chat template gets of them.

Owns the roles. Does not know templates. Fields: https://platform.openai.com/docs/api-reference/chat.
"""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from common.errors import BadRequest
from router.api.bodies import json_in


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: Annotated[str, Meta(description="A piece of the message.")]


Content: TypeAlias = Annotated[str | list[TextPart] | None, Meta(description="The text. Null is an empty text.")]


def text_of(content: str | list[TextPart] | None) -> str:
    return content or "" if content is None or isinstance(content, str) else "".join(part.text for part in content)


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", kw_only=True):
    name: Annotated[str | None, Meta(description="Who speaks, for chat templates that use it.")] = None

    def _for_template(self, role: str, content: str | list[TextPart] | None) -> dict[str, Any]:
        message = {"role": role, "content": text_of(content)}
        return message if self.name is None else message | {"name": self.name}


class SystemMessage(_Message, frozen=True, tag="system"):
    content: Content

    def for_template(self, path: str) -> dict[str, Any]:
        return self._for_template("system", self.content)


class DeveloperMessage(SystemMessage, frozen=True, tag="developer"):
    """OpenAI's newer name of `system`; chat templates know the older one."""


class UserMessage(_Message, frozen=True, tag="user"):
    content: Content

    def for_template(self, path: str) -> dict[str, Any]:
        return self._for_template("user", self.content)


class FunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(description="Which function was called.")]
    arguments: Annotated[str, Meta(description="A JSON object, as text.")] = "{}"
    parsed_arguments: Annotated[Any, Meta(description="As OpenAI's client reads the arguments. It changes nothing.")] = None


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that an answer made."""

    function: Annotated[FunctionCall, Meta(description="What was called.")]
    id: Annotated[str, Meta(description="The id of the call, to which a tool message answers.")] = ""
    type: Annotated[Literal["function"], Meta(description="The only kind of call.")] = "function"
    index: Annotated[int | None, Meta(description="As a streamed answer has it. It changes nothing.")] = None

    def for_template(self, path: str) -> dict[str, Any]:
        """Its arguments as an object: templates write it in the model's own way. Raises BadRequest."""
        call = {"name": self.function.name, "arguments": arguments_of(self.function.arguments, f"{path}.function.arguments")}
        return ({"id": self.id} if self.id else {}) | {"type": "function", "function": call}


def arguments_of(text: str, path: str) -> dict[str, Any]:
    """Raises BadRequest when the text is no JSON object."""
    arguments = json_in(text or "{}", path)
    if not isinstance(arguments, dict):
        raise BadRequest(f"{path} must be a JSON object, as text", field=path, code="invalid_value")
    return arguments


class AssistantMessage(_Message, frozen=True, tag="assistant"):
    content: Content = None
    parsed: Annotated[Any, Meta(description="As OpenAI's client reads the content. It changes nothing.")] = None
    tool_calls: Annotated[list[ToolCall], Meta(description="What the assistant called.")] = []
    reasoning_content: Annotated[str | None, Meta(description="What the model thought, for templates that use it.")] = None
    reasoning: Annotated[str | None, Meta(description="Another name of reasoning_content.")] = None

    def for_template(self, path: str) -> dict[str, Any]:
        message = self._for_template("assistant", self.content)
        thought = self.reasoning_content if self.reasoning is None else self.reasoning
        if thought is not None:
            message["reasoning_content"] = thought
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            message["tool_calls"] = [call.for_template(f"{path}.tool_calls[{index}]") for index, call in calls]
        return message


class ToolMessage(_Message, frozen=True, tag="tool"):
    """What a call of the model returned."""

    content: Content
    tool_call_id: Annotated[str, Meta(description="The id of the call.")] = ""

    def for_template(self, path: str) -> dict[str, Any]:
        message = self._for_template("tool", self.content)
        return message | {"tool_call_id": self.tool_call_id} if self.tool_call_id else message


ChatMessage: TypeAlias = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
