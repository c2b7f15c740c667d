"""The decode scheduler: who is admitted, who decodes in the next step, and who gives up memory.

Owns the running batch and the plan of a decode instance, and the one door by which its requests end. What both roles share is in
`common/instance/requests.py`, what writers do in `reservations.py`. Opens no socket, touches no device, reads no clock.

Two ways in, one way on:

    Reserve  ─► waiting line ─► Grant (pages and a row) ─► KV arrives ─► Handoff ─► joins the next step
                    └──────► Decline, when there is no room and it does not wait, or has waited a while
    Generate ─► waiting line ─► local prefill in chunks between decode steps ────► joins the step after its last chunk

Pages are leased for the prompt, and one by one for the answer as it grows. When none is free the youngest request is preempted:
the router resumes it.
"""

import dataclasses
from collections.abc import Iterable
from typing import assert_never

import numpy as np
from msgspec.structs import replace

from common.deadlines import earliest
from common.errors import NoRoom, Preempted, Unavailable
from common.executor import EngineDescription, StepPlan, StepResult, count_right
from common.ids import InstanceId, Int32Array, Int64Array, Life, pack_ids
from common.instance.admission import admit
from common.instance.ports import (
    Action,
    Decision,
    Event,
    FormerRole,
    LayersDone,
    PeerDied,
    PeersChanged,
    Prepared,
    Report,
    Send,
)
from common.instance.request import InstanceLimits, RequestPhase
from common.instance.requests import NO_ROWS, RequestTable, SharedEvent, SharedMessage, decline
from common.instance.token_memory import emit_tokens
from common.messages import (
    Cancel,
    Ending,
    Failed,
    Finished,
    Generate,
    Handoff,
    InstanceInfo,
    Renew,
    Reserve,
    TokenDelta,
    Withdraw,
)
from common.messages.transfers import LinkChanged, PushDone, PushFailed, Settled
from common.pages.pool import count_pages
from decode.batch import Batch
from decode.memory import DecodeRoom, Rounds, choose_victims, comes_home
from decode.requests import DecodeRequest, Growth
from decode.reservations import Reservations
from decode.speculation import NO_DRAFTS, Drafts, Speculation
from kv_transfer.handoff_reader import MARGIN_S, WRITE_LEASE_S, DigestPages, HandoffReader

DecodeMessage = Generate | Cancel | Reserve | Renew | Handoff | Withdraw | SharedMessage

_IN_BATCH = (RequestPhase.COMPUTING, RequestPhase.DECODING)


