"""The forwards of decode steps on CPU: recorded for each number of rows at the start, and replayed as one call of C.

Owns the recordings and what they read. Does not know rows, sampling, or how a call is recorded (`native/recording.py`). A forward
that torch has a part in, as that of a mixture of experts, is computed as it always was.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from common.engine.attention.port import Attention
from common.engine.kernels.port import Kernels
from common.engine.kv_memory import KVMemory
from common.engine.models.port import Model
from common.engine.native.recording import CannotRecord, Recorder, Recording
from common.engine.paged_step import PagedStep


class RecordedForwards:
    """model: its `capturable` is true. attention: planned before each step; what that changes is not part of a recording."""

    def __init__(self, recorder: Recorder, model: Model, memory: KVMemory, attention: Attention, kernels: Kernels) -> None:
        self._recorder = recorder
        self._model, self._memory, self._attention, self._kernels = model, memory, attention, kernels
        self._recordings: dict[int, tuple[Tensor, Recording]] = {}

    def record(self, sizes: Iterable[int]) -> str | None:
        """For these numbers of rows, as far as it is possible. Returns why it is not for one of them; None: it is for all."""
        refused = None
        for size in sizes:
            inputs = torch.zeros(4, size, dtype=torch.int64)
            try:
                recording = self._recorder.record(partial(self._forward, inputs.unbind()))
            except CannotRecord as error:
                refused = str(error)
            else:
                self._recordings[size] = inputs, recording
        return refused

    def __contains__(self, size: int) -> bool:
        return size in self._recordings

    def logits(
        self, token_ids: Tensor, positions: Tensor, pages: Tensor, slots: Tensor, between: Callable[[], None] | None = None
    ) -> Tensor:
        """Of a step that is recorded. All [rows] int64. pages, slots: where the tokens' KV is written. between: called at each
        layer; None: not wanted. Returns [rows, vocab] float32, which lasts until the next call."""
        inputs, recording = self._recordings[token_ids.shape[0]]
        torch.stack((token_ids, positions, pages, slots), out=inputs)
        return recording.run(between)

    def _forward(self, inputs: tuple[Tensor, ...], written: Callable[[int], None]) -> Tensor:
        token_ids, positions, pages, slots = inputs
        step = PagedStep(self._memory, self._attention, self._kernels, pages, slots, written)
        return self._model.logits(self._model.hidden(token_ids, positions, step))
