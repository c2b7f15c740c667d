"""Log probabilities of the model's own distribution, from its logits before anything changes them.

Owns their computing on the device, and the packed form in which they come back to the host. Does not know which rows ask.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.engine.logprobs import Logprobs
from common.engine.sampler import row_parts
from common.ids import Int32Array, Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """What a step tells of some tokens. rows, asked: as of `Logprobs`, [tokens] int64 on the host. packed: on the device, from
    `measure_logprobs`."""

    rows: Int64Array
    asked: Int64Array
    packed: Tensor

    def read(self, packed: Int32Array) -> Logprobs:
        """packed: the same, on the host."""
        width = (packed.shape[1] - 3) // 2
        return Logprobs(
            rows=self.rows.astype(np.int32),
            token_ids=packed[:, 0],
            logprobs=packed.view(np.float32)[:, 1],
            ranks=packed[:, 2],
            asked=self.asked.astype(np.int32),
            top_ids=packed[:, 3 : 3 + width],
            top_logprobs=packed.view(np.float32)[:, 3 + width :],
        )


def measure_logprobs(logits: Tensor, token_ids: Tensor, most: int) -> Tensor:
    """Of each row one token's log probability and rank, and the likeliest tokens: in one tensor, so that they come in one copy.

    logits: [tokens, vocab] float32. token_ids: [tokens] int64. Returns [tokens, 3 + 2 * most] int32: the token, the bits of its
    log probability, its rank, the likeliest tokens, and the bits of their log probabilities. A vocabulary of fewer tokens than
    `most` gives fewer columns.
    """
    most = min(most, logits.shape[1])
    return torch.cat([_pack(logits[part], token_ids[part, None], most) for part in row_parts(len(logits))])


def _pack(logits: Tensor, token_ids: Tensor, most: int) -> Tensor:
    rank = (logits >= logits.gather(1, token_ids)).sum(dim=-1, keepdim=True, dtype=torch.int32)
    logprobs = logits.log_softmax(dim=-1)
    best = logprobs.topk(most, dim=-1)
    own_bits, best_bits = (each.view(torch.int32) for each in (logprobs.gather(1, token_ids), best.values))
    return torch.cat([token_ids.int(), own_bits, rank, best.indices.int(), best_bits], dim=1)
