"""The intake: from what a client wrote to requests in tokens.

Owns the tokenizing (on threads of its own, so that a long prompt does not hold up the loop), the limits of a context, ids and
seeds. Does not know HTTP, instances or messages.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from common.config import RouterConfig
from common.errors import BadRequest, UnknownModel
from common.ids import RequestId, pack_ids
from common.sampling_params import SamplingParams
from router.core import RouterCore
from router.openai_api import COMPLETION_MAX_TOKENS, ChatRequest, CompletionRequest, SamplingFields
from router.requests import RequestSpec

SEED_BITS = 63
ENCODING_THREADS = 4
MAX_TOKEN_CHARS = 512
"""No tokenizer has longer tokens: a text beyond this many characters for each token of the context is too long unseen."""


class Tokenizer(Protocol):
    """What the intake needs of `common.text.tokenizer_manager.TokenizerManager`.

    Both methods raise BadRequest, and several threads may call them at once.
    """

    @property
    def context_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Accepted:
    """A client's request, ready to be dispatched: its id, and a spec for each choice (prompt by prompt, n each)."""

    id: str
    specs: tuple[RequestSpec, ...]
    prompt_tokens: int


class Intake:
    """Turns requests of the API into specs. model: the name that clients must use."""

    def __init__(self, core: RouterCore, tokenizer: Tokenizer, model: str, config: RouterConfig) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._model = model
        self._default_max_tokens = config.default_max_tokens
        self._longest_timeout_s = config.request_timeout_s
        # Several, so that one very long prompt does not hold up the others.
        self._threads = ThreadPoolExecutor(max_workers=ENCODING_THREADS, thread_name_prefix="tokenizer")
        self._encoding = 0

    async def chat(self, request: ChatRequest) -> Accepted:
        """Raises BadRequest, UnknownModel, Overloaded."""
        self._check(request.sampling)
        encode_chat, messages = self._tokenizer.encode_chat, request.messages
        self._check_length((message["content"] for message in messages), "messages")
        prompts = await self._encode(lambda: [encode_chat(messages)], choices=request.sampling.n)
        return self._accept("chatcmpl-", prompts, request.sampling, "messages", self._default_max_tokens)

    async def completion(self, request: CompletionRequest) -> Accepted:
        """Raises BadRequest, UnknownModel, Overloaded."""
        self._check(request.sampling)
        encode, prompts_sent = self._tokenizer.encode, request.prompts
        for prompt in prompts_sent:
            self._check_length((prompt,), "prompt")
        prompts = await self._encode(
            lambda: [encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts_sent],
            choices=len(prompts_sent) * request.sampling.n,
        )
        return self._accept("cmpl-", prompts, request.sampling, "prompt", COMPLETION_MAX_TOKENS)

    @property
    def context_tokens(self) -> int:
        """Of prompt and answer together: the checkpoint's, or less when the fleet's memory holds less."""
        model, own = self._core.fleet.model, self._tokenizer.context_tokens
        return own if model is None else min(own, model.context_tokens)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check(self, fields: SamplingFields) -> None:
        """What depends on what is served here and how. Raises BadRequest, UnknownModel."""
        if fields.model != self._model:
            raise unknown_model(fields.model, self._model)
        longest_s = self._longest_timeout_s
        if fields.timeout_s is not None and not 0 < fields.timeout_s <= longest_s:
            rule = f"above 0 and at most {longest_s:g} seconds (--request-timeout-s)"
            raise BadRequest(f"timeout must be {rule}, is {fields.timeout_s:g}", field="timeout")

    def _check_length(self, parts: Iterable[Sized], field: str) -> None:
        """Refuse what cannot fit before time is spent on it."""
        context = self.context_tokens
        if sum(len(part) for part in parts) > context * MAX_TOKEN_CHARS:
            raise BadRequest(
                f"{field} is far longer than the model's context of {context} tokens", field=field, code="context_length_exceeded"
            )

    async def _encode(self, work: Callable[[], list[list[int]]], choices: int) -> list[list[int]]:
        """Token ids of each prompt. What waits here counts against the places of the router."""
        self._core.requests.require_room(self._encoding + choices)
        self._encoding += choices
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._encoding -= choices

    def _accept(
        self, prefix: str, prompts: list[list[int]], fields: SamplingFields, prompt_field: str, default_max_tokens: int
    ) -> Accepted:
        answer_id = prefix + secrets.token_hex(12)
        seed = secrets.randbits(SEED_BITS) if fields.seed is None else fields.seed
        specs: list[RequestSpec] = []
        for prompt in prompts:
            self._check_ids(prompt, prompt_field)
            max_new_tokens = self._max_new_tokens(len(prompt), fields, prompt_field, default_max_tokens)
            packed = pack_ids(prompt)
            for copy in range(fields.n):
                sampling = _sampling_params(fields, max_new_tokens, seed, copy)
                request_id = RequestId(f"{answer_id}-{len(specs)}")
                spec = RequestSpec(
                    request_id, len(specs), packed, sampling, fields.stop, priority=fields.priority, timeout_s=fields.timeout_s
                )
                specs.append(spec)
        return Accepted(answer_id, tuple(specs), sum(len(prompt) for prompt in prompts))

    def _check_ids(self, prompt: Sequence[int], prompt_field: str) -> None:
        if not prompt:
            raise BadRequest(f"{prompt_field} is empty: send at least one token of text", field=prompt_field)
        largest = self._tokenizer.vocab_size - 1
        if min(prompt) < 0 or max(prompt) > largest:
            raise BadRequest(f"{prompt_field} holds token ids that are not between 0 and {largest}", field=prompt_field)

    def _max_new_tokens(self, prompt_tokens: int, fields: SamplingFields, prompt_field: str, default: int) -> int:
        """What the client asked for; or else the default, less if the context or the largest decode instance has less room."""
        context = self.context_tokens
        code = "context_length_exceeded"
        if prompt_tokens >= context:
            message = f"{prompt_field} has {prompt_tokens} tokens, but the model's context of {context} must hold an answer too"
            raise BadRequest(f"{message}: shorten it to at most {context - 1}", field=prompt_field, code=code)
        if fields.max_tokens is None:
            memory = max((member.capacity_tokens for member in self._core.fleet.members("decode")), default=context)
            return max(1, min(default, context - prompt_tokens, memory - prompt_tokens))
        if prompt_tokens + fields.max_tokens > context:
            name = fields.max_tokens_field
            message = (
                f"{name} is {fields.max_tokens}, but after {prompt_tokens} tokens of {prompt_field} the context of {context}"
            )
            raise BadRequest(f"{message} has room for {context - prompt_tokens}: lower it", field=name, code=code)
        return fields.max_tokens


def unknown_model(model: str, served: str) -> UnknownModel:
    return UnknownModel(f"model {model!r} is not served here: use {served!r}", field="model", code="model_not_found")


def _sampling_params(fields: SamplingFields, max_new_tokens: int, seed: int, copy: int) -> SamplingParams:
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        seed=seed,
        ignore_eos=fields.ignore_eos,
    )
    params.validate()
    return params if copy == 0 else replace(params, seed=_wrapped(seed + copy))


def _wrapped(seed: int) -> int:
    """Into the signed 64-bit range."""
    return (seed + 2**63) % 2**64 - 2**63
