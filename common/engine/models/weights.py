"""Where the weights of a model go: memory that is allocated first and filled as a checkpoint is read.

Owns the memory of each weight, and the check that a checkpoint has exactly the weights of the model, in their shapes. Only
the tensor that is being copied is in memory twice. Does not know files or architectures.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from zlib import crc32

import torch
from torch import Tensor

from common.config import Quantization
from common.engine.kernels.port import Kernels
from common.engine.models.linear import AnyLinear, Fp8Linear, Linear, check_fp8
from common.errors import ConfigError

_NAMED = 5
"""How many weights an error names."""
_RANDOM_SPREAD = 0.02
"""Standard deviation of random weights, as models are initialised before training."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a merged layer. name: in the checkpoint, without .weight or .bias. outputs: how many rows."""

    name: str
    outputs: int


@dataclass(frozen=True, slots=True)
class Slot:
    """shape: of the weight in the checkpoint. put: copies it to its place, and returns what is not finite if the weight is not
    finite there, on the device."""

    shape: tuple[int, ...]
    put: Callable[[Tensor], Tensor]


class WeightSlots:
    """Makes the tensors of a model, uninitialised, and fills them. quantization: of linear layers. Raises ConfigError."""

    def __init__(self, dtype: torch.dtype, device: torch.device, kernels: Kernels, quantization: Quantization = "none") -> None:
        if quantization == "fp8":
            check_fp8(dtype, device)
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self._quantization = quantization
        self.slots: dict[str, Slot] = {}
        self._tied: dict[str, Tensor] = {}

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The weight of this name, and nothing else, in one tensor."""
        made = self.empty(*shape)
        self.expect(name, made)
        return made

    def linear(self, parts: Sequence[Part], inputs: int, bias: bool) -> AnyLinear:
        """One layer of several in the checkpoint, one below the other, so that they are one matrix product."""
        outputs = sum(part.outputs for part in parts)
        added = self.empty(outputs) if bias else None
        made: AnyLinear
        if self._quantization == "fp8":
            made = Fp8Linear.empty(outputs, inputs, added, self._device, self._kernels)
        else:
            made = Linear(self.empty(outputs, inputs), added)
        begin = 0
        for part in parts:
            rows = slice(begin, begin + part.outputs)
            self.slots[f"{part.name}.weight"] = Slot((part.outputs, inputs), partial(made.put, rows))
            if added is not None:
                self.expect(f"{part.name}.bias", added[rows])
            begin += part.outputs
        return made

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def expect(self, name: str, place: Tensor) -> None:
        """The weight of this name goes to `place`, which may be a part of a larger tensor, and is converted to its dtype."""
        self.slots[name] = Slot(tuple(place.shape), place.copy_)

    def tie(self, name: str, place: Tensor) -> None:
        """The checkpoint may have a weight of this name. If it does, the weight equals what goes to `place`."""
        self._tied[name] = place

    def fill_random(self, seed: int = 0) -> None:
        """Random weights, for measuring. They depend on the seed, the shapes and the kind of device. Norms are ones."""
        generator = torch.Generator(self._device)
        for name, slot in self.slots.items():
            weight = self.empty(*slot.shape)
            if weight.ndim == 1 and name.endswith(".weight"):
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, _RANDOM_SPREAD, generator=generator.manual_seed(seed + crc32(name.encode())))
            slot.put(weight)

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each weight to its place. Raises ConfigError when one is missing, unknown, of another shape or not finite."""
        missing = dict(self.slots)
        ranges: dict[str, Tensor] = {}
        unknown: list[str] = []
        copies: dict[str, Tensor] = {}
        for name, tensor in weights:
            slot = missing.pop(name, None)
            if name in self._tied:
                copies[name] = tensor
            elif slot is None:
                unknown.append(name)
            elif tensor.shape != slot.shape:
                raise ConfigError(
                    f"{name} has the shape {list(tensor.shape)} in the checkpoint, but {list(slot.shape)} by config.json"
                )
            else:
                ranges[name] = torch.stack(torch.aminmax(slot.put(tensor)))  # both are NaN if one item is
        if missing:
            raise ConfigError(f"the checkpoint lacks weights that its config.json asks for: {_listed(missing)}")
        if unknown:
            raise ConfigError(f"the checkpoint has weights that its config.json does not ask for: {_listed(unknown)}")
        self._refuse_infinite(ranges)
        for name, tensor in copies.items():
            place = self._tied[name]
            if tensor.shape != place.shape or not torch.equal(tensor.to(place), place):
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


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMED
    return ", ".join(ordered[:_NAMED]) + (f" and {more} more" if more > 0 else "")
