"""Predicted times to first token: how good they are of late, and the requests that are refused because of them.

Owns the last few predictions with what came, and the rule of early rejection. Does not know how a prediction is made.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Protocol

from common.errors import Overloaded
from router.attempts import Attempt
from router.requests import Record

REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class PredictionErrors:
    """Of the latest requests. median_s: of the error, in seconds, whatever its sign. median_share: of the error as a share of the
    real time."""

    requests: int
    median_s: float
    median_share: float


class PredictionObserver(Protocol):
    """Who measures."""

    def predicted(self, predicted_s: float, real_s: float) -> None:
        """A first token has come. Both times are from the arrival of its request."""


class Predictions:
    """rejects: whether requests are refused that would be too late. rejected: how many were."""

    def __init__(self, observer: PredictionObserver, *, rejects: bool) -> None:
        self._observer = observer
        self._rejects = rejects
        self._late: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self.rejected = 0

    def note(self, predicted_s: float | None, real_s: float) -> None:
        """A first token has come, as long after the arrival of its request. predicted_s: None if nothing was predicted."""
        if predicted_s is not None:
            self._late.append((predicted_s, real_s))
            self._observer.predicted(predicted_s, real_s)

    def errors(self) -> PredictionErrors | None:
        """None: nothing was predicted yet."""
        if not self._late:
            return None
        errors = [(abs(predicted_s - real_s), real_s) for predicted_s, real_s in self._late]
        shares = (error_s / max(real_s, 1e-9) for error_s, real_s in errors)
        return PredictionErrors(len(errors), median(error_s for error_s, _ in errors), median(shares))

    def refusal(self, placed: Sequence[tuple[Record, Attempt]], now: float) -> Overloaded | None:
        """Why a client's request is refused here: the first token of a choice is predicted to come after its time limit. A wrong
        prediction must not keep everybody out: where nothing else is to be computed, a request is always taken.

        placed: its choices, in their order; nobody was told of them yet.
        """
        if not self._rejects or placed[0][1].is_next:
            return None
        predicted = [
            (now - record.times.received_s + attempt.predicted_s, record.timeout_s)
            for record, attempt in placed
            if attempt.predicted_s is not None
        ]
        late = [(first_s - limit_s, first_s, limit_s) for first_s, limit_s in predicted]
        late_s, first_s, limit_s = max(late, default=(0.0, 0.0, 0.0))
        if late_s <= 0:
            return None
        when = f"its first token would come after about {first_s:.1f} s, and it may take {limit_s:g} s"
        return Overloaded(f"the request would be too late: {when}", retry_after_s=ceil(late_s))
