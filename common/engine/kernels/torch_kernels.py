"""The decoder's small operations in plain torch: what runs on CPU, and the reference for every other implementation.

Owns their arithmetic. Knows tensors only.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.kernels.port import HeadNorm, PagePlaces, Rotation


class TorchKernels:
    """Implements `Kernels`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotate_and_write(self, heads: Tensor, rotation: Rotation, norm: HeadNorm | None, places: PagePlaces) -> Tensor:
        kv_heads = places.keys.shape[1]
        query, key, value = torch.split(heads, [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if norm is not None:
            query, key = self.rms_norm(query, norm.query, norm.eps), self.rms_norm(key, norm.key, norm.eps)
        write(places, _rotated(key, rotation), value)
        return _rotated(query, rotation)


def write(places: PagePlaces, key: Tensor, value: Tensor) -> None:
    """Put each token's KV in its page and slot, in the pages' dtype. key, value: [tokens, kv_heads, head_dim]."""
    places.keys[places.pages, :, places.slots] = key.to(places.keys.dtype)
    places.values[places.pages, :, places.slots] = value.to(places.values.dtype)


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """x: [tokens, heads, head_dim]. Eq. 34 of Su et al. 2021, halves paired."""
    half = rotation.cos.shape[-1]
    cos, sin = rotation.cos.to(x.dtype)[:, None], rotation.sin.to(x.dtype)[:, None]
    first, second, rest = x.tensor_split([half, 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
