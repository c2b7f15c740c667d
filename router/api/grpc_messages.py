"""The messages of gRPC: how SGLang's become requests in the normal form, and how answers become SGLang's.

Owns the message classes, made from the descriptors beside this file (see sglang_scheduler.proto) in a pool of their own, and what
each field means. Does not know calls, keys or the fleet.

A field of proto3 that is zero may as well not be there: nobody can tell the two apart on the wire. So zero means what POST
/generate means by leaving the field out, but where zero is a choice that people make: see `_ZERO_COUNTS`.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClassesForFiles
from google.protobuf.unknown_fields import UnknownFieldSet

from common.errors import BadRequest
from common.ids import ID_BYTES, unpack_ids
from common.messages import Finished, TokenLogprob
from common.text.embedding import EmbeddingMode
from router.api.answers import Accepted, finish_of
from router.api.embeddings import EmbeddingFields, EmbeddingRequest, embedding_request
from router.api.errors import ContextExceeded
from router.api.fields import Unsupported, read_fields
from router.api.guard import checked_id
from router.api.logprobs import finite
from router.api.sglang import GENERATE, PARAMETERS, GenerateRequest, generate_request
from router.requests import ChoiceDelta

SCHEDULER, HEALTH = "sglang.grpc.scheduler", "grpc.health.v1"


def _message_classes() -> Mapping[str, Any]:
    """By full name. They are `Any`: their fields are made when this is imported."""
    pool = DescriptorPool()
    described = FileDescriptorSet.FromString((Path(__file__).parent / "sglang_scheduler.binpb").read_bytes())
    for file in described.file:
        pool.AddSerializedFile(file.SerializeToString())
    classes: Mapping[str, Any] = GetMessageClassesForFiles([file.name for file in described.file], pool)
    return classes


CLASSES = _message_classes()
_NAMES = ("GenerateResponse", "GenerateStreamChunk", "GenerateComplete", "OutputLogProbs", "InputLogProbs")
_Response, _Chunk, _Complete, _OutputLogProbs, _InputLogProbs = (CLASSES[f"{SCHEDULER}.{name}"] for name in _NAMES)
_MATCHED = {str: "matched_stop_str", int: "matched_token_id"}
_MULTIMODAL: Mapping[str, tuple[object, ...]] = {"mm_inputs": (), "data_parallel_rank": ()}
_NOT_GENERATED = {**GENERATE.values, **_MULTIMODAL, "disaggregated_params": (), "require_reasoning": ()}
_GENERATE = Unsupported(_NOT_GENERATED, inside={"sampling_params": PARAMETERS})
_EMBED = Unsupported({**_MULTIMODAL, "token_type_ids": (), "is_cross_encoder": (), "texts": (), "sampling_params": ({},)})
_OTHER_NAMES = {"request_id": "rid", "lora_id": "lora_path", "ebnf_grammar": "ebnf"}
"""Fields that POST /generate has under another name."""
_ZERO_COUNTS: Mapping[str, object] = {"temperature": 0.0, "skip_special_tokens": False}
"""Sampling parameters that a client means when it sends `sampling_params` and leaves these zero."""


def parsed(name: str, body: bytes) -> Any:
    """The message of this full name. Raises BadRequest."""
    try:
        return CLASSES[name].FromString(body)
    except DecodeError as error:
        raise BadRequest(f"the message is no {name}: {error}") from error


def fields_in(message: Any, most: int, path: str = "") -> dict[str, Any]:
    """The fields that are set. most: entries of a list, as no prompt has more tokens. Raises BadRequest, for a field of a version
    that is not known here too."""
    if unknown := UnknownFieldSet(message):
        raise BadRequest(f"{path}{unknown[0].field_number} is the number of no field that is known here: leave it out")
    fields: dict[str, Any] = {}
    for field, value in message.ListFields():
        name, key = f"{path}{field.name}", _OTHER_NAMES.get(field.name, field.name)
        if isinstance(value, Message):
            fields[key] = fields_in(value, most, f"{name}.") if field.message_type.fields else name
        elif isinstance(value, float):
            fields[key] = _decimal(value, name)
        elif isinstance(value, (bool, int, str)):
            fields[key] = value
        elif len(value) > most:
            raise ContextExceeded(most, f"{name} has {len(value)}, so shorten it", name)
        elif isinstance(value, Mapping):
            fields[key] = {one: _decimal(of, name) if isinstance(of, float) else of for one, of in value.items()}
        else:
            fields[key] = list(value)
    if "rid" in fields:
        checked_id(fields["rid"], "request_id")
    return fields


def _decimal(value: float, name: str) -> float:
    """The shortest decimal that is this float32: what a client has written, such as 0.7, and not 0.699999988. Raises BadRequest
    for what JSON has no number for."""
    if not math.isfinite(value):
        raise BadRequest(f"{name} must be a number, is {value}", field=name)
    return float(str(np.float32(value)))


def read_generate_message(model: str, timeout_s: float | None, body: bytes, context_tokens: int) -> GenerateRequest:
    """See `generate_request`. timeout_s: what is left of the call's deadline."""
    message = parsed(f"{SCHEDULER}.GenerateRequest", body)
    fields = fields_in(message, context_tokens)
    fields.pop("timestamp", None)
    sampling = fields.get("sampling_params", {})
    if message.HasField("sampling_params"):
        sampling = {**_ZERO_COUNTS, **sampling}
    start = fields.pop("logprob_start_len", 0)
    if start > 0 or "return_logprob" in fields:
        fields["logprob_start_len"] = start
    prompt = _prompt_in(fields)
    raw = {**fields, "sampling_params": sampling, "text" if isinstance(prompt, str) else "input_ids": prompt}
    return generate_request(model, raw, _GENERATE, timeout_s)


