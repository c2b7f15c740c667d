"""The requests of a decode instance that hold memory: how one joins the batch, and how it ends and leaves.

Owns the page pool, the rows, the running batch with its forecast, and the reservations, because a request may leave only when all
have let go of it. Does not decide who is admitted, planned or preempted.

Growth: how many pages the running requests will need at once, if answers turn out as long as answers have been.

Owns the measure of answers and the forecast made of it. Knows the running batch and pages as numbers. Admits nobody.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from common.executor import EngineDescription, RowStart
from common.ids import AttemptId, Int64Array, Life, pack_ids
from common.instance.ports import Action, Send
from common.instance.prompt_cache import PromptCache
from common.instance.request import Phase, PromptProgress, Request
from common.instance.requests import InstanceLimits, RequestTable, Rows
from common.messages import Decline, Ending, Failed, Generate, InstanceInfo, Reserve
from common.pages.pool import PagePool
from common.pages.radix_cache import Hit
from decode.batch import Batch
from kv_transfer.handoff_target import HandoffTarget

MEMORY = 64
"""Each answer takes one part in so many from the weight of all before it."""
PRIOR_ANSWERS = 4
"""The first forecast weighs as much as so many answers, for ever. So answers that all reach short limits raise it little."""
DEVIATIONS = 1.0
"""The margin: so many standard deviations of the mean of as many answers as run. The deviation of one is about its mean."""
_NOTHING = np.zeros(1, dtype=np.int64)


class AnswerLength:
    """How many tokens an answer has if its limit allows. first: until some have ended."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._tokens = self._stops = 0.0

    def add(self, tokens: int, *, stopped: bool) -> None:
        """An answer had so many tokens. stopped: it was complete. Otherwise it would have been longer."""
        self.fade()
        self._tokens += tokens
        self._stops += stopped

    def fade(self) -> None:
        """An answer ended that says nothing of its length."""
        self._tokens -= self._tokens / MEMORY
        self._stops -= self._stops / MEMORY

    def of(self, running: int) -> int:
        """The tokens to expect of each of so many answers, with the margin."""
        mean = (PRIOR_ANSWERS * self._first + self._tokens) / (PRIOR_ANSWERS + self._stops)
        return math.ceil(mean * (1 + DEVIATIONS / math.sqrt(max(1, running))))


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
    """The forecast of a decode instance. first_answer: see `AnswerLength`."""

    def __init__(self, batch: Batch, page_size: int, first_answer: int) -> None:
        self._batch = batch
        self._page_size = page_size
        self._lengths = AnswerLength(first_answer)

    def forecast(self, available_pages: int, without: Sequence[int] = ()) -> Forecast:
        """Costs a few array operations, however many run; made only when somebody waits. without: rows that are about to end."""
        answer = self._lengths.of(self._batch.running - len(without))
        held, still = self._batch.pages(answer, self._page_size, without)
        return Forecast(answer, self._page_size, held, still, available_pages)

    def ended(self, row: int, *, stopped: bool) -> None:
        """The answer of a row is over. stopped: by itself; otherwise it reached its limit, or was preempted."""
        self._lengths.add(int(self._batch.sampled[row]), stopped=stopped)

    def cancelled(self) -> None:
        """An answer is not wanted any more."""
        self._lengths.fade()


_IN_BATCH = (Phase.COMPUTING, Phase.DECODING)


@dataclass(slots=True, eq=False)
class DecodeRequest(Request):
    """Its peer is the writer that sends its KV; None when its prompt is computed here.

    row: its place in the batch, once admitted. untold: how it ended while its writer was to tell the client; if the writer has
    handed off instead, we must. settles: its pages wait until what has arrived for them is in memory.
    landed: its first token, when its KV is here but its grammar is not ready yet.
    """

    row: int | None = None
    untold: Failed | None = None
    settles: bool = False
    landed: int | None = None

    @property
    def waits(self) -> bool:
        """It stays in the waiting line until there is room. Otherwise its writer asks elsewhere when there is none at once."""
        return not isinstance(self.asked, Reserve) or self.asked.waits

    @property
    def waits_for_grammar(self) -> bool:
        """It cannot be admitted yet. A reservation can: its grammar is needed when its KV is here."""
        return self.prepares and self.peer is None

    @property
    def waits_since_s(self) -> float:
        """Since when it waits for memory, on this instance's clock. Its writer may have asked elsewhere meanwhile."""
        return self.times.accepted_s - (self.asked.waited_s if isinstance(self.asked, Reserve) else 0.0)


