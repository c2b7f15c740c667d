"""Time in which this process itself stood still: a host that was paused, a turn that took seconds. It is nobody's silence.

Owns how that time is found. Does not know whose silence is judged, or by which limit. Reads no clock.
"""

STOOD_STILL_S = 1.0
"""A turn that takes longer, or begins so much later than it was due, stood still. Limits of silence are longer."""


class Absence:
    """How long one loop stands still. Call `ends` after each turn, and `begins` before the next one judges anybody."""

    def __init__(self) -> None:
        self._stood_s = 0.0
        self._due_s: float | None = None

    def begins(self, now: float) -> float:
        """A turn begins. Returns for how many seconds the loop has stood still since the turn before it began."""
        late_s = 0.0 if self._due_s is None else now - self._due_s
        return self._stood_s + (late_s if late_s > STOOD_STILL_S else 0.0)

    def ends(self, began_s: float, now: float, due_s: float) -> None:
        """A turn has ended. due_s: when the next one is due even if nothing happens before."""
        took_s = now - began_s
        self._stood_s = took_s if took_s > STOOD_STILL_S else 0.0
        self._due_s = max(now, due_s)
