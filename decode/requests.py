"""The requests of a decode instance, and how many pages the running ones will need if answers are as long as answers have been.

Owns the record of a request, the measure of answers, and the forecast made of it. Knows the running batch and pages as numbers.
Admits nobody.

A request may ask for far more tokens than its answer has: often its limit is the whole context. So the forecast is a length in
tokens, the same for all, and each request's limit bounds it. It is measured: the tokens of the last answers, over how many of
them stopped by themselves. An answer that reached its limit, or was preempted, would have been longer. So its tokens count, but
not as an end. (This is the mean of an exponential distribution estimated from censored data.) An answer whose client has left
says nothing of its length, but it takes its part from the weight of those before it: what was measured long ago fades. A margin
for chance is added. Preemption corrects a forecast that is too low.

Requests do not all end at once, and each that ends gives back its pages. So the most that is needed is less than the sum of all
final lengths (the Past-Future scheduler of LightLLM, Gong et al. 2025). Sort the requests by the pages that they still need, most
first. When request k ends, those before it are still there, and each has grown by about still[k]:

    peak = max over k of (held[0] + ... + held[k] + (k + 1) * still[k])

Pages that a request found in the prefix cache do not count as its own: others may hold them when it ends. They are taken from
what is available, if nobody held them before.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.ids import Int64Array
from common.instance.request import Request
from common.messages import Failed
from decode.batch import Batch

MEMORY = 64
"""Each answer takes one part in so many from the weight of all before it."""
PRIOR_ANSWERS = 4
"""The first forecast weighs as much as so many answers, for ever. So answers that all reach short limits raise it little."""
DEVIATIONS = 1.0
"""The margin: so many standard deviations of the mean of as many answers as run. The deviation of one is about its mean."""
_NOTHING = np.zeros(1, dtype=np.int64)


class Forecast:
    """Whether another request fits beside those that run. answer: expected tokens. held, still: [requests] int64, pages of its
    own that each has, and pages that it will need more. available_pages: of the pool."""

    def __init__(self, answer: int, page_size: int, held: Int64Array, still: Int64Array, available_pages: int) -> None:
        self._answer, self._page_size = max(answer, page_size), page_size
        self._pages = available_pages + int(held.sum())
        self._refused = math.inf, math.inf
        """Pages and growth of the last one for which there was no room: many that wait are alike."""
        order = np.argsort(-still, kind="stable")
        self._arrange(held[order], still[order])

    @property
    def running(self) -> int:
        return len(self._held)

    def admits(self, pages: int, prompt: int, limit: int, hit: int = 0, unheld: int = 0) -> bool:
        """Whether everybody finds room with it; then it is in the forecast. pages: of its own that it gets now. hit: pages that
        it finds in the prefix cache. unheld: so many of these nobody holds. prompt, limit: tokens.

        Alone a request is always admitted: the pool holds the longest answer of any.
        """
        still = max(0, -(-(prompt + min(limit, self._answer) - 1) // self._page_size) - pages - hit)
        if pages >= self._refused[0] and still >= self._refused[1]:
            return False  # the peak only rises with either, and with everybody admitted since
        place = int(np.searchsorted(self._rising, -still, side="right"))
        peak = (int(self._sums[place]) + pages) + (place + 1) * still
        if place:
            peak = max(peak, int(self._before[place - 1]))
        if place < self.running:
            peak = max(peak, int(self._behind[place]) + pages)
        if self.running and peak + unheld > self._pages:
            if not unheld:
                self._refused = pages, still
            return False
        self._pages -= unheld
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
    """The forecast of a decode instance, and how many tokens an answer has if its limit allows. first_answer: until some have
    ended."""

    def __init__(self, batch: Batch, page_size: int, first_answer: int) -> None:
        self._batch = batch
        self._page_size = page_size
        self._first_answer = first_answer
        self._tokens = self._stops = 0.0

    def answer_tokens(self, running: int) -> int:
        """The tokens to expect of each of so many answers, with the margin."""
        mean = (PRIOR_ANSWERS * self._first_answer + self._tokens) / (PRIOR_ANSWERS + self._stops)
        return math.ceil(mean * (1 + DEVIATIONS / math.sqrt(max(1, running))))

    def forecast(self, available_pages: int, without: Sequence[int] = ()) -> Forecast:
        """Costs a few array operations, however many run; made only when somebody waits. without: rows that are about to end."""
        answer = self.answer_tokens(self._batch.running - len(without))
        held, still = self._batch.pages(answer, self._page_size, without)
        return Forecast(answer, self._page_size, held, still, available_pages)

    def ended(self, row: int, *, stopped: bool) -> None:
        """The answer of a row is over. stopped: by itself; otherwise it reached its limit, or was preempted."""
        self._tokens += int(self._batch.sampled[row]) - self._tokens / MEMORY
        self._stops += stopped - self._stops / MEMORY

    def cancelled(self) -> None:
        """An answer is not wanted any more: that says nothing of its length."""
        self._tokens -= self._tokens / MEMORY
        self._stops -= self._stops / MEMORY


@dataclass(slots=True, eq=False)
class DecodeRequest(Request):
    """Its peer is the writer that sends its KV; None when its prompt is computed here."""

    pending_failure: Failed | None = None
    """How it ended while its writer was to tell the client. If the writer has handed off instead, we must."""
    landed: int | None = None
    """Its first token, when its KV is here but its grammar is not ready yet."""

    @property
    def waits_for_grammar(self) -> bool:
        """It cannot be admitted yet. A reservation can: its grammar is needed when its KV is here."""
        return self.prepares and self.peer is None
