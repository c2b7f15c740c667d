"""What a step starts on a card, counted without one: its kernels, the bytes that each moves, its operations, and how long a card
should take. `python -m tests.engine.step_counts` writes benchmarks/predictions.json and prints the tables of
docs/measurements/engine.md.

Owns the stand-ins on which a step runs without computing anything (meta tensors, and Triton kernels and wrappers of FlashInfer
that only count), and the figures of cards. The step itself is the engine's.

A kernel is an operator of torch, a Triton kernel or one of FlashInfer's; views and allocations are none. It moves its operands
and results once; of what it finds by index (KV pages, embeddings, the experts that tokens choose), only what is found counts.
"""

import argparse
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from bench.offline import OfflineSequence, sequences_of
from bench.options import OfflineOptions
from bench.report import markdown_table
from benchmarks.engine_figures import MISSING, OFFLINE_MODEL, PREDICTIONS, WORKLOADS, Predictions, StepPrediction, group_of
from benchmarks.engine_tasks import checkpoint, decode_plans, prefill_plans
from common.config import EngineConfig, Quantization
from common.model_path import resolve_model_path
from engine.gpu import triton_kernels
from engine.gpu.flashinfer import AttentionNeeds, FlashInferAttention, decodes_on_tensor_cores
from engine.kv_budget import layout_of
from engine.kv_memory import KVMemory
from engine.models import registry
from engine.models.served_shape import read_served_shape
from engine.models.shape import ModelShape
from engine.models.weights import Loading, WeightSlots
from engine.parallel import Group
from engine.replay import fitting, ladder
from engine.step_runner import StepRunner

META = torch.device("meta")


# --- counting ----------------------------------------------------------------------------------------------------------------

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_FOUND_BY_INDEX = {"index", "index_select", "gather", "embedding"}
_PUT_BY_INDEX = {"index_put_", "index_put", "index_copy_", "scatter_"}
_OF_FILTERS = {"slice_sums", "last_places"}
"""They read what rows ask for, and the logits of those that filter: in the steps that are counted none does."""
_PRODUCTS = {"linear", "mm", "addmm", "matmul", "_scaled_mm"}


