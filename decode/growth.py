"""Growth: how many pages the running requests will need at once, if answers turn out as long as answers have been.

Owns the measure of answers and the forecast made of it. Knows the running batch and pages as numbers. Admits nobody.

A request may ask for far more tokens than its answer has. So the forecast takes a *share* of the tokens that each request may
still sample: what ended answers used of their max_tokens, as an exponentially weighted mean, plus a margin for chance. Before
anything has ended the share is 1. SGLang's new_token_ratio is of this kind; it falls with time and rises when a request is
retracted, while this one is measured.

Requests do not all end at once, and each that ends gives back its pages. So the most that is needed is less than the sum of all
final lengths (the Past-Future scheduler of LightLLM, Gong et al. 2025). Sort the requests by the pages that they still need, most
first. When request k ends, those before it are still there, and each has grown by about still[k]:

    peak = max over k of (held[0] + ... + held[k] + (k + 1) * still[k])
"""

import math

import numpy as np

from common.ids import Int64Array
from decode.batch import Batch

LONGEST_MEMORY = 64
"""The weight of one ended answer does not fall below one in so many."""
PRIOR_ANSWERS = 4
"""The first share weighs as much as so many answers."""
DEVIATIONS = 2.0
"""The margin: so many standard deviations of the mean of as many answers as run."""
_NOTHING = np.zeros(1, dtype=np.int64)


class AnswerShare:
    """What part of max_tokens answers need. first: until some have ended."""

    def __init__(self, first: float) -> None:
        self._mean = first
        self._variance = 0.0
        self._answers = PRIOR_ANSWERS

    def add(self, tokens: int, limit: int) -> None:
        """An answer that might have had `limit` tokens ended after `tokens`."""
        self._answers = min(self._answers + 1, LONGEST_MEMORY)
        weight, off = 1 / self._answers, tokens / limit - self._mean
        self._mean += weight * off
        self._variance = (1 - weight) * (self._variance + weight * off * off)

    def of(self, running: int) -> float:
        """The share to expect of the sum of so many answers, with its margin: between 0 and 1."""
        return min(1.0, self._mean + DEVIATIONS * math.sqrt(self._variance / max(1, running)))


class Forecast:
    """Whether another request fits beside those that run. held, still: [requests] int64, pages that each has and will need more.
    free_pages: of the pool."""

    def __init__(self, share: float, page_size: int, held: Int64Array, still: Int64Array, free_pages: int) -> None:
        self._share, self._page_size = share, page_size
        self._pages = free_pages + int(held.sum())
        self._refused = math.inf, math.inf
        """Pages and growth of the last one for which there was no room: many that wait are alike."""
        order = np.argsort(-still, kind="stable")
        self._arrange(held[order], still[order])

    @property
    def running(self) -> int:
        return len(self._held)

    def admits(self, pages: int, prompt: int, limit: int) -> bool:
        """Whether everybody finds room with it; then it is in the forecast. pages: that it gets now. prompt, limit: tokens.

        Alone a request is always admitted: the pool holds the longest answer of any.
        """
        still = max(0, -(-(prompt + math.ceil(self._share * limit) - 1) // self._page_size) - pages)
        if pages >= self._refused[0] and still >= self._refused[1]:
            return False  # the peak only rises with either, and with everybody admitted since
        place = int(np.searchsorted(self._rising, -still, side="right"))
        peak = (int(self._sums[place]) + pages) + (place + 1) * still
        if place:
            peak = max(peak, int(self._before[place - 1]))
        if place < self.running:
            peak = max(peak, int(self._behind[place]) + pages)
        if self.running and peak > self._pages:
            self._refused = pages, still
            return False
        self._arrange(np.insert(self._held, place, pages), np.insert(self._still, place, still))
        return True

    def _arrange(self, held: Int64Array, still: Int64Array) -> None:
        """_rising: what they still need, below 0. _sums[k]: what the first k hold. _before[k]: the peak up to the end of k.
        _behind[k]: the peak from then on if one more, which ends before, were among them, less what that one holds."""
        self._held, self._still, self._rising = held, still, -still
        self._sums = np.concatenate([_NOTHING, np.cumsum(held)])
        need = self._sums[1:] + np.arange(1, len(held) + 1) * still
        self._before = np.maximum.accumulate(need)
        self._behind = np.maximum.accumulate((need + still)[::-1])[::-1]


class Growth:
    """The forecast of a decode instance. first_share: see `AnswerShare`."""

    def __init__(self, batch: Batch, page_size: int, first_share: float) -> None:
        self._batch = batch
        self._page_size = page_size
        self._shares = AnswerShare(first_share)

    def forecast(self, free_pages: int) -> Forecast:
        """Costs a few array operations, however many run; made only when somebody waits."""
        share = self._shares.of(self._batch.running)
        held, still = self._batch.pages(share, self._page_size)
        return Forecast(share, self._page_size, held, still, free_pages)

    def ended(self, row: int) -> None:
        """The answer of a row is over."""
        self._shares.add(*self._batch.answer(row))

    def preempted(self) -> None:
        """Answers grew more than was forecast: that counts as one which used all it might."""
        self._shares.add(1, 1)
