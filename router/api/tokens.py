"""The bodies and answers of POST /tokenize and POST /detokenize, as in vLLM.

Owns their fields. Does not know tokenizers. Fields: TokenizeRequest and DetokenizeRequest at
https://docs.vllm.ai/en/stable/serving/openai_compatible_server.html.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from router.api.fields import TokenId, convert, object_in
from router.api.neutral import drop_neutral

MAX_CHARS, MAX_TOKENS = 2**20, 2**18


class TokenizeFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /tokenize."""

    model: Annotated[str | None, Meta(description="The model's name; without it: the model that is served.")] = None
    prompt: Annotated[str, Meta(max_length=MAX_CHARS, description="The text.")]
    add_special_tokens: Annotated[bool, Meta(description="Begin with the special tokens that the model begins with.")] = True
    return_token_strs: Annotated[bool, Meta(description="Send the text of each token too.")] = False


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of POST /tokenize."""

    count: int
    max_model_len: Annotated[int, Meta(description="Longest prompt and answer together, in tokens.")]
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    model: Annotated[str | None, Meta(description="The model's name; without it: the model that is served.")] = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS, description="Token ids.")]
    skip_special_tokens: Annotated[bool, Meta(description="Special tokens give no text.")] = False


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of POST /detokenize."""

    prompt: str


def read_tokenize(body: bytes, context_tokens: int | None = None) -> TokenizeFields:
    """The body of POST /tokenize. Raises BadRequest."""
    return convert(drop_neutral(object_in(body), {}, TokenizeFields.__struct_encode_fields__), TokenizeFields)


def read_detokenize(body: bytes, context_tokens: int | None = None) -> DetokenizeFields:
    """The body of POST /detokenize. Raises BadRequest."""
    return convert(drop_neutral(object_in(body), {}, DetokenizeFields.__struct_encode_fields__), DetokenizeFields)
