"""Which product the linear layers of a model on CPU use for few rows: the one in C over plain weights, or oneDNN's over packed
ones.

Owns the measurement at start, the memory that second copies may take, and the order of packing: layer by layer, so that no more
than one weight is in memory twice. Knows layers by their shapes only.

Which product is the fastest one depends on the processor and on the rows. For the few rows of decode steps torch's own is the
slowest nearly everywhere. The product in C (`few_rows.c`) needs no copy and no time at start, but there must be a compiler, and
the weights be float32. For the many rows of a chunk, torch's own product is as fast as oneDNN's on some processors and clearly
faster on others. So where weights are packed, both copies are kept there if memory allows; the packed one alone if it does not.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.kv_budget import gib
from common.engine.models.few_rows import FewRows, fits, load_few_rows
from common.engine.models.linear import PackedLinear, packed_product, packed_weight
from common.host_limits import host_memory_now

_LEAST_ITEMS = 2**16
"""Smaller weights stay plain. They are in the caches of the processor, and a call of oneDNN takes longer."""
_ONE_ROW, _FEW_ROWS, _CHUNK_ROWS = 1, (8, 32), 256
_FEW_END = 128
"""From so many rows on it is a chunk."""
_SAMPLE_ITEMS = 2**20
"""Of a large weight, only some outputs are measured: it must not take long."""
_FEWEST_ROUNDS, _MOST_ROUNDS, _ROUNDS_S = 4, 15, 0.03
"""How often a product is measured, and in which time if that is enough for the fewest rounds. The best counts."""
_CLEARLY = 1.1
"""How much faster the plain product must be for chunks, to be worth a second copy."""
_SECOND_OF_ALL, _SECOND_OF_FREE = 1 / 8, 1 / 4
"""The shares of the host's memory that second copies may take: of the whole, so that equal hosts decide alike, and of what is
free."""

Product = Callable[[Tensor, Tensor, None], Tensor]
"""Of rows and a weight, without a bias."""
Ratios = Mapping[int, float]
"""A product's time as a share of that of torch's, for some numbers of rows."""


def why_not_packed(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why weights cannot be packed here; None: they can. It tries, because that depends on torch and on the processor."""
    if device.type != "cpu":
        return f"packed weights are for CPU, not for {device}"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "torch has no oneDNN here"
    try:
        packed_product(torch.zeros((2, 16), dtype=dtype), packed_weight(torch.zeros((16, 16), dtype=dtype)), None)
    except (RuntimeError, AttributeError, NotImplementedError) as error:  # AttributeError: torch does not have the op
        return str(error).strip().splitlines()[0]
    return None


def measured_ratios(weight: Tensor, product: Product, given: Tensor, all_rows: Sequence[int]) -> Ratios:
    """weight: [outputs, inputs]. given: what the product takes for it. Takes less than a tenth of a second for a large one.

    It counts the processor's time of this thread, which computes alone: other processes do the same at this moment, and threads
    that share cores with others wait for each other far longer than they compute.
    """
    threads, ratios = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    try:
        for rows in all_rows:
            x = torch.ones((rows, weight.shape[1]), dtype=weight.dtype)
            plain_s, product_s, spent_s = math.inf, math.inf, 0.0
            for number in range(1, _MOST_ROUNDS + 1):
                one_s, other_s = _seconds(F.linear, x, weight), _seconds(product, x, given)
                plain_s, product_s, spent_s = min(plain_s, one_s), min(product_s, other_s), spent_s + one_s + other_s
                if spent_s > _ROUNDS_S and number >= _FEWEST_ROUNDS:
                    break
            ratios[rows] = product_s / plain_s
    finally:
        torch.set_num_threads(threads)
    return ratios


def measured_packed(samples: Sequence[Tensor]) -> Ratios:
    """Of oneDNN's product."""
    rows = (_ONE_ROW, *_FEW_ROWS, _CHUNK_ROWS)
    return _mean([measured_ratios(sample, packed_product, packed_weight(sample), rows) for sample in samples])


