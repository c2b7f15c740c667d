"""The toy executor: the next token depends on every byte of the row's KV, so a misplaced page changes the answer.

Owns its memory, the rows and the steps in flight. Computes no model: the KV of a slot is a hash of token, position and place, and
the next token is a digest over the slots of the row, in order, as they are in memory at that moment. numpy only. A
step completes when the caller or a clock says so.

With several ranks, each toy holds some heads of every slot. A step completes on a rank when all have written what it computes,
and the token depends on the memory of all of them, as if their parts had been gathered.
"""

import struct
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from common.errors import BadRequest, Unavailable
from common.executor import EngineDescription, Logprobs, RowStart, StepPlan, StepResult, Work, count_right
from common.ids import Digest, Int32Array, Int64Array
from common.messages import ModelIdentity, TokenLogprob
from common.messages.variants import ReadAdapter, Task, WeightsFromGroup, WeightsInMemory, WeightsOnDisk, WeightsSource
from common.pages.host_memory import digest
from common.pages.layout import KVLayout, MemoryRegion, heads_of
from common.sampling_params import Grammar, SamplingParams
from engine.grammar.grammars import anything_goes
from engine.timed import Pace

Reported = tuple[list[int], list[TokenLogprob]]
"""Rows, and the token of each whose log probability is reported."""
TOY_VOCAB = 1000
FIRST_TOKEN = 10
"""Sampled tokens are FIRST_TOKEN or more: smaller ones are free for ends of sequence."""

TOY_HEADS = 2
_PAGE_SIZE, _CONTEXT_TOKENS = 4, 256
_PARTS = 2 * 2
"""(layer, key or value). In each part and head, which is a place, a slot has four bytes: one word."""
_TOKEN, _POSITION = np.int64(0x9E3779B1), np.int64(0x85EBCA77)
_DIFFERENCE = np.uint32(0x27D4EB2F)


def _factors(kv_heads: int) -> NDArray[np.uint32]:
    """[parts, heads]. Odd factors: what differs in token or position then differs in every place."""
    return ((2 * np.arange(_PARTS * kv_heads, dtype=np.uint32) + 1) * np.uint32(0xC2B2AE3D)).reshape(_PARTS, kv_heads)


def toy_logprob(token_id: int, position: int, alternatives: int) -> TokenLogprob:
    """What the toy reports of a token at this position of prompt and answer: numbers that a float32 holds, and that belong to no
    other token or position."""
    top = tuple(((token_id + place) % TOY_VOCAB, -0.25 * place) for place in range(alternatives))
    return TokenLogprob(token_id, -position - token_id / 1024, 1 + token_id % 7, top)


class ToyStep:
    """A step in flight. Its forward runs when it completes, not before. catch_up: completes all steps whose time has come.
    is_written: its forward has run, and it waits for other ranks."""

    def __init__(self, plan: StepPlan, ends_s: float | None, catch_up: Callable[[], None]) -> None:
        self.plan = plan
        self.ends_s = ends_s
        self.is_written = False
        self.result: StepResult | None = None
        self.layers_done = self.progress = 0
        self._catch_up = catch_up

    def poll(self) -> StepResult | None:
        self._catch_up()
        return self.result


class PreparedLater:
    """Ends at a time of the clock; None: at once."""

    def __init__(self, prepared: Work, ends_s: float | None, clock: Callable[[], float]) -> None:
        self._prepared, self.ends_s, self._clock = prepared, ends_s, clock

    def poll(self) -> str | None:
        return self._prepared.poll() if self.ends_s is None or self._clock() >= self.ends_s else None


TOY_WEIGHTS, NO_DIGEST = Digest("toy"), Digest("")
STAGE_S = 0.05
TOY_ADAPTERS, TOY_ADAPTERS_PER_BATCH = 3, 2


