"""The prefill scheduler: which prompts are computed next, and what becomes of their pages.

Owns the requests of a prefill instance, its page pool and its rows. Opens no socket, touches no device, reads no clock.

A request's life here, top to bottom:

    Generate ─► waiting line
    decide   ─► admitted: leases pages for the whole prompt, takes a row, sends Reserve to the decode instance
             ─► chunk after chunk, several prompts in one forward
    step_done ─► complete pages are pushed while the next chunk computes
             ─► last chunk: the first token goes to the client at once, the last page is pushed, Handoff follows the last write
    SourceClosed ─► the lease is closed

Every way out goes through `_release`, which waits until no step and no push can touch the pages.
"""

from collections import OrderedDict
from typing import assert_never

import numpy as np

from common.deadlines import DeadlineWheel
from common.engine.executor import EngineDescription
from common.engine.plan import Plan, RowStart, StepResult
from common.errors import BadRequest, DeadlinePassed, Overloaded, TandemError, Unavailable
from common.ids import DETOKENIZER, Incarnation, InstanceId, Int32Array, Key
from common.instance.ports import Action, Decision, LinkChanged, PushDone, Send, TransferEvent
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
    Grant,
    LinkInfo,
    Load,
    Peers,
    Reserve,
    TokenBatch,
    TokenDelta,
)
from common.pages.pool import Lease, PagePool
from kv_transfer.handoff_source import HandoffSource, Output, SourceClosed
from prefill.request import Phase, PrefillRequest

PrefillMessage = Generate | Cancel | Grant | Decline | Peers


