"""The requests of an instance: by key, with their deadlines, and the keys that are over.

Owns what both roles must keep of a request, whatever its phase: that it is served once, until when, and what is said of it to a
router that asks. Does not know prompts, pages or plans.

    (unknown) ── add ──► open ── remove ──► over, remembered a while ──► (unknown)
        └── close_early (refused, or its Cancel came first) ──┘
"""

import math
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from common.deadlines import DeadlineWheel
from common.errors import BadRequest
from common.ids import Key
from common.instance.line import Rank
from common.messages import Standing, Terms

MEMORY_S = 60.0
"""How long the key of a request that is over is remembered: a message about it may be on its way for so long."""


class Known(Protocol):
    """What the table needs of a role's request."""

    @property
    def key(self) -> Key: ...

    @property
    def standing(self) -> int | None:
        """Number of the token that this instance emits next; None once it emits no more, though something of it may be left."""


R = TypeVar("R", bound=Known)


def read_terms(terms: Terms, now: float) -> Rank:
    """Where a request stands among the others. Raises BadRequest for times that are none: they have no order."""
    if math.isnan(terms.age_s) or (terms.timeout_s is not None and math.isnan(terms.timeout_s)):
        raise BadRequest("age_s and timeout_s must be numbers", field="terms")
    return Rank(terms.priority, now - terms.age_s)


class RequestTable(Generic[R]):
    """Every request of one instance, until nothing of it is left."""

    def __init__(self, request_timeout_s: float) -> None:
        self._request_timeout_s = request_timeout_s
        self._open: dict[Key, R] = {}
        self._deadlines: DeadlineWheel[Key] = DeadlineWheel()
        self._over: DeadlineWheel[Key] = DeadlineWheel()
        self.accepted = 0
        self.stale = 0
        """Messages about keys that are over, or that came again: dropped and counted."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[R]:
        """A snapshot, so requests may be removed meanwhile."""
        return iter(list(self._open.values()))

    def __getitem__(self, key: Key) -> R:
        return self._open[key]

    def get(self, key: Key) -> R | None:
        return self._open.get(key)

    def is_new(self, key: Key) -> bool:
        """Whether a request of this key may begin: an attempt is served once. One that may not is counted as stale."""
        is_new = key not in self._open and key not in self._over
        self.stale += not is_new
        return is_new

    def add(self, request: R, timeout_s: float | None, now: float) -> float:
        """Returns the request's deadline."""
        self._open[request.key] = request
        self.accepted += 1
        limit_s = self._request_timeout_s if timeout_s is None else min(timeout_s, self._request_timeout_s)
        self._deadlines.set(request.key, now + limit_s)
        return now + limit_s

    def close_early(self, key: Key, now: float) -> None:
        """It is over before it began: it was refused, or its Cancel came first (messages travel over different links)."""
        self._over.set(key, now + MEMORY_S)

    def stop_deadline(self, key: Key) -> None:
        """The request has ended; what is left of it waits for steps and transfers only."""
        self._deadlines.clear(key)

    def remove(self, key: Key, now: float) -> None:
        del self._open[key]
        self._deadlines.clear(key)
        self._over.set(key, now + MEMORY_S)

    def late(self, now: float) -> list[R]:
        """Requests whose deadline has passed; each is returned once."""
        self._over.expired(now)
        return [self._open[key] for key in self._deadlines.expired(now)]

    def next_deadline(self) -> float | None:
        """When the next deadline passes. What is remembered too long costs memory only and wakes nobody."""
        return self._deadlines.next_deadline()

    def standings(self, keys: Iterable[Key]) -> tuple[Standing, ...]:
        """What is known of these requests."""
        found = ((key, self._open.get(key)) for key in keys)
        return tuple(Standing(key, None if request is None else request.standing) for key, request in found)
