"""Which logits processors an engine has, in the order in which they change logits."""

from collections.abc import Sequence

import torch

from engine.grammar.masks import Compiled, GrammarProcessor
from engine.logits.processors import BadWords, LogitBias, LogitsProcessor, MinTokens, Penalties


def make_processors(
    max_rows: int, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device, compiled: Compiled | None = None
) -> tuple[LogitsProcessor, ...]:
    """Penalties first, as in vLLM; what bans tokens comes last, so that nothing allows them again. compiled: None when no row
    has a grammar."""
    constraints = () if compiled is None else (GrammarProcessor(compiled, max_rows, vocab_size, tuple(eos_token_ids), device),)
    return (
        Penalties(max_rows, vocab_size, device),
        LogitBias(max_rows, device),
        MinTokens(max_rows, eos_token_ids, device),
        BadWords(max_rows, device),
        *constraints,
    )
