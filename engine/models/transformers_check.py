"""What the attention of a transformers model asks for, and the proof that ours gives it.

Owns a short run of the model, at loading, with its own attention and with one that follows the definition. Knows no pages, rows
or weights. A model of which ours would make another model is refused with the reason, and never served wrong in silence.

The model runs a few tokens three times:

    described   our function stands in for the attention and writes down each call. In place of a mask it is handed the window,
                which is measured on transformers' own mask function, at positions up to the end of the context.
    reference   transformers' own eager attention, each prompt whole.
    ours        as a step does it: two prompts packed into one, in several steps, with nothing kept between them but the keys and
                values of each layer. A model that keeps anything else, such as the state of a Mamba layer, answers differently.

These runs compute in float32, whatever the model's dtype. In half precision some models make large differences of roundings, and
a model of another attention could hide among them. A last one, in the model's dtype, shows only that its logits are finite there.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engine.models.shape import ServedShape
from engine.ports import HeadNorm, LayerAttention, Rotation

PROMPT_TOKENS = 24
_STEPS = (((0, 0, 13), (1, 0, 7)), ((0, 13, 23), (1, 7, 8)), ((0, 23, 24), (1, 8, 24)))
"""Steps of (prompt, from token, to token): chunks, a decode row beside a chunk, and a chunk that ends a prompt."""
_REFUSED = {"s_aux": "attention sinks", "position_bias": "position biases (ALiBi)"}
"""Arguments of an attention function that change its result, and that ours does not know."""
_MOST_OFF = 1e-3
"""How far logits may be off, as a share of their spread. Roundings of float32 are far below it, other attentions above."""


class Different(Exception):
    """The model's attention is not what ours computes. The text says how."""


class Description:
    """Takes the calls of the described run. It computes nothing: it returns the queries. shape: what the config says."""

    def __init__(self, shape: ServedShape) -> None:
        self.layers: list[LayerAttention] = []
        """How each layer attends that has called so far."""
        self._shape = shape

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, asked: dict[str, Any]) -> Tensor:
        """See `Calls` of `transformers_model`."""
        for name, meaning in _REFUSED.items():
            if asked.get(name) is not None:
                raise Different(f"it has {meaning}")
        if key.shape[-1] != value.shape[-1] or query.shape[-1] != key.shape[-1]:
            raise Different(f"its keys are of {key.shape[-1]} and its values of {value.shape[-1]} dimensions (latent attention)")
        if key.shape[2] != query.shape[2]:
            raise Different("it attends to something other than its own tokens (cross attention)")
        if mask is None or mask.dtype != torch.int64 or not bool((mask == mask.flatten()[0]).all()):
            raise Different("it makes its mask itself")
        shape, heads, kv_heads, head_dim = self._shape, query.shape[1], key.shape[1], key.shape[-1]
        if (heads, kv_heads, head_dim) != (shape.heads, shape.kv_heads, shape.head_dim):
            raise Different(
                f"layer {len(self.layers)} has {heads} heads and {kv_heads} KV heads of {head_dim}, and the config says "
                f"{shape.heads} and {shape.kv_heads} of {shape.head_dim}; all layers must be as the config says"
            )
        window, scale, softcap = int(mask.flatten()[0]), asked.get("scaling"), asked.get("softcap")
        self.layers.append(
            LayerAttention(
                scale=head_dim**-0.5 if scale is None else float(scale),
                window=window if window < shape.context_tokens else None,
                softcap=None if softcap is None else float(softcap),
            )
        )
        return query.transpose(1, 2)


