"""SGLang's own endpoints: POST /generate with its answer, POST /abort_request, and the answer of POST /flush_cache.

Owns their fields, and how they become a request in the normal form. Each event of a stream repeats the whole answer so far.
Fields: python/sglang/srt/managers/io_struct.py (GenerateReqInput, AbortReq) and docs/basic_usage/sampling_params.md at
https://github.com/sgl-project/sglang.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from common.errors import BadRequest
from common.ids import ID_BYTES, unpack_ids
from common.messages import Finished, TokenLogprob
from router.api.answers import BEGIN, DONE, END, AnswerShape, VersionSpan, encoded
from router.api.bodies import object_in
from router.api.completions import CompletionRequest, one_of_prompts, require_few_ids
from router.api.fields import (
    ALL_TOKENS,
    CacheSalt,
    MinTokensField,
    Priority,
    Sampling,
    SamplingFields,
    Seed,
    Stream,
    TopK,
    TopLogprobs,
    Unsupported,
    read_fields,
)
from router.api.guard import checked_id
from router.api.logprobs import finite
from router.api.structured import StructuralTag, grammar_of
from router.requests import ChoiceDelta

GENERATE_MAX_TOKENS = 128
"""Length of an answer to /generate when the request gives none, as in SGLang."""
MAX_STREAMED_LOGPROBS = 20_000
"""Each event of SGLang's streams repeats all log probabilities before it, so a stream may hold only so many."""

ABORT = Unsupported({"finished_reason": (), "abort_message": ()})


