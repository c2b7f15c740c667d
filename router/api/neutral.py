"""Standard fields of the OpenAI API that Tandem does not support, and the values with which they ask for nothing.

Owns the table. A field with such a value is dropped before the request is read. With any other value it is refused by name.
"""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from common.errors import BadRequest

_NOTHING: tuple[object, ...] = ()

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
NEUTRAL_CHAT_VALUES: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL_VALUES,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": _NOTHING,
    "prediction": _NOTHING,
    "verbosity": _NOTHING,
    "web_search_options": _NOTHING,
    "chat_template": _NOTHING,
    "documents": ([],),
}
NEUTRAL_COMPLETION_VALUES: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL_VALUES,
    "suffix": ("",),
}
NEUTRAL_STREAM_VALUES: Mapping[str, tuple[object, ...]] = {"include_obfuscation": (False,)}
"""Of `stream_options`."""
NEUTRAL_RESPONSE_VALUES: Mapping[str, tuple[object, ...]] = {
    "store": (False,),
    "previous_response_id": _NOTHING,
    "conversation": _NOTHING,
    "prompt": _NOTHING,
    "include": ([],),
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "max_tool_calls": _NOTHING,
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": _NOTHING,
    "stream_options": ({}, {"include_obfuscation": False}),
    "context_management": _NOTHING,
}
NEUTRAL_REASONING_VALUES: Mapping[str, tuple[object, ...]] = {"summary": _NOTHING, "generate_summary": _NOTHING}
"""Of a response's `reasoning`: there are no summaries, thoughts are in `content`."""
NEUTRAL_ITEM_VALUES: Mapping[str, tuple[object, ...]] = {
    "async": (False,),
    "async_": (False,),
    "caller": _NOTHING,
    "namespace": _NOTHING,
    "encrypted_content": _NOTHING,
}
"""Fields that OpenAI's client adds to the items of our own answers when it sends them back."""
NEUTRAL_MESSAGE_VALUES: Mapping[str, tuple[object, ...]] = {
    "refusal": _NOTHING,
    "audio": _NOTHING,
    "annotations": ([],),
    "function_call": _NOTHING,
}
"""Fields that the messages of our own answers have when a client sends them back."""


def drop_neutral(
    fields: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]], known: Collection[str] = (), path: str = ""
) -> dict[str, Any]:
    """The fields without those that ask for nothing. Null asks for nothing in neutral fields and in the known ones. Raises
    BadRequest for a neutral field that asks for something."""
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in neutral:
            if value is not None or name not in known:
                kept[name] = value
        elif value is not None and value not in neutral[name]:
            allowed = " or ".join(msgspec.json.encode(option).decode() for option in neutral[name])
            fix = f"leave it out or send {allowed}" if allowed else "leave it out"
            raise BadRequest(f"{path}{name} is not supported: {fix}", field=path + name, code="unsupported_parameter")
    return kept
