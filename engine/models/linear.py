"""Linear layers: a weight, perhaps a bias, and their product with the step's tokens; in the model's dtype, packed or not, in FP8,
or (on CPU) in int8: weights with a scale for each output, and tokens that are quantised in every step.

Owns the arithmetic of one layer, and on CPU the choice between torch's product over plain weights and one over packed ones: the
measurement at start, the memory that second copies may take, and the order of packing, layer by layer, so that beyond second
copies no more than one weight is in memory twice. Does not know where weights come from, which layer it is, or how the products
of `engine/cpu/products.py` compute.

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
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import ConfigError, first_line
from common.host import host_memory_now
from engine.cpu.products import LARGEST_WEIGHT, MOST_INPUTS, SIGN, Packed, PackedProduct
from engine.models.shape import FP8_MULTIPLE
from engine.ports import Fp8Rows
from engine.torch_kernels import Kernels

Activation = Callable[[Tensor], Tensor]
"""What a gated layer makes of its product, [tokens, 2 * outputs] → [tokens, outputs]: SwiGLU (Shazeer 2020), the gates first."""


@dataclass(slots=True)
class Linear:
    """A layer with the plain weight, or on CPU with a packed one, or both."""

    weight: Tensor | None
    """[outputs, inputs]; None: only the packed one is there."""
    bias: Tensor | None
    """[outputs], or None."""
    gate: Activation | None = None
    shared: bool = False
    """The weight is used elsewhere too, so it stays in memory."""
    packed_rows: range = range(0)
    """For how many rows the packed weight is used; for all others torch's product is, over the plain one."""
    product: PackedProduct | None = None
    """The one over the packed weight."""
    packed: Packed | None = None
    inputs: int = 0
    """Columns of a weight that is packed."""

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] → [tokens, outputs]; with a gate half as many."""
        if self.product is not None and x.shape[0] in self.packed_rows:  # len() of a tensor takes longer
            assert self.packed is not None
            return self.product(x, self.packed)
        assert self.weight is not None
        out = F.linear(x, self.weight, self.bias)
        return out if self.gate is None else self.gate(out)

    def ungated(self, x: Tensor) -> Tensor:
        """[tokens, inputs] → [tokens, outputs], what a gate would be given."""
        if self.product is not None and x.shape[0] in self.packed_rows:
            assert self.packed is not None
            return self.product.ungated(x, self.packed)
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def put(self, rows: slice, weight: Tensor) -> Tensor:
        """Set some outputs, before anything is packed. weight: [rows, inputs], any float dtype, on any device. Returns them."""
        assert self.weight is not None
        return self.weight[rows].copy_(weight)

    def pack(self, product: PackedProduct, packed_rows: range, *, keeps_weight: bool) -> None:
        """Use a packed weight for so many rows. keeps_weight: the plain one stays, for all others."""
        assert self.weight is not None
        self.packed_rows, self.product = packed_rows, product
        self.packed = product.pack(self.weight, self.bias, gated=self.gate is not None)
        self.inputs = self.weight.shape[1]
        if not keeps_weight:
            self.weight = None

    def read(self, rows: slice) -> Tensor:
        """Some outputs, [rows, inputs], as they were set."""
        if self.weight is not None:
            return self.weight[rows]
        assert self.product is not None and self.packed is not None
        outputs = self.packed.outputs * (2 if self.packed.gated else 1)
        return self.product.unpack(self.packed, outputs, self.inputs)[rows]

    def pack_as(self, other: "Linear") -> None:
        """Pack it as another one of the same shape is packed."""
        if other.product is not None:
            self.pack(other.product, other.packed_rows, keeps_weight=other.weight is not None)


@dataclass(slots=True)
class Fp8Linear:
    """FP8 weights with a scale for each output, and tokens that are quantised in every step, with a scale for each: where the
    operation before can, by that one. Out comes bfloat16. Source: Micikevicius et al. 2022, FP8 formats for deep learning.

    weight: [outputs, inputs] float8_e4m3fn. scale: [1, outputs] float32. bias: [outputs] bfloat16, or None.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    kernels: Kernels
    gated: bool = False
    """SwiGLU, the gates first. What comes out is quantised, because only the output of an mlp follows."""

    @classmethod
    def empty(
        cls, outputs: int, inputs: int, bias: Tensor | None, device: torch.device, kernels: Kernels, *, gated: bool = False
    ) -> "Fp8Linear":
        """Raises ConfigError for a size that FP8 products do not have."""
        if outputs % FP8_MULTIPLE or inputs % FP8_MULTIPLE:
            raise ConfigError(
                f"--quantization fp8 needs layers whose sizes are multiples of {FP8_MULTIPLE}, but one of this model has "
                f"{inputs} inputs and {outputs} outputs: use --quantization none"
            )
        weight = torch.empty((outputs, inputs), dtype=torch.float8_e4m3fn, device=device)
        return cls(weight, torch.empty((1, outputs), dtype=torch.float32, device=device), bias, kernels, gated)

    def __call__(self, x: Tensor | Fp8Rows) -> Any:
        """[tokens, inputs] → [tokens, outputs]; gated: half as many, as `Fp8Rows`."""
        values, scales = x if isinstance(x, Fp8Rows) else self.kernels.quantise(x)
        out = _product(values, scales, self.weight, self.scale, self.bias)
        return self.kernels.silu_and_mul_fp8(out) if self.gated else out

    def put(self, rows: slice, weight: Tensor) -> Tensor:
        """Set some outputs. weight: [rows, inputs], any float dtype, on any device. Returns it on the layer's device, because FP8
        values do not show what was not finite."""
        given = weight.to(self.weight.device).contiguous()
        values, scales = self.kernels.quantise(given)
        self.weight[rows].copy_(values)
        self.scale[0, rows].copy_(scales[:, 0])
        return given

    def read(self, rows: slice) -> Tensor:
        """Some outputs, [rows, inputs] float32, as exact as FP8 is."""
        return self.weight[rows].float() * self.scale[0, rows, None]