class GenerateParameters(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of POST /generate."""

    max_new_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    """Longest answer, in tokens; without it: 128. 0: only the prompt's log probabilities."""
    min_tokens: MinTokensField = msgspec.field(default=0, name="min_new_tokens")
    top_k: TopK = ALL_TOKENS
    seed: Seed = msgspec.field(default=None, name="sampling_seed")
    include_stop_str_in_output: bool = msgspec.field(default=False, name="no_stop_trim")
    structural_tag: StructuralTag | None = None


PARAMETERS = Unsupported(
    {
        "stop_regex": ([], ""),
        "spaces_between_special_tokens": (True, False),  # as with every fast tokenizer, it makes no difference
        "custom_params": ({},),
        "stream_interval": (1,),
    },
    nullable=GenerateParameters.__struct_encode_fields__,
)
GENERATE = Unsupported(
    {
        **dict.fromkeys(("input_embeds", "token_ids_logprob", "custom_logit_processor"), ()),
        **dict.fromkeys(("session_params", "session_id", "lora_id"), ()),
        **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"), ()),
        **dict.fromkeys(("image_data", "video_data", "audio_data", "modalities"), ([],)),
        **dict.fromkeys(("return_hidden_states", "return_routed_experts", "no_logs", "background"), (False,)),
        "log_metrics": (True,),
    },
    inside={"sampling_params": PARAMETERS},
)


class GenerateFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /generate. Exactly one of text and input_ids must be there."""

    text: str | list[str] | None = None
    """One prompt, or a batch of prompts."""
    input_ids: list[int | list[int]] | None = None
    """Token ids of one prompt, or of each of a batch."""
    sampling_params: GenerateParameters = GenerateParameters()
    """How the next token is chosen and when the answer ends."""
    rid: str | list[str] | None = None
    """Id of the request, for POST /abort_request; a list for a batch. Without it: the X-Request-Id."""
    return_logprob: bool = False
    """Send how likely each token was."""
    logprob_start_len: Annotated[int, Meta(ge=-1, lt=2**31)] = -1
    """With `return_logprob`: send the prompt's log probabilities too, from this token on. -1: none of them."""
    top_logprobs_num: TopLogprobs = 0
    """With `return_logprob`: also send so many of the likeliest tokens in each place."""
    return_text_in_logprobs: bool = False
    """With `return_logprob`: send the texts of tokens too."""
    stream: Stream = False
    priority: Priority = 0
    cache_salt: CacheSalt = None
    extra_key: CacheSalt = None
    """SGLang's name of cache_salt."""
    lora_path: str | list[str | None] | None = None
    """Name of the LoRA adapter, as GET /v1/models lists it; a list for a batch. null: the model alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest(CompletionRequest):
    """Prompts to be continued for a client of SGLang."""

    is_batch: bool
    """Whether the answer is a list."""
    rids: tuple[str, ...]
    """The ids that the client gave, one for each prompt or one for all."""
    logprob_start: int
    """See `GenerateFields.logprob_start_len`."""
    with_texts: bool
    """Whether log probabilities have the texts of tokens too."""

    def choice_ids(self, answer_id: str, choices: int) -> tuple[str, ...]:
        """The id of each choice."""
        if not self.is_batch:
            return (answer_id,)
        if len(self.rids) == choices:
            return self.rids
        if len(self.rids) <= 1:
            return tuple(f"{answer_id}_{number}" for number in range(choices))
        return tuple(f"{rid}_{number}" for rid in self.rids for number in range(choices // len(self.rids)))

    @property
    def own_id(self) -> str:
        return self.rids[0] if len(self.rids) == 1 else ""

    def named(self, answer_id: str) -> dict[str, set[int]]:
        """The id of a choice stands for it, and that of a prompt for its choices."""
        named, choices = dict[str, set[int]](), self.choices
        for number, choice_id in enumerate(self.choice_ids(answer_id, choices)):
            named.setdefault(choice_id, set()).add(number)
            if self.rids:
                named.setdefault(self.rids[number * len(self.rids) // choices], set()).add(number)
        return named


class AbortFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /abort_request."""

    rid: str = ""
    """Id of the request: its `rid`, its X-Request-Id, or the `id` of its answer."""
    abort_all: bool = False
    """End every request that this router has open."""

    def __post_init__(self) -> None:
        """Raises BadRequest."""
        if not self.rid and not self.abort_all:
            raise BadRequest("rid is missing: send the id of a request, or abort_all=true", field="rid")


class Aborted(msgspec.Struct, frozen=True):
    """The answer of POST /abort_request."""

    aborted: int
    """How many answers were ended."""


class Flushed(msgspec.Struct, frozen=True):
    """The answer of POST /flush_cache."""

    instances: int
    """How many instances were told to flush their prefix cache."""


def read_generate(model: str, body: bytes, context_tokens: int | None = None) -> GenerateRequest:
    """The body of POST /generate. model: what is served; SGLang's clients do not name it. Raises BadRequest, for far more token
    ids than the context holds before they are read."""
    require_few_ids(body, context_tokens, "input_ids")
    return generate_request(model, object_in(body, context_tokens))


def generate_request(
    model: str, raw: dict[str, Any], unsupported: Unsupported = GENERATE, timeout_s: float | None = None
) -> GenerateRequest:
    """What these fields ask for. model, timeout_s: what SGLang's fields do not say. Raises BadRequest."""
    fields = _generate_fields(raw, unsupported)
    prompts, prompt_field, is_list = one_of_prompts(fields.text, fields.input_ids)
    sampling = fields.sampling_params
    limit = GENERATE_MAX_TOKENS if sampling.max_new_tokens is None else sampling.max_new_tokens
    if sampling.min_tokens > limit:
        message = f"min_new_tokens is {sampling.min_tokens}, but max_new_tokens is {limit}: lower it"
        raise BadRequest(f"sampling_params.{message}", field="sampling_params.min_new_tokens")
    top = fields.top_logprobs_num
    if not fields.return_logprob:
        _require_no_logprobs(fields)
    if fields.stream and fields.return_logprob and limit * (1 + top) > MAX_STREAMED_LOGPROBS:
        most = f"at most {MAX_STREAMED_LOGPROBS} log probabilities (max_new_tokens times top_logprobs_num + 1)"
        raise BadRequest(f"return_logprob in a stream is for {most}: lower them, or send stream=false", field="return_logprob")
    grammar, grammar_field = grammar_of(sampling, "sampling_params.")
    return GenerateRequest(
        fields=SamplingFields(
            model=model,
            stream=fields.stream,
            timeout=timeout_s,
            priority=fields.priority,
            cache_salt=fields.cache_salt or fields.extra_key,
            **{name: getattr(sampling, name) for name in Sampling.__struct_fields__},
        ),
        max_tokens=None if sampling.max_new_tokens is None else max(1, limit),
        max_tokens_field="sampling_params.max_new_tokens",
        default_max_tokens=GENERATE_MAX_TOKENS,
        logprobs=top if fields.return_logprob else None,
        prompt_logprobs=top if fields.return_logprob and fields.logprob_start_len >= 0 else None,
        grammar=grammar,
        grammar_field=grammar_field,
        prompts=prompts,
        prompt_field=prompt_field,
        hides_answer=limit == 0,
        is_batch=is_list or sampling.n > 1,
        rids=_rids(fields.rid, len(prompts), not is_list),
        logprob_start=fields.logprob_start_len,
        with_texts=fields.return_text_in_logprobs,
        adapters=_adapters(fields.lora_path, len(prompts)),
    )


def _generate_fields(raw: dict[str, Any], unsupported: Unsupported) -> GenerateFields:
    """The typed fields of the body. A batch may have one object of parameters for all prompts, or the same for each. Raises
    BadRequest."""
    given = raw.get("sampling_params", {})
    if isinstance(given, list):
        if not given or given[0] is None or any(one != given[0] for one in given):
            same = "sampling_params must be one object, or the same for each prompt: send each other as a request of its own"
            raise BadRequest(same, field="sampling_params")
        raw = raw | {"sampling_params": given[0]}
    fields = read_fields(raw, GenerateFields, unsupported)
    if None not in (fields.cache_salt, fields.extra_key) and fields.cache_salt != fields.extra_key:
        raise BadRequest("cache_salt and extra_key differ: send one of them", field="extra_key")
    return fields


def _require_no_logprobs(fields: GenerateFields) -> None:
    """Raises BadRequest for a field that says which log probabilities are sent, and how."""
    wanted = {
        "top_logprobs_num": fields.top_logprobs_num > 0,
        "logprob_start_len": fields.logprob_start_len >= 0,
        "return_text_in_logprobs": fields.return_text_in_logprobs,
    }
    for name in (name for name, is_wanted in wanted.items() if is_wanted):
        raise BadRequest(f"{name} is for log probabilities only: leave it out or send return_logprob=true", field=name)


def _adapters(named: str | list[str | None] | None, prompts: int) -> tuple[str, ...]:
    """See `ReadRequest.adapters`."""
    if named is None or isinstance(named, str):
        return (named or "",)
    if len(named) != prompts:
        raise BadRequest(f"lora_path holds {len(named)} names for {prompts} prompts: send one for each", field="lora_path")
    return tuple(name or "" for name in named)


def _rids(rid: str | list[str] | None, prompts: int, is_single: bool) -> tuple[str, ...]:
    if rid is None:
        return ()
    if isinstance(rid, str):
        return (checked_id(rid, "rid"),)
    if is_single or len(rid) != prompts:
        raise BadRequest(f"rid holds {len(rid)} ids for {prompts} prompts: send one for each", field="rid")
    return tuple(checked_id(one, "rid") for one in rid)


Logprob: TypeAlias = tuple[float | None, int, str | None]
"""Log probability, token id, and the token's text if it is asked for. The first token of those of a prompt has no number."""
_encode = msgspec.json.Encoder().encode


class FinishMeta(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    type: Literal["stop", "length", "abort"]
    matched: str | int | None = None
    """The stop string or token id that ended the answer."""
    length: int | None = None
    """Tokens of an answer that became too long."""
    message: str | None = None
    """Why the answer was aborted."""


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    finish_reason: FinishMeta | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Tokens of the prompt whose KV was there already."""
    weight_version: str
    """The weights that its last token came from."""
    weight_versions: list[VersionSpan]
    """Which of its tokens came from which weights."""
    input_token_logprobs: list[Logprob] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs: list[Logprob] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[Logprob] | None] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[Logprob] | None] | msgspec.UnsetType = msgspec.UNSET


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of POST /generate; a list of these for a batch, or for `n` above 1. index: in the events of such a stream."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET


class _GrowingList:
    """A JSON list that grows. What is in it is not encoded again."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items = bytearray()

    def extend(self, values: Sequence[object]) -> None:
        if values:
            self._items += (b"," if self._items else b"") + _encode(values)[1:-1]

    @property
    def json(self) -> Any:
        """To stand in the list's place."""
        return msgspec.Raw(b"".join((b"[", self._items, b"]")))


@dataclass(slots=True, eq=False)
class _WrittenChoice:
    """What is written of one choice, in JSON: each event repeats all of it."""

    tokens: int = 0
    cached_tokens: int = 0
    text: bytearray = field(default_factory=bytearray)
    """The text without its quotation marks."""
    ids: _GrowingList = field(default_factory=_GrowingList)
    logprobs: dict[str, _GrowingList] = field(default_factory=dict)
    """The lists of log probabilities that are asked for, by their names in `MetaInfo`."""


@dataclass(slots=True, kw_only=True, eq=False)
class GenerateShape(AnswerShape[GenerateRequest]):
    """The answer of POST /generate."""

    _so_far: dict[int, _WrittenChoice] = field(default_factory=dict, init=False)
    _choice_ids: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._choice_ids = self.request.choice_ids(self.id, len(self.accepted.specs))

    def events(self, delta: ChoiceDelta, *, opens: bool) -> bytes:
        return BEGIN + _encode(self._generated(delta.index, delta, in_stream=True)) + END

    def last_events(self) -> bytes:
        return DONE

    def whole(self, choices: Sequence[ChoiceDelta]) -> bytes:
        all_of_them = [encoded(self._generated(index, choice)) for index, choice in enumerate(choices)]
        return _encode(all_of_them if self.request.is_batch else all_of_them[0])

    def _generated(self, index: int, delta: ChoiceDelta, *, in_stream: bool = False) -> Generated:
        """The choice so far, with this delta of it."""
        prompt = self.accepted.specs[index].prompt
        written = self._so_far.get(index)
        if written is None:
            written = self._so_far[index] = self._begun(prompt)
        self._add(index, written, delta)
        info = MetaInfo(
            id=self._choice_ids[index],
            finish_reason=self._finish(delta.ending, written.tokens) if isinstance(delta.ending, Finished) else None,
            prompt_tokens=len(prompt) // ID_BYTES,
            completion_tokens=written.tokens,
            cached_tokens=written.cached_tokens,
            weight_version=self.versions[index].last,
            weight_versions=self.versions[index].spans(),
            **{name: entries.json for name, entries in written.logprobs.items()},
        )
        numbered = index if in_stream and self.request.is_batch else msgspec.UNSET
        text: Any = msgspec.Raw(b"".join((b'"', written.text, b'"')))
        return Generated(text=text, output_ids=written.ids.json, meta_info=info, index=numbered)

    def _begun(self, prompt: bytes) -> _WrittenChoice:
        """A choice before its first news. As in SGLang, the first of a prompt's log probabilities has no number, wherever it
        stands."""
        written, start = _WrittenChoice(), self.request.logprob_start
        if self.request.logprobs is not None:
            kinds = ("token", "top") if self.request.logprobs else ("token",)
            written.logprobs = {f"{of}_{kind}_logprobs": _GrowingList() for of in ("input", "output") for kind in kinds}
        if 0 <= start * ID_BYTES < len(prompt):
            first = int(unpack_ids(prompt[start * ID_BYTES : (start + 1) * ID_BYTES])[0])
            for name, entry in (("input_token_logprobs", self._entry(None, first)), ("input_top_logprobs", None)):
                if name in written.logprobs:
                    written.logprobs[name].extend([entry])
        return written

    def _add(self, index: int, written: _WrittenChoice, delta: ChoiceDelta) -> None:
        written.cached_tokens += delta.cached_tokens
        if self.request.logprob_start >= 0:
            self._add_logprobs(written, "input", delta.prompt_logprobs[self.request.logprob_start :])
        written.tokens += len(delta.token_ids)
        self.versions[index].add(delta)
        written.text += _encode(delta.text)[1:-1]
        written.ids.extend(delta.token_ids)
        self._add_logprobs(written, "output", delta.logprobs)

    def _add_logprobs(self, written: _WrittenChoice, of: str, tokens: Sequence[TokenLogprob]) -> None:
        if self.request.logprobs is not None:
            written.logprobs[f"{of}_token_logprobs"].extend([self._entry(token.logprob, token.token_id) for token in tokens])
        if self.request.logprobs:
            tops = [[self._entry(logprob, token_id) for token_id, logprob in token.top] for token in tokens]
            written.logprobs[f"{of}_top_logprobs"].extend(tops)

    def _finish(self, ending: Finished, tokens: int) -> FinishMeta:
        match ending.reason:
            case "cancelled":
                return FinishMeta(type="abort", message="aborted by POST /abort_request")
            case "length":
                return FinishMeta(type="length", length=tokens)
            case "stop":
                return FinishMeta(type="stop", matched=ending.matched)

    def _entry(self, logprob: float | None, token_id: int) -> Logprob:
        text = self.token_texts.text(token_id) if self.request.with_texts else None
        return None if logprob is None else finite(logprob), token_id, text