class Kernel(NamedTuple):
    """One start of a kernel, or a copy between host and card."""

    name: str
    group: str
    moved: float
    """Bytes read and written."""
    flop: float = 0.0
    needed: float = 0.0
    """Bytes of weights and KV among those moved: what no other engine could do without."""
    is_fp8: bool = False
    in_graph: bool = False


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is computed on meta tensors. Implements `GraphMaker`, with graphs that start everything once more."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []
        self.by_index: dict[int, int] = {}
        """How many bytes a step finds in those storages in which Triton kernels find things by index."""
        self.vocab_size, self.chosen = 0, 0
        """The model's, and how many experts compute a token."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            before = len(self.kernels)
            run()
            self.kernels[before:] = [kernel._replace(in_graph=True) for kernel in self.kernels[before:]]

        return replay

    def add(self, name: str, moved: float, flop: float = 0.0, needed: float = 0.0, is_fp8: bool = False) -> None:
        self.kernels.append(Kernel(name, group_of(name), moved, flop, needed, is_fp8))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        name = func.overloadpacket.__name__
        if name == "copy_" and args[1].is_meta and not args[0].is_meta:
            self.add("copy to the host", _bytes(args[1]))
            return args[0]
        out = func(*args, **named)
        given, made = (_meta_tensors(each) for each in ((args, named), out))
        storages = {_storage(tensor) for tensor in given}
        new = [tensor for tensor in made if _storage(tensor) not in storages]
        if made and name not in _ALLOCATIONS and (new or func._schema.is_mutable):
            self._count(name, args, given, new)
        return out

    def _count(self, name: str, args: Any, given: list[Tensor], new: list[Tensor]) -> None:
        moved, flop, needed = float(sum(map(_bytes, [*given, *new]))), 0.0, 0.0
        if name in _FOUND_BY_INDEX:
            moved = 2 * _bytes(new[0]) + sum(map(_bytes, given[1:]))
        elif name in _PUT_BY_INDEX:
            moved = _bytes(given[-1]) + sum(map(_bytes, given[1:]))
        elif name in _PRODUCTS:
            x, weight = args[1:3] if name == "addmm" else args[:2]
            flop, needed = 2.0 * new[0].numel() * x.shape[-1], _bytes(weight)
        elif "grouped_mm" in name:
            pairs, weights, experts = args[0], args[1], len(args[1])
            found = experts * (1 - (1 - self.chosen / experts) ** (len(pairs) / self.chosen))
            flop, needed = 2.0 * new[0].numel() * pairs.shape[-1], found * _bytes(weights[0])
            moved = _bytes(pairs) + _bytes(new[0]) + needed
        elif any(tensor.ndim == 2 and tensor.shape[-1] >= self.vocab_size > 0 for tensor in (*given, *new)):
            name = f"{name} of sampling"
        self.add(name, moved, flop, needed, is_fp8=any(tensor.dtype == torch.float8_e4m3fn for tensor in given))


def _meta_tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_flatten(values)[0] if isinstance(each, Tensor) and each.is_meta]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> int:
    """The bytes of its elements, each once: an expanded one has fewer than its shape says."""
    count = tensor.dtype.itemsize
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


@dataclass(frozen=True, slots=True)
class _CountedKernels:
    """Stands in for the module `triton_source`: any attribute is a kernel."""

    counter: _Counter

    def __getattr__(self, name: str) -> "_CountedKernel":
        return _CountedKernel(self.counter, name)


@dataclass(frozen=True, slots=True)
class _CountedKernel:
    counter: _Counter
    name: str

    def __getitem__(self, grid: object) -> "_CountedKernel":
        return self

    def __call__(self, *args: object, **_: object) -> None:
        different = {(_storage(arg), arg.storage_offset()): arg for arg in _meta_tensors(args)}
        found = self.counter.by_index
        if self.name in _OF_FILTERS:
            different = {key: arg for key, arg in different.items() if arg.ndim == 1}
        self.counter.add(self.name, sum(min(_bytes(arg), found.get(key[0], _bytes(arg))) for key, arg in different.items()))


class _CountedFlashInfer:
    """Implements `FlashInfer`."""

    def __init__(self, counter: _Counter, on_tensor_cores: bool) -> None:
        self._counter, self._on_tensor_cores = counter, on_tensor_cores

    def BatchPrefillWithPagedKVCacheWrapper(self, *_: object, **named: Any) -> "_CountedWrapper":
        return _CountedWrapper(self._counter, f"flashinfer chunks {named['backend']}", "no")

    def BatchDecodeWithPagedKVCacheWrapper(self, *_: object, **named: Any) -> "_CountedWrapper":
        always = self._on_tensor_cores and bool(named.get("use_cuda_graph"))
        return _CountedWrapper(self._counter, "flashinfer decode", "always" if always else "few")

    def fast_decode_plan(self, wrapper: "_CountedWrapper", *args: Any, global_override_indptr_cpu: Tensor, **_: object) -> None:
        wrapper.plan(global_override_indptr_cpu, *args[1:])


class _CountedWrapper:
    """merges: whether the parts of a context are merged by a kernel of their own. In a graph FlashInfer's planner always divides
    contexts for tensor cores; for CUDA cores where the rows alone would not fill the card (attention/scheduler.cuh)."""

    _FILLED = 8 * 132
    """Blocks that fill a Hopper card."""

    def __init__(self, counter: _Counter, name: str, merges: str) -> None:
        self._counter, self._name, self._merges = counter, name, merges

    def reset_workspace_buffer(self, *_: object) -> None:
        """Nothing is in it."""

    def plan(self, *args: Any, **_: object) -> None:
        """Index pointers of queries only where there are chunks, then of pages, page ids and last page lengths, then sizes."""
        *queries, indptr, _pages, last = args[: 4 if self._name.startswith("flashinfer chunks") else 3]
        page_size = args[len(queries) + 6]
        self._contexts = (indptr.diff() - 1) * page_size + last
        self._queries = queries[0].diff() if queries else torch.ones_like(self._contexts)

    def run(self, query: Tensor, views: tuple[Tensor, Tensor], out: Tensor) -> None:
        _, heads, dim = query.shape
        kv_heads, queries, contexts = views[0].shape[1], self._queries.double(), self._contexts.double()
        pairs = float((queries * contexts - queries * (queries - 1) / 2).sum())
        kv_bytes = 2 * float(contexts.sum()) * kv_heads * dim * views[0].dtype.itemsize
        self._counter.add(self._name, 2 * _bytes(query) + kv_bytes, 4 * heads * dim * pairs, kv_bytes)
        if self._merges == "always" or (self._merges == "few" and len(query) * kv_heads < self._FILLED):
            self._counter.add("flashinfer merge", 4 * _bytes(query))


class _CountedRanks(Group):
    """One of several ranks, seen alone."""

    def __init__(self, counter: _Counter, ranks: int) -> None:
        self.ranks, self._counter = ranks, counter

    def sum(self, x: Tensor) -> Tensor:
        self._counter.add("all_reduce", 2 * _bytes(x))
        return x

    def gather(self, x: Tensor) -> Tensor:
        self._counter.add("all_gather", (1 + self.ranks) * _bytes(x))
        return x.new_empty((len(x), self.ranks * x.shape[1]))


class CountedStep(NamedTuple):
    """A step that is counted, in bfloat16 where nothing else is said."""

    model: str
    kind: Literal["decode", "prefill"]
    """Prefill is that of one row in one chunk."""
    rows: int
    context: int
    quantization: Quantization = "none"
    ranks: int = 1


@torch.inference_mode()
def count(step: CountedStep) -> list[Kernel]:
    """The kernels of a step, in their order: of a decode step those of its graph, and those before and behind it."""
    counter, engine = _Counter(), EngineConfig(quantization=step.quantization, max_running=max(step.rows, 1))
    ranks = Group() if step.ranks == 1 else _CountedRanks(counter, step.ranks)
    with checkpoint(step.model, engine) as (model, _):
        shape = read_served_shape(resolve_model_path(model.model, weights=False))
    assert isinstance(shape, ModelShape)
    with (
        mock.patch.object(triton_kernels, "source", _CountedKernels(counter)),
        mock.patch.object(registry, "why_not_grouped", lambda *_: None),
        mock.patch.object(torch.cuda, "Event", mock.Mock()),
        counter,
    ):
        kernels = triton_kernels.TritonKernels()
        loading = Loading(torch.bfloat16, META, step.context, quantization=step.quantization, group=ranks)
        slots = WeightSlots(loading.dtype, META, kernels, loading.quantization)
        made = registry.make_decoder(shape, slots, loading, kernels, lambda line: None)
        layout = layout_of(shape, engine, 0, step.ranks, "bfloat16")
        pages = step.rows * layout.pages_for(step.context + 1)
        memory, heads = KVMemory(layout, pages, META), shape.heads // step.ranks
        attention = FlashInferAttention(
            AttentionNeeds(memory, heads, made.attention, loading.dtype, step.rows, layout.pages_for(step.context + 1), "fa3"),
            kernels,
            _CountedFlashInfer(counter, decodes_on_tensor_cores(heads // layout.kv_heads, memory.pool.dtype)),
        )
        steps = StepRunner(
            made,
            kernels,
            memory,
            attention,
            max_rows=step.rows,
            pages_per_row=layout.pages_for(step.context + 1),
            layer_groups=0,
            vocab_size=shape.vocab_size,
        )
        tokens = step.rows if step.kind == "decode" else step.context
        counter.by_index = {
            _storage(memory.pool): tokens * layout.kv_heads * layout.head_dim * memory.pool.dtype.itemsize,
            _storage(made._embedding): tokens * shape.hidden * 2,
        }
        counter.vocab_size, counter.chosen = shape.vocab_size // step.ranks, shape.experts.chosen if shape.experts else 0
        if step.kind == "decode":
            steps.capture(counter, [step.rows], lambda line: None)
            plans = decode_plans(layout, pages, step.rows, step.context, 2, lambda line: None)
            steps.launch(plans[0])
        else:
            plans = prefill_plans(layout, pages, shape.vocab_size, step.context, step.context)
        counter.kernels.clear()
        steps.launch(plans[-1])
    return counter.kernels


# --- predicting --------------------------------------------------------------------------------------------------------------


class Card(NamedTuple):
    """What a card does for a copy of 4 GiB and a product of matrices of 8192 x 8192."""

    copy_gb_per_s: float
    """10^9 bytes read and written."""
    bf16_tflop_per_s: float
    fp8_tflop_per_s: float
    link_gb_per_s: float
    """From one card to others, one way."""


CARDS = {
    "H100": Card(2900, 720, 1280, 450),
    "H200": Card(4300, 720, 1280, 450),
    "A100": Card(1750, 268, 268, 300),
    "L40S": Card(740, 250, 500, 28),
}
"""Copies: 86 to 90 % of the data sheets' 3,350, 4,800, 2,039 and 864 GB/s. Products: Hopper's as SemiAnalysis measured them
("MI300X vs H100 vs H200", 2024), the A100's as in the MAMF table of stas00/ml-engineering, the L40S's 69 % of its data sheet.
Links: NVLink's data sheets, and what PCIe 4.0 x16 carries."""
COLLECTIVE_S = 15e-6
"""What NCCL takes for a collective of a few KB between the cards of a host, before any byte counts."""
SMALLEST_S, GAP_S = 2e-6, 1e-6
"""The least that a kernel of a graph takes, and what passes between two that depend on each other: launch, ramp and drain."""
REACHED_BY_COPIES = {"products": 0.95, "attention": 0.90}
REACHED_BY_PRODUCTS = {"products": 0.90, "attention": 0.55}
"""Which share of the speed of a copy, and of a large product, the kernels of a group reach. Other groups: OTHERS_REACH."""
OTHERS_REACH = 0.9


