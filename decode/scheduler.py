"""The decode scheduler: who has memory, who decodes in the next step, and who has ended.

Owns the requests of a decode instance, its page pool and its rows. Opens no socket, touches no device, reads no clock.

Two ways in, one way on:

    Reserve  ─► line ─► Grant (pages and a row) ─► KV arrives ─► Handoff ─► joins the next step
    Generate ─► line ─► local prefill in chunks between decode steps ──────► joins the step after its last chunk

Pages for prompt and answer are leased together, so a running request never runs out of memory. Every way out goes through
`_release`, which waits until no step in flight names the row; a reservation's pages wait for the word of its writer as well.
"""

from typing import assert_never

import numpy as np

from common.deadlines import DeadlineWheel
from common.engine.executor import EngineDescription
from common.engine.plan import Plan, RowStart, StepResult
from common.errors import BadRequest, DeadlinePassed, Overloaded, TandemError, Unavailable
from common.ids import DETOKENIZER, Incarnation, InstanceId, Int32Array, Key
from common.instance.ports import Action, Decision, Send, TransferEvent
from common.instance.prompts import PromptProgress, next_chunks, read_prompt
from common.instance.rows import Rows
from common.messages import (
    Cancel,
    Counters,
    Decline,
    Ending,
    Failed,
    Finished,
    Generate,
    Handoff,
    Load,
    Peers,
    Reserve,
    TokenBatch,
    TokenDelta,
    Withdraw,
)
from common.pages.pool import PagePool
from common.sampling_params import SamplingParams
from decode.admission import AdmissionLine, Admitted
from decode.batch import Batch
from decode.request import DecodeRequest, Phase
from kv_transfer.handoff_target import HandoffTarget, Reservation

DecodeMessage = Generate | Cancel | Reserve | Handoff | Withdraw | Peers
PATIENCE_S = 2.0
FENCE_S = 15.0
"""After a writer's process is gone, how long its reservations are kept: longer than what it had queued may take to land."""
CANCEL_MEMORY_S = 30.0


