"""The decoder of Llama and Qwen3: embedding, layers of attention and SwiGLU, final norm and output head.

Owns the weights and the arithmetic on them. Knows nothing of pages, rows or requests: attention is a callable that it is given.
The two architectures differ in the norm on queries and keys (Qwen3). Sources: Touvron et al. 2023, Qwen3 technical report 2025.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.checkpoint import ModelShape, RopeScaling
from common.errors import ConfigError

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [tokens, heads, dim], key and value [tokens, kv_heads, dim]) → [tokens, heads, dim]."""


@dataclass(slots=True)
class Layer:
    """Weights of one layer. qkv and gate_up are merged so that each is one GEMM."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Decoder:
    """A loaded model."""

    def __init__(self, shape: ModelShape, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raises ConfigError when a weight is missing or unknown."""
        self.shape = shape
        named = dict(weights)
        self._embedding = _take(named, "model.embed_tokens.weight")
        self._layers = [_layer(named, f"model.layers.{number}.", shape) for number in range(shape.layers)]
        self._norm = _take(named, "model.norm.weight")
        if shape.tied:
            named.pop("lm_head.weight", None)
            self._head = self._embedding
        else:
            self._head = _take(named, "lm_head.weight")
        if named:
            raise ConfigError(
                f"the checkpoint holds weights that {shape.architecture} does not have: {', '.join(sorted(named)[:5])}"
            )
        self._frequencies = _frequencies(shape).to(self._embedding.device)

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids, positions: [tokens] int64. Returns [tokens, hidden], not yet normed."""
        cos, sin = self._rotary(positions)
        x = F.embedding(token_ids, self._embedding)
        for number, layer in enumerate(self._layers):
            x = x + self._attention(number, layer, self._rms_norm(x, layer.input_norm), cos, sin, attend)
            gate, up = F.linear(self._rms_norm(x, layer.post_norm), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] float32."""
        return F.linear(self._rms_norm(hidden, self._norm), self._head).float()

    def _attention(self, number: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        shape = self.shape
        heads = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, shape.head_dim)
        query, key, value = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._rms_norm(query, layer.query_norm), self._rms_norm(key, layer.key_norm)
        out = attend(number, _rotate(query, cos, sin), _rotate(key, cos, sin), value)
        return F.linear(out.reshape(len(x), -1), layer.output, layer.output_bias)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Zhang and Sennrich 2019; the mean in float32 as the checkpoints were trained with."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.shape.norm_eps)
        return weight * normed.to(x.dtype)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of every position's angles: [tokens, 1, head_dim]."""
        angles = positions[:, None].float() * self._frequencies[None, :]
        both = torch.cat([angles, angles], dim=-1)[:, None, :]
        return both.cos().to(self._embedding.dtype), both.sin().to(self._embedding.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate by position (RoPE, Su et al. 2021, eq. 34), halves paired as in the checkpoints. x: [tokens, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _frequencies(shape: ModelShape) -> Tensor:
    """Rotary frequencies, [head_dim / 2] float32."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    frequencies = 1.0 / (shape.rope_base**exponents)
    return frequencies if shape.rope_scaling is None else _scale_llama3(frequencies, shape.rope_scaling)


def _scale_llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((scaling.original_context / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (share + (1.0 - share) / scaling.factor)


def _layer(named: dict[str, Tensor], prefix: str, shape: ModelShape) -> Layer:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."

    def merged(parts: tuple[str, ...]) -> Tensor:
        return torch.cat([_take(named, part) for part in parts])

    def bias(there: bool, *parts: str) -> Tensor | None:
        return merged(tuple(part + ".bias" for part in parts)) if there else None

    qkv = tuple(f"{attention}{part}_proj" for part in "qkv")
    gate_up = (f"{mlp}gate_proj", f"{mlp}up_proj")
    return Layer(
        input_norm=_take(named, prefix + "input_layernorm.weight"),
        qkv=merged(tuple(part + ".weight" for part in qkv)),
        qkv_bias=bias(shape.attention_bias, *qkv),
        query_norm=_take(named, attention + "q_norm.weight") if shape.qk_norm else None,
        key_norm=_take(named, attention + "k_norm.weight") if shape.qk_norm else None,
        output=_take(named, attention + "o_proj.weight"),
        output_bias=bias(shape.attention_bias, f"{attention}o_proj"),
        post_norm=_take(named, prefix + "post_attention_layernorm.weight"),
        gate_up=merged(tuple(part + ".weight" for part in gate_up)),
        gate_up_bias=bias(shape.mlp_bias, *gate_up),
        down=_take(named, mlp + "down_proj.weight"),
        down_bias=bias(shape.mlp_bias, f"{mlp}down_proj"),
    )


def _take(named: dict[str, Tensor], name: str) -> Tensor:
    tensor = named.pop(name, None)
    if tensor is None:
        raise ConfigError(f"the checkpoint lacks the weight {name}")
    return tensor
