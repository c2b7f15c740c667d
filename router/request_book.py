"""The request book: the life of every open request, from its arrival to its one ending.

Owns the open requests and everything that is due for them. Opens no socket, reads no clock, knows no HTTP.

    arrive ─► its body is read and its prompts are tokenized; what is aborted meanwhile ends when it is dispatched
       │
    submit ─► AWAITING ──first token──► GENERATING ──► one ending: of its last attempt, or client gone, deadline, slow client
                │  ▲                      │  ▲
                └──┴─────── resume ───────┴──┘    instance lost, attempt failed, preempted, messages lost for good
                              │ ▲
                           RESUMING               nobody can serve it, or two attempts in a row brought no token: it waits

Resume is the only recovery: the book withdraws what is left of the attempt and starts the next one with prompt + tokens so far,
under the next attempt number. Token numbers go on, so the client gets every token once. When messages are lost or a detokenizer
is started again, tokens are told again first (`retelling.py`); the book resumes what that did not help.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import assert_never

from msgspec.structs import replace

from common.config import RouterConfig
from common.deadlines import DeadlineWheel, earliest
from common.errors import BadRequest, DeadlinePassed, InstanceFailed, Preempted, TandemError, Unavailable, WeightsChanged
from common.ids import AttemptId, InstanceId, Life, RequestId
from common.instance.ports import Send
from common.logs import with_fields
from common.messages import Ending, Failed, Finished, Generate, Probed, Terms, TextDelta
from common.tracing import SpanRecorder
from router.adapters import Replacement
from router.attempts import Attempt, Record, Setback
from router.fleet import Members
from router.members import Member
from router.placement import Placer
from router.requests import ChoiceDelta, ClientRequest, Places, RequestSpec, nobody_reads
from router.retelling import Retelling
from router.timelines import Observer, PastLoad, RequestTimes, ResumeReason, Timelines
from router.traces import record_attempt, record_request

_log = logging.getLogger(__name__)
FRUITLESS_ATTEMPTS = 4
"""A request ends after this many attempts in a row that brought no token."""
FAILED_STEPS = 2
"""A request ends when so many instances ended by a step that it was in: it may be the reason, and is not carried to a third."""
PAUSE_HEARTBEATS = 2
"""After two such attempts the next one waits this many heartbeats: an instance refuses a request sooner than its heartbeat says
why."""


class Alarm(Enum):
    """What may be due for a request."""

    DEADLINE = "its time is over"
    WAIT = "it has waited long enough for an instance"
    RETRY = "it may be tried again where it failed"


class RequestBook:
    """Every open request of this router. router: its name. detokenizers: the names of its detokenizers, by number."""

    def __init__(
        self,
        router: InstanceId,
        fleet: Members,
        observer: Observer,
        config: RouterConfig,
        detokenizers: Sequence[InstanceId],
        recorder: SpanRecorder,
    ) -> None:
        self._fleet = fleet
        self._observer = observer
        self._recorder = recorder
        self._config = config
        self.clients: dict[ClientRequest, None] = {}
        """Every client's request that has arrived and whose response has not ended."""
        self._records: dict[RequestId, Record] = {}
        self._parked: dict[RequestId, Failed] = {}
        """The requests that wait for an instance, and why."""
        self._alarms: DeadlineWheel[tuple[Alarm, RequestId]] = DeadlineWheel()
        self.retelling = Retelling(self._find)
        self.timelines = Timelines(observer)
        self.past = PastLoad()
        self._room = config.max_requests // 4
        """Places that lines of batches leave to other requests."""
        self.places = Places(config.max_requests, "requests")
        """A request has places for its choices from when its prompts are tokenized."""
        self.is_draining = False
        """No more requests are taken."""
        self._stopped: Failed | None = None
        """Why every request ends that is not dispatched yet; None: it does not."""
        self.placer = Placer(router, detokenizers, fleet, config)
        self.stale = 0
        """Dropped deltas: of requests or attempts that are not open, with tokens that had come already, or after a gap."""

    def next_deadline(self) -> float | None:
        """When `tick` must be called; None when nothing is due."""
        return earliest(self._alarms.next_deadline(), self.retelling.next_deadline())

    def __len__(self) -> int:
        return len(self._records)

    def records(self) -> Iterable[Record]:
        return self._records.values()

    def newest(self) -> Iterator[Record]:
        """The same, that which came last first."""
        return reversed(self._records.values())

    # --- in --------------------------------------------------------------------------------------------------------------

    def arrive(self, client: ClientRequest, now: float) -> None:
        """Know a request before it is read. It must `leave`. Raises Unavailable when the router drains."""
        if self.is_draining:
            raise Unavailable("the router is draining and will stop: send the request to another router, or try again later")
        client.received_s = now
        self.clients[client] = None

    def reserve(self, client: ClientRequest, choices: int) -> None:
        """Take places for so many choices. Raises Overloaded, BadRequest when there are never so many."""
        # What comes later is lower in priority only where it waits at an instance: here it would find all places taken.
        needed = choices + (self._room if client.is_from_batch else 0)
        if not self.places.could_have(client.owner, needed):
            most = f"--max-requests {self._config.max_requests}"
            raise BadRequest(f"the router never has {choices} choices open for one request ({most}): send fewer", field="n")
        self.places.require(client.owner, needed)
        self.places.take(client.owner, choices)
        client.places += choices

    def submit(self, client: ClientRequest, specs: Sequence[RequestSpec], now: float) -> list[Send]:
        """Dispatch every choice of a client's request, or none, and end those that were aborted while it was read. Raises
        Overloaded, Unavailable, BadRequest."""
        if self._stopped is not None:
            raise Unavailable(self._stopped.message)
        if client.places < len(specs):
            self.reserve(client, len(specs) - client.places)
        records: list[Record] = []
        for spec in specs:
            timeout_s = spec.timeout_s
            if timeout_s is None:  # lines of batches may wait for hours, and end with their batch
                timeout_s = self._config.max_request_timeout_s if client.is_from_batch else self._config.request_timeout_s
            times = RequestTimes(
                request_id=spec.request_id,
                index=spec.index,
                owner=spec.owner,
                prompt_tokens=spec.prompt_tokens,
                received_s=client.received_s,
                tokenized_s=now,
            )
            records.append(Record(spec, client, times, timeout_s))
        adapters, weights = self._fleet.adapters, self._fleet.weights
        parked_for = Unavailable("the fleet is paused: its weights are to change") if weights.is_held else None
        attempts: list[Attempt] = []
        try:
            for record in records:
                record.adapter = adapters.begin(record.spec.adapter, now)
            try:
                if parked_for is None:
                    attempts = self.placer.start(records, now)
            except Unavailable as error:
                if not weights.is_settling:
                    raise
                parked_for = error
        except TandemError:
            for record in records:
                adapters.end(record.adapter)
            self.places.leave(client.owner, client.places)
            client.places = 0
            raise
        client.places -= len(specs)
        client.request_ids = tuple(spec.request_id for spec in specs)
        client.times = tuple(record.times for record in records)
        client.unended = len(specs)
        sends: list[Send] = []
        for record in records:
            self._records[record.spec.request_id] = record
            self.timelines.begin(record.times)
            self._alarms.set((Alarm.DEADLINE, record.spec.request_id), record.deadline_s)
            if parked_for is not None:
                self._park(record.spec.request_id, parked_for, now)
        for attempt in attempts:
            sends += self._announce(attempt, now)
        self.timelines.name({name: [specs[number].request_id for number in numbers] for name, numbers in client.names.items()})
        return sends + self.cancel([specs[number].request_id for number in client.aborted], now)

    def _park(self, request_id: RequestId, reason: TandemError, now: float) -> None:
        """The request waits for a member that can serve it: for a while, or where people have paused the fleet until its
        deadline."""
        self._parked[request_id] = Failed.of(reason)
        if self._fleet.weights.is_held:
            self._alarms.clear((Alarm.WAIT, request_id))
        elif (Alarm.WAIT, request_id) not in self._alarms:
            self._alarms.set((Alarm.WAIT, request_id), now + self._config.resume_wait_s)

    def _announce(self, attempt: Attempt, now: float) -> list[Send]:
        """The request's next attempt begins: tell the detokenizer to expect its tokens, and its first member to serve it."""
        record = attempt.record
        record.attempt = attempt
        record.times.dispatched(record.attempts, attempt.first.info.id, attempt.grounds, now)
        record.attempts += 1
        if _log.isEnabledFor(logging.DEBUG):
            known = with_fields(record.spec.request_id, **record.times.attempts[-1].facts())
            _log.debug("dispatched", extra=known)
        if attempt.demand.blocks:
            self._fleet.caches.expect((attempt.first, *attempt.candidates[:1]), attempt.demand.blocks, now)
        spec, first = record.spec, attempt.next_token
        # Log probabilities of the prompt have come with the answer's first token.
        prompt_logprobs = None if first else spec.sampling.prompt_logprobs
        generate = Generate(
            key=attempt.key,
            prompt=record.prompt,
            sampling=replace(spec.sampling, max_new_tokens=record.remaining_tokens, prompt_logprobs=prompt_logprobs),
            decodes=tuple(member.info.id for member in attempt.candidates),
            first=first,
            terms=Terms(
                priority=spec.priority,
                age_s=max(0.0, now - record.times.received_s),
                timeout_s=max(0.0, record.deadline_s - now),
                owner=spec.owner,
            ),
            salt=spec.salt,
            variant=attempt.variant,
            incarnation=attempt.first.info.incarnation,
        )
        return [self.retelling.expect(attempt, now), Send(attempt.first.info.id, generate)]

    # --- tokens ----------------------------------------------------------------------------------------------------------

    def text(self, delta: TextDelta, now: float) -> list[Send]:
        """Pass on text of one request if it is what comes next."""
        attempt = self._find(delta.key)
        if attempt is None or delta.first != attempt.next_token:
            self.stale += 1
            if attempt is not None and (delta.ending is not None or delta.first + len(delta.token_ids) > attempt.next_token):
                self.retelling.gap(attempt)  # there is something new in it, but not from the next token on
            return []
        record, client = attempt.record, attempt.record.client
        if delta.token_ids:
            self._observe(record, len(delta.token_ids), now)
            attempt.advance(delta.token_ids, now)
            if delta.cached_tokens:
                record.times.cached_tokens += delta.cached_tokens
        setback = None
        if delta.ending is not None:
            setback = _setback(attempt, delta.ending)
            if setback is None:
                self._end(record, delta.ending, now, delta)
                # The ending came with the text, so the detokenizer knows it. The instances know it too, except for a stop string;
                # after a failure the other instance may not.
                told = isinstance(delta.ending, Finished) and not isinstance(delta.ending.matched, str)
                return attempt.close() + ([] if told else attempt.cancels(complete=isinstance(delta.ending, Finished)))
        if delta.token_ids or delta.text:
            record.texts.append(delta.text)
            client.put(_news(record, delta, None))
        if client.unread_chars > client.limit_chars:
            slow = Failed(message="the client reads too slowly: its request was cancelled", kind="slow_client", status=408)
            return self._break_off(record, slow, now)
        if setback is not None:
            return self._resume(attempt, setback, now)
        return self.retelling.ask([attempt], now) if attempt.should_ask_where() else []

    def _find(self, key: AttemptId) -> Attempt | None:
        """The present attempt of a request, if it has this id."""
        record = self._records.get(key.request_id)
        attempt = None if record is None else record.attempt
        return attempt if attempt is not None and attempt.key == key else None

    def _observe(self, record: Record, tokens: int, now: float) -> None:
        """So many tokens have come."""
        times = record.times
        if times.last_token_s is None:
            times.first_token_s = now
            self._observer.first_token(now - times.received_s, times.predicted_first_s)
            self.placer.note_first_token(times.predicted_first_s, now - times.received_s)
        else:
            self._observer.next_tokens(now - times.last_token_s, tokens)
        if record.gap_since_s is not None:
            self._observer.resume_gap(now - record.gap_since_s)

    # --- where it is decoded ---------------------------------------------------------------------------------------------

    def placed(self, key: AttemptId, told_by: Life, decode: Life, now: float) -> list[Send]:
        """A prefill instance says which decode instance has granted the reservation of an attempt. When that one is lost
        meanwhile, the attempt is resumed: nobody noticed then."""
        attempt = self._find(key)
        if attempt is None or attempt.first.life != told_by:
            self.stale += 1
            return []
        if attempt.decode is not None:
            return []
        member = self._fleet.find(decode)
        if member is None or member.stuck:
            return self._resume(attempt, _lost(decode.id, () if member is None else (member,)), now)
        attempt.place(member)
        times = attempt.record.times.attempts[-1]
        times.decode, times.placed_s = decode.id, now
        return []

    # --- resuming --------------------------------------------------------------------------------------------------------

    def needing(self, member: Member) -> list[Attempt]:
        """The attempts that cannot go on without this member."""
        return [attempt for attempt in self._attempts() if member in attempt.needed]

    def member_lost(self, member: Member, attempts: Sequence[Attempt], now: float) -> list[Send]:
        """A member left the fleet or is stuck: resume the requests that need it."""
        setback = _lost(member.info.id, (member,))
        return [send for attempt in attempts for send in self._resume(attempt, setback, now)]

    def suspect(self, keys: Iterable[AttemptId], member: Member, failure: str) -> None:
        """These attempts were in a step whose failure has ended this member, which is lost in a moment. failure: of which, and
        why."""
        for key in keys:
            attempt = self._find(key)
            if attempt is not None and member in attempt.members:
                attempt.record.failed_steps.append(failure)

    def detokenizer_moved(self, detokenizer: InstanceId) -> None:
        """A new detokenizer knows no request yet: open every answer there whose text it makes, a few in each turn."""
        self.retelling.tell_again(attempt for attempt in self._attempts() if attempt.detokenizer == detokenizer)

    def retry_parked(self, now: float) -> list[Send]:
        """More members can serve than before: try every request that waits for one. One that pauses after fruitless attempts goes
        on pausing, or a fleet that grows would use up its attempts in a moment."""
        waiting = [request_id for request_id in self._parked if (Alarm.RETRY, request_id) not in self._alarms]
        return [send for request_id in waiting for send in self._try_again(self._records[request_id], now)]

    @property
    def has_attempts(self) -> bool:
        """Whether any request is dispatched."""
        return any(True for _ in self._attempts())

    def _attempts(self) -> Iterable[Attempt]:
        return (record.attempt for record in self._records.values() if record.attempt is not None)

    def _resume(self, attempt: Attempt, setback: Setback, now: float) -> list[Send]:
        """Withdraw what is left of the attempt, and start the next one if the request may have another."""
        record = attempt.record
        sends = attempt.withdraw()
        self.retelling.drop(attempt)
        record.set_back(attempt, setback, now)
        if self._recorder.on:
            record_attempt(self._recorder, record.times, now)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("set back: %s", setback.failed.message, extra=with_fields(record.spec.request_id, reason=setback.reason))
        # Preemptions need no limit: they end with the request's deadline, and become rarer as it grows older than the others. Nor
        # do changes of weights, which people order.
        if record.remaining_tokens == 0:
            self._end(record, Finished(reason="length"), now)
        elif len(record.failed_steps) >= FAILED_STEPS:
            self._end(record, _ends_instances(record), now)
        elif record.attempts - record.excused >= self._config.max_attempts or record.fruitless >= FRUITLESS_ATTEMPTS:
            self._end(record, setback.failed, now)
        else:
            self._observer.resumed(setback.reason)
            is_refused = setback.reason is ResumeReason.WEIGHTS and not attempt.tokens  # its heartbeat will say what it has now
            if record.fruitless < 2 and not is_refused:
                return sends + self._try_again(record, now)
            self._parked[record.spec.request_id] = setback.failed
            self._alarms.set((Alarm.RETRY, record.spec.request_id), now + PAUSE_HEARTBEATS * self._config.heartbeat_s)
        return sends

    def _try_again(self, record: Record, now: float) -> list[Send]:
        """Start the next attempt, or park the request until a member can serve it. While nothing is placed it waits, until its
        deadline."""
        request_id = record.spec.request_id
        if self._fleet.weights.is_held:
            self._park(request_id, Unavailable("the fleet is paused"), now)
            return []
        try:
            attempt = self._place_again(record, now)
        except TandemError as error:
            self._park(request_id, error, now)
            return []
        self._parked.pop(request_id, None)
        self._alarms.clear((Alarm.WAIT, request_id))
        self._alarms.clear((Alarm.RETRY, request_id))
        return self._announce(attempt, now)

    def _place_again(self, record: Record, now: float) -> Attempt:
        """Raises what `Placer.restart` raises. Where nobody holds its adapter any more, it gets what the name stands for now."""
        adapters = self._fleet.adapters
        try:
            return self.placer.restart(record, now)
        except Unavailable:
            if not adapters.is_lost(record.adapter):
                raise
            record.adapter = adapters.change(record.adapter, record.spec.adapter, now)
            return self.placer.restart(record, now)

    # --- probes ----------------------------------------------------------------------------------------------------------

    def probe_all(self, detokenizer: InstanceId, now: float) -> list[Send]:
        """Its tokens can come again after a pause: ask about every attempt, and forget what its members said before."""
        attempts = [attempt for attempt in self._attempts() if attempt.detokenizer == detokenizer]
        for attempt in attempts:
            attempt.restart_silence(now)
        return self.retelling.ask(attempts, now)

    def probed(self, message: Probed, now: float) -> list[Send]:
        """Take in what a member knows about some attempts, and resume those that have lost messages for good."""
        life, sends = Life(message.id, message.incarnation), list[Send]()
        for standing in message.standings:
            if standing.decode is not None:
                sends += self.placed(standing.key, life, standing.decode, now)
        for attempt in self.retelling.probed(message):
            lost = Failed.of(InstanceFailed(f"messages about the request were lost, from token {attempt.next_token} on"))
            sends += self._resume(attempt, Setback(ResumeReason.LOST_MESSAGES, lost, attempt.needed), now)
        return sends

    # --- out -------------------------------------------------------------------------------------------------------------

    def leave(self, client: ClientRequest, now: float) -> list[Send]:
        """Its response has ended, or its client has gone: end what is open of it. Idempotent."""
        self.clients.pop(client, None)
        self.places.leave(client.owner, client.places)
        client.places, client.wake = 0, nobody_reads
        return self.cancel(client.request_ids, now) if client.unended else []

    def abort(self, owner: str, name: str | None, now: float) -> tuple[int, list[Send]]:
        """End the choices that this owner's clients know by this id; None: all of the owner's. Those of a request that is still
        read end when it is dispatched. Returns how many choices that ends."""
        count, sends = 0, list[Send]()
        for client in [client for client in self.clients if client.owner == owner]:
            numbers = client.numbers(name)
            if client.request_ids:
                open_ids = [client.request_ids[number] for number in numbers if client.request_ids[number] in self._records]
                count += len(open_ids)
                sends += self.cancel(open_ids, now)
            else:
                count += len(set(numbers) - client.aborted)
                client.aborted.update(numbers)
        return count, sends

    def cancel(self, request_ids: Iterable[RequestId], now: float) -> list[Send]:
        """End these requests. Ids that are not open belong to requests that have ended."""
        sends: list[Send] = []
        for request_id in request_ids:
            record = self._records.get(request_id)
            if record is not None:
                sends += self._break_off(record, Finished(reason="cancelled"), now)
        return sends

    def set_back_all(self, now: float) -> list[Send]:
        """Withdraw every attempt: the requests go on when requests are placed again."""
        setback = Setback(ResumeReason.WEIGHTS, Failed.of(Unavailable("the fleet is paused")))
        return [send for attempt in list(self._attempts()) for send in self._resume(attempt, setback, now)]

    def adapter_replaced(self, replaced: Replacement, now: float) -> list[Send]:
        """Requests that have the former adapter end, or go on with the new one."""
        former, name = replaced.former, replaced.new.name
        concerned = [each for each in self._records.values() if each.adapter == former and each.spec.adapter == name]
        if replaced.mode == "abort":
            return self.cancel([record.spec.request_id for record in concerned], now)
        setback, sends = Setback(ResumeReason.WEIGHTS, Failed.of(Unavailable("its adapter was replaced"))), list[Send]()
        for record in concerned:
            record.adapter = self._fleet.adapters.exchange(record.adapter, replaced.new)
            sends += [] if record.attempt is None else self._resume(record.attempt, setback, now)
        return sends

    def abort_all(self, now: float) -> list[Send]:
        """End every request that was dispatched, as its client could have."""
        return self.cancel(list(self._records), now)

    def end_all(self, failed: Failed, now: float) -> list[Send]:
        """The router stops: end every open request, and those that are still read when they would be dispatched."""
        self._stopped = failed
        return [send for record in list(self._records.values()) for send in self._break_off(record, failed, now)]

    def tick(self, now: float, heard_s: Mapping[InstanceId, float]) -> list[Send]:
        """Act on what is due. heard_s: see `Retelling.tick`."""
        sends: list[Send] = []
        for alarm, request_id in self._alarms.expired(now):
            record = self._records.get(request_id)
            if record is None:
                continue  # an alarm before this one has ended it
            match alarm:
                case Alarm.DEADLINE:
                    sends += self._break_off(record, Failed.of(self._too_slow(record)), now)
                case Alarm.WAIT if self._fleet.weights.is_held:
                    pass  # it waits for those who have paused the fleet
                case Alarm.WAIT:
                    sends += self._break_off(record, self._parked[request_id], now)
                case Alarm.RETRY:
                    sends += self._try_again(record, now)
                case _:
                    assert_never(alarm)
        return sends + self.retelling.tick(now, heard_s)

    def _too_slow(self, record: Record) -> DeadlinePassed:
        allowed_s, most_s = record.timeout_s, self._config.max_request_timeout_s
        more = f": a request may ask for up to {most_s:g} s with `timeout`" if allowed_s < most_s else ""
        return DeadlinePassed(f"the request took longer than {allowed_s:g} s{more}")

    def _break_off(self, record: Record, ending: Ending, now: float) -> list[Send]:
        """End a request that instances and detokenizer believe is open."""
        sends = [] if record.attempt is None else record.attempt.withdraw()
        self._end(record, ending, now)
        return sends

    def _end(self, record: Record, ending: Ending, now: float, last: TextDelta | None = None) -> None:
        """The one way out of the book. last: what comes with the ending."""
        ending = record.spec.in_client_words(ending)
        request_id = record.spec.request_id
        del self._records[request_id]
        self._fleet.adapters.end(record.adapter)
        self.places.leave(record.spec.owner)
        self._parked.pop(request_id, None)
        for alarm in Alarm:
            self._alarms.clear((alarm, request_id))
        record.times.ended(ending, now)
        if record.attempt is not None:
            self.retelling.drop(record.attempt)
            record.attempt.release(now)
            record.times.attempts[-1].tokens = record.attempt.tokens
            if self._recorder.on:
                record_attempt(self._recorder, record.times, now)
        if self._recorder.on:
            record_request(self._recorder, record.times, now)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("ended", extra=with_fields(request_id, **record.times.facts()))
        record.client.put(ChoiceDelta(record.spec.index, "", (), ending) if last is None else _news(record, last, ending))
        self.timelines.end(record.times)
        self.past.add(record.times.received_s, record.spec.prompt_tokens, record.times.tokens, record.spec.blocks, now)
        self._observer.ended(ending, record.times, record.attempts)


