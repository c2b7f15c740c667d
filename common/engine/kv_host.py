"""What `--kv-memory auto` stands for on CPU: this instance's part of the host's memory, less its weights and steps.

Owns the rule and the line that explains it. `common/host_limits.py` says what the host has. Allocates nothing.
"""

from collections.abc import Callable

from common.config import EngineConfig
from common.cores import sharers_of_host
from common.engine.kv_budget import gib
from common.host_limits import HostMemory, host_memory_now, own_memory_bytes
from common.pages.layout import KVLayout

_KEPT_SHARE, _KEPT_LEAST = 1 / 8, 2**30
"""What the system, the router and its detokenizers keep of a host's memory."""
_TAKEN_STEP, _WORKSPACE = 1 / 32, 2**28
"""What weights take is rounded up to this share of the host's memory. Steps take about so many bytes besides."""
_LEAST_SHARE, _LEAST = 1 / 8, 2**30
"""What the instances of a small host get together, also if weights leave less of their parts."""
USEFUL_FOR_CACHE = 2
"""Pages are of use for this many times what all rows at full length hold: the rest is prefix cache."""


def auto_host_kv_bytes(
    engine: EngineConfig, ranks: int, layout: KVLayout, context_tokens: int, progress: Callable[[str], None]
) -> int:
    """Bytes for pages. Call it when the weights are loaded. ranks: of the instance. layout: of this rank's pages. context_tokens:
    the longest sequence. progress: gets the reason."""
    useful = USEFUL_FOR_CACHE * engine.max_running * layout.pages_for(context_tokens) * layout.page_bytes
    sharers = sharers_of_host(engine.sharers, engine.threads, ranks)
    chosen, why = kv_part(host_memory_now(), own_memory_bytes(), sharers, useful)
    progress(f"--kv-memory auto: up to {gib(chosen)} for KV pages, {why}")
    return chosen


def kv_part(host: HostMemory, taken_bytes: int, sharers: int, useful_bytes: int) -> tuple[int, str]:
    """Bytes for pages, and why so many, for people.

    Every sharer has an equal part of the host's memory, less what the system keeps. Pages get what weights and steps leave of it.
    The part is one of the whole memory, not of what is free now, and figures are rounded: so equal hosts get equal pools, and so
    do instances that start side by side. Only where other programs hold so much that this is not free, pages get less.

    taken_bytes: what this process holds, with its weights. sharers: ranks on this host that have equal parts. useful_bytes: more
    would hardly be used.
    """
    kept = max(_KEPT_LEAST, int(host.total_bytes * _KEPT_SHARE))
    step = int(host.total_bytes * _TAKEN_STEP)
    taken = -(-(taken_bytes + _WORKSPACE) // step) * step
    least = int(min(_LEAST, host.total_bytes * _LEAST_SHARE) / sharers)
    part = max(0, host.total_bytes - kept) // sharers
    free = int(max(host.free_bytes - kept / 2, host.free_bytes / 4) / sharers) // (step // 4) * (step // 4)
    chosen = min(useful_bytes, free, max(least, part - taken))
    if chosen == useful_bytes:
        why = "which is all that its rows at full length can use, and as much again for the prefix cache"
    elif chosen == free:
        why = f"because only {gib(host.free_bytes)} of {gib(host.total_bytes)} are free, shared by {sharers} and the system"
    elif chosen == least:
        why = f"the least, because weights and steps take {gib(taken)} of a part of {gib(part)}"
    else:
        whole = f"{gib(host.total_bytes)} less {gib(kept)} for the system"
        shared = whole if sharers == 1 else f"a part of {gib(part)} ({whole}, shared by {sharers})"
        why = f"which is {shared}, less {gib(taken)} for weights and steps"
    return chosen, why
