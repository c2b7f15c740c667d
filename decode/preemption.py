"""Preemption: who gives up memory when a running request needs a page and none is free.

Owns the choice. Knows requests as records; ends nothing itself.

The least urgent goes first, and among equals the youngest. A preempted request keeps its age wherever it is resumed, so the
oldest one is never preempted for another, always advances, and nobody starves.
"""

from collections.abc import Iterable, Sequence

from decode.requests import DecodeRequest


def choose_victims(holders: Iterable[DecodeRequest], lacking: Sequence[DecodeRequest], coming_pages: int) -> list[DecodeRequest]:
    """The requests of `holders` to preempt so that every request in `lacking` that is not preempted gets a page.

    coming_pages: pages that come home soon anyway.
    """
    missing = len(lacking) - coming_pages
    victims: list[DecodeRequest] = []
    for request in sorted(holders, key=lambda holder: holder.rank, reverse=True):
        if missing <= 0:
            break
        assert request.lease is not None
        victims.append(request)
        missing -= request.lease.unshared + (request in lacking)
    return victims
