"""The timed executor: steps take the time that a cost gives them and compute nothing. For simulation and load tests.

Owns when each step ends, and the words that answers are made of. `TimedExecutor` reads only the clock it was given, runs nothing
in the background and writes to no page. `TimedCheckpoint` stands in for a checkpoint's model in a real process (`--executor
timed`): its pool is real memory of the layout that the model would have, so pushes move as many bytes. It reads the checkpoint's
config and tokenizer, but no weights. Imports no torch: an instance starts in a fraction of a second.
"""

import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.config import EngineConfig, ModelConfig
from common.errors import BadRequest, ConfigError, MemoryShort
from common.executor import NO_LOGPROBS, EngineDescription, FutureWork, Logprobs, StepPlan, StepResult, count_right, ended_work
from common.host import host_memory_now
from common.ids import Digest, Int32Array
from common.messages import TokenLogprob
from common.messages.text import LEAST_LOGPROB
from common.messages.variants import ReadAdapter, Task, WeightsFromGroup, WeightsSource
from common.model_path import resolve_model_path
from common.pages.host_memory import digest, host_memory
from common.pages.layout import SPARE_PAGES, KVDtype, MemoryRegion
from common.sampling_params import Grammar, SamplingParams
from common.step_cost import StepCost
from engine.checkpoint import fingerprint
from engine.grammar.grammars import anything_goes
from engine.kv_budget import Agree, agreed_budget, as_offered, auto_host_kv_bytes, describe, given_kv_bytes, layout_of
from engine.models.served_shape import read_served_shape
from engine.models.shape import TOKENIZER, read_vocab


class Pace:
    """When steps end: one after the other, as on a device. cost: of each step. clock: returns seconds."""

    def __init__(self, cost: StepCost, clock: Callable[[], float]) -> None:
        self.cost = cost
        self.clock = clock
        self._busy_until_s = 0.0

    def add(self, plan: StepPlan) -> float:
        """Returns when the plan's step ends, on the clock. It begins now, or when the step before it ends."""
        seconds = self.cost.seconds(plan.chunk_tokens, plan.decoding, plan.held_tokens)
        self._busy_until_s = max(self.clock(), self._busy_until_s) + seconds
        return self._busy_until_s

    def repeat(self, rows: Int32Array, steps: int, held_tokens: int) -> float:
        """So many steps with these decode rows more, or less, behind one that holds so many tokens. Returns their seconds."""
        seconds = self.cost.seconds_after(steps, len(rows), held_tokens)
        self._busy_until_s += seconds
        return seconds


_ZERO = np.zeros(1, dtype="<f4").tobytes()


def _certain(tokens: Sequence[tuple[int, int]], chosen: Mapping[int, Sequence[int]]) -> Logprobs:
    """tokens: each with its row before it. chosen: see `SamplingParams.logprob_ids`, by row."""
    made = [
        TokenLogprob(token, 0.0, 1, tuple((one, 0.0 if one == token else LEAST_LOGPROB) for one in chosen.get(row, ())))
        for row, token in tokens
    ]
    return Logprobs.of([row for row, _ in tokens], made)


@dataclass(slots=True, eq=False)
class TimedStep:
    """A step in flight until the clock reaches `ends_s`."""

    result: StepResult
    ends_s: float
    clock: Callable[[], float]
    layers_done: int = 0
    progress: int = 0

    def poll(self) -> StepResult | None:
        return self.result if self.clock() >= self.ends_s else None


def named_files(source: WeightsSource | ReadAdapter) -> FutureWork[str]:
    """Weights or an adapter of which nothing but the name counts: ready at once, whatever they are."""
    if isinstance(source, WeightsFromGroup):
        return ended_work(BadRequest(f"{COMPUTES_NOTHING}, and is in no group", field="group_name"))
    return ended_work(blake2b(msgspec.msgpack.encode(source), digest_size=16).hexdigest())


