"""The noise of sampling: a hash of (seed, position, token), so an answer does not depend on its batch or on a resume.

Owns the hash and the temperature below which there is no noise. Knows tensors only. `triton_sampling` computes the same numbers.
"""

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""At a temperature below this, any difference between two logits is far larger than the noise."""
_MASK = 0xFFFFFFFF


def token_noise(vocab_size: int, device: torch.device) -> Tensor:
    """The part of the noise that is the same in every step. [vocab] int64."""
    return _mix(torch.arange(vocab_size, device=device))


def gumbel(seed: Tensor, position: Tensor, of_tokens: Tensor) -> Tensor:
    """Gumbel noise by (seed, position, token): the largest logit plus noise is a sample.

    seed, position: [rows] int64. of_tokens: as `token_noise` returns it. Returns [rows, vocab] float32.
    """
    key = _mix(_mix(seed & _MASK) ^ _mix((seed >> 32) & _MASK) * 3 & _MASK)
    key = _mix(key ^ _mix(position & _MASK))
    bits = _mix(of_tokens[None, :] ^ key[:, None])
    uniform = (bits.double() + 0.5) / 2.0**32
    return -torch.log(-torch.log(uniform)).float()


def _mix(x: Tensor) -> Tensor:
    """A 32-bit mixing function in int64 (lowbias32, https://nullprogram.com/blog/2018/07/31/)."""
    x = (x + 0x9E3779B9) & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
