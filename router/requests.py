"""The request book: the life of every open request, from its dispatch to its one ending.

Owns the open requests, their deadlines and what each has got so far. Opens no socket, reads no clock, knows no HTTP and
no text but to pass it on.

    submit ─► AWAITING ──first token──► GENERATING ──► exactly one ending
       │ Open to the detokenizer            │ text by token number
       │ Generate to the prefill instance   │
       └────────────────────────────────────┴─ client gone, deadline, slow client, instance lost:
                                               Cancel to both instances, Close to the detokenizer

A record keeps its tokens and its attempt, so that a next attempt can be prompt + tokens so far.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from common.config import Dispatch
from common.deadlines import DeadlineWheel
from common.errors import DeadlinePassed, InstanceFailed, Overloaded, TandemError, Unavailable
from common.ids import DETOKENIZER, Key, RequestId
from common.instance.ports import Send
from common.messages import Cancel, Close, Ending, Failed, Finished, Generate, Open, TextDelta
from common.sampling_params import SamplingParams
from router.fleet import Fleet, Member
from router.outbox import ChoiceDelta, Outbox
from router.policy import choose

TOKEN_BYTES = 4
CONTEXT_TOKENS = 8
"""Tokens of the prompt that the detokenizer gets, so that the answer's first characters are decoded in their context."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One choice of a client's request. prompt: packed token ids. index: its number in the answer."""

    request_id: RequestId
    index: int
    prompt: bytes
    sampling: SamplingParams
    stop: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES


class Phase(StrEnum):
    """Where an open request is."""

    AWAITING = "awaiting_first_token"
    GENERATING = "generating"


@dataclass(slots=True, eq=False)
class Record:
    """An open request. first and decode as in `policy.Choice`. Times in seconds of the caller's clock."""

    spec: RequestSpec
    key: Key
    outbox: Outbox
    first: Member
    decode: Member | None
    received_at: float
    token_ids: list[int] = field(default_factory=list)
    last_token_at: float = 0.0

    @property
    def phase(self) -> Phase:
        return Phase.GENERATING if self.token_ids else Phase.AWAITING

    def needs(self, member: Member) -> bool:
        """Whether the request cannot go on without this member. Token 1 proves that the handoff is done: from then on the
        prefill instance is not needed."""
        if self.decode is None or member is not self.first:
            return member in (self.first, self.decode)
        return len(self.token_ids) < 2


class Observer(Protocol):
    """Who counts and measures."""

    def first_token(self, seconds: float) -> None: ...

    def next_tokens(self, seconds: float, tokens: int) -> None: ...

    def ended(self, ending: Ending, seconds: float) -> None: ...


