"""The text pipeline: instances send tokens to the detokenizer, which sends text to the router.

Owns what carries tokens and text, and log probabilities in the packed form in which they are kept to be sent again: as objects
they take about eight times the memory. Does not know tokenizers or HTTP.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeAlias

import msgspec

from common.ids import AttemptId, check_ids
from common.messages.base import Message
from common.messages.requests import Ending
from common.ranges import Count, Number, Seconds, TokenId

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
    """The likeliest tokens and their log probabilities, the likeliest first, or those of `SamplingParams.logprob_ids`."""


TokenLogprobs: TypeAlias = tuple[TokenLogprob, ...]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TokenLogprobs).decode


def pack_logprobs(logprobs: Sequence[TokenLogprob]) -> bytes:
    """A piece of an answer's logprobs, to be kept."""
    return _encode(logprobs)


def unpack_logprobs(pieces: Iterable[bytes]) -> TokenLogprobs:
    """All of these pieces, in order."""
    return tuple(chain.from_iterable(map(_decode, pieces)))


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one request."""

    key: AttemptId
    first: Count
    """Number of the first of them in the answer, counted from 0."""
    token_ids: tuple[TokenId, ...]
    """In order; empty when there is only an ending."""
    ending: Ending | None = None
    """The answer ends after the last of them."""
    logprobs: TokenLogprobs = ()
    """One for each token, if the request asks for them."""
    prompt_logprobs: TokenLogprobs = ()
    """The log probabilities of the prompt's tokens from the second one on, if the request asks for them: they come with
    the answer's first token."""
    cached_tokens: Count = 0
    """Tokens of the prompt that were not computed, because their KV was there already; said with the answer's first token."""
    drafts: tuple[Count, Count] = (0, 0)
    """Tokens that were drafted for the answer, and how many of them were right."""


class TokenBatch(Message, frozen=True):
    """instance → detokenizer: what one step brought."""

    deltas: tuple[TokenDelta, ...]
    """Those of one request are in order."""


class AnswerParts(msgspec.Struct, frozen=True, kw_only=True):
    """Which parts of an answer are told apart, in the format of the router's model."""

    thoughts: bool
    """Whether thoughts are."""
    opened: bool = False
    """Whether the answer begins within thoughts."""
    functions: tuple[str, ...] = ()
    """The names of the functions that it may call; calls are told apart if there are any."""


class ExpectAnswer(Message, frozen=True, tag="Open"):
    """router → detokenizer: tokens of this request will come; turn them into text."""

    key: AttemptId
    stop: tuple[str, ...] = ()
    """Strings at which the answer ends; they are cut off."""
    first: Count = 0
    """Number of the first token to expect; above 0 when an answer is resumed."""
    context: bytes = b""
    """Packed ids before that token, which decide how it is decoded; the last `first` of them are the answer's tokens so far."""
    text: str = ""
    """The text that was delivered for the answer's tokens so far."""
    skip_special_tokens: bool = True
    """Special tokens give no text, but for those in `shown`."""
    shown: tuple[TokenId, ...] = ()
    """Special tokens that give text, whatever `skip_special_tokens` says."""
    include_stop: bool = False
    """The stop string that ends the answer stays in its text; so does the text of a stop token of the request."""
    min_tokens: Count = 0
    """Stop strings that are complete within so many tokens of the answer do not end it."""
    logprobs: bool = False
    """Each token comes with its log probability; a delta that lacks them is malformed."""
    again: bool = False
    """The answer was opened before, or may have been: the text from here on was lost, or may have been. Its tokens come again."""
    life_s: Seconds = 3600.0
    """The detokenizer forgets the answer after this time, whatever was lost on the way."""
    parts: AnswerParts | None = None
    """What is told apart from the answer, so that stops do not act on it; None: all text is the answer."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Tokens that end the answer where they do not stand in other parts: instances know only tokens."""

    def __post_init__(self) -> None:
        check_ids(self.context)


class ForgetAnswer(Message, frozen=True, tag="Close"):
    """router → detokenizer: no more text of this request is wanted."""

    key: AttemptId


class TextDelta(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one request in order, each exactly once, and their text."""

    key: AttemptId
    first: Count
    """Number of the first of them in the answer."""
    token_ids: tuple[TokenId, ...]
    """In order."""
    text: str
    """Text that is settled now; may be empty while a character or a stop string is incomplete."""
    ending: Ending | None = None
    """The answer ends after this text."""
    logprobs: TokenLogprobs = ()
    """As in TokenDelta."""
    prompt_logprobs: TokenLogprobs = ()
    """As in TokenDelta."""
    cached_tokens: Count = 0
    """As in TokenDelta."""
    drafts: tuple[Count, Count] = (0, 0)
    """As in TokenDelta."""
    thought_tokens: Count = 0
    """How many tokens of the answer up to here were thoughts, with the marks around them, where those are told apart."""


class TextBatch(Message, frozen=True):
    """detokenizer → router: what came of tokens, or a part of it."""

    deltas: tuple[TextDelta, ...]
    """Those of one request are in order."""


class DetokenizerHeartbeat(Message, frozen=True):
    """detokenizer → router, every second."""

    open_answers: Count
    """Answers that are expected and have not ended."""
    early_answers: Count
    """Answers whose tokens came before ExpectAnswer."""
    dropped: Count
    """Token deltas that were of no use, since it started."""
    shard: Count = 0
    """Which of its router's detokenizers it is."""
