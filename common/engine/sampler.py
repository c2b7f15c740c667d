"""The sampler: logits to tokens. The noise at a position is a function of (seed, position, token) alone.

Owns the filters and the noise. Knows rows as tensors. The noise is a hash and not the state of a generator, so an answer depends
neither on its batch and device nor on where it was resumed.
"""

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""At a temperature below this, any difference between two logits is far larger than the noise."""
_MASK = 0xFFFFFFFF
_ONE = 2.0**40
"""The most likely token's share in whole numbers: sums over 2**20 tokens stay below 2**63."""


class Sampler:
    """Samples from a vocabulary on a device. Holds the part of the noise that is the same in every step."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._token_noise = _mix(torch.arange(vocab_size, device=device))

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
        noisy = scaled + _gumbel(seed[rows], position[rows], self._token_noise)
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


def _gumbel(seed: Tensor, position: Tensor, token_noise: Tensor) -> Tensor:
    """Gumbel noise by (seed, position, token): the largest logit plus noise is a sample. [rows, vocab] float32."""
    key = _mix(_mix(seed & _MASK) ^ _mix((seed >> 32) & _MASK) * 3 & _MASK)
    key = _mix(key ^ _mix(position & _MASK))
    bits = _mix(token_noise[None, :] ^ key[:, None])
    uniform = (bits.double() + 0.5) / 2.0**32
    return -torch.log(-torch.log(uniform)).float()


def _mix(x: Tensor) -> Tensor:
    """A 32-bit mixing function in int64 (lowbias32, https://nullprogram.com/blog/2018/07/31/)."""
    x = (x + 0x9E3779B9) & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
