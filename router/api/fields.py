"""The fields that several endpoints have: their types and limits, and how a body becomes typed fields.

Owns what is accepted, and for everything else an error that names the field and the fix: a standard field that Tandem does not
support is refused by name, unless its value asks for nothing. What one endpoint has alone is in that endpoint's file. Does not
know tokens, models, how a model writes its calls, or the fleet. Fields: https://platform.openai.com/docs/api-reference.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from common.errors import BadRequest
from common.messages.requests import SALT_CHARS
from common.ranges import TokenId
from common.sampling_params import Grammar, Pooling
from router.api.errors import shown
from router.api.structured import ChoiceOfTexts, Ebnf, Regex, ResponseFormat, Schema, StructuredOutputs

MAX_CHOICES_PER_PROMPT = 16
MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_TOKENS = 16, 1024, 256
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
TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2, description="0: always take the most likely token.")]
TopP: TypeAlias = Annotated[
    float, Meta(gt=0, le=1, description="Sample from the most likely tokens that together have this probability.")
]
TopK: TypeAlias = Annotated[
    int, Meta(ge=ALL_TOKENS, lt=2**31, description="Sample from this many of the most likely tokens; 0 or -1: from all.")
]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopField: TypeAlias = Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
MinTokensField: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
BadWord: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
ModelField: TypeAlias = Annotated[str | None, Meta(description="The model's name; without it: the model that is served.")]
Stream: TypeAlias = Annotated[bool, Meta(description="Send the answer as server-sent events.")]
Timeout: TypeAlias = Annotated[
    Annotated[float, Meta(gt=0)] | None,
    Meta(description="Cancel the request after this many seconds; without it: after `--request-timeout-s`."),
]
Priority: TypeAlias = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Lower is earlier.")]
CacheSalt: TypeAlias = Annotated[
    Annotated[str, Meta(min_length=1, max_length=SALT_CHARS)] | None,
    Meta(description="Cached KV is shared only with requests of the same salt, so others cannot tell from times what was asked."),
]
Label: TypeAlias = Annotated[str, Meta(description="A label; it changes nothing.")]
Labels: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
"""As OpenAI bounds them: what is stored repeats them, in lists many at once."""


class TokenChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How each token is chosen."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Skip tokens less likely than this share of the most likely one."""
    seed: Seed = None
    """The same seed and request give the same answer."""


class Sampling(TokenChoice, frozen=True, kw_only=True):
    """What OpenAI's, vLLM's and SGLang's APIs say about the choices of an answer. Some have a name of their own in SGLang's."""

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES_PER_PROMPT)] = 1
    """Answers to each prompt."""
    min_tokens: MinTokensField = 0
    """Shortest answer, in tokens: no end-of-text token, stop token or stop string ends it sooner."""
    stop: StopString | StopField = []
    """Strings before which the answer ends. They do not act on thoughts and arguments of calls that are told apart."""
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] = []
    """Token ids that end the answer, where `stop` would. They have no text."""
    include_stop_str_in_output: bool = False
    """Leave the stop string that ends the answer in its text, and the text of a stop token."""
    skip_special_tokens: bool = True
    """Special tokens of the answer give no text."""
    ignore_eos: bool = False
    """Go on after the model's end-of-text token."""
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    """Makes tokens of the prompt and the answer less likely (above 1) or likelier (below 1)."""
    presence_penalty: Penalty = 0.0
    """Taken off the logit of each token that the answer holds."""
    frequency_penalty: Penalty = 0.0
    """Taken off the logit of a token, as often as the answer holds it."""
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)] = {}
    """Token ids, as strings, and what is added to their logits."""
    json_schema: Schema | None = None
    regex: Regex | None = None
    ebnf: Ebnf | None = None


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    """Send a last chunk with the usage."""
    continuous_usage_stats: bool = False
    """Send the usage so far with each chunk, as vLLM does."""


