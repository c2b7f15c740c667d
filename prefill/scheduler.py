"""The prefill scheduler: which prompts are computed next, and what becomes of their pages.

Owns the requests of a prefill instance, its page pool and its rows. Opens no socket, touches no device, reads no clock.

A request's life here, top to bottom:

    Generate ─► waiting line
    decide   ─► admitted: leases pages for the whole prompt, the cached ones among them, takes a row, sends Reserve to the best
                 decode instance that is there, and to the next when that one has no room, leaves or cannot be reached.
                 Placed tells the router who has granted
             ─► chunk after chunk, several prompts in one forward
    step_done ─► complete pages are pushed while the next chunk computes
             ─► last chunk: the first token goes to the client at once, the last pages are pushed, Handoff follows the last write
    SourceRead ─► pages that nothing reads any more come home early
    SourceClosed ─► the request ends, and its other pages come home

A request ends through `_end` and leaves through `_release`, which waits until no step and no push can touch the pages. An attempt
that fails for a reason that may pass ends with a retryable `Failed`: the router resumes the request elsewhere.
"""

from typing import assert_never

import msgspec

from common.deadlines import earliest
from common.errors import BadRequest, TandemError, Unavailable
from common.executor import EngineDescription, Plan, RowStart, StepResult
from common.ids import ROUTER, AttemptId, InstanceId, Life
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
    Send,
    Settled,
)
from common.instance.prompt_cache import CacheTeller
from common.instance.request import Phase, PromptProgress, next_chunks
from common.instance.requests import InstanceLimits, RequestTable, Rows, emit_tokens
from common.messages import (
    Cancel,
    Decline,
    Drain,
    Ending,
    Failed,
    FlushCache,
    Generate,
    Grant,
    InstanceInfo,
    LinkInfo,
    Load,
    Placed,
    Probe,
    Renewed,
    Repeat,
    TellCache,
    TellLinks,
    Timeline,
    TokenDelta,
    TokenLogprobs,
)
from common.pages.pool import PagePool
from kv_transfer.handoff_source import HandoffSource
from kv_transfer.handoff_target import Digest
from kv_transfer.outgoing import SourceClosed, SourceGranted, SourceNews, SourcePosted, SourceRead, SourceRefused
from prefill.requests import LinkBook, PrefillRequest, PromptAdmission, PromptMemory

PrefillMessage = Generate | Cancel | Probe | Repeat | Grant | Decline | Renewed | TellLinks | TellCache | Drain | FlushCache


