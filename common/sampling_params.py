"""How the next token is chosen and when a request ends, as token ids and numbers.

Owns the limits of each parameter. Does not know text: stop strings live in the text pipeline. Every parameter acts as a
function of the prompt and of the answer's tokens so far, so an answer that is resumed elsewhere goes on as it would have.
"""

from typing import Literal, TypeAlias

import msgspec

from common.errors import BadRequest
from common.ranges import Count, Integer, Number, TokenId

MAX_SEED = 2**63 - 1
MAX_STOP_TOKENS = MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS, MAX_BAD_WORD = 1024, 16
"""Sequences, and tokens of each."""
MAX_LOGPROBS = 20
MAX_LOGPROB_IDS = 64
MAX_PROMPT_LOGPROBS = 250_000
"""Most pairs of a token and its log probability that one request gets for its prompt: each token counts 1, and 1 for each
alternative. They travel in one message, and take at most 6 MiB there, and about 30 MB as objects."""
ANSWER_TOKENS = 512
"""An answer is expected to have as many tokens until more is known, or its limit when that is lower: limits are often far above
what answers need."""

Pooling: TypeAlias = Literal["last", "mean", "cls"]
"""Which hidden states of a prompt make its embedding: its last token's, the mean of all, its first token's."""

NOT_WITH_GRAMMAR = "left out when the answer must match a grammar: it says what may come and where the answer may end"


class Grammar(msgspec.Struct, frozen=True, array_like=True, weakref=True):
    """What the whole answer must match, as xgrammar reads it. text: a JSON schema ("{}": any JSON), a regular expression, an EBNF
    grammar whose root rule is `root`, or a structural tag, by kind."""

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one request.

    temperature: 0 means greedy. top_k: 0 means all tokens. min_p: tokens below this share of the most likely token's probability
    are excluded (Nguyen et al. 2024). seed: the sampling noise at a position is a function of (seed, position) alone.

    repetition_penalty: logits of tokens that the prompt or the answer holds are divided by it if positive, multiplied if not
    (Keskar et al. 2019); 1 changes nothing. presence_penalty: taken off the logit of each token that the answer holds.
    frequency_penalty: taken off as often as the answer holds the token. logit_bias: (token id, what is added to its logit).
    min_tokens: the answer has at least so many tokens before a stop token or a stop string may end it. bad_words: token ids of
    sequences that the answer must not contain.

    logprobs: report the log probability of each token of the answer, and of so many of the likeliest tokens beside it; None:
    report nothing. logprob_ids: report these tokens in place of the likeliest ones. prompt_logprobs: the same as logprobs for the
    prompt's tokens from the second one on. All are of the model's own distribution, before any parameter changes it. grammar:
    what the answer must match; None: anything.

    pooling: the answer is not tokens but the prompt's embedding, which comes with its ending (`Finished.embedding`).
    """

    max_new_tokens: Integer
    temperature: Number = 1.0
    top_p: Number = 1.0
    top_k: Integer = 0
    min_p: Number = 0.0
    seed: Integer = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[TokenId, ...] = ()
    repetition_penalty: Number = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    logit_bias: tuple[tuple[TokenId, Number], ...] = ()
    min_tokens: Integer = 0
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    grammar: Grammar | None = None
    pooling: Pooling | None = None
    logprob_ids: tuple[TokenId, ...] = ()

    @property
    def changes_logits(self) -> bool:
        """Whether a logits processor acts on the answer: each parameter that one of them reads is named here."""
        return self._looks_back or bool(self.logit_bias)

    @property
    def needs_tokens(self) -> bool:
        """Whether the engine is given the tokens before the next one."""
        return self._looks_back or self.prompt_logprobs is not None

    @property
    def _looks_back(self) -> bool:
        """Whether the next token depends on more of the tokens before it than the model's own distribution does."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties or self.min_tokens > 0 or bool(self.bad_words) or self.grammar is not None

    def check_prompt(self, prompt_tokens: int) -> None:
        """Raise BadRequest when too many log probabilities of the prompt are asked for."""
        if self.prompt_logprobs is None:
            return
        pairs = prompt_tokens * (1 + self.prompt_logprobs)
        if pairs > MAX_PROMPT_LOGPROBS:
            most = MAX_PROMPT_LOGPROBS // prompt_tokens - 1
            fix = f"at most {most} can be asked for" if most >= 0 else f"shorten the prompt to {MAX_PROMPT_LOGPROBS} tokens"
            raise BadRequest(
                f"prompt_logprobs of {self.prompt_logprobs} for a prompt of {prompt_tokens} tokens reports {pairs} log "
                f"probabilities, more than {MAX_PROMPT_LOGPROBS}: {fix}",
                field="prompt_logprobs",
            )

    def validate(self, answered: int = 0) -> None:
        """Raise BadRequest naming the first parameter that is out of range. answered: tokens of the answer that were there before
        these parameters' `max_new_tokens` began to count."""
        most_tokens = answered + self.max_new_tokens
        limits: tuple[tuple[str, bool, str], ...] = (
            ("max_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("max_tokens", self.pooling is None or most_tokens == 1, "1 for an embedding"),
            ("temperature", 0.0 <= self.temperature <= 2.0, "between 0 and 2"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (all tokens) or a positive number"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("seed", -(2**63) <= self.seed <= MAX_SEED, "a 64-bit integer"),
            ("stop_token_ids", len(self.stop_token_ids) <= MAX_STOP_TOKENS, f"at most {MAX_STOP_TOKENS} tokens"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 10.0, "between 0.01 and 10"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("logit_bias", len(self.logit_bias) <= MAX_BIASED_TOKENS, f"of at most {MAX_BIASED_TOKENS} tokens"),
            ("logit_bias", all(-100.0 <= bias <= 100.0 for _, bias in self.logit_bias), "between -100 and 100"),
            ("logit_bias", len({token for token, _ in self.logit_bias}) == len(self.logit_bias), "given once for each token"),
            ("min_tokens", 0 <= self.min_tokens <= most_tokens, "between 0 and max_tokens"),
            ("bad_words", len(self.bad_words) <= MAX_BAD_WORDS, f"at most {MAX_BAD_WORDS}"),
            ("bad_words", all(1 <= len(word) <= MAX_BAD_WORD for word in self.bad_words), f"of 1 to {MAX_BAD_WORD} tokens each"),
            ("min_tokens", self.grammar is None or self.min_tokens == 0, NOT_WITH_GRAMMAR),
            ("bad_words", self.grammar is None or not self.bad_words, NOT_WITH_GRAMMAR),
            ("ignore_eos", self.grammar is None or not self.ignore_eos, NOT_WITH_GRAMMAR),
            ("logprobs", 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
            ("logprob_ids", len(set(self.logprob_ids)) == len(self.logprob_ids), "given once for each token"),
            ("logprob_ids", len(self.logprob_ids) <= MAX_LOGPROB_IDS, f"of at most {MAX_LOGPROB_IDS} tokens"),
            ("prompt_logprobs", 0 <= (self.prompt_logprobs or 0) <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
        )
        for name, holds, rule in limits:
            if not holds:
                raise BadRequest(f"{name} must be {rule}", field=name)

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise BadRequest naming the first parameter that holds a token id which the model does not have."""
        named = (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("logprob_ids", self.logprob_ids),
            ("bad_words", [token for word in self.bad_words for token in word]),
        )
        for name, token_ids in named:
            if not all(0 <= token < vocab_size for token in token_ids):
                raise BadRequest(f"{name} must hold token ids between 0 and {vocab_size - 1}", field=name)
