"""The requests of the OpenAI API that Tandem serves: their fields, types and limits.

Owns the reading of a body: what is accepted, and an error that names the field and the fix for everything else. Does not know
tokens, models or the fleet. Fields: https://platform.openai.com/docs/api-reference (chat, completions).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from common.errors import BadRequest
from router.openai_fields import (
    NEUTRAL_CHAT_VALUES,
    NEUTRAL_COMPLETION_VALUES,
    NEUTRAL_MESSAGE_VALUES,
    drop_neutral,
)

COMPLETION_MAX_TOKENS = 16
"""Length of an answer to /v1/completions when the request gives none, as OpenAI has it."""
MAX_CHOICES_PER_PROMPT = 16
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_PRIORITY = 1000

S = TypeVar("S", bound="_Sampled")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class _Sampled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints take. user, metadata, safety_identifier and prompt_cache_key label a request and change nothing.

    timeout: seconds. priority: the lower, the earlier, as in vLLM.
    """

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: str | list[str] = []
    ignore_eos: bool = False
    return_token_ids: bool = False
    timeout: float | None = None
    priority: int = 0
    user: str = ""
    metadata: dict[str, str] = {}
    safety_identifier: str = ""
    prompt_cache_key: str = ""


class _ChatFields(_Sampled, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None


class _CompletionFields(_Sampled, frozen=True, kw_only=True):
    prompt: str | list[str | int]


Prompt: TypeAlias = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields:
    """How to answer, as both endpoints say it. max_tokens, seed and timeout_s: None when the client left the choice to us.

    max_tokens_field: what the client calls it. priority: the lower, the earlier.
    """

    model: str
    stream: bool
    include_usage: bool
    max_tokens: int | None
    max_tokens_field: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    n: int
    stop: tuple[str, ...]
    ignore_eos: bool
    return_token_ids: bool
    timeout_s: float | None
    priority: int


@dataclass(frozen=True, slots=True)
class ChatRequest:
    messages: tuple[Mapping[str, str], ...]
    sampling: SamplingFields


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """prompts: texts or token ids; each gets `n` choices."""

    prompts: tuple[Prompt, ...]
    sampling: SamplingFields


def read_chat(body: bytes) -> ChatRequest:
    """The body of POST /v1/chat/completions. Raises BadRequest."""
    raw = drop_neutral(_object(body), NEUTRAL_CHAT_VALUES)
    messages = raw.get("messages")
    if isinstance(messages, list):
        raw["messages"] = [
            drop_neutral(message, NEUTRAL_MESSAGE_VALUES, f"messages[{index}].") if isinstance(message, dict) else message
            for index, message in enumerate(messages)
        ]
    fields = _convert(raw, _ChatFields)
    if not fields.messages:
        raise BadRequest("messages is empty: send at least one message", field="messages")
    limit, name = fields.max_tokens, "max_tokens"
    if fields.max_completion_tokens is not None:
        if limit is not None and limit != fields.max_completion_tokens:
            raise BadRequest("max_tokens and max_completion_tokens differ: send one of them", field="max_tokens")
        limit, name = fields.max_completion_tokens, "max_completion_tokens"
    messages_read = tuple({"role": _template_role(m.role), "content": m.text} for m in fields.messages)
    return ChatRequest(messages_read, _sampling(fields, limit, name))


def read_completion(body: bytes) -> CompletionRequest:
    """The body of POST /v1/completions. Raises BadRequest."""
    fields = _convert(drop_neutral(_object(body), NEUTRAL_COMPLETION_VALUES), _CompletionFields)
    return CompletionRequest(_prompts(fields.prompt), _sampling(fields, fields.max_tokens, "max_tokens"))


def _template_role(role: str) -> str:
    """`developer` is OpenAI's newer name of `system`; chat templates know the older one."""
    return "system" if role == "developer" else role


def _prompts(prompt: str | list[str | int]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    texts = [part for part in prompt if isinstance(part, str)]
    ids = [part for part in prompt if isinstance(part, int)]
    if not prompt or (texts and ids):
        fix = "send a string, a list of strings or a list of token ids"
        raise BadRequest(f"prompt is {'empty' if not prompt else 'a mixture of strings and numbers'}: {fix}", field="prompt")
    if ids:
        return (tuple(ids),)
    if len(texts) > MAX_PROMPTS:
        raise BadRequest(f"prompt holds {len(texts)} prompts: send at most {MAX_PROMPTS}", field="prompt")
    return tuple(texts)


def _sampling(fields: _Sampled, max_tokens: int | None, max_tokens_field: str) -> SamplingFields:
    if not 1 <= fields.n <= MAX_CHOICES_PER_PROMPT:
        raise BadRequest(f"n must be between 1 and {MAX_CHOICES_PER_PROMPT}, is {fields.n}", field="n")
    if abs(fields.priority) > MAX_PRIORITY:
        raise BadRequest(f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, is {fields.priority}", field="priority")
    if fields.stream_options is not None and not fields.stream:
        raise BadRequest("stream_options is for streams only: leave it out or send stream=true", field="stream_options")
    return SamplingFields(
        model=fields.model,
        stream=fields.stream,
        return_token_ids=fields.return_token_ids,
        include_usage=fields.stream_options is not None and fields.stream_options.include_usage,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        seed=fields.seed,
        n=fields.n,
        stop=_stops(fields.stop),
        ignore_eos=fields.ignore_eos,
        timeout_s=fields.timeout,
        priority=fields.priority,
    )


def _stops(stop: str | list[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"stop holds {len(stops)} strings: send at most {MAX_STOPS}", field="stop")
    if any(not 1 <= len(one) <= MAX_STOP_CHARS for one in stops):
        raise BadRequest(f"each stop string must have between 1 and {MAX_STOP_CHARS} characters", field="stop")
    return stops


# --- reading -----------------------------------------------------------------------------------------------------------


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
    """The typed fields; null is as good as absent. Raises BadRequest for the first field that is unknown, missing or wrong."""
    names = {field.encode_name for field in msgspec.structs.fields(kind)}
    known = {name: value for name, value in raw.items() if value is not None or name not in names}
    try:
        return msgspec.convert(known, kind)
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
