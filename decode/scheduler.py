"""The decode scheduler: who is admitted, who decodes in the next step, and who gives up memory.

Owns the plan of a decode instance. What holds memory, and how it ends, is in `requests.py`; what writers do is in
`reservations.py`. Opens no socket, touches no device, reads no clock.

Two ways in, one way on:

    Reserve  ─► waiting line ─► Grant (pages and a row) ─► KV arrives ─► Handoff ─► joins the next step
                    └──────► Decline, when there is no room and it does not wait, or has waited a while
    Generate ─► waiting line ─► local prefill in chunks between decode steps ────► joins the step after its last chunk

Pages are leased for the prompt, and one by one for the answer as it grows. When none is free the youngest request is preempted:
the router resumes it.
"""

from collections.abc import Iterable
from typing import assert_never

import msgspec
import numpy as np

from common.deadlines import earliest
from common.errors import NoRoom, Preempted, Unavailable
from common.executor import EngineDescription, Plan, StepResult
from common.ids import AttemptId, InstanceId, Life
from common.instance.ports import (
    Action,
    Decision,
    Event,
    LayersDone,
    LinkChanged,
    PeerDied,
    PeersChanged,
    Prepared,
    PushDone,
    PushFailed,
    Report,
    RouterJoined,
    RouterLost,
    Settled,
)
from common.instance.prompt_cache import CacheTeller
from common.instance.request import Phase, next_chunks
from common.instance.requests import InstanceLimits, emit_tokens
from common.messages import (
    Cancel,
    Drain,
    Failed,
    Finished,
    FlushCache,
    Generate,
    Handoff,
    InstanceInfo,
    Load,
    Probe,
    Renew,
    Repeat,
    Reserve,
    TellCache,
    Timeline,
    TokenDelta,
    Withdraw,
)
from common.pages.pool import PagePool, count_pages
from decode.memory import Rounds, admit, choose_victims, has_waited_long
from decode.requests import DecodeRequest, DecodeRequests, decline
from decode.reservations import Reservations
from kv_transfer.handoff_target import MARGIN_S, WRITE_LEASE_S, Digest

DecodeMessage = Generate | Cancel | Probe | Repeat | Reserve | Renew | Handoff | Withdraw | Drain | FlushCache | TellCache


