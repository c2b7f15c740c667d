"""A step whose work has been given to the device: what is still to come of it, and how to wait for that.

Owns the events and the pinned memory through which tokens come back. Knows no threads: `wait` blocks whoever calls it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from common.engine.layer_progress import LayerProgress
from common.engine.logprobs import NO_LOGPROBS, Logprobs
from common.engine.plan import Plan, StepResult
from common.engine.pooling import Pooled
from common.engine.raw_logprobs import Told
from common.errors import TandemError
from common.ids import Int32Array


class PendingStep:
    """tokens: [sampled] int64 on the device, in the order of `Plan.sampled_rows`. told, prompt_told: the log probabilities of a
    `StepResult`; None: of nothing. pooled: its embeddings; None: it has none. failed: as in a `StepResult`. Make it when
    all of the step's work has been started: its event comes behind that. A thread that waits for the event sleeps, and keeps no
    core busy."""

    def __init__(
        self,
        plan: Plan,
        tokens: Tensor,
        progress: LayerProgress,
        told: Told | None = None,
        prompt_told: Told | None = None,
        pooled: Pooled | None = None,
        failed: Mapping[int, TandemError] | None = None,
    ) -> None:
        self._plan = plan
        self._failed = failed or {}
        self._progress = progress
        self._told = None if told is None else (told, _to_host(told.packed))
        self._prompt_told = None if prompt_told is None else (prompt_told, _to_host(prompt_told.packed))
        self._pooled = None if pooled is None else (pooled, _to_host(pooled.values))
        self._tokens = _to_host(tokens.int())
        self._event: torch.cuda.Event | None = None
        if tokens.device.type != "cpu":
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def is_complete(self) -> bool:
        """Waiting takes no time. Always so on CPU."""
        return self._event is None

    def wait(self) -> StepResult:
        """Report layers as the device writes them, and return the tokens once the whole step is done: its KV is in the pages,
        also when it sampled nothing. Waits for this step alone, not for those behind it."""
        self._progress.wait()
        if self._event is not None:
            self._event.synchronize()
        tokens: Int32Array = self._tokens.numpy()
        if self._told is None and self._prompt_told is None and self._pooled is None:
            return StepResult(self._plan, tokens, failed=self._failed)
        embeddings = {} if self._pooled is None else self._pooled[0].read(self._pooled[1])
        return StepResult(self._plan, tokens, _read(self._told), _read(self._prompt_told), embeddings, self._failed)


def _to_host(tensor: Tensor) -> Tensor:
    """Its numbers are there when the step's event has passed. On CPU it is the tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _read(told: tuple[Told, Tensor] | None) -> Logprobs:
    if told is None:
        return NO_LOGPROBS
    which, packed = told
    return which.read(packed.numpy())