class SamplingFields(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of chats and completions. user, metadata, safety_identifier and prompt_cache_key label a request and change
    nothing."""

    model: str
    """The model's name, as GET /v1/models lists it."""
    stream: Stream = False
    stream_options: StreamOptions | None = None
    """What else a stream holds."""
    max_tokens: Tokens | None = None
    """Longest answer, in tokens; without it: 16, or what the context leaves a chat."""
    response_format: ResponseFormat | None = None
    """What the answer must be; without it: any text."""
    structured_outputs: StructuredOutputs | None = None
    """What the answer must match, as in vLLM."""
    guided_json: Schema | None = None
    """Older name of structured_outputs.json."""
    guided_regex: Regex | None = None
    """Older name of structured_outputs.regex."""
    guided_choice: ChoiceOfTexts | None = None
    """Older name of structured_outputs.choice."""
    guided_grammar: Ebnf | None = None
    """Older name of structured_outputs.grammar."""
    bad_words: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]], Meta(max_length=MAX_BAD_WORDS)
    ] = []
    """Texts that the answer must not contain, as the tokenizer spells them beside any other text."""
    prompt_logprobs: TopLogprobs | None = None
    """Send how likely each token of the prompt was, and so many of the likeliest tokens, as vLLM does."""
    return_token_ids: bool = False
    """Send the token ids with the text."""
    return_tokens_as_token_ids: bool = False
    """In log probabilities, write "token_id:7" for the text of token 7, as vLLM does."""
    timeout: Timeout = None
    priority: Priority = 0
    cache_salt: CacheSalt = None
    user: Label = ""
    metadata: Labels = {}
    """Labels; they change nothing."""
    safety_identifier: Label = ""
    prompt_cache_key: Label = ""


def shared_fields(read: msgspec.Struct) -> dict[str, Any]:
    """What a body of another form says in fields of the same names."""
    return {name: getattr(read, name) for name in SamplingFields.__struct_fields__ if name in read.__struct_fields__}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """A request as it was read, whatever its API."""

    fields: SamplingFields
    max_tokens: int | None
    """Longest answer; None when the client leaves it to us."""
    max_tokens_field: str = "max_tokens"
    default_max_tokens: int | None = None
    """Longest answer when the client leaves it to us; None: see --default-max-tokens."""
    ends_with_context: bool = False
    """Whether `max_tokens` may be more than the context has room for: the answer then ends where the context does."""
    prompt_field: str = "prompt"
    """The field that held what is to be answered."""
    echo: bool = False
    """Whether the answer begins with the prompt."""
    hides_answer: bool = False
    """The client wants the prompt only: the one token that the model generates is left out."""
    logprobs: int | None = None
    """Report the log probability of each token of the answer, and of so many of the likeliest tokens; None: report nothing."""
    prompt_logprobs: int | None = None
    """The same for the prompt."""
    grammar: Grammar | None = None
    """What the answer must match; None: anything."""
    grammar_field: str = ""
    """The field that asks for the grammar."""
    pooling: Pooling | None = None
    """See `SamplingParams`."""
    logprob_ids: tuple[int, ...] = ()
    """See `SamplingParams`; `label_token_ids` held them."""
    adapters: tuple[str, ...] = ()
    """The LoRA adapter of each prompt, or of all; "": that which the model's name means, if any."""

    def __post_init__(self) -> None:
        """Check what no single field shows. Raises BadRequest."""
        fields = self.fields
        if fields.return_tokens_as_token_ids and self.logprobs is None and self.prompt_logprobs is None:
            problem = "return_tokens_as_token_ids is for log probabilities only: leave it out or send logprobs"
            raise BadRequest(problem, field="return_tokens_as_token_ids")
        if fields.stream_options is not None and not fields.stream:
            raise BadRequest("stream_options is for streams only: leave it out or send stream=true", field="stream_options")
        if fields.prompt_logprobs is not None and fields.stream:
            problem = "prompt_logprobs is for whole answers only: leave it out or send stream=false"
            raise BadRequest(problem, field="prompt_logprobs")

    @property
    def choices(self) -> int:
        """How many the answer has."""
        return self.fields.n

    @property
    def has_answer(self) -> bool:
        """Whether tokens are wanted, and not only what the model computes of the prompt."""
        return not self.hides_answer and self.pooling is None and not self.logprob_ids

    @property
    def own_id(self) -> str:
        """The id that the body gives the request; empty: its HTTP request has its id."""
        return ""

    def named(self, answer_id: str) -> dict[str, set[int]]:
        """The numbers of the choices for which each further id stands. answer_id: stands for all of them."""
        return {}


