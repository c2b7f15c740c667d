"""What the prefix cache costs for a prompt of 32,768 tokens, in microseconds: the least of several runs.

    python -m tests.common.pages.prefix_cost

Owns the measurement. Judges nothing.
"""

import sys
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from common.ids import pack_ids
from common.pages.pool import PagePool
from common.pages.radix_cache import PageKeys

PROMPT = 32_768
RUNS = 20
T = TypeVar("T")


def measure(page_tokens: int) -> dict[str, float]:
    """Microseconds of each thing that is done once for such a prompt. A request that hits nothing pays keys, match, publish and
    close; one that hits everything pays keys, match, lease and close."""
    packed, pages = pack_ids(np.random.default_rng(1).integers(0, 150_000, PROMPT, dtype=np.int32)), PROMPT // page_tokens
    least: dict[str, float] = {}

    def timed(what: str, act: Callable[[], T]) -> T:
        began_s = time.perf_counter()
        result = act()
        least[what] = min(least.get(what, np.inf), 1e6 * (time.perf_counter() - began_s))
        return result

    for _ in range(RUNS):
        pool, keys = PagePool(2 * pages), PageKeys(page_tokens, packed=packed)
        own = pool.lease(pages)
        assert own is not None
        timed("keys", lambda keys=keys: keys.pages)  # type: ignore[misc]
        timed("publish", lambda own=own, keys=keys: own.publish(keys, pages))  # type: ignore[misc]
        hit = timed("match", lambda pool=pool, keys=keys: pool.cache.match(keys, pages))  # type: ignore[misc]
        shared = timed("lease of a hit", lambda pool=pool, hit=hit: pool.lease(pages, hit))  # type: ignore[misc]
        assert shared is not None and len(hit) == pages
        shared.close()
        timed("close", own.close)
        timed("lease that evicts", lambda pool=pool: pool.lease(2 * pages))  # type: ignore[misc]
    return least


if __name__ == "__main__":
    for page_tokens in (16, 64):
        costs = ", ".join(f"{what} {micros:.0f} us" for what, micros in measure(page_tokens).items())
        sys.stdout.write(f"pages of {page_tokens} tokens: {costs}\n")
