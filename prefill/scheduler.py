"""The prefill scheduler: which prompts are computed next, and what becomes of their pages.

Owns the requests of a prefill instance, its page pool and its rows. Opens no socket, touches no device, reads no clock.

A request's life here, top to bottom:

    Generate ─► waiting line
    decide   ─► admitted: leases pages for the whole prompt, takes a row, sends Reserve to the decode instance
             ─► chunk after chunk, several prompts in one forward
    step_done ─► complete pages are pushed while the next chunk computes
             ─► last chunk: the first token goes to the client at once, the last page is pushed, Handoff follows the last write
    SourceRead ─► pages that are written come home, before the others if those take long
    SourceClosed ─► the lease is closed

Every way out goes through `_release`, which waits until no step and no push can touch the pages. An attempt that fails for a
reason that may pass ends with a retryable `Failed`: the router resumes the request elsewhere.
"""

from typing import assert_never

from common.engine.executor import EngineDescription
from common.engine.plan import Plan, RowStart, StepResult
from common.errors import BadRequest, DeadlinePassed, Overloaded, TandemError, Unavailable
from common.ids import ROUTER, Incarnation, InstanceId, Life
from common.instance.drain import Drainage
from common.instance.emit import emit_ending, emit_tokens
from common.instance.limits import InstanceLimits
from common.instance.line import Line
from common.instance.ports import (
    Action,
    Allow,
    Decision,
    LinkChanged,
    Push,
    PushDone,
    PushFailed,
    Send,
    Settled,
    TransferEvent,
)
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
    Grant,
    LinkInfo,
    LinkTraffic,
    Load,
    Peers,
    Probe,
    Probed,
    Renewed,
    Reserve,
    Terms,
    TokenDelta,
)
from common.pages.pool import PageLease, PagePool
from kv_transfer.digests import Digest
from kv_transfer.handoff_source import HandoffSource, Output, SourceClosed, SourceRead
from prefill.request import Phase, PrefillRequest

PrefillMessage = Generate | Cancel | Probe | Grant | Decline | Renewed | Peers


