"""Attention from its definition, in float64."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def softmax_attention(
    query: NDArray[np.float64],
    keys: NDArray[np.float64],
    values: NDArray[np.float64],
    scale: float,
    softcap: float | None = None,
) -> NDArray[np.float64]:
    """One token. query: [heads, dim]; keys, values: [kv_heads, tokens, dim]."""
    group = query.shape[0] // keys.shape[0]
    out = np.empty_like(query)
    for head, q in enumerate(query):
        scores = keys[head // group] @ q * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[head] = weights @ values[head // group] / weights.sum()
    return out


def gathered(view: Tensor, pages: Tensor, context: int) -> NDArray[np.float64]:
    """The first `context` slots of pages [pages] in a layer's view: [kv_heads, context, dim]."""
    picked = view[pages.long()].transpose(0, 1).reshape(view.shape[1], -1, view.shape[-1])[:, :context]
    return picked.double().numpy()