class DecodeScheduler:
    """Implements `common.instance.ports.Scheduler`."""

    takes = DecodeMessage

    def __init__(
        self,
        me: InstanceInfo,
        engine: EngineDescription,
        limits: InstanceLimits,
        digest: DigestPages | None = None,
        former: FormerRole | None = None,
    ) -> None:
        """digest: with --verify-pages, `Executor.digest_pages`. former: what the instance's former role has left."""
        self._me = me
        self._page_size = engine.layout.page_size
        self._requests = RequestTable(DecodeRequest, me, engine, limits, self._end, former)
        self._batch = Batch(engine.max_rows, engine.eos_token_ids)
        self._growth = Growth(self._batch, self._page_size, limits.answer_tokens)
        self._target = HandoffReader(me.incarnation)
        self._reservations = Reservations(me, engine, self._requests, self._target, self._decode, digest)
        self._rounds = Rounds()
        self._room = DecodeRoom(self._requests, self._growth, self._target, self._rounds)
        self._speculation = None
        if limits.drafting is not None:
            sizes = engine.max_rows, engine.model.context_tokens, limits.chunk_tokens
            self._speculation = Speculation(limits.drafting, *sizes)
        self._verifying = False
        """A step with drafts is in flight: how far its rows are is not known before it is back."""
        self._now = 0.0
        self.pool = self._requests.pool
        self.key_in = self._requests.key_in
        self.take_timelines = self._requests.take_timelines

    @property
    def last_step(self) -> int:
        return self._requests.last_step

    # --- messages and events ---------------------------------------------------------------------------------------------

    def receive(self, sender: InstanceId, message: DecodeMessage, now: float) -> list[Action]:
        if isinstance(message, SharedMessage):
            return self._requests.receive(sender, message, now)
        match message:
            case Generate():
                _, actions = self._requests.accept(message, None, now)
                return actions
            case Reserve():
                writer = Life(sender, message.incarnation)
                self._target.contacted(writer, message.sent_s, now)
                joined, actions = self._requests.accept(message, writer, now)
                if joined is not None:
                    self._rounds.joined(joined.key, now)
                return actions
            case Renew():
                return self._reservations.renew(sender, message, now)
            case Handoff():
                return self._reservations.land(sender, message, now)
            case Withdraw():
                return self._reservations.withdraw(sender, message, now)
            case Cancel():
                return self._cancel(message, now)
            case _:
                assert_never(message)

    def _cancel(self, message: Cancel, now: float) -> list[Action]:
        request = self._requests.cancel(message.key, now)
        if request is None:
            return []
        if request.phase is RequestPhase.DECODING and request.row is not None:
            if message.complete:
                self._growth.ended(request.row, stopped=True)
            else:
                self._growth.cancelled()
        return self._end(request, None, now)

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, SharedEvent):
            actions = self._requests.handle(event, now)
            request = self._requests.get(event.key) if isinstance(event, Prepared) else None
            if request is not None and request.phase is RequestPhase.DECODING and request.landed is not None:
                self._decode(request, request.landed)
            return actions
        match event:
            case Settled():
                self._reservations.settled(event.key, now)
                return []
            case PeerDied():
                return self._reservations.bury(event.peer, now)
            case PeersChanged():
                return self._reservations.meet(event, now)
            case LinkChanged():
                return []  # it comes late, from a time as prefill: that link is closed
            case PushDone() | PushFailed() | LayersDone():
                raise AssertionError("a decode instance pushes nothing")
            case _:
                assert_never(event)

    def tick(self, now: float) -> list[Action]:
        self._now = now
        actions = self._requests.tick(now)
        for key in self._rounds.over(self._requests.waiting, now):
            reservation = self._requests.get(key)
            if reservation is not None and reservation.phase is RequestPhase.WAITING:
                actions += self._decline_for_now(reservation, now)
        actions += self._reservations.fence(now)
        return actions + self._reservations.expect(now)

    def step_done(self, result: StepResult, now: float) -> list[Action]:
        """Tokens came back: send them on, and end the requests that are complete."""
        plan, batch, requests = result.plan, self._batch, self._requests
        requests.chunks_done(result, now)
        for row in plan.rows[~batch.live[plan.rows]].tolist():
            self._release(requests.in_row[row], now)
        actions = self._fail(result, [row for row in result.failed if row not in result.failed_behind], now)
        embedded = [(requests.in_row[row], embedding) for row, embedding in result.embeddings.items() if batch.live[row]]
        deltas = [request.embedded(embedding) for request, embedding in embedded]
        pipelines = [request.pipeline for request, _ in embedded]
        for request, _ in embedded:
            self._end(request, None, now)
        sampled = plan.sampled_rows
        live = batch.live[sampled]
        sampled, tokens = sampled[live], result.tokens[live]
        answered = [requests.in_row[row] for row in sampled.tolist()]
        behind = self._right_drafts(result)[live]
        deltas += self._answer(answered, sampled, tokens, behind, result, now)
        actions += self._fail(result, result.failed_behind, now)
        return [*emit_tokens(deltas, [*pipelines, *(request.pipeline for request in answered)]), *actions]

    def _fail(self, result: StepResult, rows: Iterable[int], now: float) -> list[Action]:
        """End the requests in these rows whose answers cannot go on, if nothing has ended them."""
        actions: list[Action] = []
        for row in [row for row in rows if self._batch.live[row]]:
            self._growth.cancelled()
            actions += self._end(self._requests.in_row[row], Failed.of(result.failed[row]), now)
        return actions

    # --- for simulations: many steps at once --------------------------------------------------------------------------------

    def spare_steps(self, rows: Int32Array) -> int:
        """How many more steps with just these rows, of which two are in flight, change nothing but a token of each row, while
        nobody sends anything; 0: the next may change more."""
        requests = self._requests
        if requests.waiting or requests.computing or requests.starts or self._speculation is not None:
            return 0
        return self._batch.spare_steps(rows, self.pool.available_pages, self._page_size)

    def skip(self, rows: Int32Array, steps: int, token: int) -> list[Send]:
        """So many of these have sampled this token for each row."""
        requests = self._requests
        requests.counters.steps += steps
        requests.counters.tokens_generated += steps * len(rows)
        deltas, pipelines, tokens = [], [], (token,) * steps
        grown = self._batch.skip(rows, steps, self._page_size)
        for row, pages in zip(rows.tolist(), grown.tolist(), strict=True):
            request = requests.in_row[row]
            assert request.lease is not None
            if pages:
                request.lease.extend(pages)
                requests.shares.hold(request, 1, request.held_pages + pages)
            deltas.append(TokenDelta(request.key, request.next_token, tokens))
            pipelines.append(request.pipeline)
            request.next_token += steps
            request.token_ids.extend(tokens)
        return emit_tokens(deltas, pipelines)

    def _right_drafts(self, result: StepResult) -> Int32Array:
        """What was sampled behind the drafts that are right. [sampled rows, most of one] int32; -1: no more."""
        plan = result.plan
        chunked = len(plan.sampled_rows) - len(plan.decode_rows)
        if not len(plan.draft_rows):
            return np.empty((len(plan.sampled_rows), 0), dtype=np.int32)
        right = count_right(plan, result.tokens, result.drafted)
        self._verifying = False
        self._batch.verify(plan.draft_rows)
        if self._speculation is not None:
            self._speculation.verified(plan, right, result.drafting_s)
        self._requests.counters.tokens_drafted += len(plan.draft_rows)
        behind = np.full((len(plan.sampled_rows), int(right.max())), -1, dtype=np.int32)
        places, offsets = plan.draft_places, plan.draft_offsets
        is_right = offsets <= right[places]
        behind[chunked + places[is_right], offsets[is_right] - 1] = result.drafted[is_right]
        for row, count in result.failed_behind.items():
            behind[plan.sampled_rows == row, count - 1 :] = -1
        return behind

    def _answer(
        self,
        answered: list[DecodeRequest],
        rows: Int32Array,
        tokens: Int32Array,
        behind: Int32Array,
        result: StepResult,
        now: float,
    ) -> list[TokenDelta]:
        """The tokens that these requests have sampled, one each, and those behind drafts. Those whose answer is complete end."""
        chunks = result.plan.chunks
        stopped, at_limit = self._record(answered, rows, tokens)
        for row in rows[self._batch.sampled[rows] == 2].tolist():
            self._requests.in_row[row].times.first_decode_s = now
        sampled = [[token] for token in tokens.tolist()]
        for column in behind.T:
            more = np.flatnonzero((column >= 0) & ~stopped & ~at_limit)
            stopped[more], at_limit[more] = self._record(answered, rows[more], column[more], drafted=True)
            for at, token in zip(more.tolist(), column[more].tolist(), strict=True):
                sampled[at].append(token)
        deltas, counters = list[TokenDelta](), self._requests.counters
        for request, new in zip(answered, sampled, strict=True):
            deltas.append(TokenDelta(request.key, request.next_token, tuple(new)))
            request.next_token += len(new)
            request.token_ids += new
            counters.tokens_generated += len(new)
            counters.tokens_accepted += len(new) - 1
        if len(result.plan.draft_rows):
            drafted = np.bincount(result.plan.draft_rows, minlength=len(self._requests.steps_of_row))[rows]
            for at in np.flatnonzero(drafted).tolist():
                deltas[at] = replace(deltas[at], drafts=(int(drafted[at]), len(sampled[at]) - 1))
        logprobs = result.logprobs.by_row()
        reporting = {*logprobs, *(chunk.row for chunk in chunks if chunk.last)} if logprobs or chunks else ()
        for at, row in enumerate(rows.tolist() if reporting else ()):
            if row in reporting:
                told = logprobs.get(row, ())[: len(sampled[at])]
                deltas[at] = answered[at].with_logprobs(deltas[at], told)
        for at in np.flatnonzero(stopped | at_limit).tolist():
            ending = Finished(reason="stop", matched=sampled[at][-1]) if stopped[at] else Finished(reason="length")
            deltas[at] = replace(deltas[at], ending=ending)
            answered[at].ending = ending
            self._growth.ended(int(rows[at]), stopped=bool(stopped[at]))
            self._end(answered[at], None, now)
        return deltas

    def _record(
        self, answered: list[DecodeRequest], rows: Int32Array, tokens: Int32Array, *, drafted: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Batch.record`."""
        stopped, at_limit = self._batch.record(rows, tokens, drafted=drafted)
        if self._speculation is not None:
            is_first = self._batch.sampled[rows] == 1
            for at in np.flatnonzero(is_first & ~stopped & ~at_limit).tolist():
                self._speculation.begin(int(rows[at]), np.append(answered[at].prompt, tokens[at]))
            self._speculation.add(rows[~is_first], tokens[~is_first], drafted)
        return stopped, at_limit

    # --- planning --------------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        requests = self._requests
        depths = self._depths()
        waits = self._verifying or self._batch.await_tokens(np.flatnonzero(depths))  # drafts follow a token that is known
        actions, grown = ([], {}) if waits else self._grow(now)
        for request, failed in admit(requests, self._me.id, self._room.begin, now):
            if failed is not None:
                actions += self._preempt(request, failed, grown, now)
                continue
            self._join(request, sampled=0)
            if request.peer is not None:
                self._rounds.ends.clear(request.key)
                actions += self._reservations.grant(request, request.peer, now)
        for request in [each for each in requests.waiting if not each.stays]:
            actions += self._decline_for_now(request, now)
        actions += self._refuse_what_cannot_fit(now)
        actions += self._reservations.expect(now)
        drafts = self._draft(depths, grown) if depths.any() and not waits else NO_DRAFTS
        rows = NO_ROWS if waits else self._batch.next_rows()
        held_tokens = self._batch.held_tokens(rows) + drafts.held_tokens
        plan = requests.plan(now, rows, grown, held_tokens)
        if plan is not None and self._speculation is not None:
            plan = self._with_drafts(plan, drafts)
        assert plan is not None or not grown, "a row that grew is planned"
        for chunk in () if plan is None else plan.chunks:
            if chunk.last:
                requests.in_row[chunk.row].phase = RequestPhase.DECODING
                self._batch.prompt_planned(chunk.row)
        return Decision(plan, actions)

    def _with_drafts(self, plan: StepPlan, drafts: Drafts) -> StepPlan:
        """The plan with these, and with what came of those of its rows' last steps."""
        verified, lengths, tokens = self._batch.verified(plan.decode_rows)
        if not len(verified) and drafts is NO_DRAFTS:
            return plan
        self._verifying |= len(drafts.rows) > 0
        return dataclasses.replace(
            plan,
            draft_rows=drafts.rows,
            draft_tokens=drafts.tokens,
            draft_chunks=drafts.chunks,
            verified_rows=verified,
            verified_lengths=lengths,
            verified_tokens=tokens,
        )

    def _depths(self) -> Int64Array:
        """How many drafts would pay in the next step, for each row of the batch. [rows] int64; empty: none would."""
        if self._speculation is None or self._verifying or not len(rows := self._batch.advancing):
            return np.empty(0, dtype=np.int64)
        if self._requests.computing:  # a step with its prompts would come between any two with drafts
            return np.empty(0, dtype=np.int64)
        most = self._batch.most_drafts(rows, spare=self._page_size if self._has_spare_pages else 0)
        most[self._batch.sampled[rows] == 0] = 0  # what it would follow is not known
        depths = np.zeros(len(self._requests.steps_of_row), dtype=np.int64)
        depths[rows] = self._speculation.depths(rows, most, self._requests.chunk_limit.cost, self._batch.next_tokens(rows))
        return depths

    @property
    def _has_spare_pages(self) -> bool:
        """Rows may take pages for drafts: all of them find another one after that."""
        return self.pool.available_pages > 2 * self._batch.running

    def _draft(self, depths: Int64Array, grown: dict[int, int]) -> Drafts:
        """The drafts of the next step. A row gets a page for them if nobody else needs it. depths: of each row of the batch."""
        assert self._speculation is not None
        rows = np.flatnonzero(depths).astype(np.int32)
        rows = rows[np.isin(rows, self._batch.advancing)]  # a row may have ended since, or be another request's by now
        short = rows[self._batch.most_drafts(rows) < depths[rows]]
        wanting = [self._requests.in_row[row] for row in short.tolist() if row not in grown]
        if self._has_spare_pages:
            self._extend(wanting, grown)
        fitting = np.minimum(depths[rows], np.maximum(0, self._batch.most_drafts(rows)))
        return self._speculation.draft(rows, fitting, self._batch.next_tokens(rows))

    def next_deadline(self) -> float | None:
        return earliest(self._requests.next_deadline(), self._target.next_deadline(), self._rounds.next_deadline())

    def report(self) -> Report:
        requests, sampled = self._requests, self._batch.sampled
        running = [request for request in requests.in_row.values() if request.phase is not RequestPhase.ENDED]
        stuck = [each.lease for each in requests.holders.values() if self._target.is_quarantined(each.key, self._now)]
        report = requests.report()
        load = replace(
            report.load,
            running_requests=len(running),
            waiting_tokens=sum(len(request.prompt) for request in requests.waiting),
            running_tokens=sum(len(each.prompt) + int(sampled[each.row]) for each in running),
            reservations=len(self._target.open),
            pages_quarantined=count_pages(lease for lease in stuck if lease is not None),
        )
        report.counters.messages_stale += self._target.stale
        return dataclasses.replace(report, load=load)

    # --- one request -----------------------------------------------------------------------------------------------------

    def _join(self, request: DecodeRequest, sampled: int) -> None:
        """The request has its row in the batch. sampled: see `Batch.join`."""
        assert request.row is not None and request.lease is not None
        room, sampling = len(request.lease) * self._page_size, request.asked.sampling
        self._batch.join(request.row, sampling, len(request.prompt), room, sampled=sampled, shared=request.lease.found)

    def _decode(self, request: DecodeRequest, first_token: int) -> None:
        """Its KV is here: it decodes from the next plan on, or when its grammar is ready."""
        request.phase = RequestPhase.DECODING
        request.landed = first_token if request.prepares else None
        if not request.prepares:
            self._join(request, sampled=1)
            if self._speculation is not None and request.row is not None:
                self._speculation.begin(request.row, np.append(request.prompt, np.int32(first_token)))
            self._requests.starts.append(request.row_start(len(request.prompt), first_token))

    def _end(self, request: DecodeRequest, ending: Ending | None, now: float) -> list[Action]:
        """The one door. `ending` is told to the client, or None when the client knows or another instance tells it.

        While a writer holds the request, the writer tells the client: only it knows whether the first token went out.
        """
        before = self._requests.close(request, now)
        if before is None:
            return []
        actions: list[Action] = []
        if request.peer is not None and before not in _IN_BATCH:
            self._target.cancel(request.key, now)
            if isinstance(ending, Failed):
                actions.append(decline(request.peer, request.asked, ending))
                request.pending_failure = ending
        elif ending is not None:
            actions += self._requests.tell(request, ending)
        if request.row is not None:
            self._batch.leave(request.row)
        self._release(request, now)
        return actions

    def _release(self, request: DecodeRequest, now: float) -> None:
        """The request has ended: bring home what nothing in flight can touch. When no step writes its KV any more, whoever begins
        with the same tokens may share its whole pages."""
        if request.row is not None and request.lease is not None and not self._requests.steps_of_row[request.row]:
            sampled, progress, final = int(self._batch.sampled[request.row]), request.progress, 0
            if not sampled and progress is not None:
                final = progress.computed
            elif sampled and len(request.token_ids) == sampled:  # what it sampled last was never fed back: that has no KV
                request.keys.extend(pack_ids(request.token_ids[:-1]))
                final = len(request.prompt) + sampled - 1
            request.lease.publish(request.keys, final // self._page_size)
        self._requests.release(request, now)

    # --- memory ----------------------------------------------------------------------------------------------------------

    def _decline_for_now(self, request: DecodeRequest, now: float) -> list[Action]:
        """There was no room for this reservation. Its writer asks elsewhere, and then here once more, to wait; unless it waits in
        vain."""
        assert request.peer is not None
        if self._waits_in_vain(request, now):
            return self._refuse(request, now)
        self._requests.forget(request, now)
        return [decline(request.peer, request.asked, Failed.of(NoRoom(f"{self._me.id} has no room now")))]

    def _waits_in_vain(self, request: DecodeRequest, now: float) -> bool:
        """Whether writers that cannot release their reservations leave it too few pages, whoever ends. It is refused only when
        heartbeats have had the time to tell the routers, or they would send it here again."""
        lost_pages = self._target.lost_pages(self._page_size) if request.has_waited_long(now) else 0
        return lost_pages > 0 and request.pages > self.pool.total_pages - lost_pages

    def _refuse(self, request: DecodeRequest, now: float) -> list[Action]:
        return self._end(request, Failed.of(Unavailable(f"{self._me.id} lacks memory for the request")), now)

    def _refuse_what_cannot_fit(self, now: float) -> list[Action]:
        """Refuse the head of the line when it waits only for transfers that never end; but first give writers that are merely
        silent their time."""
        head = self._requests.waiting.first(lambda request: not request.waits_for_grammar)
        if head is None:
            return []
        if self._waits_in_vain(head, now):
            return self._refuse(head, now)
        if now - head.waits_since_s <= WRITE_LEASE_S + MARGIN_S or self._rounds.is_away_before(head, self._requests.waiting):
            return []
        if not all(self._target.is_stuck(request.key, now) for request in self._requests.holders.values()):
            return []
        return self._refuse(head, now)

    def _grow(self, now: float) -> tuple[list[Action], dict[int, int]]:
        """A page for each row that cannot go on without one, oldest requests first: row → page. When none is free, requests are
        preempted."""
        short = self._batch.short_rows()
        if not len(short):
            return [], {}
        in_row = self._requests.in_row
        grown: dict[int, int] = {}
        actions: list[Action] = []
        lacking = self._extend(sorted((in_row[row] for row in short.tolist()), key=lambda r: r.rank), grown)
        if lacking:
            ended = [each for each in self._requests.holders.values() if comes_home(each, self._target, now)]
            coming = [each.lease for each in ended if each.lease is not None]
            holders = [r for r in in_row.values() if r.phase is not RequestPhase.ENDED]
            preempted = Failed.of(Preempted(f"{self._me.id} needs the memory for an older request"))
            for victim in choose_victims(holders, lacking, coming):
                actions += self._preempt(victim, preempted, grown, now)
            self._extend((request for request in lacking if request.phase is not RequestPhase.ENDED), grown)
        return actions, grown

    def _preempt(self, victim: DecodeRequest, preempted: Failed, grown: dict[int, int], now: float) -> list[Action]:
        assert victim.row is not None
        grown.pop(victim.row, None)
        self._requests.counters.preemptions += 1
        self._growth.ended(victim.row, stopped=False)
        return self._end(victim, preempted, now)

    def _extend(self, requests: Iterable[DecodeRequest], grown: dict[int, int]) -> list[DecodeRequest]:
        """Returns the requests for which no page was free."""
        lacking: list[DecodeRequest] = []
        for request in requests:
            assert request.row is not None and request.lease is not None
            pages = request.lease.extend(1)
            if pages is None:
                lacking.append(request)
                continue
            grown[request.row] = int(pages[0])
            self._requests.shares.hold(request, 1, request.held_pages + 1)
            self._batch.grew(request.row, len(request.lease) * self._page_size)
        return lacking
