"""The sampler: logits to tokens. The noise at a position is a function of (seed, position, token) alone.

Owns the filters. Knows rows as tensors. The noise is in `kernels/noise`.
"""

import torch
from torch import Tensor

from common.engine.kernels.noise import GREEDY_BELOW, gumbel, token_noise

_ONE = 2.0**40
"""The most likely token's share in whole numbers: sums over 2**20 tokens stay below 2**63."""


class Sampler:
    """Samples from a vocabulary on a device. Holds the part of the noise that is the same in every step."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._token_noise = token_noise(vocab_size, device)

    def __call__(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
    ) -> Tensor:
        """One token per row. logits: [rows, vocab] float32. temperature, top_p, min_p: [rows] float32.

        top_k, seed, position: [rows] int64. A temperature below GREEDY_BELOW, as 0, is greedy; top_k 0 is all tokens. position:
        of the token that is sampled. Returns [rows] int64, each of which depends on its own row alone.
        """
        greedy = logits.argmax(dim=-1)
        rows = torch.nonzero(temperature >= GREEDY_BELOW).flatten()
        if len(rows) == 0:
            return greedy
        picked = logits[rows]
        scaled = (picked - picked.gather(1, greedy[rows, None])) / temperature[rows, None]
        top_k, top_p, min_p = top_k[rows], top_p[rows], min_p[rows]
        filtering = torch.nonzero((top_k > 0) | (top_p < 1) | (min_p > 0)).flatten()
        if len(filtering):
            scaled[filtering] = _filtered(scaled[filtering], top_k[filtering], top_p[filtering], min_p[filtering])
        noisy = scaled + gumbel(seed[rows], position[rows], self._token_noise)
        greedy[rows] = noisy.argmax(dim=-1)
        return greedy


def _filtered(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The logits with those of excluded tokens at minus infinity; in the order top-k, top-p, min-p. At least one token stays.

    logits: [rows, vocab], the largest of a row is 0. Each filter keeps a first part of the tokens, in the order of falling logits
    and, where those are equal, of rising ids: so a row's filters come down to one number, how many tokens stay. Probabilities are
    counted in whole numbers, whose sums do not depend on how many rows or columns are computed beside them.
    """
    vocab = logits.shape[1]
    limit = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)[:, None]
    width = int(limit.max())
    ordered = logits.topk(width).values if width < vocab else logits.sort(descending=True).values
    probability = ordered.exp()  # relative to the most likely token's, as min-p wants it
    within = torch.arange(width, device=logits.device)[None, :] < limit
    share = (probability.double() * _ONE).long().masked_fill(~within, 0)
    total = share.cumsum(dim=-1)
    before = total - share
    nucleus = (before < top_p.double()[:, None] * total[:, -1:]) | (top_p >= 1)[:, None]
    count = (within & nucleus & (probability >= min_p[:, None])).sum(dim=-1, keepdim=True).clamp(min=1)
    least = ordered.gather(1, count - 1)
    above, equal = logits > least, logits == least
    room = count - above.sum(dim=-1, keepdim=True)
    return logits.masked_fill(~(above | (equal & (equal.cumsum(dim=-1) <= room))), -torch.inf)
