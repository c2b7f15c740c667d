"""The KV budget: how many bytes to use for KV, how many pages that makes, how long a context they hold, and in what data type.

Owns the arithmetic, what `--kv-memory` and `--kv-dtype` mean, and the description of an engine that follows. On CPU `auto` is
this instance's part of the host's memory, less its weights and steps. What starts several instances or ranks decides the part
for all, once; one that is started alone decides for itself. `common/host.py` says what the host has; what a GPU has left is
measured in `kv_memory.py`. Imports no torch and allocates nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from common.config import EngineConfig, ModelConfig
from common.errors import ConfigError, MemoryShort
from common.executor import EngineDescription
from common.host import HostMemory, host_memory_now, own_memory_bytes, sharers_of_host
from common.ids import Digest
from common.messages import EngineChoices, ModelIdentity
from common.model_path import model_name
from common.options import parse_memory
from common.pages.layout import KVDtype, KVLayout, MemoryRegion, heads_of
from engine.models.shape import ServedShape

Agree = Callable[[int], int]
"""Pages that this rank can hold → pages that all ranks use."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    """How many pages the pool has, and the longest sequence that a row may hold."""

    total_pages: int
    context_tokens: int


def as_offered(pages: int) -> int:
    """What a rank that is alone agrees on with itself."""
    return pages


def kv_budget(
    layout: KVLayout, kv_bytes: int, own_context: int, asked_context: int, measured: bool = False, beside_bytes: int = 0
) -> KVBudget:
    """Pages that fit in `kv_bytes`, and the context: the one asked for, or the model's own, or as much of it as the pages hold.

    own_context: tokens, of the model. asked_context: tokens; 0: the model's own, capped. A capped context is a power of two,
    because the instances of a fleet must agree on it even if their memory differs a little. measured: kv_bytes is what is
    free now. beside_bytes: what another model's KV takes beside each page. Raises ConfigError; MemoryShort if too few bytes were
    measured.
    """
    check_context(own_context, asked_context)
    page_bytes = layout.page_bytes + beside_bytes
    pages = kv_bytes // page_bytes
    shortage = MemoryShort if measured else ConfigError
    if pages < 1:
        raise shortage(f"--kv-memory gives {kv_bytes} bytes, which is less than one page of {page_bytes}")
    context = asked_context or own_context
    needed = layout.pages_for(context)
    if needed <= pages:
        return KVBudget(pages, context)
    if asked_context:
        raise shortage(
            f"--kv-memory gives {pages} pages of {page_bytes} bytes, but --context-tokens {context} needs {needed}: give "
            f"--kv-memory at least {needed * page_bytes} bytes, or --context-tokens at most {pages * layout.page_size}"
        )
    held = pages * layout.page_size
    return KVBudget(pages, 2 ** (held.bit_length() - 1))


def agreed_budget(
    layout: KVLayout,
    kv_bytes: int,
    own_context: int,
    asked_context: int,
    measured: bool,
    agree: Agree,
    beside_bytes: int = 0,
) -> KVBudget:
    """As `kv_budget`, for the rank that has the least memory, because page ids and the longest context are the same on all
    ranks."""
    pages = agree(kv_budget(layout, kv_bytes, own_context, asked_context, measured, beside_bytes).total_pages)
    agreed_bytes = pages * (layout.page_bytes + beside_bytes)
    return kv_budget(layout, agreed_bytes, own_context, asked_context, measured, beside_bytes)


def layout_of(shape: ServedShape, engine: EngineConfig, rank: int, ranks: int, dtype: KVDtype) -> KVLayout:
    """The layout of one rank's pages. dtype: see `kv_dtype_of`."""
    return KVLayout(
        layers=shape.layers,
        kv_heads=len(heads_of(rank, ranks, shape.kv_heads)),
        head_dim=shape.head_dim,
        page_size=engine.page_size,
        dtype=kv_dtype_of(engine, dtype),
    )


_NO_CHOICES = EngineChoices()


def describe(
    model: ModelConfig,
    engine: EngineConfig,
    shape: ServedShape,
    layout: KVLayout,
    budget: KVBudget,
    memory: MemoryRegion,
    *,
    digests: tuple[str, Digest],
    weights: Digest,
    dtype: KVDtype,
    choices: EngineChoices = _NO_CHOICES,
) -> EngineDescription:
    """What an executor holds whose pages are in `memory`. digests: fingerprint and config of the model. dtype: of the weights, as
    they are before they are quantised."""
    return EngineDescription(
        model=ModelIdentity(
            name=model.served_name or model_name(model.model),
            fingerprint=digests[0],
            architecture=shape.architecture,
            dtype=dtype,
            vocab_size=shape.vocab_size,
            context_tokens=budget.context_tokens,
            kv_heads=shape.kv_heads,
            config=digests[1],
        ),
        layout=layout,
        total_pages=budget.total_pages,
        max_rows=engine.max_running,
        memory=memory,
        eos_token_ids=shape.eos_token_ids,
        device=memory.device,
        choices=choices,
        weights=weights,
        max_adapters=engine.lora_places,
        adapters_per_batch=engine.lora_slots,
    )


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


def kv_dtype_of(engine: EngineConfig, dtype: KVDtype) -> KVDtype:
    """dtype: of the weights, as they are before they are quantised. Raises ConfigError.

    Float32 in int8 gets bfloat16 pages: on CPU a long context waits for the reading of its pages, and their error, at most 2^-8
    of each number, is far below that of the weights.
    """
    match engine.kv_dtype:
        case "auto":
            return "bfloat16" if engine.quantization == "int8" and dtype == "float32" else dtype
        case "float32":
            if dtype != "float32":
                raise ConfigError(
                    f"--kv-dtype float32 with --dtype {dtype}: keys and values are computed in {dtype}, so such pages are larger "
                    f"and no more exact: give --kv-dtype auto"
                )
            return "float32"
        case "bfloat16":
            if dtype == "float16":
                raise ConfigError(
                    "--kv-dtype bfloat16 with --dtype float16: such pages are as large as float16, and less exact: "
                    "give --kv-dtype auto"
                )
            return "bfloat16"
        case "fp8_e4m3":
            return "float8_e4m3fn"
        case _:
            assert_never(engine.kv_dtype)


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
    beside_bytes: int = 0,
) -> int:
    """Bytes for pages. Call it when the weights are loaded. ranks: of the instance. layout: of this rank's pages. context_tokens:
    the longest sequence. progress: gets the reason. spared_bytes: as `Model.spared_bytes`. beside_bytes: see `kv_budget`."""
    pages = USEFUL_FOR_CACHE * engine.max_running * layout.pages_for(context_tokens)
    useful = pages * (layout.page_bytes + beside_bytes)
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
        why = "enough for every row at full length, and as much again for the prefix cache"
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
    """What the system keeps."""
    return max(_KEPT_LEAST, int(host.total_bytes * _KEPT_SHARE))


def _whole_part(host: HostMemory, sharers: int) -> int:
    """A rank's part of the whole memory."""
    return max(0, host.total_bytes - _kept(host)) // sharers


def _free(host: HostMemory) -> int:
    """What may be taken of what is free."""
    return int(max(host.free_bytes - _kept(host) / 2, host.free_bytes / 4))
