"""What the bench and its load generator say to each other.

Owns the vocabulary. Opens nothing.
"""

from common.processes.lines import JsonLine


class Load(JsonLine, frozen=True):
    """Send so many requests, `parallel` at once, each for an answer of `tokens` tokens as a stream. pids: of the routers."""

    url: str
    model: str
    requests: int
    parallel: int
    tokens: int
    pids: tuple[int, ...]


class Loaded(JsonLine, frozen=True):
    """What came of it.

    ttft_s: from sending a request to its first token, of each. opening_s: from before the first connection is made to the first
    token of the last of `parallel` streams; 0 when the first had ended before. failed: requests without a whole answer;
    reasons: of some. elapsed_s, tokens, events: of all. router_cpu_s, own_cpu_s: of the routers and of the load generator, for
    all.
    window_s, window_tokens, window_events, window_cpu_s: from the first token of the last of `parallel` streams to the end of the
    first that ends; 0 when the first had ended before the last began. most_open: streams that had begun and not ended, at once.
    before_mb, open_mb: resident memory of the routers before, and when the last of `parallel` streams had begun.
    """

    ttft_s: tuple[float, ...]
    opening_s: float
    failed: int
    reasons: tuple[str, ...]
    elapsed_s: float
    tokens: int
    events: int
    router_cpu_s: float
    own_cpu_s: float
    window_s: float
    window_tokens: int
    window_events: int
    window_cpu_s: float
    most_open: int
    before_mb: float
    open_mb: float
