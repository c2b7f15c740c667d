"""The decoder of Llama, Mistral, Qwen2 and Qwen3: embedding, layers of attention and an mlp, final norm and output head.

Owns the weights of attention and the order of the layers; an mlp is a callable, SwiGLU here. Implements `Model`; knows nothing of
pages, rows or requests. The architectures differ in biases, windows, rotary scaling and in the norm on queries and keys (Qwen3).
Sources: Touvron et al. 2023, Jiang et al. 2023 (Mistral 7B), Qwen2 technical report 2024, Qwen3 technical report 2025.

Each of several ranks has some heads and a part of every mlp (`shares.py`). What attention and mlps add to the hidden states is
summed over the ranks, so hidden states are whole on each.

Rotary embedding (RoPE, Su et al. 2021): the angles of each position, with every scaling that transformers knows.

Owns the choice of one set of frequencies for an instance. The formulas of scaling are transformers' own; it is imported only for
a model that scales. Does not know how a config spells them (`rope.py`), or how angles are computed and queries and keys rotated.

The two ends of a model: token ids to hidden states, and hidden states to logits, over the rows of a vocabulary.

Owns what a rank does for the token ids that other ranks have. Knows no layers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.models.linear import AnyLinear
from engine.models.shape import ModelShape, Rope, Share, share_of
from engine.models.weights import Part, WeightSlots
from engine.parallel import ALONE, Group
from engine.ports import HeadNorm, Kernels, LayerAttention, Rotation, StepAttention


class Rotary:
    """The rotary angles of an instance.

    context_tokens: the longest sequence that the instance was asked for. In transformers, two kinds of scaling depend on the
    length of a sequence so far. Here keys stay in their pages as the sequence grows, so one choice holds for an instance.
    `longrope` takes the long factors if the limit is above `original_max_position_embeddings`, and else the short ones. `dynamic`
    takes the frequencies of a sequence as long as the limit; up to `max_position_embeddings` they are the unscaled ones. With
    --context-tokens up to these two numbers, answers are those of transformers.

    Raises ConfigError for parameters of which no frequencies can be made.
    """

    def __init__(self, rope: Rope, head_dim: int, context_tokens: int, device: torch.device, kernels: Kernels) -> None:
        if rope.kind == "default":
            frequencies, self._factor = _frequencies(rope.base, head_dim), 1.0
        else:
            frequencies, self._factor = _scaled(rope, head_dim, context_tokens)
        self._frequencies = frequencies.to(device)
        self._kernels = kernels

    def __call__(self, positions: Tensor) -> Rotation:
        """positions: [tokens] int64. The attention factor of yarn and longrope multiplies both."""
        return self._kernels.rotation(positions, self._frequencies, self._factor)


def _frequencies(base: float, head_dim: int) -> Tensor:
    """[head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (base**exponents)


def _scaled(rope: Rope, head_dim: int, context_tokens: int) -> tuple[Tensor, float]:
    """Frequencies, [head_dim / 2] float32, and the attention factor."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = _RopeConfig(rope, head_dim)
    try:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"), seq_len=context_tokens)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"rope_parameters {dict(rope.parameters)} cannot be used: {error!r}") from error
    return frequencies.float(), float(factor)


class _RopeConfig:
    """As much of a transformers config as its functions of scaling read."""

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self.head_dim = self.hidden_size = head_dim
        self.num_attention_heads = 1
        self.max_position_embeddings = rope.trained_context
        self.rope_parameters = {
            **rope.parameters,
            "rope_type": rope.kind,
            "rope_theta": rope.base,
            "original_max_position_embeddings": rope.original_context,
        }

    def standardize_rope_params(self) -> None:
        """They are."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """weight: [rows, hidden], of the token ids `ids` and then padding, so that all ranks have equally many rows."""

    weight: Tensor
    ids: range
    group: Group
    kernels: Kernels

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[tokens] int64 → [tokens, hidden]. Each token is a row of one rank; the others add zeros."""
        if self.group.ranks == 1:
            return self.kernels.embed(token_ids, self.weight)
        rows = token_ids - self.ids.start
        elsewhere = (rows < 0) | (rows >= len(self.ids))
        found = self.kernels.embed(rows.masked_fill(elsewhere, 0), self.weight)
        return self.group.sum(found.masked_fill(elsewhere[:, None], 0.0))


@dataclass(frozen=True, slots=True)
class OutputHead:
    """product: has as many outputs as the embedding has rows. size: of the whole vocabulary."""

    product: AnyLinear
    size: int
    group: Group

    def __call__(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] float32. The padding is at the end of the last parts."""
        parts = self.group.gather(self.product(hidden))
        if parts.shape[1] > self.size:
            parts = parts[:, : self.size].contiguous()
        return parts.float()


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Mlp = Callable[[Tensor], Tensor]
"""[tokens, hidden] → [tokens, hidden]: this rank's part of the sum."""
MlpMaker = Callable[[int], Mlp]
"""Makes the mlp of a layer, given its number."""


@dataclass(slots=True)
class GatedMlp:
    """SwiGLU (Shazeer 2020). gate_up: a gated layer, both in one product."""

    gate_up: AnyLinear
    down: AnyLinear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))


