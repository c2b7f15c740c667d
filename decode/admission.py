"""The line for decode memory: a request is admitted when its pages and a row are free together.

Owns the order. Knows the page pool and the rows. Does not know why a request wants in (a reservation or a local prefill).

The most urgent first (`common.instance.line`), but a request that fits may pass one that does not, until the one at the head has
waited `patience_s` there: from then on nobody passes it, so the head's wait is bounded.
"""

from dataclasses import dataclass

from common.ids import Key
from common.instance.line import Line, Rank
from common.instance.rows import Rows
from common.pages.pool import PageLease, PagePool


@dataclass(frozen=True, slots=True)
class Admitted:
    """The lease and the row are the request's from now on."""

    key: Key
    lease: PageLease
    row: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    key: Key
    pages: int
    since_s: float


class AdmissionLine:
    """Everyone who waits for memory on one decode instance."""

    def __init__(self, pool: PagePool, rows: Rows, patience_s: float) -> None:
        self._pool = pool
        self._rows = rows
        self._patience_s = patience_s
        self._line: Line[_Waiting] = Line()

    def __len__(self) -> int:
        return len(self._line)

    def join(self, key: Key, rank: Rank, pages: int, now: float) -> None:
        self._line.join(key, rank, _Waiting(key, pages, now))

    def leave(self, key: Key) -> bool:
        """True when the key was waiting."""
        return self._line.leave(key)

    def overdue(self, now: float, after_s: float) -> Key | None:
        """Who is to be admitted next, if it has waited for longer than this."""
        head = self._line.head()
        return head.key if head is not None and now - head.since_s > after_s else None

    def admit(self, now: float, running: int) -> list[Admitted]:
        """Everyone whose turn it is and who fits. running: requests that may each want another page soon; so many pages are left
        for them, lest whoever comes in is put out again at once."""
        admitted: list[Admitted] = []
        head = self._line.head()
        if head is None:
            return admitted
        may_pass = now - head.since_s < self._patience_s
        for waiting in self._line:
            if self._rows.free_count == 0 or self._pool.free_pages <= running:
                break
            lease = self._pool.lease(waiting.pages) if waiting.pages + running <= self._pool.free_pages else None
            if lease is not None:
                self._line.leave(waiting.key)
                running += 1
                admitted.append(Admitted(waiting.key, lease, self._rows.take()))
            elif not may_pass:
                break
        return admitted