def biases_of(fields: SamplingFields) -> tuple[tuple[int, float], ...]:
    """`logit_bias` with numbers for ids. Raises BadRequest."""
    for key in fields.logit_bias:
        if not _TOKEN_ID.match(key):
            raise BadRequest(f'logit_bias has the key {key[:32]!r}: keys must be token ids, like "7"', field="logit_bias")
    return tuple((int(key), bias) for key, bias in fields.logit_bias.items())


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Standard fields of an object that Tandem does not support."""

    values: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """The values with which each asks for nothing, beside null. With any other value it is refused by name."""
    inside: Mapping[str, "Unsupported"] = field(default_factory=dict)
    """The same for the objects in a field, or in a field's list."""
    nullable: Collection[str] = ()
    """Supported fields in which null asks for nothing. Of a whole body these are all."""
    hints: Collection[tuple[re.Pattern[str], str]] = ()
    """What a body's own fields may be: see `_HINTS`."""


NOTHING = Unsupported()
ONLY_OPENAI: Mapping[str, tuple[object, ...]] = {"best_of": (1,), "store": (False,), "service_tier": ("auto", "default")}
"""Fields of chats and completions."""
STREAM_OPTIONS = Unsupported({"include_obfuscation": (False,)}, nullable=StreamOptions.__struct_encode_fields__)


def _without_neutral(
    raw: Mapping[str, Any], unsupported: Unsupported, nullable: Collection[str], path: str = ""
) -> dict[str, Any]:
    """The fields without those that ask for nothing. Raises BadRequest for an unsupported field that asks for something."""
    fields: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in unsupported.values:
            if value is not None or name not in nullable:
                fields[name] = value
        elif value is not None and value not in unsupported.values[name]:
            allowed = " or ".join(msgspec.json.encode(option).decode() for option in unsupported.values[name])
            fix = f"leave it out or send {allowed}" if allowed else "leave it out"
            raise BadRequest(f"{path}{name} is not supported: {fix}", field=path + name, code="unsupported_parameter")
    for name, inner in unsupported.inside.items():
        value = fields.get(name)
        if isinstance(value, dict):
            fields[name] = _without_neutral(value, inner, inner.nullable, f"{path}{name}.")
        elif isinstance(value, list):
            places = ((f"{path}{name}[{index}].", item) for index, item in enumerate(value))
            fields[name] = [
                _without_neutral(item, inner, inner.nullable, place) if isinstance(item, dict) else item for place, item in places
            ]
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
    (re.compile(r"^(new_)?role$"), "use prefill, decode or both"),
    (re.compile(r"\brole$"), "use system, developer, user, assistant or tool"),
    (re.compile(r"input\[[^\]]*\]\.type$"), "use message, function_call, function_call_output or reasoning"),
    (re.compile(r"input\[.*\btype$"), "use input_text or output_text: only text is supported"),
    (re.compile(r"content\[.*\btype$"), "use text: only text is supported"),
    (re.compile(r"(tools|tool_calls)\[.*\btype$"), "use function: other tools are not supported"),
    (re.compile(r"^tool_choice\.type$"), "use function, or for chats allowed_tools"),
    (re.compile(r"(response_format|^text\.format)\.type$"), "use text, json_object, json_schema or structural_tag"),
)
"""By the path of a field with a few values, what it may be."""


def read_fields(raw: Mapping[str, Any], kind: type[S], unsupported: Unsupported = NOTHING) -> S:
    """The typed fields of a body. Raises BadRequest for the first field that is unknown, unsupported, missing or wrong."""
    raw = _without_neutral(raw, unsupported, kind.__struct_encode_fields__)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise _named(str(error), unsupported.hints) from error
    try:
        return msgspec.convert(_with_whole_numbers(raw), kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), unsupported.hints) from error


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


def _named(message: str, hints: Collection[tuple[re.Pattern[str], str]]) -> BadRequest:
    """msgspec's message as an error that names the field. hints: come before `_HINTS`.

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
    hint = next((hint for pattern, hint in (*hints, *_HINTS) if pattern.search(path)), "")
    problem = what[:1].lower() + what[1:] + (f" ({hint})" if hint else "")
    return BadRequest(f"{path}: {problem}" if path else problem, field=path or None, code="invalid_value")
