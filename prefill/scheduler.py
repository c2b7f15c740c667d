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

import dataclasses
from typing import assert_never

from msgspec.structs import replace

from common.deadlines import earliest
from common.errors import BadRequest, Preempted, TandemError, Unavailable
from common.executor import EngineDescription, StepResult
from common.ids import ROUTER, InstanceId, Life
from common.instance.admission import admit
from common.instance.ports import Action, Decision, Event, FormerRole, LayersDone, PeerDied, PeersChanged, Report, Send
from common.instance.request import InstanceLimits, RequestPhase
from common.instance.requests import RequestTable, SharedEvent, SharedMessage
from common.instance.token_memory import emit_tokens
from common.messages import Cancel, Decline, Ending, Failed, Generate, Grant, InstanceInfo, Placed, Renewed, TellLinks, TokenDelta
from common.messages.transfers import LinkChanged, PushDone, PushFailed, Settled
from kv_transfer.handoff_reader import DigestPages
from kv_transfer.handoff_writer import (
    HandoffClosed,
    HandoffGranted,
    HandoffPosted,
    HandoffRefused,
    HandoffWriter,
    SourcePagesRead,
)
from prefill.requests import LinkBook, PrefillRequest, PromptRoom

PrefillMessage = Generate | Cancel | Grant | Decline | Renewed | TellLinks | SharedMessage


