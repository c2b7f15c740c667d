"""The fields that all requests for an answer have in common: their types and limits, and how a body is read.

Owns what is accepted, and for everything else an error that names the field and the fix. What only one endpoint has is in that
endpoint's file. Does not know tokens, models or the fleet. Fields: https://platform.openai.com/docs/api-reference.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from common.errors import BadRequest

MAX_CHOICES_PER_PROMPT = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 256
ALL_TOKENS = -1
"""As `top_k`: what vLLM's clients send for all tokens, as 0."""
MAX_PRIORITY = 1000

S = TypeVar("S", bound="SamplingFields")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: Annotated[bool, Meta(description="Send a last chunk with the usage.")] = False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """A request as it was read. max_tokens: None when the client leaves it to us. max_tokens_field: the field that gave it."""

    fields: SamplingFields
    stop: tuple[str, ...]
    max_tokens: int | None
    max_tokens_field: str = "max_tokens"


def checked_stops(fields: SamplingFields) -> tuple[str, ...]:
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


def object_in(body: bytes) -> dict[str, Any]:
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


def convert(raw: Mapping[str, Any], kind: type[S]) -> S:
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