class DecodeRequests:
    """by_row: the request in each row. computing: rows whose prompt has tokens to launch here, in the order of admission. starts:
    rows that begin with the next plan."""

    def __init__(self, me: InstanceInfo, engine: EngineDescription, limits: InstanceLimits) -> None:
        self._page_size = engine.layout.page_size
        self.table = RequestTable(DecodeRequest, me, engine, limits)
        self.pool = PagePool(engine.total_pages, limits.prefix_cache)
        self.prompts = PromptCache(self.pool, self._page_size)
        self.rows = Rows(engine.max_rows)
        self.batch = Batch(engine.max_rows, engine.eos_token_ids)
        self.growth = Growth(self.batch, self._page_size, limits.answer_tokens)
        self.target = HandoffTarget(me.incarnation)
        self.by_row: dict[int, DecodeRequest] = {}
        self.leaving: dict[AttemptId, DecodeRequest] = {}
        """Those whose row is free again, while a writer may still write their pages. A row is scarcer than pages: many writers
        that do not let go must not keep everybody out."""
        self.computing: dict[int, PromptProgress] = {}
        self.starts: list[RowStart] = []

    def look_up(self, request: DecodeRequest) -> Hit:
        """The pages of its prompt that are in the prefix cache. A prompt that is computed elsewhere may be there whole."""
        if request.peer is None:
            return self.prompts.find(request)
        request.hit = self.pool.cache.match(request.keys, len(request.prompt) // self._page_size, request.hit)
        return request.hit

    def hold(self, request: DecodeRequest, sampled: int = 0) -> None:
        """The request has its pages and its row. sampled: see `Batch.join`."""
        assert request.row is not None and request.lease is not None
        self.by_row[request.row] = request
        room = len(request.lease) * self._page_size
        shared, sampling = request.lease.found, request.asked.sampling
        self.batch.join(request.row, sampling, len(request.prompt), room, sampled=sampled, shared=shared)

    def start(self, request: DecodeRequest, sampled: int, length: int = 0, last_token: int | None = None) -> None:
        """The request is in the batch from the next plan on. sampled: see `Batch.join`. length, last_token: see `RowStart`."""
        assert request.row is not None
        self.hold(request, sampled)
        self.starts.append(request.row_start(request.row, length, last_token))

    def landed(self, request: DecodeRequest) -> None:
        """The KV of its prompt is here, and no step has its pages yet: what others have computed meanwhile takes their place."""
        assert request.lease is not None
        request.lease.publish(request.keys, len(request.prompt) // self._page_size, replaces=True)

    def published(self, request: DecodeRequest, tokens: int) -> None:
        """The KV of its first `tokens` tokens is final: whoever begins with the same may share their whole pages."""
        assert request.lease is not None
        request.lease.publish(request.keys, tokens // self._page_size)

    def _publish_rest(self, request: DecodeRequest) -> None:
        """No step writes its KV any more. What it sampled last was never fed back, so that has no KV."""
        sampled, progress = int(self.batch.sampled[request.row]), request.progress
        if not sampled:
            self.published(request, 0 if progress is None else progress.computed)
        elif len(request.token_ids) == sampled:
            request.keys.extend(pack_ids(request.token_ids[:-1]))
            self.published(request, len(request.prompt) + sampled - 1)

    def holders(self) -> Iterable[DecodeRequest]:
        """All that hold pages, also those that have ended."""
        return chain(self.by_row.values(), self.leaving.values())

    def comes_home(self, request: DecodeRequest, now: float) -> bool:
        """Whether it has ended, and what it holds is free soon."""
        return request.phase is Phase.ENDED and not self.target.is_stuck(request.key, now)

    def compute(self, request: DecodeRequest) -> None:
        """It has pages and a row: its prompt is computed here, from behind its hit on."""
        assert request.row is not None
        have_tokens = request.cached_tokens
        progress = PromptProgress(request.row, request.prompt, have_tokens, have_tokens, request.owner)
        request.phase, request.progress = Phase.COMPUTING, progress
        self.computing[request.row] = progress
        self.start(request, sampled=0, length=have_tokens)

    def decode(self, request: DecodeRequest, first_token: int) -> None:
        """Its KV is here: it decodes from the next plan on, or when its grammar is ready."""
        request.phase = Phase.DECODING
        if request.prepares:
            request.landed = first_token
        else:
            request.landed = None
            self.start(request, sampled=1, length=len(request.prompt), last_token=first_token)

    def prepared(self, request: DecodeRequest, refused: Failed | None, now: float) -> list[Action]:
        """Its grammar is ready, or never will be."""
        if refused is not None:
            return self.end(request, refused, now)
        if request.landed is not None:
            self.decode(request, request.landed)
        return []

    def end(self, request: DecodeRequest, ending: Ending | None, now: float) -> list[Action]:
        """The one door. `ending` is told to the client, or None when the client knows or another instance tells it.

        While a writer holds the request, the writer tells the client: only it knows whether the first token went out.
        """
        before = self.table.end(request, now)
        if before is None:
            return []
        actions: list[Action] = []
        if request.peer is not None and before not in _IN_BATCH:
            self.target.cancel(request.key, now)
            if isinstance(ending, Failed):
                actions.append(decline(request.peer, request.asked, ending))
                request.untold = ending
        elif ending is not None:
            actions.append(self.table.tell(request, ending))
        if request.row is not None:
            self.batch.leave(request.row)
            self.computing.pop(request.row, None)
        if request.progress is not None:
            self.prompts.ended(request)
        self.release(request, now)
        return actions

    def release(self, request: DecodeRequest, now: float) -> None:
        """Bring home what nothing in flight can touch of a request that has ended. Its row: no step names it. Its pages: no step
        uses them either, and no writer may write them."""
        if request.row is not None:
            if self.rows.in_flight[request.row]:
                return
            self._publish_rest(request)
            del self.by_row[request.row]
            self.rows.give_back(request.row)
            self.starts = [start for start in self.starts if start.row != request.row]
            request.row = None
            self.leaving[request.key] = request
        if request.key not in self.target.open and not request.settles:
            self.leaving.pop(request.key, None)
            self.table.remove(request, now)


def decline(writer: Life, asked: Generate | Reserve, failed: Failed) -> Send:
    """asked: the Reserve that is declined."""
    sent_s = asked.sent_s if isinstance(asked, Reserve) else None
    return Send(writer.id, Decline(key=asked.key, failed=failed, sent_s=sent_s))
