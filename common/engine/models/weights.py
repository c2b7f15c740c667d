"""Where the weights of a model go: memory that is allocated first and filled as a checkpoint is read.

Owns the memory of each weight, and the check that a checkpoint has exactly the weights of the model, in their shapes. Only
the tensor that is being copied is in memory twice. Does not know files or architectures.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.models.linear import Linear
from common.errors import ConfigError

_NAMED = 5
"""How many weights an error names."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a merged layer. name: in the checkpoint, without .weight or .bias. outputs: how many rows."""

    name: str
    outputs: int


@dataclass(frozen=True, slots=True)
class Slot:
    """shape: of the weight in the checkpoint. put: copies it to its place."""

    shape: tuple[int, ...]
    put: Callable[[Tensor], object]


class WeightSlots:
    """Makes the tensors of a model, uninitialised, and fills them."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self.slots: dict[str, Slot] = {}
        self._tied: dict[str, Tensor] = {}

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The weight of this name, and nothing else, in one tensor."""
        made = self.empty(*shape)
        self.expect(name, made)
        return made

    def linear(self, parts: Sequence[Part], inputs: int, bias: bool) -> Linear:
        """One layer of several in the checkpoint, one below the other, so that they are one matrix product."""
        outputs = sum(part.outputs for part in parts)
        made = Linear(self.empty(outputs, inputs), self.empty(outputs) if bias else None)
        begin = 0
        for part in parts:
            rows = slice(begin, begin + part.outputs)
            self.expect(f"{part.name}.weight", made.weight[rows])
            if made.bias is not None:
                self.expect(f"{part.name}.bias", made.bias[rows])
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

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each weight to its place. Raises ConfigError when one is missing, unknown or of another shape."""
        missing = dict(self.slots)
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
                slot.put(tensor)
        if missing:
            raise ConfigError(f"the checkpoint lacks weights that its config.json asks for: {_listed(missing)}")
        if unknown:
            raise ConfigError(f"the checkpoint has weights that its config.json does not ask for: {_listed(unknown)}")
        for name, tensor in copies.items():
            place = self._tied[name]
            if tensor.shape != place.shape or not torch.equal(tensor.to(place), place):
                raise ConfigError(
                    f"the weight {name} differs from the embedding, but config.json has tie_word_embeddings true: make it false"
                )


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMED
    return ", ".join(ordered[:_NAMED]) + (f" and {more} more" if more > 0 else "")