def predict(step: CountedStep, kernels: Sequence[Kernel]) -> StepPrediction:
    """How long each card takes: each kernel the longer of its bytes and its operations, and never less than the smallest."""
    needed, flop = sum(kernel.needed for kernel in kernels), sum(kernel.flop for kernel in kernels)
    groups_ms, share = dict[str, dict[str, float]](), dict[str, float]()
    for name, card in CARDS.items():
        groups = defaultdict[str, float](float)
        for kernel in kernels:
            rate = card.fp8_tflop_per_s if kernel.is_fp8 else card.bf16_tflop_per_s
            bytes_s = kernel.moved / (card.copy_gb_per_s * 1e9 * REACHED_BY_COPIES.get(kernel.group, OTHERS_REACH))
            flop_s = kernel.flop / (rate * 1e12 * REACHED_BY_PRODUCTS.get(kernel.group, OTHERS_REACH))
            taken_s = max(bytes_s, flop_s, SMALLEST_S)
            if kernel.group == "ranks":
                taken_s = COLLECTIVE_S + kernel.moved / (card.link_gb_per_s * 1e9)
            groups[kernel.group] += 1e3 * taken_s
        groups["gaps"] = 1e3 * GAP_S * len(kernels)
        groups_ms[name] = {group: round(ms, 4) for group, ms in groups.items()}
        floor_s = needed / card.copy_gb_per_s / 1e9 if step.kind == "decode" else flop / card.bf16_tflop_per_s / 1e12
        share[name] = round(1e3 * floor_s / sum(groups.values()), 4)
    return StepPrediction(
        **step._asdict(),
        kernels=len(kernels),
        in_graph=sum(kernel.in_graph for kernel in kernels),
        moved_bytes=round(sum(kernel.moved for kernel in kernels)),
        needed_bytes=round(needed),
        flop=flop,
        groups_ms=groups_ms,
        share=share,
    )


