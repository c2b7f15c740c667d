"""Staging: what the host tells the device about a step, in one copy that nobody waits for.

Owns the pinned buffers. Knows nothing of what the arrays mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.ids import Int64Array

BUFFERS = 4
"""More than the steps in flight, so that a buffer's former copy has long been made when its turn comes again."""

_ALIGNED = 2
"""Every tensor begins at a multiple of 16 bytes, because Triton compiles a kernel anew for tensors that do not."""


@dataclass(slots=True, eq=False)
class _Pinned:
    """Host memory that the device copies from, and the event behind the last copy."""

    numbers: Tensor
    copied: "torch.cuda.Event"


class Staging:
    """On CPU the arrays are used where they lie."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_Pinned] = []
        self._turn = 0

    def send(self, arrays: Sequence[Int64Array]) -> list[Tensor]:
        """A tensor on the device for each array, [n] int64. The arrays may be changed after it returns, but not on CPU."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        begins = np.cumsum([0, *(len(array) + len(array) % _ALIGNED for array in arrays)]).tolist()
        buffer = self._next(begins[-1])
        numbers = buffer.numbers.numpy()
        for begin, array in zip(begins, arrays, strict=False):
            numbers[begin : begin + len(array)] = array
        sent = buffer.numbers[: begins[-1]].to(self._device, non_blocking=True)
        buffer.copied.record()
        return [sent[begin : begin + len(array)] for begin, array in zip(begins, arrays, strict=False)]

    def _next(self, numbers: int) -> _Pinned:
        if len(self._buffers) < BUFFERS:
            self._buffers.append(_pinned(numbers))
        buffer = self._buffers[self._turn]
        buffer.copied.synchronize()  # it has passed, unless BUFFERS steps were launched without one returning
        if len(buffer.numbers) < numbers:
            buffer = self._buffers[self._turn] = _pinned(numbers)
        self._turn = (self._turn + 1) % BUFFERS
        return buffer


def _pinned(numbers: int) -> _Pinned:
    """Room for at least that many. A power of two, because pinning memory is slow and the next step may be larger."""
    room = 2 ** max(12, (numbers - 1).bit_length())
    return _Pinned(torch.empty(room, dtype=torch.int64, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
