"""The sampler: logits to tokens. The noise at a position is a function of (seed, position, token) alone (`kernels/noise.py`).

Owns the filters. Knows rows as tensors. Waits for nothing on the device: which rows are greedy and which filter is known on the
host.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.port import Kernels

ROWS_AT_ONCE = 64
_ONE = 2.0**40
"""The most likely token's share in whole numbers: sums over 2**20 tokens stay below 2**63."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How each of some rows samples. temperature, top_p, min_p: [rows] float32. top_k, seed, position: [rows] int64.

    A temperature below `noise.GREEDY_BELOW`, as 0, is greedy; top_k 0 is all tokens. position: of the token that is sampled.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor

    def of(self, which: Tensor) -> "RowSampling":
        """Those of rows [which]."""
        return RowSampling(
            self.temperature[which],
            self.top_k[which],
            self.top_p[which],
            self.min_p[which],
            self.seed[which],
            self.position[which],
        )


class Sampler:
    """Samples one token per row, which depends on its own row alone."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(
        self,
        logits: Tensor,
        rows: RowSampling | None,
        noisy: Tensor,
        filtering: Tensor,
        filter_width: int,
        likeliest: Tensor | None = None,
    ) -> Tensor:
        """logits: [rows, vocab] float32. Returns [rows] int64.

        noisy: [noisy] int64, the rows that are not greedy. rows: how these sample; None if there are none. filtering: [filtering]
        int64, those of the noisy rows that have a top-k, top-p or min-p. filter_width: the largest top-k of those if all of them
        have one, else 0. likeliest: [rows] int64, the likeliest token of each row, if it is known.
        """
        if rows is None:
            return self._kernels.likeliest(logits) if likeliest is None else likeliest
        if len(noisy) == len(logits):
            return self.draw_filtered(logits, rows, filtering, filter_width)
        tokens = self._kernels.likeliest(logits) if likeliest is None else likeliest.clone()
        tokens[noisy] = self.draw_filtered(logits[noisy], rows, filtering, filter_width)
        return tokens

    def draw(self, logits: Tensor, rows: RowSampling) -> Tensor:
        """One token per row without filters, greedy or not, as the temperature says. The same operations whatever the rows are,
        so it can be part of a CUDA graph. Shapes as in `__call__`."""
        return self._kernels.sample(logits, rows.temperature, rows.seed, rows.position)

    def redraw(self, tokens: Tensor, logits: Tensor, rows: RowSampling, filtering: Tensor, filter_width: int) -> None:
        """Replace in tokens [rows] those of rows `filtering`, which were drawn without their filters. rows: of all tokens."""
        some = rows.of(filtering)
        tokens[filtering] = self.draw(_filtered_logits(logits[filtering], some, filter_width), some)

    def draw_filtered(self, logits: Tensor, rows: RowSampling, filtering: Tensor, filter_width: int) -> Tensor:
        """One token per row, greedy or not, as the temperature says. filtering: those of the rows that filter; all of them are
        noisy. Shapes as in `__call__`."""
        if len(filtering):
            logits = logits.index_copy(0, filtering, _filtered_logits(logits[filtering], rows.of(filtering), filter_width))
        return self.draw(logits, rows)


def row_parts(rows: int) -> Iterator[slice]:
    """Some rows at a time, for what needs a few times the memory of their logits."""
    return (slice(begin, begin + ROWS_AT_ONCE) for begin in range(0, rows, ROWS_AT_ONCE))


def _filtered_logits(logits: Tensor, rows: RowSampling, filter_width: int) -> Tensor:
    """The logits with those of excluded tokens at minus infinity. Some rows at a time: filters take 40 times a row's memory."""
    filtered = torch.empty_like(logits)
    for part in row_parts(len(logits)):
        some = logits[part]
        scaled = (some - some.max(dim=-1, keepdim=True).values) / rows.temperature[part, None]
        kept = _kept(scaled, rows.top_k[part], rows.top_p[part], rows.min_p[part], filter_width)
        filtered[part] = some.masked_fill(~kept, -torch.inf)
    return filtered


def _kept(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, filter_width: int) -> Tensor:
    """Which tokens the filters leave, in the order top-k, top-p, min-p. At least one token stays. [rows, vocab] bool.

    logits: [rows, vocab], the largest of a row is 0. filter_width: the largest top-k, or 0 if a row has none. Each filter keeps a
    first part of the tokens, in the order of falling logits and, where those are equal, of rising ids: so a row's filters come
    down to one number, how many tokens stay. Probabilities are counted in whole numbers, whose sums do not depend on how many
    rows or columns are computed beside them.
    """
    vocab = logits.shape[1]
    limit = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)[:, None]
    width = min(filter_width, vocab) or vocab
    ordered = logits.topk(width).values if width < vocab else logits.sort(descending=True).values
    probability = ordered.exp()  # relative to the most likely token's, as min-p wants it
    within = torch.arange(width, device=logits.device)[None, :] < limit
    share = (probability.double() * _ONE).long().masked_fill(~within, 0)
    total = share.cumsum(dim=-1)
    before = total - share
    nucleus = (before < top_p.double()[:, None] * total[:, -1:]) | (top_p >= 1)[:, None]
    count = (within & nucleus & (probability >= min_p[:, None])).sum(dim=-1, keepdim=True).clamp(min=1)
    least = ordered.gather(1, count - 1)
    above, equal = logits > least, logits == least
    room = count - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= room))
