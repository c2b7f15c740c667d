"""Log probabilities of tokens, on the wire and as they are kept to be told again.

Owns their shape, and their packed form: as objects they take about eight times the memory. Does not know who asks for them.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeAlias

import msgspec

from common.ranges import Count, Number, TokenId

LEAST_LOGPROB = -9999.0
"""Stands for a token that cannot come, or hardly can, as in vLLM: minus infinity is no number on the wire or in JSON."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """How likely a token was, by the model's own distribution over the whole vocabulary."""

    token_id: TokenId
    logprob: Number
    """Natural logarithm."""
    rank: Count
    """How many tokens were at least as likely, itself included: 1 is the likeliest."""
    top: tuple[tuple[TokenId, Number], ...] = ()
    """The likeliest tokens and their log probabilities, the likeliest first; as many as were asked for."""


TokenLogprobs: TypeAlias = tuple[TokenLogprob, ...]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TokenLogprobs).decode


def pack_logprobs(logprobs: Sequence[TokenLogprob]) -> bytes:
    """A piece of an answer's logprobs, to be kept."""
    return _encode(logprobs)


def unpack_logprobs(pieces: Iterable[bytes]) -> TokenLogprobs:
    """All of these pieces, in order."""
    return tuple(chain.from_iterable(map(_decode, pieces)))
