"""The decoder of Llama, Mistral, Qwen2 and Qwen3: embedding, layers of attention and an mlp, final norm and output head.

Owns the weights of attention and of the two ends, the frequencies of rotary embedding, and the order of the layers; an mlp is a
callable, SwiGLU here. Implements `Model`; knows nothing of pages, rows or requests. The architectures differ in biases, windows,
rotary scaling and in the norm on queries and keys (Qwen3). Sources: Touvron et al. 2023, Jiang et al. 2023 (Mistral 7B), Qwen2
technical report 2024, Qwen3 technical report 2025.

Each of several ranks has some heads, some rows of the vocabulary and a part of every mlp (`share_of`). What attention and mlps
add to the hidden states is summed over the ranks, so hidden states are whole on each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.models.linear import Fp8Linear
from engine.models.shape import ModelShape, Rope, Share, share_of
from engine.models.weights import WeightPart, WeightSlots
from engine.parallel import ALONE, Group
from engine.ports import HeadNorm, LayerAttention, StepAttention
from engine.torch_kernels import Kernels


def rotary_frequencies(rope: Rope, head_dim: int, context_tokens: int) -> tuple[Tensor, float]:
    """The frequencies of rotary embedding (RoPE, Su et al. 2021), [head_dim / 2] float32, and the attention factor, which
    multiplies cos and sin (yarn, longrope).

    context_tokens: the longest sequence that the instance was asked for. In transformers, two kinds of scaling depend on the
    length of a sequence so far. Here keys stay in their pages as the sequence grows, so one choice holds for an instance.
    `longrope` takes the long factors if the limit is above `original_max_position_embeddings`, and else the short ones. `dynamic`
    takes the frequencies of a sequence as long as the limit; up to `max_position_embeddings` they are the unscaled ones. With
    --context-tokens up to these two numbers, answers are those of transformers.

    The formulas of scaling are transformers' own; it is imported only for a model that scales. Raises ConfigError for parameters
    of which no frequencies can be made.
    """
    if rope.kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return 1.0 / (rope.base**exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(  # as much of a transformers config as its functions of scaling read
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=rope.trained_context,
        rope_parameters={
            **rope.parameters,
            "rope_type": rope.kind,
            "rope_theta": rope.base,
            "original_max_position_embeddings": rope.original_context,
        },
        standardize_rope_params=lambda: None,
    )
    try:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"), seq_len=context_tokens)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"rope_parameters {dict(rope.parameters)} cannot be used: {error!r}") from error
    return frequencies.float(), float(factor)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Mlp = Sequence[Callable[[Any], Any]]
"""What computes an mlp, one after the other: [tokens, hidden] → [tokens, hidden], this rank's part of the sum. What is between
two of them in FP8 is `Fp8Rows`."""
MlpMaker = Callable[[int], Mlp]
"""Makes the mlp of a layer, given its number."""


class MergedLinear(NamedTuple):
    """A linear layer of a rank: one of the checkpoint, or several, one below the other, so that they are one product."""

    parts: Sequence[WeightPart]
    inputs: int
    """In the checkpoint."""
    inputs_here: range | None = None
    """Which of them this rank has; None: all."""


def attention_linears(shape: ModelShape, share: Share, number: int) -> tuple[MergedLinear, MergedLinear]:
    """The linear layers of attention in layer `number`: queries, keys and values in one product, and the output."""
    attention = f"model.layers.{number}.self_attn."
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    queries_here, keys_here = (
        range(heads.start * shape.head_dim, heads.stop * shape.head_dim) for heads in (share.heads, share.kv_heads)
    )
    qkv = [
        WeightPart(attention + "q_proj", queries, queries_here),
        WeightPart(attention + "k_proj", keys, keys_here),
        WeightPart(attention + "v_proj", keys, keys_here),
    ]
    return (
        MergedLinear(qkv, shape.hidden),
        MergedLinear([WeightPart(attention + "o_proj", shape.hidden)], queries, queries_here),
    )


def mlp_linears(shape: ModelShape, share: Share, number: int) -> tuple[MergedLinear, MergedLinear]:
    """Those of its gated mlp: gates and what they gate in one product, and the output."""
    prefix, width = f"model.layers.{number}.mlp.", share.intermediate
    gate_up = [WeightPart(prefix + name, shape.intermediate, width) for name in ("gate_proj", "up_proj")]
    down = [WeightPart(prefix + "down_proj", shape.hidden)]
    return MergedLinear(gate_up, shape.hidden), MergedLinear(down, shape.intermediate, width)


@dataclass(slots=True)
class Layer:
    """qkv: queries, keys and values in one product, [tokens, inputs] → [tokens, outputs], as is output."""

    input_norm: Tensor
    qkv: Callable[[Any], Tensor]
    head_norm: HeadNorm | None
    output: Callable[[Tensor], Tensor]
    post_norm: Tensor
    mlp: Mlp


class Decoder:
    """A model whose weights are in `slots`, to be filled before it computes.

    context_tokens: the longest sequence that the instance was asked for. make_mlp: None: SwiGLU in every layer. capturable: that
    its mlps are. group: the ranks that compute the model.
    """

    def __init__(
        self,
        shape: ModelShape,
        slots: WeightSlots,
        kernels: Kernels,
        context_tokens: int,
        make_mlp: MlpMaker | None = None,
        capturable: bool = True,
        group: Group = ALONE,
    ) -> None:
        self.shape, self.slots = shape, slots
        self.capturable = capturable
        self.spared_bytes = 0
        self.taps: tuple[int, ...] = ()
        """Layers whose inputs are kept while it computes, in rising order, as a draft head asks."""
        self.tapped: list[Tensor] = []
        """Those of the last step, [tokens, hidden] each."""
        self.logits_dtype = slots.dtype
        self._group = group
        share = share_of(shape, group.rank, group.ranks)
        self.attention = [LayerAttention(shape.head_dim**-0.5, window) for window in shape.windows]
        self._kernels = kernels
        make_mlp = make_mlp or partial(gated_mlp, shape, share, slots)
        held, rows = share.vocabulary, share.vocabulary_rows
        embedding = slots.rows(EMBEDDING, held, rows, shape.vocab_size, shape.hidden)
        self._embedding, self._held = embedding, held
        self.layers = [_layer(shape, share, slots, number, make_mlp(number)) for number in range(shape.layers)]
        self._norm = slots.tensor("model.norm.weight", shape.hidden)
        if shape.tied:
            slots.tie(HEAD, EMBEDDING, embedding[: len(held)])
            self._head = slots.head(HEAD, embedding)
        else:
            self._head = slots.head(HEAD, slots.rows(HEAD, held, rows, shape.vocab_size, shape.hidden))
        frequencies, self._attention_factor = rotary_frequencies(shape.rope, shape.head_dim, context_tokens)
        self._frequencies = frequencies.to(embedding.device)

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: StepAttention, wanted: Tensor | None = None) -> Tensor:
        """token_ids, positions: [tokens] int64. wanted: [count] int64, or None for all. Returns [count, hidden], normed. From the
        last layer's attention on, it computes the wanted tokens alone: of most tokens of a chunk only the KV is of use."""
        kernels, eps, total, tokens = self._kernels, self.shape.norm_eps, self._group.sum, token_ids.shape[0]
        rotation = kernels.rotation(positions, self._frequencies, self._attention_factor)
        residual = self.embedded(token_ids)
        self.tapped = []
        x, _ = self._normed(self.layers[0].qkv)(residual, self.layers[0].input_norm, eps)
        following = [*((layer.input_norm, layer.qkv) for layer in self.layers[1:]), (self._norm, self._head)]
        for number, (layer, (next_norm, next_product)) in enumerate(zip(self.layers, following, strict=True)):
            heads = layer.qkv(x).view(tokens, -1, self.shape.head_dim)
            out = attention.rotate_and_attend(number, heads, rotation, layer.head_norm).reshape(tokens, -1)
            if wanted is not None and number == len(self.layers) - 1:
                if not len(wanted):
                    return residual[:0]
                out, residual = out[wanted], residual[wanted]
            x, residual = self._normed(layer.mlp[0])(total(layer.output(out)), layer.post_norm, eps, residual)
            for part in layer.mlp:
                x = part(x)
            x, residual = self._normed(next_product)(total(x), next_norm, eps, residual)
            self.tapped += [residual] * self.taps.count(number + 1)
        hidden: Tensor = x
        return hidden

    def _normed(self, product: object) -> Callable[..., tuple[Any, Tensor]]:
        """The norm in front of a product, which makes what it multiplies."""
        return self._kernels.rms_norm_fp8 if isinstance(product, Fp8Linear) else self._kernels.rms_norm

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab]. The padding of the vocabulary is at the end of the last ranks' parts."""
        parts = self._group.gather(self._head(hidden))
        if parts.shape[1] > self.shape.vocab_size:
            parts = parts[:, : self.shape.vocab_size].contiguous()
        return parts

    def embedded(self, token_ids: Tensor) -> Tensor:
        """[tokens] int64 → [tokens, hidden]. Of several ranks one has each token's row; the others add zeros."""
        if self._group.ranks == 1:
            return self._kernels.embed(token_ids, self._embedding)
        rows = token_ids - self._held.start
        elsewhere = (rows < 0) | (rows >= len(self._held))
        found = self._kernels.embed(rows.masked_fill(elsewhere, 0), self._embedding)
        return self._group.sum(found.masked_fill(elsewhere[:, None], 0.0))


