"""The requests of an instance, whatever its role: accepted once, served until a deadline, ended once, and then remembered.

Owns the table, the waiting line, the deadlines, the drain, the peers, the memory of what was emitted, and the counters that both
roles keep. Does not know pages, rows, pushes or reservations: the role's scheduler decides when a request may be removed.

    (unknown) ── accept ──► waiting, running ── end ──► ended ── remove ──► over, remembered a while ──► (unknown)
        └── refused, or its Cancel came first ────────────────────────────────┘

How an instance leaves: when its drain began, and when it stops waiting.

Owns the times of a drain. Knows nothing of requests: the request table asks.

    begin ── requests may finish ──► timeout_s: they are ended ── their transfers finish ──► + LAST_S: over in any case

What an instance sends into the text pipelines, one for each detokenizer of each of its routers.

Owns the shape of these messages. Knows token ids and endings; text belongs to the detokenizers.

The limits of an instance, whatever its role.

Owns their names. The process makes them from its flags.

The rows of the executor's batch: which are free, and how many steps in flight still name each.

Owns row numbers. Knows nothing of requests, pages or time. The owner gives a row back only when no step in flight names it: a
step may still write the pages of the request that has the row.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from common.deadlines import DeadlineWheel, earliest
from common.errors import BadRequest, DeadlinePassed, Overloaded, TandemError, Unavailable
from common.executor import EngineDescription
from common.ids import AttemptId, Incarnation, InstanceId, Int32Array, Life, shard_of, text_name, unpack_ids
from common.instance.ports import PeersChanged, Prepare, Prepared, RouterJoined, Send
from common.instance.request import Phase, Request
from common.instance.token_memory import Emitted, TokenMemory
from common.instance.waiting_line import Rank, Shares, WaitingLine, has_place
from common.messages import (
    Counters,
    Ending,
    Failed,
    Generate,
    InstanceInfo,
    Probe,
    Probed,
    Repeat,
    Reserve,
    Standing,
    Terms,
    Timeline,
    Times,
    TokenBatch,
    TokenDelta,
)
from common.pages.radix_cache import PageKeys
from common.sampling_params import ANSWER_TOKENS

LAST_S = 25.0
"""Longer than any transfer takes to end, and than it takes to give up a silent peer."""


class Drainage:
    """timeout_s: how long running requests may go on."""

    def __init__(self, instance: InstanceId, timeout_s: float) -> None:
        self._instance = instance
        self._timeout_s = timeout_s
        self._next_s: float | None = None
        self._handed_off = False
        self.began = False
        self.is_over = False
        """The instance waits for nothing more."""

    def refusal(self) -> Unavailable:
        """The error for a request that comes too late or still runs when the time is over. Each gets its own: one that is raised
        holds what its callers held."""
        return Unavailable(f"{self._instance} is leaving the fleet")

    def begin(self, now: float) -> None:
        """Idempotent."""
        if not self.began:
            self.began = True
            self._next_s = now + self._timeout_s

    def tick(self, now: float) -> bool:
        """Whether to end the requests that still run; true once."""
        if self._next_s is None or now < self._next_s:
            return False
        if self._handed_off:
            self.is_over, self._next_s = True, None
            return False
        self._handed_off, self._next_s = True, now + LAST_S
        return True

    def next_deadline(self) -> float | None:
        return self._next_s


def emit_tokens(deltas: Sequence[TokenDelta], pipelines: Sequence[InstanceId]) -> list[Send]:
    """The tokens of one step, as one message for each pipeline. pipelines[i]: the detokenizer that gets deltas[i]."""
    if not deltas:
        return []
    first = pipelines[0]
    if pipelines.count(first) == len(pipelines):
        return [Send(first, TokenBatch(deltas=tuple(deltas)))]
    batches: dict[InstanceId, list[TokenDelta]] = {}
    for pipeline, delta in zip(pipelines, deltas, strict=True):
        batches.setdefault(pipeline, []).append(delta)
    return [Send(pipeline, TokenBatch(deltas=tuple(batch))) for pipeline, batch in batches.items()]


def emit_ending(pipeline: InstanceId, key: AttemptId, first: int, ending: Ending) -> Send:
    """An ending without a token. first: the number of the token that would have come next."""
    return Send(pipeline, TokenBatch(deltas=(TokenDelta(key, first, (), ending),)))


@dataclass(frozen=True, kw_only=True)
class InstanceLimits:
    """chunk_tokens: most prompt tokens of one forward. max_waiting: most requests that wait. request_timeout_s: longest life of a
    request here. drain_timeout_s: how long a draining instance lets its requests run before it ends them. answer_tokens: how
    long an answer is expected to be, until some have ended. prefix_cache: whether KV is kept for later requests that begin alike.
    """

    chunk_tokens: int
    max_waiting: int
    request_timeout_s: float
    drain_timeout_s: float
    answer_tokens: int = ANSWER_TOKENS
    prefix_cache: bool = True


class Rows:
    """`total` rows. in_flight[row]: launched steps that name the row and have not returned."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.in_flight = np.zeros(total, dtype=np.int32)
        self._free = list(range(total - 1, -1, -1))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free row. Raises IndexError when there is none: ask `free_count` first."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        assert self.in_flight[row] == 0, f"row {row} is named by a step in flight"
        self._free.append(row)

    def launched(self, rows: Int32Array) -> None:
        """A plan that names `rows` (each once) was launched."""
        self.in_flight[rows] += 1

    def returned(self, rows: Int32Array) -> None:
        """The step of that plan returned."""
        self.in_flight[rows] -= 1
        assert (self.in_flight[rows] >= 0).all(), "a step returned twice"