def measured_few_rows(samples: Sequence[Tensor], few_rows: FewRows) -> Ratios:
    """Of the product in C."""
    return _mean([measured_ratios(sample, few_rows, sample, (_ONE_ROW, *_FEW_ROWS)) for sample in samples])


def packed_rows(ratios: Ratios, keeps_weight: bool) -> range:
    """For how many rows the packed weight is used; none: it is not worth having. keeps_weight: the plain one is there for the
    others."""
    if math.prod(ratios[rows] for rows in _FEW_ROWS) >= 1:
        return range(0)
    if not keeps_weight:
        return range(sys.maxsize)
    return range(1 if ratios[_ONE_ROW] < 1 else 2, sys.maxsize if ratios[_CHUNK_ROWS] < 1 else _FEW_END)


def pack_all(layers: Sequence[PackedLinear], sharers: int, progress: Callable[[str], None]) -> None:
    """Give each large layer the product that is the fastest one for few rows, when all weights are filled. sharers: processes of
    this host that have equal parts of it."""
    large = [layer for layer in layers if layer.weight is not None and layer.weight.numel() >= _LEAST_ITEMS]
    if not large:
        return
    shapes = {weight.shape: weight for weight in (layer.weight for layer in large) if weight is not None}
    samples = [_sample(weight) for weight in shapes.values()]
    packed = measured_packed(samples)
    few_rows = load_few_rows() if all(map(fits, shapes.values())) else None
    if few_rows is not None and _for_few(measured_few_rows(samples, few_rows)) < min(1.0, _for_few(packed)):
        for layer in large:
            layer.few_rows = few_rows
        progress(f"{len(large)} linear layers compute few rows in C, over plain weights")
        return
    shapes.clear()  # plain weights, which are to be dropped, and parts of them
    samples.clear()
    _pack(large, packed, sharers, progress)


def _pack(layers: Sequence[PackedLinear], ratios: Ratios, sharers: int, progress: Callable[[str], None]) -> None:
    """Pack what is worth it."""
    begin_s, second_bytes, count = time.perf_counter(), 0, 0
    host = host_memory_now()
    most_bytes, of_free = int(host.total_bytes * _SECOND_OF_ALL / sharers), int(host.free_bytes * _SECOND_OF_FREE)
    if most_bytes > of_free:  # else one that starts again, beside others that use their memory, decides as before
        most_bytes = min(most_bytes, of_free // sharers)
    large = [(layer, layer.weight) for layer in reversed(layers) if layer.weight is not None]
    while large:  # the output head comes first: a second copy of it brings the most
        layer, weight = large.pop(0)
        fits = second_bytes + weight.nbytes <= most_bytes
        if layer.shared and not fits:
            continue
        keeps_weight = layer.shared or (fits and ratios[_CHUNK_ROWS] > _CLEARLY)
        rows = packed_rows(ratios, keeps_weight)
        if not rows:
            continue
        layer.pack(rows, keeps_weight=keeps_weight)
        count += 1
        second_bytes += weight.nbytes if keeps_weight else 0
    if count:
        copies = f", {gib(second_bytes)} of them second copies" if second_bytes else ""
        progress(f"packed the weights of {count} linear layers for few rows in {time.perf_counter() - begin_s:.1f} s{copies}")


def _sample(weight: Tensor) -> Tensor:
    """Some outputs of it, as many as a multiple of 16 where it has so many."""
    outputs = max(1, _SAMPLE_ITEMS // weight.shape[1])
    return weight[: outputs // 16 * 16 or outputs]


def _for_few(ratios: Ratios) -> float:
    """Of the rows of decode steps."""
    return math.prod(ratios[rows] for rows in (_ONE_ROW, *_FEW_ROWS))


def _mean(measured: Sequence[Ratios]) -> Ratios:
    """Of all shapes: they differ little on one processor, and less than a measurement on a busy one."""
    return {rows: math.prod(ratios[rows] for ratios in measured) ** (1 / len(measured)) for rows in measured[0]}


def _seconds(product: Product, x: Tensor, weight: Tensor) -> float:
    begin_s = time.thread_time()
    product(x, weight, None)
    return time.thread_time() - begin_s
