"""The step runner: gives one plan after the other to the device, over one pool of pages, and waits for none.

Owns the rows, the order of a step's parts, and the graphs of the decode step. Knows the model, attention and the sampler by their
ports. Does not know checkpoints, threads, requests or messages.

    prepare (host) ─► one copy to the device ─► rows that start or grow ─┬─► eager: chunks and decode rows in one forward
                                                                         ├─► decode rows alone on CUDA: the replay of a graph
                                                                         └─► decode rows alone on CPU: that of a recording

Reports how many layers of KV a running step has written, so that pages can be pushed while it computes.

Owns the groups of layers, and on CUDA the events between them. Knows no pages or pushes.

On CPU a layer's KV is in memory as soon as `written` is called. On CUDA it is there when the stream has come that far: `written`
records an event after each group, and `wait`, called when the whole forward is in the stream, waits for them one by one.

The attention of one step as a model sees it: writes each layer's KV to its pages, reports it, and attends.

Owns the order of these three. Knows no models, rows or plans.

A step whose work has been given to the device: what is still to come of it, and how to wait for that.

Owns the events and the pinned memory through which tokens come back. Knows no threads: `wait` blocks whoever calls it.

Embeddings: what becomes of the hidden states of prompts whose rows ask for a pooling of them.

Owns the poolings, and of each row what its prompt's chunks so far have brought. Computes nothing for other rows. Does not know
models or requests.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from common.errors import TandemError
from common.executor import NO_LOGPROBS, Logprobs, Plan, RowStart, StepResult
from common.ids import Int32Array, Int64Array
from common.sampling_params import Pooling
from engine.kv_memory import KVMemory
from engine.ports import Attention, HeadNorm, Kernels, LogitsProcessor, Model, PagePlaces, Rotation, Segment, StepTokens
from engine.replay import CannotRecord, GraphMaker, Recorder, Recording, Replay, fitting
from engine.rows import HostStep, Rows, Staging, StepArrays
from engine.sampling import Drawing, Sampler, Special, Told
from engine.torch_kernels import write


class LayerProgress:
    """groups: how many groups of layers to report; each costs a turn of the instance's loop and a push. 0: report nothing.

    The last group is pushed while the last layer attends and the first token is sampled. report: called after each group with
    the number of layers that are done; None: nobody asks. between: called at every layer.
    """

    def __init__(
        self,
        device: torch.device,
        layers: int,
        groups: int,
        report: Callable[[int], None] | None,
        between: Callable[[], None] | None = None,
    ) -> None:
        self._report, self.between = report, between
        self._on_stream = device.type == "cuda"
        self._ends = {layers * group // groups for group in range(1, groups + 1)} - {0}
        self._events: list[tuple[int, torch.cuda.Event]] = []

    def written(self, layers: int) -> None:
        """Call when the KV of the first `layers` layers is written, or its writes are in the stream."""
        if self.between is not None:
            self.between()
        if self._report is None or layers not in self._ends:
            return
        if not self._on_stream:
            self._report(layers)
            return
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append((layers, event))

    def wait(self) -> None:
        """Report each group when the device has written it."""
        if self._report is not None:
            for layers, event in self._events:
                event.synchronize()
                self._report(layers)


class PagedStep:
    """Implements `StepAttention`. attention: planned for the step. pages, slots: [tokens] int64, where its tokens' KV is written.

    written: called with the number of layers that are written.
    """

    def __init__(
        self,
        memory: KVMemory,
        attention: Attention,
        kernels: Kernels,
        pages: Tensor,
        slots: Tensor,
        written: Callable[[int], None],
    ) -> None:
        self._memory = memory
        self._attention = attention
        self._kernels = kernels
        self._pages = pages
        self._slots = slots
        self._written = written

    def rotate_and_attend(self, layer: int, heads: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        query = self._kernels.rotate_and_write(heads, rotation, norm, self._places(layer))
        self._written(layer + 1)
        return self._attention.run(layer, query)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        write(self._places(layer), key, value)
        self._written(layer + 1)
        return self._attention.run(layer, query)

    def _places(self, layer: int) -> PagePlaces:
        keys, values = self._memory.layers[layer]
        return PagePlaces(keys, values, self._pages, self._slots)


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """The embeddings of the prompts that a step completes. rows: of each. values: [rows, hidden] float32 on the device."""

    rows: Sequence[int]
    values: Tensor

    def read(self, values: Tensor) -> dict[int, bytes]:
        """`StepResult.embeddings`. values: the same, on the host."""
        return {row: value.numpy().astype("<f4").tobytes() for row, value in zip(self.rows, values, strict=True)}


class Poolings:
    """The rows that ask for an embedding."""

    def __init__(self) -> None:
        self._asked: dict[int, Pooling] = {}
        self._kept: dict[int, Tensor] = {}
        """Of rows whose prompt is not complete: the sum of its hidden states so far, or its first one. [hidden] float32 each."""

    def start(self, starts: Sequence[RowStart]) -> None:
        for start in starts:
            self._asked.pop(start.row, None)
            self._kept.pop(start.row, None)
            if start.sampling.pooling is not None:
                self._asked[start.row] = start.sampling.pooling

    def asked_of(self, plan: Plan) -> bool:
        """Whether `pool` needs the hidden states of this step's chunks."""
        return any(chunk.row in self._asked for chunk in plan.chunks)

    def pool(self, plan: Plan, hidden: Tensor) -> Pooled | None:
        """Take in the chunks of a step. hidden: [tokens, hidden], normed, those of the chunks first; of a step that is not
        `asked_of`, anything."""
        rows: list[int] = []
        values: list[Tensor] = []
        end = 0
        for chunk in plan.chunks if self._asked else ():
            begin, end = end, end + len(chunk.token_ids)
            pooling = self._asked.get(chunk.row)
            if pooling is None:
                continue
            value = self._with_chunk(chunk.row, pooling, hidden[begin:end])
            if chunk.last:
                self._kept.pop(chunk.row, None)
                rows.append(chunk.row)
                values.append(value / (chunk.start + len(chunk.token_ids)) if pooling == "mean" else value)
        return Pooled(rows, torch.stack(values)) if rows else None

    def _with_chunk(self, row: int, pooling: Pooling, hidden: Tensor) -> Tensor:
        """What is known after this chunk."""
        if pooling == "last":
            return hidden[-1].float()
        kept = self._kept.get(row)
        if pooling == "cls":
            value = hidden[0].float() if kept is None else kept
        else:
            total = hidden.sum(dim=0, dtype=torch.float32)
            value = total if kept is None else kept + total
        self._kept[row] = value
        return value