class DecodeScheduler:
    """Implements `common.instance.ports.Scheduler`. digest: with --verify-pages, `Executor.digest_pages`."""

    def __init__(self, me: InstanceInfo, engine: EngineDescription, limits: InstanceLimits, digest: Digest | None = None) -> None:
        self._me = me
        self._page_size = engine.layout.page_size
        self._chunk_tokens = limits.chunk_tokens
        self._requests = DecodeRequests(me, engine, limits)
        self._table = self._requests.table
        self._batch = self._requests.batch
        self._target = self._requests.target
        self._reservations = Reservations(me, engine, self._requests, digest)
        self._rounds = Rounds()
        self._teller = CacheTeller(me, self.pool.cache)
        self._preemptions = 0
        self._now = 0.0

    @property
    def pool(self) -> PagePool:
        return self._requests.pool

    # --- messages and events ---------------------------------------------------------------------------------------------

    def receive(self, sender: InstanceId, message: DecodeMessage, now: float) -> list[Action]:
        match message:
            case Generate():
                refused = self._table.accept(message, None, message.sampling.max_new_tokens, now)
                return [*self._table.preparation(message)] if refused is None else [*self._table.tell_refused(message, refused)]
            case Reserve():
                writer = Life(sender, message.incarnation)
                self._target.heard(writer, message.sent_s, now)
                refused = self._table.accept(message, writer, message.sampling.max_new_tokens, now)
                joined = self._table.get(message.key)
                if joined is not None and joined.asked is message:
                    self._rounds.asked(message.key, now)
                return [*self._table.preparation(message)] if refused is None else [decline(writer, message, refused)]
            case Renew():
                return self._reservations.renew(sender, message, now)
            case Handoff():
                return self._reservations.land(sender, message, now)
            case Withdraw():
                return self._reservations.withdraw(sender, message, now)
            case Cancel():
                request = self._table.cancel(message.key, now)
                return [] if request is None else self._cancel(request, message.complete, now)
            case Probe():
                return [*self._table.answer(message)]
            case Repeat():
                return [*self._table.repeat(message)]
            case TellCache():
                if sender in self._table.routers:
                    self._teller.ask(sender)
                return []
            case FlushCache():
                self.pool.flush()
                return []
            case Drain():
                ended = self._table.drain(now)
                return [action for request, failed in ended for action in self._requests.end(request, failed, now)]
            case _:
                assert_never(message)

    def _cancel(self, request: DecodeRequest, complete: bool, now: float) -> list[Action]:
        if request.phase is Phase.DECODING and request.row is not None:
            if complete:
                self._requests.growth.ended(request.row, stopped=True)
            else:
                self._requests.growth.cancelled()
        return self._requests.end(request, None, now)

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case Settled():
                self._reservations.settled(event.key, now)
                return []
            case PeerDied():
                return self._reservations.bury(event.peer, now)
            case PeersChanged():
                return self._reservations.meet(event, now)
            case Prepared():
                ready = self._table.prepared(event)
                return [] if ready is None else self._requests.prepared(ready, event.refused, now)
            case RouterJoined():
                self._table.meet_router(event)
                return []
            case RouterLost():
                self._teller.forget(event.router)
                lost = self._table.lose_router(event.router)
                return [action for request in lost for action in self._requests.end(request, None, now)]
            case PushDone() | PushFailed() | LinkChanged() | LayersDone():
                raise AssertionError("a decode instance pushes nothing")
            case _:
                assert_never(event)

    def tick(self, now: float) -> list[Action]:
        self._now = now
        actions: list[Action] = []
        for request, failed in self._table.overdue(now):
            actions += self._requests.end(request, failed, now)
        for key in self._rounds.over(self._table.waiting, now):
            reservation = self._table.get(key)
            if reservation is not None and reservation.phase is Phase.WAITING:
                actions += self._decline_for_now(reservation, now)
        actions += [*self._reservations.fence(now), *self._teller.tick(now)]
        return actions + self._reservations.expect(now)

    def step_done(self, result: StepResult, now: float) -> list[Action]:
        """Tokens came back: send them on, and end the requests that are complete."""
        plan, batch, requests = result.plan, self._batch, self._requests
        rows = plan.rows
        requests.rows.returned(rows)
        logprobs, prompts = result.logprobs.by_row(), result.prompt_logprobs.by_row()
        for chunk in plan.chunks:
            request = requests.by_row[chunk.row]
            assert request.progress is not None
            request.progress.complete(len(chunk.token_ids))
            requests.prompts.computed(request)
            self._table.prompt_tokens += len(chunk.token_ids)
            if chunk.last and request.phase is not Phase.ENDED:
                request.times.last_chunk_s = now
            if chunk.row in prompts:
                request.collect(prompts[chunk.row])
        for row in rows[~batch.live[rows]].tolist():
            requests.release(requests.by_row[row], now)
        actions: list[Action] = []
        for row in [row for row in result.failed if batch.live[row]]:
            requests.growth.cancelled()
            actions += requests.end(requests.by_row[row], Failed.of(result.failed[row]), now)
        embedded = [requests.by_row[row] for row in result.embeddings if batch.live[row]]
        embeddings = [request.embedded(result.embeddings[request.row]) for request in embedded if request.row is not None]
        for request in embedded:
            requests.end(request, None, now)
        sampled = plan.sampled_rows
        live = batch.live[sampled]
        sampled, tokens = sampled[live], result.tokens[live]
        stopped, at_limit = batch.record(sampled, tokens)
        for row in sampled[batch.sampled[sampled] == 2].tolist():
            requests.by_row[row].times.first_decode_s = now
        self._table.tokens += len(sampled)
        answered = [requests.by_row[row] for row in sampled.tolist()]
        deltas: list[TokenDelta] = []
        for request, token in zip(answered, tokens.tolist(), strict=True):
            number = request.next_token
            deltas.append(TokenDelta(request.key, number, (token,)))
            request.next_token = number + 1
            request.token_ids.append(token)
        reporting = {*logprobs, *(chunk.row for chunk in plan.chunks if chunk.last)} if logprobs or plan.chunks else ()
        for at, row in enumerate(sampled.tolist() if reporting else ()):
            if row in reporting:
                deltas[at] = answered[at].told_with(deltas[at], logprobs.get(row, ()))
        for at in np.flatnonzero(stopped | at_limit).tolist():
            ending = Finished(reason="stop", matched=int(tokens[at])) if stopped[at] else Finished(reason="length")
            deltas[at] = msgspec.structs.replace(deltas[at], ending=ending)
            answered[at].told = ending
            requests.growth.ended(int(sampled[at]), stopped=bool(stopped[at]))
            requests.end(answered[at], None, now)
        return [*emit_tokens([*embeddings, *deltas], [request.pipeline for request in (*embedded, *answered)]), *actions]

    # --- planning --------------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        requests = self._requests
        actions, grown = self._grow(now)
        actions += self._admit(grown, now)
        actions += self._decline_what_does_not_wait(now)
        actions += self._refuse_what_cannot_fit(now)
        actions += self._reservations.expect(now)
        decode_rows = self._batch.next_rows()
        chunks = next_chunks(requests.computing.values(), self._chunk_tokens)
        for chunk in chunks:
            requests.by_row[chunk.row].times.first_chunk(now)
            if chunk.last:
                del requests.computing[chunk.row]
                requests.by_row[chunk.row].phase = Phase.DECODING
                self._batch.prompt_planned(chunk.row)
        if not chunks and not len(decode_rows):
            assert not grown, "a row that grew is planned"
            return Decision(None, actions)
        self._table.steps += 1
        plan = Plan(
            self._table.steps,
            starts=tuple(requests.starts),
            chunks=chunks,
            decode_rows=decode_rows,
            grown_rows=np.array(list(grown), dtype=np.int32),
            grown_pages=np.array(list(grown.values()), dtype=np.int32),
        )
        requests.starts = []
        requests.rows.launched(plan.rows)
        return Decision(plan, actions)

    def take_timelines(self) -> list[Timeline]:
        return self._table.take_timelines()

    def next_deadline(self) -> float | None:
        due_s = (each.next_deadline() for each in (self._table, self._target, self._rounds, self._teller))
        return earliest(*due_s)

    def report(self) -> Report:
        waiting, by_row, counts = self._table.waiting, self._requests.by_row, self._reservations
        running = [request for request in by_row.values() if request.phase is not Phase.ENDED]
        missing_tokens = self._requests.prompts.missing_tokens
        to_compute = sum(missing_tokens(request) for request in waiting if request.peer is None)
        to_compute += sum(len(progress.prompt) - progress.computed for progress in self._requests.computing.values())
        stuck = [
            r.lease for r in self._requests.holders() if r.lease is not None and self._target.is_quarantined(r.key, self._now)
        ]
        load = Load(
            waiting_requests=len(waiting),
            running_requests=len(running),
            waiting_tokens=sum(len(request.prompt) for request in waiting),
            running_tokens=sum(len(r.prompt) + int(self._batch.sampled[r.row]) for r in running if r.row is not None),
            tokens_to_compute=to_compute,
            pages_free=self.pool.available_pages,
            pages_total=self.pool.total_pages,
            reservations=len(self._target.open),
            pages_quarantined=count_pages(stuck),
            pages_cached=self.pool.cached_pages,
        )
        shared = self._table.counters()
        counters = msgspec.structs.replace(
            shared,
            pages_received=counts.pages_received,
            bytes_received=counts.bytes_received,
            handoffs=counts.handoffs,
            handoffs_lost=counts.handoffs_lost,
            pages_corrupt=counts.pages_corrupt,
            preemptions=self._preemptions,
            prompt_tokens_asked=self._requests.prompts.asked_tokens,
            prompt_tokens_hit=self._requests.prompts.hit_tokens,
            pages_evicted=self.pool.cache.evicted,
            messages_stale=shared.messages_stale + self._target.stale,
        )
        return Report(load, counters, self._table.drained, cache_version=self._teller.version)

    def key_in(self, row: int) -> AttemptId:
        return self._requests.by_row[row].key

    def _admit(self, grown: dict[int, int], now: float) -> list[Action]:
        """Once more when others have given way: their room may be free at once. grown: rows that got a page, without those that
        are preempted."""
        requests = self._requests
        actions: list[Action] = []
        while True:
            admission = admit(requests, self._rounds, now)
            for request in admission.admitted:
                requests.hold(request)
                request.times.admitted_s = now
                if request.peer is not None:
                    self._rounds.admitted(request.key)
                    actions += self._reservations.grant(request, request.peer, now)
                else:
                    requests.compute(request)
            if not admission.preempted:
                return actions
            for victim in admission.preempted:
                actions += self._preempt(victim, "a request of another key", grown, now)

    # --- memory ----------------------------------------------------------------------------------------------------------

    def _decline_what_does_not_wait(self, now: float) -> list[Action]:
        in_haste = [request for request in self._table.waiting if not request.waits]
        return [action for request in in_haste for action in self._decline_for_now(request, now)]

    def _decline_for_now(self, request: DecodeRequest, now: float) -> list[Action]:
        """There was no room for this reservation. Its writer asks elsewhere, and then here once more, to wait; unless it waits in
        vain."""
        assert request.peer is not None
        if self._waits_in_vain(request, now):
            return self._refuse(request, now)
        self._table.forget(request, now)
        return [decline(request.peer, request.asked, Failed.of(NoRoom(f"{self._me.id} has no room now")))]

    def _waits_in_vain(self, request: DecodeRequest, now: float) -> bool:
        """Whether writers that cannot release their reservations leave it too few pages, whoever ends. It is refused only when
        heartbeats have had the time to tell the routers, or they would send it here again."""
        lost_pages = self._target.lost_pages(self._page_size) if has_waited_long(request, now) else 0
        return lost_pages > 0 and request.pages > self.pool.total_pages - lost_pages

    def _refuse(self, request: DecodeRequest, now: float) -> list[Action]:
        return self._requests.end(request, Failed.of(Unavailable(f"{self._me.id} lacks memory for the request")), now)

    def _refuse_what_cannot_fit(self, now: float) -> list[Action]:
        """Refuse the head of the line when it waits only for transfers that never end; but first give writers that are merely
        silent their time."""
        head = self._table.waiting.first(lambda request: not request.waits_for_grammar)
        if head is None:
            return []
        if self._waits_in_vain(head, now):
            return self._refuse(head, now)
        if now - head.waits_since_s <= WRITE_LEASE_S + MARGIN_S or self._rounds.is_away_before(head, self._table.waiting):
            return []
        if not all(self._target.is_stuck(request.key, now) for request in self._requests.holders()):
            return []
        return self._refuse(head, now)

    def _grow(self, now: float) -> tuple[list[Action], dict[int, int]]:
        """A page for each row that cannot go on without one, oldest requests first: row → page. When none is free, requests are
        preempted."""
        short = self._batch.short_rows()
        if not len(short):
            return [], {}
        by_row = self._requests.by_row
        grown: dict[int, int] = {}
        actions: list[Action] = []
        lacking = self._extend(sorted((by_row[row] for row in short.tolist()), key=lambda r: r.rank), grown)
        if lacking:
            coming = [r.lease for r in self._requests.holders() if r.lease is not None and self._requests.comes_home(r, now)]
            holders = [r for r in by_row.values() if r.phase is not Phase.ENDED]
            for victim in choose_victims(holders, lacking, coming):
                actions += self._preempt(victim, "an older request", grown, now)
            self._extend((request for request in lacking if request.phase is not Phase.ENDED), grown)
        return actions, grown

    def _preempt(self, victim: DecodeRequest, favoured: str, grown: dict[int, int], now: float) -> list[Action]:
        """favoured: for whom."""
        assert victim.row is not None
        grown.pop(victim.row, None)
        self._preemptions += 1
        self._requests.growth.ended(victim.row, stopped=False)
        preempted = Failed.of(Preempted(f"{self._me.id} needs the memory for {favoured}"))
        return self._requests.end(victim, preempted, now)

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
            self._table.shares.hold(request, 1, request.held_pages + 1)
            self._batch.grew(request.row, len(request.lease) * self._page_size)
        return lacking
