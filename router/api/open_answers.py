"""The answers that are open or coming, by the ids that clients know them by.

Owns the ids. An answer is coming while its prompt is still tokenized: until then no request stands for it. Two answers may have
the same id: clients choose ids.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common.ids import RequestId


@dataclass(slots=True, eq=False)
class Coming:
    """An answer that is not dispatched yet. choices: how many it has. names: each id with how many choices it stands for.
    aborted: the ids for which these were aborted meanwhile."""

    owner: str
    choices: int
    names: Mapping[str, int]
    aborts_all: bool = False
    aborted: set[str] = field(default_factory=set)

    def abort(self, name: str | None) -> int:
        """Returns how many choices this ends. name: None: all."""
        if self.aborts_all or name in self.aborted:
            return 0
        if name is None:
            self.aborts_all = True
            return self.choices
        if name not in self.names:
            return 0
        self.aborted.add(name)
        return self.names[name]


class OpenAnswers:
    """Which requests of the core an id stands for."""

    def __init__(self) -> None:
        self._coming: set[Coming] = set()
        self._requests: dict[str, list[RequestId]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, named: Mapping[str, Iterable[RequestId]]) -> Callable[[], None]:
        """Returns what to call when the answer is over."""
        added = [(name, request) for name, requests in named.items() for request in requests]
        for name, request in added:
            self._requests.setdefault(name, []).append(request)

        def remove() -> None:
            for name, request in added:
                rest = self._requests[name]
                rest.remove(request)
                if not rest:
                    del self._requests[name]

        return remove

    def expect(self, owner: str, choices: int, names: Mapping[str, int]) -> Coming:
        """Whoever expects an answer says when it has `arrived`."""
        coming = Coming(owner, choices, names)
        self._coming.add(coming)
        return coming

    def arrived(self, coming: Coming) -> None:
        """It is dispatched, or never will be. Idempotent."""
        self._coming.discard(coming)

    def abort_coming(self, owner: str, name: str | None) -> int:
        """Abort what the owner has coming by this id, or with None all of it. Returns how many choices that ends."""
        return sum(coming.abort(name) for coming in self._coming if coming.owner == owner)

    def aborted(self, coming: Coming, requests: Sequence[RequestId]) -> list[RequestId]:
        """Which of its requests, which are open now, were aborted while it was coming."""
        self.arrived(coming)
        named = {request for name in coming.aborted for request in self.find(name)}
        return [request for request in requests if coming.aborts_all or request in named]

    def find(self, name: str) -> tuple[RequestId, ...]:
        """The requests of all answers of this id."""
        return tuple(self._requests.get(name, ()))
