"""Adapters in memory: those that the host holds, and slots beside a model's linear layers for those that a step computes with.

Owns which adapters are held, the memory of all slots and what is in which, and the adapter of each row of the batch. Does not
know files (`adapter_files`) or how products are computed (`Kernels.add_low_rank`). Sources: Hu et al. 2021 (LoRA), Sheng et al.
2023 (S-LoRA).

    held ─► step: the adapters of its rows get slots ─► tokens sorted by slot, in tiles ─► each layer: its product, and B A x

The thread that launches steps fills the slots, before the step and behind those that it launched before. So no step computes
with a slot that is being written. The least recently needed adapter of those that the step does not need gives up its slot.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError, TandemError, Unavailable
from common.ids import Digest, Int64Array
from engine.lora.adapter_files import Adapter, AdapterTarget, read_adapter
from engine.models.decoder import Decoder, MergedLinear, attention_linears, mlp_linears
from engine.models.linear import Int8Linear, Linear
from engine.models.shape import ModelShape, ServedShape, share_of
from engine.parallel import ALONE, Group
from engine.ports import ADAPTED_TILE, AdaptedTokens, LowRankStack, Model
from engine.rows import HostStep, Staging
from engine.torch_kernels import Kernels

_NONE = -1
"""In place of a slot: of a token without an adapter."""
_RANK_MULTIPLE = 16


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


class _TargetPlace(NamedTuple):
    """Where a linear layer has its A and B in all slots."""

    a: Tensor
    """[slots, rank, columns]."""
    b: Tensor
    """[slots, rank, rows]."""


class AdapterSlots:
    """slots: as many adapters as a step can compute with. most_held: as many as are held. max_rank: of each. One thread holds and
    frees them, and another one takes slots."""

    def __init__(self, slots: int = 0, most_held: int = 0, max_rank: int = 0) -> None:
        self.count, self.most_held, self.max_rank = slots, most_held, max_rank
        self.step = AdaptedStep()
        self._places: dict[str, _TargetPlace] = {}
        self.targets: dict[str, AdapterTarget] = {}
        """The linear layers that an adapter may have, by their names in the checkpoint."""
        self._ranks = torch.zeros(slots, dtype=torch.int64)
        self._used_ranks = [0] * slots
        """How many rows of a slot are not zeros."""
        self._held: dict[Digest, Adapter] = {}
        self._slots: dict[Digest, int] = {}
        """What is in slots. Those that were needed last are the last ones."""

    def attach(
        self, model: Model, shape: ServedShape, kernels: Kernels, dtype: torch.dtype, device: torch.device, group: Group = ALONE
    ) -> None:
        """Make the slots of a model's linear layers, whose weights are loaded. dtype: of A and B; on CPU they are float32, as the
        C that multiplies them wants it. Raises ConfigError for a model that has none."""
        if not self.count:
            return
        if not isinstance(shape, ModelShape) or not isinstance(model, Decoder):
            raise ConfigError(
                f"LoRA is not supported for {shape.architecture}, which transformers' implementation computes: "
                "leave out --lora and --max-loaded-loras"
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
        a = torch.zeros((self.count, len(merged.parts), rank, len(columns)), dtype=dtype, device=device)
        b = torch.zeros((self.count, rank, ends[-1]), dtype=dtype, device=device)
        for at, part in enumerate(merged.parts):
            self._places[part.name] = _TargetPlace(a[:, at], b[:, :, ends[at] - len(part.rows) : ends[at]])
            self.targets[part.name] = AdapterTarget(merged.inputs, part.outputs, columns, part.rows, dtype)
        return LowRankStack(a, b, self._ranks, tuple(ends), torch.tensor(ends, device=device))

    @property
    def host_bytes(self) -> int:
        """The most memory of the host that slots and held adapters take, whether they are there yet or not."""
        one = sum(place.a[0].nbytes + place.b[0].nbytes for place in self._places.values()) if self.count else 0
        return one * (self.most_held + (self.count if self._ranks.device.type == "cpu" else 0))

    # --- held ----------------------------------------------------------------------------------------------------------------

    def read(self, folder: Path) -> Adapter:
        """The adapter in a folder, to be held. From any thread. Raises ConfigError."""
        if not self.count:
            raise ConfigError("this instance has no room for LoRA adapters: start it with --max-loaded-loras")
        adapter = read_adapter(folder, self.targets, self.max_rank)
        return adapter.pinned() if self._ranks.device.type == "cuda" else adapter

    def hold(self, adapter: Adapter) -> Digest:
        """Rows may start with it from now on. Idempotent. Raises Unavailable when as many others are held as may be."""
        if adapter.digest not in self._held and len(self._held) >= self.most_held:
            raise Unavailable(f"this instance holds {self.most_held} LoRA adapters: unload one, or give more --max-loaded-loras")
        self._held[adapter.digest] = adapter
        return adapter.digest

    def free(self, digest: Digest) -> None:
        """Forget an adapter. Idempotent. A row that goes on with it nevertheless fails."""
        self._held.pop(digest, None)

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def take(self, digests: Iterable[Digest]) -> dict[Digest, int]:
        """The slots of the first of these adapters that are held, as many as there are slots. Those that have none yet are copied
        into theirs; on CUDA behind the steps that were launched before, while the host goes on."""
        held = [adapter for digest in digests if (adapter := self._held.get(digest)) is not None][: self.count]
        needed = {adapter.digest for adapter in held}
        for adapter in held:
            slot = self._slots.pop(adapter.digest, None)
            if slot is None:
                free = set(range(self.count)).difference(self._slots.values())
                others = (digest for digest in self._slots if digest not in needed)
                slot = min(free) if free else self._slots.pop(next(others))
                self._write(slot, adapter)
            self._slots[adapter.digest] = slot
        return {adapter.digest: self._slots[adapter.digest] for adapter in held}

    def _write(self, slot: int, adapter: Adapter) -> None:
        used, self._used_ranks[slot] = self._used_ranks[slot], adapter.rank
        for name, place in self._places.items():
            factors, rank = adapter.factors.get(name), 0
            if factors is not None:
                rank = len(factors.a)
                place.a[slot, :rank].copy_(factors.a, non_blocking=True)
                place.b[slot, :rank].copy_(factors.b, non_blocking=True)
            if rank < used:
                place.a[slot, rank:used].zero_()
                place.b[slot, rank:used].zero_()
        self._ranks[slot].fill_(adapter.rank)  # to assign it would be a copy for which the host waits

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
    """Rows that cannot have their adapter. The model alone computes them, and what they sample counts for nothing."""


NO_ADAPTERS = StepAdapters()


class AdapterRows:
    """The adapter of each row of a batch. max_rows: without the null row behind them, which has none."""

    def __init__(self, slots: AdapterSlots, max_rows: int, device: torch.device) -> None:
        self._slots = slots
        self._staging = Staging(device)
        self._device = device
        self._adapters: dict[int, Digest] = {}
        """The adapter of each row that has one."""
        self._lost: dict[int, Unavailable] = {}
        """The rows that could not have theirs in a step, and so have no KV that counts until they start anew."""
        self._row_slots: Int64Array = np.full(max_rows + 1, _NONE)
        self._fixed: dict[int, AdaptedTokens] = {}
        """What graphs read, by their number of rows."""

    @property
    def may_adapt(self) -> bool:
        return self._slots.count > 0

    def of_step(self, host: HostStep, graph_rows: int | None) -> StepAdapters:
        """For the step that is launched next. graph_rows: the size of the graph that is replayed: `tokens` are then those of
        `fixed`."""
        for start in host.plan.starts:
            self._lost.pop(start.row, None)
            self._adapters.pop(start.row, None)
            self._row_slots[start.row] = _NONE
            if start.adapter:
                self._adapters[start.row] = start.adapter
        adapted = [row for row in host.plan.rows.tolist() if row in self._adapters] if self._adapters else ()
        if not adapted:
            return NO_ADAPTERS
        self._find_slots(adapted)
        failed = {row: self._lost[row] for row in adapted if row in self._lost}
        slots = self._row_slots[np.concatenate([host.arrays.token_rows, host.decode_owners])]
        if len(failed) == len(adapted):
            return StepAdapters(failed=failed)
        if graph_rows is not None:
            self._fill(graph_rows, slots)
            return StepAdapters(self._fixed[graph_rows], failed=failed)
        of_sampled = slots[host.arrays.sampled_at]
        has_sampled = bool(host.plan.chunks) and bool((of_sampled >= 0).any())
        sent = self._staging.send([*tiles_of(slots), *(tiles_of(of_sampled) if has_sampled else ())])
        return StepAdapters(AdaptedTokens(*sent[:5]), AdaptedTokens(*sent[5:]) if has_sampled else None, failed)

    def _find_slots(self, adapted: Iterable[int]) -> None:
        """Find the slots of rows that have adapters, and note which have lost theirs."""
        wanted = {row: self._adapters[row] for row in adapted if row not in self._lost}
        found = self._slots.take(dict.fromkeys(wanted.values()))
        for row, digest in wanted.items():
            self._row_slots[row] = found.get(digest, _NONE)
            if digest not in found:
                why = f"is not held, or the step has more than {self._slots.count} others"
                self._lost[row] = Unavailable(f"row {row} cannot have the LoRA adapter {digest}, which {why}")

    def computing(self, step: StepAdapters, *, sampled_alone: bool = False) -> contextlib.AbstractContextManager[None]:
        """See `AdapterSlots.computing`. sampled_alone: the last layer computes the sampled tokens alone."""
        if step.tokens is None:
            return contextlib.nullcontext()
        return self._slots.computing(step.tokens, step.sampled if sampled_alone else step.tokens)

    def fixed(self, graph_rows: int) -> StepAdapters:
        """What a graph of so many decode rows reads: always the same tensors. No token has an adapter before they are filled."""
        if graph_rows not in self._fixed:
            lengths = self._lengths(graph_rows)
            begins = np.cumsum([0, *(length + length % 2 for length in lengths)])
            whole = torch.zeros(int(begins[-1]), dtype=torch.int64, device=self._device)
            self._fixed[graph_rows] = AdaptedTokens(
                *(whole[begin : begin + length] for begin, length in zip(begins.tolist(), lengths, strict=False))
            )
            self._fixed[graph_rows].slots.fill_(_NONE)
        return StepAdapters(self._fixed[graph_rows])

    def _lengths(self, tokens: int) -> tuple[int, ...]:
        """Those of all parts of `AdaptedTokens`, with the most tiles that so many tokens can take: each adapter may have one that
        is not full."""
        tiles = min(tokens, tokens // ADAPTED_TILE + self._slots.count)
        return tokens, tokens, tiles, tiles, tiles

    def _fill(self, graph_rows: int, slots: Int64Array) -> None:
        parts = zip(tiles_of(slots), self._lengths(graph_rows), strict=True)
        arrays, fixed = [np.pad(each, (0, length - len(each))) for each, length in parts], self._fixed[graph_rows]
        places = (fixed.slots, fixed.order, fixed.begins, fixed.counts, fixed.tile_slots)
        for place, sent in zip(places, self._staging.send(arrays), strict=True):
            place.copy_(sent)
