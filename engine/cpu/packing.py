"""Which product the linear layers of a model on CPU use for how many rows: torch's over plain weights, or one over packed ones.

Owns the measurement at start, the memory that second copies may take, and the order of packing: layer by layer, so that beyond
second copies no more than one weight is in memory twice. Knows layers by their shapes only.

Which product is the fastest one depends on the processor and on the rows. For the few rows of decode steps torch's own is the
slowest nearly everywhere, and the one in C (`panel_product.c`) is as fast as the memory. For the many rows of a chunk
all are about equal on some processors, and one is clearly faster or slower on others. So the products over packed weights
compete, and each layer has the plain weight, one that is packed for the fastest of them, or, where that is clearly faster and
memory allows, both.
"""

import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.host import host_memory_now
from engine.cpu.products import Packed, PackedProduct
from engine.kv_budget import gib
from engine.models.linear import PackedLinear

_LEAST_ITEMS = 2**16
"""Smaller weights stay plain: they are in the caches of the processor."""
_LEAST_OUTPUTS = 64
"""So do those of fewer outputs: packed in whole panels, they would be far larger."""
_FEW_ROWS, _CHUNK_ROWS = (1, 8, 16, 32), 256
ROWS = (*_FEW_ROWS, _CHUNK_ROWS)
"""Numbers of rows that are measured."""
_MOST_FEW_ROWS = 64
"""From more rows on, a step counts as one with a chunk."""
_SAMPLE_ITEMS, _SAMPLES, _CHUNK_SAMPLES = 2**20, 24, 4
"""Of a large weight, only some outputs are measured, and of as many weights one after the other as no cache holds: few rows wait
for the memory in a step. Chunks do not, and take longer."""
_FEWEST_ROUNDS, _MOST_ROUNDS, _ROUNDS_S = 3, 15, 0.03
"""How often a product is measured, and in which time if that is enough for the fewest rounds. The best counts."""
_CLEARLY = 1.05
"""How much faster both weights must be than one of them, in the mean of `ROWS`, to be worth a second copy."""
_SECOND_OF_ALL, _SECOND_OF_FREE = 1 / 8, 1 / 4
"""The shares of the host's memory that second copies may take: of the whole, so that equal hosts decide alike, and of what is
free."""

Ratios = Mapping[int, float]
"""A product's time as a share of that of torch's over plain weights, for each number of rows in `ROWS`."""
_Calls = Sequence[tuple[Callable[[Tensor, Any], object], Sequence[Tensor] | Sequence[Packed]]]
"""Products of rows and a weight, and weights as each of them reads them."""


class Measured(NamedTuple):
    """The fastest product over packed weights, and its times."""

    product: PackedProduct
    packed: Ratios

    @property
    def both(self) -> Ratios:
        rows = self.packed_rows(keeps_weight=True)
        return {count: self.packed[count] if count in rows else 1.0 for count in ROWS}

    def packed_rows(self, keeps_weight: bool) -> range:
        """For how many rows the packed weight is used, of a layer that has one. keeps_weight: it has the plain one for others."""
        if not keeps_weight:
            return range(sys.maxsize)
        between = (math.isqrt(one * next_one) + 1 for one, next_one in itertools.pairwise(_FEW_ROWS))
        ends = (1, *between, _MOST_FEW_ROWS + 1, sys.maxsize)
        ranges = [range(begin, end) for begin, end in itertools.combinations(ends, 2)]
        return min(ranges, key=lambda rows: math.prod(self.packed[n] if n in rows else 1.0 for n in ROWS))


def mean(ratios: Ratios) -> float:
    """Over all numbers of rows."""
    return math.prod(ratios.values()) ** (1 / len(ratios))