_EVERY = 32
"""Steps of an offline workload of which one is counted, for all of them."""


def predict_offline(sequences: Sequence[OfflineSequence]) -> dict[str, float]:
    """Seconds for all sequences on each card: their prompts in chunks of 8,192 tokens, then steps of whoever is not at the end,
    at the mean length, in the graph that holds them."""
    sizes, seconds = ladder("auto", len(sequences)), Counter[str]()
    prompts = sum(len(each.prompt) for each in sequences)
    chunk = predict(step := CountedStep(OFFLINE_MODEL, "prefill", 1, 1024), count(step))
    seconds.update({card: chunk.ms(card) / 1e3 * prompts / 1024 for card in CARDS})
    for done in range(0, max(each.answer_tokens for each in sequences), _EVERY):
        alive = [len(each.prompt) + done for each in sequences if each.answer_tokens > done]
        rows, context = fitting(sizes, len(alive)), sum(alive) // len(alive)
        assert rows is not None
        made = predict(step := CountedStep(OFFLINE_MODEL, "decode", rows, context), count(step))
        seconds.update({card: _EVERY * made.ms(card) / 1e3 for card in CARDS})
    return {card: round(seconds[card], 3) for card in CARDS}


# --- the tables --------------------------------------------------------------------------------------------------------------

SERVED = ("Qwen3-0.6B", "Llama-3-8B", "Qwen3-14B")
ROWS, CONTEXTS, PROMPT = (1, 8, 32, 128, 256), (512, 2048, 8192), 8192
MOST_TOKENS = 2**20
"""The most of a batch: more fit no card."""
SHOWN = (("Llama-3-8B", 32), ("Llama-3-8B", 256), ("Qwen3-0.6B", 256))


def steps() -> Iterator[CountedStep]:
    """Those of the first hour on a card, then others of the table, then those of its rehearsal."""
    for model in SERVED:
        for rows, context in itertools.product(ROWS, CONTEXTS):
            if rows * context <= MOST_TOKENS:
                yield CountedStep(model, "decode", rows, context)
        yield CountedStep(model, "prefill", 1, PROMPT)
    for model, quantization, ranks in OTHERS:
        for rows in (32, 256):
            yield CountedStep(model, "decode", rows, 2048, quantization, ranks)
        yield CountedStep(model, "prefill", 1, PROMPT, quantization, ranks)
    for rows, context in itertools.product((1, 4), (32, 96)):
        yield CountedStep("tiny", "decode", rows, context)
    yield CountedStep("tiny", "prefill", 1, 96)