def gated_mlp(shape: ModelShape, share: Share, slots: WeightSlots, number: int) -> Mlp:
    """The mlp of layer `number`: SwiGLU (Shazeer 2020), gates and what they gate in one product."""
    gate_up, down = mlp_linears(shape, share, number)
    return (
        slots.linear(gate_up.parts, gate_up.inputs, shape.mlp_bias, gated=True),
        slots.linear(down.parts, down.inputs, shape.mlp_bias, down.inputs_here, share.adds_biases),
    )


def _layer(shape: ModelShape, share: Share, slots: WeightSlots, number: int, mlp: Mlp) -> Layer:
    prefix = f"model.layers.{number}."
    qkv, output = attention_linears(shape, share, number)
    head_norm = None
    if shape.qk_norm:
        query_norm, key_norm = (slots.tensor(f"{prefix}self_attn.{each}_norm.weight", shape.head_dim) for each in "qk")
        head_norm = HeadNorm(query_norm, key_norm, shape.norm_eps)
    return Layer(
        input_norm=slots.tensor(prefix + "input_layernorm.weight", shape.hidden),
        qkv=slots.linear(qkv.parts, qkv.inputs, shape.qkv_bias),
        head_norm=head_norm,
        output=slots.linear(output.parts, output.inputs, shape.output_bias, output.inputs_here, share.adds_biases),
        post_norm=slots.tensor(prefix + "post_attention_layernorm.weight", shape.hidden),
        mlp=mlp,
    )