class PrefillScheduler:
    """Implements `common.instance.ports.Scheduler`. digest: with --verify-pages, `Executor.digest_pages`."""

    def __init__(self, me: InstanceInfo, engine: EngineDescription, limits: InstanceLimits, digest: Digest | None = None) -> None:
        self._me = me
        self._engine = engine
        self._limits = limits
        self._memory = PromptMemory(engine, limits.prefix_cache)
        self._rows = Rows(engine.max_rows)
        self._source = HandoffSource(me.incarnation, engine.layout, digest)
        self._requests = RequestTable(PrefillRequest, me, engine, limits)
        self._links = LinkBook(me.id, me.incarnation)
        self._teller = CacheTeller(me, self.pool.cache)
        self._computing: dict[int, PrefillRequest] = {}
        self._admission = PromptAdmission(self._requests, self._memory, self._rows, limits.chunk_tokens, self._is_stuck)
        self._moved = 0

    @property
    def pool(self) -> PagePool:
        return self._memory.pool

    # --- messages and events ---------------------------------------------------------------------------------------------

    def receive(self, sender: InstanceId, message: PrefillMessage, now: float) -> list[Action]:
        actions: list[Action] = []
        match message:
            case Generate():
                actions = self._generate(message, now)
            case Cancel():
                request = self._requests.cancel(message.key, now)
                actions = [] if request is None else self._end(request, None, now)
            case Probe():
                actions = [*self._requests.answer(message)]
            case Repeat():
                actions = [*self._requests.repeat(message)]
            case Grant() | Decline() | Renewed():
                actions = self._source.receive(sender, message, now)
            case TellLinks():
                actions = [Send(sender, self._links.all_links(self._source.traffic.to))]
            case TellCache():
                if sender in self._requests.routers:
                    self._teller.ask(sender)
            case FlushCache():
                self.pool.flush()
            case Drain():
                for request, failed in self._requests.drain(now):
                    actions += self._end(request, failed, now)
            case _:
                assert_never(message)
        return actions + self._close_handoffs(now)

    def handle(self, event: Event, now: float) -> list[Action]:
        actions: list[Action] = []
        match event:
            case PushDone() | PushFailed():
                if (key := self._source.key_of(event.ticket)) is not None:
                    self._requests[key].times.pushed_s = now
                actions = self._source.transfer_ended(event)
            case LayersDone():
                # Only a last chunk goes layer by layer: no later chunk of its prompt follows that its push could hide behind.
                for chunk in event.plan.chunks:
                    request = self._computing[chunk.row]
                    if chunk.last and request.source_open:
                        actions += self._source.computed(request.key, chunk.start, event.layers)
            case LinkChanged():
                actions = self._link_changed(event.link, now)
            case PeerDied():
                return []  # its link tells, and what was pushed there is of no use
            case PeersChanged():
                actions = self._meet(event, now)
            case Prepared():
                ready = self._requests.prepared(event)
                actions = [] if ready is None or event.refused is None else self._end(ready, event.refused, now)
            case RouterJoined():
                self._requests.meet_router(event)
            case RouterLost():
                self._teller.forget(event.router)
                for request in self._requests.lose_router(event.router):
                    actions += self._end(request, None, now)
            case Settled():
                raise AssertionError("nobody writes to a prefill instance")
            case _:
                assert_never(event)
        return actions + self._close_handoffs(now)

    def tick(self, now: float) -> list[Action]:
        actions = [*self._source.tick(now), *self._teller.tick(now)]
        for request, failed in self._requests.overdue(now):
            actions += self._end(request, failed, now)
        news = self._links.news()
        if news is not None:
            actions.append(Send(ROUTER, news))
        return actions + self._close_handoffs(now)

    def step_done(self, result: StepResult, now: float) -> list[Action]:
        """Chunks came back: push what is complete, and send first tokens on their way."""
        self._rows.returned(result.plan.rows)
        tokens = dict(zip(result.plan.sampled_rows.tolist(), result.tokens.tolist(), strict=True))
        logprobs, prompts = result.logprobs.by_row(), result.prompt_logprobs.by_row()
        deltas: list[TokenDelta] = []
        pipelines: list[InstanceId] = []
        actions: list[Action] = []
        for chunk in result.plan.chunks:
            request = self._computing[chunk.row]
            assert request.progress is not None
            request.progress.complete(len(chunk.token_ids))
            self._memory.prompts.computed(request)
            self._requests.prompt_tokens += len(chunk.token_ids)
            if chunk.row in prompts:
                request.collect(prompts[chunk.row])
            if request.phase is Phase.ENDED:
                self._release(request, now)
            elif chunk.row in result.failed:
                actions += self._end(request, Failed.of(result.failed[chunk.row]), now)
            elif chunk.last:
                request.times.last_chunk_s = now
                pipelines.append(request.pipeline)
                if chunk.row in result.embeddings:
                    deltas.append(request.embedded(result.embeddings[chunk.row]))
                    actions += self._end(request, None, now)
                    continue
                actions += self._first_token(request, tokens[chunk.row], logprobs.get(chunk.row, ()), deltas, now)
            elif request.source_open:
                actions += self._source.computed(request.key, request.progress.computed)
        # The first tokens leave before anything else that this step caused.
        return [*emit_tokens(deltas, pipelines), *actions, *self._close_handoffs(now)]

    # --- planning --------------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        actions: list[Action] = []
        starts: list[RowStart] = []
        for request, failed in self._admission.turns(self._me.id, self._computing.values(), now):
            if failed is None:
                actions += self._admit(request, starts, now)
            else:
                actions += [*self._end(request, failed, now), *self._close_handoffs(now)]
        live = (r.progress for r in self._computing.values() if r.progress is not None and r.phase is Phase.COMPUTING)
        chunks = next_chunks(live, self._limits.chunk_tokens)
        if not chunks:
            return Decision(None, actions)
        for chunk in chunks:
            self._computing[chunk.row].times.first_chunk(now)
        self._requests.steps += 1
        plan = Plan(self._requests.steps, starts=tuple(starts), chunks=chunks)
        self._rows.launched(plan.rows)
        return Decision(plan, actions, follows_layers=any(chunk.last for chunk in chunks))

    def take_timelines(self) -> list[Timeline]:
        return self._requests.take_timelines()

    def next_deadline(self) -> float | None:
        return earliest(self._requests.next_deadline(), self._source.next_deadline(), self._teller.next_deadline())

    def report(self) -> Report:
        waiting, traffic = self._requests.waiting, self._source.traffic
        stuck = [request.lease for request in self._requests if request.lease and self._is_stuck(request)]
        computing = sum(len(r.prompt) - r.progress.computed for r in self._computing.values() if r.progress is not None)
        waiting_tokens = sum(map(self._memory.prompts.missing_tokens, waiting))
        load = Load(
            waiting_requests=len(waiting),
            running_requests=len(self._requests) - len(waiting),
            waiting_tokens=waiting_tokens,
            running_tokens=computing,
            tokens_to_compute=waiting_tokens + computing,
            pages_free=self.pool.available_pages,
            pages_total=self.pool.total_pages,
            pushes_in_flight=self._source.pushes_in_flight,
            pages_quarantined=self._memory.quarantined(stuck),
            pages_cached=self.pool.cached_pages,
        )
        shared = self._requests.counters()
        counters = msgspec.structs.replace(
            shared,
            pages_pushed=self._source.pages_pushed,
            bytes_pushed=traffic.total.bytes_pushed,
            handoffs=traffic.total.handoffs,
            reservations_moved=self._moved,
            preemptions=self._admission.preempted,
            pushes_failed=traffic.total.pushes_failed,
            push_seconds=traffic.total.push_seconds,
            exposed_seconds=traffic.total.exposed_seconds,
            prompt_tokens_asked=self._memory.prompts.asked_tokens,
            prompt_tokens_hit=self._memory.prompts.hit_tokens,
            pages_evicted=self.pool.cache.evicted,
            pages_spared=self._source.pages_spared,
            messages_stale=shared.messages_stale + self._source.stale,
        )
        return Report(load, counters, self._requests.drained, self._links.version, self._teller.version)

    def key_in(self, row: int) -> AttemptId:
        return self._computing[row].key

    # --- peers and links -------------------------------------------------------------------------------------------------

    def _meet(self, change: PeersChanged, now: float) -> list[Action]:
        """Other decode instances: what is pushed to those that left has failed, and what was not granted moves on."""
        self._requests.meet(change)
        actions = [self._links.meet(change), *self._source.peers_gone(self._requests.peers.items())]
        for request in self._requests.waiting if change.left else ():
            if request.candidates and not any(name in self._requests.peers for name in request.candidates):
                actions += self._end(request, self._nobody_left(request), now)
        return actions

    def _nobody_left(self, request: PrefillRequest) -> Failed:
        return Failed.of(Unavailable(f"{self._me.id} reaches none of the decode instances {', '.join(request.candidates)}"))

    def _link_changed(self, link: LinkInfo, now: float) -> list[Action]:
        """Handoffs on a lost link have failed, and their clients are told at once, before the pushes have ended. Those that were
        not granted yet move on."""
        self._links.changed(link)
        if link.state != "lost":
            return []
        lost = Failed.of(Unavailable(f"the link to {link.peer} was lost: {link.detail}"))
        actions = self._source.cannot_reach(link.peer, lost)
        for request in self._requests:
            if request.source_open and request.decode is not None and request.decode.id == link.peer:
                actions += self._end(request, lost, now)
        return actions

    def _is_stuck(self, request: PrefillRequest) -> bool:
        """Whether its pages wait for the end of pushes over a link that is gone."""
        if request.peer is None or request.phase is not Phase.ENDED or not request.source_open:
            return False
        return request.peer.id in self._links.lost or not self._requests.knows(request.peer)

    # --- one request -----------------------------------------------------------------------------------------------------

    def _generate(self, asked: Generate, now: float) -> list[Action]:
        objection: TandemError | None = None
        if not asked.decodes and asked.sampling.max_new_tokens > 1:
            cannot = f"{self._me.id} cannot decode: a request of more than one token needs a decode instance"
            objection = BadRequest(cannot, field="decodes")
        elif asked.decodes and not any(name in self._requests.peers for name in asked.decodes):
            objection = Unavailable(f"{self._me.id} knows none of the decode instances {', '.join(asked.decodes)}")
        refused = self._requests.accept(asked, None, 0, now, objection)
        request = self._requests.get(asked.key)
        if request is not None and request.phase is Phase.WAITING:
            request.candidates = asked.decodes
            self._memory.prompts.find(request)
        return [*self._requests.preparation(asked)] if refused is None else [*self._requests.tell_refused(asked, refused)]

    def _admit(self, request: PrefillRequest, starts: list[RowStart], now: float) -> list[Action]:
        """The request has its pages: give it a row and ask for its reservation. Not earlier, so that decode memory stays free and
        the request goes where there is room by then."""
        peer = self._choose(request)
        if peer is None and request.candidates:
            return self._end(request, self._nobody_left(request), now)
        assert request.lease is not None
        row, there = self._rows.take(), request.cached_tokens
        request.phase, request.progress = Phase.COMPUTING, PromptProgress(row, request.prompt, there, there, request.owner)
        request.times.admitted_s = now
        self._computing[row] = request
        starts.append(request.row_start(row, length=there))
        if peer is None:
            return []
        request.source_open, request.times.asked_s = True, now
        actions = self._source.open(request.reserve(self._me.incarnation, now), peer, request.lease.pages)
        return actions + self._source.computed(request.key, there)

    def _choose(self, request: PrefillRequest) -> Life | None:
        """Whom to ask for its reservation now; None when nobody is left."""
        peers = self._requests.peers
        name = request.choose(lambda name: name in peers and name not in self._links.lost)
        if name is None:
            return None
        request.peer = Life(name, peers[name])
        return request.peer

    def _refused(self, request: PrefillRequest, failure: Failed, now: float) -> list[Action]:
        """Its peer grants no reservation: ask the next candidate, if that may help."""
        if request.phase is Phase.ENDED:
            return []
        assert request.peer is not None
        request.refused(request.peer.id, failure)
        peer = self._choose(request) if failure.retryable else None
        if peer is None:
            return self._end(request, failure, now)
        self._moved += 1
        return self._source.move(request.reserve(self._me.incarnation, now), peer)

    def _first_token(
        self, request: PrefillRequest, token: int, logprobs: TokenLogprobs, deltas: list[TokenDelta], now: float
    ) -> list[Action]:
        """The prompt is computed: its first token is on its way to the client before anything is handed off. logprobs: that of
        the token, if asked for."""
        ending = request.ending_with(token, self._engine.eos_token_ids)
        deltas.append(request.told_with(TokenDelta(request.key, request.next_token, (token,), ending), logprobs))
        request.note(token)
        request.told = ending
        request.phase = Phase.HANDING_OFF
        self._requests.tokens += 1
        if ending is not None:
            return self._end(request, None, now)
        self._release(request, now)
        first_logprob = logprobs[0] if logprobs else None
        return self._source.computed(request.key, len(request.prompt), first_token=token, first_logprob=first_logprob)

    def _end(self, request: PrefillRequest, ending: Ending | None, now: float) -> list[Action]:
        """The one door. `ending` is told to the client, or None when the client knows already."""
        if self._requests.end(request, now) is None:
            return []
        actions: list[Action] = [] if ending is None else [self._requests.tell(request, ending)]
        self._memory.prompts.ended(request)
        actions += self._source.give_up(request.key)
        self._release(request, now)
        return actions

    def _release(self, request: PrefillRequest, now: float) -> None:
        """Bring home what nothing in flight can touch: the row after its last step, the pages after the last push as well."""
        progress = request.progress
        if progress is not None and self._computing.get(progress.row) is request:
            if self._rows.in_flight[progress.row]:
                return
            del self._computing[progress.row]
            self._rows.give_back(progress.row)
        if request.phase is Phase.ENDED and not request.source_open:
            self._requests.remove(request, now)

    def _close_handoffs(self, now: float) -> list[Action]:
        """Act on what became of handoffs: move on, bring pages home, and end the requests whose handoff is over."""
        actions: list[Action] = []
        while news := self._source.take_news():
            for each in news:
                actions += self._hear(self._requests[each.key], each, now)
        return actions

    def _hear(self, request: PrefillRequest, news: SourceNews, now: float) -> list[Action]:
        assert request.lease is not None and request.peer is not None
        match news:
            case SourceGranted():
                request.decode = request.peer
                request.times.granted_s, request.times.pages_had = now, news.have_pages
                placed = Placed(id=self._me.id, incarnation=self._me.incarnation, key=request.key, decode=request.peer)
                return [Send(request.key.router, placed)]
            case SourcePosted():
                request.times.first_push_s = now
                return []
            case SourceRefused():
                return self._refused(request, news.failure, now)
            case SourceRead():
                request.lease.give_back(news.pages)
                if request.phase is not Phase.ENDED:
                    self._requests.shares.hold(request, 0, max(0, request.held_pages - news.pages))
                return []
            case SourceClosed():
                return self._closed(request, news, now)
            case _:
                assert_never(news)

    def _closed(self, request: PrefillRequest, closed: SourceClosed, now: float) -> list[Action]:
        assert request.lease is not None and request.peer is not None
        request.source_open = False
        if closed.failure is None and request.phase is Phase.HANDING_OFF:
            self._source.traffic.add(request.peer.id, request.handed_off(now))
        if not closed.quiescent:
            self._memory.quarantine(request)
        if request.phase is Phase.ENDED:
            self._release(request, now)
            return []
        return self._end(request, closed.failure, now)
