"""Stop strings: where an answer ends, found while its text arrives in pieces.

Owns the text that is held back because it may be the beginning of a stop string. Does not know tokens.

The answer ends as soon as its text contains a stop string. When two are complete at that moment, the longer one counts. So it
makes no difference how the text was cut into pieces.
"""

from collections.abc import Sequence


class StopStrings:
    """One answer's search. stops: none of them empty (ValueError)."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("an empty stop string would end every answer before it begins")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text. Push nothing after it."""

    def push(self, text: str) -> str:
        """Take the next piece. Returns the text that certainly lies before any stop string."""
        assert self.matched is None, "the text has ended"
        if not self._stops:
            return text
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        held = self._possible_beginning(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """End the text. Returns what was held back."""
        text, self._held = self._held, ""
        return text

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
