"""A tally: how often each of several things has happened, with a line in the log now and then.

Owns the counts and when to log. Does not know what is counted.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping

_LOG_EVERY_S = 10.0

_log = logging.getLogger(__name__)


class Tally:
    """Counts by reason. Logs each reason when it first happens, and then at most every `_LOG_EVERY_S`. For any thread."""

    def __init__(self, what: str) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._what = what
        self._quiet_until: dict[str, float] = {}

    @property
    def counts(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)

    def add(self, reason: str, detail: str) -> None:
        with self._lock:
            self._counts[reason] += 1
            now, count = time.monotonic(), self._counts[reason]
            if now < self._quiet_until.get(reason, 0.0):
                return
            self._quiet_until[reason] = now + _LOG_EVERY_S
        _log.warning("%s (%s, %d so far): %s", self._what, reason, count, detail)
