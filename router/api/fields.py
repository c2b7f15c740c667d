"""The fields that all requests for an answer have in common: their types and limits, and how a body is read.

Owns what is accepted, and for everything else an error that names the field and the fix. What only one endpoint has is in that
endpoint's file. Does not know tokens, models or the fleet. Fields: https://platform.openai.com/docs/api-reference.

Standard fields of the OpenAI API that Tandem does not support, and the values with which they ask for nothing.

Owns the table. A field with such a value is dropped before the request is read. With any other value it is refused by name.

The functions that a model may call: how clients describe them, and which of them the answer may or must call.

Owns the fields `tools`, `tool_choice` and `parallel_tool_calls`, as OpenAI's API has them. Does not know how a model writes its
calls.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from common.errors import BadRequest
from common.messages.requests import SALT_CHARS
from common.sampling_params import Grammar, Pooling
from router.api.bodies import decoded
from router.api.errors import shown
from router.api.structured import StructuredFields

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


MAX_CHOICES_PER_PROMPT = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 256
MAX_BIASES = 1024
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 64, 256
MAX_TOP_LOGPROBS = 20
"""As at OpenAI for chats, and as vLLM's `--max-logprobs` for everything else."""
ALL_TOKENS = -1
"""As `top_k`: what vLLM's clients send for all tokens, as 0."""
MAX_PRIORITY = 1000
MAX_MESSAGE_CHARS = 512

S = TypeVar("S", bound=msgspec.Struct)

Tokens: TypeAlias = Annotated[int, Meta(ge=1, lt=2**31)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2, description="0: always take the most likely token.")]
TopP: TypeAlias = Annotated[
    float, Meta(gt=0, le=1, description="Sample from the most likely tokens that together have this probability.")
]
TopK: TypeAlias = Annotated[
    int, Meta(ge=ALL_TOKENS, lt=2**31, description="Sample from this many of the most likely tokens; 0 or -1: from all.")
]
MinP: TypeAlias = Annotated[
    float, Meta(ge=0, le=1, description="Skip tokens less likely than this share of the most likely one.")
]
Seed: TypeAlias = Annotated[
    Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None, Meta(description="The same seed and request give the same answer.")
]
Choices: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_CHOICES_PER_PROMPT, description="Answers to each prompt.")]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stop: TypeAlias = Annotated[
    StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)],
    Meta(description="Strings before which the answer ends."),
]
StopTokenIds: TypeAlias = Annotated[
    list[TokenId], Meta(max_length=MAX_STOP_TOKENS, description="Token ids that end the answer. They have no text.")
]
IgnoreEos: TypeAlias = Annotated[bool, Meta(description="Go on after the model's end-of-text token.")]
SkipSpecialTokens: TypeAlias = Annotated[bool, Meta(description="Special tokens of the answer give no text.")]
RepetitionPenalty: TypeAlias = Annotated[
    float,
    Meta(gt=0, le=2, description="Makes tokens of the prompt and the answer less likely (above 1) or likelier (below 1)."),
]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
PresencePenalty: TypeAlias = Annotated[Penalty, Meta(description="Taken off the logit of each token that the answer holds.")]
FrequencyPenalty: TypeAlias = Annotated[
    Penalty, Meta(description="Taken off the logit of a token, as often as the answer holds it.")
]
LogitBias: TypeAlias = Annotated[
    dict[str, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=MAX_BIASES, description="Token ids, as strings, and what is added to their logits."),
]
MinTokens: TypeAlias = Annotated[
    int,
    Meta(
        ge=0, lt=2**31, description="Shortest answer, in tokens: no end-of-text token, stop token or stop string ends it sooner."
    ),
]
Priority: TypeAlias = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Lower is earlier.")]
Stream: TypeAlias = Annotated[bool, Meta(description="Send the answer as server-sent events.")]
Timeout: TypeAlias = Annotated[
    Annotated[float, Meta(gt=0)] | None,
    Meta(description="Cancel the request after this many seconds; without it: after `--request-timeout-s`."),
]
CacheSalt: TypeAlias = Annotated[
    Annotated[str, Meta(min_length=1, max_length=SALT_CHARS)] | None,
    Meta(description="Cached KV is shared only with requests of the same salt, so others cannot tell from times what was asked."),
]
Label: TypeAlias = Annotated[str, Meta(description="A label; it changes nothing.")]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: Annotated[bool, Meta(description="Send a last chunk with the usage.")] = False
    continuous_usage_stats: Annotated[bool, Meta(description="Send the usage so far with each chunk, as vLLM does.")] = False


