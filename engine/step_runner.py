"""The step runner: gives one plan after the other to the device, over one pool of pages, and waits for none.

Owns the order of a step's parts, the groups of layers whose KV is reported while the step computes, the embeddings of prompts,
and the replays of the decode step. Knows the model, attention and kernels by their ports. Does not know checkpoints, threads,
requests or messages.

    prepare (host) ─► one copy to the device ─► rows that start or grow ─┬─► eager: chunks and decode rows in one forward
                                                                         ├─► decode rows alone on CUDA: the replay of a graph
                                                                         └─► decode rows alone on CPU: that of a recording
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import TandemError
from common.executor import NO_LOGPROBS, RowStart, StepPlan, StepResult, count_right
from common.ids import Int32Array, Int64Array
from common.sampling_params import Pooling
from engine.kv_memory import KVMemory
from engine.lora.adapter_slots import NO_ADAPTERS, AdapterRows, AdapterSlots, StepAdapters
from engine.ports import (
    Attention,
    HeadNorm,
    LogitsProcessor,
    Model,
    PagePlaces,
    Rotation,
    Segment,
    StepTokens,
)
from engine.replay import CallRecorder, CannotRecord, GraphMaker, Recording, Replay, fitting
from engine.rows import BatchTensors, HostStep, RowFeatures, Staging, StepArrays
from engine.sampling import Sampler, SpecialRows, TokenLogprobsOnDevice, drawn_logits
from engine.torch_kernels import Kernels, write


class LayerProgress:
    """Reports how many layers of KV a running step has written, so that pages can be pushed while it computes.

    On CPU a layer's KV is in memory as soon as `written` is called. On CUDA it is there when the stream has come that far:
    `written` records an event after each group of layers, and `wait`, called when the whole forward is in the stream, waits for
    them one by one.

    groups: how many groups of layers to report; each costs a turn of the instance's loop and a push. 0: report nothing. The last
    group is pushed while the last layer attends and the first token is sampled. report: called after each group with the number
    of layers that are done; None: report nothing. between: called at every layer.
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


