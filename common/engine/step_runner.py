"""The step runner: gives one plan after the other to the device, over one pool of pages, and waits for none.

Owns the rows, the order of a step's parts, and the graphs of the decode step. Knows the model, attention and the sampler by their
ports. Does not know checkpoints, threads, requests or messages.

    prepare (host) ─► one copy to the device ─► rows that start or grow ─┬─► eager: chunks and decode rows in one forward
                                                                         ├─► decode rows alone on CUDA: the replay of a graph
                                                                         └─► decode rows alone on CPU: that of a recording
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from common.engine.attention.port import Attention, Segment, StepTokens
from common.engine.drawing import Drawing, Special
from common.engine.graphs import GraphMaker, Replay, fitting
from common.engine.kernels.port import Kernels
from common.engine.kv_memory import KVMemory
from common.engine.layer_progress import LayerProgress
from common.engine.logits.port import LogitsProcessor
from common.engine.models.port import Model
from common.engine.native.recording import CannotRecord, Recorder, Recording
from common.engine.paged_step import PagedStep
from common.engine.pending import PendingStep
from common.engine.plan import Plan
from common.engine.pooling import Pooled, Poolings
from common.engine.raw_logprobs import Told
from common.engine.rows import HostStep, Rows, StepArrays
from common.engine.sampler import Sampler
from common.engine.staging import Staging
from common.ids import Int64Array

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of tokens: (token_ids, positions, pages, slots), all [tokens] int64."""


@dataclass(frozen=True, slots=True)
class _DecodeGraph:
    """The decode step of one batch size. attention: planned before each replay."""

    attention: Attention
    replay: Replay