_log = logging.getLogger(__name__)

MEMORY_S = 60.0
"""How long a request that is over is remembered. A message about it may be under way that long, and its tokens may be asked for
again."""

R = TypeVar("R", bound=Request)


def read_terms(terms: Terms, now: float) -> Rank:
    """The rank of a request among the others."""
    return Rank(terms.priority, now - terms.age_s)


def _is_remembered(asked: Generate | Reserve) -> bool:
    """Whether its key is over once it is refused. A Reserve that does not wait may come again, to wait."""
    return not isinstance(asked, Reserve) or asked.waits


class RequestTable(Generic[R]):
    """Every request of one instance, until nothing of it is left. make: the role's record.

    peers: the instances of the other role, by id. routers: whose requests are served, each with the names of its detokenizers.
    stale: messages about keys that are over or came again; they were dropped.
    """

    def __init__(self, make: type[R], me: InstanceInfo, engine: EngineDescription, limits: InstanceLimits) -> None:
        self._make = make
        self._me = me
        self._engine = engine
        self._limits = limits
        self._open: dict[AttemptId, R] = {}
        self._deadlines: DeadlineWheel[AttemptId] = DeadlineWheel()
        self._over: DeadlineWheel[AttemptId] = DeadlineWheel()
        self._memory = TokenMemory()
        self._decodes: dict[AttemptId, Life] = {}
        """Of requests that are over: who had granted them a reservation. A router that did not hear of it asks."""
        self._drainage = Drainage(me.id, limits.drain_timeout_s)
        self._left: list[Timeline] = []
        self.shares = Shares(engine.max_rows, engine.total_pages)
        self.waiting: WaitingLine[R] = WaitingLine(self.shares)
        self.peers: dict[InstanceId, Incarnation] = {}
        self.routers: dict[InstanceId, tuple[InstanceId, ...]] = {}
        self.accepted = self.ended = self.stale = 0
        self.steps = self.prompt_tokens = self.tokens = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[R]:
        """A snapshot, so requests may be removed meanwhile."""
        return iter(list(self._open.values()))

    def __getitem__(self, key: AttemptId) -> R:
        return self._open[key]

    def get(self, key: AttemptId) -> R | None:
        return self._open.get(key)

    # --- in --------------------------------------------------------------------------------------------------------------

    def accept(
        self,
        asked: Generate | Reserve,
        peer: Life | None,
        answer_tokens: int,
        now: float,
        objection: TandemError | None = None,
    ) -> Failed | None:
        """Put a request into the waiting line. Returns the reason when it is refused. An attempt is served once: a request whose
        key is known is counted as stale and dropped.

        peer: with whom it shares the work. answer_tokens: of its answer, those whose memory is needed here. objection: why the
        role refuses it, if it does.
        """
        key = asked.key
        if key in self._open or key in self._over:
            self.stale += 1
            return None
        try:
            rank = read_terms(asked.terms, now)
            prompt, pages = self._check(asked, peer, answer_tokens, objection)
        except TandemError as error:
            if _is_remembered(asked):
                self._over.set(key, now + MEMORY_S)
            refused = Failed.of(error)
            if isinstance(asked, Generate):
                self._memory.keep(key, Emitted.nothing(asked.first, refused))
            return refused
        limit_s = self._limits.request_timeout_s
        deadline_s = now + (limit_s if asked.terms.timeout_s is None else min(asked.terms.timeout_s, limit_s))
        pipeline = self._pipeline_of(key)
        assert pipeline is not None, "checked"
        keys = PageKeys(self._engine.layout.page_size, asked.salt, asked.prompt)
        times = Times(len(prompt), now)
        request = self._make(asked, key, prompt, peer, rank, pages, times, deadline_s, asked.first, pipeline, keys)
        request.prepares = asked.sampling.grammar is not None
        if isinstance(asked, Reserve):
            request.cached_tokens = asked.cached_tokens
        self._open[key] = request
        self._deadlines.set(key, deadline_s)
        self.waiting.join(key, rank, request)
        self.accepted += 1
        return None

    def _check(
        self, asked: Generate | Reserve, peer: Life | None, answer_tokens: int, objection: TandemError | None
    ) -> tuple[Int32Array, int]:
        """The prompt, and the pages to lease for it: one more than it fills, if the answer can need it. Raises the error with
        which the request is refused."""
        model, layout = self._engine.model, self._engine.layout
        if asked.key.router not in self.routers:
            raise Unavailable(f"{self._me.id} is no member of the fleet of {asked.key.router}")
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
        tokens = len(prompt) + answer_tokens
        most_pages = layout.pages_for(max(len(prompt), tokens - 1))  # the last token of an answer is never fed back
        if tokens > model.context_tokens or most_pages > self._engine.total_pages:
            field = "max_tokens" if answer_tokens else "prompt"
            raise BadRequest(f"the request needs {tokens} tokens: too long for {self._me.id}", field=field)
        if self._drainage.began:
            raise self._drainage.refusal()
        if len(self.waiting) >= self._limits.max_waiting:
            raise Overloaded(f"{self._me.id} has {self._limits.max_waiting} requests waiting already")
        owner = asked.terms.owner
        if owner and not has_place(self._limits.max_waiting - len(self.waiting), self.waiting.of(owner)):
            raise Overloaded(f"{self._me.id} has {self.waiting.of(owner)} requests of this key waiting already")
        if peer is not None and not self.knows(peer):
            raise Unavailable(f"{self._me.id} does not know the instance {peer.id}")
        return prompt, min(layout.pages_for(len(prompt)) + 1, most_pages)

    def preparation(self, asked: Generate | Reserve) -> list[Prepare]:
        """What must be made ready for the request that this message has brought."""
        request, grammar = self._open.get(asked.key), asked.sampling.grammar
        if grammar is None or request is None or request.asked is not asked:
            return []
        return [Prepare(asked.key, grammar, request.owner)]

    def prepared(self, event: Prepared) -> R | None:
        """The request whose grammar is ready, or was refused; None when it has ended meanwhile."""
        request = self._open.get(event.key)
        if request is None or request.phase is Phase.ENDED:
            return None
        request.prepares = False
        return request

    # --- out -------------------------------------------------------------------------------------------------------------

    def cancel(self, key: AttemptId, now: float) -> R | None:
        """The request to end, if the key is known. One that is not may still come (messages travel over different links): then
        it is over before it begins."""
        request = self._open.get(key)
        if request is None:
            self._over.set(key, now + MEMORY_S)
        return request

    def end(self, request: R, now: float) -> Phase | None:
        """The request is served no longer; from now on it waits only for steps and transfers. Returns the phase that it was in;
        None when it had ended before."""
        before = request.phase
        if before is Phase.ENDED:
            return None
        request.phase = Phase.ENDED
        request.times.ended_s = now
        self.ended += 1
        self.waiting.leave(request.key)
        self.shares.hold(request, 0, 0)
        self._deadlines.clear(request.key)
        return before

    def forget(self, request: R, now: float) -> None:
        """Refuse a waiting request as if it had never come: it may come again, and does not count."""
        self.end(request, now)
        self.accepted -= 1
        self.ended -= 1
        del self._open[request.key]

    def remove(self, request: R, now: float) -> None:
        """Nothing can touch the request's pages any more: they come home. This happens once."""
        assert request.phase is Phase.ENDED, f"{request.key} is removed before its end"
        del self._open[request.key]
        self._over.set(request.key, now + MEMORY_S)
        self._memory.keep(request.key, request.emitted)
        request.times.cached_tokens = request.cached_tokens
        self._left.append(Timeline(request.key, request.times))
        if request.decode is not None:
            self._decodes[request.key] = request.decode
        if request.lease is not None:
            request.lease.close()

    def take_timelines(self) -> list[Timeline]:
        """Of the requests that were removed since the last call, in order."""
        left, self._left = self._left, []
        return left

    def tell(self, request: R, ending: Ending) -> Send:
        """The ending goes to the client, after the tokens that went before."""
        request.told = ending
        return emit_ending(request.pipeline, request.key, request.next_token, ending)

    def tell_refused(self, asked: Generate, refused: Failed) -> list[Send]:
        """A request that was not accepted ends. Nobody can be told about one of a router that we do not know."""
        pipeline = self._pipeline_of(asked.key)
        return [] if pipeline is None else [emit_ending(pipeline, asked.key, asked.first, refused)]

    def repeat(self, message: Repeat) -> list[Send]:
        """Send again what the router asks for, as far as it is known. Each request has messages of its own: nobody's turn gets
        long."""
        sends: list[Send] = []
        for key, first in message.tokens:
            request = self._open.get(key)
            emitted = self._memory.get(key) if request is None else request.emitted
            pipeline = self._pipeline_of(key)
            if emitted is not None and pipeline is not None:
                sends += [send for delta in emitted.since(key, first) for send in emit_tokens([delta], [pipeline])]
        return sends

    def overdue(self, now: float) -> list[tuple[R, Failed]]:
        """The requests to end now, each with its reason: its deadline has passed, or the drain has taken long enough."""
        for key in self._over.expired(now):
            self._memory.forget(key)
            self._decodes.pop(key, None)
        overdue: list[tuple[R, Failed]] = []
        for key in self._deadlines.expired(now):
            late = DeadlinePassed(f"the request's deadline passed on {self._me.id}")
            overdue.append((self._open[key], Failed.of(late)))
        if self._drainage.tick(now):
            overdue += [(request, Failed.of(self._drainage.refusal())) for request in self]
        return overdue

    def drain(self, now: float) -> list[tuple[R, Failed]]:
        """Accept no more. Returns the requests to end so that they are resumed elsewhere. Idempotent."""
        self._drainage.begin(now)
        return [(request, Failed.of(self._drainage.refusal())) for request in self.waiting]

    @property
    def drained(self) -> bool:
        return self._drainage.is_over or (self._drainage.began and not self._open)

    def next_deadline(self) -> float | None:
        """When the next deadline passes. Keys that are remembered too long cost memory only, so they wake nobody."""
        return earliest(self._deadlines.next_deadline(), self._drainage.next_deadline())

    # --- routers -----------------------------------------------------------------------------------------------------------

    def meet_router(self, joined: RouterJoined) -> None:
        """Its requests are served from now on."""
        self.routers[joined.router] = tuple(text_name(joined.router, shard) for shard in range(joined.detokenizers))

    def lose_router(self, router: InstanceId) -> list[R]:
        """Returns the requests to end: nobody waits for their answers any more."""
        self.routers.pop(router, None)
        lost = [request for request in self if request.key.router == router]
        if lost:
            _log.warning("%s is gone: its open requests end here, %d of them", router, len(lost))
        return lost

    def _pipeline_of(self, key: AttemptId) -> InstanceId | None:
        """The detokenizer that gets the tokens of this key; None when its router is not known."""
        detokenizers = self.routers.get(key.router)
        return None if detokenizers is None else detokenizers[shard_of(key, len(detokenizers))]

    # --- peers and reports -------------------------------------------------------------------------------------------------

    def meet(self, change: PeersChanged) -> list[R]:
        """Other peers. Returns the waiting requests whose peer has left."""
        for gone in change.left:
            self.peers.pop(gone, None)
        self.peers.update((peer.id, peer.incarnation) for peer in change.joined)
        return [request for request in self.waiting if request.peer is not None and not self.knows(request.peer)]

    def knows(self, peer: Life) -> bool:
        return self.peers.get(peer.id) == peer.incarnation

    def answer(self, probe: Probe) -> list[Send]:
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
        return Standing(key, None if request.phase is Phase.ENDED else request.next_token, request.decode)

    def counters(self) -> Counters:
        """What both roles count. A reservation that waits does not count yet: `forget` may take it off again, and a counter never
        falls."""
        may_be_forgotten = sum(isinstance(request.asked, Reserve) for request in self.waiting)
        return Counters(
            requests_accepted=self.accepted - may_be_forgotten,
            requests_ended=self.ended,
            prompt_tokens_computed=self.prompt_tokens,
            tokens_generated=self.tokens,
            steps=self.steps,
            messages_stale=self.stale,
        )