_BLOCK_ROWS = 4096
"""So many outputs are quantised at a time: it takes memory besides the weight's."""


@dataclass(slots=True)
class Int8Linear:
    """weight: [outputs, inputs] int8, until it is packed; then None. scale: [outputs] float32. bias: [outputs], or None. gated:
    SwiGLU, the gates first."""

    weight: Tensor | None
    scale: Tensor
    bias: Tensor | None
    product: PackedProduct
    kernels: Kernels
    gated: bool = False
    packed: Packed | None = None
    inputs: int = 0
    """Columns of a weight that is packed."""

    @classmethod
    def empty(
        cls, outputs: int, inputs: int, bias: Tensor | None, product: PackedProduct, kernels: Kernels, *, gated: bool = False
    ) -> "Int8Linear":
        """Raises ConfigError for a layer whose sums would not fit in 32 bits."""
        if inputs > MOST_INPUTS:
            raise ConfigError(
                f"--quantization int8 needs layers of at most {MOST_INPUTS} inputs, but one of this model has {inputs}: use none"
            )
        weight = torch.empty((outputs, inputs), dtype=torch.int8)
        return cls(weight, torch.empty(outputs), bias, product, kernels, gated)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] → [tokens, outputs], of x's dtype; gated: half as many."""
        assert self.packed is not None
        return self.product(x.float(), self.packed).to(x.dtype)

    def ungated(self, x: Tensor) -> Tensor:
        """[tokens, inputs] → [tokens, outputs], of x's dtype, before the gate."""
        assert self.packed is not None
        return self.product.ungated(x.float(), self.packed).to(x.dtype)

    def put(self, rows: slice, weight: Tensor) -> Tensor:
        """Set some outputs, before it is packed. weight: [rows, inputs], any float dtype. Returns it, because int8 does not show
        what was not finite."""
        assert self.weight is not None
        values, scales = self.weight[rows], self.scale[rows]
        for begin in range(0, len(weight), _BLOCK_ROWS):
            block = slice(begin, begin + _BLOCK_ROWS)
            moved, found = self.kernels.quantise_int8(weight[block], LARGEST_WEIGHT)
            values[block] = moved.bitwise_xor_(SIGN).view(torch.int8)
            scales[block] = found[:, 0]
        return weight

    def pack(self) -> None:
        """After this it computes, and takes no more weights."""
        assert self.weight is not None
        self.inputs = self.weight.shape[1]
        self.packed, self.weight = self.product.pack(self.weight, self.bias, self.scale, gated=self.gated), None

    def read(self, rows: slice) -> Tensor:
        """Some outputs, [rows, inputs] float32, as exact as int8 is: quantised again they give the same numbers."""
        assert self.packed is not None
        weight = self.product.unpack(self.packed, len(self.scale), self.inputs)
        return weight[rows].float() * self.scale[rows, None]


