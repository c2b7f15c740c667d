"""How the next token is chosen and when a request ends, as token ids and numbers.

Owns the limits of each parameter. Does not know text: stop strings live in the text pipeline.
"""

import msgspec

from common.errors import BadRequest

MAX_SEED = 2**63 - 1
ANSWER_TOKENS = 512
"""An answer is expected to have as many tokens until more is known, or its limit when that is lower: limits are often far above
what answers need."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one request.

    temperature: 0 means greedy. top_k: 0 means all tokens. min_p: tokens below this share of the most likely token's probability
    are excluded (Nguyen et al. 2024). seed: the sampling noise at a position is a function of (seed, position) alone.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def validate(self) -> None:
        """Raise BadRequest naming the first parameter that is out of range."""
        limits: tuple[tuple[str, bool, str], ...] = (
            ("max_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 2.0, "between 0 and 2"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (all tokens) or a positive number"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("seed", -(2**63) <= self.seed <= MAX_SEED, "a 64-bit integer"),
        )
        for name, holds, rule in limits:
            if not holds:
                raise BadRequest(f"{name} must be {rule}", field=name)
