"""Time in which this process itself stood still: a host that was paused, a turn that took seconds.
It is nobody's silence.

Owns how that is found. Does not know whose silence is judged, or by which limit. Reads no clock.
"""

STOOD_STILL_S = 1.0
"""A turn that takes longer, or begins so much later than it was due, stood still. Limits of silence
are longer."""


class Absence:
    """Whether one loop stands still. Call `ends` after each turn, and `begins` before the next one
    judges anybody."""

    def __init__(self) -> None:
        self._was_long = False
        self._due_s: float | None = None

    def begins(self, now: float) -> bool:
        """A turn begins. Whether the loop has stood still since the turn before it began."""
        is_late = self._due_s is not None and now - self._due_s > STOOD_STILL_S
        return self._was_long or is_late

    def ends(self, began_s: float, now: float, due_s: float) -> None:
        """A turn has ended. due_s: when the next one is due even if nothing happens before."""
        self._was_long = now - began_s > STOOD_STILL_S
        self._due_s = max(now, due_s)
