"""Stop strings: where an answer ends, found while its text arrives in pieces.

Owns the text that is held back because it may be the beginning of a stop string. Does not know tokens.

The answer ends as soon as its text contains a stop string. When two are complete at that moment, the longer one counts. So it
makes no difference how the text was cut into pieces.
"""

from collections.abc import Sequence


class StopStrings:
    """One answer's search. stops: none of them empty (ValueError). included: the stop string stays in the text, so nothing is
    held back."""

    def __init__(self, stops: Sequence[str], included: bool = False) -> None:
        if "" in stops:
            raise ValueError("an empty stop string would end every answer before it begins")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._included = included
        self._tail = ""
        """The end of the text so far that may begin a stop string. It is held back, unless stop strings are included."""
        self.matched: str | None = None
        """The stop string that ended the text. Push nothing after it."""

    def push(self, text: str, ends: bool = True) -> str:
        """Take the next piece. Returns the text that is certain to stay. ends: whether a stop string that is complete with this
        piece ends the text; one that only begins in it always can."""
        assert self.matched is None, "the text has ended"
        if not self._stops:
            return text
        before = len(self._tail)
        text = self._tail + text
        shown = before if self._included else 0
        # Only what ends in the new piece: the tail holds no whole stop string, except one that was to end nothing.
        places = ((text.find(stop, max(0, before + 1 - len(stop))), stop) for stop in self._stops) if ends else ()
        found = [(start + len(stop), start, stop) for start, stop in places if start >= 0]
        if found:
            end, start, self.matched = min(found)
            self._tail = ""
            return text[shown : end if self._included else start]
        held = self._possible_beginning(text)
        self._tail = text[len(text) - held :]
        return text[shown : len(text) if self._included else len(text) - held]

    def flush(self) -> str:
        """End the text. Returns what was held back."""
        text, self._tail = self._tail, ""
        return "" if self._included else text

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
