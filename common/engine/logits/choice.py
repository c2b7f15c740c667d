"""Which logits processors an engine has, in the order in which they change logits."""

from collections.abc import Sequence

import torch

from common.engine.logits.bad_words import BadWords
from common.engine.logits.bias import LogitBias
from common.engine.logits.min_tokens import MinTokens
from common.engine.logits.penalties import Penalties
from common.engine.logits.port import LogitsProcessor


def make_processors(
    max_rows: int, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device
) -> tuple[LogitsProcessor, ...]:
    """Penalties first, as in vLLM; what bans tokens comes last, so that nothing allows them again."""
    return (
        Penalties(max_rows, vocab_size, device),
        LogitBias(max_rows, device),
        MinTokens(max_rows, eos_token_ids, device),
        BadWords(max_rows, device),
    )
