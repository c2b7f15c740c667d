"""Preemption: who gives up memory when a running request needs a page and none is free.

Owns the choice. Knows requests as records; ends nothing itself.

The least urgent goes first, and among equals the youngest. A preempted request keeps its age wherever it is resumed, so the
oldest one is never preempted for another, always advances, and nobody starves.
"""

from collections.abc import Iterable, Sequence

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
    for request in sorted(holders, key=lambda holder: holder.rank, reverse=True):
        if missing <= 0:
            break
        assert request.lease is not None
        victims.append(request)
        missing -= closing.add(request.lease) + (request in lacking)
    return [request for request in victims if request in lacking or (request.lease and closing.brings(request.lease))]
