"""The forwards of decode steps on CPU: recorded at the first step of so many rows, and replayed as one call of C by all others.

Owns the recordings and what they read. Does not know rows, sampling, or how a call is recorded (`native/recording.py`). A forward
that torch has a part in, as that of a mixture of experts, is computed as it always was.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from common.engine.attention.port import Attention
from common.engine.kernels.port import Kernels
from common.engine.kv_memory import KVMemory
from common.engine.models.port import Model
from common.engine.native.recording import CannotRecord, Recorder, Recording
from common.engine.paged_step import PagedStep


class RecordedForwards:
    """model: whose `capturable` is true. attention: planned before each step; whatever changes then is not recorded."""

    def __init__(self, recorder: Recorder, model: Model, memory: KVMemory, attention: Attention, kernels: Kernels) -> None:
        self._recorder = recorder
        self._model, self._memory, self._attention, self._kernels = model, memory, attention, kernels
        self._made: dict[int, tuple[Tensor, Recording | None]] = {}

    def logits(
        self, token_ids: Tensor, positions: Tensor, pages: Tensor, slots: Tensor, between: Callable[[], None] | None = None
    ) -> Tensor:
        """All [rows] int64. pages, slots: where the tokens' KV is written. between: called at each layer; None: not wanted.
        Returns [rows, vocab] float32, which lasts until the next call."""
        given, rows = (token_ids, positions, pages, slots), token_ids.shape[0]
        if rows not in self._made:
            return self._first(given)
        inputs, recording = self._made[rows]
        torch.stack(given, out=inputs)
        if recording is None:
            return self._forward(inputs, lambda _: None if between is None else between())
        return recording.run(between)

    def refused(self, token_ids: Tensor, positions: Tensor, pages: Tensor, slots: Tensor) -> str | None:
        """Compute one step as `logits` does. Returns why it cannot be recorded; None: it is."""
        inputs = torch.stack((token_ids, positions, pages, slots))
        try:
            _, recording = self._recorder.record(lambda mark: self._forward(inputs, mark))
        except CannotRecord as error:
            return str(error)
        self._made[len(token_ids)] = inputs, recording
        return None

    def _first(self, given: tuple[Tensor, ...]) -> Tensor:
        """Of so many rows."""
        inputs, recording = torch.stack(given), None
        try:
            logits, recording = self._recorder.record(lambda mark: self._forward(inputs, mark))
        except CannotRecord:  # a part of it may be computed and written again
            logits = self._forward(inputs, lambda _: None)
        self._made[len(given[0])] = inputs, recording
        return logits

    def _forward(self, inputs: Tensor, written: Callable[[int], None]) -> Tensor:
        token_ids, positions, pages, slots = inputs.unbind()
        step = PagedStep(self._memory, self._attention, self._kernels, pages, slots, written)
        return self._model.logits(self._model.hidden(token_ids, positions, step))
