"""The line for decode memory: a request is admitted when its pages and a row are free together.

Owns the order. Knows the page pool and the rows. Does not know why a request wants in (a reservation or a local prefill).

First come, first served, but a request that fits may pass one that does not, until the one at the head has waited
`patience_s`: from then on nobody passes it, so the head's wait is bounded.
"""

from collections import OrderedDict
from dataclasses import dataclass

from common.ids import Key
from common.instance.rows import Rows
from common.pages.pool import Lease, PagePool


@dataclass(frozen=True, slots=True)
class Admitted:
    """The lease and the row are the request's from now on."""

    key: Key
    lease: Lease
    row: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    pages: int
    since_s: float


class AdmissionLine:
    """Everyone who waits for memory on one decode instance."""

    def __init__(self, pool: PagePool, rows: Rows, patience_s: float) -> None:
        self._pool = pool
        self._rows = rows
        self._patience_s = patience_s
        self._line: OrderedDict[Key, _Waiting] = OrderedDict()

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, key: Key) -> bool:
        return key in self._line

    def join(self, key: Key, pages: int, now: float) -> None:
        self._line[key] = _Waiting(pages, now)

    def leave(self, key: Key) -> bool:
        """True when the key was waiting."""
        return self._line.pop(key, None) is not None

    def admit(self, now: float) -> list[Admitted]:
        """Everyone whose turn it is and who fits."""
        admitted: list[Admitted] = []
        if not self._line:
            return admitted
        head = next(iter(self._line.values()))
        may_pass = now - head.since_s < self._patience_s
        for key, waiting in list(self._line.items()):
            if self._rows.free_count == 0 or self._pool.free_pages == 0:
                break
            lease = self._pool.lease(waiting.pages)
            if lease is not None:
                del self._line[key]
                admitted.append(Admitted(key, lease, self._rows.take()))
            elif not may_pass:
                break
        return admitted