class ToyStaging:
    """Weights or an adapter, ready at a time of the clock; None: at once. The digest of a folder is its name; one that begins
    with "bad" cannot be used."""

    def __init__(self, source: WeightsSource | ReadAdapter, ends_s: float | None, clock: Callable[[], float]) -> None:
        match source:
            case WeightsInMemory(segments=segments):
                self.name = "+".join(segments)
            case WeightsFromGroup(bucket=bucket):
                self.name = bucket
            case _:
                self.name = source.folder
        self.ends_s, self._clock = ends_s, clock

    def poll(self) -> Digest | None:
        if self.ends_s is not None and self._clock() < self.ends_s:
            return None
        if self.name.startswith("bad"):
            raise BadRequest(f"{self.name} holds no toy weights", field="model_path")
        return Digest(self.name)


class ToyAdapter(ToyStaging):
    """hold: called with the digest, once it is ready."""

    def __init__(
        self, task: ReadAdapter, ends_s: float | None, clock: Callable[[], float], hold: Callable[[Digest], object]
    ) -> None:
        super().__init__(task, ends_s, clock)
        self._hold = hold

    def poll(self) -> Digest | None:
        digest = super().poll()
        if digest is not None:
            self._hold(digest)
        return digest


def toy_salt(weights: Digest, adapter: Digest = NO_DIGEST) -> int:
    """What all KV and all tokens of a variant depend on; 0 for the weights that a toy begins with."""
    salt = 0 if weights == TOY_WEIGHTS else zlib.crc32(weights.encode()) | 1
    return salt ^ zlib.crc32(adapter.encode())


class ToyRanks:
    """The ranks of one instance, which share this. wake: called when the last one has written a step, so that those that wait
    are polled. members: their toys, in order."""

    def __init__(self, ranks: int, wake: Callable[[], None]) -> None:
        self.ranks = ranks
        self.members: list[ToyExecutor] = []
        self._wake = wake
        self._written: Counter[int] = Counter()
        """Step → how many ranks have written it."""

    def wrote(self, step: int) -> None:
        self._written[step] += 1
        if self.have_written(step):
            self._wake()

    def have_written(self, step: int) -> bool:
        """Whether every rank has written the step."""
        return self._written[step] == self.ranks

    def gather(self, pages: Int32Array, kv_heads: int) -> NDArray[np.uint32]:
        """What all ranks have in these pages: [..., token, part, head] of [...]. Where ranks hold the same head and differ, it is
        what neither of them has."""
        whole = np.zeros((*pages.shape, _PAGE_SIZE, _PARTS, kv_heads), dtype=np.uint32)
        held: set[int] = set()
        for member in self.members:
            heads = slice(member.heads.start, member.heads.stop)
            part = member.read(pages)
            whole[..., heads] = part if heads.start not in held else part + (part ^ whole[..., heads]) * _DIFFERENCE
            held.update(member.heads)
        return whole


