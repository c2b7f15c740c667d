"""The decode scheduler: who has memory, who decodes in the next step, and who has ended.

Owns the requests of a decode instance, its page pool and its rows. Opens no socket, touches no device, reads no clock.

Two ways in, one way on:

    Reserve  ─► line ─► Grant (pages and a row) ─► KV arrives ─► Handoff ─► joins the next step
    Generate ─► line ─► local prefill in chunks between decode steps ──────► joins the step after its last chunk

Pages are leased for the prompt, and one by one for the answer as it grows. When none is free the youngest request is preempted:
the router resumes it. Every way out goes through `_release`, which waits until no step in flight names the row; a reservation's
pages wait for the word of its writer as well.
"""

from collections.abc import Iterable
from typing import assert_never

import numpy as np

from common.engine.executor import EngineDescription
from common.engine.plan import Plan, RowStart, StepResult
from common.errors import BadRequest, DeadlinePassed, InstanceFailed, Overloaded, Preempted, TandemError, Unavailable
from common.ids import ROUTER, Incarnation, InstanceId, Int32Array, Key, Life
from common.instance.drain import Drainage
from common.instance.emit import emit_ending, emit_tokens
from common.instance.limits import InstanceLimits
from common.instance.ports import Action, Decision, Send, Settle, Settled, TransferEvent
from common.instance.prompts import PromptProgress, next_chunks, read_prompt
from common.instance.requests import RequestTable, read_terms
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
    LinkTraffic,
    Load,
    Peers,
    Probe,
    Probed,
    Renew,
    Reserve,
    TokenDelta,
    Withdraw,
)
from common.pages.pool import PagePool
from decode.admission import AdmissionLine, Admitted
from decode.batch import Batch
from decode.landing import find_objection
from decode.preemption import choose_victims
from decode.request import DecodeRequest, Phase
from kv_transfer.digests import Digest
from kv_transfer.handoff_target import HandoffTarget, Reservation
from kv_transfer.write_lease import MARGIN_S, WRITE_LEASE_S

DecodeMessage = Generate | Cancel | Probe | Reserve | Renew | Handoff | Withdraw | Peers
PATIENCE_S = 2.0
_RUNNING = (Phase.COMPUTING, Phase.DECODING)


