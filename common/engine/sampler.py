"""The sampler: logits to tokens. The noise at a position is a function of (seed, position, token) alone.

Owns the filters and the noise. Knows rows as tensors. Because the noise is a hash and not a generator's state, an answer does not
depend on its batch, its device or on where it was resumed.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    """One token per row. logits: [rows, vocab] float32. temperature, top_p, min_p: [rows] float32.

    top_k, seed, position: [rows] int64. temperature 0 is greedy; top_k 0 is all tokens. position: of the
    token that is sampled. Returns [rows] int64.
    """
    greedy = logits.argmax(dim=-1)
    sampled_rows = torch.nonzero(temperature > 0).flatten()
    if len(sampled_rows) == 0:
        return greedy
    rows = sampled_rows
    scaled = logits[rows] / temperature[rows, None]
    kept = _filtered(scaled, top_k[rows], top_p[rows], min_p[rows])
    noisy = kept + _gumbel(seed[rows], position[rows], logits.shape[1])
    greedy[rows] = noisy.argmax(dim=-1)
    return greedy


def _filtered(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The logits with those of excluded tokens at minus infinity; in the order top-k, top-p, min-p."""
    if not bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()):
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)[None, :]
    limit = torch.where(top_k > 0, top_k, logits.shape[1])[:, None]
    ordered = ordered.masked_fill(rank >= limit, -torch.inf)
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    ordered = ordered.masked_fill((before >= top_p[:, None]) & (rank > 0), -torch.inf)
    ordered = ordered.masked_fill(probability < min_p[:, None] * probability[:, :1], -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(1, order, ordered)


def _gumbel(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Gumbel noise by (seed, position, token): the largest logit plus noise is a sample. [rows, vocab] float32."""
    key = _mix(_mix(seed & _MASK) ^ _mix((seed >> 32) & _MASK) * 3 & _MASK)
    key = _mix(key ^ _mix(position & _MASK))
    token = torch.arange(vocab, device=seed.device)
    bits = _mix(_mix(token)[None, :] ^ key[:, None])
    uniform = (bits.double() + 0.5) / 2.0**32
    return -torch.log(-torch.log(uniform)).float()


def _mix(x: Tensor) -> Tensor:
    """A 32-bit mixing function in int64 (lowbias32, https://nullprogram.com/blog/2018/07/31/)."""
    x = (x + 0x9E3779B9) & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
