"""The KV budget: how many bytes to use for KV, how many pages that makes, and how long a context they hold.

Owns the arithmetic, and what is left for activations. Knows the model's shape and how much memory is free. Allocates nothing.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import parse_memory
from common.engine.models.port import ServedShape
from common.errors import ConfigError
from common.pages.layout import ITEM_BYTES, KVLayout

_CPU_SHARE, _CPU_MOST, _CPU_FREE_SHARE = 0.125, 2**30, 0.5
_CUDA_SHARE = 0.9
"""Share of what is free on the device after the workspace; the rest is for libraries and fragmentation."""
_CONTEXT_BYTES = 2**29
"""What CUDA itself takes per process: its context and the code of the kernels."""
_GATHER_BYTES = 2**30
"""Attention's buffers in one step: four times what it gathers at once."""
_SAMPLER_BYTES = 80
"""Bytes that the sampler takes per row and token of the vocabulary: float32 logits, their order, and the noise."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    """total_pages: of the pool. context_tokens: the longest sequence that a row may hold."""

    total_pages: int
    context_tokens: int


def kv_budget(layout: KVLayout, kv_bytes: int, own_context: int, asked_context: int) -> KVBudget:
    """Pages that fit in `kv_bytes`, and the context: the one asked for, or the model's own, or as much of it as the pages hold.

    own_context: tokens, of the model. asked_context: tokens; 0: the model's own, capped. A capped context is a power of two,
    because the instances of a fleet must agree on it even if their memory differs a little. Raises ConfigError.
    """
    pages = kv_bytes // layout.page_bytes
    if asked_context > own_context:
        raise ConfigError(f"--context-tokens {asked_context} is more than the model's own context of {own_context} tokens")
    if pages < 1:
        raise ConfigError(f"--kv-memory gives {kv_bytes} bytes, which is less than one page of {layout.page_bytes}")
    context = asked_context or own_context
    needed = layout.pages_for(context)
    if needed <= pages:
        return KVBudget(pages, context)
    if asked_context:
        raise ConfigError(
            f"--kv-memory gives {pages} pages of {layout.page_bytes} bytes, but --context-tokens {context} needs {needed}: give "
            f"--kv-memory at least {needed * layout.page_bytes} bytes, or --context-tokens at most {pages * layout.page_size}"
        )
    held = pages * layout.page_size
    return KVBudget(pages, 2 ** (held.bit_length() - 1))


def given_kv_bytes(kv_memory: str, device: torch.device) -> int | None:
    """Bytes of `--kv-memory`; a share is one of the device's whole memory. None for auto. Raises ConfigError."""
    if not kv_memory.endswith("%"):
        return parse_memory(kv_memory, "kv-memory", total_bytes=0)
    total_bytes = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else _host_bytes("MemTotal")
    return parse_memory(kv_memory, "kv-memory", total_bytes)


def auto_kv_bytes(device: torch.device, workspace_bytes: int, sharers: int = 1) -> int:
    """What `--kv-memory auto` stands for. On CUDA, call it after the weights are loaded. Raises ConfigError.

    sharers: instances on the device. On CUDA each has an equal part of the whole memory for its weights, workspace and pages:
    they start side by side, so what is free now would depend on who asks first. On CPU it is a share of the host's memory, not of
    what is free now: equal hosts get equal pools, unless memory is short.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # else what loading left in torch's cache counts as used
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        if sharers > 1:
            used_bytes = torch.cuda.memory_reserved(device) + _CONTEXT_BYTES
            free_bytes = min(free_bytes, total_bytes // sharers - used_bytes)
        if free_bytes <= workspace_bytes:
            part = f" in its part for one of {sharers} instances" if sharers > 1 else ""
            raise ConfigError(
                f"{device} has {max(0, free_bytes)} bytes free{part} after loading the weights, but a step may need "
                f"{workspace_bytes}: lower --chunk-tokens or --max-running, or give --kv-memory"
            )
        return int((free_bytes - workspace_bytes) * _CUDA_SHARE)
    total_bytes, free_bytes = _host_bytes("MemTotal"), _host_bytes("MemAvailable")
    return int(min(_CPU_MOST, total_bytes * _CPU_SHARE, free_bytes * _CPU_FREE_SHARE) / sharers)


def _host_bytes(name: str) -> int:
    """A line of /proc/meminfo."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def workspace_bytes(shape: ServedShape, layout: KVLayout, chunk_tokens: int, max_running: int, context_tokens: int) -> int:
    """Most bytes that a step needs in addition to weights and pages: a full chunk and all decode rows, and every row samples.

    Activations of one layer (layers reuse them), attention's mask and gathered pages, logits and the sampler.
    """
    item_bytes = ITEM_BYTES[layout.dtype]
    tokens = chunk_tokens + max_running
    merged_heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    activations = tokens * (item_bytes * 4 * (shape.intermediate + merged_heads + shape.hidden) + 8 * shape.hidden)
    mask = 2 * item_bytes * chunk_tokens * (shape.heads // shape.kv_heads) * context_tokens
    gathered = max(_GATHER_BYTES, 4 * shape.kv_heads * context_tokens * layout.slot_bytes)
    sampled = max_running * shape.vocab_size * (item_bytes + _SAMPLER_BYTES)
    return activations + mask + gathered + sampled
