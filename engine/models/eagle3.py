"""An EAGLE-3 head (Li et al. 2025): one decoder layer that proposes what may follow, from what the served model has computed.

Owns the head's config, weights and arithmetic. At each place of a sequence it reads the token behind that place, and of the
served model the hidden states of three layers at it; behind its own drafts, what it computed itself. Its tokens are the most
frequent ones of the served model's. Implements `Model`; what it reads it is given before each step. Source of the formats:
SGLang's and vLLM's `llama_eagle3.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.errors import ConfigError
from common.model_path import CONFIG, read_model_config
from engine.checkpoint import not_whole, weight_files
from engine.models.decoder import (
    EMBEDDING,
    HEAD,
    Decoder,
    MergedLinear,
    attention_linears,
    gated_mlp,
    rotary_frequencies,
)
from engine.models.shape import ConfigValues, ModelShape, head_config, read_shape, share_of
from engine.models.weights import Loading, Stored, WeightSlots
from engine.ports import LayerAttention, StepAttention
from engine.torch_kernels import Kernels

_TO_SERVED, _FROM_SERVED = "d2t", "t2d"
_RENAMED = {
    "midlayer.": "model.layers.0.",
    "layers.0.": "model.layers.0.",
    "norm.": "model.norm.",
    "embed_tokens.": "model.embed_tokens.",
}
_OTHERWISE = ("norm_before_residual", "norm_before_fc", "bias", "attention_bias", "mlp_bias")
"""Flags of config.json with which a head computes otherwise."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    shape: ModelShape
    """That of its layer. vocab_size: of the served model."""
    own_vocab: int
    """How many tokens it proposes from."""
    taps: tuple[int, ...]
    """The layers of the served model whose inputs it reads, in rising order."""