OTHERS: tuple[tuple[str, Quantization, int], ...] = (
    *(("Llama-3-8B", "fp8", 1), ("Llama-3-70B", "none", 8), ("Qwen3-30B-A3B", "none", 1)),
)


def counts_table(now: Predictions, before: Predictions) -> list[tuple[str, ...]]:
    """Kernels and bytes of the decode steps that are watched, before and now."""
    lines: list[tuple[str, ...]] = [("step, context of 2,048", "kernels", "of them in the graph", "GB moved", "of them needed")]
    of_before = {(each.name, each.kind, each.rows, each.context): each for each in before.steps}
    for each in now.steps:
        earlier = of_before.get((each.name, each.kind, each.rows, each.context), each)
        if each.model == "tiny" or each.context not in (2048, PROMPT) or (each.kind == "decode" and each.context == PROMPT):
            continue
        if each.rows in (1, 32, 256) and (each.kind == "prefill" or each.rows > 1):
            pairs = [
                (f"{a:.3f}", f"{b:.3f}") if isinstance(a, float) else (str(a), str(b))
                for a, b in (
                    (earlier.kernels, each.kernels),
                    (earlier.in_graph, each.in_graph),
                    (earlier.moved_bytes / 1e9, each.moved_bytes / 1e9),
                    (earlier.needed_bytes / 1e9, each.needed_bytes / 1e9),
                )
            ]
            what = f"{each.rows} rows" if each.kind == "decode" else f"prefill of {each.context:,}"
            lines.append((f"{each.name}, {what}", *(a if a == b else f"{a} → {b}" for a, b in pairs)))
    return lines


def predictions_table(now: Predictions, card: str) -> list[tuple[str, ...]]:
    groups = ("products", "attention", "norms", "sampling", "experts", "ranks", "ends", "gaps")
    lines: list[tuple[str, ...]] = [("step", *groups, "all, ms", "of the copy or product")]
    for each in now.steps:
        if each.model != "tiny" and (each.kind == "prefill" or each.context == 2048):
            what = f"{each.rows} × {each.context:,}" if each.kind == "decode" else f"prefill of {each.context:,}"
            parts = (each.groups_ms[card].get(group) for group in groups)
            cells = (MISSING if ms is None else f"{ms:.2f}" for ms in parts)
            lines.append((f"{each.name}, {what}", *cells, f"{each.ms(card):.2f}", f"{each.share[card]:.0%}"))
    return lines


def cards_table(now: Predictions) -> list[tuple[str, ...]]:
    """The goals' steps on all cards."""
    lines: list[tuple[str, ...]] = [("step", *CARDS)]
    for each in now.steps:
        is_shown = each.name == each.model and (each.model, each.rows) in {*SHOWN, ("Llama-3-8B", 1)}
        if is_shown and each.context == (2048 if each.kind == "decode" else PROMPT):
            what = f"{each.rows} × {each.context:,}" if each.kind == "decode" else f"prefill of {each.context:,}"
            lines.append((f"{each.name}, {what}, ms", *(f"{each.ms(card):.2f} ({each.share[card]:.0%})" for card in CARDS)))
    for name, seconds in now.offline_s.items():
        answers = sum(each.answer_tokens for each in offline_sequences(name))
        lines.append((f"{OFFLINE_MODEL}, {name}'s sequences, tokens/s", *(f"{answers / seconds[card]:,.0f}" for card in CARDS)))
    return lines


def offline_sequences(name: str) -> list[OfflineSequence]:
    return sequences_of(OfflineOptions(largest_id=WORKLOADS[name]), 2**31 - 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.step_counts", description=__doc__)
    parser.add_argument(
        "--before", type=Path, default=PREDICTIONS, help="predictions of another commit, to be shown beside these"
    )
    parser.add_argument("--to", type=Path, default=PREDICTIONS, help="the file to write")
    flags = parser.parse_args()
    before = flags.before.read_bytes() if flags.before.exists() else None
    now = Predictions(
        steps=[predict(step, count(step)) for step in steps()],
        offline_s={name: predict_offline(offline_sequences(name)) for name in WORKLOADS},
    )
    flags.to.write_bytes(msgspec.json.format(msgspec.json.encode(now), indent=1) + b"\n")
    earlier = now if before is None else msgspec.json.decode(before, type=Predictions)
    for table in (counts_table(now, earlier), cards_table(now), *(predictions_table(now, card) for card in ("H100",))):
        sys.stdout.write(f"{markdown_table(table)}\n\n")


if __name__ == "__main__":
    main()