class DecodeScheduler:
    """Implements `common.instance.ports.Scheduler`."""

    def __init__(
        self, instance: InstanceId, engine: EngineDescription, chunk_tokens: int, max_waiting: int, request_timeout_s: float
    ) -> None:
        self._id = instance
        self._engine = engine
        self._chunk_tokens = chunk_tokens
        self._max_waiting = max_waiting
        self._request_timeout_s = request_timeout_s
        self.pool = PagePool(engine.total_pages)
        self._rows = Rows(engine.max_rows)
        self._line = AdmissionLine(self.pool, self._rows, PATIENCE_S)
        self._target = HandoffTarget()
        self._batch = Batch(engine.max_rows, engine.eos_token_ids)
        self._requests: dict[Key, DecodeRequest] = {}
        self._by_row: dict[int, DecodeRequest] = {}
        self._starts: list[RowStart] = []
        self._writers: dict[InstanceId, Incarnation] = {}
        self._request_deadlines: DeadlineWheel[Key] = DeadlineWheel()
        self._fences: DeadlineWheel[Key] = DeadlineWheel()
        self._cancelled_early: DeadlineWheel[Key] = DeadlineWheel()
        self._steps = 0
        self._accepted = self._ended = self._prompt_tokens = self._tokens = 0
        self._pages_received = self._bytes_received = self._handoffs = self._stale = 0

    # --- messages and events ---------------------------------------------------------------------------------------------

    def receive(self, sender: InstanceId, message: DecodeMessage, now: float) -> list[Action]:
        match message:
            case Generate():
                return self._take_in(message.key, message.prompt, message.sampling, None, now)
            case Reserve():
                return self._take_in(message.key, message.prompt, message.sampling, sender, now)
            case Handoff():
                return self._land(sender, message)
            case Withdraw():
                return self._withdraw(sender, message.key)
            case Cancel():
                return self._cancel(message.key, now)
            case Peers():
                return self._peers_changed({peer.id: peer.incarnation for peer in message.instances}, now)
            case _:
                assert_never(message)

    def transfer_event(self, event: TransferEvent, now: float) -> list[Action]:
        return []

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        self._cancelled_early.expired(now)
        for key in self._request_deadlines.expired(now):
            request = self._requests.get(key)
            if request is not None:
                actions += self._end(request, Failed.of(DeadlinePassed("the request's deadline passed during decode")))
        for key in self._fences.expired(now):
            reservation = self._target.fence(key)
            if reservation is not None:
                actions += self._writer_done(key, Failed.of(Unavailable(f"{reservation.source} left the fleet")))
        return actions

    def step_done(self, result: StepResult, now: float) -> list[Action]:
        """Tokens came back: send them on, end who has ended."""
        plan = result.plan
        rows = _rows_of(plan)
        self._rows.returned(rows)
        for chunk in plan.chunks:
            progress = self._by_row[chunk.row].progress
            assert progress is not None
            progress.complete(len(chunk.token_ids))
            self._prompt_tokens += len(chunk.token_ids)
        for row in rows[~self._batch.live[rows]].tolist():
            self._release(self._by_row[row])
        sampled = plan.sampled_rows
        live = self._batch.live[sampled]
        deltas = self._record(sampled[live], result.tokens[live])
        return [Send(DETOKENIZER, TokenBatch(deltas=deltas))] if deltas else []

    # --- planning --------------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        actions: list[Action] = []
        for admitted in self._line.admit(now):
            actions += self._admit(admitted)
        decode_rows = self._batch.next_rows()
        prompts = (r.progress for r in self._by_row.values() if r.progress is not None and r.phase is Phase.COMPUTING)
        chunks = next_chunks(prompts, self._chunk_tokens)
        for chunk in chunks:
            if chunk.last:
                self._by_row[chunk.row].phase = Phase.DECODING
                self._batch.prompt_planned(chunk.row)
        if not chunks and not len(decode_rows):
            return Decision(None, actions)
        self._steps += 1
        plan = Plan(self._steps, starts=tuple(self._starts), chunks=chunks, decode_rows=decode_rows)
        self._starts = []
        self._rows.launched(_rows_of(plan))
        return Decision(plan, actions)

    def next_deadline(self) -> float | None:
        wheels = (self._request_deadlines.next_at(), self._fences.next_at(), self._cancelled_early.next_at())
        return min((at for at in wheels if at is not None), default=None)

    # --- reports ---------------------------------------------------------------------------------------------------------

    @property
    def open_reservations(self) -> int:
        return len(self._target)

    def load(self) -> Load:
        waiting = [request for request in self._requests.values() if request.phase is Phase.WAITING]
        running = [request for request in self._by_row.values() if request.phase is not Phase.ENDED]
        return Load(
            waiting_requests=len(waiting),
            running_requests=len(running),
            waiting_tokens=sum(len(request.prompt) for request in waiting),
            running_tokens=sum(len(r.prompt) + int(self._batch.sampled[r.row]) for r in running if r.row is not None),
            pages_free=self.pool.free_pages,
            pages_total=self.pool.total_pages,
            reservations=len(self._target),
        )

    def counters(self) -> Counters:
        return Counters(
            requests_accepted=self._accepted,
            requests_ended=self._ended,
            prompt_tokens_computed=self._prompt_tokens,
            tokens_generated=self._tokens,
            steps=self._steps,
            pages_received=self._pages_received,
            bytes_received=self._bytes_received,
            handoffs=self._handoffs,
            messages_stale=self._target.stale + self._stale,
        )

    # --- in --------------------------------------------------------------------------------------------------------------

    def _take_in(
        self, key: Key, packed_prompt: bytes, sampling: SamplingParams, source: InstanceId | None, now: float
    ) -> list[Action]:
        """A request asks for memory: with a `source` its KV will arrive, without one its prompt is computed here."""
        if key in self._requests:
            self._stale += 1
            return []
        try:
            request = self._accept(key, packed_prompt, sampling, source)
        except TandemError as error:
            return [self._refusal(key, source, error)]
        self._accepted += 1
        self._requests[key] = request
        self._line.join(key, self._engine.layout.pages_for(_kv_tokens(request)), now)
        self._request_deadlines.set(key, now + self._request_timeout_s)
        return []

    def _accept(self, key: Key, packed_prompt: bytes, sampling: SamplingParams, source: InstanceId | None) -> DecodeRequest:
        model = self._engine.model
        prompt = read_prompt(packed_prompt, model.vocab_size)
        sampling.validate()
        if source is not None and sampling.max_new_tokens < 2:
            raise BadRequest("an answer of one token needs no reservation", field="max_tokens")
        request = DecodeRequest(key, prompt, sampling, source)
        tokens = len(prompt) + sampling.max_new_tokens
        pages = self._engine.layout.pages_for(_kv_tokens(request))
        if tokens > model.context_tokens or pages > self.pool.total_pages:
            raise BadRequest(f"prompt and max_tokens need {tokens} tokens: too long for {self._id}", field="max_tokens")
        if len(self._line) >= self._max_waiting:
            raise Overloaded(f"{self._id} has {self._max_waiting} requests waiting already")
        if source is not None and source not in self._writers:
            raise BadRequest(f"{self._id} does not know the prefill instance {source}")
        if self._cancelled_early.take(key):
            raise BadRequest("the request was cancelled before it arrived")
        return request

    def _refusal(self, key: Key, source: InstanceId | None, error: TandemError) -> Send:
        failed = Failed.of(error)
        if source is not None:
            return Send(source, Decline(key=key, failed=failed))
        return Send(DETOKENIZER, TokenBatch(deltas=(TokenDelta(key, 0, (), failed),)))

    def _admit(self, admitted: Admitted) -> list[Action]:
        request = self._requests[admitted.key]
        request.lease, request.row = admitted.lease, admitted.row
        self._by_row[admitted.row] = request
        if request.source is not None:
            request.phase = Phase.RESERVED
            prompt_pages = self._engine.layout.pages_for(len(request.prompt))
            writer = self._writers[request.source]
            return [self._target.grant(request.key, request.source, writer, admitted.lease, prompt_pages)]
        request.phase = Phase.COMPUTING
        request.progress = PromptProgress(admitted.row, request.prompt)
        self._batch.join(admitted.row, request.sampling, sampled=0, decoding=False)
        self._starts.append(RowStart(admitted.row, admitted.lease.pages, request.sampling))
        return []

    def _land(self, sender: InstanceId, handoff: Handoff) -> list[Action]:
        """The KV is here: the request joins the next step."""
        reservation = self._target.land(sender, handoff)
        if reservation is None:
            return []
        request = self._requests[reservation.key]
        self._fences.clear(reservation.key)
        wrong = self._wrong(reservation, handoff)
        if wrong is not None:
            return self._writer_done(request.key, Failed(message=f"the handoff of {sender} cannot be: {wrong}"))
        self._handoffs += 1
        self._pages_received += handoff.pushed_pages
        self._bytes_received += handoff.pushed_bytes
        if request.phase is Phase.ENDED:
            self._release(request)
            return []
        assert request.row is not None
        request.phase = Phase.DECODING
        self._batch.join(request.row, request.sampling, sampled=1, decoding=True)
        length = len(request.prompt)
        self._starts.append(RowStart(request.row, reservation.lease.pages, request.sampling, length, handoff.first_token))
        return []

    def _wrong(self, reservation: Reservation, handoff: Handoff) -> str | None:
        """What of a handoff does not fit its reservation."""
        layout, vocab = self._engine.layout, self._engine.model.vocab_size
        pages = reservation.prompt_pages - reservation.have_tokens // layout.page_size
        if handoff.pushed_pages != pages or handoff.pushed_bytes != pages * layout.page_bytes:
            return f"{handoff.pushed_pages} pages and {handoff.pushed_bytes} bytes were pushed for {pages} pages"
        return None if 0 <= handoff.first_token < vocab else f"its first token {handoff.first_token} is not in the vocabulary"

    # --- out -------------------------------------------------------------------------------------------------------------

    def _record(self, rows: Int32Array, tokens: Int32Array) -> tuple[TokenDelta, ...]:
        numbers = self._batch.sampled[rows]
        stopped, at_limit = self._batch.record(rows, tokens)
        self._tokens += len(rows)
        deltas = []
        columns = zip(rows.tolist(), tokens.tolist(), numbers.tolist(), stopped.tolist(), at_limit.tolist(), strict=True)
        for row, token, number, is_stop, is_full in columns:
            request = self._by_row[row]
            ending: Ending | None = None
            if is_stop:
                ending = Finished(reason="stop", matched=token)
            elif is_full:
                ending = Finished(reason="length")
            deltas.append(TokenDelta(request.key, number, (token,), ending))
            if ending is not None:
                self._end(request, None)
        return tuple(deltas)

    def _cancel(self, key: Key, now: float) -> list[Action]:
        request = self._requests.get(key)
        if request is None:
            # Reserve and Cancel come over different links: the Reserve may be behind.
            self._cancelled_early.set(key, now + CANCEL_MEMORY_S)
            return []
        return self._end(request, None)

    def _withdraw(self, sender: InstanceId, key: Key) -> list[Action]:
        request = self._requests.get(key)
        if request is not None and request.source == sender and self._line.leave(key):
            return self._end(request, None)
        if self._target.withdraw(sender, key) is None:
            return []
        self._fences.clear(key)
        return self._writer_done(key, None)

    def _writer_done(self, key: Key, ending: Ending | None) -> list[Action]:
        """No write into this request's pages is or will be under way, and it was not handed off."""
        request = self._requests[key]
        actions = self._end(request, ending)
        self._release(request)
        return actions

    def _peers_changed(self, writers: dict[InstanceId, Incarnation], now: float) -> list[Action]:
        """Writers that left cannot write once the margin has passed: until then their reservations keep their pages."""
        for source in writers.keys() - self._writers.keys():
            for reservation in self._target.of(source):
                if reservation.incarnation == writers[source]:
                    self._fences.clear(reservation.key)  # it was silent, not dead: its word ends the reservation
        gone = [id for id, incarnation in self._writers.items() if writers.get(id) != incarnation]
        self._writers = writers
        for source in gone:
            for reservation in self._target.of(source):
                self._fences.set(reservation.key, now + FENCE_S)
            for request in [r for r in self._requests.values() if r.source == source and r.phase is Phase.WAITING]:
                self._end(request, None)
        return []

    def _end(self, request: DecodeRequest, ending: Ending | None) -> list[Action]:
        """The one door. `ending` is told to the client, or None when the client knows or another instance tells it."""
        if request.phase is Phase.ENDED:
            return []
        number = request.first
        actions: list[Action] = []
        if request.phase is Phase.WAITING and self._line.leave(request.key) and request.source is not None:
            failed = ending if isinstance(ending, Failed) else Failed(message="the request has ended")
            actions.append(Send(request.source, Decline(key=request.key, failed=failed)))
        if request.phase is Phase.RESERVED:
            self._target.cancel(request.key)
        elif request.row is not None:
            number = int(self._batch.sampled[request.row])
            self._batch.leave(request.row)
        request.phase = Phase.ENDED
        self._ended += 1
        self._request_deadlines.clear(request.key)
        if ending is not None:
            actions.append(Send(DETOKENIZER, TokenBatch(deltas=(TokenDelta(request.key, number, (), ending),))))
        self._release(request)
        return actions

    def _release(self, request: DecodeRequest) -> None:
        """Bring home what nothing in flight can touch: no step names the row, and no writer may write the pages."""
        if request.key in self._target or self._requests.get(request.key) is not request:
            return
        if request.row is not None:
            if self._rows.in_flight[request.row]:
                return
            del self._by_row[request.row]
            self._rows.give_back(request.row)
            self._starts = [start for start in self._starts if start.row != request.row]
        if request.lease is not None:
            request.lease.close()
        del self._requests[request.key]


def _kv_tokens(request: DecodeRequest) -> int:
    """Tokens whose KV is ever written: the last token of the answer is never fed back."""
    return len(request.prompt) + request.sampling.max_new_tokens - 1


def _rows_of(plan: Plan) -> Int32Array:
    chunks = np.array([chunk.row for chunk in plan.chunks], dtype=np.int32)
    return np.concatenate([chunks, plan.decode_rows])
