"""Preemption: who gives up memory when a running request needs a page and none is free.

Owns the choice. Knows requests as records; ends nothing itself. Who gives way to another owner is in `common/instance/shares.py`.

The least urgent goes first, of these a request of the owner that holds the most pages, and of its requests the
youngest. A preempted request keeps its age wherever it is resumed, so the oldest one of all is never preempted for another,
always advances, and nobody starves.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from common.pages.pool import Closing, PageLease
from decode.requests import DecodeRequest


def choose_victims(
    holders: Iterable[DecodeRequest], lacking: Sequence[DecodeRequest], coming: Iterable[PageLease]
) -> list[DecodeRequest]:
    """The requests of `holders` to preempt so that every request in `lacking` that is not preempted gets a page.

    coming: leases that are closed soon anyway. Who brings nothing is spared: others hold all its pages.
    """
    closing = Closing()
    missing = len(lacking) - sum(map(closing.add, coming))
    victims: list[DecodeRequest] = []
    for request in _last_first(holders):
        if missing <= 0:
            break
        assert request.lease is not None
        victims.append(request)
        missing -= closing.add(request.lease) + (request in lacking)
    return [request for request in victims if request in lacking or (request.lease and closing.brings(request.lease))]


def _last_first(holders: Iterable[DecodeRequest]) -> Iterator[DecodeRequest]:
    """In the order in which they give up memory."""
    order = sorted(holders, key=lambda holder: holder.rank, reverse=True)
    pages: Counter[str] = Counter()
    for holder in order:
        pages[holder.owner] += holder.held_pages
    oldest = order[-1:]
    del order[-1:]
    while len(pages) > 1 and order:
        last = max(order, key=lambda holder: (holder.rank.priority, pages[holder.owner]))  # the youngest of several
        order.remove(last)
        pages[last.owner] -= last.held_pages
        yield last
    yield from order
    yield from oldest
