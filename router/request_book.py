"""The request book: the life of every open request, from its dispatch to its one ending.

Owns the open requests and everything that is due for them. Opens no socket, reads no clock, knows no HTTP.

    submit ─► AWAITING ──first token──► GENERATING ──► one ending: of its last attempt, or client gone, deadline, slow client
                │  ▲                      │  ▲
                └──┴─────── resume ───────┴──┘    instance lost, attempt failed, preempted, messages lost, detokenizer moved
                              │ ▲
                           RESUMING               nobody can serve it, or two attempts failed at once: it waits a while

Resume is the only recovery: what is left of the attempt is withdrawn, and the next one begins with prompt + tokens so far under
the next attempt number. Token numbers go on, so the client gets every token once. Messages may be lost: an attempt of which
nothing is heard is probed, and resumed when its members know less or have sent more than has come.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Protocol, assert_never

from common.config import RouterConfig
from common.deadlines import DeadlineWheel
from common.errors import DeadlinePassed, InstanceFailed, Overloaded, Preempted, TandemError, Unavailable
from common.ids import Key, RequestId
from common.instance.ports import Send
from common.messages import Ending, Failed, Finished, Probe, Probed, TextDelta
from router.attempts import Attempt, ResumeReason, Setback
from router.fleet import Fleet
from router.members import Member
from router.outbox import ChoiceDelta, Outbox
from router.policy import choose
from router.requests import Record, RequestSpec

FRUITLESS_ATTEMPTS = 4
"""After so many in a row that brought no token a request ends."""
PAUSE_HEARTBEATS = 2
"""After two such attempts in a row the next one waits so long: an instance refuses faster than its heartbeat says why."""
PROBE_S = 2.0
"""The members of an attempt are asked about it when no token came for so long, and again after as long."""


class Observer(Protocol):
    """Who counts and measures."""

    def first_token(self, seconds: float) -> None: ...

    def next_tokens(self, seconds: float, tokens: int) -> None: ...

    def resumed(self, reason: ResumeReason) -> None: ...

    def resume_gap(self, seconds: float) -> None:
        """From a resumed request's last token (from the resume, if it had none) to its next one."""

    def ended(self, ending: Ending, seconds: float, attempts: int) -> None: ...


class Alarm(Enum):
    """What may be due for a request."""

    DEADLINE = "its time is over"
    WAIT = "it has waited long enough for an instance"
    RETRY = "it may be tried again where it failed"
    NEWS = "no token came for a while"


