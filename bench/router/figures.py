"""The figures of `launch bench router`, and its goals.

Owns what is known at the end. Measures and prints nothing.
"""

from collections.abc import Iterator, Sequence

import msgspec

from bench.figures import Goal, Outcome
from bench.router.lines import Loaded


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """What everything but the executor adds to the time to the first token, in ms, for requests that come one by one. beside: so
    many other streams meanwhile."""

    beside: int
    requests: int
    p50_ms: float
    p99_ms: float


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one token. per_core_s: as many as one core of the router would serve if it had nothing else to do."""

    requests: int
    parallel: int
    failed: int
    per_s: float
    per_core_s: float
    router_ms: float


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """So many streams at once. router_us: CPU time of the router for a token; per_core_s: its inverse. tokens_per_event: 1 when
    each token was sent alone. detokenizer_us, load_us: CPU time of the detokenizers and of the load generator for a token."""

    streams: int
    failed: int
    tokens_per_s: float
    per_core_s: float
    router_us: float
    tokens_per_event: float
    detokenizer_us: float
    load_us: float


class Open(msgspec.Struct, frozen=True, kw_only=True):
    """Streams that were open at once. kib_each: resident memory of the router for each. opened_per_s: from the first
    connection until all are open; 0 when they never were."""

    streams: int
    most_open: int
    failed: int
    reasons: tuple[str, ...]
    kib_each: float
    opened_per_s: float
    tokens_per_s: float
    router_us: float


class RouterOutcome(Outcome, frozen=True, kw_only=True):
    """All that is known at the end of `launch bench router`."""

    routers: int
    first_token: list[FirstToken]
    requests: Requests
    streams: list[Streams]
    open: Open | None


def first_token_of(loaded: Loaded, beside: int) -> FirstToken:
    """Of requests whose first token takes the executor no time."""
    ordered = sorted(1e3 * each for each in loaded.ttft_s)
    return FirstToken(
        beside=beside, requests=len(ordered), p50_ms=ordered[len(ordered) // 2], p99_ms=ordered[int(0.99 * (len(ordered) - 1))]
    )


def requests_of(loaded: Loaded, parallel: int) -> Requests:
    done = len(loaded.ttft_s)
    return Requests(
        requests=done,
        parallel=parallel,
        failed=loaded.failed,
        per_s=done / loaded.elapsed_s,
        per_core_s=done / loaded.router_cpu_s,
        router_ms=1e3 * loaded.router_cpu_s / done,
    )


def streams_of(loaded: Loaded, streams: int, detokenizer_s: float = 0.0) -> Streams:
    """Of the time when all of them are open, where there is one. detokenizer_s: CPU time of the detokenizers for all tokens."""
    window = loaded.window_tokens > 0
    seconds = loaded.window_s if window else loaded.elapsed_s
    tokens = loaded.window_tokens if window else loaded.tokens
    events = loaded.window_events if window else loaded.events
    cpu_s = loaded.window_cpu_s if window else loaded.router_cpu_s
    return Streams(
        streams=streams,
        failed=loaded.failed,
        tokens_per_s=tokens / seconds,
        per_core_s=tokens / cpu_s,
        router_us=1e6 * cpu_s / tokens,
        tokens_per_event=tokens / max(1, events),
        detokenizer_us=1e6 * detokenizer_s / loaded.tokens,
        load_us=1e6 * loaded.own_cpu_s / loaded.tokens,
    )


def open_of(loaded: Loaded, streams: int) -> Open:
    at_once = streams_of(loaded, streams)
    return Open(
        streams=streams,
        most_open=loaded.most_open,
        failed=loaded.failed,
        reasons=loaded.reasons,
        kib_each=1024 * (loaded.open_mb - loaded.before_mb) / max(1, loaded.most_open),
        opened_per_s=streams / loaded.opening_s if loaded.opening_s else 0.0,
        tokens_per_s=at_once.tokens_per_s,
        router_us=at_once.router_us,
    )


def judge(first_token: Sequence[FirstToken], requests: Requests, streams: Sequence[Streams], opened: Open | None) -> list[Goal]:
    """The goals for one router process on one core."""
    return list(_goals(first_token, requests, streams, opened))


def _goals(
    first_token: Sequence[FirstToken], requests: Requests, streams: Sequence[Streams], opened: Open | None
) -> Iterator[Goal]:
    alone = next(each for each in first_token if not each.beside)
    for name, value in (("median", alone.p50_ms), ("99th percentile", alone.p99_ms)):
        yield Goal(rule=f"added time to the first token, {name}: under 3 ms", met=value < 3, figure=f"{value:.2f} ms")
    figure = f"{requests.per_core_s:,.0f}/s of a core; {requests.per_s:,.0f}/s on this machine"
    yield Goal(rule="requests: 1,000/s", met=requests.per_core_s >= 1000, figure=figure)
    for each in streams:
        if each.streams > 1:
            figure = f"{each.per_core_s:,.0f}/s of a core; {each.tokens_per_s:,.0f}/s on this machine"
            yield Goal(rule=f"tokens, {each.streams:,} streams: 50,000/s", met=each.per_core_s >= 50_000, figure=figure)
    if opened is not None:
        met = opened.most_open >= 10_000 and not opened.failed
        figure = f"{opened.most_open:,} open, {opened.failed} failed"
        yield Goal(rule="10,000 streams open at once without a failure", met=met, figure=figure)
