"""The requests of an instance, whatever its role: accepted once, served until a deadline, ended once, and then remembered.

Owns the table of requests and all that they hold: places in the waiting line, rows, pages and promises of the prefix cache. Owns
the deadlines, the drain, the peers, the memory of what was emitted, and the counters that both roles keep. Does not know who is
admitted, nor pushes or reservations: a role's scheduler decides, and a field of the request says whether a transfer may still
touch its pages.

    (unknown) ── accept ──► waiting ── admit ──► running ── close ──► ended ── release ──► over, remembered a while ──► (unknown)
        └── refused, or its Cancel came first ────────────────────────────────────────────┘

A drain:

    begin ── requests may finish ──► timeout_s: they are ended ── their transfers finish ──► + LAST_S: over in any case
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Generic, TypeAlias, TypeVar, assert_never

import numpy as np
from msgspec.structs import replace

from common.deadlines import DeadlineWheel, earliest
from common.errors import BadRequest, DeadlinePassed, Overloaded, TandemError, Unavailable, WeightsChanged
from common.executor import EngineDescription, RowStart, StepPlan, StepResult
from common.ids import AttemptId, Digest, Incarnation, InstanceId, Int32Array, Life, Variant, shard_of, text_name, unpack_ids
from common.instance.ports import (
    Action,
    AdaptersChanged,
    AdapterUnused,
    FormerRole,
    LeaveRole,
    PeersChanged,
    Prepare,
    Prepared,
    Report,
    RouterJoined,
    RouterLost,
    Send,
    StayInRole,
    StepsMeasured,
    WeightsReplaced,
)
from common.instance.prompt_cache import CacheReporter, PromptCache
from common.instance.request import ChunkLimit, InstanceLimits, PromptProgress, Request, RequestPhase, next_chunks
from common.instance.token_memory import Emitted, TokenMemory, emit_tokens
from common.instance.waiting_line import Rank, Shares, WaitingLine, has_place
from common.messages import (
    Counters,
    Decline,
    Drain,
    Ending,
    Failed,
    FlushCache,
    Generate,
    InstanceInfo,
    Load,
    Probe,
    Probed,
    Repeat,
    Reserve,
    Standing,
    TellCache,
    Timeline,
    Times,
    TokenDelta,
)
from common.pages.pool import Closing, PagePool
from common.pages.radix_cache import PageKeys

LAST_S = 25.0
"""Longer than any transfer takes to end, and than it takes to give up a silent peer."""


_log = logging.getLogger(__name__)

MEMORY_S = 60.0
"""How long a request that is over is remembered. A message about it may be under way that long, and its tokens may be asked for
again."""

NO_ROWS: Int32Array = np.empty(0, dtype=np.int32)
NO_PAGES: Mapping[int, int] = MappingProxyType({})

R = TypeVar("R", bound=Request)
SharedMessage: TypeAlias = Probe | Repeat | TellCache | FlushCache | Drain
"""The messages that both roles answer alike."""
SharedEvent: TypeAlias = (
    Prepared | RouterJoined | RouterLost | WeightsReplaced | AdaptersChanged | StepsMeasured | LeaveRole | StayInRole
)
"""The events that both roles answer alike."""


def decline(writer: Life, asked: Generate | Reserve, failed: Failed) -> Send:
    """asked: the Reserve that is declined."""
    sent_s = asked.sent_s if isinstance(asked, Reserve) else None
    return Send(writer.id, Decline(key=asked.key, failed=failed, sent_s=sent_s))


class RequestTable(Generic[R]):
    """Every request of one instance, until nothing of it is left, with all that it holds."""

    def __init__(
        self,
        make: type[R],
        me: InstanceInfo,
        engine: EngineDescription,
        limits: InstanceLimits,
        end: Callable[[R, Ending | None, float], list[Action]],
        former: FormerRole | None = None,
    ) -> None:
        """make: the role's record. end: the role's one door, by which its requests end; `close` is the part that both share.
        former: what the instance's former role has left; None: there was none."""
        self._make = make
        self._me = me
        self._engine = engine
        self._limits = limits
        self.end = end
        self._open: dict[AttemptId, R] = {}
        self._deadlines: DeadlineWheel[AttemptId] = DeadlineWheel()
        self._over: DeadlineWheel[AttemptId] = DeadlineWheel()
        self._memory = TokenMemory()
        self._decodes: dict[AttemptId, Life] = {}
        """Who had granted a reservation to a request that is over. A router that missed the message asks."""
        self._draining = False
        self._drain_ends_s: list[float] = []
        """The times of a drain: when what still runs is ended, and when nothing more is waited for. Each goes once it passed."""
        self._left: list[Timeline] = []
        self.pool = PagePool(engine.total_pages, limits.prefix_cache) if former is None else former.pool
        self._former_steps = 0 if former is None else former.steps
        self._former_evicted = self.pool.cache.evicted
        self.prompts = PromptCache(self.pool, engine.layout.page_size)
        self.cache_reports = CacheReporter(me, self.pool.cache, engine.weights)
        self.free_rows = list(range(engine.max_rows - 1, -1, -1))
        """Rows of the executor's batch that no request has."""
        self.in_row: dict[int, R] = {}
        """The request in each other row."""
        self.steps_of_row = np.zeros(engine.max_rows, dtype=np.int32)
        """For each row, the launched steps that name it and have not returned. They may still write the pages of its request."""
        self.holders: dict[AttemptId, R] = {}
        """Requests that hold pages, also those that have ended. A row is scarcer than pages, and is often free earlier."""
        self.computing: dict[int, PromptProgress] = {}
        """Rows whose prompt has tokens to launch, in the order of admission."""
        self.starts: list[RowStart] = []
        """Rows that begin with the next plan."""
        self.shares = Shares(engine.max_rows, engine.total_pages)
        self.waiting: WaitingLine[R] = WaitingLine(self.shares)
        self.peers: dict[InstanceId, Incarnation] = {}
        """The instances of the other role."""
        self.routers: dict[InstanceId, tuple[InstanceId, ...]] = {}
        """Routers whose requests are served, each with the names of its detokenizers."""
        self.counters = Counters()
        self.weights = engine.weights
        """What computes here."""
        self._adapters = AdaptersChanged(frozenset(), frozenset())
        """Which of them requests can have."""
        self.chunk_limit = ChunkLimit(limits.step_limit_s)
        self._adapted: Counter[Digest] = Counter()
        """How many open requests have each."""
        self._adapted_rows: Counter[Digest] = Counter()
        """How many rows do."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[R]:
        """A snapshot, so requests may be removed meanwhile."""
        return iter(list(self._open.values()))

    def __getitem__(self, key: AttemptId) -> R:
        return self._open[key]

    def get(self, key: AttemptId) -> R | None:
        return self._open.get(key)

    # --- what both roles answer alike ------------------------------------------------------------------------------------

    def receive(self, sender: InstanceId, message: SharedMessage, now: float) -> list[Action]:
        match message:
            case Probe():
                return self._probed(message)
            case Repeat():
                return self._repeat(message)
            case TellCache():
                if sender in self.routers:
                    self.cache_reports.ask(sender)
                return []
            case FlushCache():
                self.pool.flush()
                return []
            case Drain():
                return self._drain(now, self._limits.drain_timeout_s)
            case _:
                assert_never(message)

    def handle(self, event: SharedEvent, now: float) -> list[Action]:
        match event:
            case Prepared():
                request = self._open.get(event.key)
                if request is None or request.phase is RequestPhase.ENDED:
                    return []
                request.prepares = False
                return [] if event.refused is None else self.end(request, event.refused, now)
            case RouterJoined():
                self.routers[event.router] = tuple(text_name(event.router, shard) for shard in range(event.detokenizers))
                return []
            case RouterLost():
                self.cache_reports.forget(event.router)
                self.routers.pop(event.router, None)
                lost = [request for request in self if request.key.router == event.router]
                if lost:
                    _log.warning("%s is gone: its open requests end here, %d of them", event.router, len(lost))
                return self._end_all(lost, now)
            case WeightsReplaced():
                actions = self._end_all(self, now, self._changed)
                self.weights = self.cache_reports.weights = event.weights
                self.pool.flush()
                return actions
            case AdaptersChanged():
                self._adapters = event
                lost = [each for each in self if each.adapter and each.adapter not in event.served]
                return self._end_all(lost, now, self._lacks_adapter)
            case StepsMeasured():
                self.chunk_limit.cost = event.cost
                return []
            case LeaveRole():
                return self._drain(now, event.timeout_s)
            case StayInRole():
                self._draining, self._drain_ends_s = False, []
                return []
            case _:
                assert_never(event)

    def _drain(self, now: float, timeout_s: float) -> list[Action]:
        """Take no more requests. What waits ends at once, what runs after so long. Idempotent."""
        if not self._draining:
            self._draining, self._drain_ends_s = True, [now + timeout_s, now + timeout_s + LAST_S]
        return self._end_all(self.waiting, now, self._leaving)

    def meet(self, change: PeersChanged, now: float) -> list[Action]:
        """Other peers: the requests that wait for one that has left end."""
        for gone in change.left:
            self.peers.pop(gone, None)
        self.peers.update((peer.id, peer.incarnation) for peer in change.joined)
        return self._end_all([each for each in self.waiting if each.peer is not None and not self.knows(each.peer)], now)

    def tick(self, now: float) -> list[Action]:
        """End the requests whose deadline has passed, and all when the drain has taken long enough; forget those that have been
        over for long; tell what has changed in the prefix cache."""
        for key in self._over.expired(now):
            self._memory.forget(key)
            self._decodes.pop(key, None)
        late = [self._open[key] for key in self._deadlines.expired(now)]
        actions = self._end_all(late, now, lambda: DeadlinePassed(f"the request's deadline passed on {self._me.id}"))
        if self._drain_ends_s and now >= self._drain_ends_s[0]:
            self._drain_ends_s = [now + LAST_S] if self._drain_ends_s[1:] else []  # transfers have this long however late it is
            actions += self._end_all(self, now, self._leaving)
        unused = [each for each in self._adapters.unused if not self._adapted[each]]
        self._adapters = AdaptersChanged(self._adapters.served, self._adapters.unused.difference(unused))
        return [*actions, *self.cache_reports.tick(now), *map(AdapterUnused, unused)]

    def next_deadline(self) -> float | None:
        """When `tick` is due. Keys that are remembered too long cost memory only, so they wake nobody."""
        return earliest(self._deadlines.next_deadline(), *self._drain_ends_s, self.cache_reports.next_deadline())

    def _leaving(self) -> Unavailable:
        """The error for a request that comes too late or still runs when the time is over. Each gets its own: one that is raised
        holds what its callers held."""
        return Unavailable(f"{self._me.id} is leaving the fleet")

    def _changed(self) -> WeightsChanged:
        """The error for a request whose KV is of other weights than those that compute here."""
        return WeightsChanged(f"{self._me.id} computes with other weights")

    def _lacks_adapter(self) -> WeightsChanged:
        return WeightsChanged(f"{self._me.id} does not hold the adapter of the request")

    def has_place_for_adapter(self, request: R) -> bool:
        """Whether its adapter may be one of those that the rows of the batch have."""
        rows = self._adapted_rows
        return not request.adapter or request.adapter in rows or len(rows) < self._engine.adapters_per_batch

    def _end_all(self, requests: Iterable[R], now: float, error: Callable[[], TandemError] | None = None) -> list[Action]:
        """error: makes what clients are told; None: nobody waits for these."""
        actions: list[Action] = []
        for request in requests:
            actions += self.end(request, None if error is None else Failed.of(error()), now)
        return actions

    def knows(self, peer: Life) -> bool:
        return self.peers.get(peer.id) == peer.incarnation

    def key_in(self, row: int) -> AttemptId:
        return self.in_row[row].key

    @property
    def last_step(self) -> int:
        """The number of the last plan."""
        return self._former_steps + self.counters.steps

    def take_timelines(self) -> list[Timeline]:
        """Those of the requests that were removed since the last call, in order."""
        left, self._left = self._left, []
        return left

    def report(self) -> Report:
        """What both roles report alike. A reservation that waits does not count yet: `forget` may take it off again, and a
        counter never falls."""
        self.chunk_limit.measured()
        in_rows = (each.progress for each in self.in_row.values())
        computing = sum(progress.tokens_to_compute for progress in in_rows if progress is not None)
        load = Load(
            waiting_requests=len(self.waiting),
            tokens_to_compute=computing + sum(self.prompts.missing_tokens(each) for each in self.waiting if each.peer is None),
            pages_free=self.pool.available_pages,
            pages_total=self.pool.total_pages,
            pages_cached=self.pool.cached_pages,
        )
        may_be_forgotten = sum(isinstance(request.asked, Reserve) for request in self.waiting)
        counters = replace(
            self.counters,
            requests_accepted=self.counters.requests_accepted - may_be_forgotten,
            pages_evicted=self.pool.cache.evicted - self._former_evicted,
        )
        drained = self._draining and not (self._open and self._drain_ends_s)
        return Report(load, counters, drained, self._draining, cache_version=self.cache_reports.version)

    # --- in --------------------------------------------------------------------------------------------------------------

    def accept(
        self, asked: Generate | Reserve, peer: Life | None, now: float, objection: TandemError | None = None
    ) -> tuple[R | None, list[Action]]:
        """Put a request into the waiting line and return it with what must be made ready for it; None when it is refused or
        dropped. An attempt is served once: a request whose key is known is counted as stale and dropped.

        peer: with whom it shares the work. objection: why the role refuses it, if it does.
        """
        key = asked.key
        if key in self._open or key in self._over:
            self.counters.messages_stale += 1
            return None, []
        pipeline, terms, grammar = self._pipeline_of(key), asked.terms, asked.sampling.grammar
        try:
            if pipeline is None:
                raise Unavailable(f"{self._me.id} is no member of the fleet of {key.router}")
            prompt, pages = self._check(asked, peer, objection)
        except TandemError as error:
            return None, self._refuse(asked, peer, pipeline, Failed.of(error), now)
        limit_s = self._limits.request_timeout_s
        deadline_s = now + (limit_s if terms.timeout_s is None else min(terms.timeout_s, limit_s))
        rank, times = Rank(terms.priority, now - terms.age_s), Times(len(prompt), now)
        variant = Variant(self.weights, asked.variant.adapter)
        keys = PageKeys(self._engine.layout.page_size, variant, asked.salt, asked.prompt)
        request = self._make(asked, key, prompt, peer, rank, pages, times, deadline_s, asked.first, pipeline, keys, terms.owner)
        request.prepares = grammar is not None
        if isinstance(asked, Reserve):
            request.cached_tokens = asked.cached_tokens
        self._open[key] = request
        self._adapted[request.adapter] += 1
        self._deadlines.set(key, deadline_s)
        self.waiting.join(request)
        self.counters.requests_accepted += 1
        return request, [] if grammar is None else [Prepare(key, grammar, terms.owner)]

    def _refuse(
        self, asked: Generate | Reserve, peer: Life | None, pipeline: InstanceId | None, refused: Failed, now: float
    ) -> list[Action]:
        """A request is not accepted. Its writer is told, or the client, unless it is of a router that we do not know."""
        if not isinstance(asked, Reserve) or asked.waits:  # a Reserve that does not wait may come again, to wait
            self._over.set(asked.key, now + MEMORY_S)
        if peer is not None:
            return [decline(peer, asked, refused)]
        self._memory.keep(asked.key, Emitted(asked.first, (), refused))
        return [] if pipeline is None else [*emit_tokens([TokenDelta(asked.key, asked.first, (), refused)], [pipeline])]

    def _check(self, asked: Generate | Reserve, peer: Life | None, objection: TandemError | None) -> tuple[Int32Array, int]:
        """The prompt, and the pages to lease for it: one more than it fills, if the answer can need it. Raises the error with
        which the request is refused."""
        model, layout = self._engine.model, self._engine.layout
        prompt = unpack_ids(asked.prompt)
        if len(prompt) == 0 or prompt.max() >= model.vocab_size:
            raise BadRequest(f"prompt must hold token ids between 0 and {model.vocab_size - 1}", field="prompt")
        asked.sampling.validate(asked.first)
        asked.sampling.check_token_ids(model.vocab_size)
        asked.sampling.check_prompt(len(prompt))
        if objection is not None:
            raise objection
        if isinstance(asked, Reserve) and asked.sampling.max_new_tokens < 2:
            raise BadRequest("an answer of one token needs no reservation", field="max_tokens")
        if asked.first >= len(prompt):
            raise BadRequest(f"first must be between 0 and {len(prompt) - 1}", field="first")
        answer_tokens = asked.sampling.max_new_tokens if self._me.role == "decode" else 0
        tokens = max(len(prompt), len(prompt) + answer_tokens - 1)  # the last token of an answer is never fed back
        most_pages = layout.pages_for(tokens)
        if tokens > model.context_tokens or most_pages > self._engine.total_pages:
            field = "max_tokens" if answer_tokens else "prompt"
            raise BadRequest(f"the request needs {tokens} tokens: too long for {self._me.id}", field=field)
        if asked.variant.weights not in ("", self.weights):
            raise self._changed()
        if asked.variant.adapter and asked.variant.adapter not in self._adapters.served:
            raise self._lacks_adapter()
        if self._draining:
            raise self._leaving()
        if len(self.waiting) >= self._limits.max_waiting:
            raise Overloaded(f"{self._me.id} has {self._limits.max_waiting} requests waiting already")
        owner = asked.terms.owner
        if owner and not has_place(self._limits.max_waiting - len(self.waiting), self.waiting.of(owner)):
            raise Overloaded(f"{self._me.id} has {self.waiting.of(owner)} requests of this key waiting already")
        if peer is not None and not self.knows(peer):
            raise Unavailable(f"{self._me.id} does not know the instance {peer.id}")
        return prompt, min(layout.pages_for(len(prompt)) + 1, most_pages)

    # --- in a row ----------------------------------------------------------------------------------------------------------

    def pages_after(self, ending: Iterable[R]) -> int:
        """How many pages are available when these have ended."""
        closing = Closing()
        return self.pool.available_pages + sum(closing.add(each.lease) for each in ending if each.lease is not None)

    def admit(self, request: R, rows: int, work: int, now: float) -> None:
        """The request leaves the line with its pages, of which there are enough, and a row. If it was generated here, its prompt
        is computed from behind its hit on. rows: those that count as its owner's. work: tokens that its owner is given."""
        taken, row = request.pages - request.hit.held, self.free_rows.pop()
        self.waiting.leave(request.key)
        request.lease, request.row = self.pool.lease(request.pages, request.hit), row
        assert request.lease is not None
        request.times.admitted_s = now
        self.in_row[row] = self.holders[request.key] = request
        if request.adapter:
            self._adapted_rows[request.adapter] += 1
        self.shares.hold(request, rows, taken)
        self.shares.given(request.owner, work)
        if isinstance(request.asked, Generate):
            self.prompts.begin(request)
            begin = request.cached_tokens
            self.counters.prompt_tokens_asked += len(request.prompt)
            self.counters.prompt_tokens_hit += begin
            request.phase = RequestPhase.COMPUTING
            self.computing[row] = request.begin_prompt(begin, self._engine.model.vocab_size)
            self.starts.append(request.row_start(length=begin))

    def plan(
        self, now: float, decode_rows: Int32Array = NO_ROWS, grown: Mapping[int, int] = NO_PAGES, held_tokens: int = 0
    ) -> StepPlan | None:
        """The next forward, which goes to the executor now; None: there is nothing to compute. grown: row → its new page.
        held_tokens: those of the decode rows."""
        budget_tokens = min(self._limits.chunk_tokens, self.chunk_limit.tokens(len(decode_rows), held_tokens))
        chunks = next_chunks(self.computing.values(), budget_tokens)
        self.chunk_limit.launched(sum(len(chunk.token_ids) for chunk in chunks))
        for chunk in chunks:
            self.in_row[chunk.row].times.chunk_launched(now)
            if chunk.last:
                del self.computing[chunk.row]
        if not chunks and not len(decode_rows):
            return None
        self.counters.steps += 1
        rows, pages = np.array(list(grown), dtype=np.int32), np.array(list(grown.values()), dtype=np.int32)
        plan = StepPlan(self.last_step, tuple(self.starts), chunks, decode_rows, rows, pages, held_tokens)
        self.starts = []
        self.steps_of_row[plan.rows] += 1
        return plan

    def chunks_done(self, result: StepResult, now: float) -> list[R]:
        """A step came back: note what it has computed of prompts. Returns the request of each of its chunks."""
        self.steps_of_row[result.plan.rows] -= 1
        assert (self.steps_of_row >= 0).all(), "a step returned twice"
        prompts = result.prompt_logprobs.by_row()
        requests: list[R] = []
        for chunk in result.plan.chunks:
            request = self.in_row[chunk.row]
            requests.append(request)
            assert request.progress is not None
            if chunk.row in result.failed:  # its pages hold something else than the KV of these tokens
                continue
            request.progress.complete(len(chunk.token_ids))
            whole = request.progress.computed // self._engine.layout.page_size
            if request.lease is not None:  # without a lease they are nobody's to share
                request.lease.publish(request.keys, whole)
            self.prompts.keep_promises(request, whole)
            self.counters.prompt_tokens_computed += len(chunk.token_ids)
            if chunk.row in prompts:
                request.collect(prompts[chunk.row])
            if chunk.last and request.phase is not RequestPhase.ENDED:
                request.times.last_chunk_s = now
        return requests

    # --- out -------------------------------------------------------------------------------------------------------------

    def cancel(self, key: AttemptId, now: float) -> R | None:
        """The request to end, if the key is known. One that is not may still come (messages travel over different links): then
        it is over before it begins."""
        request = self._open.get(key)
        if request is None:
            self._over.set(key, now + MEMORY_S)
        return request

    def close(self, request: R, now: float) -> RequestPhase | None:
        """The request is served no longer; from now on it waits only for steps and transfers. Returns the phase that it was in;
        None when it had ended before."""
        before = request.phase
        if before is RequestPhase.ENDED:
            return None
        request.phase = RequestPhase.ENDED
        request.times.ended_s = now
        self.counters.requests_ended += 1
        self.waiting.leave(request.key)
        self.shares.hold(request, 0, 0)
        self._deadlines.clear(request.key)
        if request.row is not None:
            self.computing.pop(request.row, None)
        if request.lease is not None:  # nothing more of its prompt will be computed, but what a step is computing now
            self.prompts.keep_promises(request, len(request.prompt) // self._engine.layout.page_size)
        return before

    def forget(self, request: R, now: float) -> None:
        """Refuse a waiting request as if it had never come: it may come again, and does not count."""
        self.close(request, now)
        self.counters.requests_accepted -= 1
        self.counters.requests_ended -= 1
        self._remove(request)

    def _remove(self, request: R) -> None:
        del self._open[request.key]
        _count_down(self._adapted, request.adapter)

    def release(self, request: R, now: float) -> None:
        """Bring home what nothing in flight can touch: the row when no step names it, and the pages of a request that has ended
        when no transfer reads or writes them either."""
        key, row = request.key, request.row
        if row is not None:
            if self.steps_of_row[row]:
                return
            del self.in_row[row]
            if request.adapter:
                _count_down(self._adapted_rows, request.adapter)
            self.free_rows.append(row)
            self.starts = [start for start in self.starts if start.row != row]
            request.row = None
        if request.phase is not RequestPhase.ENDED or request.in_transfer:
            return
        self._remove(request)
        self.holders.pop(key, None)
        self._over.set(key, now + MEMORY_S)
        self._memory.keep(key, request.emitted)
        request.times.cached_tokens = request.cached_tokens
        self._left.append(Timeline(key, request.times))
        if request.decode is not None:
            self._decodes[key] = request.decode
        if request.lease is not None:
            request.lease.close()

    def tell(self, request: R, ending: Ending) -> list[Send]:
        """The ending goes to the client, after the tokens that went before."""
        request.ending = ending
        return emit_tokens([TokenDelta(request.key, request.next_token, (), ending)], [request.pipeline])

    # --- questions of routers ----------------------------------------------------------------------------------------------

    def _repeat(self, message: Repeat) -> list[Action]:
        """Send again what the router asks for, as far as it is known. Each request has messages of its own: nobody's turn gets
        long."""
        sends: list[Action] = []
        for key, first in message.tokens:
            request = self._open.get(key)
            emitted = self._memory.get(key) if request is None else request.emitted
            pipeline = self._pipeline_of(key)
            if emitted is not None and pipeline is not None:
                sends += [send for delta in emitted.since(key, first) for send in emit_tokens([delta], [pipeline])]
        return sends

    def _probed(self, probe: Probe) -> list[Action]:
        """What is known of these requests, the way that their tokens go."""
        standings: dict[InstanceId, list[Standing]] = {}
        for key in probe.keys:
            pipeline = self._pipeline_of(key)
            if pipeline is not None:
                standings.setdefault(pipeline, []).append(self._standing(key))
        me, turn = self._me, probe.round
        return [
            Send(pipeline, Probed(id=me.id, incarnation=me.incarnation, round=turn, standings=tuple(known)))
            for pipeline, known in standings.items()
        ]

    def _standing(self, key: AttemptId) -> Standing:
        request = self._open.get(key)
        if request is None:
            return Standing(key, None, self._decodes.get(key))
        return Standing(key, None if request.phase is RequestPhase.ENDED else request.next_token, request.decode)

    def _pipeline_of(self, key: AttemptId) -> InstanceId | None:
        """The detokenizer that gets the tokens of this key; None when its router is not known."""
        detokenizers = self.routers.get(key.router)
        return None if detokenizers is None else detokenizers[shard_of(key, len(detokenizers))]


def _count_down(counter: Counter[Digest], adapter: Digest) -> None:
    counter[adapter] -= 1
    if not counter[adapter]:
        del counter[adapter]
