"""The body of POST /v1/chat/completions.

Owns its own fields. Fields: https://platform.openai.com/docs/api-reference/chat.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.errors import BadRequest
from router.api.fields import ReadRequest, SamplingFields, Tokens, TopLogprobs, checked_stops, convert, object_in
from router.api.neutral import NEUTRAL_CHAT_VALUES, NEUTRAL_MESSAGE_VALUES, drop_neutral


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[TextPart] | None, Meta(description="The text. Null is an empty text.")]
    name: Annotated[str | None, Meta(description="Who speaks, for chat templates that use it.")] = None

    def for_template(self) -> dict[str, str]:
        """What the chat template gets. `developer` is OpenAI's newer name of `system`; chat templates know the older one."""
        content = self.content or ""
        message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content if isinstance(content, str) else "".join(part.text for part in content),
        }
        return message if self.name is None else message | {"name": self.name}


class ChatFields(SamplingFields, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(description="The conversation so far.")]
    max_completion_tokens: Annotated[Tokens | None, Meta(description="Another name of max_tokens.")] = None
    logprobs: Annotated[bool, Meta(description="Send how likely each token of the answer was.")] = False
    top_logprobs: Annotated[
        TopLogprobs | None, Meta(description="With `logprobs`, also send so many of the likeliest tokens in each place.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ReadRequest):
    messages: tuple[Mapping[str, str], ...]


def read_chat(body: bytes, context_tokens: int | None = None) -> ChatRequest:
    """The body of POST /v1/chat/completions. Raises BadRequest."""
    raw = drop_neutral(object_in(body), NEUTRAL_CHAT_VALUES, ChatFields.__struct_encode_fields__)
    messages = raw.get("messages")
    if isinstance(messages, list):
        raw["messages"] = [
            drop_neutral(message, NEUTRAL_MESSAGE_VALUES, path=f"messages[{index}].") if isinstance(message, dict) else message
            for index, message in enumerate(messages)
        ]
    fields = convert(raw, ChatFields)
    if not fields.messages:
        raise BadRequest("messages is empty: send at least one message", field="messages")
    limit, name = fields.max_tokens, "max_tokens"
    if fields.max_completion_tokens is not None:
        if limit is not None and limit != fields.max_completion_tokens:
            raise BadRequest("max_tokens and max_completion_tokens differ: send one of them", field="max_tokens")
        limit, name = fields.max_completion_tokens, "max_completion_tokens"
    if fields.top_logprobs and not fields.logprobs:
        raise BadRequest("top_logprobs is for logprobs only: leave it out or send logprobs=true", field="top_logprobs")
    return ChatRequest(
        fields=fields,
        stop=checked_stops(fields),
        max_tokens=limit,
        max_tokens_field=name,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        prompt_logprobs=fields.prompt_logprobs,
        messages=tuple(message.for_template() for message in fields.messages),
    )
