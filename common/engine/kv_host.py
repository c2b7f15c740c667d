"""What `--kv-memory auto` stands for on CPU: this instance's part of the host's memory, less its weights and steps.

Owns the rule and the line that explains it. What starts several instances or ranks decides the part for all, once. One that is
started alone decides for itself. `common/host_limits.py` says what the host has. Allocates nothing.
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
    engine: EngineConfig,
    ranks: int,
    layout: KVLayout,
    context_tokens: int,
    progress: Callable[[str], None],
    spared_bytes: int = 0,
) -> int:
    """Bytes for pages. Call it when the weights are loaded. ranks: of the instance. layout: of this rank's pages. context_tokens:
    the longest sequence. progress: gets the reason. spared_bytes: as `Model.spared_bytes`."""
    useful = USEFUL_FOR_CACHE * engine.max_running * layout.pages_for(context_tokens) * layout.page_bytes
    sharers = sharers_of_host(engine.sharers, engine.threads, ranks)
    taken = own_memory_bytes() + spared_bytes
    chosen, why = kv_part(host_memory_now(), taken, sharers, useful, engine.memory_part)
    progress(f"--kv-memory auto: up to {gib(chosen)} for KV pages, {why}")
    return chosen


def memory_part(engine: EngineConfig, ranks: int, starting: int) -> int:
    """The field of that name, for ranks that one command starts: it decides once, so all have the same part, and one that starts
    again has what it had. 0: there is nothing to decide. engine: of one rank. ranks: of an instance. starting: ranks that start
    now."""
    if engine.memory_part or engine.kv_memory != "auto":
        return engine.memory_part
    return part_of(host_memory_now(), sharers_of_host(engine.sharers, engine.threads, ranks), starting)


def part_of(host: HostMemory, sharers: int, starting: int) -> int:
    """Bytes that each of `starting` ranks gets: its part of the whole memory, or where that is not free for all, of what is."""
    part, free = _whole_part(host, sharers), _free(host)
    return part if part * starting <= free else min(part, free // sharers)


def kv_part(host: HostMemory, taken_bytes: int, sharers: int, useful_bytes: int, given_part: int = 0) -> tuple[int, str]:
    """Bytes for pages, and why so many, for people.

    Every sharer has an equal part of the host's memory, less what the system keeps. Pages get what weights and steps leave of it.
    The part is one of the whole memory, not of what is free now, and figures are rounded: so equal hosts get equal pools, and so
    do instances that start side by side, or again beside others that use theirs. A part that was decided for several at once is
    kept. Who decides for itself, and finds less than that free, gets its part of what is free.

    taken_bytes: what this process holds, with its weights. sharers: ranks on this host that have equal parts. useful_bytes: more
    would hardly be used. given_part: decided before; 0: not so.
    """
    kept, step = _kept(host), int(host.total_bytes * _TAKEN_STEP)
    taken = -(-(taken_bytes + _WORKSPACE) // step) * step
    part = given_part or _whole_part(host, sharers)
    least = min(int(min(_LEAST, host.total_bytes * _LEAST_SHARE) / sharers), part // 2)
    wanted = min(useful_bytes, max(least, part - taken))
    is_scarce = not given_part and wanted > _free(host)
    chosen = min(wanted, _free(host) // sharers // (step // 4) * (step // 4)) if is_scarce else wanted
    if chosen == useful_bytes:
        why = "which is all that its rows at full length can use, and as much again for the prefix cache"
    elif is_scarce:
        why = f"because only {gib(host.free_bytes)} of {gib(host.total_bytes)} are free, shared by {sharers} and the system"
    elif chosen == least:
        why = f"the least, because weights and steps take {gib(taken)} of a part of {gib(part)}"
    elif part < _whole_part(host, sharers):
        why = f"which is a part of {gib(part)} (of what was free when all started), less {gib(taken)} for weights and steps"
    else:
        whole = f"{gib(host.total_bytes)} less {gib(kept)} for the system"
        shared = whole if sharers == 1 else f"a part of {gib(part)} ({whole}, shared by {sharers})"
        why = f"which is {shared}, less {gib(taken)} for weights and steps"
    return chosen, why


def _kept(host: HostMemory) -> int:
    """For the system."""
    return max(_KEPT_LEAST, int(host.total_bytes * _KEPT_SHARE))


def _whole_part(host: HostMemory, sharers: int) -> int:
    """Of the whole memory."""
    return max(0, host.total_bytes - _kept(host)) // sharers


def _free(host: HostMemory) -> int:
    """What may be taken of what is free."""
    return int(max(host.free_bytes - _kept(host) / 2, host.free_bytes / 4))