class RequestBook:
    """Every open request of this router."""

    def __init__(self, fleet: Fleet, observer: Observer, config: RouterConfig) -> None:
        self._fleet = fleet
        self._observer = observer
        self._config = config
        self._open: dict[RequestId, Record] = {}
        self._parked: dict[RequestId, Failed] = {}
        """Those that wait for an instance, and why."""
        self._alarms: DeadlineWheel[tuple[Alarm, RequestId]] = DeadlineWheel()
        self._choices = 0
        self.stale = 0
        """Deltas of requests or attempts that are not open, and tokens that had come already."""
        self.stale_standings = 0
        """What was said of such attempts, or by others than those that serve them."""

    def __len__(self) -> int:
        return len(self._open)

    def records(self) -> Iterable[Record]:
        return self._open.values()

    def require_room(self, requests: int) -> None:
        """Raises Overloaded when so many more do not fit."""
        limit = self._config.max_requests
        if len(self._open) + requests > limit:
            raise Overloaded(f"the router has {len(self._open)} of at most {limit} requests open: try again shortly")

    # --- in --------------------------------------------------------------------------------------------------------------

    def submit(self, specs: Sequence[RequestSpec], outbox: Outbox, received_s: float, now: float) -> list[Send]:
        """Dispatch every choice of a client's request, or none. Raises Overloaded, Unavailable, BadRequest."""
        self.require_room(len(specs))
        placed: list[tuple[Record, Attempt]] = []
        try:
            for spec in specs:
                timeout_s = self._config.request_timeout_s if spec.timeout_s is None else spec.timeout_s
                record = Record(spec, outbox, received_s, received_s + timeout_s)
                placed.append((record, self._place(record, now)))
        except TandemError:
            for _, attempt in placed:
                attempt.release()
            raise
        sends: list[Send] = []
        for record, attempt in placed:
            self._open[record.spec.request_id] = record
            self._alarms.set((Alarm.DEADLINE, record.spec.request_id), record.deadline_s)
            sends += self._launch(record, attempt, now)
        return sends

    def _place(self, record: Record, now: float) -> Attempt:
        """Raises Unavailable, BadRequest."""
        dispatch, prompt_tokens = self._config.dispatch, record.prompt_tokens
        attempt = record.begin(choose(self._fleet, dispatch, prompt_tokens, record.remaining_tokens, record.avoid), now)
        self._choices += 1
        for member in attempt.members:
            member.chosen = self._choices
        return attempt

    def _launch(self, record: Record, attempt: Attempt, now: float) -> list[Send]:
        self._alarms.set((Alarm.NEWS, record.spec.request_id), now + PROBE_S)
        return record.opening(attempt, now)

    # --- tokens ----------------------------------------------------------------------------------------------------------

    def text(self, delta: TextDelta, now: float) -> list[Send]:
        """Text of one request: passed on if it is what comes next."""
        found = self._find(delta.key)
        if found is None or delta.first < found[1].next_token:
            self.stale += 1
            return []
        record, attempt = found
        if delta.first > attempt.next_token:
            gap = f"tokens {attempt.next_token} to {delta.first - 1} of the answer are missing"
            return self._resume(record, attempt, _messages_lost(attempt, gap), now)
        if delta.token_ids:
            self._count(record, attempt, delta.token_ids, now)
        setback = _setback(attempt, delta.ending)
        if delta.ending is not None and setback is None:
            return self._ended_by_text(record, attempt, delta, delta.ending, now)
        if delta.token_ids or delta.text:
            record.texts.append(delta.text)
            record.outbox.put(ChoiceDelta(record.spec.index, delta.text, delta.token_ids))
        if record.outbox.full:
            slow = Failed(message="the client reads too slowly: its request was cancelled", kind="slow_client", status=408)
            return self._break_off(record, slow, now)
        return [] if setback is None else self._resume(record, attempt, setback, now)

    def _find(self, key: Key) -> tuple[Record, Attempt] | None:
        """The request whose present attempt this is."""
        record = self._open.get(key.request_id)
        if record is None or record.attempt is None or record.attempt.key != key:
            return None
        return record, record.attempt

    def _count(self, record: Record, attempt: Attempt, token_ids: Sequence[int], now: float) -> None:
        if record.token_ids:
            self._observer.next_tokens(now - record.last_token_s, len(token_ids))
        else:
            self._observer.first_token(now - record.received_s)
        if record.gap_s is not None:
            self._observer.resume_gap(now - record.gap_s)
        record.gap_s, record.last_token_s = None, now
        record.token_ids += token_ids
        attempt.advance(len(token_ids), now)

    def _ended_by_text(self, record: Record, attempt: Attempt, delta: TextDelta, ending: Ending, now: float) -> list[Send]:
        """The ending came with the text, so the detokenizer knows. The instances know too, unless a stop string ended it; after
        a failure the other instance may not."""
        self._end(record, ending, now, delta.text, delta.token_ids)
        if isinstance(ending, Finished) and not isinstance(ending.matched, str):
            return []
        return attempt.cancels()

    # --- resuming --------------------------------------------------------------------------------------------------------

    def member_lost(self, member: Member, now: float) -> list[Send]:
        """A member left the fleet or is stuck: what cannot go on without it is resumed."""
        lost = Failed.of(Unavailable(f"instance {member.info.id} was lost while it served the request"))
        setback = Setback(ResumeReason.LOST_INSTANCE, lost, (member,))
        return self._resume_all((pair for pair in self._attempts() if member in pair[1].needed), setback, now)

    def detokenizer_moved(self, now: float) -> list[Send]:
        """A new detokenizer has heard of no request yet."""
        moved = Failed.of(Unavailable("the detokenizer was started again while the request was served"))
        return self._resume_all(self._attempts(), Setback(ResumeReason.DETOKENIZER, moved), now)

    def retry_parked(self, now: float) -> list[Send]:
        """Somebody can serve who could not before."""
        return [send for request_id in list(self._parked) for send in self._next_attempt(self._open[request_id], now)]

    def _attempts(self) -> Iterable[tuple[Record, Attempt]]:
        return ((record, record.attempt) for record in self._open.values() if record.attempt is not None)

    def _resume_all(self, pairs: Iterable[tuple[Record, Attempt]], setback: Setback, now: float) -> list[Send]:
        return [send for record, attempt in list(pairs) for send in self._resume(record, attempt, setback, now)]

    def _resume(self, record: Record, attempt: Attempt, setback: Setback, now: float) -> list[Send]:
        """The attempt is over: withdraw what is left of it, and begin the next one, if there may be one."""
        sends = attempt.withdraw()
        record.set_back(attempt, setback, now)
        if record.remaining_tokens == 0:
            self._end(record, Finished(reason="length"), now)
        elif record.attempts >= self._config.max_attempts or record.fruitless >= FRUITLESS_ATTEMPTS:
            self._end(record, setback.failed, now)
        elif record.fruitless >= 2:
            self._observer.resumed(setback.reason)
            self._parked[record.spec.request_id] = setback.failed
            self._alarms.set((Alarm.RETRY, record.spec.request_id), now + PAUSE_HEARTBEATS * self._config.heartbeat_s)
        else:
            self._observer.resumed(setback.reason)
            sends += self._next_attempt(record, now)
        return sends

    def _next_attempt(self, record: Record, now: float) -> list[Send]:
        """Begin it, or let the request wait for somebody who can serve it."""
        request_id = record.spec.request_id
        try:
            attempt = self._place(record, now)
        except TandemError as error:
            self._parked[request_id] = Failed.of(error)
            if (Alarm.WAIT, request_id) not in self._alarms:
                self._alarms.set((Alarm.WAIT, request_id), now + self._config.resume_wait_s)
            return []
        self._parked.pop(request_id, None)
        self._alarms.clear((Alarm.WAIT, request_id))
        self._alarms.clear((Alarm.RETRY, request_id))
        return self._launch(record, attempt, now)

    # --- probes ----------------------------------------------------------------------------------------------------------

    def probe_all(self, now: float) -> list[Send]:
        """What could not come for a while can come again: ask about every attempt, and forget what was said before."""
        attempts = [attempt for _, attempt in self._attempts()]
        for attempt in attempts:
            attempt.hear(now)
        return self._probe(attempts, now)

    def probed(self, message: Probed, now: float) -> list[Send]:
        """A member says what it knows of some attempts."""
        sends: list[Send] = []
        for standing in message.standings:
            found = self._find(standing.key)
            member = None if found is None else found[1].asked(message.id, message.incarnation)
            if found is None or member is None:
                self.stale_standings += 1
                continue
            record, attempt = found
            if attempt.answer(member, standing.next_token):
                lost = f"messages about the request were lost, from token {attempt.next_token} on"
                sends += self._resume(record, attempt, _messages_lost(attempt, lost), now)
        return sends

    def _probe(self, attempts: Iterable[Attempt], now: float) -> list[Send]:
        """Ask everybody who serves one of these attempts, in one message each."""
        asked: dict[Member, list[Key]] = {}
        for attempt in attempts:
            attempt.begin_round()
            self._alarms.set((Alarm.NEWS, attempt.key.request_id), now + PROBE_S)
            for member in attempt.needed:
                asked.setdefault(member, []).append(attempt.key)
        return [Send(member.info.id, Probe(keys=tuple(keys))) for member, keys in asked.items()]

    # --- out -------------------------------------------------------------------------------------------------------------

    def cancel(self, request_ids: Iterable[RequestId], now: float) -> list[Send]:
        """The client has gone. Ids that are not open are those that have ended."""
        sends: list[Send] = []
        for request_id in request_ids:
            record = self._open.get(request_id)
            if record is not None:
                sends += self._break_off(record, Finished(reason="cancelled"), now)
        return sends

    def tick(self, now: float, *, text_flows: bool) -> list[Send]:
        """Act on what is due. text_flows: while it does not, no token can come, and nothing follows from that none does."""
        sends: list[Send] = []
        silent: list[Attempt] = []
        for alarm, request_id in self._alarms.expired(now):
            record = self._open.get(request_id)
            if record is None:
                continue  # another alarm of this moment has ended it
            match alarm:
                case Alarm.DEADLINE:
                    late = DeadlinePassed(f"the request took longer than {record.deadline_s - record.received_s:g} s")
                    sends += self._break_off(record, Failed.of(late), now)
                case Alarm.WAIT:
                    sends += self._break_off(record, self._parked[request_id], now)
                case Alarm.RETRY:
                    sends += self._next_attempt(record, now)
                case Alarm.NEWS:
                    if record.attempt is not None and self._is_silent(record.attempt, now, text_flows=text_flows):
                        silent.append(record.attempt)
                case _:
                    assert_never(alarm)
        return sends + self._probe([attempt for attempt in silent if self._find(attempt.key) is not None], now)

    def next_deadline(self) -> float | None:
        return self._alarms.next_deadline()

    def _is_silent(self, attempt: Attempt, now: float, *, text_flows: bool) -> bool:
        """Whether its members are to be asked now. Tokens move no alarm: one that rings early is set again."""
        if not text_flows:
            attempt.hear(now)
        due_s = attempt.news_s + PROBE_S
        if due_s > now:
            self._alarms.set((Alarm.NEWS, attempt.key.request_id), due_s)
        return due_s <= now

    def _break_off(self, record: Record, ending: Ending, now: float) -> list[Send]:
        """End a request that the others believe to be open."""
        sends = [] if record.attempt is None else record.attempt.withdraw()
        self._end(record, ending, now)
        return sends

    def _end(self, record: Record, ending: Ending, now: float, text: str = "", token_ids: tuple[int, ...] = ()) -> None:
        """The one door out. text, token_ids: what comes with the ending."""
        request_id = record.spec.request_id
        del self._open[request_id]
        self._parked.pop(request_id, None)
        for alarm in Alarm:
            self._alarms.clear((alarm, request_id))
        if record.attempt is not None:
            record.attempt.release()
        record.outbox.put(ChoiceDelta(record.spec.index, text, token_ids, ending))
        self._observer.ended(ending, now - record.received_s, record.attempts)


def _setback(attempt: Attempt, ending: Ending | None) -> Setback | None:
    """Why the request is to be resumed, if this ending of an attempt is not that of the request."""
    if not isinstance(ending, Failed) or not ending.retryable:
        return None
    if ending.kind == Preempted.kind:
        return Setback(ResumeReason.PREEMPTED, ending)
    return Setback(ResumeReason.FAILED_ATTEMPT, ending, attempt.needed)


def _messages_lost(attempt: Attempt, reason: str) -> Setback:
    return Setback(ResumeReason.LOST_MESSAGES, Failed.of(InstanceFailed(reason)), attempt.needed)
