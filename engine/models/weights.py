"""Where the weights of a model go: memory that is allocated first and filled as a checkpoint is read.

Owns the memory of each weight, and the check that a checkpoint has exactly the weights of the model, in their shapes. Of several
ranks, each has parts of some weights and nothing of others (`shape.share_of`), and reads no more than that. Only what is being
copied is in memory twice. Does not know files or architectures.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor

from common.config import LoadFormat, Quantization
from common.errors import ConfigError
from engine.cpu.products import float_products, int8_product
from engine.models.linear import AnyLinear, Fp8Linear, Gate, Int8Linear, Linear, check_fp8, pack_all
from engine.parallel import ALONE, Group
from engine.torch_kernels import Kernels

Cut = tuple[slice, ...]
"""A part of a tensor: a range of each of its first dimensions; of the others, all."""
_NAMED = 5
"""How many weights an error names."""
_RANDOM_SPREAD = 0.02
"""Standard deviation of random weights, as models are initialised before training."""


class Stored(Protocol):
    """A weight of a checkpoint: a tensor, or one that is still in its file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, cut: Cut, /) -> Tensor:
        """Only this part is read."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Some rows of a merged layer. name: in the checkpoint, without .weight or .bias. outputs: how many rows it has there. here:
    which of them this rank has; None: all."""

    name: str
    outputs: int
    here: range | None = None

    @property
    def rows(self) -> range:
        return range(self.outputs) if self.here is None else self.here


@dataclass(frozen=True, slots=True)
class Slot:
    """shape: of the weight in the checkpoint. cut: what of it this rank has. put: copies that to its place, and returns what is
    not finite if the weight is not finite there, on the device."""

    shape: tuple[int, ...]
    put: Callable[[Tensor], Tensor]
    cut: Cut = ()


