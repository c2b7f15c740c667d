"""The prefill scheduler: which prompts are computed next, and what becomes of their pages.

Owns the plan of a prefill instance, and the one door by which its requests end. What both roles share is in
`common/instance/requests.py`. Opens no socket, touches no device, reads no clock.

A request's life here, top to bottom:

    Generate ─► waiting line
    decide   ─► admitted: leases pages for the whole prompt, the cached ones among them, takes a row, sends Reserve to the best
                 decode instance that is there, and to the next when that one has no room, leaves or cannot be reached.
                 Placed tells the router who has granted
             ─► chunk after chunk, several prompts in one forward
    step_done ─► complete pages are pushed while the next chunk computes
             ─► last chunk: the first token goes to the client at once, the last pages are pushed, Handoff follows the last write
    SourcePagesRead ─► pages that nothing reads any more come home early
    HandoffClosed ─► the request ends, and its other pages come home

A request ends through `_end`, and leaves when no step and no push can touch its row and its pages any more. An attempt that fails
for a reason that may pass ends with a retryable `Failed`: the router resumes the request elsewhere.
"""

from typing import assert_never

from msgspec.structs import replace

from common.deadlines import earliest
from common.errors import BadRequest, Preempted, TandemError, Unavailable
from common.executor import EngineDescription, StepPlan, StepResult
from common.ids import ROUTER, AttemptId, InstanceId, Life
from common.instance.admission import admit
from common.instance.ports import (
    Action,
    Decision,
    Event,
    LayersDone,
    PeerDied,
    PeersChanged,
    Prepared,
    Report,
    RouterJoined,
    RouterLost,
    Send,
)
from common.instance.request import RequestPhase
from common.instance.requests import InstanceLimits, RequestTable, SharedMessage
from common.instance.token_memory import emit_tokens
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
from common.messages.transfers import LinkChanged, PushDone, PushFailed, Settled
from common.pages.pool import PageLease, PagePool, count_pages
from kv_transfer.handoff_reader import Digest
from kv_transfer.handoff_writer import HandoffWriter
from kv_transfer.outgoing import HandoffClosed, HandoffEvent, HandoffGranted, HandoffPosted, HandoffRefused, SourcePagesRead
from prefill.requests import LinkBook, PrefillRequest, PromptRoom

PrefillMessage = Generate | Cancel | Grant | Decline | Renewed | TellLinks | SharedMessage


