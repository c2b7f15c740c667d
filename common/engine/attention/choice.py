"""Which implementation of attention an instance gets, and why.

Owns the choice. Knows what each backend supports; does not know models, rows or plans.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from common.config import AttentionName
from common.engine.attention.native import load_kernel
from common.engine.attention.paged import PagedAttention
from common.engine.attention.port import Attention, LayerAttention
from common.engine.kernels.port import Kernels
from common.engine.kv_memory import KVMemory
from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What attention must handle. layers: how each layer attends. dtype: of queries and results. max_rows: most decode rows of a
    step. pages_per_row: most pages of a row."""

    memory: KVMemory
    query_heads: int
    layers: Sequence[LayerAttention]
    dtype: torch.dtype
    max_rows: int
    pages_per_row: int


def make_attention(needs: AttentionNeeds, asked: AttentionName, kernels: Kernels, progress: Callable[[str], None]) -> Attention:
    """asked: the flag --attention. Says through `progress` what it took and why. Raises ConfigError."""
    if asked == "flashinfer":
        raise ConfigError("--attention flashinfer is not built yet: use auto or torch")
    on_cpu = needs.memory.pool.device.type == "cpu"
    in_float32 = needs.dtype == needs.memory.pool.dtype == torch.float32
    kernel = load_kernel(torch.get_num_threads()) if on_cpu and in_float32 else None
    return PagedAttention(needs.memory, needs.query_heads, needs.layers, needs.dtype, kernel)
