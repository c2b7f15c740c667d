"""How an instance loads its model.

Owns the vocabulary between the registry and what it loads.
"""

from dataclasses import dataclass

import torch

from common.config import LoadFormat, Quantization
from common.engine.parallel import ALONE, Group


@dataclass(frozen=True, slots=True)
class Loading:
    """How an instance loads its model. context_tokens: the longest sequence that it was asked for. group: the ranks that share
    the weights. sharers: processes of this host that have equal parts of its memory."""

    dtype: torch.dtype
    device: torch.device
    context_tokens: int
    load_format: LoadFormat = "auto"
    quantization: Quantization = "none"
    group: Group = ALONE
    sharers: int = 1
