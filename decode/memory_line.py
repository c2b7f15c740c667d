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
from decode.growth import Growth
from decode.requests import DecodeRequest

PATIENCE_S = 2.0
LOOKED_AT = 32
"""So many of those that do not fit are looked at per step: the line may be long."""


def admit(waiting: WaitingLine[DecodeRequest], pool: PagePool, rows: Rows, growth: Growth, now: float) -> list[DecodeRequest]:
    """The requests whose turn it is and that fit: each has left the line, and holds its pages and a row."""
    admitted: list[DecodeRequest] = []
    if not len(waiting) or rows.free_count == 0:
        return admitted
    forecast = growth.forecast(pool.free_pages)
    head = next((request for request in waiting if request.waits), None)
    may_pass = head is None or now - head.accepted_s < PATIENCE_S
    looks = LOOKED_AT
    for request in waiting:
        if rows.free_count == 0 or pool.free_pages <= forecast.running or looks == 0:
            break
        fits = request.pages + forecast.running <= pool.free_pages
        if fits and forecast.admits(request.pages, len(request.prompt), request.asked.sampling.max_new_tokens):
            waiting.leave(request.key)
            request.lease, request.row = pool.lease(request.pages), rows.take()
            assert request.lease is not None
            admitted.append(request)
            continue
        looks -= 1
        if request.waits and not may_pass:
            break
    return admitted
