"""The bodies and answers of POST /tokenize and POST /detokenize, as in vLLM, and the answers of GET /v1/models.

Owns their fields and shapes; a model's is OpenAI's with vLLM's `max_model_len`. Does not know tokenizers. Fields: TokenizeRequest
and DetokenizeRequest at https://docs.vllm.ai/en/stable/serving/openai_compatible_server.html.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.errors import BadRequest
from common.ranges import TokenId
from router.api.bodies import object_in
from router.api.chat import MESSAGES, ChatFields, ChatMessage, ChatRequest, chat_request
from router.api.fields import ModelField, Unsupported, read_fields
from router.api.tools import FunctionTool


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """The name that requests use."""
    object: Literal["model"] = "model"
    created: int
    """When the router started, in seconds since 1970."""
    owned_by: str = "tandem"
    max_model_len: int
    """Longest prompt and answer together, in tokens."""
    root: str | msgspec.UnsetType = msgspec.UNSET
    """The folder of a LoRA adapter."""
    parent: str | msgspec.UnsetType = msgspec.UNSET
    """The base model of a LoRA adapter."""
    digest: str | msgspec.UnsetType = msgspec.UNSET
    """The digest of the bytes of a LoRA adapter."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


MAX_CHARS, MAX_TOKENS = 2**20, 2**18
TOKENIZE = Unsupported({"chat_template": (), "mm_processor_kwargs": ({},)}, inside={"messages": MESSAGES})


class TokenizeFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /tokenize. Exactly one of prompt and messages must be there."""

    model: ModelField = None
    prompt: Annotated[str, Meta(max_length=MAX_CHARS)] | None = None
    """The text."""
    messages: list[ChatMessage] | None = None
    """A conversation, which the chat template makes a text."""
    add_special_tokens: bool | None = None
    """Begin a prompt with the special tokens that the model begins with. Chat templates write them themselves."""
    return_token_strs: bool = False
    """Send each token too, as the vocabulary spells it."""
    tools: list[FunctionTool] = msgspec.field(default_factory=list)
    """With `messages`: functions that the model may call."""
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """With `messages`: names that the chat template reads, and their values."""
    add_generation_prompt: bool = True
    """With `messages`: the prompt ends where the assistant's answer begins."""
    continue_final_message: bool = False
    """With `messages`: the last message stays open. Send add_generation_prompt=false with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """What is to be tokenized: a text, or a chat."""

    fields: TokenizeFields
    prompt: str | ChatRequest


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of POST /tokenize."""

    count: int
    max_model_len: int
    """Longest prompt and answer together, in tokens."""
    tokens: list[int]
    token_strs: list[str] | None = None


class InputTokens(msgspec.Struct, frozen=True):
    """The answer of POST /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


class DetokenizeFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    model: ModelField = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    """Token ids."""
    skip_special_tokens: bool = False
    """Special tokens give no text."""


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of POST /detokenize."""

    prompt: str
    text: str
    """The same, for SGLang's clients."""


def read_tokenize(body: bytes, context_tokens: int | None = None) -> TokenizeRequest:
    """The body of POST /tokenize. Raises BadRequest."""
    fields = read_fields(object_in(body), TokenizeFields, TOKENIZE)
    if (fields.prompt is None) == (fields.messages is None):
        raise BadRequest("prompt and messages: send one of them, and only one", field="prompt")
    if fields.messages is not None and fields.add_special_tokens:
        fix = "the chat template writes special tokens itself: leave it out"
        raise BadRequest(f"add_special_tokens is for a prompt only; {fix}", field="add_special_tokens")
    return TokenizeRequest(fields=fields, prompt=_chat(fields, fields.messages) if fields.prompt is None else fields.prompt)


def _chat(fields: TokenizeFields, messages: list[ChatMessage] | None) -> ChatRequest:
    named = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    same = {name: getattr(fields, name) for name in named}
    return chat_request(ChatFields(model=fields.model or "", messages=messages or [], **same))


def read_detokenize(body: bytes, context_tokens: int | None = None) -> DetokenizeFields:
    """The body of POST /detokenize. Raises BadRequest."""
    return read_fields(object_in(body, context_tokens), DetokenizeFields)