class PendingStep:
    """tokens: [sampled] int64 on the device, in the order of `Plan.sampled_rows`. told, prompt_told: the log probabilities of a
    `StepResult`; None: of nothing. pooled: its embeddings; None: it has none. failed: as in a `StepResult`. Make it when
    all of the step's work has been started: its event comes behind that. A thread that waits for the event sleeps, and keeps no
    core busy."""

    def __init__(
        self,
        plan: Plan,
        tokens: Tensor,
        progress: LayerProgress,
        told: Told | None = None,
        prompt_told: Told | None = None,
        pooled: Pooled | None = None,
        failed: Mapping[int, TandemError] | None = None,
    ) -> None:
        self._plan = plan
        self._failed = failed or {}
        self._progress = progress
        self._told = None if told is None else (told, _to_host(told.packed))
        self._prompt_told = None if prompt_told is None else (prompt_told, _to_host(prompt_told.packed))
        self._pooled = None if pooled is None else (pooled, _to_host(pooled.values))
        self._tokens = _to_host(tokens.int())
        self._event: torch.cuda.Event | None = None
        if tokens.device.type != "cpu":
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def is_complete(self) -> bool:
        """Waiting takes no time. Always so on CPU."""
        return self._event is None

    def wait(self) -> StepResult:
        """Report layers as the device writes them, and return the tokens once the whole step is done: its KV is in the pages,
        also when it sampled nothing. Waits for this step alone, not for those behind it."""
        self._progress.wait()
        if self._event is not None:
            self._event.synchronize()
        tokens: Int32Array = self._tokens.numpy()
        if self._told is None and self._prompt_told is None and self._pooled is None:
            return StepResult(self._plan, tokens, failed=self._failed)
        embeddings = {} if self._pooled is None else self._pooled[0].read(self._pooled[1])
        return StepResult(self._plan, tokens, _read(self._told), _read(self._prompt_told), embeddings, self._failed)


def _to_host(tensor: Tensor) -> Tensor:
    """Its numbers are there when the step's event has passed. On CPU it is the tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _read(told: tuple[Told, Tensor] | None) -> Logprobs:
    if told is None:
        return NO_LOGPROBS
    which, packed = told
    return which.read(packed.numpy())


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