@dataclass(slots=True)
class Layer:
    """qkv: queries, keys and values in one product."""

    input_norm: Tensor
    qkv: AnyLinear
    head_norm: HeadNorm | None
    output: AnyLinear
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
        self.shape = shape
        self.capturable = capturable
        self.spared_bytes = 0
        self._group = group
        share = share_of(shape, group.rank, group.ranks)
        self.attention = [LayerAttention(shape.head_dim**-0.5, window) for window in shape.windows]
        self._kernels = kernels
        make_mlp = make_mlp or (lambda number: gated_mlp(shape, share, slots, number))
        held, rows = share.vocabulary, share.vocabulary_rows
        embedding = slots.rows(EMBEDDING, held, rows, shape.vocab_size, shape.hidden)
        self._embedding = Embedding(embedding, held, group, kernels)
        self._layers = [_layer(shape, share, slots, number, make_mlp(number)) for number in range(shape.layers)]
        self._norm = slots.tensor("model.norm.weight", shape.hidden)
        if shape.tied:
            slots.tie(HEAD, EMBEDDING, embedding[: len(held)])
            head = slots.head(embedding, shared=True)
        else:
            head = slots.head(slots.rows(HEAD, held, rows, shape.vocab_size, shape.hidden))
        self._head = OutputHead(head, shape.vocab_size, group)
        self._rotary = Rotary(shape.rope, shape.head_dim, context_tokens, embedding.device, kernels)

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: StepAttention, wanted: Tensor | None = None) -> Tensor:
        """token_ids, positions: [tokens] int64. wanted: [count] int64, or None for all. Returns [count, hidden], normed. From the
        last layer's attention on, it computes the wanted tokens alone: of most tokens of a chunk only the KV is of use."""
        rotation, kernels, eps = self._rotary(positions), self._kernels, self.shape.norm_eps
        total, tokens = self._group.sum, token_ids.shape[0]  # len() of a tensor takes longer
        residual = self._embedding(token_ids)
        x = kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        following = [*(layer.input_norm for layer in self._layers[1:]), self._norm]
        for number, (layer, next_norm) in enumerate(zip(self._layers, following, strict=True)):
            heads = layer.qkv(x).view(tokens, -1, self.shape.head_dim)
            out = attention.rotate_and_attend(number, heads, rotation, layer.head_norm).reshape(tokens, -1)
            if wanted is not None and number == len(self._layers) - 1:
                if not len(wanted):
                    return residual[:0]
                out, residual = out[wanted], residual[wanted]
            x = total(layer.output(out))
            x, residual = kernels.add_rms_norm(x, residual, layer.post_norm, eps)
            x = total(layer.mlp(x))
            x, residual = kernels.add_rms_norm(x, residual, next_norm, eps)
        return x

    def products(self) -> list[tuple[AnyLinear, int, bool]]:
        """The linear layers of one forward in their order: each with its inputs, and whether it computes the wanted tokens alone.
        Those of a mixture of experts are not among them."""
        shape, found = self.shape, list[tuple[AnyLinear, int, bool]]()
        for number, layer in enumerate(self._layers):
            wanted = number == len(self._layers) - 1
            found.append((layer.qkv, shape.hidden, False))
            found.append((layer.output, shape.heads * shape.head_dim // self._group.ranks, wanted))
            if isinstance(layer.mlp, GatedMlp):
                found.append((layer.mlp.gate_up, shape.hidden, wanted))
                found.append((layer.mlp.down, shape.intermediate // self._group.ranks, wanted))
        return [*found, (self._head.product, shape.hidden, True)]

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] float32."""
        return self._head(hidden)


def gated_mlp(shape: ModelShape, share: Share, slots: WeightSlots, number: int) -> GatedMlp:
    """The mlp of layer `number`."""
    prefix, width = f"model.layers.{number}.mlp.", share.intermediate
    gate_up = [Part(prefix + name, shape.intermediate, width) for name in ("gate_proj", "up_proj")]
    down = [Part(prefix + "down_proj", shape.hidden)]
    return GatedMlp(
        gate_up=slots.linear(gate_up, shape.hidden, shape.mlp_bias, gated=True),
        down=slots.linear(down, shape.intermediate, shape.mlp_bias, width, share.adds_biases),
    )


def _layer(shape: ModelShape, share: Share, slots: WeightSlots, number: int, mlp: Mlp) -> Layer:
    prefix = f"model.layers.{number}."
    attention = prefix + "self_attn."
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    queries_here, keys_here = (
        range(heads.start * shape.head_dim, heads.stop * shape.head_dim) for heads in (share.heads, share.kv_heads)
    )
    qkv = [
        Part(attention + "q_proj", queries, queries_here),
        Part(attention + "k_proj", keys, keys_here),
        Part(attention + "v_proj", keys, keys_here),
    ]
    head_norm = None
    if shape.qk_norm:
        query_norm = slots.tensor(attention + "q_norm.weight", shape.head_dim)
        head_norm = HeadNorm(query_norm, slots.tensor(attention + "k_norm.weight", shape.head_dim), shape.norm_eps)
    return Layer(
        input_norm=slots.tensor(prefix + "input_layernorm.weight", shape.hidden),
        qkv=slots.linear(qkv, shape.hidden, shape.qkv_bias),
        head_norm=head_norm,
        output=slots.linear(
            [Part(attention + "o_proj", shape.hidden)], queries, shape.output_bias, queries_here, share.adds_biases
        ),
        post_norm=slots.tensor(prefix + "post_attention_layernorm.weight", shape.hidden),
        mlp=mlp,
    )
