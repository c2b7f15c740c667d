"""Who gets decode memory next: a request is admitted when its pages and a row are free together.

Owns the order of admission. Knows the waiting line, the page pool and the rows. Does not know whether a request is a reservation
or is computed here.

The most urgent is first (`common.instance.waiting_line`), but a request that fits may pass one that does not. Once the request at
the head has waited PATIENCE_S, nobody passes it any more, so its wait is bounded. A reservation that does not wait is admitted at
once or leaves the line.
"""

from common.instance.rows import Rows
from common.instance.waiting_line import WaitingLine
from common.pages.pool import PagePool
from decode.requests import DecodeRequest

PATIENCE_S = 2.0


def admit(waiting: WaitingLine[DecodeRequest], pool: PagePool, rows: Rows, running: int, now: float) -> list[DecodeRequest]:
    """The requests whose turn it is and that fit: each has left the line, and holds its pages and a row.

    running: requests that may each need another page soon. As many pages are left free for them; otherwise a request would be
    admitted only to be preempted at once.
    """
    admitted: list[DecodeRequest] = []
    head = next((request for request in waiting if request.waits), None)
    may_pass = head is None or now - head.accepted_s < PATIENCE_S
    for request in waiting:
        if rows.free_count == 0 or pool.free_pages <= running:
            break
        lease = pool.lease(request.pages) if request.pages + running <= pool.free_pages else None
        if lease is not None:
            waiting.leave(request.key)
            running += 1
            request.lease, request.row = lease, rows.take()
            admitted.append(request)
        elif request.waits and not may_pass:
            break
    return admitted
