"""The KV budget: how many bytes to use for KV, how many pages that makes, and how long a context they hold.

Owns the arithmetic, and what `--kv-memory` means. Allocates nothing. What auto means is in `kv_host.py` for a host's memory;
what a GPU has left is measured in `kv_meter.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from common.amounts import parse_memory
from common.errors import ConfigError, MemoryShort
from common.pages.layout import KVLayout

Agree = Callable[[int], int]
"""Pages that this rank can hold → pages that all ranks use."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    """total_pages: of the pool. context_tokens: the longest sequence that a row may hold."""

    total_pages: int
    context_tokens: int


def as_offered(pages: int) -> int:
    """What a rank that is alone agrees on with itself."""
    return pages


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


def given_kv_bytes(kv_memory: str, device: str, total_bytes: int) -> int | None:
    """Bytes of `--kv-memory`. total_bytes: of the device's whole memory; a share is one of that. None for auto. Raises
    ConfigError."""
    given = parse_memory(kv_memory, "kv-memory", total_bytes)
    if given is not None and given > total_bytes:
        raise ConfigError(f"--kv-memory {kv_memory} is more than {device} has, which is {gib(total_bytes)}")
    return given


def gib(amount: int) -> str:
    return f"{amount / 2**30:.2f} GiB"
