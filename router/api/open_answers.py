"""The answers that are open, by the ids that clients know them by.

Owns the ids. Two answers may have the same one: clients choose ids.
"""

from collections.abc import Callable, Iterable, Mapping

from common.ids import RequestId


class OpenAnswers:
    """Which requests of the core an id stands for."""

    def __init__(self) -> None:
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

    def find(self, name: str) -> tuple[RequestId, ...]:
        """The requests of all answers of this id."""
        return tuple(self._requests.get(name, ()))
