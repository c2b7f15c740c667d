"""The port of a logits processor: what changes the logits of some rows before their tokens are drawn.

Owns no implementation. A processor keeps state for each row, begins it anew at the row's `RowStart`, and brings it forward with
each token that the row samples. Rows that no processor concerns cost nothing, and take the graph's token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.engine.plan import RowStart
from common.errors import TandemError
from common.ids import Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class SampledRows:
    """Some rows that sample, as the host and as the device name them. All [rows] int64, in the same order.

    host, device: the rows of the batch. host_at, at: which rows of the logits are theirs.
    """

    host: Int64Array
    device: Tensor
    host_at: Int64Array
    at: Tensor
    failed: dict[int, TandemError] = field(default_factory=dict)
    """Rows whose answers cannot go on, and why. What they sample counts for nothing; a processor adds to it in `apply`."""


class LogitsProcessor(Protocol):
    """All calls come from the engine's thread, in the order of the plans. Only `apply` may wait for the step before.

    What `start` and `apply` copy to the device goes through a `Staging` of the processor's own: the host waits for no copy.
    """

    def start(self, starts: Sequence[RowStart]) -> None:
        """Begin these rows anew: whatever was known of them is over."""

    def concerns(self, rows: Int64Array) -> NDArray[np.bool_]:
        """Of each row, whether this processor may change its logits or wants its tokens. A row that it does not concern at its
        start it does not concern later. rows: [rows], those that sample in the next step."""

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        """Change in place those rows of the logits that are theirs, `rows.at`. logits: [any rows, vocab] float32, contiguous.
        rows: those that it concerns, no others."""

    def sampled(self, rows: SampledRows, tokens: Tensor) -> None:
        """The step has sampled these tokens. tokens: [rows] int64, on the device. rows: as given to `apply` just before."""