def measure(samples: Sequence[Tensor], products: Sequence[PackedProduct]) -> Measured:
    """samples: weights, [outputs, inputs] each. products: one at least; the fastest in the mean is returned. Takes about a second
    for the largest models.

    It counts the processor's time of this thread, which computes alone: other processes do the same at this moment, and threads
    that share cores with others wait for each other far longer than they compute.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        calls: _Calls = [
            (F.linear, samples),
            *((product, [product.pack(sample) for sample in samples]) for product in products),
        ]
        ratios: list[dict[int, float]] = [{} for _ in products]
        for rows in ROWS:
            count = len(samples) if rows in _FEW_ROWS else _CHUNK_SAMPLES
            given = [torch.ones((rows, sample.shape[1]), dtype=sample.dtype) for sample in samples[:count]]
            plain_s, *packed_s = _best_seconds(given, calls)
            for found, taken_s in zip(ratios, packed_s, strict=True):
                found[rows] = taken_s / plain_s
    finally:
        torch.set_num_threads(threads)
    return min(
        (Measured(product, found) for product, found in zip(products, ratios, strict=True)), key=lambda each: mean(each.packed)
    )


def pack_all(
    layers: Sequence[PackedLinear], products: Sequence[PackedProduct], sharers: int, progress: Callable[[str], None]
) -> int:
    """Give each large layer its products, when all weights are filled. products: those that compete. sharers: processes of this
    host that have equal parts of it. Returns the bytes that second copies may take and do not."""
    large = [(layer, layer.weight) for layer in layers if layer.weight is not None and _is_large(layer.weight)]
    if not large:
        return 0
    measured = measure([_sample(weight) for _, weight in large[:_SAMPLES]], products)
    packed, both = mean(measured.packed), mean(measured.both)
    begin_s, second_bytes, packs = time.perf_counter(), 0, 0
    most_bytes = min(_most_second_bytes(sharers), sum(weight.nbytes for _, weight in large))
    while large:  # the output head comes first: a second copy of it brings the most
        layer, weight = large.pop()
        has_room = second_bytes + weight.nbytes <= most_bytes
        keeps_weight = layer.shared or packed >= 1 or (has_room and both * _CLEARLY < packed)
        if not keeps_weight or (has_room and both * _CLEARLY < 1):
            layer.pack(measured.product, measured.packed_rows(keeps_weight), keeps_weight=keeps_weight)
            packs += 1
            second_bytes += weight.nbytes if keeps_weight else 0
    if packs:
        copies = f", {gib(second_bytes)} of them second copies" if second_bytes else ""
        progress(f"packed the weights of {packs} linear layers in {time.perf_counter() - begin_s:.1f} s{copies}")
    return most_bytes - second_bytes


def _is_large(weight: Tensor) -> bool:
    return weight.numel() >= _LEAST_ITEMS and len(weight) >= _LEAST_OUTPUTS


def _most_second_bytes(sharers: int) -> int:
    host = host_memory_now()
    most_bytes, of_free = int(host.total_bytes * _SECOND_OF_ALL / sharers), int(host.free_bytes * _SECOND_OF_FREE)
    # Less where little is free, but one that starts again, beside others that use their memory, decides as before.
    return most_bytes if most_bytes <= of_free else min(most_bytes, of_free // sharers)


def _sample(weight: Tensor) -> Tensor:
    """Some outputs of it, a multiple of 32 unless each has very many inputs."""
    outputs = max(4, _SAMPLE_ITEMS // weight.shape[1])
    return weight[: outputs // 32 * 32 or outputs]


def _best_seconds(given: Sequence[Tensor], calls: _Calls) -> list[float]:
    """Of each call: of all that is given with its weights in turn."""
    best_s, spent_s = [math.inf] * len(calls), 0.0
    for number in itertools.count(1):
        for at, (call, weights) in enumerate(calls):
            begin_s = time.thread_time()
            for x, weight in zip(given, weights, strict=False):  # of chunks, only some
                call(x, weight)
            taken_s = time.thread_time() - begin_s
            best_s[at], spent_s = min(best_s[at], taken_s), spent_s + taken_s
        if number >= _MOST_ROUNDS or (spent_s > _ROUNDS_S and number >= _FEWEST_ROUNDS):
            return best_s
    raise AssertionError("counting ends with the most rounds")
