"""Plans for an engine without a scheduler: rows that start, decode and end, with pages that they get as they grow.

No plan depends on an answer, so all of them can be made before the first one runs.

Owns which pages a row has. Knows plans; does not know executors or time.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.executor import Chunk, EngineDescription, RowStart, StepPlan
from common.ids import Int32Array, Int64Array
from common.sampling_params import SamplingParams

GREEDY = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


class PlannedBatch:
    """The rows of an engine. A page that a row gave up may be given out in the next plan, because plans run in order."""

    def __init__(self, engine: EngineDescription, sampling: SamplingParams = GREEDY) -> None:
        rows, self._page_size = engine.max_rows, engine.layout.page_size
        self._layout, self._sampling = engine.layout, sampling
        self._free = np.random.default_rng(7).permutation(engine.total_pages).astype(np.int32)
        self._table = np.zeros((rows, engine.layout.pages_for(engine.model.context_tokens)), dtype=np.int32)
        self.free_pages = engine.total_pages
        self.length, self.left, self._held = np.zeros((3, rows), dtype=np.int64)
        self._step = 0

    def start(self, row: int, tokens: int, length: int = 0, last_token: int | None = None) -> RowStart:
        """The row starts with pages for so many tokens. length, last_token: as of `RowStart`."""
        count = self._layout.pages_for(tokens)
        pages = self._take(count)
        self._table[row, :count] = pages
        self._held[row], self.length[row] = count, length
        return RowStart(row, pages, self._sampling, length=length, last_token=last_token)

    def plan(self, starts: Sequence[RowStart] = (), chunks: Sequence[Chunk] = ()) -> StepPlan:
        """The next step: a token for each row that has some left, beside these chunks. A row that ends gives up its pages."""
        rows = np.flatnonzero(self.left > 0)
        short = rows[self.length[rows] == self._held[rows] * self._page_size]
        grown = self._take(len(short))
        self._table[short, self._held[short]] = grown
        self._held[short] += 1
        self.length[rows] += 1
        self.left[rows] -= 1
        for row in rows[self.left[rows] == 0].tolist():
            self.end(row)
        self._step += 1
        return StepPlan(self._step, tuple(starts), tuple(chunks), rows.astype(np.int32), short.astype(np.int32), grown)

    def end(self, row: int) -> None:
        """The row gives up its pages behind the next plan."""
        count = int(self._held[row])
        self._free[self.free_pages : self.free_pages + count] = self._table[row, :count]
        self.free_pages += count
        self._held[row] = self.left[row] = 0

    def _take(self, count: int) -> Int32Array:
        assert count <= self.free_pages, "the planner gives out no more pages than there are"
        self.free_pages -= count
        return self._free[self.free_pages : self.free_pages + count].copy()


class SequencePlanner:
    """Runs sequences through a batch: prompts in chunks beside the decode steps of others, first come, first served. A sequence
    starts when a row is free and the pages of its whole length are."""

    def __init__(
        self,
        engine: EngineDescription,
        chunk_tokens: int,
        prompts: Int64Array,
        answers: Int64Array,
        sampling: SamplingParams = GREEDY,
    ) -> None:
        """prompts, answers: how many tokens each sequence has of them, [sequences]. A prompt's are random."""
        self._batch = PlannedBatch(engine, sampling)
        self._engine, self._chunk_tokens = engine, chunk_tokens
        random = np.random.default_rng(11)
        self.prompts = [random.integers(0, engine.model.vocab_size, count).astype(np.int32) for count in prompts]
        self._answers = answers.tolist()
        self._next = 0
        self._computing: dict[int, tuple[int, int]] = {}
        """row → (sequence, tokens of its prompt that are planned)"""
        self._owed = np.zeros(engine.max_rows, dtype=np.int64)
        """Pages that a row may still grow by."""

    def next(self) -> StepPlan | None:
        """None when every token of every sequence is planned."""
        batch = self._batch
        running = (batch.left > 0) | self._is_computing()
        self._owed[~running] = 0
        starts = self._admit(running)
        chunks, ready = self._chunks()
        if not starts and not chunks and not (batch.left > 0).any():
            return None
        plan = batch.plan(starts, chunks)
        self._owed[plan.grown_rows] -= 1
        for row, sequence in ready:  # they decode from the next step on: the last chunk samples the first token
            batch.length[row], batch.left[row] = len(self.prompts[sequence]), self._answers[sequence] - 1
            if batch.left[row] == 0:
                batch.end(row)
        return plan

    def _is_computing(self) -> NDArray[np.bool_]:
        mask = np.zeros(self._engine.max_rows, dtype=np.bool_)
        mask[list(self._computing)] = True
        return mask

    def _admit(self, running: NDArray[np.bool_]) -> list[RowStart]:
        layout, starts = self._engine.layout, []
        for row in np.flatnonzero(~running).tolist():
            if self._next == len(self.prompts):
                break
            tokens = len(self.prompts[self._next])
            whole = layout.pages_for(tokens + self._answers[self._next] - 1)
            if whole > self._batch.free_pages - int(self._owed.sum()):
                break
            starts.append(self._batch.start(row, tokens))
            self._owed[row] = whole - layout.pages_for(tokens)
            self._computing[row] = (self._next, 0)
            self._next += 1
        return starts

    def _chunks(self) -> tuple[list[Chunk], list[tuple[int, int]]]:
        """The chunks of the next step, and the rows with their sequences whose prompt ends there."""
        room, chunks, ready = self._chunk_tokens, list[Chunk](), list[tuple[int, int]]()
        for row, (sequence, planned) in list(self._computing.items()):
            if room == 0:
                break
            prompt = self.prompts[sequence]
            part = prompt[planned : planned + room]
            room -= len(part)
            last = planned + len(part) == len(prompt)
            chunks.append(Chunk(row, planned, part, last=last))
            if last:
                del self._computing[row]
                ready.append((row, sequence))
            else:
                self._computing[row] = (sequence, planned + len(part))
        return chunks, ready