class SamplingFields(StructuredFields, msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of both endpoints. user, metadata, safety_identifier and prompt_cache_key label a request and change nothing."""

    model: Annotated[str, Meta(description="The model's name, as GET /v1/models lists it.")]
    stream: Stream = False
    stream_options: Annotated[StreamOptions | None, Meta(description="What else a stream holds.")] = None
    max_tokens: Annotated[
        Tokens | None, Meta(description="Longest answer, in tokens; without it: 16, or what the context leaves a chat.")
    ] = None
    min_tokens: MinTokens = 0
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    seed: Seed = None
    n: Choices = 1
    stop: Stop = []
    stop_token_ids: StopTokenIds = []
    include_stop_str_in_output: Annotated[
        bool, Meta(description="Leave the stop string that ends the answer in its text, and the text of a stop token.")
    ] = False
    skip_special_tokens: SkipSpecialTokens = True
    ignore_eos: IgnoreEos = False
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: PresencePenalty = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    logit_bias: LogitBias = {}
    bad_words: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]],
        Meta(max_length=MAX_BAD_WORDS, description="Texts that the answer must not contain, as the tokenizer spells them."),
    ] = []
    prompt_logprobs: Annotated[
        TopLogprobs | None,
        Meta(description="Send how likely each token of the prompt was, and so many of the likeliest tokens, as vLLM does."),
    ] = None
    return_token_ids: Annotated[bool, Meta(description="Send the token ids with the text.")] = False
    return_tokens_as_token_ids: Annotated[
        bool, Meta(description='In log probabilities, write "token_id:7" for the text of token 7, as vLLM does.')
    ] = False
    timeout: Timeout = None
    priority: Priority = 0
    cache_salt: CacheSalt = None
    user: Label = ""
    metadata: Annotated[dict[str, str], Meta(description="Labels; they change nothing.")] = {}
    safety_identifier: Label = ""
    prompt_cache_key: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """A request as it was read.

    max_tokens: None when the client leaves it to us. max_tokens_field: the field that gave it. logprobs: report the log
    probability of each token of the answer, and of so many of the likeliest tokens; None: report nothing. prompt_logprobs: the
    same for the prompt. grammar: what the answer must match; None: anything. pooling: see `SamplingParams`.
    """

    fields: SamplingFields
    stop: tuple[str, ...]
    max_tokens: int | None
    max_tokens_field: str = "max_tokens"
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    pooling: Pooling | None = None

    @property
    def grammar_field(self) -> str:
        """The field that says what the answer must match."""
        return next((name for name, _ in self.fields.asked()), "")

    @property
    def choices(self) -> int:
        """How many the answer has."""
        return self.fields.n


def require_logprobs_for_ids(fields: SamplingFields, logprobs: int | None, prompt_logprobs: int | None) -> None:
    """Raises BadRequest when tokens are to be written as ids where none are written."""
    if fields.return_tokens_as_token_ids and logprobs is None and prompt_logprobs is None:
        fix = "leave it out or send logprobs"
        raise BadRequest(f"return_tokens_as_token_ids is for log probabilities only: {fix}", field="return_tokens_as_token_ids")


def checked_stops(fields: SamplingFields) -> tuple[str, ...]:
    """Check what no single field shows. Returns the stop strings. Raises BadRequest."""
    if fields.stream_options is not None and not fields.stream:
        raise BadRequest("stream_options is for streams only: leave it out or send stream=true", field="stream_options")
    if fields.prompt_logprobs is not None and fields.stream:
        raise BadRequest("prompt_logprobs is for whole answers only: leave it out or send stream=false", field="prompt_logprobs")
    return (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)


def biases_of(fields: SamplingFields) -> tuple[tuple[int, float], ...]:
    """`logit_bias` with numbers for ids. Raises BadRequest."""
    for key in fields.logit_bias:
        if not _TOKEN_ID.match(key):
            raise BadRequest(f'logit_bias has the key {key[:32]!r}: keys must be token ids, like "7"', field="logit_bias")
    return tuple((int(key), bias) for key, bias in fields.logit_bias.items())


def neutral_options(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields, with `stream_options` that lack what asks for nothing. Raises BadRequest."""
    options = raw.get("stream_options")
    if not isinstance(options, dict):
        return raw
    known = StreamOptions.__struct_encode_fields__
    return raw | {"stream_options": drop_neutral(options, NEUTRAL_STREAM_VALUES, known, path="stream_options.")}


def object_in(body: bytes, context_tokens: int | None = None) -> dict[str, Any]:
    """The fields of the body. context_tokens: of each prompt that it may hold in token ids. Raises BadRequest."""
    try:
        fields = decoded(body, context_tokens)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadRequest("the body must be a JSON object")
    return fields


_TOKEN_ID = re.compile(r"^[0-9]{1,10}$", re.ASCII)
_AT_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_LIMIT = re.compile(r"^Expected `(?P<kind>\w+)`(?P<length> of length)? (?P<sign>[<>]=?) (?P<limit>\S+)$")
_LIMITS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_LENGTHS = {"str": "characters", "array": "items", "object": "entries"}
_HINTS = (
    (re.compile(r"input\[.*\brole$"), "use system, developer, user or assistant"),
    (re.compile(r"\brole$"), "use system, developer, user, assistant or tool"),
    (re.compile(r"input\[[^\]]*\]\.type$"), "use message, function_call, function_call_output or reasoning"),
    (re.compile(r"input\[.*\btype$"), "use input_text or output_text: texts are all that is read"),
    (re.compile(r"content\[.*\btype$"), "use text: texts are all that is read"),
    (re.compile(r"(tools|tool_calls)\[.*\btype$|^tool_choice\.type$"), "use function: other tools are not supported"),
    (re.compile(r"(response_format|^text\.format)\.type$"), "use text, json_object, json_schema or structural_tag"),
)
"""By the path of a field with a few values, what it may be."""


def convert(raw: Mapping[str, Any], kind: type[S]) -> S:
    """The typed fields. Raises BadRequest for the first field that is unknown, missing or wrong."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise _named(str(error)) from error
    try:
        return msgspec.convert(_with_whole_numbers(raw), kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error


def _with_whole_numbers(value: Any) -> Any:
    """JSON has one kind of number, and 1.0 is the integer 1: clients in languages with one kind write it so."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {name: _with_whole_numbers(one) for name, one in value.items()}
        case list():
            return [_with_whole_numbers(one) for one in value]
    return value


def _named(message: str) -> BadRequest:
    """msgspec's message as an error that names the field.

    "Expected `int`, got `str` - at `$.n`" becomes "n: expected `int`, got `str`" with field n.
    """
    if len(message) > MAX_MESSAGE_CHARS:  # it quotes what the client sent
        message = f"{message[: MAX_MESSAGE_CHARS // 2]}…{message[-MAX_MESSAGE_CHARS // 2 :]}"
    match = _AT_PATH.match(message)
    assert match is not None
    what, path = match["what"], match["path"] or ""
    prefix = f"{path}." if path else ""
    if missing := _MISSING.match(what):
        name = prefix + missing["name"]
        return BadRequest(f"{name} is missing: it is required", field=name, code="missing_required_parameter")
    if unknown := _UNKNOWN.match(what):
        name = prefix + shown(unknown["name"])
        return BadRequest(f"{name} is not a known field: leave it out", field=name, code="unknown_parameter")
    if limit := _LIMIT.match(what):
        rule = f"{_LIMITS[limit['sign']]} {limit['limit'].removesuffix('.0')}"
        must = f"must have {rule} {_LENGTHS[limit['kind']]}" if limit["length"] else f"must be {rule}"
        return BadRequest(f"{path} {must}", field=path, code="invalid_value")
    hint = next((hint for pattern, hint in _HINTS if pattern.search(path)), "")
    problem = what[:1].lower() + what[1:] + (f" ({hint})" if hint else "")
    return BadRequest(f"{path}: {problem}" if path else problem, field=path or None, code="invalid_value")
