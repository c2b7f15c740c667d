"""The executor of an instance with several ranks: a step is complete when every rank has returned it.

Owns the join of the leader's own steps and grammars with those of its followers. Implements `common.executor.Executor`, so
neither worker nor scheduler knows of ranks. Its tokens, log probabilities and embeddings are the leader's.
"""

import weakref
from collections.abc import Callable
from functools import partial

from common.errors import BadRequest, TandemError, Unavailable
from common.executor import (
    EngineDescription,
    Executor,
    ExecutorFailed,
    StepHandle,
    StepPlan,
    StepResult,
    Work,
)
from common.ids import Digest, Int32Array
from common.instance.ranks.leader import FollowerLine, Followers
from common.instance.ranks.line import RankStepFailed, digest_tokens, pack_plan
from common.messages.ranks import DropOnRank, FreeAdapter, SwitchOnRank
from common.messages.variants import ReadAdapter, Task, WeightsSource
from common.sampling_params import Grammar


class RankedStep:
    """A step in flight on all ranks. Implements `StepHandle`."""

    def __init__(self, own: StepHandle, step: int, followers: Followers) -> None:
        self._own = own
        self._step = step
        self._followers = followers
        self._result: StepResult | None = None
        """The leader's, while it waits for the others."""

    @property
    def ends_s(self) -> float | None:
        """The leader's end. When it is over and others compute, the mail of these wakes the loop."""
        return self._own.ends_s if self._result is None else None

    @property
    def progress(self) -> int:
        """The leader's: where another rank is stuck, the leader's next sum waits for it."""
        return self._own.progress

    @property
    def layers_done(self) -> int:
        """The least of all ranks."""
        own, step = self._own.layers_done, self._step
        return min(own, *(own if step in each.returned else each.layers.get(step, 0) for each in self._followers))

    def poll(self) -> StepResult | None:
        """Raises RankStepFailed when a rank has sampled other tokens than the leader. A step of the leader's that fails never
        ends: the followers' next turns say why the instance ends."""
        if self._result is None:
            try:
                self._result = self._own.poll()
            except ExecutorFailed as error:
                self._followers.failed(f"rank 0 failed: {error}", error.step)
        if self._result is None or any(self._step not in follower.returned for follower in self._followers):
            return None
        digest = digest_tokens(self._result)
        for follower in self._followers:
            follower.layers.pop(self._step, None)
            if follower.returned.pop(self._step) != digest:
                differs = f"{follower.line.who} sampled other tokens than rank 0 in step {self._step}"
                raise RankStepFailed(differs, self._step)
        return self._result


class RankedPreparation:
    """A grammar that all ranks make ready. Implements `Work`. It ends with the request: the followers forget what the
    leader drops, and say nothing more of it."""

    def __init__(self, own: Work, grammar: Grammar, grammar_id: int, followers: Followers) -> None:
        self._own = own
        self._grammar = weakref.ref(grammar)
        self._own_ready: str | None = None
        self._id = grammar_id
        self._waiting: list[FollowerLine] = list(followers)

    @property
    def ends_s(self) -> float | None:
        return None if self._own_ready else self._own.ends_s

    def poll(self) -> str | None:
        if self._grammar() is None:
            raise Unavailable("its request has ended")
        self._own_ready = self._own_ready or self._own.poll()
        if not self._own_ready:
            return None  # where all refuse, the leader's error names the field
        still: list[FollowerLine] = []
        for follower in self._waiting:
            if self._id not in follower.prepared:
                still.append(follower)
            elif (refused := follower.prepared.pop(self._id)) is not None:
                raise refused.to_error(refused.message)
        self._waiting = still
        return None if still else self._own_ready


class RankedWork:
    """What all ranks do beside the steps, with one result. Implements `Work`. what: for people."""

    def __init__(self, own: Work, what: str, number: int, followers: Followers) -> None:
        self._own, self._what, self._number, self._followers = own, what, number, followers
        self._result: str | None = None
        """The leader's, while it waits for the others."""

    @property
    def ends_s(self) -> float | None:
        return None if self._result is not None else self._own.ends_s

    def poll(self) -> str | None:
        if self._result is None:
            self._result = self._own.poll()
        all_done = [(follower, follower.done.get(self._number)) for follower in self._followers]
        for _, done in all_done:
            if done is not None and done.refused is not None:  # at once: others may wait for it
                raise done.refused.to_error(done.refused.message)
        for follower, done in all_done:
            if done is None or self._result is None:
                return None
            if done.result != self._result:
                differs = f"{self._what}: {follower.line.who} has {done.result}, rank 0 {self._result}"
                raise BadRequest(f"{differs}: give all hosts the same files")
        return self._result


