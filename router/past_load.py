"""The requests of the last hour, as a trace in Mooncake's format: when each came, how long its prompt and its answer were, and
which blocks of its prompt it had in common with others.

Owns what is kept of them, within a bound, and the numbers that stand for blocks. Holds no text and no token, and gives nobody the
names of blocks: those are hashes, by which a guessed prompt could be known.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import msgspec

from common.pages.radix_cache import BlockNames, pages_of_block

HOUR_S = 3600.0
MOST_REQUESTS, MOST_NAMES = 50_000, 500_000
"""What is kept takes 15 MB at most: the oldest requests go first."""
BLOCK_TOKENS = 512
"""Tokens that one of a trace's hash_ids stands for."""


@dataclass(frozen=True, slots=True)
class PastRequest:
    """A request that has ended."""

    received_s: float
    prompt_tokens: int
    answer_tokens: int
    names: "array[int]"
    """Names of the whole blocks of its prompt, each with all that is before it."""


class LoadLine(msgspec.Struct, frozen=True):
    """A line of a trace. timestamp: milliseconds. hash_ids: the blocks of the prompt; the last may be cut short."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class PastLoad:
    """Those of one router."""

    def __init__(self) -> None:
        self._requests: deque[PastRequest] = deque()
        self._names = 0

    def add(self, received_s: float, prompt_tokens: int, answer_tokens: int, blocks: BlockNames | None, now: float) -> None:
        """A request has ended. blocks: None: they were not named."""
        names = array("Q", () if blocks is None else _names_of(blocks))
        self._requests.append(PastRequest(received_s, prompt_tokens, max(1, answer_tokens), names))
        self._names += len(names)
        self._forget(now)

    def requests(self, now: float) -> list[PastRequest]:
        """In the order of their ends."""
        self._forget(now)
        return list(self._requests)

    def _forget(self, now: float) -> None:
        requests = self._requests
        while requests and (len(requests) > MOST_REQUESTS or self._names > MOST_NAMES or requests[0].received_s < now - HOUR_S):
            self._names -= len(requests.popleft().names)


def lines_of(requests: Sequence[PastRequest]) -> Iterator[LoadLine]:
    """In the order of their arrival, the first at 0."""
    numbers: dict[int, int] = {}
    fresh = count()
    coming = sorted(requests, key=lambda request: request.received_s)
    for each in coming:
        at_ms = round(1000 * (each.received_s - coming[0].received_s))
        yield LoadLine(at_ms, each.prompt_tokens, each.answer_tokens, tuple(_ids(each, numbers, fresh)))


def _names_of(blocks: BlockNames) -> Sequence[int]:
    """The name of each whole block of a trace: that of the last of the blocks that it consists of."""
    each = BLOCK_TOKENS // (blocks.page_size * pages_of_block(blocks.page_size))
    return blocks.names[each - 1 :: each] if each else ()


def _ids(request: PastRequest, numbers: dict[int, int], fresh: Iterator[int]) -> Iterator[int]:
    """What is in no whole block is nobody else's."""
    for name in request.names:
        if name not in numbers:
            numbers[name] = next(fresh)
        yield numbers[name]
    for _ in range(-(-request.prompt_tokens // BLOCK_TOKENS) - len(request.names)):
        yield next(fresh)
