"""The body of POST /v1/completions.

Owns its own fields. Fields: https://platform.openai.com/docs/api-reference/completions.
"""

from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from common.errors import BadRequest
from router.api.fields import ReadRequest, SamplingFields, checked_stops, convert, object_in
from router.api.neutral import NEUTRAL_COMPLETION_VALUES, drop_neutral

COMPLETION_MAX_TOKENS = 16
"""Length of an answer to /v1/completions when the request gives none, as at OpenAI."""
MAX_PROMPTS = 64


class CompletionFields(SamplingFields, frozen=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: Annotated[str | list[str | int | list[int]], Meta(description="One prompt or several, each a text or its token ids.")]


Prompt: TypeAlias = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(ReadRequest):
    """prompts: texts or token ids. Each gets `n` choices."""

    prompts: tuple[Prompt, ...]


def read_completion(body: bytes, context_tokens: int | None = None) -> CompletionRequest:
    """The body of POST /v1/completions. Raises BadRequest, for far more token ids than the context holds before they are read."""
    if context_tokens is not None and len(body) > context_tokens:
        _require_few_ids(body, context_tokens)
    raw = drop_neutral(object_in(body), NEUTRAL_COMPLETION_VALUES, CompletionFields.__struct_encode_fields__)
    fields = convert(raw, CompletionFields)
    prompts = _prompts(fields.prompt)
    return CompletionRequest(fields=fields, stop=checked_stops(fields), max_tokens=fields.max_tokens, prompts=prompts)


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    ids = [part for part in prompt if isinstance(part, int)]
    prompts: list[Prompt] = [part if isinstance(part, str) else tuple(part) for part in prompt if not isinstance(part, int)]
    if not prompt or (ids and prompts):
        fix = "send one prompt or a list of prompts, each a string or a list of token ids"
        raise BadRequest(f"prompt is {'a mixture of prompts and token ids' if prompt else 'empty'}: {fix}", field="prompt")
    if ids:
        return (tuple(ids),)
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(f"prompt holds {len(prompts)} prompts: send at most {MAX_PROMPTS}", field="prompt")
    return tuple(prompts)


class _PromptOnly(msgspec.Struct, frozen=True):
    prompt: msgspec.Raw = msgspec.Raw(b"")


def _require_few_ids(body: bytes, context_tokens: int) -> None:
    """Refuse one prompt of more token ids than the context holds. Ids are counted by their commas: objects take long to make, and
    nobody else runs meanwhile. What is no such prompt is left to the reader."""
    try:
        prompt = bytes(msgspec.json.decode(body, type=_PromptOnly).prompt)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if prompt[:1] != b"[" or prompt[1:64].lstrip()[:1] in (b"[", b'"', b"{"):
        return
    ids = prompt.count(b",") + 1
    if ids >= context_tokens:
        message = f"prompt has {ids} tokens, but the model's context of {context_tokens} must hold an answer too"
        fix = f"shorten it to at most {context_tokens - 1}"
        raise BadRequest(f"{message}: {fix}", field="prompt", code="context_length_exceeded")