class WeightSlots:
    """Makes the tensors of a model, uninitialised, and fills them. quantization: of linear layers. Raises ConfigError."""

    def __init__(self, dtype: torch.dtype, device: torch.device, kernels: Kernels, quantization: Quantization = "none") -> None:
        if quantization == "fp8":
            check_fp8(dtype, device)
        self._int8_product = int8_product(device, kernels) if quantization == "int8" else None
        self._int8: list[tuple[Int8Linear, Tensor | None]] = []
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self._quantization = quantization
        self.slots: dict[str, Slot] = {}
        self._elsewhere: dict[str, tuple[int, ...]] = {}
        self._tied: dict[str, tuple[Slot, Tensor]] = {}
        self._float_products = [] if quantization == "int8" else float_products(dtype, device, kernels)
        self._packable: list[Linear] = []

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The weight of this name, and nothing else, in one tensor."""
        made = self.empty(*shape)
        self.expect(name, made)
        return made

    def linear(
        self,
        parts: Sequence[WeightPart],
        inputs: int,
        bias: bool,
        inputs_here: range | None = None,
        adds_bias: bool = True,
        gated: bool = False,
    ) -> AnyLinear:
        """One layer of several in the checkpoint, one below the other, so that they are one matrix product. inputs: in the
        checkpoint. inputs_here: which of them this rank has; None: all. adds_bias: whether it has the bias, if there is one.
        gated: SwiGLU (Shazeer 2020), the gates first: the layer gives silu(gate) * the other half."""
        outputs = sum(len(part.rows) for part in parts)
        columns = range(inputs) if inputs_here is None else inputs_here
        added = self.empty(outputs) if bias and adds_bias else None
        gate = self._kernels.silu_and_mul if gated else None
        made: AnyLinear
        if self._quantization == "fp8":
            made = Fp8Linear.empty(outputs, len(columns), added, self._device, self._kernels, gate)
        elif self._quantization == "int8":
            made = self._empty_int8(outputs, len(columns), added, gated=gated)
        else:
            made = self.product(self.empty(outputs, len(columns)), added, gate)
        begin = 0
        for part in parts:
            rows, cut = slice(begin, begin + len(part.rows)), (_slice(part.rows), _slice(columns))
            self.slots[f"{part.name}.weight"] = Slot((part.outputs, inputs), partial(made.put, rows), cut)
            if added is not None:
                self.slots[f"{part.name}.bias"] = Slot((part.outputs,), added[rows].copy_, cut[:1])
            elif bias:
                self.expect_elsewhere(f"{part.name}.bias", part.outputs)
            begin += len(part.rows)
        return made

    def head(self, weight: Tensor, *, shared: bool = False) -> AnyLinear:
        """The output head. shared: the weight is that of the embedding too."""
        if self._quantization == "int8":
            return self._empty_int8(weight.shape[0], weight.shape[1], source=weight)
        return self.product(weight, shared=shared)

    def product(self, weight: Tensor, bias: Tensor | None = None, gate: Gate | None = None, *, shared: bool = False) -> Linear:
        """A layer in the model's dtype. shared: the weight is used elsewhere too."""
        made = Linear(weight, bias, gate, shared)
        if self._float_products:
            self._packable.append(made)
        return made

    def pack(self, sharers: int, progress: Callable[[str], None]) -> int:
        """Pack what is faster so, when all weights are filled. sharers: processes of this host that have equal parts of it.
        Returns `Model.spared_bytes`."""
        self.slots.clear()  # they hold plain weights, which are to be dropped
        self._tied.clear()
        while self._int8:
            layer, source = self._int8.pop()
            if source is not None:
                layer.put(slice(None), source)
            layer.pack()
        return pack_all(self._packable, self._float_products, sharers, progress)

    def _empty_int8(
        self, outputs: int, inputs: int, bias: Tensor | None = None, source: Tensor | None = None, gated: bool = False
    ) -> Int8Linear:
        """source: the weight that it gets in the end; None: parts are put as they are read."""
        assert self._int8_product is not None
        made = Int8Linear.empty(outputs, inputs, bias, self._int8_product, self._kernels, gated=gated)
        self._int8.append((made, source))
        return made

    def rows(self, name: str, here: range, rows: int, outputs: int, inputs: int) -> Tensor:
        """Some rows of the weight of this name, [outputs, inputs] in the checkpoint, and zeros below them: [rows, inputs]."""
        made = self.empty(rows, inputs)
        made[len(here) :].zero_()
        self.slots[name] = Slot((outputs, inputs), made[: len(here)].copy_, (_slice(here),))
        return made

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def expect(self, name: str, place: Tensor) -> None:
        """The weight of this name goes to `place`, which may be a part of a larger tensor, and is converted to its dtype."""
        self.slots[name] = Slot(tuple(place.shape), place.copy_)

    def expect_elsewhere(self, name: str, *shape: int) -> None:
        """The weight of this name is for other ranks: it must be there, and is not read."""
        self._elsewhere[name] = shape

    def tie(self, name: str, other: str, place: Tensor) -> None:
        """The checkpoint may have a weight of this name. If it does, it equals the weight `other`, whose part is in `place`."""
        self._tied[name] = self.slots[other], place

    def fill_random(self, seed: int = 0) -> None:
        """Random weights, for measuring. They depend on the seed, the shapes and the kind of device, not on the number of ranks:
        each makes the whole of a weight of which it has a part. Norms are ones."""
        generator = torch.Generator(self._device)
        for name, slot in self.slots.items():
            weight = self.empty(*slot.shape)
            if weight.ndim == 1 and name.endswith(".weight"):
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, _RANDOM_SPREAD, generator=generator.manual_seed(seed + crc32(name.encode())))
            slot.put(weight[slot.cut])

    def fill(self, weights: Iterable[tuple[str, Stored]]) -> None:
        """Copy each weight to its place. Raises ConfigError when one is missing, unknown, of another shape or not finite."""
        missing = {name: slot.shape for name, slot in self.slots.items()} | self._elsewhere
        ranges: dict[str, Tensor] = {}
        unknown: list[str] = []
        copies: dict[str, Stored] = {}
        for name, stored in weights:
            shape = missing.pop(name, None)
            if name in self._tied:
                copies[name] = stored
            elif shape is None:
                unknown.append(name)
            elif tuple(stored.shape) != shape:
                raise ConfigError(
                    f"{name} has the shape {list(stored.shape)} in the checkpoint, but {list(shape)} by config.json"
                )
            elif name in self.slots:
                slot = self.slots[name]
                found = slot.put(stored[slot.cut])
                if found.numel():
                    ranges[name] = torch.stack(torch.aminmax(found))  # both are NaN if one item is
        if missing:
            raise ConfigError(f"the checkpoint lacks weights that its config.json asks for: {_listed(missing)}")
        if unknown:
            raise ConfigError(f"the checkpoint has weights that its config.json does not ask for: {_listed(unknown)}")
        self._refuse_infinite(ranges)
        for name, stored in copies.items():
            slot, place = self._tied[name]
            if tuple(stored.shape) != slot.shape or not torch.equal(stored[slot.cut].to(place), place):
                raise ConfigError(
                    f"the weight {name} differs from the embedding, but config.json has tie_word_embeddings true: make it false"
                )

    def _refuse_infinite(self, ranges: Mapping[str, Tensor]) -> None:
        """ranges: the least and the largest item of each weight, on the device. It waits for the device once."""
        finite = torch.stack([found.float() for found in ranges.values()]).isfinite().all(-1).tolist()
        bad = [name for name, fine in zip(ranges, finite, strict=True) if not fine]
        if bad:
            fix = "; float16 ends at 65504: give --dtype bfloat16" if self._dtype == torch.float16 else ""
            asked = str(self._dtype).removeprefix("torch.")
            raise ConfigError(f"the checkpoint has weights that are infinite or not numbers in {asked}: {_listed(bad)}{fix}")


def _slice(held: range) -> slice:
    return slice(held.start, held.stop)


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMED
    return ", ".join(ordered[:_NAMED]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class Loading:
    """How an instance loads its model. context_tokens: the longest sequence that it was asked for. group: the ranks that share
    the weights. sharers: processes of this host that have equal parts of its memory."""

    dtype: torch.dtype
    device: torch.device
    context_tokens: int
    load_format: LoadFormat = "auto"
    quantization: Quantization = "none"
    group: Group = ALONE
    sharers: int = 1
