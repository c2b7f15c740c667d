"""The figures of `launch bench router` as tables.

Owns the columns and their order. Measures and judges nothing.
"""

from collections.abc import Sequence
from typing import TypeAlias

from bench.router.figures import FirstToken, Open, Requests, RouterOutcome, Streams

Lines: TypeAlias = list[tuple[str, ...]]


def tables(outcome: RouterOutcome) -> list[Lines]:
    """Each begins with its heads."""
    opened = [] if outcome.open is None else [_open(outcome.open)]
    return [_first_token(outcome.first_token), _requests(outcome.requests), _streams(outcome.streams), *opened]


def _first_token(figures: Sequence[FirstToken]) -> Lines:
    lines: Lines = [("other streams", "requests", "added to the first token, ms: median", "99th percentile")]
    return lines + [(f"{each.beside}", f"{each.requests}", f"{each.p50_ms:.2f}", f"{each.p99_ms:.2f}") for each in figures]


def _requests(of: Requests) -> Lines:
    figures = f"{of.failed}", f"{of.per_s:,.0f}", f"{of.router_ms:.3f}", f"{of.per_core_s:,.0f}"
    head = ("requests", "at once", "failed", "requests/s", "router, ms of CPU each", "1/that")
    return [head, (f"{of.requests:,}", f"{of.parallel}", *figures)]


def _streams(figures: Sequence[Streams]) -> Lines:
    lines: Lines = [
        (
            "streams",
            "failed",
            "tokens/s",
            "tokens in an event",
            "router, us of CPU a token",
            "1/that",
            "detokenizer, us a token",
            "load generator, us a token",
        )
    ]
    for each in figures:
        rates = f"{each.tokens_per_s:,.0f}", f"{each.tokens_per_event:.2f}", f"{each.router_us:.1f}", f"{each.per_core_s:,.0f}"
        lines.append((f"{each.streams:,}", f"{each.failed}", *rates, f"{each.detokenizer_us:.1f}", f"{each.load_us:.1f}"))
    return lines


def _open(of: Open) -> Lines:
    head = ("streams", "open at once", "failed", "opened/s", "router, KiB each", "tokens/s", "router, us of CPU a token")
    rates = f"{of.opened_per_s:,.0f}", f"{of.kib_each:.0f}", f"{of.tokens_per_s:,.0f}", f"{of.router_us:.1f}"
    return [head, (f"{of.streams:,}", f"{of.most_open:,}", f"{of.failed}", *rates)]
