"""Adapters in memory: slots of fixed size beside a model's linear layers, and which slot computes which token of a step.

Owns the memory of all slots, what is in which, and the adapter of each row of the batch. Does not know files (`adapter_files`)
or how the products are computed (`Kernels.add_low_rank`). Sources: Hu et al. 2021 (LoRA), Sheng et al. 2023 (S-LoRA).

    row starts with a digest ─► slot ─► step: tokens sorted by slot, in tiles ─► each layer: its product, and B A x for the tiles

A slot is written only while no step computes with it. `unload` takes it from its rows too: a row that goes on, or starts later,
with that digest fails. So no row ever computes with another adapter than its own.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError, TandemError, Unavailable
from common.executor import RowStart
from common.ids import Digest, Int64Array
from engine.lora.adapter_files import Adapter, AdapterTarget
from engine.models.decoder import Decoder, MergedLinear, attention_linears, mlp_linears
from engine.models.linear import Int8Linear, Linear
from engine.models.shape import ModelShape, ServedShape, share_of
from engine.parallel import ALONE, Group
from engine.ports import ADAPTED_TILE, AdaptedTokens, LowRankStack, Model
from engine.rows import HostStep, Staging
from engine.torch_kernels import Kernels

_NONE, _LOST = -1, -2
"""In place of a slot: of a row without an adapter, and of one whose adapter is not here."""
_RANK_MULTIPLE = 16
_PATIENCE_S = 600.0
"""The longest wait for a step that computes with a slot."""


def tiles_of(slots: Int64Array) -> tuple[Int64Array, ...]:
    """The fields of `AdaptedTokens`, for the slot of each token, [tokens]; below 0: it has none."""
    order = np.argsort(slots, kind="stable")[np.count_nonzero(slots < 0) :]
    ordered = slots[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=_NONE))
    lengths = np.diff(firsts, append=len(ordered))
    tiles = -(-lengths // ADAPTED_TILE)
    nth = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    begins = np.repeat(firsts, tiles) + nth * ADAPTED_TILE
    counts = np.minimum(np.repeat(firsts + lengths, tiles) - begins, ADAPTED_TILE)
    return slots, order, begins, counts, ordered[begins]


@dataclass(slots=True)
class AdaptedStep:
    """The step that is computed at the moment; None: no token of it has an adapter."""

    tokens: AdaptedTokens | None = None
    wanted: AdaptedTokens | None = None
    """The same for the tokens that the last layer computes behind its attention (`Model.hidden`)."""


@dataclass(slots=True)
class AdaptedLinear:
    """A linear layer, and what the adapters of the step's tokens add to it."""

    base: Linear | Int8Linear
    stack: LowRankStack
    step: AdaptedStep
    kernels: Kernels
    is_gated: bool
    """SwiGLU is applied to the sum."""
    is_narrowed: bool
    """It computes the wanted tokens alone."""

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] → [tokens, outputs]; gated: half as many."""
        tokens = self.step.wanted if self.is_narrowed else self.step.tokens
        if tokens is None:
            return self.base(x)
        out = self.base.ungated(x)
        self.kernels.add_low_rank(out, x, self.stack, tokens)
        return self.kernels.silu_and_mul(out) if self.is_gated else out


@dataclass(slots=True)
class _TargetPlace:
    """Where a target of adapters has its A and B. rows, columns: what this rank has of B's outputs and of A's inputs."""

    stack: LowRankStack
    part: int
    rows: range
    columns: range

    @property
    def outputs(self) -> slice:
        end = self.stack.ends[self.part]
        return slice(end - len(self.rows), end)


class AdapterSlots:
    """capacity: slots. max_rank: of their adapters. Any thread may load and unload while another one computes."""

    def __init__(self, capacity: int = 0, max_rank: int = 0, stream: "torch.cuda.Stream | None" = None) -> None:
        """stream: the one that steps run on, on CUDA."""
        self.capacity, self.max_rank = capacity, max_rank
        self._stream = stream
        self.step = AdaptedStep()
        self._places: dict[str, _TargetPlace] = {}
        self._targets: dict[str, AdapterTarget] = {}
        self._ranks = torch.zeros(capacity, dtype=torch.int64)
        self._used_ranks = [0] * capacity
        """How many rows of a slot are not zeros."""
        self._changed = threading.Condition()
        self._loaded: dict[Digest, int] = {}
        self._loading: set[int] = set()
        self._computing: set[int] = set()
        """Slots of the step that is launched at the moment."""
        self.epochs: Int64Array = np.zeros(max(1, capacity), dtype=np.int64)
        """How often each slot was given up: a row whose slot has another epoch has lost its adapter."""

    def attach(
        self, model: Model, shape: ServedShape, kernels: Kernels, dtype: torch.dtype, device: torch.device, group: Group = ALONE
    ) -> None:
        """Make the slots of a model's linear layers, whose weights are loaded. dtype: of A and B; on CPU they are float32, as the
        C that multiplies them wants it. Raises ConfigError for a model that has none."""
        if not self.capacity:
            return
        if not isinstance(shape, ModelShape) or not isinstance(model, Decoder):
            raise ConfigError(
                f"--max-loaded-loras is not supported for {shape.architecture}, which transformers' implementation computes: "
                f"leave it out"
            )
        self._ranks = self._ranks.to(device)
        share, dtype = share_of(shape, group.rank, group.ranks), torch.float32 if device.type == "cpu" else dtype
        for number, layer in enumerate(model.layers):
            is_last = number == shape.layers - 1

            def adapted(base: object, merged: MergedLinear, narrowed: bool, gated: bool = False) -> AdaptedLinear:
                assert isinstance(base, Linear | Int8Linear), "FP8 is refused"
                return AdaptedLinear(base, self._stack(merged, dtype), self.step, kernels, gated, narrowed)

            qkv, output = attention_linears(shape, share, number)
            layer.qkv, layer.output = adapted(layer.qkv, qkv, False), adapted(layer.output, output, is_last)
            if len(layer.mlp) == 2:  # else experts
                gate_up, down = mlp_linears(shape, share, number)
                layer.mlp = (
                    adapted(layer.mlp[0], gate_up, is_last, gated=True),
                    adapted(layer.mlp[1], down, is_last),
                )

    def _stack(self, merged: MergedLinear, dtype: torch.dtype) -> LowRankStack:
        """Zeros, which take no memory on CPU before they are written."""
        columns = range(merged.inputs) if merged.inputs_here is None else merged.inputs_here
        rank, device = -(-self.max_rank // _RANK_MULTIPLE) * _RANK_MULTIPLE, self._ranks.device
        ends = np.cumsum([len(part.rows) for part in merged.parts]).tolist()
        a = torch.zeros((self.capacity, len(merged.parts), rank, len(columns)), dtype=dtype, device=device)
        b = torch.zeros((self.capacity, rank, ends[-1]), dtype=dtype, device=device)
        stack = LowRankStack(a, b, self._ranks, tuple(ends), torch.tensor(ends, device=device))
        for at, part in enumerate(merged.parts):
            self._places[part.name] = _TargetPlace(stack, at, part.rows, columns)
            self._targets[part.name] = AdapterTarget(merged.inputs, part.outputs, dtype)
        return stack

    @property
    def targets(self) -> Mapping[str, AdapterTarget]:
        """The linear layers that an adapter may have, by their names in the checkpoint."""
        return self._targets

    @property
    def nbytes(self) -> int:
        """The bytes of all slots, whether they are written or not."""
        stacks = {id(place.stack): place.stack for place in self._places.values()}
        return sum(stack.a.nbytes + stack.b.nbytes for stack in stacks.values())

    # --- loading -----------------------------------------------------------------------------------------------------------

    def load(self, adapter: Adapter) -> None:
        """Put it into a free slot, unless it is in one. Blocks while a step computes that began with the slot. Raises
        Unavailable."""
        slot = self._claim(adapter.digest)
        if slot is None:
            return
        try:
            self._write(slot, adapter)
        except BaseException:
            self._settle(slot)
            raise
        self._settle(slot, adapter.digest)

    def unload(self, digest: Digest) -> None:
        """Give its slot up. Idempotent. Rows that compute with it fail in their next step."""
        with self._changed:
            slot = self._loaded.pop(digest, None)
            if slot is not None:
                self.epochs[slot] += 1

    def _claim(self, digest: Digest) -> int | None:
        """A slot to write; None: the adapter is loaded."""
        with self._changed:
            if digest in self._loaded:
                return None
            taken = self._loading.union(self._loaded.values())
            slot = next((slot for slot in range(self.capacity) if slot not in taken), None)
            if slot is None:
                raise Unavailable(
                    f"all {self.capacity} places for LoRA adapters are taken: unload one, or give more --max-loaded-loras"
                )
            self._loading.add(slot)
            if not self._changed.wait_for(lambda: slot not in self._computing, _PATIENCE_S):
                self._loading.discard(slot)
                raise Unavailable("a step has not ended in time, so the adapter cannot be loaded")
            return slot

    def _settle(self, slot: int, digest: Digest | None = None) -> None:
        """The slot is written, or is free again."""
        with self._changed:
            self._loading.discard(slot)
            if digest is not None and digest not in self._loaded:
                self._loaded[digest] = slot

    @torch.inference_mode()
    def _write(self, slot: int, adapter: Adapter) -> None:
        used, self._used_ranks[slot] = self._used_ranks[slot], max(self._used_ranks[slot], adapter.rank)
        with contextlib.ExitStack() as on_device:
            writing = None
            if self._stream is not None:
                writing = torch.cuda.Stream(self._stream.device)  # type: ignore[no-untyped-call]
                writing.wait_stream(self._stream)  # steps that compute with what was in the slot
                on_device.enter_context(torch.cuda.stream(writing))
            for name, place in self._places.items():
                a, b = place.stack.a[slot, place.part], place.stack.b[slot, :, place.outputs]
                factors, rank = adapter.factors.get(name), 0
                if factors is not None:
                    rank = len(factors.a)
                    a[:rank] = factors.a[:, place.columns.start : place.columns.stop].to(a.device)
                    b[:rank] = factors.b[place.rows.start : place.rows.stop].T.to(b.device)
                a[rank:used].zero_()
                b[rank:used].zero_()
            self._ranks[slot] = adapter.rank
            if writing is not None:
                writing.synchronize()
        self._used_ranks[slot] = adapter.rank

    # --- steps -------------------------------------------------------------------------------------------------------------

    def find(self, digest: Digest) -> tuple[int, int]:
        """The slot of an adapter and its epoch. "": none."""
        if not digest:
            return _NONE, 0
        with self._changed:
            slot = self._loaded.get(digest, _LOST)
            return slot, 0 if slot == _LOST else int(self.epochs[slot])

    @contextlib.contextmanager
    def in_use(self, slots: Int64Array, epochs: Int64Array) -> Iterator[Int64Array]:
        """No slot of these is written while this lasts. epochs: those that the slots were found with. Gives the slots, with
        `_LOST` for those that were given up meanwhile."""
        with self._changed:
            there = np.where((slots >= 0) & (self.epochs[np.maximum(slots, 0)] != epochs), _LOST, slots)
            self._computing = set(there[there >= 0].tolist())
        try:
            yield there
        finally:
            with self._changed:
                self._computing = set()
                self._changed.notify_all()

    @contextlib.contextmanager
    def computing(self, tokens: AdaptedTokens | None, wanted: AdaptedTokens | None) -> Iterator[None]:
        """The model's layers add what the adapters of these tokens add."""
        self.step.tokens, self.step.wanted = tokens, wanted
        try:
            yield
        finally:
            self.step.tokens = self.step.wanted = None


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """What of a step has to do with adapters."""

    tokens: AdaptedTokens | None = None
    """None: the model alone computes the step."""
    sampled: AdaptedTokens | None = None
    """The same for the sampled tokens alone, in a step with chunks."""
    failed: Mapping[int, TandemError] = field(default_factory=dict)
    """Rows whose adapter is not here. The model alone computes them, and what they sample counts for nothing."""