def _news(record: Record, delta: TextDelta, ending: Ending | None) -> ChoiceDelta:
    """What the client gets of this text."""
    attempt = record.attempt
    versions: tuple[tuple[int, str], ...] = ()
    if delta.token_ids and attempt is not None and attempt.weight_version != record.weight_version:
        record.weight_version = attempt.weight_version
        versions = ((delta.first, attempt.weight_version),)
    if delta.drafts[0]:
        drafted, accepted = record.times.drafts
        record.times.drafts = drafted + delta.drafts[0], accepted + delta.drafts[1]
    of_tokens = delta.logprobs, delta.prompt_logprobs, delta.cached_tokens, versions, delta.drafts, delta.thought_tokens
    return ChoiceDelta(record.spec.index, delta.text, delta.token_ids, ending, *of_tokens)


def _setback(attempt: Attempt, ending: Ending) -> Setback | None:
    """Why to resume the request; None when this ending of an attempt is the request's own."""
    if not isinstance(ending, Failed) or not ending.retryable:
        return None
    if ending.kind == WeightsChanged.kind:
        return Setback(ResumeReason.WEIGHTS, ending)
    if ending.kind == Preempted.kind:
        return Setback(ResumeReason.PREEMPTED, ending, () if attempt.server is None else (attempt.server,))
    return Setback(ResumeReason.FAILED_ATTEMPT, ending, attempt.needed)


def _ends_instances(record: Record) -> Failed:
    """For a request that may be the reason why instances ended."""
    failures = "; ".join(failure[:300] for failure in record.failed_steps)
    count = len(record.failed_steps)
    return Failed(f"the request was in {count} steps that ended their instances, and is not tried again: {failures}")


def _lost(name: InstanceId, at: tuple[Member, ...]) -> Setback:
    """This instance was lost."""
    failed = Failed.of(Unavailable(f"instance {name} was lost while it served the request"))
    return Setback(ResumeReason.LOST_INSTANCE, failed, at)