def described_mask(
    mask_function: Callable[..., Tensor], q_length: int, kv_length: int, config: Any, device: Any, **_: Any
) -> Tensor:
    """Stands in for a mask: [1, 1, q_length, kv_length] int64 that says everywhere how many tokens a token sees, itself included.

    mask_function: of (batch, head, query position, key position), as transformers defines masks by. Raises Different.
    """
    context = int(config.max_position_embeddings)
    none, places = torch.zeros((), dtype=torch.int64, device=device), torch.arange(context + 1, device=device)

    def seen(position: int) -> Tensor:
        return mask_function(none, none, none + position, places).expand(len(places))

    window = int(seen(context - 1).sum())
    for position in {context - 1, max(context - 2, 0), max(context - 8, 0), context // 2, context // 3}:
        if not torch.equal(seen(position), (places <= position) & (places > position - window)):
            raise Different("its mask is neither causal nor a sliding window")
    return torch.full((1, 1, q_length, kv_length), window, device=device)


class Definition:
    """Attention from its definition, in float32, over the keys and values of former steps. Implements `StepAttention`."""

    def __init__(self, layers: Sequence[LayerAttention]) -> None:
        self.step: tuple[tuple[int, int, int], ...] = ()
        self._layers = layers
        self._kept: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def rotate_and_attend(self, layer: int, heads: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        raise NotImplementedError("models of transformers rotate themselves")

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outs, begin = [], 0
        for prompt, start, stop in self.step:
            end = begin + stop - start
            kept = self._kept[layer, prompt]
            kept.append((key[begin:end], value[begin:end]))
            keys, values = (torch.cat(part) for part in zip(*kept, strict=True))
            outs.append(_attention(query[begin:end], keys, values, start, self._layers[layer]))
            begin = end
        return torch.cat(outs)


def _attention(query: Tensor, keys: Tensor, values: Tensor, start: int, layer: LayerAttention) -> Tensor:
    """query: [tokens, heads, dim], at positions from `start` on; keys, values: [context, kv_heads, dim], from 0 on."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.float().repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    position = torch.arange(start, start + len(query), device=query.device)[:, None]
    place = torch.arange(len(keys), device=query.device)[None, :]
    hidden = place > position
    if layer.window is not None:
        hidden |= place <= position - layer.window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def prompts(vocab_size: int, device: torch.device) -> Tensor:
    """Two prompts, [2, PROMPT_TOKENS] int64, of tokens from the first half of the vocabulary: special ones are elsewhere."""
    random = torch.Generator().manual_seed(1)
    return torch.randint(vocab_size // 8, max(vocab_size // 2, 2), (2, PROMPT_TOKENS), generator=random).to(device)


def in_steps(logits: Callable[[Tensor, Tensor, Definition], Tensor], layers: Sequence[LayerAttention], ids: Tensor) -> Tensor:
    """The logits of the prompts, packed and in steps: [2, PROMPT_TOKENS, vocab].

    logits: of token ids [tokens] and positions [tokens] with an attention; returns [tokens, vocab].
    """
    attention = Definition(layers)
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for step in _STEPS:
        attention.step = step
        token_ids = torch.cat([ids[prompt, start:stop] for prompt, start, stop in step])
        positions = torch.cat([torch.arange(start, stop, device=ids.device) for _, start, stop in step])
        out = logits(token_ids, positions, attention)
        begin = 0
        for prompt, start, stop in step:
            parts[prompt].append(out[begin : begin + stop - start])
            begin += stop - start
    return torch.stack([torch.cat(part) for part in parts])


def require_same(ours: Tensor, reference: Tensor) -> None:
    """Raises Different unless the logits, [prompts, tokens, vocab], agree as far as float32 can tell."""
    spread = reference.float() - reference.float().mean(-1, keepdim=True)
    off = float((ours.float() - reference.float()).norm() / spread.norm())
    if not off <= _MOST_OFF:
        raise Different(f"the logits differ by {off:.2g} of their spread; {_MOST_OFF} is allowed")


@contextmanager
def in_float32(model: torch.nn.Module) -> Iterator[None]:
    """While this lasts, each part of the model has its weights in float32 as it is called, and only then: one part at a time is
    in memory twice."""
    kept: dict[torch.nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def widen(module: torch.nn.Module, *_: object) -> None:
        tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]
        kept[module] = [(tensor, tensor.data) for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.data.float()

    def restore(module: torch.nn.Module, *_: object) -> None:
        for tensor, data in kept.pop(module, ()):
            tensor.data = data

    handles = []
    for part in _parts(model):
        handles += [part.register_forward_pre_hook(widen), part.register_forward_hook(restore, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _parts(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The entries of a model's lists, which are its layers, and what lies beside the lists."""
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from child
        elif any(isinstance(inner, torch.nn.ModuleList) for inner in child.modules()):
            yield from _parts(child)
        else:
            yield child