class PrefillScheduler:
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
        self._source = HandoffSource(instance, engine.layout.page_size)
        self._requests: dict[Key, PrefillRequest] = {}
        self._waiting: OrderedDict[Key, PrefillRequest] = OrderedDict()
        self._computing: dict[int, PrefillRequest] = {}
        self._decode_instances: dict[InstanceId, Incarnation] = {}
        self._deadlines: DeadlineWheel[Key] = DeadlineWheel()
        self._steps = 0
        self._accepted = self._ended = self._prompt_tokens = self._tokens = 0
        self._pages_pushed = self._bytes_pushed = self._handoffs = self._pushes_failed = self._stale = 0
        self._push_seconds = 0.0
        self._pages_quarantined = 0
        self._links_lost: set[InstanceId] = set()

    # --- messages and events ---------------------------------------------------------------------------------------------

    def receive(self, sender: InstanceId, message: PrefillMessage, now: float) -> list[Action]:
        match message:
            case Generate():
                return self._generate(message, now)
            case Cancel():
                request = self._requests.get(message.key)
                return [] if request is None else self._end(request, None)
            case Grant() | Decline():
                return self._apply(self._source.receive(sender, message))
            case Peers():
                self._decode_instances = {peer.id: peer.incarnation for peer in message.instances}
                self._links_lost &= self._decode_instances.keys()
                return self._peers_changed()
            case _:
                assert_never(message)

    def transfer_event(self, event: TransferEvent, now: float) -> list[Action]:
        if isinstance(event, LinkChanged):
            return self._link_changed(event.link)
        if isinstance(event, PushDone):
            self._bytes_pushed += event.pushed_bytes
            self._pages_pushed += event.pushed_bytes // self._engine.layout.page_bytes
            self._push_seconds += event.seconds
        else:
            self._pushes_failed += 1
        return self._apply(self._source.transfer_ended(event))

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for key in self._deadlines.expired(now):
            request = self._requests.get(key)
            if request is not None:
                actions += self._end(request, Failed.of(DeadlinePassed("the request's deadline passed during prefill")))
        return actions

    def step_done(self, result: StepResult, now: float) -> list[Action]:
        """Chunks came back: push what is complete, and send first tokens on their way."""
        self._rows.returned(_rows_of(result.plan))
        tokens = dict(zip(result.plan.sampled_rows.tolist(), result.tokens.tolist(), strict=True))
        deltas: list[TokenDelta] = []
        actions: list[Action] = []
        for chunk in result.plan.chunks:
            request = self._computing[chunk.row]
            assert request.progress is not None
            request.progress.complete(len(chunk.token_ids))
            self._prompt_tokens += len(chunk.token_ids)
            if request.phase is Phase.ENDED:
                self._release(request)
            elif chunk.last:
                actions += self._first_token(request, tokens[chunk.row], deltas)
            elif request.source_open:
                actions += self._apply(self._source.computed(request.key, request.progress.computed))
        # The first tokens leave before anything else that this step caused.
        return [Send(DETOKENIZER, TokenBatch(deltas=tuple(deltas))), *actions] if deltas else actions

    # --- planning --------------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        actions: list[Action] = []
        starts: list[RowStart] = []
        to_do = sum(len(r.progress.prompt) - r.progress.launched for r in self._computing.values() if r.progress is not None)
        while self._waiting and to_do < self._chunk_tokens and self._rows.free_count > 0:
            request = next(iter(self._waiting.values()))
            lease = self.pool.lease(self._engine.layout.pages_for(len(request.prompt)))
            if lease is None:
                break
            del self._waiting[request.key]
            actions += self._admit(request, lease, starts)
            to_do += len(request.prompt)
        live = (r.progress for r in self._computing.values() if r.progress is not None and r.phase is Phase.COMPUTING)
        chunks = next_chunks(live, self._chunk_tokens)
        if not chunks:
            return Decision(None, actions)
        self._steps += 1
        plan = Plan(self._steps, starts=tuple(starts), chunks=chunks)
        self._rows.launched(_rows_of(plan))
        return Decision(plan, actions)

    def next_deadline(self) -> float | None:
        return self._deadlines.next_at()

    # --- reports ---------------------------------------------------------------------------------------------------------

    @property
    def open_reservations(self) -> int:
        return 0

    def load(self) -> Load:
        stuck = [len(request.lease) for request in self._requests.values() if request.lease and self._is_stuck(request)]
        computing = [r.progress.remaining_tokens for r in self._computing.values() if r.progress is not None]
        return Load(
            waiting_requests=len(self._waiting),
            running_requests=len(self._requests) - len(self._waiting),
            waiting_tokens=sum(len(request.prompt) for request in self._waiting.values()),
            running_tokens=sum(computing),
            pages_free=self.pool.free_pages,
            pages_total=self.pool.total_pages,
            pushes_in_flight=self._source.pushes_in_flight,
            pages_quarantined=self._pages_quarantined + sum(stuck),
        )

    def counters(self) -> Counters:
        return Counters(
            requests_accepted=self._accepted,
            requests_ended=self._ended,
            prompt_tokens_computed=self._prompt_tokens,
            tokens_generated=self._tokens,
            steps=self._steps,
            pages_pushed=self._pages_pushed,
            bytes_pushed=self._bytes_pushed,
            handoffs=self._handoffs,
            pushes_failed=self._pushes_failed,
            push_seconds=self._push_seconds,
            messages_stale=self._source.stale + self._stale,
        )

    def _peers_changed(self) -> list[Action]:
        actions = self._apply(self._source.peers_gone(self._decode_instances.items()))
        for request in list(self._waiting.values()):
            if request.decode is not None and self._decode_instances.get(request.decode) != request.decode_incarnation:
                actions += self._end(request, Failed.of(Unavailable(f"{request.decode} left the fleet")))
        return actions

    def _link_changed(self, link: LinkInfo) -> list[Action]:
        """Handoffs on a lost link have failed: their clients need not wait until their pushes have ended."""
        if link.state != "lost":
            self._links_lost.discard(link.peer)
            return []
        self._links_lost.add(link.peer)
        lost = Failed.of(Unavailable(f"the link to {link.peer} was lost: {link.detail}"))
        open_there = [r for r in self._requests.values() if r.decode == link.peer and r.source_open]
        return [action for request in open_there for action in self._end(request, lost)]

    def _is_stuck(self, request: PrefillRequest) -> bool:
        """Its pages wait for the end of pushes over a link that is gone."""
        if request.decode is None or request.phase is not Phase.ENDED or not request.source_open:
            return False
        return request.decode in self._links_lost or self._decode_instances.get(request.decode) != request.decode_incarnation

    # --- one request -----------------------------------------------------------------------------------------------------

    def _generate(self, message: Generate, now: float) -> list[Action]:
        if message.key in self._requests:
            self._stale += 1
            return []
        try:
            request = self._accept(message)
        except TandemError as error:
            return [_ending(message.key, 0, Failed.of(error))]
        self._accepted += 1
        self._requests[request.key] = request
        self._waiting[request.key] = request
        self._deadlines.set(request.key, now + self._request_timeout_s)
        return []

    def _accept(self, message: Generate) -> PrefillRequest:
        model = self._engine.model
        prompt = read_prompt(message.prompt, model.vocab_size)
        message.sampling.validate()
        if len(prompt) > model.context_tokens or self._engine.layout.pages_for(len(prompt)) > self.pool.total_pages:
            raise BadRequest(f"a prompt of {len(prompt)} tokens is too long for {self._id}", field="prompt")
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(f"{self._id} has {self._max_waiting} requests waiting already")
        if message.decode is None and message.sampling.max_new_tokens > 1:
            raise BadRequest(
                f"{self._id} cannot decode: a request of more than one token needs a decode instance", field="decode"
            )
        incarnation = Incarnation("")
        if message.decode is not None:
            if message.decode not in self._decode_instances:
                raise Unavailable(f"{self._id} does not know the decode instance {message.decode}")
            incarnation = self._decode_instances[message.decode]
        return PrefillRequest(message.key, prompt, message.prompt, message.sampling, message.decode, incarnation)

    def _admit(self, request: PrefillRequest, lease: Lease, starts: list[RowStart]) -> list[Action]:
        """Give the request its pages and a row, and ask for its reservation: not earlier, so that decode memory stays free."""
        row = self._rows.take()
        request.lease, request.phase = lease, Phase.COMPUTING
        request.progress = PromptProgress(row, request.prompt)
        self._computing[row] = request
        starts.append(RowStart(row, lease.pages, request.sampling))
        if request.decode is None:
            return []
        request.source_open = True
        reserve = Reserve(key=request.key, source=self._id, prompt=request.packed_prompt, sampling=request.sampling)
        return self._apply(self._source.open(reserve, request.decode, request.decode_incarnation, lease.pages))

    def _first_token(self, request: PrefillRequest, token: int, deltas: list[TokenDelta]) -> list[Action]:
        """The prompt is computed: its first token is on its way to the client before anything is handed off."""
        request.phase, request.emitted = Phase.HANDING_OFF, 1
        self._tokens += 1
        ending = self._ending_after(request, token)
        deltas.append(TokenDelta(request.key, 0, (token,), ending))
        if ending is None:
            actions = self._apply(self._source.sampled(request.key, token))
            self._release(request)
            return actions
        return self._end(request, None)

    def _ending_after(self, request: PrefillRequest, token: int) -> Ending | None:
        sampling = request.sampling
        if token in sampling.stop_token_ids or (token in self._engine.eos_token_ids and not sampling.ignore_eos):
            return Finished(reason="stop", matched=token)
        return Finished(reason="length") if sampling.max_new_tokens == 1 else None

    def _end(self, request: PrefillRequest, ending: Ending | None) -> list[Action]:
        """The one door. `ending` is told to the client, or None when the client knows already."""
        if request.phase is Phase.ENDED:
            return []
        request.phase = Phase.ENDED
        self._ended += 1
        self._waiting.pop(request.key, None)
        self._deadlines.clear(request.key)
        actions: list[Action] = [] if ending is None else [_ending(request.key, request.emitted, ending)]
        actions += self._apply(self._source.give_up(request.key))
        self._release(request)
        return actions

    def _release(self, request: PrefillRequest) -> None:
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
            self._deadlines.clear(request.key)
        if request.lease is not None:
            request.lease.close()
        del self._requests[request.key]

    def _apply(self, outputs: list[Output]) -> list[Action]:
        """Carry out what the handoff wants: its sends and pushes pass through, its closings bring pages home."""
        actions: list[Action] = []
        for output in outputs:
            if isinstance(output, SourceClosed):
                actions += self._source_closed(output)
            else:
                actions.append(output)
        return actions

    def _source_closed(self, closed: SourceClosed) -> list[Action]:
        request = self._requests[closed.key]
        request.source_open = False
        if closed.failure is None and request.phase is Phase.HANDING_OFF:
            self._handoffs += 1
        if not closed.quiescent and request.lease is not None:
            # A write that is not proven to have stopped may still read these pages: they never come home in this process.
            self._pages_quarantined += len(request.lease)
            request.lease = None
        actions = [] if closed.failure is None else self._end(request, closed.failure)
        self._release(request)
        return actions


def _rows_of(plan: Plan) -> Int32Array:
    return np.array([chunk.row for chunk in plan.chunks], dtype=np.int32)


def _ending(key: Key, first: int, ending: Ending) -> Send:
    return Send(DETOKENIZER, TokenBatch(deltas=(TokenDelta(key, first, (), ending),)))