def read_embed_message(
    model: str, served: EmbeddingMode | None, timeout_s: float | None, body: bytes, context_tokens: int
) -> tuple[EmbeddingRequest, str]:
    """See `embedding_request`. Returns also the id that the client gives the request; "": none."""
    fields = fields_in(parsed(f"{SCHEDULER}.EmbedRequest", body), context_tokens)
    own_id, prompt = fields.pop("rid", ""), _prompt_in(fields)
    raw = {**fields, "input": prompt, "timeout": timeout_s}
    return embedding_request(model, served, read_fields(raw, EmbeddingFields, _EMBED)), own_id


def _prompt_in(fields: dict[str, Any]) -> str | list[int]:
    """Token ids, or a text where there are none: beside ids, SGLang's clients send the text to be read by people. Raises
    BadRequest."""
    tokenized = fields.pop("tokenized", {})
    prompt: str | list[int] | None = tokenized.get("input_ids") or tokenized.get("original_text")
    if prompt is None:
        raise BadRequest("tokenized is empty: send input_ids, or original_text", field="tokenized")
    return prompt


class GenerateMessages:
    """The messages of one answer. request_id: as the client knows it."""

    def __init__(self, request_id: str, request: GenerateRequest, accepted: Accepted) -> None:
        self._id, self._request = request_id, request
        self._so_far = [self._begun(index, spec.prompt) for index, spec in enumerate(accepted.specs)]
        """The last message of each choice, as far as it has come."""

    def _begun(self, index: int, prompt: bytes) -> Any:
        complete, start = _Complete(index=index, prompt_tokens=len(prompt) // ID_BYTES), self._request.logprob_start * ID_BYTES
        if self._request.logprobs is not None:
            complete.output_logprobs.SetInParent()
        if self._request.prompt_logprobs is not None and start < len(prompt):
            first = int(unpack_ids(prompt[start : start + ID_BYTES])[0])  # it has no number, as at SGLang
            tops = min(1, self._request.prompt_logprobs) * [dict[str, Any]()]
            complete.input_logprobs.MergeFrom(_InputLogProbs(token_logprobs=[{}], token_ids=[first], top_logprobs=tops))
        return complete

    def of(self, delta: ChoiceDelta) -> list[bytes]:
        """What a client gets of this news: in a stream a chunk with what is new, and when a choice has ended all of it, but the
        log probabilities of the prompt only once."""
        request, complete = self._request, self._so_far[delta.index]
        new_ids, new = delta.token_ids, delta.logprobs
        complete.output_ids.extend(new_ids)
        complete.completion_tokens += len(new_ids)
        complete.cached_tokens += delta.cached_tokens
        if of_prompt := delta.prompt_logprobs[request.logprob_start :]:
            numbers = [{"value": finite(token.logprob)} for token in of_prompt]
            complete.input_logprobs.MergeFrom(_logprobs(_InputLogProbs, of_prompt, numbers))
        logprobs = _logprobs(_OutputLogProbs, new, [finite(token.logprob) for token in new]) if new else None
        if logprobs is not None:
            complete.output_logprobs.MergeFrom(logprobs)
        messages: list[bytes] = []
        if request.fields.stream and new_ids:
            counts = {name: getattr(complete, name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "index")}
            chunk = _Chunk(token_ids=new_ids, output_logprobs=logprobs, **counts)
            if complete.HasField("input_logprobs"):
                chunk.input_logprobs.CopyFrom(complete.input_logprobs)
                complete.ClearField("input_logprobs")
            messages.append(_Response(request_id=self._id, chunk=chunk).SerializeToString())
        if isinstance(delta.ending, Finished):
            complete.finish_reason = finish_of(delta.ending)
            if delta.ending.matched is not None:
                setattr(complete, _MATCHED[type(delta.ending.matched)], delta.ending.matched)
            messages.append(_Response(request_id=self._id, complete=complete).SerializeToString())
        return messages


def _logprobs(kind: Any, tokens: Sequence[TokenLogprob], numbers: Sequence[object]) -> Any:
    """A message of this kind with the log probabilities of these tokens. numbers: their own, as it holds them."""
    tops = [{"token_ids": [id for id, _ in token.top], "values": [finite(one) for _, one in token.top]} for token in tokens]
    ids = [token.token_id for token in tokens]
    return kind(token_logprobs=numbers, token_ids=ids, top_logprobs=[top for top in tops if top["token_ids"]])