AnyLinear: TypeAlias = Linear | Fp8Linear | Int8Linear


def take_over(live: AnyLinear, new: AnyLinear) -> None:
    """Compute with the weights of another layer that is made and packed alike. They are copied into the memory of the present
    ones, whose addresses graphs and recordings hold. oneDNN's packed weights cannot be copied into, and no recording has them."""
    pairs = [(live.weight, new.weight), (live.bias, new.bias)]
    if not isinstance(live, Linear) and not isinstance(new, Linear):
        pairs.append((live.scale, new.scale))
    if not isinstance(live, Fp8Linear) and not isinstance(new, Fp8Linear) and live.packed is not None and new.packed is not None:
        if live.packed.weight.layout is torch.strided:
            pairs += zip(live.packed[:3], new.packed[:3], strict=True)
        else:
            live.packed = new.packed
    for mine, theirs in pairs:
        if mine is not None and theirs is not None:
            mine.copy_(theirs)


def check_fp8(dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError where FP8 products cannot be computed. It tries one, because that depends on torch and the card."""
    if dtype != torch.bfloat16:
        asked = str(dtype).removeprefix("torch.")
        raise ConfigError(f"--quantization fp8 computes in bfloat16, not in {asked}: give --dtype bfloat16")
    rows = torch.zeros((FP8_MULTIPLE, FP8_MULTIPLE), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.ones((FP8_MULTIPLE, 1), dtype=torch.float32, device=device)
    try:
        _product(rows, scales, rows, scales.t(), None)
    except torch.OutOfMemoryError:  # a RuntimeError too
        raise
    except (RuntimeError, ValueError) as error:
        reason = first_line(error)
        raise ConfigError(f"--quantization fp8: {device} has no FP8 products here ({reason}): use --quantization none") from error


def _product(values: Tensor, scales: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """With fast accumulation, in which Hopper keeps 14 bits of a partial sum: the exact one takes up to twice as long (pytorch
    issue 147971), and all engines that serve FP8 do without it."""
    return torch._scaled_mm(
        values, weight.t(), scale_a=scales, scale_b=scale, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )


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
"""Only some outputs of a large weight are measured, and of as many weights one after the other as no cache holds: few rows wait
for the memory in a step. Chunks do not, and take longer."""


_FEWEST_ROUNDS, _MOST_ROUNDS, _ROUNDS_S = 3, 15, 0.03
"""How often a product is measured, and in which time if that is enough for the fewest rounds. The best counts."""


_CLEARLY = 1.05
"""How much faster both weights must be than one of them, in the mean of `ROWS`, to be worth a second copy."""


_SPLIT = 1.1
"""How much faster it must be to use two products for few rows: a row's logits are the same bits beside any others, those of its
drafts among them, only as long as one product computes them all."""


_SECOND_OF_ALL, _SECOND_OF_FREE = 1 / 8, 1 / 4
"""The shares of the host's memory that second copies may take: of the whole, so that equal hosts decide alike, and of what is
free."""


Ratios = Mapping[int, float]
"""A product's time as a share of that of torch's over plain weights, for each number of rows in `ROWS`."""


_Calls = Sequence[tuple[Callable[[Tensor, Any], object], Sequence[Tensor] | Sequence[Packed]]]
"""Products of rows and a weight, and weights as each of them reads them."""


class MeasuredProduct(NamedTuple):
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

        def seconds(rows: range) -> float:
            splits_few = (1 in rows) != (_MOST_FEW_ROWS in rows)
            return math.prod(self.packed[n] if n in rows else 1.0 for n in ROWS) * (_SPLIT if splits_few else 1.0)

        return min(ranges, key=seconds)


def mean(ratios: Ratios) -> float:
    """Over all numbers of rows."""
    return math.prod(ratios.values()) ** (1 / len(ratios))


def measure(samples: Sequence[Tensor], products: Sequence[PackedProduct]) -> MeasuredProduct:
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
        (MeasuredProduct(product, found) for product, found in zip(products, ratios, strict=True)),
        key=lambda each: mean(each.packed),
    )


def pack_all(layers: Sequence[Linear], products: Sequence[PackedProduct], sharers: int, progress: Callable[[str], None]) -> int:
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
        copies = f"; second copies of them take {second_bytes / 1e6:,.0f} MB" if second_bytes else ""
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
    """The seconds of each call, over all that is given with its weights in turn."""
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