NO_ADAPTERS = StepAdapters()


class AdapterRows:
    """The adapter of each row of a batch. max_rows: without the null row behind them, which has none."""

    def __init__(self, slots: AdapterSlots, max_rows: int, device: torch.device) -> None:
        self._slots = slots
        self._staging = Staging(device)
        self._device = device
        self._row_slots: Int64Array = np.full(max_rows + 1, _NONE)
        self._row_epochs: Int64Array = np.zeros(max_rows + 1, dtype=np.int64)
        self._has_some = False
        """Whether any row has, or should have, an adapter."""
        self._digests: dict[int, Digest] = {}
        self._fixed: dict[int, AdaptedTokens] = {}
        """What graphs read, by their number of rows."""

    @property
    def may_adapt(self) -> bool:
        return self._slots.capacity > 0

    @contextlib.contextmanager
    def of_step(self, host: HostStep, graph_rows: int | None) -> Iterator[StepAdapters]:
        """Their slots are not written while this lasts. graph_rows: the size of the graph that is replayed: `tokens` are then
        those of `fixed`."""
        self._start(host.plan.starts)
        rows = np.concatenate([host.arrays.token_rows, host.arrays.decode_rows]) if self._has_some else host.arrays.decode_rows
        if not self._has_some or not (self._row_slots[rows] != _NONE).any():
            yield NO_ADAPTERS
            return
        with self._slots.in_use(self._row_slots[rows], self._row_epochs[rows]) as slots:
            failed = {row: self._missing(row) for row in np.unique(rows[slots == _LOST]).tolist()}
            slots = np.maximum(slots, _NONE)
            if (slots == _NONE).all():
                yield StepAdapters(failed=failed)
            elif graph_rows is not None:
                self._fill(graph_rows, slots)
                yield StepAdapters(self._fixed[graph_rows], failed=failed)
            else:
                of_sampled = slots[host.arrays.sampled_at]
                has_sampled = bool(host.plan.chunks) and bool((of_sampled >= 0).any())
                sent = self._staging.send([*tiles_of(slots), *(tiles_of(of_sampled) if has_sampled else ())])
                yield StepAdapters(AdaptedTokens(*sent[:5]), AdaptedTokens(*sent[5:]) if has_sampled else None, failed)

    def computing(self, step: StepAdapters, *, sampled_alone: bool = False) -> contextlib.AbstractContextManager[None]:
        """See `AdapterSlots.computing`. sampled_alone: the last layer computes the sampled tokens alone."""
        if step.tokens is None:
            return contextlib.nullcontext()
        return self._slots.computing(step.tokens, step.sampled if sampled_alone else step.tokens)

    def fixed(self, graph_rows: int) -> StepAdapters:
        """What a graph of so many decode rows reads: always the same tensors. No token has an adapter before they are filled."""
        if graph_rows not in self._fixed:
            tiles = self._most_tiles(graph_rows)
            begins = np.cumsum([0, *(length + length % 2 for length in (graph_rows, graph_rows, tiles, tiles, tiles))])
            whole = torch.zeros(int(begins[-1]), dtype=torch.int64, device=self._device)
            lengths = (graph_rows, graph_rows, tiles, tiles, tiles)
            self._fixed[graph_rows] = AdaptedTokens(
                *(whole[begin : begin + length] for begin, length in zip(begins.tolist(), lengths, strict=False))
            )
            self._fixed[graph_rows].slots.fill_(_NONE)
        return StepAdapters(self._fixed[graph_rows])

    def _most_tiles(self, tokens: int) -> int:
        """The most tiles that so many tokens can take: each adapter may have one that is not full."""
        return min(tokens, tokens // ADAPTED_TILE + self._slots.capacity)

    def _fill(self, graph_rows: int, slots: Int64Array) -> None:
        tiles = self._most_tiles(graph_rows)
        lengths = (graph_rows, graph_rows, tiles, tiles, tiles)
        arrays = [np.pad(each, (0, length - len(each))) for each, length in zip(tiles_of(slots), lengths, strict=True)]
        fixed = self._fixed[graph_rows]
        places = (fixed.slots, fixed.order, fixed.begins, fixed.counts, fixed.tile_slots)
        for place, sent in zip(places, self._staging.send(arrays), strict=True):
            place.copy_(sent)

    def _start(self, starts: Sequence[RowStart]) -> None:
        if not starts or not (self._has_some or any(start.adapter for start in starts)):
            return
        for start in starts:
            self._row_slots[start.row], self._row_epochs[start.row] = self._slots.find(start.adapter)
            self._digests[start.row] = start.adapter
        self._has_some = bool((self._row_slots != _NONE).any())

    def _missing(self, row: int) -> Unavailable:
        return Unavailable(f"the LoRA adapter {self._digests[row]} is not loaded in this instance")
