"""Which product the linear layers of a model on CPU use for how many rows: torch's or the one in C, over plain weights, or
oneDNN's over packed ones.

Owns the measurement at start, the memory that second copies may take, and the order of packing: layer by layer, so that beyond
second copies no more than one weight is in memory twice. Knows layers by their shapes only.

Which product is the fastest one depends on the processor and on the rows. For the few rows of decode steps torch's own is the
slowest nearly everywhere, and the one in C (`few_rows.c`), which needs a compiler and float32, is as fast as the memory for up to
eight of them. For the many rows of a chunk torch's own is as fast as oneDNN's on some processors, and clearly slower or faster on
others. So each layer has the plain weight, the packed one, or, where that is clearly faster and memory allows, both.
"""

import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.kv_budget import gib
from common.engine.models.few_rows import MOST_ROWS, FewRows, fits, load_few_rows
from common.engine.models.linear import PackedLinear, packed_product, packed_weight
from common.host_limits import host_memory_now

_LEAST_ITEMS = 2**16
"""Smaller weights stay plain. They are in the caches of the processor, and a call of oneDNN takes longer."""
_FEW_ROWS, _CHUNK_ROWS = (1, 8, 16, 32), 256
ROWS = (*_FEW_ROWS, _CHUNK_ROWS)
"""Numbers of rows that are measured."""
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

Product = Callable[[Tensor, Tensor, None], Tensor]
"""Of rows and a weight, without a bias."""
Ratios = Mapping[int, float]
"""A product's time as a share of that of torch's over plain weights, for each number of rows in `ROWS`."""
_TORCH: Ratios = dict.fromkeys(ROWS, 1.0)


class Measured(NamedTuple):
    """in_c: None where there is no C; for a chunk it is torch's."""

    packed: Ratios
    in_c: Ratios | None

    @property
    def few_in_c(self) -> bool:
        """Whether layers with a plain weight compute few rows in C."""
        return self.in_c is not None and mean(self.in_c) < 1

    @property
    def plain(self) -> Ratios:
        return self.in_c if self.in_c is not None and self.few_in_c else _TORCH

    @property
    def both(self) -> Ratios:
        rows = self.packed_rows(keeps_weight=True)
        return {count: self.packed[count] if count in rows else self.plain[count] for count in ROWS}

    def packed_rows(self, keeps_weight: bool) -> range:
        """For how many rows the packed weight is used, of a layer that has one. keeps_weight: it has the plain one for others."""
        if not keeps_weight:
            return range(sys.maxsize)
        between = (math.isqrt(one * next_one) + 1 for one, next_one in itertools.pairwise(_FEW_ROWS))
        ends = (1, *between, MOST_ROWS + 1, sys.maxsize)
        ranges = [range(begin, end) for begin, end in itertools.combinations(ends, 2)]
        return min(ranges, key=lambda rows: math.prod(self.packed[n] if n in rows else self.plain[n] for n in ROWS))


def mean(ratios: Ratios) -> float:
    """Over all numbers of rows."""
    return math.prod(ratios.values()) ** (1 / len(ratios))


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


def measure(samples: Sequence[Tensor], few_rows: FewRows | None) -> Measured:
    """samples: weights, [outputs, inputs] each. few_rows: the product in C; None: there is none. Takes about a second for the
    largest models.

    It counts the processor's time of this thread, which computes alone: other processes do the same at this moment, and threads
    that share cores with others wait for each other far longer than they compute.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        packed, in_c = dict[int, float](), dict[int, float]()
        packed_samples = [packed_weight(sample) for sample in samples]
        for rows in ROWS:
            count = len(samples) if rows in _FEW_ROWS else _CHUNK_SAMPLES
            given = [torch.ones((rows, sample.shape[1]), dtype=sample.dtype) for sample in samples[:count]]
            products: list[tuple[Product, Sequence[Tensor]]] = [(F.linear, samples), (packed_product, packed_samples)]
            if few_rows is not None and rows in _FEW_ROWS:
                products.append((few_rows, samples))
            plain_s, packed_s, *in_c_s = _best_seconds(given, products)
            packed[rows], in_c[rows] = packed_s / plain_s, in_c_s[0] / plain_s if in_c_s else 1.0
    finally:
        torch.set_num_threads(threads)
    return Measured(packed, None if few_rows is None else in_c)


def pack_all(layers: Sequence[PackedLinear], sharers: int, progress: Callable[[str], None]) -> int:
    """Give each large layer its products, when all weights are filled. sharers: processes of this host that have equal parts of
    it. Returns the bytes that second copies may take and do not."""
    large = [(layer, layer.weight) for layer in layers if layer.weight is not None and layer.weight.numel() >= _LEAST_ITEMS]
    if not large:
        return 0
    few_rows = load_few_rows() if all(fits(weight) for _, weight in large) else None
    measured = measure([_sample(weight) for _, weight in large[:_SAMPLES]], few_rows)
    plain, packed, both = mean(measured.plain), mean(measured.packed), mean(measured.both)
    begin_s, second_bytes, packs, in_c = time.perf_counter(), 0, 0, 0
    most_bytes = min(_most_second_bytes(sharers), sum(weight.nbytes for _, weight in large))
    while large:  # the output head comes first: a second copy of it brings the most
        layer, weight = large.pop()
        has_room = second_bytes + weight.nbytes <= most_bytes
        keeps_weight = layer.shared or plain <= packed or (has_room and both * _CLEARLY < packed)
        if not keeps_weight or (has_room and both * _CLEARLY < plain):
            layer.pack(measured.packed_rows(keeps_weight), keeps_weight=keeps_weight)
            packs += 1
            second_bytes += weight.nbytes if keeps_weight else 0
        if keeps_weight and measured.few_in_c:
            layer.few_rows = few_rows
            in_c += 1
    if packs:
        copies = f", {gib(second_bytes)} of them second copies" if second_bytes else ""
        progress(f"packed the weights of {packs} linear layers in {time.perf_counter() - begin_s:.1f} s{copies}")
    if in_c:
        progress(f"{in_c} linear layers compute few rows in C, over plain weights")
    return most_bytes - second_bytes


def _most_second_bytes(sharers: int) -> int:
    host = host_memory_now()
    most_bytes, of_free = int(host.total_bytes * _SECOND_OF_ALL / sharers), int(host.free_bytes * _SECOND_OF_FREE)
    # Less where little is free, but one that starts again, beside others that use their memory, decides as before.
    return most_bytes if most_bytes <= of_free else min(most_bytes, of_free // sharers)


def _sample(weight: Tensor) -> Tensor:
    """Some outputs of it: a multiple of 16, or of 4 if each has very many inputs, because C needs that."""
    outputs = max(4, _SAMPLE_ITEMS // weight.shape[1])
    return weight[: outputs // 16 * 16 or outputs // 4 * 4]


def _best_seconds(given: Sequence[Tensor], products: Sequence[tuple[Product, Sequence[Tensor]]]) -> list[float]:
    """Of each product: of all that is given with the weights in turn."""
    best_s, spent_s = [math.inf] * len(products), 0.0
    for number in itertools.count(1):
        for at, (product, weights) in enumerate(products):
            begin_s = time.thread_time()
            for x, weight in zip(given, weights, strict=False):  # of chunks, only some
                product(x, weight, None)
            taken_s = time.thread_time() - begin_s
            best_s[at], spent_s = min(best_s[at], taken_s), spent_s + taken_s
        if number >= _MOST_ROUNDS or (spent_s > _ROUNDS_S and number >= _FEWEST_ROUNDS):
            return best_s
    raise AssertionError("counting ends with the most rounds")