class TimedExecutor:
    """Implements `common.executor.Executor`.

    words: [words] the token ids that answers consist of, in this order again and again; a request's seed chooses the first. So a
    token depends on (seed, position), and an answer that is resumed elsewhere goes on as it would have. pages: [pages, bytes] the
    pool; left out, pages have no bytes.

    It is sure of every token: where log probabilities are asked for, each is 0 and of rank 1, without alternatives. An embedding
    is one zero.
    """

    def __init__(
        self,
        description: EngineDescription,
        pace: Pace,
        words: Sequence[int] | Int32Array = (10,),
        pages: NDArray[np.uint8] | None = None,
    ) -> None:
        self.description = description
        self._pace = pace
        self._words = np.asarray(words, dtype=np.int32)
        self.pages = np.zeros((description.total_pages, 0), dtype=np.uint8) if pages is None else pages
        self._next = np.zeros(description.max_rows, dtype=np.int64)
        """For each row, seed and length: which word follows."""
        self._reports: dict[int, SamplingParams] = {}
        """The rows that ask for log probabilities."""
        self._pooled: set[int] = set()
        """The rows that ask for an embedding."""
        self.weights = description.weights

    def launch(self, plan: StepPlan) -> TimedStep:
        for start in plan.starts:
            self._next[start.row] = start.sampling.seed % len(self._words) + start.length
            self._reports.pop(start.row, None)
            if start.sampling.logprobs is not None or start.sampling.prompt_logprobs is not None:
                self._reports[start.row] = start.sampling
            (self._pooled.discard if start.sampling.pooling is None else self._pooled.add)(start.row)
        for chunk in plan.chunks:
            self._next[chunk.row] += len(chunk.token_ids)
        self._next[plan.decode_rows] += 1
        tokens, drafted = self._words[self._next[plan.sampled_rows] % len(self._words)], plan.draft_tokens
        if len(plan.draft_rows):
            drafted = self._words[(self._next[plan.draft_rows] + plan.draft_offsets) % len(self._words)]
            self._next[plan.decode_rows] += count_right(plan, tokens, drafted)
        reported = self._logprobs(plan, tokens, drafted) if self._reports else (NO_LOGPROBS, NO_LOGPROBS)
        embeddings = {chunk.row: _ZERO for chunk in plan.chunks if chunk.last and chunk.row in self._pooled}
        result = StepResult(plan, tokens, *reported, embeddings, drafted=drafted)
        return TimedStep(result, self._pace.add(plan), self._pace.clock)

    def _logprobs(self, plan: StepPlan, tokens: Int32Array, drafted: Int32Array) -> tuple[Logprobs, Logprobs]:
        asked = self._reports
        rows = [*plan.sampled_rows.tolist(), *plan.draft_rows.tolist()]
        sampled = [
            (row, token)
            for row, token in zip(rows, [*tokens.tolist(), *drafted.tolist()], strict=True)
            if row in asked and asked[row].logprobs is not None
        ]
        prompts = [
            (chunk.row, token)
            for chunk in plan.chunks
            if chunk.row in asked and asked[chunk.row].prompt_logprobs is not None
            for token in chunk.token_ids[0 if chunk.start else 1 :].tolist()
        ]
        chosen = {row: sampling.logprob_ids for row, sampling in asked.items()}
        return _certain(sampled, chosen), _certain(prompts, {})

    def prepare(self, grammar: Grammar, owner: str = "") -> FutureWork[str]:
        return anything_goes(grammar, "the timed executor")

    def stage(self, source: WeightsSource) -> FutureWork[str]:
        self._staged = named_files(source)
        return self._staged

    def perform(self, task: Task) -> FutureWork[str]:
        if isinstance(task, ReadAdapter):
            return named_files(task)
        raise BadRequest(f"{COMPUTES_NOTHING}, cannot do {type(task).__name__}")

    def switch(self) -> None:
        self.weights = Digest(self._staged.wait())

    def drop_staged(self) -> None:
        """Nothing is held."""

    def free_adapter(self, digest: Digest) -> None:
        """Nothing is held."""

    def digest_pages(self, pages: Int32Array) -> bytes:
        return digest(self.pages[page] for page in pages.tolist())

    def close(self) -> None:
        """Nothing to stop."""


COMPUTES_NOTHING = "the timed executor, which computes nothing"
"""Part of the fingerprint, so that such an instance never joins a fleet that computes."""
_WORD = re.compile(r"[\u0120\u2581][a-z]+")
"""A word with a space before it, as byte-level BPE (\u0120) and SentencePiece (\u2581) spell that."""
_STOP_S = 5.0


class TimedCheckpoint(TimedExecutor):
    """wake: called when a step ends, on a thread of its own: a loop that only waits for its deadline is woken up to 1 ms late.
    rank, ranks, agree: of an instance with several ranks; the pages hold this rank's heads."""

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        wake: Callable[[], None],
        progress: Callable[[str], None],
        rank: int = 0,
        ranks: int = 1,
        agree: Agree = as_offered,
    ) -> None:
        """Raises ConfigError for a checkpoint that cannot be described, and MemoryShort."""
        path = resolve_model_path(model.model, weights=False)
        shape = read_served_shape(path)
        dtype: KVDtype = "float32" if engine.dtype == "auto" else engine.dtype
        layout = layout_of(shape, engine, rank, ranks, dtype)
        given = given_kv_bytes(engine.kv_memory, "cpu", host_memory_now().total_bytes)
        context = engine.context_tokens or shape.context_tokens
        kv_bytes = auto_host_kv_bytes(engine, ranks, layout, context, progress) if given is None else given
        budget = agreed_budget(layout, kv_bytes, shape.context_tokens, engine.context_tokens, given is None, agree)
        pool_bytes = (budget.total_pages + SPARE_PAGES) * layout.page_bytes
        try:
            memory = host_memory(pool_bytes)
        except MemoryError as error:
            raise MemoryShort(f"--kv-memory: cannot allocate {pool_bytes} bytes for KV pages: {error}") from error
        region = MemoryRegion(address=memory.ctypes.data, region_bytes=pool_bytes, device="cpu")
        way = fingerprint(path, weights=False, ways=[COMPUTES_NOTHING])
        description = describe(
            model, engine, shape, layout, budget, region, digests=(way, Digest(way)), weights=Digest(way), dtype=dtype
        )
        pace = Pace(StepCost.parse(engine.step_cost), time.monotonic)
        words = plain_words(path, shape.vocab_size, shape.eos_token_ids)
        super().__init__(description, pace, words, memory.reshape(-1, layout.page_bytes))
        self._wake = wake
        self._ends: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wake_at_ends, name="step ends", daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan) -> TimedStep:
        step = super().launch(plan)
        self._ends.put(step.ends_s)
        return step

    def close(self) -> None:
        self._ends.put(None)
        self._thread.join(_STOP_S)

    def _wake_at_ends(self) -> None:
        while (ends_s := self._ends.get()) is not None:
            time.sleep(max(0.0, ends_s - time.monotonic()))
            self._wake()


def plain_words(path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> list[int]:
    """Ids of a tokenizer's lower-case words, in order: each is whole text, and none is special. Raises ConfigError."""
    ids = sorted(token for piece, token in read_vocab(path)[0].items() if _WORD.fullmatch(piece))
    words = [token for token in ids if token < vocab_size and token not in eos_token_ids]
    if not words:
        raise ConfigError(f"--executor timed: {path / TOKENIZER} has no words to make answers of")
    return words