@dataclass(slots=True)
class PagedStep:
    """Implements `StepAttention`: writes each layer's KV to its pages, reports it, and attends."""

    memory: KVMemory
    attention: Attention
    """Planned for the step."""
    kernels: Kernels
    pages: Tensor
    """[tokens] int64, as are the slots: where the KV of each token is written."""
    slots: Tensor
    written: Callable[[int], None]
    """Called with the number of layers that are written."""

    def rotate_and_attend(self, layer: int, heads: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        places = PagePlaces(*self.memory.layers[layer], self.pages, self.slots)
        query = self.kernels.rotate_and_write(heads, rotation, norm, places)
        self.written(layer + 1)
        return self.attention.run(layer, query)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        write(PagePlaces(*self.memory.layers[layer], self.pages, self.slots), key, value)
        self.written(layer + 1)
        return self.attention.run(layer, query)


@dataclass(frozen=True, slots=True, eq=False)
class PooledPrompts:
    """The embeddings of the prompts that a step completes."""

    rows: Sequence[int]
    packed: Tensor
    """[rows, hidden] float32 on the device."""

    def read(self, packed: NDArray[np.float32]) -> dict[int, bytes]:
        """`StepResult.embeddings`. packed: the same, on the host."""
        return {row: value.astype("<f4").tobytes() for row, value in zip(self.rows, packed, strict=True)}


class Poolings:
    """What becomes of the hidden states of prompts whose rows ask for an embedding. Computes nothing for other rows."""

    def __init__(self) -> None:
        self._poolings: dict[int, Pooling] = {}
        """By row."""
        self._pooled: dict[int, Tensor] = {}
        """The sum of the hidden states so far, or the first one, [hidden] float32, of each row whose prompt is not complete."""

    def start(self, starts: Sequence[RowStart]) -> None:
        for start in starts:
            self._poolings.pop(start.row, None)
            self._pooled.pop(start.row, None)
            if start.sampling.pooling is not None:
                self._poolings[start.row] = start.sampling.pooling

    def need_hidden(self, plan: StepPlan) -> bool:
        """Whether `pool` needs the hidden states of this step's chunks."""
        return any(chunk.row in self._poolings for chunk in plan.chunks)

    def pool(self, plan: StepPlan, hidden: Tensor) -> PooledPrompts | None:
        """Take in the chunks of a step. hidden: [tokens, hidden], normed, those of the chunks first; anything for a step that
        does not `need_hidden`."""
        rows: list[int] = []
        values: list[Tensor] = []
        end = 0
        for chunk in plan.chunks if self._poolings else ():
            begin, end = end, end + len(chunk.token_ids)
            pooling = self._poolings.get(chunk.row)
            if pooling is None:
                continue
            pooled = self._pooled.get(chunk.row)
            if pooling == "mean":
                total = hidden[begin:end].sum(dim=0, dtype=torch.float32)
                value = total if pooled is None else pooled + total
            else:
                value = hidden[begin if pooling == "cls" else end - 1].float() if pooled is None or pooling == "last" else pooled
            self._pooled[chunk.row] = value
            if chunk.last:
                del self._pooled[chunk.row]
                rows.append(chunk.row)
                values.append(value / (chunk.start + len(chunk.token_ids)) if pooling == "mean" else value)
        return PooledPrompts(rows, torch.stack(values)) if rows else None


class PendingStep:
    """A step whose work has been given to the device: what is still to come of it, and how to wait for that.

    tokens: [sampled] int64 on the device, in the order of `StepPlan.sampled_rows`, and those behind drafts. drawn: their logits,
    [sampled] float32: a row with one that is not finite fails. The other arguments are those of a `StepResult`; None: there are
    none. Make it when all of the step's work has been started: its event comes behind that. A thread that waits for the event
    sleeps, and keeps no core busy.
    """

    def __init__(
        self,
        plan: StepPlan,
        tokens: Tensor,
        drawn: Tensor,
        progress: LayerProgress,
        logprobs: TokenLogprobsOnDevice | None = None,
        prompt_logprobs: TokenLogprobsOnDevice | None = None,
        embeddings: PooledPrompts | None = None,
        failed: Mapping[int, TandemError] | None = None,
        failed_behind: Mapping[int, int] | None = None,
    ) -> None:
        self._plan, self._progress, self._failed, self._behind = plan, progress, failed or {}, failed_behind or {}
        self.drafting_s = 0.0, 0.0
        """Whoever ran a draft model before it says so."""
        self._reported, self._embeddings = (logprobs, prompt_logprobs), embeddings
        parts = (logprobs, prompt_logprobs, embeddings)
        packed = torch.stack([tokens.int(), drawn.view(torch.int32)])
        self._tensors = [packed, *(part.packed for part in parts if part is not None)]
        """What is read on the host, where it is when the event has passed."""
        self._event: torch.cuda.Event | None = None
        if tokens.device.type != "cpu":
            for at, tensor in enumerate(self._tensors):
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._tensors[at] = pinned.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def is_complete(self) -> bool:
        """Waiting takes no time. Always so on CPU."""
        return self._event is None

    def wait(self) -> StepResult:
        """Report layers as the device writes them, and return the tokens once the whole step is done: its KV is in the pages,
        also when it sampled nothing. Waits for this step alone, not for those behind it."""
        if self._event is not None:
            self._progress.wait()
            self._event.synchronize()
        numbers = iter([tensor.numpy() for tensor in self._tensors])
        tokens, bits = next(numbers)
        is_broken = ~np.isfinite(bits.view(np.float32))
        logprobs, prompt_logprobs = (NO_LOGPROBS if each is None else each.read(next(numbers)) for each in self._reported)
        embeddings = {} if self._embeddings is None else self._embeddings.read(next(numbers))
        failed, behind = self._failed, self._behind
        tokens, drafted = np.split(tokens, [len(tokens) - len(self._plan.draft_rows)])
        if is_broken.any():
            found, found_behind = _broken(self._plan, tokens, drafted, is_broken)
            failed, behind = {**found, **failed}, {**found_behind, **behind}
        for row in [row for row, embedding in embeddings.items() if not np.isfinite(np.frombuffer(embedding, "<f4")).all()]:
            failed = {row: _not_finite("its embedding"), **failed}
            del embeddings[row]
        came = self._plan, tokens, logprobs, prompt_logprobs, embeddings
        return StepResult(*came, failed, drafted, self.drafting_s, behind)


def _broken(
    plan: StepPlan, tokens: Int32Array, drafted: Int32Array, is_broken: NDArray[np.bool_]
) -> tuple[dict[int, TandemError], dict[int, int]]:
    """The rows of a step that have drawn a logit that is not finite: `StepResult.failed`, and `failed_behind`. What was sampled
    behind a draft that is wrong does not count. is_broken: of the tokens, then of those behind drafts."""
    of_tokens, of_drafted = np.split(is_broken, [len(tokens)])
    error = _not_finite("the logits of its next token")
    failed = dict.fromkeys(plan.sampled_rows[of_tokens].tolist(), error)
    behind: dict[int, int] = {}
    right = count_right(plan, tokens, drafted)
    counts = of_drafted & (plan.draft_offsets <= right[plan.draft_places])
    for row, offset in zip(plan.draft_rows[counts].tolist(), plan.draft_offsets[counts].tolist(), strict=True):
        if row not in failed:
            failed[row], behind[row] = error, offset
    return failed, behind


def _not_finite(what: str) -> TandemError:
    return TandemError(f"the model computed {what} as numbers that are not finite: its weights, dtype or adapter overflow here")


_Parts = tuple[Tensor | None, TokenLogprobsOnDevice | None, PooledPrompts | None]
"""What a forward gives: the logits, [sampled, vocab], or None where nothing is sampled; and what prompts ask for."""


class StepRunner:
    """layer_groups: in how many groups the layers of a last chunk are reported. pages_per_row: most pages of a row. processors:
    in the order in which they change logits. features: what a draft head reads of each step's rows; the model is then one that
    `engine.models.eagle3` has asked for its hidden states."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        memory: KVMemory,
        attention: Attention,
        *,
        max_rows: int,
        pages_per_row: int,
        layer_groups: int,
        vocab_size: int,
        processors: Sequence[LogitsProcessor] = (),
        adapters: AdapterSlots | None = None,
        features: RowFeatures | None = None,
    ) -> None:
        self._features = features
        self._model, self._kernels, self._memory, self._attention = model, kernels, memory, attention
        self._layer_groups, self.vocab_size = layer_groups, vocab_size
        self._device = memory.pool.device
        self.batch = batch = BatchTensors(max_rows, pages_per_row, memory.layout.page_size, memory.total_pages, self._device)
        self._decode_inputs = partial(
            kernels.decode_inputs,
            last_token=batch.last_token,
            length=batch.length,
            table=batch.table,
            page_size=batch.page_size,
            null=batch.null,
        )
        self._sampler = Sampler(kernels, processors, max_rows, self._device)
        self._poolings = Poolings()
        self._adapters = AdapterRows(adapters or AdapterSlots(), max_rows, self._device)
        self._staging = Staging(self._device)
        self._recordings: dict[tuple[int, bool], tuple[Tensor, Recording]] = {}
        """By number of rows, and whether any may have an adapter: the tensor from which the recording reads which rows they are,
        and the recording."""
        self._graph_sizes: Sequence[int] = ()
        self._graphs: dict[tuple[int, bool], tuple[Attention, Replay]] = {}
        """By number of rows, and whether any may have an adapter: what is planned before each replay, and the graph."""
        self._graph_logits = torch.empty(0, vocab_size, device=self._device)
        self._graph_drawn = torch.empty(0, device=self._device)
        """The logits of `_graph_tokens`."""
        self._graph_rows, self._graph_tokens = torch.full(
            (2, max_rows), batch.null, dtype=torch.int64, device=self._device
        ).unbind()

    @torch.inference_mode()
    def launch(
        self,
        plan: StepPlan,
        report: Callable[[int], None] | None = None,
        between: Callable[[], None] | None = None,
        *,
        rereads: bool = False,
    ) -> PendingStep:
        """Start one forward: rows that start, rows that grow, then chunks and decode rows together.

        report: called a few times during a last chunk, with the number of layers whose KV is in the pages: on CPU from here, on
        CUDA from `PendingStep.wait`. between: called at each layer of a step without a graph. None: not wanted. rereads: the
        chunks, none of them a last one, are of tokens whose KV is in the pages. It stays as it is, whoever has computed it, and
        only the features of the tokens are kept.
        """
        wanted = report if any(chunk.last for chunk in plan.chunks) else None
        progress = LayerProgress(self._device, self._memory.layout.layers, self._layer_groups, wanted, between)
        size = fitting(self._graph_sizes, plan.decoding) if not plan.chunks else None
        host = self.batch.prepare(plan, size or 0)
        recordable = plan.decoding if not plan.chunks else 0
        adapters = self._adapters.of_step(host, recordable if (recordable, True) in self._recordings else size)
        arrays = StepArrays(*self._staging.send(host.arrays))
        self.batch.apply(arrays)
        self._sampler.start(plan.starts)
        self._poolings.start(plan.starts)
        special = None if rereads else self._sampler.prepare(plan, host, behind_graph=size is not None)
        if size is not None:
            return self._replay_graph(size, host, arrays, special, adapters, progress)
        recorded = self._recordings.get((recordable, adapters.tokens is not None))
        likeliest: Tensor | None = None
        if recorded is None:
            logits, prompt_logprobs, embeddings = self._forward(host, arrays, special, adapters, progress, rereads=rereads)
        else:
            (rows, recording), lengths, prompt_logprobs, embeddings = recorded, host.decode_lengths, None, None
            rows.copy_(arrays.decode_rows)
            self._attention.plan(StepTokens((), self.batch.table, rows, torch.from_numpy(lengths), lengths))
            logits, likeliest, *states = recording.run(progress.between)
            self._keep_features(arrays.decode_rows, states)
        if logits is None:
            nothing = arrays.sampled_at, arrays.sampled_at.float()
            return PendingStep(plan, *nothing, progress, prompt_logprobs=prompt_logprobs, failed=adapters.failed)
        rows = arrays.sampled_rows
        tokens = self._sampler.draw(logits, None if host.is_greedy else self.batch.sampling(rows), special, likeliest)
        self.batch.last_token[rows] = tokens
        logprobs = self._sampler.logprobs(logits, tokens, special)
        failed = _failed(special, adapters), _failed_behind(special)
        drawn = drawn_logits(logits, tokens)
        return PendingStep(plan, tokens, drawn, progress, logprobs, prompt_logprobs, embeddings, *failed)

    @torch.inference_mode()
    def take_in(self, plan: StepPlan) -> None:
        """The rows of a plan that start or grow, and no forward."""
        host = self.batch.prepare(plan, 0)
        self.batch.apply(StepArrays(*self._staging.send(host.arrays)))
        self._sampler.start(plan.starts)

    def _forward(
        self,
        host: HostStep,
        arrays: StepArrays[Tensor],
        special: SpecialRows | None,
        adapters: StepAdapters,
        progress: LayerProgress,
        *,
        rereads: bool = False,
    ) -> _Parts:
        """Layer by layer: chunks and decode rows together. arrays: those of `host` on the device."""
        plan, batch = host.plan, self.batch
        token_ids, positions, pages, slots = self._decode_inputs(arrays.decode_rows)
        lengths = positions + 1
        if plan.chunks:
            columns = arrays.positions // batch.page_size
            token_ids = torch.cat([arrays.token_ids, token_ids])
            positions = torch.cat([arrays.positions, positions])
            pages = torch.cat([batch.table[arrays.token_rows, columns].long(), pages])
            slots = torch.cat([arrays.positions % batch.page_size, slots])
            batch.length[arrays.chunk_rows] = arrays.chunk_ends
        if rereads:
            pages, slots = torch.full_like(pages, self._memory.total_pages), torch.zeros_like(slots)
        self._attention.plan(StepTokens(_segments(plan), batch.table, arrays.decode_rows, lengths, host.decode_lengths))
        needs_all = self._poolings.need_hidden(plan) or (special is not None and len(special.prompt_at) > 0)
        wanted = None if needs_all or not plan.chunks else arrays.sampled_at
        paged = PagedStep(self._memory, self._attention, self._kernels, pages, slots, progress.written)
        with self._adapters.computing(adapters, sampled_alone=wanted is not None):
            hidden = self._model.hidden(token_ids, positions, paged, wanted)
        if self._features is not None and rereads:
            self._features.keep(arrays.token_rows, positions, self._model.tapped)
        else:
            self._keep_features(arrays.decode_rows, [states[len(arrays.token_ids) :] for states in self._model.tapped])
        prompt_logprobs = self._sampler.prompt_logprobs(hidden, self._model.logits, special, progress.between)
        embeddings = self._poolings.pool(plan, hidden)
        if len(arrays.sampled_at) == 0:
            return None, prompt_logprobs, None
        logits = self._model.logits(hidden[arrays.sampled_at] if needs_all else hidden)
        return logits, prompt_logprobs, embeddings

    def _decode_logits(self, rows: Tensor, attention: Attention, written: Callable[[int], None]) -> Tensor:
        """The logits of one decode step, from what the rows hold alone: it can be part of a graph or of a recording."""
        token_ids, positions, pages, slots = self._decode_inputs(rows)
        step = PagedStep(self._memory, attention, self._kernels, pages, slots, written)
        return self._model.logits(self._model.hidden(token_ids, positions, step))

    # --- recordings --------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def record(self, recorder: CallRecorder, progress: Callable[[str], None]) -> str | None:
        """On CPU: replay decode steps from now on, of those numbers of rows that can be recorded. Returns why none can."""
        if not self._model.capturable:
            return "the model's implementation cannot be recorded"
        row, length = self._graph_rows[:1].fill_(self.batch.null), torch.ones(1, dtype=torch.int64)
        self._attention.plan(StepTokens((), self.batch.table, row, length, length.numpy()))  # some need one to run at all
        began_s, refused = time.perf_counter(), ""
        for size in range(self.batch.null, 0, -1):  # the largest takes the memory of all
            rows = torch.zeros(size, dtype=torch.int64)
            for is_adapted in (False, True) if self._adapters.may_adapt else (False,):
                with self._adapters.computing(self._adapters.fixed(size) if is_adapted else NO_ADAPTERS):
                    try:
                        recording = recorder.record(partial(self._decode_likeliest, rows))
                    except CannotRecord as error:
                        refused = refused or str(error)
                        continue
                self._recordings[size, is_adapted] = rows, recording
        if not self._recordings:
            return refused
        sizes = f"{min(self._recordings)[0]} to {max(self._recordings)[0]} rows"
        others = f"; others run layer by layer ({refused})" if refused else ""
        progress(f"recorded decode steps of {sizes} in {time.perf_counter() - began_s:.1f} s{others}")
        return None

    def _decode_likeliest(self, rows: Tensor, written: Callable[[int], None]) -> tuple[Tensor, ...]:
        """The logits of one decode step, the likeliest token of each row, and what is kept of them: what a recording holds."""
        logits = self._decode_logits(rows, self._attention, written).float()
        return logits, self._kernels.sample(logits), *self._model.tapped

    def _keep_features(self, rows: Tensor, states: Sequence[Tensor]) -> None:
        """Those of decode rows that were computed. states: see `Model.tapped`."""
        if self._features is not None:
            self._features.keep(self.batch.owner[rows], self.batch.length[rows] - 1, states)

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
            self._graph_logits = torch.empty(sizes[-1], self.vocab_size, dtype=self._model.logits_dtype, device=self._device)
            self._graph_drawn = torch.empty(sizes[-1], device=self._device)
        for number, size in enumerate(reversed(sizes)):
            progress(f"capturing CUDA graphs: batch size {size} ({number + 1} of {len(sizes)})")
            attention = self._attention.for_graph(size)
            if attention is None:
                return "the attention backend cannot be captured"
            self._graph_rows.fill_(self.batch.null)
            attention.plan(self._graph_step(size, np.ones(size, dtype=np.int64)))
            for is_adapted in (False, True) if self._adapters.may_adapt else (False,):
                adapters = self._adapters.fixed(size) if is_adapted else NO_ADAPTERS
                with self._adapters.computing(adapters):
                    replay = maker.capture(partial(self._decode_into_graph, size, attention))
                self._graphs[size, is_adapted] = attention, replay
        self._graph_sizes = tuple(sizes)
        return None

    def forget_graphs(self) -> None:
        """No step is replayed: after a capture that failed."""
        self._graphs.clear()
        self._graph_sizes = ()

    def _graph_step(self, size: int, lengths: Int64Array) -> StepTokens:
        rows = self._graph_rows[:size]
        return StepTokens((), self.batch.table, rows, rows[:0], lengths)

    def _decode_into_graph(self, size: int, attention: Attention) -> None:
        """One decode step of `_graph_rows`, into `_graph_tokens` and `_graph_logits`: what a graph holds. The logits are for rows
        that processors change or that report log probabilities. They lie outside of the graphs' memory, where each graph would
        keep its own."""
        rows, batch = self._graph_rows[:size], self.batch
        logits = self._decode_logits(rows, attention, lambda layers: None)
        self._keep_features(rows, self._model.tapped)
        tokens = self._sampler.draw(logits, batch.sampling(rows))
        batch.last_token[rows] = tokens
        self._graph_tokens[:size] = tokens
        self._graph_drawn[:size] = drawn_logits(logits, tokens)
        self._graph_logits[:size] = logits

    def _replay_graph(
        self,
        size: int,
        host: HostStep,
        arrays: StepArrays[Tensor],
        special: SpecialRows | None,
        adapters: StepAdapters,
        progress: LayerProgress,
    ) -> PendingStep:
        """For a step of decode rows alone. Rows that a processor concerns are drawn once more behind the graph."""
        attention, replay = self._graphs[size, adapters.tokens is not None]
        self._graph_rows[:size].copy_(arrays.decode_rows)
        attention.plan(self._graph_step(size, host.decode_lengths))
        replay()
        count = len(arrays.sampled_rows)
        tokens, logits = self._graph_tokens[:count], self._graph_logits[:count]
        drawn = self._graph_drawn[:count]
        if special is not None and special.changes_logits:
            rows = arrays.sampled_rows
            self._sampler.redraw(tokens, logits, self.batch.sampling(rows), special)
            self.batch.last_token[rows] = tokens
            drawn = drawn_logits(logits, tokens)
        logprobs = self._sampler.logprobs(logits, tokens, special)
        failed, behind = _failed(special, adapters), _failed_behind(special)
        return PendingStep(host.plan, tokens, drawn, progress, logprobs, failed=failed, failed_behind=behind)


def _failed(special: SpecialRows | None, adapters: StepAdapters) -> Mapping[int, TandemError]:
    return adapters.failed if special is None else {**special.failed, **adapters.failed}


def _failed_behind(special: SpecialRows | None) -> Mapping[int, int]:
    return {} if special is None or special.drafts is None else special.drafts.failed_behind


def _segments(plan: StepPlan) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for chunk in plan.chunks:
        begin = segments[-1].end if segments else 0
        end = begin + len(chunk.token_ids)
        segments.append(Segment(begin, end, chunk.start, chunk.start + end - begin, chunk.row))
    return tuple(segments)
