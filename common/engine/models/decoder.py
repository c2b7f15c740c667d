"""The decoder of Llama and Qwen3: embedding, layers of attention and SwiGLU, final norm and output head.

Owns the weights and the arithmetic on them. Implements `Model`; knows nothing of pages, rows or requests.
The two architectures differ in the norm on queries and keys (Qwen3). Sources: Touvron et al. 2023, Qwen3 technical report 2025.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.attention.port import LayerAttention
from common.engine.checkpoint import ModelShape, RopeScaling
from common.engine.kernels.port import HeadNorm, Kernels, Rotation
from common.engine.models.port import StepAttention
from common.errors import ConfigError


@dataclass(slots=True)
class Layer:
    """Weights of one layer. qkv and gate_up are merged so that each is one GEMM."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norm: HeadNorm | None
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Decoder:
    """A loaded model."""

    capturable = True

    def __init__(self, shape: ModelShape, weights: Iterable[tuple[str, Tensor]], kernels: Kernels) -> None:
        """Raises ConfigError when a weight is missing or unknown."""
        self.shape = shape
        self.attention = [LayerAttention(shape.head_dim**-0.5)] * shape.layers
        self._kernels = kernels
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

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """token_ids, positions: [tokens] int64. Returns [tokens, hidden], normed."""
        rotation, kernels, eps = self._rotation(positions), self._kernels, self.shape.norm_eps
        residual = F.embedding(token_ids, self._embedding)
        x = kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        following = [*(layer.input_norm for layer in self._layers[1:]), self._norm]
        for number, (layer, next_norm) in enumerate(zip(self._layers, following, strict=True)):
            heads = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, self.shape.head_dim)
            out = attention.rotate_and_attend(number, heads, rotation, layer.head_norm)
            x = F.linear(out.reshape(len(x), -1), layer.output, layer.output_bias)
            x, residual = kernels.add_rms_norm(x, residual, layer.post_norm, eps)
            x = F.linear(kernels.silu_and_mul(F.linear(x, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias)
            x, residual = kernels.add_rms_norm(x, residual, next_norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] float32."""
        return F.linear(hidden, self._head).float()

    def _rotation(self, positions: Tensor) -> Rotation:
        angles = positions[:, None].float() * self._frequencies[None, :]
        return Rotation(angles.cos(), angles.sin())


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
        head_norm=HeadNorm(
            query=_take(named, attention + "q_norm.weight"),
            key=_take(named, attention + "k_norm.weight"),
            eps=shape.norm_eps,
        )
        if shape.qk_norm
        else None,
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
