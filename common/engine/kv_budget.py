"""The KV budget: how many bytes to use for KV, how many pages that makes, and how long a context they hold.

Owns the arithmetic. Knows how much memory is free. Allocates nothing.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import parse_memory
from common.errors import ConfigError, MemoryShort
from common.pages.layout import KVLayout

_CPU_SHARE, _CPU_MOST, _CPU_FREE_SHARE = 0.125, 2**30, 0.5
_CUDA_KEPT = 0.02
"""Share of the device's memory that stays free: for fragmentation, and for what libraries allocate late."""
_CONTEXT_BYTES = 2**29
"""What CUDA itself takes per process: its context and the code of the kernels."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    """total_pages: of the pool. context_tokens: the longest sequence that a row may hold."""

    total_pages: int
    context_tokens: int


def kv_budget(layout: KVLayout, kv_bytes: int, own_context: int, asked_context: int, measured: bool = False) -> KVBudget:
    """Pages that fit in `kv_bytes`, and the context: the one asked for, or the model's own, or as much of it as the pages hold.

    own_context: tokens, of the model. asked_context: tokens; 0: the model's own, capped. A capped context is a power of two,
    because the instances of a fleet must agree on it even if their memory differs a little. measured: kv_bytes is what is
    free now. Raises ConfigError; MemoryShort if too few bytes were measured.
    """
    check_context(own_context, asked_context)
    pages = kv_bytes // layout.page_bytes
    shortage = MemoryShort if measured else ConfigError
    if pages < 1:
        raise shortage(f"--kv-memory gives {kv_bytes} bytes, which is less than one page of {layout.page_bytes}")
    context = asked_context or own_context
    needed = layout.pages_for(context)
    if needed <= pages:
        return KVBudget(pages, context)
    if asked_context:
        raise shortage(
            f"--kv-memory gives {pages} pages of {layout.page_bytes} bytes, but --context-tokens {context} needs {needed}: give "
            f"--kv-memory at least {needed * layout.page_bytes} bytes, or --context-tokens at most {pages * layout.page_size}"
        )
    held = pages * layout.page_size
    return KVBudget(pages, 2 ** (held.bit_length() - 1))


def check_context(own_context: int, asked_context: int) -> None:
    """Raises ConfigError when more is asked for than the model has."""
    if asked_context > own_context:
        raise ConfigError(f"--context-tokens {asked_context} is more than the model's own context of {own_context} tokens")


def given_kv_bytes(kv_memory: str, device: torch.device) -> int | None:
    """Bytes of `--kv-memory`; a share is one of the device's whole memory. None for auto. Raises ConfigError."""
    total_bytes = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else _host_bytes("MemTotal")
    given = parse_memory(kv_memory, "kv-memory", total_bytes)
    if given is not None and given > total_bytes:
        raise ConfigError(f"--kv-memory {kv_memory} is more than {device} has, which is {_gib(total_bytes)}")
    return given


def auto_host_kv_bytes(sharers: int = 1) -> int:
    """What `--kv-memory auto` stands for on CPU: a share of the host's memory, not of what is free now. So equal hosts get equal
    pools, unless memory is short. sharers: instances on this host that have equal parts of it."""
    total_bytes, free_bytes = _host_bytes("MemTotal"), _host_bytes("MemAvailable")
    return int(min(_CPU_MOST, total_bytes * _CPU_SHARE, free_bytes * _CPU_FREE_SHARE) / sharers)


class KVMemoryMeter:
    """What `--kv-memory auto` stands for on CUDA. Make it when the weights are loaded; then run the largest steps on a small
    pool, and see what is left.

    sharers: instances on the device. Each has an equal part of the whole memory for its weights, steps and pages. They start side
    by side, so what is free now would depend on who asks first: then only torch's own memory is measured.
    """

    def __init__(self, device: torch.device, sharers: int) -> None:
        self._device = device
        self._sharers = sharers
        _return_cache(device)
        self._before_bytes = self._taken_bytes()

    def left_bytes(self) -> int:
        """What may still be allocated."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return max(0, min(free_bytes, total_bytes // self._sharers - self._taken_bytes()))

    def peak_bytes(self) -> int:
        """The most that was allocated at a time since the meter was made: torch keeps what steps gave back. Ask before a graph is
        captured, because a capture makes torch give it back."""
        return self._taken_bytes() - self._before_bytes

    def held_bytes(self) -> int:
        """What was allocated since the meter was made and is still in use."""
        _return_cache(self._device)
        return self._taken_bytes() - self._before_bytes

    def left_for_pages(self, workspace_bytes: int, progress: Callable[[str], None]) -> int:
        """Bytes for pages, when steps take workspace_bytes besides them. Call it when nothing of the trial is referenced any
        more. Raises MemoryShort."""
        gc.collect()
        _return_cache(self._device)
        part_bytes = torch.cuda.mem_get_info(self._device)[1] // self._sharers
        taken_bytes, kept_bytes = self._taken_bytes(), int(part_bytes * _CUDA_KEPT)
        kv_bytes = self.left_bytes() - workspace_bytes - kept_bytes
        part = "" if self._sharers == 1 else f" for each of {self._sharers} instances"
        figures = (
            f"{self._device} has {_gib(part_bytes)}{part}: weights and what else is there take {_gib(taken_bytes)}, steps and "
            f"graphs {_gib(workspace_bytes)}, and {_gib(kept_bytes)} stay free"
        )
        if kv_bytes <= 0:
            free_bytes = torch.cuda.mem_get_info(self._device)[0]
            raise MemoryShort(
                f"no memory is left for KV pages. {figures}; {_gib(free_bytes)} are free now: free memory there, or lower "
                f"--chunk-tokens, --max-running or --context-tokens"
            )
        progress(f"{figures}; {_gib(kv_bytes)} are left for KV pages")
        return kv_bytes

    def __str__(self) -> str:
        return f"weights and what else is on the device take {_gib(self._before_bytes)}"

    def _taken_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        if self._sharers > 1:
            return torch.cuda.memory_reserved(self._device) + _CONTEXT_BYTES
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return total_bytes - free_bytes


def _return_cache(device: torch.device) -> None:
    """Give back what torch keeps for later, else it counts as used."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def _host_bytes(name: str) -> int:
    """A line of /proc/meminfo."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def _gib(amount: int) -> str:
    return f"{amount / 2**30:.2f} GiB"