class PrefillScheduler:
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
        self.pool = PagePool(engine.total_pages)
        self._rows = Rows(engine.max_rows)
        self._source = HandoffSource(incarnation, engine.layout, digest)
        self._requests: RequestTable[PrefillRequest] = RequestTable(limits.request_timeout_s)
        self._waiting: Line[PrefillRequest] = Line()
        self._computing: dict[int, PrefillRequest] = {}
        self._decode_instances: dict[InstanceId, Incarnation] = {}
        self._drainage = Drainage(instance, limits.drain_timeout_s)
        self._steps = 0
        self._ended = self._prompt_tokens = self._tokens = 0
        self._pages_quarantined = 0
        self._links_lost: set[InstanceId] = set()

    # --- messages and events ---------------------------------------------------------------------------------------------

    def receive(self, sender: InstanceId, message: PrefillMessage, now: float) -> list[Action]:
        match message:
            case Generate():
                return self._generate(message, now)
            case Cancel():
                return self._cancel(message, now)
            case Probe():
                standings = self._requests.standings(message.keys)
                return [Send(ROUTER, Probed(id=self._id, incarnation=self._incarnation, standings=standings))]
            case Grant() | Decline() | Renewed():
                return self._apply(self._source.receive(sender, message, now), now)
            case Peers():
                self._decode_instances = {peer.id: peer.incarnation for peer in message.instances}
                self._links_lost &= self._decode_instances.keys()
                return self._peers_changed(now)
            case _:
                assert_never(message)

    def transfer_event(self, event: TransferEvent, now: float) -> list[Action]:
        match event:
            case LinkChanged():
                return self._link_changed(event.link, now)
            case PushDone() | PushFailed():
                return self._apply(self._source.transfer_ended(event), now)
            case Settled():
                return []  # nobody writes to a prefill instance
            case _:
                assert_never(event)

    def tick(self, now: float) -> list[Action]:
        actions = self._apply(self._source.tick(now), now)
        for request in self._requests.late(now):
            late = Failed.of(DeadlinePassed("the request's deadline passed during prefill"))
            actions += self._end(request, late, now)
        if self._drainage.tick(now):
            for request in self._requests:
                actions += self._end(request, Failed.of(self._drainage.refusal), now)
        return actions

    def layers_done(self, plan: Plan, layers: int, now: float) -> list[Action]:
        """The last chunk of a prompt has no next one behind whose forward its push could hide: it goes layer by layer."""
        actions: list[Action] = []
        for chunk in plan.chunks:
            request = self._computing[chunk.row]
            if chunk.last and request.source_open:
                actions += self._apply(self._source.layers_computed(request.key, layers), now)
        return actions

    def step_done(self, result: StepResult, now: float) -> list[Action]:
        """Chunks came back: push what is complete, and send first tokens on their way."""
        self._rows.returned(result.plan.rows)
        tokens = dict(zip(result.plan.sampled_rows.tolist(), result.tokens.tolist(), strict=True))
        deltas: list[TokenDelta] = []
        actions: list[Action] = []
        for chunk in result.plan.chunks:
            request = self._computing[chunk.row]
            assert request.progress is not None
            request.progress.complete(len(chunk.token_ids))
            self._prompt_tokens += len(chunk.token_ids)
            if request.phase is Phase.ENDED:
                self._release(request, now)
            elif chunk.last:
                actions += self._first_token(request, tokens[chunk.row], deltas, now)
            elif request.source_open:
                actions += self._apply(self._source.computed(request.key, request.progress.computed), now)
        # The first tokens leave before anything else that this step caused.
        return [*emit_tokens(deltas), *actions]

    # --- planning --------------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        actions: list[Action] = []
        starts: list[RowStart] = []
        to_do = sum(len(r.progress.prompt) - r.progress.launched for r in self._computing.values() if r.progress is not None)
        while to_do < self._limits.chunk_tokens and self._rows.free_count > 0 and (request := self._waiting.head()) is not None:
            pages = self._engine.layout.pages_for(len(request.prompt))
            if pages > self.pool.total_pages - self._pages_quarantined:
                actions += self._end(request, Failed.of(Unavailable(f"{self._id} lacks memory for the request")), now)
                continue
            lease = self.pool.lease(pages)
            if lease is None:
                break
            self._waiting.leave(request.key)
            actions += self._admit(request, lease, starts, now)
            to_do += len(request.prompt)
        live = (r.progress for r in self._computing.values() if r.progress is not None and r.phase is Phase.COMPUTING)
        chunks = next_chunks(live, self._limits.chunk_tokens)
        if not chunks:
            return Decision(None, actions)
        self._steps += 1
        plan = Plan(self._steps, starts=tuple(starts), chunks=chunks)
        self._rows.launched(plan.rows)
        return Decision(plan, actions)

    def next_deadline(self) -> float | None:
        known = (self._requests.next_deadline(), self._source.next_deadline(), self._drainage.next_deadline())
        return min((at for at in known if at is not None), default=None)

    # --- the end of the instance -------------------------------------------------------------------------------------------

    def drain(self, now: float) -> list[Action]:
        self._drainage.begin(now)
        return [action for request in self._waiting for action in self._end(request, Failed.of(self._drainage.refusal), now)]

    @property
    def drained(self) -> bool:
        return self._drainage.is_over or (self._drainage.began and not self._requests)

    def abandon(self, now: float) -> list[Action]:
        return [action for request in self._requests for action in self._end(request, None, now)]

    # --- reports ---------------------------------------------------------------------------------------------------------

    @property
    def open_reservations(self) -> int:
        return 0

    def load(self) -> Load:
        stuck = [len(request.lease) for request in self._requests if request.lease and self._is_stuck(request)]
        computing = [r.progress.remaining_tokens for r in self._computing.values() if r.progress is not None]
        return Load(
            waiting_requests=len(self._waiting),
            running_requests=len(self._requests) - len(self._waiting),
            waiting_tokens=sum(len(request.prompt) for request in self._waiting),
            running_tokens=sum(computing),
            pages_free=self.pool.free_pages,
            pages_total=self.pool.total_pages,
            pushes_in_flight=self._source.pushes_in_flight,
            pages_quarantined=self._pages_quarantined + sum(stuck),
        )

    def traffic(self, peer: InstanceId) -> LinkTraffic:
        return self._source.traffic.to(peer)

    def counters(self) -> Counters:
        pushed = self._source.traffic.total
        return Counters(
            requests_accepted=self._requests.accepted,
            requests_ended=self._ended,
            prompt_tokens_computed=self._prompt_tokens,
            tokens_generated=self._tokens,
            steps=self._steps,
            pages_pushed=pushed.bytes_pushed // self._engine.layout.page_bytes,
            bytes_pushed=pushed.bytes_pushed,
            handoffs=pushed.handoffs,
            pushes_failed=pushed.pushes_failed,
            push_seconds=pushed.push_seconds,
            exposed_seconds=pushed.exposed_seconds,
            messages_stale=self._source.stale + self._requests.stale,
        )

    # --- peers -----------------------------------------------------------------------------------------------------------

    def _is_here(self, peer: Life) -> bool:
        return self._decode_instances.get(peer.id) == peer.incarnation

    def _peers_changed(self, now: float) -> list[Action]:
        actions = self._apply(self._source.peers_gone(self._decode_instances.items()), now)
        for request in self._waiting:
            if request.decode is not None and not self._is_here(request.decode):
                actions += self._end(request, Failed.of(Unavailable(f"{request.decode.id} left the fleet")), now)
        return actions

    def _link_changed(self, link: LinkInfo, now: float) -> list[Action]:
        """Handoffs on a lost link have failed: their clients need not wait until their pushes have ended."""
        if link.state != "lost":
            self._links_lost.discard(link.peer)
            return []
        self._links_lost.add(link.peer)
        lost = Failed.of(Unavailable(f"the link to {link.peer} was lost: {link.detail}"))
        open_there = [r for r in self._requests if r.source_open and r.decode is not None and r.decode.id == link.peer]
        return [action for request in open_there for action in self._end(request, lost, now)]

    def _is_stuck(self, request: PrefillRequest) -> bool:
        """Its pages wait for the end of pushes over a link that is gone."""
        if request.decode is None or request.phase is not Phase.ENDED or not request.source_open:
            return False
        return request.decode.id in self._links_lost or not self._is_here(request.decode)

    # --- one request -----------------------------------------------------------------------------------------------------

    def _generate(self, message: Generate, now: float) -> list[Action]:
        if not self._requests.is_new(message.key):
            return []
        try:
            request = self._accept(message, now)
        except TandemError as error:
            self._requests.close_early(message.key, now)
            return [emit_ending(message.key, message.first, Failed.of(error))]
        request.deadline_s = self._requests.add(request, message.terms.timeout_s, now)
        self._waiting.join(request.key, request.rank, request)
        return []

    def _accept(self, message: Generate, now: float) -> PrefillRequest:
        model = self._engine.model
        prompt = read_prompt(message.prompt, model.vocab_size)
        rank = read_terms(message.terms, now)
        message.sampling.validate()
        if not 0 <= message.first < len(prompt):
            raise BadRequest(f"of {len(prompt)} tokens, {message.first} cannot be the answer's", field="first")
        if len(prompt) > model.context_tokens or self._engine.layout.pages_for(len(prompt)) > self.pool.total_pages:
            raise BadRequest(f"a prompt of {len(prompt)} tokens is too long for {self._id}", field="prompt")
        if self._drainage.began:
            raise self._drainage.refusal
        if len(self._waiting) >= self._limits.max_waiting:
            raise Overloaded(f"{self._id} has {self._limits.max_waiting} requests waiting already")
        if message.decode is None and message.sampling.max_new_tokens > 1:
            raise BadRequest(
                f"{self._id} cannot decode: a request of more than one token needs a decode instance", field="decode"
            )
        decode: Life | None = None
        if message.decode is not None:
            if message.decode not in self._decode_instances:
                raise Unavailable(f"{self._id} does not know the decode instance {message.decode}")
            decode = Life(message.decode, self._decode_instances[message.decode])
        return PrefillRequest(message, prompt, decode, rank)

    def _admit(self, request: PrefillRequest, lease: PageLease, starts: list[RowStart], now: float) -> list[Action]:
        """Give the request its pages and a row, and ask for its reservation: not earlier, so that decode memory stays free."""
        row = self._rows.take()
        request.lease, request.phase = lease, Phase.COMPUTING
        request.progress = PromptProgress(row, request.prompt)
        self._computing[row] = request
        starts.append(RowStart(row, lease.pages, request.sampling))
        if request.decode is None:
            return []
        request.source_open = True
        asked, rank = request.asked, request.rank
        reserve = Reserve(
            key=request.key,
            incarnation=self._incarnation,
            prompt=asked.prompt,
            sampling=asked.sampling,
            sent_s=now,
            first=asked.first,
            terms=Terms(priority=rank.priority, age_s=now - rank.arrived_s, timeout_s=request.deadline_s - now),
        )
        return self._apply(self._source.open(reserve, request.decode, lease.pages), now)

    def _first_token(self, request: PrefillRequest, token: int, deltas: list[TokenDelta], now: float) -> list[Action]:
        """The prompt is computed: its first token is on its way to the client before anything is handed off."""
        ending = self._ending_after(request, token)
        deltas.append(TokenDelta(request.key, request.next_token, (token,), ending))
        request.phase, request.emitted, request.sampled_s = Phase.HANDING_OFF, 1, now
        self._tokens += 1
        if ending is None:
            actions = self._apply(self._source.sampled(request.key, token), now)
            self._release(request, now)
            return actions
        return self._end(request, None, now)

    def _ending_after(self, request: PrefillRequest, token: int) -> Ending | None:
        sampling = request.sampling
        if token in sampling.stop_token_ids or (token in self._engine.eos_token_ids and not sampling.ignore_eos):
            return Finished(reason="stop", matched=token)
        return Finished(reason="length") if sampling.max_new_tokens == 1 else None

    def _cancel(self, message: Cancel, now: float) -> list[Action]:
        request = self._requests.get(message.key)
        if request is None:
            self._requests.close_early(message.key, now)
            return []
        return self._end(request, None, now)

    def _end(self, request: PrefillRequest, ending: Ending | None, now: float) -> list[Action]:
        """The one door. `ending` is told to the client, or None when the client knows already."""
        if request.phase is Phase.ENDED:
            return []
        request.phase = Phase.ENDED
        self._ended += 1
        self._waiting.leave(request.key)
        self._requests.stop_deadline(request.key)
        actions: list[Action] = [] if ending is None else [emit_ending(request.key, request.next_token, ending)]
        actions += self._apply(self._source.give_up(request.key), now)
        self._release(request, now)
        return actions

    def _release(self, request: PrefillRequest, now: float) -> None:
        """Bring home what nothing in flight can touch: the row after its last step, the pages after the last push as well."""
        progress = request.progress
        if progress is not None and self._computing.get(progress.row) is request:
            if request.phase is Phase.COMPUTING or self._rows.in_flight[progress.row]:
                return
            del self._computing[progress.row]
            self._rows.give_back(progress.row)
        if request.source_open or self._requests.get(request.key) is not request:
            return
        if request.phase is Phase.HANDING_OFF:
            self._ended += 1
        if request.lease is not None:
            request.lease.close()
        self._requests.remove(request.key, now)

    def _apply(self, outputs: list[Output], now: float) -> list[Action]:
        """Carry out what the handoff wants: its sends and pushes pass through, what it has read comes home."""
        actions: list[Action] = []
        for output in outputs:
            match output:
                case SourceClosed():
                    actions += self._source_closed(output, now)
                case SourceRead():
                    lease = self._requests[output.key].lease
                    assert lease is not None
                    lease.give_back(output.pages)
                case Send() | Push() | Allow():
                    actions.append(output)
                case _:
                    assert_never(output)
        return actions

    def _source_closed(self, closed: SourceClosed, now: float) -> list[Action]:
        request = self._requests[closed.key]
        request.source_open = False
        if closed.failure is None and request.phase is Phase.HANDING_OFF:
            assert request.decode is not None
            self._source.traffic.handed_off(request.decode.id, now - request.sampled_s)
        if not closed.quiescent and request.lease is not None:
            # A write that is not proven to have stopped may still read these pages: they never come home in this process.
            self._pages_quarantined += len(request.lease)
            request.lease = None
        actions = [] if closed.failure is None else self._end(request, closed.failure, now)
        self._release(request, now)
        return actions