class RankedReading(RankedWork):
    """An adapter that is read on all ranks. What only some of them hold is freed, once all have answered. held: what all hold.
    free: called with what was read in vain."""

    def __init__(self, own: Work, number: int, followers: Followers, held: set[Digest], free: Callable[[Digest], object]) -> None:
        super().__init__(own, "the adapter", number, followers)
        self._held, self._free = held, free
        self._failed: TandemError | None = None
        """What the leader failed with, while it waits for the others."""

    def poll(self) -> str | None:
        if self._result is None and self._failed is None:
            try:
                self._result = self._own.poll()
            except TandemError as error:
                self._failed = error
        answers = [follower.done.get(self._number) for follower in self._followers]
        if (self._result is None and self._failed is None) or None in answers:
            return None
        try:
            if self._failed is not None:
                raise self._failed
            result = super().poll()
        except TandemError:
            results = {self._result, *(answer.result for answer in answers if answer is not None)}
            for digest in results - self._held - {None, ""}:
                self._free(Digest(digest or ""))
            raise
        self._held.add(Digest(result or ""))
        return result


class RankedExecutor:
    """Implements `Executor` over the leader's own executor and its followers."""

    def __init__(self, own: Executor, followers: Followers) -> None:
        self._own = own
        self._followers = followers
        self._grammars: dict[int, weakref.ref[Grammar]] = {}
        self._numbers: dict[int, int] = {}
        """Those of `_grammars`, by the identity of the object: grammars of different requests may be equal."""
        self._dropped: list[int] = []
        """Grammars whose requests have ended, and that the followers still keep."""
        self._last_grammar = 0
        self._adapters = set[Digest]()
        """Those that all ranks hold."""

    @property
    def description(self) -> EngineDescription:
        return self._own.description

    def launch(self, plan: StepPlan) -> RankedStep:
        self._send_dropped()
        self._followers.send(pack_plan(plan, lambda grammar: self._numbers[id(grammar)]))
        return RankedStep(self._own.launch(plan), plan.step, self._followers)

    def prepare(self, grammar: Grammar, owner: str = "") -> RankedPreparation:
        """The followers keep what they compile as long as this object `grammar` exists."""
        self._send_dropped()
        self._last_grammar += 1
        number = self._last_grammar
        self._grammars[number] = weakref.ref(grammar, partial(self._drop, number, id(grammar)))
        self._numbers[id(grammar)] = number
        self._followers.prepare(number, grammar, owner)
        return RankedPreparation(self._own.prepare(grammar, owner), grammar, number, self._followers)

    @property
    def weights(self) -> Digest:
        return self._own.weights

    def stage(self, source: WeightsSource) -> RankedWork:
        return RankedWork(self._own.stage(source), "the new weights", self._followers.perform(source), self._followers)

    def perform(self, task: Task) -> RankedWork:
        if isinstance(task, ReadAdapter):
            own, number = self._own.perform(task), self._followers.perform(task)
            return RankedReading(own, number, self._followers, self._adapters, self.free_adapter)
        return RankedWork(self._own.perform(task), type(task).__name__, self._followers.perform(task), self._followers)

    def switch(self) -> None:
        self._followers.send(SwitchOnRank())
        self._own.switch()

    def drop_staged(self) -> None:
        self._followers.send(DropOnRank())
        self._own.drop_staged()

    def free_adapter(self, digest: Digest) -> None:
        self._adapters.discard(digest)
        self._followers.send(FreeAdapter(adapter=digest))
        self._own.free_adapter(digest)

    def digest_pages(self, pages: Int32Array) -> bytes:
        """Refused: the pages of other ranks are elsewhere, and a digest would wait for them. --verify-pages needs one rank."""
        raise TandemError("the pages of an instance with several ranks have no digest")

    def close(self) -> None:
        self._own.close()

    def _drop(self, number: int, identity: int, _: "weakref.ref[Grammar]") -> None:
        del self._grammars[number]
        self._numbers.pop(identity, None)
        self._dropped.append(number)

    def _send_dropped(self) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, []
            self._followers.drop_grammars(dropped)