class StepRunner:
    """layer_groups: in how many groups the layers of a last chunk are reported. pages_per_row: most pages of a row. processors:
    in the order in which they change logits."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        memory: KVMemory,
        attention: Attention,
        sampler: Sampler,
        *,
        max_rows: int,
        pages_per_row: int,
        layer_groups: int,
        vocab_size: int,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._model, self._kernels, self._memory = model, kernels, memory
        self._attention = attention
        self._layer_groups = layer_groups
        self._device = memory.pool.device
        page_size = memory.layout.page_size
        self.rows = Rows(max_rows, pages_per_row, page_size, memory.total_pages, self._device)
        self._drawing = Drawing(sampler, processors, max_rows, self._device)
        self._poolings = Poolings()
        self._staging = Staging(self._device)
        self._recordings: dict[int, tuple[Tensor, Recording]] = {}
        self._graph_sizes: Sequence[int] = ()
        self._graphs: dict[int, _DecodeGraph] = {}
        self.vocab_size = vocab_size
        self._graph_logits = torch.empty(0, vocab_size, device=self._device)
        self._graph_rows, self._graph_tokens = torch.full(
            (2, max_rows), self.rows.null, dtype=torch.int64, device=self._device
        ).unbind()

    @torch.inference_mode()
    def launch(
        self, plan: Plan, report: Callable[[int], None] | None = None, between: Callable[[], None] | None = None
    ) -> PendingStep:
        """Start one forward: rows that start, rows that grow, then chunks and decode rows together.

        report: called a few times during a last chunk, with the number of layers whose KV is in the pages: on CPU from here, on
        CUDA from `PendingStep.wait`. between: called at each layer of a step without a graph. None: not wanted.
        """
        wanted = report if any(chunk.last for chunk in plan.chunks) else None
        progress = LayerProgress(self._device, self._memory.layout.layers, self._layer_groups, wanted, between)
        size = fitting(self._graph_sizes, len(plan.decode_rows)) if not plan.chunks else None
        host = self.rows.prepare(plan, size or 0)
        step = StepArrays(*self._staging.send(host.arrays))
        self.rows.apply(step)
        self._drawing.start(plan.starts)
        self._poolings.start(plan.starts)
        special = self._drawing.prepare(plan, host, behind_graph=size is not None)
        if size is not None:
            return self._replayed(size, plan, host, step, special, progress)
        if not plan.chunks and len(plan.decode_rows) in self._recordings:
            return self._recorded(plan, host, step, special, progress)
        return self._eager(plan, host, step, special, progress)

    # --- eager -------------------------------------------------------------------------------------------------------------

    def _eager(
        self, plan: Plan, host: HostStep, step: StepArrays[Tensor], special: Special | None, progress: LayerProgress
    ) -> PendingStep:
        rows = self.rows
        token_ids, positions, pages, slots = inputs = self._decode_inputs(step.decode_rows)
        lengths = positions + 1
        if plan.chunks:
            token_ids, positions, pages, slots = map(torch.cat, zip(self._chunk_inputs(step), inputs, strict=True))
            rows.length[step.chunk_rows] = step.chunk_ends
        self._attention.plan(StepTokens(_segments(plan), rows.table, step.decode_rows, lengths, host.decode_lengths))
        reads_all = self._poolings.asked_of(plan) or (special is not None and len(special.prompt_at) > 0)
        wanted = None if reads_all or not plan.chunks else step.sampled_at
        paged = PagedStep(self._memory, self._attention, self._kernels, pages, slots, progress.written)
        hidden = self._model.hidden(token_ids, positions, paged, wanted)
        prompt_told = self._drawing.told_of_prompts(hidden, self._model.logits, special)
        pooled = self._poolings.pool(plan, hidden)
        if len(step.sampled_at) == 0:
            return PendingStep(plan, step.sampled_at, progress, prompt_told=prompt_told)
        logits = self._model.logits(hidden[step.sampled_at] if reads_all else hidden)
        return self._drawn(plan, host, step, special, progress, logits, None, prompt_told, pooled)

    def _drawn(
        self,
        plan: Plan,
        host: HostStep,
        step: StepArrays[Tensor],
        special: Special | None,
        progress: LayerProgress,
        logits: Tensor,
        likeliest: Tensor | None = None,
        prompt_told: Told | None = None,
        pooled: Pooled | None = None,
    ) -> PendingStep:
        sampling = self.rows.sampling(step.sampled_rows[step.noisy]) if len(step.noisy) else None
        tokens = self._drawing.draw(logits, sampling, step, host.filter_width, special, likeliest)
        self.rows.last_token[step.sampled_rows] = tokens
        told = self._drawing.told(logits, tokens, special)
        return PendingStep(plan, tokens, progress, told, prompt_told, pooled, None if special is None else special.failed)

    def _decode_inputs(self, rows: Tensor) -> Inputs:
        batch = self.rows
        return self._kernels.decode_inputs(
            rows, batch.last_token, batch.length, batch.table, self._memory.layout.page_size, batch.null
        )

    def _chunk_inputs(self, step: StepArrays[Tensor]) -> Inputs:
        page_size = self._memory.layout.page_size
        pages = self.rows.table[step.token_rows, step.positions // page_size].long()
        return step.token_ids, step.positions, pages, step.positions % page_size

    # --- recordings --------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def record(self, recorder: Recorder, progress: Callable[[str], None]) -> str | None:
        """On CPU: replay decode steps from now on, of those numbers of rows that can be recorded. Returns why none can."""
        if not self._model.capturable:
            return "the model's implementation cannot be recorded"
        row, length = self._graph_rows[:1].fill_(self.rows.null), torch.ones(1, dtype=torch.int64)
        self._attention.plan(StepTokens((), self.rows.table, row, length, length.numpy()))  # some need one to be asked at all
        began_s, refused = time.perf_counter(), ""
        for size in range(self.rows.null, 0, -1):  # the largest takes the memory of all
            rows = torch.zeros(size, dtype=torch.int64)
            try:
                self._recordings[size] = rows, recorder.record(partial(self._decode_likeliest, rows, self._attention))
            except CannotRecord as error:
                refused = refused or str(error)
        if not self._recordings:
            return refused
        sizes = f"{min(self._recordings)} to {max(self._recordings)} rows"
        others = f"; others run layer by layer ({refused})" if refused else ""
        progress(f"recorded decode steps of {sizes} in {time.perf_counter() - began_s:.1f} s{others}")
        return None

    def _recorded(
        self, plan: Plan, host: HostStep, step: StepArrays[Tensor], special: Special | None, progress: LayerProgress
    ) -> PendingStep:
        """As `_eager`, for a step of decode rows alone."""
        rows, recording = self._recordings[len(plan.decode_rows)]
        rows.copy_(step.decode_rows)
        lengths = host.decode_lengths
        self._attention.plan(StepTokens((), self.rows.table, rows, torch.from_numpy(lengths), lengths))
        logits, likeliest = recording.run(progress.between)
        return self._drawn(plan, host, step, special, progress, logits, likeliest)

    def _decode_logits(self, rows: Tensor, attention: Attention, written: Callable[[int], None]) -> Tensor:
        """Of one decode step, from what the rows hold alone: it can be part of a graph or of a recording."""
        token_ids, positions, pages, slots = self._decode_inputs(rows)
        step = PagedStep(self._memory, attention, self._kernels, pages, slots, written)
        return self._model.logits(self._model.hidden(token_ids, positions, step))

    def _decode_likeliest(self, rows: Tensor, attention: Attention, written: Callable[[int], None]) -> tuple[Tensor, Tensor]:
        """As `_decode_logits`, with the likeliest token of each row."""
        logits = self._decode_logits(rows, attention, written)
        return logits, self._kernels.likeliest(logits)

    # --- graphs ------------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, maker: GraphMaker, sizes: Sequence[int], progress: Callable[[str], None]) -> str | None:
        """Capture decode steps of these batch sizes, ascending. Returns why that is not possible, or None.

        The largest comes first, so that the others find the memory that they need in the graphs' pool.
        """
        if not self._model.capturable:
            return "the model's implementation cannot be captured"
        if len(self._graph_logits) < sizes[-1]:
            assert not self._graphs, "graphs hold the address of the logits"
            self._graph_logits = torch.empty(sizes[-1], self.vocab_size, device=self._device)
        for number, size in enumerate(reversed(sizes)):
            progress(f"capturing CUDA graphs: batch size {size} ({number + 1} of {len(sizes)})")
            attention = self._attention.for_graph(size)
            if attention is None:
                return "the attention backend cannot be captured"
            self._graphs[size] = self._captured(maker, size, attention)
        self._graph_sizes = tuple(sizes)
        return None

    def forget_graphs(self) -> None:
        """No step is replayed: after a capture that failed."""
        self._graphs.clear()
        self._graph_sizes = ()

    def _captured(self, maker: GraphMaker, size: int, attention: Attention) -> _DecodeGraph:
        self._graph_rows.fill_(self.rows.null)
        attention.plan(self._graph_step(size, np.ones(size, dtype=np.int64)))
        return _DecodeGraph(attention, maker.capture(partial(self._decode, size, attention)))

    def _graph_step(self, size: int, lengths: Int64Array) -> StepTokens:
        rows = self._graph_rows[:size]
        return StepTokens((), self.rows.table, rows, rows[:0], lengths)

    def _decode(self, size: int, attention: Attention) -> None:
        """One decode step of `_graph_rows`, into `_graph_tokens` and `_graph_logits`: what a graph holds. The logits are for rows
        that are drawn again. They lie outside of the graphs' memory, where each graph would keep its own."""
        rows, batch = self._graph_rows[:size], self.rows
        logits = self._decode_logits(rows, attention, _unheard)
        tokens = self._drawing.sampler.draw(logits, batch.sampling(rows))
        batch.last_token[rows] = tokens
        self._graph_tokens[:size] = tokens
        self._graph_logits[:size] = logits

    def _replayed(
        self,
        size: int,
        plan: Plan,
        host: HostStep,
        step: StepArrays[Tensor],
        special: Special | None,
        progress: LayerProgress,
    ) -> PendingStep:
        """As `_eager`, for a step of decode rows alone. Rows that filter, and those that a processor concerns, are drawn once
        more behind the graph."""
        graph = self._graphs[size]
        self._graph_rows[:size].copy_(step.decode_rows)
        graph.attention.plan(self._graph_step(size, host.decode_lengths))
        graph.replay()
        count = len(plan.decode_rows)
        tokens, logits = self._graph_tokens[:count], self._graph_logits[:count]
        rows = step.sampled_rows
        if len(step.filtering) or special is not None:
            sampling = self.rows.sampling(rows)
            if self._drawing.redraw(tokens, logits, sampling, step, host.filter_width, special):
                self.rows.last_token[rows] = tokens
        told = self._drawing.told(logits, tokens, special)
        return PendingStep(plan, tokens, progress, told, failed=None if special is None else special.failed)


def _segments(plan: Plan) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for chunk in plan.chunks:
        begin = segments[-1].end if segments else 0
        end = begin + len(chunk.token_ids)
        segments.append(Segment(begin, end, chunk.start, chunk.start + end - begin, chunk.row))
    return tuple(segments)


def _unheard(layers: int) -> None:
    """Decode steps report no layers."""
