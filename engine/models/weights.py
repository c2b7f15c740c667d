"""Where the weights of a model go: memory that is allocated first and filled as a checkpoint is read.

Owns the memory of each weight, and the check that a checkpoint has exactly the weights of the model, in their shapes. Of several
ranks, each has parts of some weights and nothing of others (`shape.share_of`), and reads no more than that. Only what is being
copied is in memory twice. Does not know files or architectures.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor

from common.config import LoadFormat, Quantization
from common.errors import ConfigError
from engine.cpu.products import float_products, int8_product
from engine.models.linear import Activation, AnyLinear, Fp8Linear, Int8Linear, Linear, check_fp8, pack_all, take_over
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
    """shape: of the weight in the checkpoint. cut: what of it this rank has. put: copies that to its place, before anything is
    packed, and returns what is not finite if the weight is not finite there, on the device. read: what is at its place."""

    shape: tuple[int, ...]
    put: Callable[[Tensor], Tensor]
    read: Callable[[], Tensor]
    cut: Cut = ()

    @property
    def items(self) -> int:
        """How many numbers this rank has of it."""
        held = [part.stop - part.start for part in self.cut]
        return int(prod(held) * prod(self.shape[len(held) :]))


class WeightSlots:
    """Makes the tensors of a model, uninitialised, and fills them. quantization: of linear layers. only: the weights that are to
    be filled; what has none of them takes no memory, and is not to compute. None: all are. pinned: in memory of the host from
    which a device copies fast. Raises ConfigError."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        quantization: Quantization = "none",
        only: Set[str] | None = None,
        *,
        pinned: bool = False,
    ) -> None:
        if quantization == "fp8":
            check_fp8(dtype, device)
        self._int8_product = int8_product(device, kernels) if quantization == "int8" else None
        self._int8: list[tuple[Int8Linear, Tensor | None]] = []
        self._only, self._pinned = only, pinned
        self.dtype = dtype
        self._device = device
        self._kernels = kernels
        self._quantization = quantization
        self.slots: dict[str, Slot] = {}
        self._elsewhere: dict[str, tuple[int, ...]] = {}
        """The shapes of weights that are not read here."""
        self._tied: dict[str, tuple[Slot, Tensor]] = {}
        self._float_products = [] if quantization == "int8" else float_products(dtype, device, kernels)
        self._packable: dict[str, Linear] = {}
        """Those of `_layers` that may be packed, in the order in which they were made."""
        self._layers: dict[str, AnyLinear] = {}
        """All linear layers, each by the name of its first part."""
        self._tensors: dict[str, Tensor] = {}
        """All other weights."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The weight of this name, and nothing else, in one tensor."""
        made = self.empty(*shape, names=(name,))
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
        name, names = parts[0].name, [f"{part.name}.{kind}" for part in parts for kind in ("weight", "bias")]
        added = self.empty(outputs, names=names) if bias and adds_bias else None
        gate = self._kernels.silu_and_mul if gated else None
        made: AnyLinear
        if not self._is_wanted(names):
            for part in parts:
                self.expect_elsewhere(f"{part.name}.weight", part.outputs, inputs)
                if bias:
                    self.expect_elsewhere(f"{part.name}.bias", part.outputs)
            return Linear(self.empty(outputs, len(columns), names=names), added, gate)
        if self._quantization == "fp8":
            made = Fp8Linear.empty(outputs, len(columns), added, self._device, self._kernels, gated=gated)
        elif self._quantization == "int8":
            made = self._empty_int8(outputs, len(columns), added, gated=gated)
        else:
            made = self.product(name, self.empty(outputs, len(columns), names=names), added, gate)
        self._layers[name] = made
        begin = 0
        for part in parts:
            rows, cut = slice(begin, begin + len(part.rows)), (_slice(part.rows), _slice(columns))
            self.slots[f"{part.name}.weight"] = Slot(
                (part.outputs, inputs), partial(made.put, rows), partial(made.read, rows), cut
            )
            if added is not None:
                place = added[rows]
                self.slots[f"{part.name}.bias"] = Slot((part.outputs,), place.copy_, place.clone, cut[:1])
            elif bias:
                self.expect_elsewhere(f"{part.name}.bias", part.outputs)
            begin += len(part.rows)
        return made

    def head(self, name: str, weight: Tensor) -> AnyLinear:
        """The output head, over a weight of `rows`. name: of that weight, which is the layer's alone, or one that is tied."""
        shared = name not in self._tensors
        if weight.is_meta:
            return Linear(weight, None)
        if self._quantization == "int8":
            made: AnyLinear = self._empty_int8(weight.shape[0], weight.shape[1], source=weight)
        else:
            made = self.product(name, weight, shared=shared)
        self._layers[name] = made
        if not shared:  # the layer may drop the plain weight
            slot = self.slots[name]
            del self._tensors[name]
            rows = slice(0, slot.cut[0].stop - slot.cut[0].start)
            self.slots[name] = Slot(slot.shape, slot.put, partial(made.read, rows), slot.cut)
        return made

    def product(
        self, name: str, weight: Tensor, bias: Tensor | None = None, gate: Activation | None = None, *, shared: bool = False
    ) -> Linear:
        """A layer in the model's dtype. shared: the weight is used elsewhere too."""
        made = Linear(weight, bias, gate, shared)
        if self._float_products:
            self._packable[name] = made
        return made

    def pack(self, sharers: int, progress: Callable[[str], None]) -> int:
        """Pack what is faster so, when all weights are filled. sharers: processes of this host that have equal parts of it.
        Returns `Model.spared_bytes`."""
        self._pack_int8()
        self._drop_puts()
        return pack_all(list(self._packable.values()), self._float_products, sharers, progress)

    def pack_as(self, other: "WeightSlots") -> None:
        """Pack what the same layers of another one have packed."""
        self._pack_int8()
        self._drop_puts()
        for name in self._packable.keys() & other._packable.keys():
            self._packable[name].pack_as(other._packable[name])

    def take_over(self, other: "WeightSlots") -> None:
        """The weights that another one has, which is made and packed alike, are copied into the memory of these."""
        for name, new in other._layers.items():
            take_over(self._layers[name], new)
        for name, tensor in other._tensors.items():
            self._tensors[name].copy_(tensor)

    def require(self, weights: Iterable[tuple[str, Stored]]) -> None:
        """Raises ConfigError when `fill` would refuse one of these for its name or shape."""
        shapes = {name: slot.shape for name, slot in self.slots.items()} | self._elsewhere
        shapes |= {name: slot.shape for name, (slot, _) in self._tied.items()}
        unknown: list[str] = []
        for name, stored in weights:
            if name not in shapes:
                unknown.append(name)
            else:
                _require_shape(name, stored, shapes[name])
        _refuse_unknown(unknown)

    def fill_from(self, other: "WeightSlots", weights: Iterable[tuple[str, Stored]], given: Set[str]) -> None:
        """These weights of a checkpoint, and what shares their memory as another one has it. given: the names of all that come.
        Raises ConfigError as `fill` does."""
        rest = self.slots.keys() - given
        for name in rest:  # first: a copy of a tied weight is compared with that one
            self.slots[name].put(other.slots[name].read())
        self.fill(weights, rest | self._elsewhere.keys())

    def nbytes(self, only: Set[str] | None = None) -> int:
        """How much memory at least these weights take in another one while it is filled. None: all."""
        return sum(slot.items for name, slot in self.slots.items() if only is None or name in only) * self.dtype.itemsize

    def _pack_int8(self) -> None:
        while self._int8:
            layer, source = self._int8.pop()
            if source is not None:
                layer.put(slice(None), source)
            layer.pack()

    def _drop_puts(self) -> None:
        """Nothing is put any more: what does it holds plain weights, which are to be dropped."""
        self.slots = {name: Slot(slot.shape, _refuse_put, slot.read, slot.cut) for name, slot in self.slots.items()}
        self._tied.clear()

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
        made = self.empty(rows, inputs, names=(name,))
        if made.is_meta:
            self.expect_elsewhere(name, outputs, inputs)
            return made
        made[len(here) :].zero_()
        place = made[: len(here)]
        self._tensors[name] = made
        self.slots[name] = Slot((outputs, inputs), place.copy_, place.clone, (_slice(here),))
        return made

    def empty(self, *shape: int, names: Iterable[str]) -> Tensor:
        """names: the weights that will be in it."""
        if not self._is_wanted(names):
            return torch.empty(shape, dtype=self.dtype, device="meta")
        return torch.empty(shape, dtype=self.dtype, device=self._device, pin_memory=self._pinned)

    def expect(self, name: str, place: Tensor) -> None:
        """The weight of this name goes to `place`, which may be a part of a larger tensor, and is converted to its dtype."""
        if not self._is_wanted((name,)):
            self.expect_elsewhere(name, *place.shape)
            return
        self._tensors[name] = place
        self.slots[name] = Slot(tuple(place.shape), place.copy_, place.clone)

    def expect_elsewhere(self, name: str, *shape: int) -> None:
        """The weight of this name is not to be read here: it is for other ranks, or not wanted."""
        self._elsewhere[name] = shape

    def _is_wanted(self, names: Iterable[str]) -> bool:
        return self._only is None or any(name in self._only for name in names)

    def tie(self, name: str, other: str, place: Tensor) -> None:
        """The checkpoint may have a weight of this name. If it does, it equals the weight `other`, whose part is in `place`."""
        if other in self.slots:
            self._tied[name] = self.slots[other], place

    def fill_random(self, seed: int = 0) -> None:
        """Random weights, for measuring. They depend on the seed, the shapes and the kind of device, not on the number of ranks:
        each makes the whole of a weight of which it has a part. Norms are ones."""
        generator = torch.Generator(self._device)
        for name, slot in self.slots.items():
            weight = self.empty(*slot.shape, names=(name,))
            if weight.ndim == 1 and name.endswith(".weight"):
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, _RANDOM_SPREAD, generator=generator.manual_seed(seed + crc32(name.encode())))
            slot.put(weight[slot.cut])

    def fill(self, weights: Iterable[tuple[str, Stored]], optional: Set[str] = frozenset()) -> None:
        """Copy each weight to its place. optional: names that may be missing. Raises ConfigError when another one is, or one is
        unknown, of another shape or not finite."""
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
            else:
                _require_shape(name, stored, shape)
                if name in self.slots:
                    slot = self.slots[name]
                    found = slot.put(stored[slot.cut])
                    if found.numel():
                        ranges[name] = torch.stack(torch.aminmax(found))  # both are NaN if one item is
        if lacking := missing.keys() - optional:
            raise ConfigError(f"the checkpoint lacks weights that its config.json asks for: {_listed(lacking)}")
        _refuse_unknown(unknown)
        self._refuse_infinite(ranges)
        for name, stored in copies.items():
            slot, place = self._tied[name]
            if tuple(stored.shape) != slot.shape or not torch.equal(stored[slot.cut].to(place), place):
                raise ConfigError(
                    f"the weight {name} differs from the embedding, but config.json has tie_word_embeddings true: make it false"
                )

    def _refuse_infinite(self, ranges: Mapping[str, Tensor]) -> None:
        """ranges: the least and the largest item of each weight, on the device. It waits for the device once."""
        if not ranges:
            return
        finite = torch.stack([found.float() for found in ranges.values()]).isfinite().all(-1).tolist()
        bad = [name for name, fine in zip(ranges, finite, strict=True) if not fine]
        if bad:
            fix = "; float16 ends at 65504: give --dtype bfloat16" if self.dtype == torch.float16 else ""
            asked = str(self.dtype).removeprefix("torch.")
            raise ConfigError(f"the checkpoint has weights that are infinite or not numbers in {asked}: {_listed(bad)}{fix}")


def _require_shape(name: str, stored: Stored, shape: tuple[int, ...]) -> None:
    if tuple(stored.shape) != shape:
        raise ConfigError(f"{name} has the shape {list(stored.shape)} in the checkpoint, but {list(shape)} by config.json")


def _refuse_unknown(names: Sequence[str]) -> None:
    if names:
        raise ConfigError(f"the checkpoint has weights that its config.json does not ask for: {_listed(names)}")


def _refuse_put(weight: Tensor) -> Tensor:
    raise AssertionError("what is packed takes no more weights")


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
