"""Log probabilities as the APIs write them: for chats, for text completions, and for prompts as vLLM does.

Owns these shapes. Does not know where the numbers come from.
"""

import builtins
import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from common.errors import BadRequest
from common.messages import TokenLogprob
from common.messages.text import LEAST_LOGPROB

MAX_PAIRS = 500_000
"""Most pairs of a token and its log probability in one HTTP answer: for its prompts, and again for a whole answer's choices. Each
token counts 1, and 1 for each alternative. They take about 60 MB as objects, and several times that while they are written."""
MAX_STREAMED_PAIRS = 20_000
"""Most pairs for a prompt in a stream, where they are one event. It is written on the loop."""


class TokenTexts(Protocol):
    """The text of single tokens."""

    def text(self, token_id: int) -> str:
        """What the token stands for; incomplete characters are U+FFFD."""

    def bytes(self, token_id: int) -> bytes:
        """What the token stands for, which may be a part of a character."""

    def first_bytes(self, token_id: int) -> builtins.bytes:
        """As `bytes`, at the beginning of a text."""

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves its text out."""


def check_prompt_pairs(tokens: Sequence[int], n: int, top: int | None, *, in_stream: bool) -> None:
    """tokens: of each prompt. n: choices for each. top: alternatives of each token; None: log probabilities are not asked for.
    Raises BadRequest."""
    if top is None:
        return
    pairs, longest = sum(tokens) * n * (1 + top), max(tokens, default=0) * (1 + top)
    if in_stream and longest > MAX_STREAMED_PAIRS:
        message = f"a stream gives at most {MAX_STREAMED_PAIRS} log probabilities of a prompt, not {longest}: send stream=false"
        raise BadRequest(message, field="prompt_logprobs")
    if pairs > MAX_PAIRS:
        of = f"{sum(tokens)} tokens of prompts, for {n} choices each and {top} alternatives to each token"
        fix = "send fewer prompts in one request, lower n, or ask for fewer alternatives"
        message = f"one request gets at most {MAX_PAIRS} log probabilities of its prompts, not {pairs} ({of}): {fix}"
        raise BadRequest(message, field="prompt_logprobs")


def most_tokens_with(top: int | None, choices: int) -> int | None:
    """Most tokens in each choice of a whole answer with so many alternatives; None: any number."""
    return None if top is None else max(1, MAX_PAIRS // (choices * (1 + top)))


class ChatTop(msgspec.Struct, frozen=True):
    """One of the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """A token of the answer."""

    token: str
    logprob: float
    bytes: list[int]
    """The token's text in UTF-8: a token may end within a character."""
    top_logprobs: list[ChatTop]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """All lists are as long. The first token of a prompt has no log probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where each token begins in the text."""


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt, by token id: the token itself and the likeliest ones. Nothing for the first."""


class TextPlace:
    """Where the next token begins in a text, in characters: those that are complete before it. begins: no text stands before."""

    def __init__(self, texts: TokenTexts, *, begins: bool) -> None:
        self.chars = 0
        self._begins = begins
        self._texts = texts
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def pass_by(self, token_id: int, *, skips_special: bool, echo: str = "") -> int:
        """Returns where this token begins. skips_special: special tokens have no text, but those that stand in the echo."""
        begin = self.chars
        if skips_special and self._texts.is_special(token_id):
            written = self._texts.text(token_id)
            self.chars += len(written) if echo.startswith(written, self.chars) else 0
        else:
            data = self._texts.first_bytes(token_id) if self._begins else self._texts.bytes(token_id)
            self.chars += len(self._characters.decode(data))
            self._begins = False
        return begin


class LogprobWriter:
    """Writes log probabilities. top: how many of the likeliest tokens. as_ids: "token_id:7" in place of texts, as vLLM does."""

    def __init__(self, texts: TokenTexts, top: int, *, as_ids: bool = False) -> None:
        self._texts = texts
        self._top = top
        self._as_ids = as_ids

    def chat(self, tokens: Iterable[TokenLogprob]) -> ChatLogprobs:
        return ChatLogprobs(
            [
                ChatLogprob(
                    self._text(token.token_id),
                    finite(token.logprob),
                    self._bytes(token.token_id),
                    [ChatTop(self._text(top), finite(logprob), self._bytes(top)) for top, logprob in token.top[: self._top]],
                )
                for token in tokens
            ]
        )

    def completion(
        self,
        tokens: Iterable[TokenLogprob],
        place: TextPlace,
        *,
        skips_special: bool,
        prompt: tuple[int, Iterable[TokenLogprob], str] | None = None,
    ) -> CompletionLogprobs:
        """place: where their text begins; it moves behind it. skips_special: special tokens have no text there. prompt: its first
        token, the others and its echo, when they come first. The echo of a text has the special tokens that are written there."""
        written = CompletionLogprobs([], [], [], [])
        if prompt is not None:
            first, others, echo = prompt
            self._add(written, place.pass_by(first, skips_special=True, echo=echo), first, None)
            for token in others:
                self._add(written, place.pass_by(token.token_id, skips_special=True, echo=echo), token.token_id, token)
        for token in tokens:
            self._add(written, place.pass_by(token.token_id, skips_special=skips_special), token.token_id, token)
        return written

    def prompt(self, tokens: Iterable[TokenLogprob]) -> PromptLogprobs:
        """tokens: those behind the first one."""
        written: PromptLogprobs = [None]
        for token in tokens:
            own = PromptLogprob(finite(token.logprob), token.rank, self._texts.text(token.token_id))
            at = {str(token.token_id): own}
            for rank, (top, logprob) in enumerate(token.top[: self._top], 1):
                at.setdefault(str(top), PromptLogprob(finite(logprob), rank, self._texts.text(top)))
            written.append(at)
        return written

    def _add(self, to: CompletionLogprobs, offset: int, token_id: int, token: TokenLogprob | None) -> None:
        """token: None for the first of a prompt, which has no log probability."""
        likeliest: dict[str, float] = {}
        if token is not None:
            for top, logprob in (*token.top[: self._top], (token_id, token.logprob)):
                likeliest.setdefault(self._text(top), finite(logprob))
        to.tokens.append(self._text(token_id))
        to.token_logprobs.append(None if token is None else finite(token.logprob))
        to.top_logprobs.append(None if token is None else likeliest)
        to.text_offset.append(offset)

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._texts.text(token_id)

    def _bytes(self, token_id: int) -> list[int]:
        return list(self._texts.bytes(token_id))


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