class PrefillScheduler:
    """Implements `common.instance.ports.Scheduler`."""

    def __init__(self, me: InstanceInfo, engine: EngineDescription, limits: InstanceLimits, digest: Digest | None = None) -> None:
        """digest: with --verify-pages, `Executor.digest_pages`."""
        self._me = me
        self._engine = engine
        self._chunk_tokens = limits.chunk_tokens
        self._requests = RequestTable(PrefillRequest, me, engine, limits, self._end)
        self._source = HandoffWriter(me.incarnation, engine.layout, digest)
        self._links = LinkBook(me.id, me.incarnation)
        self._quarantined: list[PageLease] = []
        """Pages that a push may still read, which is not proven to have stopped: nobody ever writes them again."""

    @property
    def pool(self) -> PagePool:
        return self._requests.pool

    # --- messages and events ---------------------------------------------------------------------------------------------

    def receive(self, sender: InstanceId, message: PrefillMessage, now: float) -> list[Action]:
        actions: list[Action] = []
        match message:
            case Generate():
                actions = self._generate(message, now)
            case Cancel():
                request = self._requests.cancel(message.key, now)
                actions = [] if request is None else self._end(request, None, now)
            case Grant() | Decline() | Renewed():
                actions = self._source.receive(sender, message, now)
            case TellLinks():
                actions = [Send(sender, self._links.all_links(self._source.traffic.to))]
            case Probe() | Repeat() | TellCache() | FlushCache() | Drain():
                actions = self._requests.receive(sender, message, now)
            case _:
                assert_never(message)
        return actions + self._follow_handoffs(now)

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
                    request = self._requests.in_row[chunk.row]
                    if chunk.last and request.in_transfer:
                        actions += self._source.computed(request.key, chunk.start, event.layers)
            case LinkChanged():
                actions = self._link_changed(event.link, now)
            case PeerDied():
                return []  # its link tells, and what was pushed there is of no use
            case PeersChanged():
                actions = self._meet(event, now)
            case Prepared() | RouterJoined() | RouterLost():
                actions = self._requests.handle(event, now)
            case Settled():
                raise AssertionError("nobody writes to a prefill instance")
            case _:
                assert_never(event)
        return actions + self._follow_handoffs(now)

    def tick(self, now: float) -> list[Action]:
        actions = [*self._source.tick(now), *self._requests.tick(now)]
        changes = self._links.changes()
        if changes is not None:
            actions.append(Send(ROUTER, changes))
        return actions + self._follow_handoffs(now)

    def step_done(self, result: StepResult, now: float) -> list[Action]:
        """Chunks came back: push what is complete, and send first tokens on their way."""
        tokens = dict(zip(result.plan.sampled_rows.tolist(), result.tokens.tolist(), strict=True))
        logprobs = result.logprobs.by_row()
        deltas: list[TokenDelta] = []
        pipelines: list[InstanceId] = []
        actions: list[Action] = []
        for chunk, request in zip(result.plan.chunks, self._requests.chunks_done(result, now), strict=True):
            assert request.progress is not None
            if request.phase is RequestPhase.ENDED:
                self._requests.release(request, now)
            elif chunk.row in result.failed:
                actions += self._end(request, Failed.of(result.failed[chunk.row]), now)
            elif chunk.last:
                pipelines.append(request.pipeline)
                if chunk.row in result.embeddings:
                    deltas.append(request.embedded(result.embeddings[chunk.row]))
                    actions += self._end(request, None, now)
                    continue
                actions += self._first_token(request, tokens[chunk.row], logprobs.get(chunk.row, ()), deltas, now)
            elif request.in_transfer:
                actions += self._source.computed(request.key, request.progress.computed)
        # The first tokens leave before anything else that this step caused.
        return [*emit_tokens(deltas, pipelines), *actions, *self._follow_handoffs(now)]

    # --- planning --------------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        requests, actions = self._requests, list[Action]()
        for request, failed in admit(requests, self._me.id, self._room, now):
            if failed is None:
                actions += self._begin(request, now)
            else:
                requests.counters.preemptions += failed.kind == Preempted.kind
                actions += [*self._end(request, failed, now), *self._follow_handoffs(now)]
        chunks = requests.next_chunks(now)
        if not chunks:
            return Decision(None, actions)
        plan = StepPlan(requests.counters.steps + 1, starts=tuple(requests.starts), chunks=chunks)
        requests.launch(plan)
        return Decision(plan, actions, follows_layers=any(chunk.last for chunk in chunks))

    def _room(self) -> PromptRoom:
        most_pages = self.pool.total_pages - count_pages(self._quarantined)
        return PromptRoom(self._me.id, self._requests, self._chunk_tokens, most_pages, self._is_stuck)

    def take_timelines(self) -> list[Timeline]:
        return self._requests.take_timelines()

    def next_deadline(self) -> float | None:
        return earliest(self._requests.next_deadline(), self._source.next_deadline())

    def report(self) -> Report:
        requests, source, pushed = self._requests, self._source, self._source.traffic.total
        stuck = [each.lease for each in requests.holders.values() if each.lease is not None and self._is_stuck(each)]
        load = requests.load()
        waiting_tokens = sum(map(requests.prompts.missing_tokens, requests.waiting))
        load = replace(
            load,
            running_requests=len(requests) - len(requests.waiting),
            waiting_tokens=waiting_tokens,
            running_tokens=load.tokens_to_compute - waiting_tokens,
            pushes_in_flight=source.pushes_in_flight,
            pages_quarantined=count_pages([*self._quarantined, *stuck]),
        )
        counters = requests.counters_so_far()
        counters = replace(
            counters,
            pages_pushed=source.pages_pushed,
            pages_spared=source.pages_spared,
            bytes_pushed=pushed.bytes_pushed,
            handoffs=pushed.handoffs,
            pushes_failed=pushed.pushes_failed,
            push_seconds=pushed.push_seconds,
            exposed_seconds=pushed.exposed_seconds,
            messages_stale=counters.messages_stale + source.stale,
        )
        return requests.report(load, counters, self._links.version)

    def key_in(self, row: int) -> AttemptId:
        return self._requests.in_row[row].key

    # --- peers and links -------------------------------------------------------------------------------------------------

    def _meet(self, change: PeersChanged, now: float) -> list[Action]:
        """Other decode instances: what is pushed to those that left has failed, and what was not granted moves on."""
        actions = self._requests.meet(change, now)
        actions += [self._links.meet(change), *self._source.peers_gone(self._requests.peers.items())]
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
            if request.in_transfer and request.decode is not None and request.decode.id == link.peer:
                actions += self._end(request, lost, now)
        return actions

    def _is_stuck(self, request: PrefillRequest) -> bool:
        """Whether its pages wait for the end of pushes over a link that is gone."""
        if request.peer is None or request.phase is not RequestPhase.ENDED or not request.in_transfer:
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
        joined, actions = self._requests.accept(asked, None, now, objection)
        if joined is not None:
            joined.candidates = asked.decodes
            self._requests.prompts.find(joined)
        return actions

    def _begin(self, request: PrefillRequest, now: float) -> list[Action]:
        """The request has its pages and a row: compute it and ask for its reservation. Not earlier, so that decode memory stays
        free and the request goes where there is room by then."""
        peer = self._choose(request)
        if peer is None and request.candidates:
            return self._end(request, self._nobody_left(request), now)
        self._requests.compute(request)
        if peer is None:
            return []
        assert request.lease is not None
        request.in_transfer, request.times.asked_s = True, now
        actions = self._source.reserve(request.reserve(self._me.incarnation, now), peer, request.lease.pages)
        return actions + self._source.computed(request.key, request.cached_tokens)

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
        if request.phase is RequestPhase.ENDED:
            return []
        assert request.peer is not None and request.lease is not None
        request.exclude(request.peer.id, failure)
        peer = self._choose(request) if failure.retryable else None
        if peer is None:
            return self._end(request, failure, now)
        self._requests.counters.reservations_moved += 1
        return self._source.reserve(request.reserve(self._me.incarnation, now), peer, request.lease.pages)

    def _first_token(
        self, request: PrefillRequest, token: int, logprobs: TokenLogprobs, deltas: list[TokenDelta], now: float
    ) -> list[Action]:
        """The prompt is computed: its first token is on its way to the client before anything is handed off. logprobs: that of
        the token, if asked for."""
        ending = request.ending_with(token, self._engine.eos_token_ids)
        deltas.append(request.with_logprobs(TokenDelta(request.key, request.next_token, (token,), ending), logprobs))
        request.add_token(token)
        request.ending = ending
        request.phase = RequestPhase.HANDING_OFF
        self._requests.counters.tokens_generated += 1
        if ending is not None:
            return self._end(request, None, now)
        self._requests.release(request, now)
        first_logprob = logprobs[0] if logprobs else None
        return self._source.computed(request.key, len(request.prompt), first_token=token, first_logprob=first_logprob)

    def _end(self, request: PrefillRequest, ending: Ending | None, now: float) -> list[Action]:
        """The one door. `ending` is told to the client, or None when the client knows already."""
        if self._requests.close(request, now) is None:
            return []
        actions: list[Action] = [] if ending is None else [self._requests.tell(request, ending)]
        actions += self._source.give_up(request.key)
        self._requests.release(request, now)
        return actions

    def _follow_handoffs(self, now: float) -> list[Action]:
        """Act on what became of handoffs: move on, bring pages home, and end the requests whose handoff is over."""
        actions: list[Action] = []
        while events := self._source.take_events():
            for event in events:
                actions += self._handoff_event(self._requests[event.key], event, now)
        return actions

    def _handoff_event(self, request: PrefillRequest, event: HandoffEvent, now: float) -> list[Action]:
        assert request.lease is not None and request.peer is not None
        match event:
            case HandoffGranted():
                request.decode = request.peer
                request.times.granted_s, request.times.pages_had = now, event.have_pages
                placed = Placed(id=self._me.id, incarnation=self._me.incarnation, key=request.key, decode=request.peer)
                return [Send(request.key.router, placed)]
            case HandoffPosted():
                request.times.first_push_s = now
                return []
            case HandoffRefused():
                return self._refused(request, event.failure, now)
            case SourcePagesRead():
                request.lease.give_back(event.pages)
                if request.phase is not RequestPhase.ENDED:
                    self._requests.shares.hold(request, 0, max(0, request.held_pages - event.pages))
                return []
            case HandoffClosed():
                return self._closed(request, event, now)
            case _:
                assert_never(event)

    def _closed(self, request: PrefillRequest, closed: HandoffClosed, now: float) -> list[Action]:
        assert request.lease is not None and request.peer is not None
        request.in_transfer = False
        if closed.failure is None and request.phase is RequestPhase.HANDING_OFF:
            self._source.traffic.add(request.peer.id, request.hand_off(now))
        if not closed.quiescent:
            self._quarantined.append(request.lease)
            request.lease = None
        if request.phase is RequestPhase.ENDED:
            self._requests.release(request, now)
            return []
        return self._end(request, closed.failure, now)