class RequestBook:
    """Every open request of this router."""

    def __init__(
        self, fleet: Fleet, observer: Observer, max_requests: int, request_timeout_s: float, dispatch: Dispatch = "auto"
    ) -> None:
        self._fleet = fleet
        self._observer = observer
        self._max_requests = max_requests
        self._request_timeout_s = request_timeout_s
        self._dispatch: Dispatch = dispatch
        self._open: dict[RequestId, Record] = {}
        self._deadlines: DeadlineWheel[RequestId] = DeadlineWheel()
        self._choices = 0
        self.stale = 0
        """Deltas of requests or attempts that are not open, and tokens that had come already."""

    def __len__(self) -> int:
        return len(self._open)

    def records(self) -> Iterable[Record]:
        return self._open.values()

    def require_room(self, requests: int) -> None:
        """Raises Overloaded when so many more do not fit."""
        if len(self._open) + requests > self._max_requests:
            raise Overloaded(f"the router has {len(self._open)} of at most {self._max_requests} requests open: try again shortly")

    # --- in --------------------------------------------------------------------------------------------------------------

    def submit(self, specs: Sequence[RequestSpec], outbox: Outbox, received_at: float) -> list[Send]:
        """Dispatch every choice of a client's request, or none. Raises Overloaded, Unavailable, BadRequest."""
        self.require_room(len(specs))
        records: list[Record] = []
        try:
            for spec in specs:
                records.append(self._place(spec, outbox, received_at))
        except TandemError:
            for record in records:
                self._unassign(record)
            raise
        sends: list[Send] = []
        for record in records:
            sends += self._dispatch_record(record)
        return sends

    def _place(self, spec: RequestSpec, outbox: Outbox, received_at: float) -> Record:
        tokens = spec.prompt_tokens
        choice = choose(self._fleet, self._dispatch, tokens, spec.sampling.max_new_tokens)
        self._choices += 1
        for member in (choice.first, choice.decode):
            if member is not None:
                member.assigned_tokens += tokens
                member.chosen = self._choices
        return Record(spec, Key(spec.request_id, 0), outbox, choice.first, choice.decode, received_at)

    def _dispatch_record(self, record: Record) -> list[Send]:
        spec, key = record.spec, record.key
        self._open[spec.request_id] = record
        self._deadlines.set(spec.request_id, record.received_at + self._request_timeout_s)
        decode = None if record.decode is None else record.decode.info.id
        context = spec.prompt[-CONTEXT_TOKENS * TOKEN_BYTES :]
        return [
            Send(DETOKENIZER, Open(key=key, stop=spec.stop, context=context)),
            Send(record.first.info.id, Generate(key=key, prompt=spec.prompt, sampling=spec.sampling, decode=decode)),
        ]

    # --- tokens ----------------------------------------------------------------------------------------------------------

    def text(self, delta: TextDelta, now: float) -> list[Send]:
        """Text of one request: passed on if it is what comes next."""
        record = self._open.get(delta.key.request_id)
        if record is None or record.key != delta.key:
            self.stale += 1
            return []
        if delta.token_ids and delta.first != len(record.token_ids):
            if delta.first < len(record.token_ids):
                self.stale += 1
                return []
            gap = f"tokens {len(record.token_ids)} to {delta.first - 1} of the answer are missing"
            return self._break_off(record, Failed.of(InstanceFailed(gap)), now)
        if delta.token_ids:
            self._count(record, delta.token_ids, now)
        if delta.ending is not None:
            return self._ended_by_text(record, delta, delta.ending, now)
        if delta.token_ids or delta.text:
            record.outbox.put(ChoiceDelta(record.spec.index, delta.text, delta.token_ids))
        if record.outbox.full:
            slow = Failed(message="the client reads too slowly: its request was cancelled", kind="slow_client", status=408)
            return self._break_off(record, slow, now)
        return []

    def _count(self, record: Record, token_ids: Sequence[int], now: float) -> None:
        if record.token_ids:
            self._observer.next_tokens(now - record.last_token_at, len(token_ids))
        else:
            self._observer.first_token(now - record.received_at)
            if record.decode is not None:
                record.first.assigned_tokens -= record.spec.prompt_tokens
        record.last_token_at = now
        record.token_ids += token_ids
        (record.decode or record.first).assigned_tokens += len(token_ids)

    def _ended_by_text(self, record: Record, delta: TextDelta, ending: Ending, now: float) -> list[Send]:
        """The ending came with the text, so the detokenizer knows. The instances know too, unless a stop string ended it; after
        a failure the other instance may not."""
        self._end(record, ChoiceDelta(record.spec.index, delta.text, delta.token_ids, ending), now)
        if isinstance(ending, Finished) and not isinstance(ending.matched, str):
            return []
        return self._cancels(record)

    # --- out -------------------------------------------------------------------------------------------------------------

    def cancel(self, request_ids: Iterable[RequestId], now: float) -> list[Send]:
        """The client has gone. Ids that are not open are those that have ended."""
        sends: list[Send] = []
        for request_id in request_ids:
            record = self._open.get(request_id)
            if record is not None:
                sends += self._break_off(record, Finished(reason="cancelled"), now)
        return sends

    def member_lost(self, member: Member, now: float) -> list[Send]:
        """A member left the fleet: what cannot go on without it ends."""
        gone = Failed.of(Unavailable(f"instance {member.info.id} was lost while it served the request"))
        sends: list[Send] = []
        for record in [record for record in self._open.values() if record.needs(member)]:
            sends += self._break_off(record, gone, now)
        return sends

    def tick(self, now: float) -> list[Send]:
        late = Failed.of(DeadlinePassed(f"the request took longer than {self._request_timeout_s:g} s"))
        sends: list[Send] = []
        for request_id in self._deadlines.expired(now):
            sends += self._break_off(self._open[request_id], late, now)
        return sends

    def next_deadline(self) -> float | None:
        return self._deadlines.next_at()

    def _break_off(self, record: Record, ending: Ending, now: float) -> list[Send]:
        """End a request that the others believe to be open."""
        self._end(record, ChoiceDelta(record.spec.index, "", (), ending), now)
        return [*self._cancels(record), Send(DETOKENIZER, Close(key=record.key))]

    def _cancels(self, record: Record) -> list[Send]:
        members = (record.first, record.decode)
        return [Send(member.info.id, Cancel(key=record.key)) for member in members if member is not None]

    def _end(self, record: Record, last: ChoiceDelta, now: float) -> None:
        """The one door out."""
        assert last.ending is not None
        del self._open[record.spec.request_id]
        self._deadlines.clear(record.spec.request_id)
        self._unassign(record)
        record.outbox.put(last)
        self._observer.ended(last.ending, now - record.received_at)

    def _unassign(self, record: Record) -> None:
        """Take the request's tokens off its members."""
        last = record.decode or record.first
        last.assigned_tokens -= record.spec.prompt_tokens + len(record.token_ids)
        if record.decode is not None and not record.token_ids:
            record.first.assigned_tokens -= record.spec.prompt_tokens
