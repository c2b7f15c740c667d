"""The starter: places requests and starts their attempts. Nobody is told yet.

Owns what an attempt asks for, and two rules about new requests: the choices of one prompt go together, and a request that would
be too late goes where it is served soonest, or is refused. Does not know texts, clients, or why an attempt follows another.

Predicted times to first token: how good they are of late, and the requests that are refused because of them.

Owns the last few predictions with what came, and the rule of early rejection. Does not know how a prediction is made.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Protocol

from common.config import RouterConfig
from common.errors import Overloaded, TandemError
from common.ids import AttemptId, InstanceId, shard_of
from router.attempts import Attempt
from router.cache_index import NO_OVERLAP, WholePrompt
from router.cost import Ask
from router.fleet import Fleet
from router.placer import Placement, Placer
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


class Starter:
    """router: its name. detokenizers: the names of its detokenizers, by number."""

    def __init__(
        self,
        router: InstanceId,
        fleet: Fleet,
        detokenizers: Sequence[InstanceId],
        config: RouterConfig,
        predictions: Predictions,
    ) -> None:
        self._router = router
        self._fleet = fleet
        self._detokenizers = detokenizers
        self._predictions = predictions
        self.placer = Placer(fleet.candidates, config)

    def start(self, record: Record, now: float) -> Attempt:
        """The request's next attempt. Raises Unavailable, BadRequest."""
        ask = self._ask(record)
        return _begin(record, self._attempt(record, ask, self.placer.choose(ask), now), now)

    def start_all(self, records: Sequence[Record], now: float) -> list[Attempt]:
        """The first attempts of all choices of a client's request, or none. Raises Overloaded, Unavailable, BadRequest."""
        attempts = self._place_all(records, now, soonest=False)
        if self._predictions.refusal(list(zip(records, attempts, strict=True)), now) is not None:
            _release(attempts, now)
            attempts = self._place_all(records, now, soonest=True)
            refused = self._predictions.refusal(list(zip(records, attempts, strict=True)), now)
            if refused is not None:
                _release(attempts, now)
                self._predictions.rejected += len(records)
                raise refused
        return [_begin(record, attempt, now) for record, attempt in zip(records, attempts, strict=True)]

    def expect(self, record: Record, attempt: Attempt, now: float) -> None:
        """Its first member is told now: others may follow the prompt."""
        if names := self._block_names(record):
            for member in {attempt.first, *attempt.candidates[:1]}:
                self._fleet.caches.expect(member, names, now)

    def _place_all(self, records: Sequence[Record], now: float, *, soonest: bool) -> list[Attempt]:
        """soonest: where their first tokens come soonest, whatever the policies say."""
        attempts: list[Attempt] = []
        former: dict[bytes, Placement] = {}
        try:
            for record in records:
                ask, same = self._ask(record), former.get(record.spec.prompt)
                if same is not None and same.first.info.caches_prefixes and _can_share(record):
                    ask = ask.sharing(WholePrompt(ask.overlap, same.first, ask.prompt_tokens))
                    placement = self.placer.beside(same, ask)
                else:
                    placement = self.placer.soonest(ask, now) if soonest else self.placer.choose(ask)
                    former[record.spec.prompt] = placement
                attempts.append(self._attempt(record, ask, placement, now))
        except TandemError:
            _release(attempts, now)
            raise
        return attempts

    def _attempt(self, record: Record, ask: Ask, placement: Placement, now: float) -> Attempt:
        key = AttemptId(record.spec.request_id, record.attempts, self._router)
        detokenizer = self._detokenizers[shard_of(key, len(self._detokenizers))]
        return Attempt(key, detokenizer, ask, placement, len(record.token_ids), now)

    def _ask(self, record: Record) -> Ask:
        """What the next attempt asks for."""
        names = self._block_names(record)
        return Ask(
            record.prompt_tokens,
            record.remaining_tokens,
            self._fleet.caches.match(names) if names and _can_share(record) else NO_OVERLAP,
            record.spec.session,
            record.avoid | record.crowded,
            record.spec.owner,
        )

    def _block_names(self, record: Record) -> Sequence[int]:
        """None where nobody wants to know what is cached."""
        return record.block_names(size) if (size := self._fleet.caches.page_size) else ()


def _can_share(record: Record) -> bool:
    """What is cached of a prompt is no help to who needs something of each of its tokens."""
    sampling = record.spec.sampling
    return sampling.prompt_logprobs is None and sampling.pooling is None


def _begin(record: Record, attempt: Attempt, now: float) -> Attempt:
    record.attempt = attempt
    record.times.dispatched(record.attempts, attempt.first.info.id, attempt.predicted_s, now)
    record.attempts += 1
    return attempt


def _release(attempts: Sequence[Attempt], now: float) -> None:
    for attempt in attempts:
        attempt.release(now)