class ToyExecutor:
    """Implements `common.executor.Executor`. Steps complete at launch.

    manual: they complete only by `complete`. pace: they complete when they are polled after the time that it says.
    prepare_s: with a pace, how long a grammar takes to be ready. It knows that of any text.
    kv_heads: of the whole model. ranks: it is the next one of these; None: it is alone. weights: what it computes with at first.
    """

    def __init__(
        self,
        total_pages: int,
        max_rows: int,
        pace: Pace | None = None,
        manual: bool = False,
        prepare_s: float = 0.0,
        kv_heads: int = TOY_HEADS,
        ranks: ToyRanks | None = None,
        weights: Digest = TOY_WEIGHTS,
    ) -> None:
        self.heads = range(kv_heads) if ranks is None else heads_of(len(ranks.members), ranks.ranks, kv_heads)
        if ranks is not None:
            ranks.members.append(self)
        self._ranks, self._kv_heads = ranks, kv_heads
        held = len(self.heads)
        self._layout = KVLayout(layers=2, kv_heads=held, head_dim=4, page_size=_PAGE_SIZE, dtype="uint8")
        self.pages: NDArray[np.uint8] = np.zeros((total_pages, 2, 2, held, _PAGE_SIZE, 4), dtype=np.uint8)
        """[pages, layer, key or value, head, token, dim]"""
        self._slots = self.pages.view(np.uint32).reshape(total_pages, _PARTS * held, _PAGE_SIZE).swapaxes(1, 2)
        """The same memory: [pages, token, place], a word for the four dims."""
        self._factors = _factors(kv_heads)[:, self.heads].ravel()
        self._page_table = np.zeros((max_rows, self._layout.pages_for(_CONTEXT_TOKENS)), dtype=np.int32)
        self._held = np.zeros(max_rows, dtype=np.int64)
        self._length = np.zeros(max_rows, dtype=np.int64)
        self._last = np.zeros(max_rows, dtype=np.int32)
        self._sampling: dict[int, SamplingParams] = {}
        self._manual = manual
        self._prepare_s = prepare_s
        self._pace = pace
        self._in_flight: deque[ToyStep] = deque()
        self.weights = weights
        self._salts = np.full(max_rows, toy_salt(weights), dtype=np.int64)
        self._adapters: list[Digest] = [NO_DIGEST] * max_rows
        self.held: set[Digest] = set()
        """Adapters. A row that begins with another one fails."""
        self._staged = ToyStaging(WeightsOnDisk(weights), None, lambda: 0.0)
        self.description = EngineDescription(
            model=ModelIdentity(
                name="toy",
                fingerprint="toy",
                architecture="toy",
                dtype="uint8",
                vocab_size=TOY_VOCAB,
                context_tokens=_CONTEXT_TOKENS,
                kv_heads=kv_heads,
            ),
            layout=self._layout,
            total_pages=total_pages,
            max_rows=max_rows,
            memory=MemoryRegion(address=self.pages.ctypes.data, region_bytes=self.pages.nbytes, device="cpu"),
            eos_token_ids=(),
            device="cpu",
            weights=weights,
            max_adapters=TOY_ADAPTERS,
            adapters_per_batch=TOY_ADAPTERS_PER_BATCH,
        )

    def launch(self, plan: StepPlan) -> ToyStep:
        step = ToyStep(plan, None if self._pace is None else self._pace.add(plan), self._catch_up)
        self._in_flight.append(step)
        if self._pace is None and not self._manual:
            self.complete()
        return step

    def complete(self, steps: int = 1) -> None:
        """Let the oldest steps in flight complete, in the order of their launch."""
        for _ in range(min(steps, len(self._in_flight))):
            step = self._in_flight[0]
            if not step.is_written:
                self._forward(step)
            if self._ranks is not None and not self._ranks.have_written(step.plan.step):
                return
            self._in_flight.popleft()
            reported = self._logprobs(step.plan, tokens := self._sample(step.plan.sampled_rows))
            drafted = self._verify(step.plan, tokens, reported) if len(step.plan.draft_rows) else step.plan.draft_tokens
            lost = [row for row in step.plan.rows.tolist() if self._adapters[row] and self._adapters[row] not in self.held]
            failed = {row: Unavailable(f"the adapter {self._adapters[row]} is not held") for row in lost}
            embeddings = self._embeddings(step.plan, tokens)
            sampled, prompts = (Logprobs.of(*each) for each in reported)
            step.result = StepResult(step.plan, tokens, sampled, prompts, embeddings, failed, drafted)

    def prepare(self, grammar: Grammar, owner: str = "") -> Work:
        prepared = anything_goes(grammar, "the toy")
        return prepared if self._pace is None else PreparedLater(prepared, self._pace.clock() + self._prepare_s, self._pace.clock)

    def stage(self, source: WeightsSource) -> ToyStaging:
        ends_s = None if self._pace is None else self._pace.clock() + STAGE_S
        self._staged = ToyStaging(source, ends_s, time.monotonic if self._pace is None else self._pace.clock)
        return self._staged

    def switch(self) -> None:
        assert not self._in_flight, "a step would compute with both"
        self.weights = Digest(self._staged.name)
        self._salts[:] = toy_salt(self.weights)

    def perform(self, task: Task) -> ToyStaging:
        if not isinstance(task, ReadAdapter):
            raise BadRequest(f"the toy cannot do {type(task).__name__}")
        ends_s = None if self._pace is None else self._pace.clock() + STAGE_S
        return ToyAdapter(task, ends_s, time.monotonic if self._pace is None else self._pace.clock, self._hold)

    def _hold(self, adapter: Digest) -> None:
        if len(self.held | {adapter}) > TOY_ADAPTERS:
            raise Unavailable(f"the toy holds {TOY_ADAPTERS} adapters")
        self.held.add(adapter)

    def free_adapter(self, digest: Digest) -> None:
        self.held.discard(digest)

    def drop_staged(self) -> None:
        pass

    def digest_pages(self, pages: Int32Array) -> bytes:
        return digest(self.pages[page] for page in pages.tolist())

    def close(self) -> None:
        self._in_flight.clear()

    def read(self, pages: Int32Array) -> NDArray[np.uint32]:
        """What lies in these pages: [..., token, part, head] of [...]."""
        return self._slots[pages].reshape(*pages.shape, _PAGE_SIZE, _PARTS, len(self.heads))

    def _catch_up(self) -> None:
        while self._in_flight and self._is_due(step := self._in_flight[0]):
            self.complete()
            if step.result is None:
                return  # other ranks have not written it

    def _is_due(self, step: ToyStep) -> bool:
        return step.is_written or (self._pace is not None and self._pace.clock() >= (step.ends_s or 0.0))

    # --- one step ----------------------------------------------------------------------------------------------------------

    def _forward(self, step: ToyStep) -> None:
        """Write the KV of the step's tokens."""
        plan = step.plan
        for start in plan.starts:
            self._start(start)
        assert (self._length[plan.verified_rows] == plan.verified_lengths).all()
        assert (self._last[plan.verified_rows] == plan.verified_tokens).all()
        grown, decode = plan.grown_rows, plan.decode_rows
        if len(grown):
            self._page_table[grown, self._held[grown]] = plan.grown_pages
            self._held[grown] += 1
        for chunk in plan.chunks:
            assert self._length[chunk.row] == chunk.start, "chunks of a prompt come in order"
            self._length[chunk.row] += len(chunk.token_ids)
            self._write(chunk.row, chunk.token_ids, np.arange(chunk.start, self._length[chunk.row]))
        if len(decode):
            self._write(decode, self._last[decode], self._length[decode])
            self._length[decode] += 1
        if len(plan.draft_rows):
            self._write(plan.draft_rows, plan.draft_tokens, self._length[plan.draft_rows] + plan.draft_offsets - 1)
        step.is_written = True
        if self._ranks is not None:
            step.ends_s = None  # the last rank to write wakes the others
            self._ranks.wrote(plan.step)

    def _verify(self, plan: StepPlan, tokens: Int32Array, reported: tuple[Reported, Reported]) -> Int32Array:
        """What is sampled behind drafts, one further each time; then the rows go on behind what was right."""
        drafted, offsets = np.zeros_like(plan.draft_tokens), plan.draft_offsets
        before, last = self._length[plan.decode_rows].copy(), self._last.copy()
        for offset in range(1, int(offsets.max()) + 1):
            rows = plan.draft_rows[offsets == offset]
            self._length[rows] += 1
            drafted[offsets == offset] = self._sample(rows)
        for row, offset, token in zip(plan.draft_rows.tolist(), offsets.tolist(), drafted.tolist(), strict=True):
            alternatives = self._sampling[row].logprobs
            if alternatives is not None:
                reported[0][0].append(row)
                at = int(before[plan.decode_rows == row][0]) + offset
                reported[0][1].append(toy_logprob(token, at, alternatives))
        right = count_right(plan, tokens, drafted)
        self._length[plan.decode_rows], self._last = before + right, last
        for row, count in zip(plan.decode_rows.tolist(), right.tolist(), strict=True):
            if count:
                self._last[row] = drafted[plan.draft_rows == row][count - 1]
        return drafted

    def _logprobs(self, plan: StepPlan, tokens: Int32Array) -> tuple[Reported, Reported]:
        """Log probabilities of the sampled tokens, and of the prompts' tokens in this step's chunks, for the rows that ask."""
        rows, told = list[int](), list[TokenLogprob]()
        for row, token in zip(plan.sampled_rows.tolist(), tokens.tolist(), strict=True):
            alternatives = self._sampling[row].logprobs
            if alternatives is not None:
                rows.append(row)
                told.append(toy_logprob(token, int(self._length[row]), alternatives))
        prompt_rows, prompt_told = list[int](), list[TokenLogprob]()
        for chunk in plan.chunks:
            alternatives = self._sampling[chunk.row].prompt_logprobs
            for position, token in enumerate(chunk.token_ids.tolist(), chunk.start):
                if alternatives is not None and position > 0:
                    prompt_rows.append(chunk.row)
                    prompt_told.append(toy_logprob(token, position, alternatives))
        return (rows, told), (prompt_rows, prompt_told)

    def _embeddings(self, plan: StepPlan, tokens: Int32Array) -> dict[int, bytes]:
        """The embeddings of complete prompts whose rows ask: the token that would follow, as the only dimension. It depends
        on all KV of a prompt."""
        sampled = zip(plan.sampled_rows.tolist(), tokens, strict=True)
        return {row: token.astype("<f4").tobytes() for row, token in sampled if self._sampling[row].pooling is not None}

    def _start(self, start: RowStart) -> None:
        row = start.row
        self._held[row] = len(start.pages)
        self._page_table[row, : len(start.pages)] = start.pages
        self._length[row] = start.length
        self._sampling[row] = start.sampling
        self._adapters[row], self._salts[row] = start.adapter, toy_salt(self.weights, start.adapter)
        if start.last_token is not None:
            self._last[row] = start.last_token

    def _write(self, rows: int | Int32Array, tokens: Int32Array, positions: Int64Array) -> None:
        """Write the KV of tokens at positions: all of one row, or each of its own row."""
        nth, slots = np.divmod(positions, self._layout.page_size)
        assert (nth < self._held[rows]).all(), "a row would write beyond its pages"
        words = (tokens * _TOKEN + positions * _POSITION + 1 + self._salts[rows]).astype(np.uint32)
        self._slots[self._page_table[rows, nth], slots] = words[:, None] * self._factors

    def _sample(self, rows: Int32Array) -> Int32Array:
        """The next token of each row: a digest of all that lies in its slots."""
        lengths = self._length[rows]
        width = self._layout.pages_for(int(lengths.max(initial=0)))
        pages = self._page_table[rows, :width]
        slots = self._slots[pages] if self._ranks is None else self._ranks.gather(pages, self._kv_heads)
        memory, slot_bytes = memoryview(slots.tobytes()), 4 * _PARTS * self._kv_heads
        row_bytes = width * self._layout.page_size * slot_bytes
        tokens = np.empty(len(rows), dtype=np.int32)
        for n, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            kv = memory[n * row_bytes : n * row_bytes + length * slot_bytes]
            tokens[n] = FIRST_TOKEN + zlib.crc32(kv, self._noise(row, length) ^ int(self._salts[row])) % (TOY_VOCAB - FIRST_TOKEN)
        self._last[rows] = tokens
        return tokens

    def _noise(self, row: int, position: int) -> int:
        """The noise of a sampled token is a function of (seed, position) alone. A greedy token has none."""
        sampling = self._sampling[row]
        return zlib.crc32(struct.pack("<qq", sampling.seed, position)) if sampling.temperature > 0 else 0
