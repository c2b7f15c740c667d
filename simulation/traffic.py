"""What was sent between the processes of a simulated fleet: messages and bytes, by kind and direction.

Owns the counts. Knows no messages and no time.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Tally:
    """Messages of one kind in one direction, and the bytes of their frames."""

    messages: int = 0
    frame_bytes: int = 0


class Traffic:
    """by_way: by (role of the sender, kind of the message, role of the receiver). Each send counts once, also if it is lost."""

    def __init__(self) -> None:
        self.messages = self.frame_bytes = 0
        self._by_way: dict[tuple[str, str, str], Tally] = {}

    @property
    def by_way(self) -> Mapping[tuple[str, str, str], Tally]:
        return self._by_way

    def add(self, sender: str, kind: str, receiver: str, frame_bytes: int) -> None:
        tally = self._by_way.get((sender, kind, receiver))
        if tally is None:
            tally = self._by_way[sender, kind, receiver] = Tally()
        tally.messages += 1
        tally.frame_bytes += frame_bytes
        self.messages += 1
        self.frame_bytes += frame_bytes

    def clear(self) -> None:
        """Begin to count anew."""
        self._by_way.clear()
        self.messages = self.frame_bytes = 0