class PrefillScheduler:
    """Implements `common.instance.ports.Scheduler`."""

    takes = PrefillMessage

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
        self._engine = engine
        self._requests = RequestTable(PrefillRequest, me, engine, limits, self._end, former)
        self._source = HandoffWriter(me.incarnation, engine.layout, digest)
        self._links = LinkBook(me.id, me.incarnation)
        self._room = PromptRoom(me.id, self._requests, self._links, limits.chunk_tokens)
        self.pool = self._requests.pool
        self.key_in = self._requests.key_in
        self.take_timelines = self._requests.take_timelines

    @property
    def last_step(self) -> int:
        return self._requests.last_step

    # --- messages and events ---------------------------------------------------------------------------------------------

    def receive(self, sender: InstanceId, message: PrefillMessage, now: float) -> list[Action]:
        if isinstance(message, SharedMessage):
            return self._requests.receive(sender, message, now) + self._follow_handoffs(now)
        actions: list[Action] = []
        match message:
            case Generate():
                joined, actions = self._requests.accept(message, None, now, self._objection(message))
                if joined is not None:
                    joined.candidates = message.decodes
                    self._requests.prompts.find(joined)
            case Cancel():
                request = self._requests.cancel(message.key, now)
                actions = [] if request is None else self._end(request, None, now)
            case Grant() | Decline() | Renewed():
                actions = self._source.receive(sender, message, now)
            case TellLinks():
                actions = [Send(sender, self._links.all_links(self._source.traffic.to))]
            case _:
                assert_never(message)
        return actions + self._follow_handoffs(now)

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, SharedEvent):
            return self._requests.handle(event, now) + self._follow_handoffs(now)
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
                link = event.link
                self._links.changed(link)
                if link.state == "lost":
                    # Its handoffs have failed, and their clients are told at once, before the pushes have ended. Those that were
                    # not granted yet move on.
                    lost = Failed.of(Unavailable(f"the link to {link.peer} was lost: {link.detail}"))
                    actions = self._source.cannot_reach(link.peer, lost)
                    for request in self._requests:
                        if request.in_transfer and request.decode is not None and request.decode.id == link.peer:
                            actions += self._end(request, lost, now)
            case PeerDied():
                return []  # its link tells, and what was pushed there is of no use
            case PeersChanged():
                actions = self._meet(event, now)
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
            elif not chunk.last:
                actions += self._source.computed(request.key, request.progress.computed) if request.in_transfer else []
            else:
                token, logprob = tokens[chunk.row], logprobs.get(chunk.row, ())
                pipelines.append(request.pipeline)
                if chunk.row in result.embeddings:
                    deltas.append(request.embedded(result.embeddings[chunk.row]))
                else:
                    deltas.append(request.answered(token, logprob, self._engine.eos_token_ids))
                    self._requests.counters.tokens_generated += 1
                if request.ending is not None:
                    actions += self._end(request, None, now)
                    continue
                request.phase = RequestPhase.HANDING_OFF
                self._requests.release(request, now)
                first = logprob[0] if logprob else None
                actions += self._source.computed(request.key, len(request.prompt), first_token=token, first_logprob=first)
        # The first tokens leave before anything else that this step caused.
        return [*emit_tokens(deltas, pipelines), *actions, *self._follow_handoffs(now)]

    # --- planning --------------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        requests, actions = self._requests, list[Action]()
        for request, failed in admit(requests, self._me.id, self._room.begin, now):
            if failed is not None:
                requests.counters.preemptions += failed.kind == Preempted.kind
                actions += [*self._end(request, failed, now), *self._follow_handoffs(now)]
            elif request.peer is not None:
                # It has its pages and a row. Its reservation is not asked for earlier, so that decode memory stays free and the
                # request goes where there is room by then.
                assert request.lease is not None
                request.in_transfer, request.times.asked_s = True, now
                actions += self._source.reserve(request.reserve(self._me.incarnation, now), request.peer, request.lease.pages)
                actions += self._source.computed(request.key, request.cached_tokens)
        plan = requests.plan(now)
        return Decision(plan, actions, follows_layers=plan is not None and any(chunk.last for chunk in plan.chunks))

    def next_deadline(self) -> float | None:
        return earliest(self._requests.next_deadline(), self._source.next_deadline())

    def report(self) -> Report:
        requests, source, pushed = self._requests, self._source, self._source.traffic.total
        report, waiting_tokens = requests.report(), sum(map(requests.prompts.missing_tokens, requests.waiting))
        load = replace(
            report.load,
            running_requests=len(requests) - len(requests.waiting),
            waiting_tokens=waiting_tokens,
            running_tokens=report.load.tokens_to_compute - waiting_tokens,
            pushes_in_flight=source.pushes_in_flight,
            pages_quarantined=self._room.quarantined_pages(),
        )
        counters = replace(
            report.counters,
            pages_pushed=source.pages_pushed,
            pages_spared=source.pages_spared,
            bytes_pushed=pushed.bytes_pushed,
            handoffs=pushed.handoffs,
            pushes_failed=pushed.pushes_failed,
            push_seconds=pushed.push_seconds,
            exposed_seconds=pushed.exposed_seconds,
            messages_stale=report.counters.messages_stale + source.stale,
        )
        return dataclasses.replace(report, load=load, counters=counters, links_version=self._links.version)

    # --- peers and links -------------------------------------------------------------------------------------------------

    def _meet(self, change: PeersChanged, now: float) -> list[Action]:
        """Other decode instances: what is pushed to those that left has failed, and what was not granted moves on."""
        actions = self._requests.meet(change, now)
        actions += [self._links.meet(change), *self._source.peers_gone(self._requests.peers.items())]
        for request in self._requests.waiting if change.left else ():
            if request.candidates and not any(name in self._requests.peers for name in request.candidates):
                actions += self._end(request, self._room.nobody_left(request), now)
        return actions

    # --- one request -----------------------------------------------------------------------------------------------------

    def _objection(self, asked: Generate) -> TandemError | None:
        if not asked.decodes and asked.sampling.max_new_tokens > 1:
            cannot = f"{self._me.id} cannot decode: a request of more than one token needs a decode instance"
            return BadRequest(cannot, field="decodes")
        if asked.decodes and not any(name in self._requests.peers for name in asked.decodes):
            return Unavailable(f"{self._me.id} knows none of the decode instances {', '.join(asked.decodes)}")
        return None

    def _end(self, request: PrefillRequest, ending: Ending | None, now: float) -> list[Action]:
        """The one door. `ending` is told to the client, or None when the client knows already."""
        if self._requests.close(request, now) is None:
            return []
        actions: list[Action] = [] if ending is None else [*self._requests.tell(request, ending)]
        actions += self._source.give_up(request.key)
        self._requests.release(request, now)
        return actions

    def _follow_handoffs(self, now: float) -> list[Action]:
        """Act on what became of handoffs: move on, bring pages home, and end the requests whose handoff is over."""
        actions: list[Action] = []
        while events := self._source.take_events():
            for event in events:
                request = self._requests[event.key]
                assert request.lease is not None and request.peer is not None
                match event:
                    case HandoffGranted():
                        request.decode = request.peer
                        request.times.granted_s, request.times.pages_had = now, event.have_pages
                        me = self._me
                        placed = Placed(id=me.id, incarnation=me.incarnation, key=request.key, decode=request.peer)
                        actions.append(Send(request.key.router, placed))
                    case HandoffPosted():
                        request.times.first_push_s = now
                    case HandoffRefused():
                        actions += self._refused(request, request.peer, event.failure, now)
                    case SourcePagesRead():
                        request.lease.give_back(event.pages)
                        if request.phase is not RequestPhase.ENDED:
                            self._requests.shares.hold(request, 0, max(0, request.held_pages - event.pages))
                    case HandoffClosed():
                        request.in_transfer = False
                        if event.failure is None and request.phase is RequestPhase.HANDING_OFF:
                            self._source.traffic.add(request.peer.id, request.hand_off(now))
                        if not event.quiescent:
                            self._room.quarantined.append(request.lease)
                            request.lease = None
                        if request.phase is RequestPhase.ENDED:
                            self._requests.release(request, now)
                        else:
                            actions += self._end(request, event.failure, now)
                    case _:
                        assert_never(event)
        return actions

    def _refused(self, request: PrefillRequest, peer: Life, failure: Failed, now: float) -> list[Action]:
        """Its peer grants no reservation: ask the next candidate, if that may help."""
        if request.phase is RequestPhase.ENDED:
            return []
        request.exclude(peer.id, failure)
        if not failure.retryable or not request.choose(self._requests.peers, self._links.lost):
            return self._end(request, failure, now)
        assert request.peer is not None and request.lease is not None
        self._requests.counters.reservations_moved += 1
        return self._source.reserve(request.reserve(self._me.incarnation, now), request.peer, request.lease.pages)
