"""Preemption: who gives up memory when a running request needs a page and none is free.

Owns the choice. Knows requests as records; ends nothing itself.

The least urgent goes first, and among equals the youngest. A request that is put out keeps its age wherever it is resumed, so the
oldest one is never put out by another, always gets on, and nobody starves.
"""

from collections.abc import Iterable, Sequence

from decode.request import DecodeRequest


def choose_victims(holders: Iterable[DecodeRequest], lacking: Sequence[DecodeRequest], coming_pages: int) -> list[DecodeRequest]:
    """Who of `holders` is put out so that every request in `lacking` that is left gets a page.

    coming_pages: pages that are on their way home anyway.
    """
    missing = len(lacking) - coming_pages
    victims: list[DecodeRequest] = []
    for request in sorted(holders, key=lambda holder: holder.rank, reverse=True):
        if missing <= 0:
            break
        assert request.lease is not None
        victims.append(request)
        missing -= len(request.lease) + (request in lacking)
    return victims