def read_head_shape(path: Path, served: ModelShape) -> HeadShape:
    """Raises ConfigError for a checkpoint that is no such head, or is one for another model than the served one."""
    written, file = read_model_config(path), path / CONFIG
    config, shape = ConfigValues(written, file), read_shape(path, like=head_config(path))
    eagle, layers = written.get("eagle_config") or {}, served.layers
    if not isinstance(eagle, dict):
        raise ConfigError(f"{file}: eagle_config must be an object; it is {eagle!r}")
    taps = eagle.get("eagle_aux_hidden_state_layer_ids")
    behind = taps if isinstance(taps, list) and all(type(each) is int for each in taps) else []
    chosen = [2, layers // 2, layers - 3] if taps is None else [each + 1 for each in behind]
    is_chosen = len(chosen) == 3 and all(1 <= each < layers for each in chosen)
    for holds, rule in (
        (shape.layers == 1, f"num_hidden_layers must be 1; it is {shape.layers}"),
        (not any(map(config.flag, _OTHERWISE)), f"{', '.join(_OTHERWISE)} must be false"),
        (eagle.get("use_aux_hidden_state", True) is True, "eagle_config.use_aux_hidden_state must be true"),
        (
            is_chosen and chosen == sorted(chosen),
            f"eagle_config.eagle_aux_hidden_state_layer_ids must be three layers of a model of {layers}, in rising order; "
            f"they are {chosen if taps is None else taps!r}",
        ),
        (
            shape.hidden == config.whole("target_hidden_size", null=shape.hidden) == served.hidden,
            f"hidden_size, and target_hidden_size if it is there, must be the model's, {served.hidden}",
        ),
        (shape.vocab_size == served.vocab_size, f"vocab_size is {shape.vocab_size}, that of the model {served.vocab_size}"),
    ):
        if not holds:
            raise ConfigError(f"{file}: {rule}")
    return HeadShape(replace(shape, tied=False), config.whole("draft_vocab_size", null=shape.vocab_size), tuple(chosen))


class Eagle3Head:
    """See above. embedded: the served model's embedding, unless the head has one of its own.

    features: [tokens, hidden], what it reads beside each token in the next step; None: zeros. carried: [wanted, hidden], what it
    reads in their place behind the tokens of the last step.
    """

    capturable = False
    spared_bytes = 0
    tapped = ()

    def __init__(
        self,
        head: HeadShape,
        slots: WeightSlots,
        kernels: Kernels,
        loading: Loading,
        embedded: Callable[[Tensor], Tensor] | None,
    ) -> None:
        shape, group = head.shape, loading.group
        own = replace(shape, vocab_size=head.own_vocab)
        self.shape, self._own_vocab, self._kernels, self._group = shape, head.own_vocab, kernels, group
        self.attention = [LayerAttention(shape.head_dim**-0.5)]
        self.logits_dtype = slots.dtype
        self.features: Tensor | None = None
        share, prefix = share_of(own, group.rank, group.ranks), "model.layers.0."
        width = shape.hidden
        self._fc = slots.tensor("fc.weight", width, 3 * width)
        self._input_norm, self._hidden_norm, self._post_norm = (
            slots.tensor(f"{prefix}{name}.weight", width)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        )
        qkv, output = attention_linears(shape, share, 0)
        qkv = MergedLinear(qkv.parts, 2 * width)
        self._qkv = slots.linear(qkv.parts, qkv.inputs, bias=False)
        self._output = slots.linear(output.parts, output.inputs, False, output.inputs_here)
        self._mlp = gated_mlp(shape, share, slots, 0)
        self._norm = slots.tensor("model.norm.weight", width)
        self._head = slots.head(HEAD, slots.rows(HEAD, share.vocabulary, share.vocabulary_rows, head.own_vocab, width))
        if embedded is None:
            table = slots.tensor(EMBEDDING, shape.vocab_size, width)
            self._embedded: Callable[[Tensor], Tensor] = lambda token_ids: kernels.embed(token_ids, table)
        else:
            self._embedded = embedded
        frequencies, self._factor = rotary_frequencies(shape.rope, shape.head_dim, loading.context_tokens)
        self._frequencies = frequencies.to(self._norm.device)
        self._served_ids = torch.arange(head.own_vocab, device=self._norm.device)

    @property
    def like(self) -> Tensor:
        """[3 * hidden], of the dtype and device of what it reads."""
        return self._fc[0]

    def combine(self, states: Tensor) -> Tensor:
        """[tokens, 3 * hidden] → [tokens, hidden]: what it reads of the served model's three layers."""
        return torch.nn.functional.linear(states, self._fc)

    def name_tokens(self, offsets: Tensor) -> None:
        """offsets: [own vocabulary], how much larger the served model's id of each of its tokens is. Raises ConfigError."""
        ids = torch.arange(self._own_vocab) + offsets.to("cpu", torch.int64) if offsets.shape == (self._own_vocab,) else None
        if ids is None or len(set(ids.tolist())) < len(ids) or ids.min() < 0 or ids.max() >= self.shape.vocab_size:
            raise ConfigError(f"{_TO_SERVED} must name {self._own_vocab} different tokens of the model's {self.shape.vocab_size}")
        self._served_ids.copy_(ids)

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: StepAttention, wanted: Tensor | None = None) -> Tensor:
        kernels, eps, total, tokens = self._kernels, self.shape.norm_eps, self._group.sum, token_ids.shape[0]
        rotation = kernels.rotation(positions, self._frequencies, self._factor)
        residual = self._norm.new_zeros(tokens, self.shape.hidden) if self.features is None else self.features
        token, _ = kernels.rms_norm(self._embedded(token_ids), self._input_norm, eps)
        feature, _ = kernels.rms_norm(residual, self._hidden_norm, eps)
        heads = self._qkv(torch.cat([token, feature], dim=-1)).view(tokens, -1, self.shape.head_dim)
        out = attention.rotate_and_attend(0, heads, rotation, None).reshape(tokens, -1)
        if wanted is not None:
            out, residual = out[wanted], residual[wanted]
        x, residual = kernels.rms_norm(total(self._output(out)), self._post_norm, eps, residual)
        for part in self._mlp:
            x = part(x)
        hidden, self.carried = kernels.rms_norm(total(x), self._norm, eps, residual)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] of the served model: of tokens that the head does not have, minus infinity."""
        own = self._group.gather(self._head(hidden))[:, : self._own_vocab]
        logits = own.new_full((own.shape[0], self.shape.vocab_size), -torch.inf)
        logits[:, self._served_ids] = own
        return logits


def load_head(path: Path, head: HeadShape, loading: Loading, kernels: Kernels, served: Decoder) -> Eagle3Head:
    """The head in a folder; the served model keeps from now on what it reads. Raises ConfigError."""
    stored: dict[str, Tensor] = {}
    for file in weight_files(path):
        try:
            stored |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise not_whole(file, error) from error
    slots = WeightSlots(loading.dtype, loading.device, kernels)
    has_embedding = any(name.endswith("embed_tokens.weight") for name in stored)
    made = Eagle3Head(head, slots, kernels, loading, None if has_embedding else served.embedded)
    slots.fill(_renamed(stored.items()))
    slots.pack(loading.sharers, lambda text: None)
    offsets = stored.get(_TO_SERVED)
    if offsets is not None:
        made.name_tokens(offsets)
    elif head.own_vocab != head.shape.vocab_size:
        raise ConfigError(
            f"{path}: it has {head.own_vocab} tokens of {head.shape.vocab_size}, and lacks {_TO_SERVED}, which says which"
        )
    served.taps = head.taps
    return made


def _renamed(weights: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    """As a decoder of one layer names them."""
    for name, stored in weights:
        if name in (_TO_SERVED, _FROM_SERVED):
            continue
        short = name.removeprefix("model.")
        before = next((before for before in _RENAMED if short.startswith(before)), "")
        yield _RENAMED.get(before, "") + short.removeprefix(before), stored