class DecodeScheduler:
    """Implements `common.instance.ports.Scheduler`. digest: with --verify-pages, `Executor.digest_pages`."""

    def __init__(
        self,
        instance: InstanceId,
        incarnation: Incarnation,
        engine: EngineDescription,
        limits: InstanceLimits,
        digest: Digest | None = None,
    ) -> None:
        self._id = instance
        self._incarnation = incarnation
        self._engine = engine
        self._limits = limits
        self._digest = digest
        self.pool = PagePool(engine.total_pages)
        self._rows = Rows(engine.max_rows)
        self._line = AdmissionLine(self.pool, self._rows, PATIENCE_S)
        self._target = HandoffTarget(incarnation)
        self._batch = Batch(engine.max_rows, engine.eos_token_ids)
        self._requests: RequestTable[DecodeRequest] = RequestTable(limits.request_timeout_s)
        self._by_row: dict[int, DecodeRequest] = {}
        self._starts: list[RowStart] = []
        self._writers: dict[InstanceId, Incarnation] = {}
        self._drainage = Drainage(instance, limits.drain_timeout_s)
        self._now = 0.0
        self._steps = 0
        self._ended = self._prompt_tokens = self._tokens = self._preemptions = 0
        self._pages_received = self._bytes_received = self._handoffs = self._handoffs_lost = self._pages_corrupt = 0

    # --- messages and events ---------------------------------------------------------------------------------------------

    def receive(self, sender: InstanceId, message: DecodeMessage, now: float) -> list[Action]:
        match message:
            case Generate():
                return self._take_in(message, None, now)
            case Reserve():
                writer = Life(sender, message.incarnation)
                self._target.heard(writer, message.sent_s, now)
                return self._take_in(message, writer, now)
            case Renew():
                return self._renew(sender, message, now)
            case Handoff():
                return self._land(sender, message, now)
            case Withdraw():
                return self._withdraw(sender, message.key, now)
            case Cancel():
                return self._cancel(message.key, now)
            case Probe():
                standings = self._requests.standings(message.keys)
                return [Send(ROUTER, Probed(id=self._id, incarnation=self._incarnation, standings=standings))]
            case Peers():
                return self._peers_changed({peer.id: peer.incarnation for peer in message.instances}, now)
            case _:
                assert_never(message)

    def transfer_event(self, event: TransferEvent, now: float) -> list[Action]:
        """Settled: what had arrived for a reservation that is over is in memory, so that its pages can be given away."""
        if isinstance(event, Settled) and (request := self._requests.get(event.key)) is not None:
            request.settles = False
            self._release(request, now)
        return []

    def tick(self, now: float) -> list[Action]:
        self._now = now
        actions: list[Action] = []
        for request in self._requests.late(now):
            late = Failed.of(DeadlinePassed("the request's deadline passed during decode"))
            actions += self._end(request, late, now)
        for reservation in self._target.fenced(now):
            silent = Failed.of(Unavailable(f"{reservation.writer.id} fell silent during the handoff"))
            actions += self._writer_done(reservation, silent, now)
        if self._drainage.tick(now):
            for request in self._requests:
                actions += self._end(request, Failed.of(self._drainage.refusal), now)
        return actions

    def layers_done(self, plan: Plan, layers: int, now: float) -> list[Action]:
        return []  # nothing is pushed from here

    def step_done(self, result: StepResult, now: float) -> list[Action]:
        """Tokens came back: send them on, end who has ended."""
        plan = result.plan
        rows = plan.rows
        self._rows.returned(rows)
        for chunk in plan.chunks:
            progress = self._by_row[chunk.row].progress
            assert progress is not None
            progress.complete(len(chunk.token_ids))
            self._prompt_tokens += len(chunk.token_ids)
        for row in rows[~self._batch.live[rows]].tolist():
            self._release(self._by_row[row], now)
        sampled = plan.sampled_rows
        live = self._batch.live[sampled]
        return [*emit_tokens(self._record(sampled[live], result.tokens[live], now))]

    # --- planning --------------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        actions, grown = self._grow(now)
        for admitted in self._line.admit(now, running=int(self._batch.live.sum())):
            actions += self._admit(admitted, now)
        actions += self._refuse_what_cannot_fit(now)
        decode_rows = self._batch.next_rows()
        prompts = (r.progress for r in self._by_row.values() if r.progress is not None and r.phase is Phase.COMPUTING)
        chunks = next_chunks(prompts, self._limits.chunk_tokens)
        for chunk in chunks:
            if chunk.last:
                self._by_row[chunk.row].phase = Phase.DECODING
                self._batch.prompt_planned(chunk.row)
        if not chunks and not len(decode_rows):
            assert not grown, "a row that grew goes on"
            return Decision(None, actions)
        self._steps += 1
        plan = Plan(
            self._steps,
            starts=tuple(self._starts),
            chunks=chunks,
            decode_rows=decode_rows,
            grown_rows=np.array(list(grown), dtype=np.int32),
            grown_pages=np.array(list(grown.values()), dtype=np.int32),
        )
        self._starts = []
        self._rows.launched(plan.rows)
        return Decision(plan, actions)

    def next_deadline(self) -> float | None:
        known = (self._requests.next_deadline(), self._target.next_deadline(), self._drainage.next_deadline())
        return min((at for at in known if at is not None), default=None)

    # --- the end of the instance -------------------------------------------------------------------------------------------

    def drain(self, now: float) -> list[Action]:
        self._drainage.begin(now)
        waiting = [request for request in self._requests if request.phase is Phase.WAITING]
        return [action for request in waiting for action in self._end(request, Failed.of(self._drainage.refusal), now)]

    @property
    def drained(self) -> bool:
        return self._drainage.is_over or (self._drainage.began and not self._requests)

    def abandon(self, now: float) -> list[Action]:
        return [action for request in self._requests for action in self._end(request, None, now)]

    # --- reports ---------------------------------------------------------------------------------------------------------

    @property
    def open_reservations(self) -> int:
        return len(self._target)

    def load(self) -> Load:
        waiting = [request for request in self._requests if request.phase is Phase.WAITING]
        running = [request for request in self._by_row.values() if request.phase is not Phase.ENDED]
        stuck = (request.lease for request in self._by_row.values() if self._target.is_stuck(request.key, self._now))
        return Load(
            waiting_requests=len(waiting),
            running_requests=len(running),
            waiting_tokens=sum(len(request.prompt) for request in waiting),
            running_tokens=sum(len(r.prompt) + int(self._batch.sampled[r.row]) for r in running if r.row is not None),
            pages_free=self.pool.free_pages,
            pages_total=self.pool.total_pages,
            reservations=len(self._target),
            pages_quarantined=sum(len(lease) for lease in stuck if lease is not None),
        )

    def traffic(self, peer: InstanceId) -> LinkTraffic:
        return LinkTraffic()  # nothing is pushed from here

    def counters(self) -> Counters:
        return Counters(
            requests_accepted=self._requests.accepted,
            requests_ended=self._ended,
            prompt_tokens_computed=self._prompt_tokens,
            tokens_generated=self._tokens,
            steps=self._steps,
            pages_received=self._pages_received,
            bytes_received=self._bytes_received,
            handoffs=self._handoffs,
            handoffs_lost=self._handoffs_lost,
            pages_corrupt=self._pages_corrupt,
            preemptions=self._preemptions,
            messages_stale=self._target.stale + self._requests.stale,
        )

    # --- in --------------------------------------------------------------------------------------------------------------

    def _take_in(self, asked: Reserve | Generate, writer: Life | None, now: float) -> list[Action]:
        """A request asks for memory: with a writer its KV will arrive, without one its prompt is computed here."""
        if not self._requests.is_new(asked.key):
            return []
        try:
            request = self._accept(asked, writer, now)
        except TandemError as error:
            failed = Failed.of(error)
            self._requests.close_early(asked.key, now)
            return [emit_ending(asked.key, asked.first, failed) if writer is None else _decline(writer, asked.key, failed)]
        self._requests.add(request, asked.terms.timeout_s, now)
        layout = self._engine.layout
        pages = min(layout.pages_for(len(request.prompt)) + 1, layout.pages_for(request.kv_tokens))
        self._line.join(request.key, request.rank, pages, now)
        return []

    def _accept(self, asked: Reserve | Generate, writer: Life | None, now: float) -> DecodeRequest:
        model = self._engine.model
        prompt = read_prompt(asked.prompt, model.vocab_size)
        asked.sampling.validate()
        if writer is not None and asked.sampling.max_new_tokens < 2:
            raise BadRequest("an answer of one token needs no reservation", field="max_tokens")
        if not 0 <= asked.first < len(prompt):
            raise BadRequest(f"of {len(prompt)} tokens, {asked.first} cannot be the answer's", field="first")
        request = DecodeRequest(asked, prompt, writer, read_terms(asked.terms, now))
        tokens = len(prompt) + asked.sampling.max_new_tokens
        if tokens > model.context_tokens or self._engine.layout.pages_for(request.kv_tokens) > self.pool.total_pages:
            raise BadRequest(f"prompt and max_tokens need {tokens} tokens: too long for {self._id}", field="max_tokens")
        if self._drainage.began:
            raise self._drainage.refusal
        if len(self._line) >= self._limits.max_waiting:
            raise Overloaded(f"{self._id} has {self._limits.max_waiting} requests waiting already")
        if writer is not None and self._writers.get(writer.id) != writer.incarnation:
            raise Unavailable(f"{self._id} does not know the prefill instance {writer.id}")
        return request

    def _admit(self, admitted: Admitted, now: float) -> list[Action]:
        request = self._requests[admitted.key]
        request.lease, request.row = admitted.lease, admitted.row
        self._by_row[admitted.row] = request
        if request.writer is None:
            request.phase = Phase.COMPUTING
            request.progress = PromptProgress(admitted.row, request.prompt)
            self._start(request, sampled=0)
            return []
        if not self._target.hears(request.writer):
            return self._end(request, Failed.of(Unavailable(f"{request.writer.id} fell silent")), now)
        request.phase = Phase.RESERVED
        prompt_pages = self._engine.layout.pages_for(len(request.prompt))
        assert isinstance(request.asked, Reserve)
        return [self._target.grant(request.key, request.writer, admitted.lease, prompt_pages, request.asked.sent_s)]

    def _start(self, request: DecodeRequest, sampled: int, length: int = 0, last_token: int | None = None) -> None:
        """The request's row is in the batch from the next plan on."""
        assert request.row is not None and request.lease is not None
        pages = request.lease.pages
        room = len(pages) * self._engine.layout.page_size
        self._batch.join(request.row, request.sampling, len(request.prompt), room, sampled=sampled)
        self._starts.append(RowStart(request.row, pages, request.sampling, length, last_token))

    def _refuse_what_cannot_fit(self, now: float) -> list[Action]:
        """Where transfers that never end hold so much memory that the head of the line waits for them alone, it goes away; not
        before those that are only silent have had their time."""
        head = self._line.overdue(now, WRITE_LEASE_S + MARGIN_S)
        if head is None or not all(self._target.is_stuck(request.key, now) for request in self._by_row.values()):
            return []
        return self._end(self._requests[head], Failed.of(Unavailable(f"{self._id} lacks memory for the request")), now)

    # --- memory ----------------------------------------------------------------------------------------------------------

    def _grow(self, now: float) -> tuple[list[Action], dict[int, int]]:
        """A page for each row that needs one to go on, oldest requests first: row → page. Where none is free, room is made."""
        short = self._batch.short_rows()
        if not len(short):
            return [], {}
        grown: dict[int, int] = {}
        actions: list[Action] = []
        lacking = self._extend(sorted((self._by_row[row] for row in short.tolist()), key=lambda r: r.rank), grown)
        if lacking:
            coming = sum(len(r.lease) for r in self._by_row.values() if r.lease is not None and self._comes_home(r, now))
            holders = [r for r in self._by_row.values() if r.phase is not Phase.ENDED]
            for victim in choose_victims(holders, lacking, coming):
                self._preemptions += 1
                if victim.row in grown:
                    del grown[victim.row]
                actions += self._end(victim, Failed.of(Preempted(f"{self._id} needs the memory for an older request")), now)
            self._extend((request for request in lacking if request.phase is not Phase.ENDED), grown)
        return actions, grown

    def _extend(self, requests: Iterable[DecodeRequest], grown: dict[int, int]) -> list[DecodeRequest]:
        """Returns those for which no page was free."""
        lacking: list[DecodeRequest] = []
        for request in requests:
            assert request.row is not None and request.lease is not None
            pages = request.lease.extend(1)
            if pages is None:
                lacking.append(request)
                continue
            grown[request.row] = int(pages[0])
            self._batch.grew(request.row, len(request.lease) * self._engine.layout.page_size)
        return lacking

    def _comes_home(self, request: DecodeRequest, now: float) -> bool:
        return request.phase is Phase.ENDED and not self._target.is_stuck(request.key, now)

    # --- handoffs --------------------------------------------------------------------------------------------------------

    def _land(self, sender: InstanceId, handoff: Handoff, now: float) -> list[Action]:
        """The KV is here: the request joins the next step."""
        reservation = self._target.land(sender, handoff)
        if reservation is None:
            return []
        request = self._requests[reservation.key]
        request.emitted = 1
        objection = find_objection(handoff, reservation, self._engine, self._digest)
        if objection is not None:
            self._pages_corrupt += objection.corrupt_pages
            failed = Failed.of(InstanceFailed(f"the handoff of {sender} cannot be: {objection.reason}"))
            return self._writer_done(reservation, failed, now)
        self._handoffs += 1
        self._pages_received += handoff.pushed_pages
        self._bytes_received += handoff.pushed_bytes
        if request.phase is Phase.ENDED:
            self._release(request, now)
            return [] if request.untold is None else [emit_ending(request.key, request.next_token, request.untold)]
        request.phase = Phase.DECODING
        self._start(request, sampled=1, length=len(request.prompt), last_token=handoff.first_token)
        return []

    def _withdraw(self, sender: InstanceId, key: Key, now: float) -> list[Action]:
        """The writer gives up, and tells the client why if the client is to know."""
        request = self._requests.get(key)
        if request is not None and request.writer is not None and request.writer.id == sender and self._line.leave(key):
            return self._end(request, None, now)
        reservation = self._target.withdraw(sender, key)
        if reservation is None:
            return []
        self._requests[key].untold = None
        return self._writer_done(reservation, None, now)

    def _renew(self, sender: InstanceId, message: Renew, now: float) -> list[Action]:
        """A writer says what it holds open: everything else of it is over, whatever was lost on the way."""
        writer = Life(sender, message.incarnation)
        waiting = [r for r in self._requests if r.writer == writer and r.phase is Phase.WAITING]
        waiting_keys = {request.key for request in waiting}
        renewal = self._target.renew(sender, message, now, lambda key: key in waiting_keys)
        actions: list[Action] = list(renewal.sends)
        for reservation in renewal.lost:
            self._handoffs_lost += 1
            actions += self._writer_done(reservation, Failed.of(InstanceFailed(f"the handoff of {sender} was lost")), now)
        for reservation in renewal.stuck:
            actions += self._end(self._requests[reservation.key], None, now)
        claimed = {claim.key for claim in message.claims}
        for request in waiting:
            assert isinstance(request.asked, Reserve)
            if request.key not in claimed and request.asked.sent_s < message.sent_s:
                actions += self._end(request, None, now)
        return actions

    def _writer_done(self, reservation: Reservation, failed: Failed | None, now: float) -> list[Action]:
        """No write for this reservation is or will be under way, and it was not handed off. failed: what the client is told, if
        nobody else tells it. The pages come home when what had arrived for them is in memory."""
        request = self._requests[reservation.key]
        untold = request.untold or (failed if request.phase is not Phase.ENDED else None)
        request.settles = True
        actions: list[Action] = [Settle(request.key)]
        if untold is not None:
            actions.append(emit_ending(request.key, request.next_token, untold))
        return actions + self._end(request, None, now)

    # --- out -------------------------------------------------------------------------------------------------------------

    def _record(self, rows: Int32Array, tokens: Int32Array, now: float) -> list[TokenDelta]:
        stopped, at_limit = self._batch.record(rows, tokens)
        self._tokens += len(rows)
        deltas: list[TokenDelta] = []
        for row, token, is_stop, is_full in zip(rows.tolist(), tokens.tolist(), stopped.tolist(), at_limit.tolist(), strict=True):
            request = self._by_row[row]
            ending: Ending | None = None
            if is_stop:
                ending = Finished(reason="stop", matched=token)
            elif is_full:
                ending = Finished(reason="length")
            deltas.append(TokenDelta(request.key, request.next_token, (token,), ending))
            request.emitted += 1
            if ending is not None:
                self._end(request, None, now)
        return deltas

    def _cancel(self, key: Key, now: float) -> list[Action]:
        request = self._requests.get(key)
        if request is None:
            self._requests.close_early(key, now)
            return []
        return self._end(request, None, now)

    def _peers_changed(self, writers: dict[InstanceId, Incarnation], now: float) -> list[Action]:
        """Writers that left get no reservation any more. Those that they have end by their last words, or by their silence."""
        self._writers = writers
        actions: list[Action] = []
        for request in self._requests:
            writer = request.writer
            if request.phase is Phase.WAITING and writer is not None and writers.get(writer.id) != writer.incarnation:
                actions += self._end(request, None, now)
        return actions

    def _end(self, request: DecodeRequest, ending: Ending | None, now: float) -> list[Action]:
        """The one door. `ending` is told to the client, or None when the client knows or another instance tells it.

        While a writer holds the request, the client is told by the writer, who knows whether the first token went out.
        """
        if request.phase is Phase.ENDED:
            return []
        before, request.phase = request.phase, Phase.ENDED
        actions: list[Action] = []
        self._line.leave(request.key)
        if request.writer is not None and before not in _RUNNING:
            self._target.cancel(request.key, now)
            if isinstance(ending, Failed):
                actions.append(_decline(request.writer, request.key, ending))
                request.untold = ending
        elif ending is not None:
            actions.append(emit_ending(request.key, request.next_token, ending))
        if request.row is not None:
            self._batch.leave(request.row)
        self._ended += 1
        self._requests.stop_deadline(request.key)
        self._release(request, now)
        return actions

    def _release(self, request: DecodeRequest, now: float) -> None:
        """Bring home what nothing in flight can touch: no step names the row, and no writer may write the pages."""
        if request.key in self._target or request.settles or self._requests.get(request.key) is not request:
            return
        if request.row is not None:
            if self._rows.in_flight[request.row]:
                return
            del self._by_row[request.row]
            self._rows.give_back(request.row)
            self._starts = [start for start in self._starts if start.row != request.row]
        if request.lease is not None:
            request.lease.close()
        self._requests.remove(request.key, now)


def _decline(writer: Life, key: Key, failed: Failed) -> Send:
    return Send(writer.id, Decline(key=key, failed=failed))
