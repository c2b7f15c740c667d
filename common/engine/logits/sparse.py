"""Numbers that belong to some logits of some rows, side by side on the device.

Owns when they are copied there: only after the set of rows, or what one of them holds, has changed. Does not know what they mean.
"""

import numpy as np
import torch
from torch import Tensor

from common.engine.logits.port import SampledRows
from common.engine.staging import Staging
from common.ids import Int64Array


class SparseRows:
    """Each row holds some entries, an entry is a column of `numbers` numbers; the first of them is a token. rows: how many."""

    def __init__(self, rows: int, numbers: int, device: torch.device) -> None:
        self._nothing = np.empty((1 + numbers, 0), dtype=np.int64)
        self._of_row: dict[int, Int64Array] = {}
        self._staging = Staging(device)
        self._table: Tensor | None = None
        self._rows = rows

    def put(self, row: int, entries: Int64Array) -> None:
        """The row holds these. entries: [numbers, entries] int64."""
        self._of_row[row] = np.concatenate([np.full((1, entries.shape[1]), row), entries])
        self._table = None

    def drop(self, row: int) -> None:
        """The row holds none. Idempotent."""
        if self._of_row.pop(row, None) is not None:
            self._table = None

    def table(self) -> Tensor:
        """The entries of all rows. [1 + numbers, entries] int64 on the device, the row of each first."""
        if self._table is None:
            whole = np.concatenate([self._nothing, *self._of_row.values()], axis=1)
            (flat,) = self._staging.send([whole.ravel()])
            self._table = flat.view(whole.shape)
        return self._table

    def add(self, logits: Tensor, rows: SampledRows, values: Tensor) -> None:
        """Add to each entry's logit its value, as far as its row is among these. logits: [any rows, vocab] float32, contiguous.
        values: [entries] float32, as in `table`; minus infinity bans the token."""
        table = self.table()
        at = torch.full((self._rows,), -1, dtype=torch.int64, device=logits.device)
        at[rows.device] = rows.at
        entry_at = at[table[0]]
        flat = entry_at.clamp(min=0) * logits.shape[1] + table[1]
        logits.view(-1).index_add_(0, flat, values.masked_fill(entry_at < 0, 0.0))
