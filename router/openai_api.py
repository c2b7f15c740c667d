"""The requests of the OpenAI API that Tandem serves: their fields, types and limits.

Owns the reading of a body: what is accepted, and for everything else an error that names the field and the fix. Does not know
tokens, models or the fleet. Fields: https://platform.openai.com/docs/api-reference (chat, completions).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from common.errors import BadRequest
from router.openai_fields import NEUTRAL_CHAT_VALUES, NEUTRAL_COMPLETION_VALUES, NEUTRAL_MESSAGE_VALUES, drop_neutral

COMPLETION_MAX_TOKENS = 16
"""Length of an answer to /v1/completions when the request gives none, as at OpenAI."""
MAX_CHOICES_PER_PROMPT = 16
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 256
ALL_TOKENS = -1
"""As `top_k`: what vLLM's clients send for all tokens, as 0."""
MAX_PRIORITY = 1000

S = TypeVar("S", bound="SamplingFields")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: Annotated[bool, Meta(description="Send a last chunk with the usage.")] = False


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


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of both endpoints. user, metadata, safety_identifier and prompt_cache_key label a request and change nothing."""

    model: Annotated[str, Meta(description="The model's name, as GET /v1/models lists it.")]
    stream: Annotated[bool, Meta(description="Send the answer as server-sent events.")] = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[
        int | None, Meta(description="Longest answer, in tokens; without it: 16, or what the context leaves a chat.")
    ] = None
    temperature: Annotated[float, Meta(description="0: always take the most likely token. At most 2.")] = 1.0
    top_p: Annotated[float, Meta(description="Sample from the most likely tokens that together have this probability.")] = 1.0
    top_k: Annotated[int, Meta(description="Sample from this many of the most likely tokens; 0 or -1: from all.")] = 0
    min_p: Annotated[float, Meta(description="Skip tokens less likely than this share of the most likely one.")] = 0.0
    seed: Annotated[int | None, Meta(description="The same seed and request give the same answer.")] = None
    n: Annotated[int, Meta(description=f"Answers to each prompt: 1 to {MAX_CHOICES_PER_PROMPT}.")] = 1
    stop: Annotated[str | list[str], Meta(description=f"Up to {MAX_STOPS} strings before which the answer ends.")] = []
    stop_token_ids: Annotated[list[int], Meta(description="Token ids that end the answer. They have no text.")] = []
    ignore_eos: Annotated[bool, Meta(description="Go on after the model's end-of-text token.")] = False
    return_token_ids: Annotated[bool, Meta(description="Send the token ids with the text.")] = False
    timeout: Annotated[
        float | None, Meta(description="Cancel the request after this many seconds; without it: after `--request-timeout-s`.")
    ] = None
    priority: Annotated[int, Meta(description=f"Lower is earlier: -{MAX_PRIORITY} to {MAX_PRIORITY}.")] = 0
    user: str = ""
    metadata: dict[str, str] = {}
    safety_identifier: str = ""
    prompt_cache_key: str = ""


class ChatFields(SamplingFields, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Annotated[int | None, Meta(description="Another name of max_tokens.")] = None


class CompletionFields(SamplingFields, frozen=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: Annotated[str | list[str | int | list[int]], Meta(description="One prompt or several, each a text or its token ids.")]


Prompt: TypeAlias = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """A request as it was read. max_tokens: None when the client leaves it to us. max_tokens_field: the field that gave it."""

    fields: SamplingFields
    stop: tuple[str, ...]
    max_tokens: int | None
    max_tokens_field: str = "max_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ReadRequest):
    messages: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(ReadRequest):
    """prompts: texts or token ids. Each gets `n` choices."""

    prompts: tuple[Prompt, ...]


def read_chat(body: bytes, context_tokens: int | None = None) -> ChatRequest:
    """The body of POST /v1/chat/completions. Raises BadRequest."""
    raw = drop_neutral(_object(body), NEUTRAL_CHAT_VALUES, ChatFields.__struct_encode_fields__)
    messages = raw.get("messages")
    if isinstance(messages, list):
        raw["messages"] = [
            drop_neutral(message, NEUTRAL_MESSAGE_VALUES, path=f"messages[{index}].") if isinstance(message, dict) else message
            for index, message in enumerate(messages)
        ]
    fields = _convert(raw, ChatFields)
    if not fields.messages:
        raise BadRequest("messages is empty: send at least one message", field="messages")
    limit, name = fields.max_tokens, "max_tokens"
    if fields.max_completion_tokens is not None:
        if limit is not None and limit != fields.max_completion_tokens:
            raise BadRequest("max_tokens and max_completion_tokens differ: send one of them", field="max_tokens")
        limit, name = fields.max_completion_tokens, "max_completion_tokens"
    read = tuple(message.for_template() for message in fields.messages)
    return ChatRequest(fields=fields, stop=_checked_stops(fields), max_tokens=limit, max_tokens_field=name, messages=read)


def read_completion(body: bytes, context_tokens: int | None = None) -> CompletionRequest:
    """The body of POST /v1/completions. Raises BadRequest, for far more token ids than the context holds before they are read."""
    if context_tokens is not None and len(body) > context_tokens:
        _require_few_ids(body, context_tokens)
    raw = drop_neutral(_object(body), NEUTRAL_COMPLETION_VALUES, CompletionFields.__struct_encode_fields__)
    fields = _convert(raw, CompletionFields)
    prompts = _prompts(fields.prompt)
    return CompletionRequest(fields=fields, stop=_checked_stops(fields), max_tokens=fields.max_tokens, prompts=prompts)


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


def _checked_stops(fields: SamplingFields) -> tuple[str, ...]:
    """Check the limits of what both endpoints take. Returns the stop strings. Raises BadRequest."""
    if not 1 <= fields.n <= MAX_CHOICES_PER_PROMPT:
        raise BadRequest(f"n must be between 1 and {MAX_CHOICES_PER_PROMPT}, is {fields.n}", field="n")
    if abs(fields.priority) > MAX_PRIORITY:
        raise BadRequest(f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, is {fields.priority}", field="priority")
    if fields.stream_options is not None and not fields.stream:
        raise BadRequest("stream_options is for streams only: leave it out or send stream=true", field="stream_options")
    stops = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"stop holds {len(stops)} strings: send at most {MAX_STOPS}", field="stop")
    if any(not 1 <= len(one) <= MAX_STOP_CHARS for one in stops):
        raise BadRequest(f"each stop string must have between 1 and {MAX_STOP_CHARS} characters", field="stop")
    if len(fields.stop_token_ids) > MAX_STOP_TOKENS:
        message = f"stop_token_ids holds {len(fields.stop_token_ids)} ids: send at most {MAX_STOP_TOKENS}"
        raise BadRequest(message, field="stop_token_ids")
    return stops


def _object(body: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise BadRequest("the body must be a JSON object")
    return decoded


_AT_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_ALLOWED = {
    "role": "use system, developer, user or assistant",
    "type": "only parts of type 'text' are supported",
}


def _convert(raw: Mapping[str, Any], kind: type[S]) -> S:
    """The typed fields. Raises BadRequest for the first field that is unknown, missing or wrong."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error


def _named(message: str) -> BadRequest:
    """msgspec's message as an error that names the field.

    "Expected `int`, got `str` - at `$.n`" becomes "n: expected `int`, got `str`" with field n.
    """
    match = _AT_PATH.match(message)
    assert match is not None
    what, path = match["what"], match["path"] or ""
    prefix = f"{path}." if path else ""
    if missing := _MISSING.match(what):
        name = prefix + missing["name"]
        return BadRequest(f"{name} is missing: it is required", field=name, code="missing_required_parameter")
    if unknown := _UNKNOWN.match(what):
        name = prefix + unknown["name"]
        return BadRequest(f"{name} is not a known field: leave it out", field=name, code="unknown_parameter")
    hint = _ALLOWED.get(path.rpartition(".")[2])
    problem = what[:1].lower() + what[1:] + (f" ({hint})" if hint else "")
    return BadRequest(f"{path}: {problem}" if path else problem, field=path or None, code="invalid_value")
