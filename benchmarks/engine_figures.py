"""What `launch bench engine` finds: its figures and how a table shows them, the goals, and what was predicted without a card.

Owns which prediction belongs to which figure, and the rules for what to look at first. Measures nothing.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, TypeAlias, TypeVar

import msgspec

from bench.report import Column, Goal, Spread, table_of

MISSING = "–"
GOAL_STEP, GOAL_PREFILL = ("Llama-3-8B", 32, 2048), ("Llama-3-8B", 8192)
LEAST_MEMORY_SHARE, LEAST_MATMUL_SHARE = 0.85, 0.7
STEP_RULE = "Llama-3-8B: a decode step of 32 rows and 2048 tokens at 85 % of the speed of a copy or more"
PREFILL_RULE = "Llama-3-8B: prefill of 8192 tokens at 70 % of the speed of a product of matrices or more, with the best chunk"
CONFIRMED = 0.1
"""A prediction is confirmed if what is measured differs from it by no more than this share."""
WORKLOADS = {"nano-vllm": 10_000, "mini-sglang": 151_642}
"""Whose sequences `offline` answers, and the largest token id in their prompts: both draw 256 prompts and answers of 100 to 1,024
tokens with seed 0, from other ids, so their lengths differ. Sources: `bench.py` of GeeeekExplorer/nano-vllm, and
`benchmark/offline/bench.py` of sgl-project/mini-sglang."""
OFFLINE_MODEL = "Qwen3-0.6B"


class Ceilings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the device can do: copies, and products of matrices."""

    device: str
    copy_gb_per_s: Spread
    """Bytes read and written, 10^9."""
    matmul: str
    """Such as "8192^3 bfloat16"."""
    matmul_tflop_per_s: Spread


def copy_share(ceilings: Ceilings | None, read_bytes: float, seconds: float) -> float | None:
    """The part of the time that reading so much at the speed of a copy takes; None: the ceilings are not known."""
    return None if ceilings is None else read_bytes / (ceilings.copy_gb_per_s.median * 1e9) / seconds


def product_share(ceilings: Ceilings | None, flop: float, seconds: float) -> float | None:
    """The same of so many operations at the speed of a product of matrices."""
    return None if ceilings is None else flop / (ceilings.matmul_tflop_per_s.median * 1e12) / seconds


class EngineFigure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A figure that is a line of a table."""

    title: ClassVar[str]


class Fact(EngineFigure, frozen=True, kw_only=True):
    """Something about the machine."""

    title = "Environment"
    name: Annotated[str, Column("what")]
    text: Annotated[str, Column("is")]


class Check(EngineFigure, frozen=True, kw_only=True):
    """Tests that ran on the device."""

    title = "Correctness"
    name: Annotated[str, Column("tests")]
    passed: Annotated[int, Column("passed")]
    skipped: Annotated[int, Column("skipped")]
    failed: Annotated[int, Column("failed")]
    first: Annotated[str, Column("the first that failed")]
    """Empty: all passed."""


class Started(EngineFigure, frozen=True, kw_only=True):
    """A model runner was started."""

    title = "Build"
    model: Annotated[str, Column("model")]
    dtype: Annotated[str, Column("dtype")]
    seconds: Annotated[float, Column("s", ".1f")]
    stages: Annotated[str, Column("of which, s")]
    """The longest of what the runner says that it does: FlashInfer's modules are `attention`."""
    weight_bytes: Annotated[int, Column("weights read, GB", ".2f", 1e-9)]
    """What a decode step reads."""
    pool_bytes: Annotated[int, Column("pages, GB", ".2f", 1e-9)]
    context_tokens: Annotated[int, Column("context")]


class DecodeStep(EngineFigure, frozen=True, kw_only=True):
    """A decode step of `batch` rows with about `context` tokens each."""

    title = "Decode steps"
    model: Annotated[str, Column("model")]
    context: Annotated[int, Column("context")]
    batch: Annotated[int, Column("batch")]
    graphs: Annotated[str, Column("graphs")]
    """on or off."""
    step_ms: Annotated[Spread, Column("ms", ".2f")]
    """From the end of one step to the end of the next, two in flight."""
    device_ms: Annotated[Spread | None, Column("device, ms", ".2f")]
    """The time of the device alone; None on CPU."""
    launch_ms: Annotated[Spread, Column("launch, ms", ".2f")]
    """Until the host has given the step to the device."""
    idle: Annotated[float | None, Column("idle", ".0%")]
    """The part of a step's time in which the device has nothing to do."""
    read_bytes: Annotated[int, Column("GB read", ".2f", 1e-9)]
    """Weights and KV."""
    share: Annotated[float | None, Column("of the copy", ".1%")]
    """The part of a step's time that reading its bytes at the speed of a copy takes."""
    groups_ms: dict[str, float] = {}
    """The time of its kernels, by what they are for, as torch's profiler tells it; empty: not profiled."""


class Prefill(EngineFigure, frozen=True, kw_only=True):
    """A prompt, chunk after chunk."""

    title = "Prefill"
    model: Annotated[str, Column("model")]
    tokens: Annotated[int, Column("tokens")]
    chunk_tokens: Annotated[int, Column("chunk")]
    seconds: Annotated[Spread, Column("ms", ".1f", 1e3)]
    tokens_per_s: Annotated[float, Column("tokens/s", ".0f")]
    flop: Annotated[float, Column("TFLOP", ".3g", 1e-12)]
    """The operations of all products of matrices, attention's included."""
    share: Annotated[float | None, Column("of the product", ".1%")]
    """The part of its time that so many operations take at the speed of a product of matrices."""


class Offline(EngineFigure, frozen=True, kw_only=True):
    """All sequences of a workload, answered by one engine without HTTP."""

    title = "Offline"
    workload: Annotated[str, Column("sequences of")]
    model: Annotated[str, Column("model")]
    answer_tokens: Annotated[int, Column("answer tokens")]
    seconds: Annotated[float, Column("s", ".2f")]
    tokens_per_s: Annotated[float, Column("output tokens/s", ",.0f")]


class HostPush(EngineFigure, frozen=True, kw_only=True):
    """Pages pushed from one process to another on the same host, or copied there."""

    title = "Pushes between two processes of this host"
    way: Annotated[str, Column("way")]
    page_bytes: Annotated[int, Column("page, bytes")]
    pages: Annotated[int, Column("pages")]
    arrangement: Annotated[str, Column("arranged")]
    gb_per_s: Annotated[Spread, Column("GB/s", ".3g")]


TABLES: tuple[type[EngineFigure], ...] = (*(Fact, Check, Started, HostPush, Offline, Prefill, DecodeStep),)
"""What matters most comes last, because the end of an output is what one sees."""
Figure: TypeAlias = Ceilings | Fact | Check | Started | HostPush | Offline | Prefill | DecodeStep
TitledTable: TypeAlias = tuple[str, list[tuple[str, ...]]]
F = TypeVar("F")


class TaskRun(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a task."""

    label: str
    seconds: float
    failure: str = ""
    """Why it did not come to its end; empty if it did."""


def _of(kind: type[F], figures: Sequence[Figure]) -> list[F]:
    return [figure for figure in figures if isinstance(figure, kind)]


def ceilings_of(figures: Sequence[Figure]) -> Ceilings | None:
    return next(iter(_of(Ceilings, figures)), None)


def judge(figures: Sequence[Figure]) -> Iterator[Goal]:
    """They are goals of one Hopper card."""
    steps = [step.share for step in _of(DecodeStep, figures) if (step.model, step.batch, step.context) == GOAL_STEP]
    fills = [fill.share for fill in _of(Prefill, figures) if (fill.model, fill.tokens) == GOAL_PREFILL]
    for rule, least, shares in ((STEP_RULE, LEAST_MEMORY_SHARE, steps), (PREFILL_RULE, LEAST_MATMUL_SHARE, fills)):
        yield Goal.of(rule, max((share for share in shares if share is not None), default=None), ".1%", least=least)


def tables(figures: Sequence[Figure]) -> Iterator[TitledTable]:
    """Those that have figures, each with its title and its heads."""
    for kind in TABLES:
        found = _of(kind, figures)
        if found:
            yield kind.title, table_of(kind, found)


# --- what was predicted, and what to look at ---------------------------------------------------------------------------------

GROUPS = {
    "products": r"linear|addmm|\bmm\b|_scaled_mm|grouped_mm|gemm|nvjet|cutlass|xmma|matmul",
    "attention": r"flashinfer|Paged|MergeStates|attention",
    "norms": r"norm|silu|rotate|rotation|quantise|\b(cos|sin)\b",
    "sampling": r"slice|last_places|sampl|argmax|gumbel|threshold|filter",
    "experts": r"softmax|topk|sort|searchsorted|rout|expert|combine",
    "ranks": r"all_?reduce|all_?gather|nccl",
}
"""What a kernel is for, by its name in a count or a profile. What fits none is among the ends of a step: inputs, copies, rows."""
KNOBS = {
    "products": "the clocks and the power limit under load (nvidia-smi -q -d CLOCK,POWER), then which cuBLAS kernel runs (ncu)",
    "attention": "FlashInfer's kernel in ncu, as a share of the copy's speed; --page-size, --kv-dtype; whether FA2 or FA3 ran",
    "norms": "the Triton kernels in ncu, as a share of the copy's speed; engine/gpu/triton_kernels.py has their block sizes",
    "sampling": "how often the logits are read: the kernels behind the output head in nsys",
    "experts": "how many kernels route the tokens of a layer (nsys), and the tiles of grouped_mm for few rows of an expert",
    "ranks": "the links in the environment's table, and what NCCL says with NCCL_DEBUG=INFO",
    "ends": "copies and small operators before and behind the layers, in nsys",
    "gaps": "whether graphs are on, and what lies between kernels in nsys; the launch column beside the step's own time",
}
PREDICTIONS = Path(__file__).with_name("predictions.json")
"""What `python -m tests.engine.step_counts` has counted."""


def group_of(kernel: str) -> str:
    return next((group for group, names in GROUPS.items() if re.search(names, kernel, re.IGNORECASE)), "ends")


class StepPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a step moves and computes, and how long each card should take for it."""

    model: str
    kind: str
    """"decode", or "prefill" of one row in one chunk."""
    rows: int
    context: int
    quantization: str
    ranks: int
    kernels: int
    in_graph: int
    """How many of the kernels a CUDA graph starts."""
    moved_bytes: int
    needed_bytes: int
    """Weights and KV, once."""
    flop: float
    groups_ms: dict[str, dict[str, float]]
    """By card, and by what kernels are for."""
    share: dict[str, float]
    """By card. Decode: of the time of a copy of the needed bytes. Prefill: of its operations at that of bfloat16 products."""

    @property
    def name(self) -> str:
        """The model, and how it is computed."""
        how = "" if self.quantization == "none" else f" {self.quantization}", "" if self.ranks == 1 else f" tp {self.ranks}"
        return f"{self.model}{''.join(how)}"

    def ms(self, card: str) -> float:
        return sum(self.groups_ms[card].values())


class Predictions(msgspec.Struct, frozen=True, kw_only=True):
    steps: list[StepPrediction]
    offline_s: dict[str, dict[str, float]]
    """Seconds of each workload, by card."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction beside what was measured, both in ms."""

    what: Annotated[str, Column("what")]
    predicted_ms: Annotated[float, Column("predicted", ".3f")]
    measured_ms: Annotated[float, Column("measured", ".3f")]
    ratio: Annotated[float, Column("ratio", ".2f")]
    verdict: Annotated[str, Column("")]
    knob: str
    """What to look at where it is slower than predicted."""


def compare(figures: Sequence[Figure], predictions: Predictions, card: str, quantization: str) -> Iterator[Comparison]:
    """Whole steps, the parts of those that were profiled, and the offline workloads."""

    def beside(what: str, predicted_ms: float, measured_ms: float, knob: str) -> Comparison:
        ratio = measured_ms / predicted_ms
        verdict = "confirmed" if abs(ratio - 1) <= CONFIRMED else "refuted"
        return Comparison(
            what=what, predicted_ms=predicted_ms, measured_ms=measured_ms, ratio=ratio, verdict=verdict, knob=KNOBS[knob]
        )

    of_step = {
        (each.model, each.kind, each.rows, each.context): each
        for each in predictions.steps
        if (each.quantization, each.ranks) == (quantization, 1)
    }
    for ran in _of(Offline, figures):
        if ran.model == OFFLINE_MODEL:
            yield beside(
                f"{ran.workload}'s sequences", 1e3 * predictions.offline_s[ran.workload][card], 1e3 * ran.seconds, "gaps"
            )
    for fill in _of(Prefill, figures):
        guess = of_step.get((fill.model, "prefill", 1, fill.tokens))
        if guess is not None and fill.chunk_tokens == fill.tokens:
            what = f"{fill.model} prefill of {fill.tokens} tokens"
            yield beside(what, guess.ms(card), 1e3 * fill.seconds.median, "products")
    for step in _of(DecodeStep, figures):
        guess = of_step.get((step.model, "decode", step.batch, step.context))
        if guess is not None and step.graphs == "on":
            what = f"{step.model} decode, {step.batch} rows of {step.context}"
            yield beside(what, guess.ms(card), step.step_ms.median, "gaps")
            for group, ms in step.groups_ms.items():
                if guess.groups_ms[card].get(group):
                    yield beside(f"{what}: {group}", guess.groups_ms[card][group], ms, group)


def first_looks(figures: Sequence[Figure], runs: Sequence[TaskRun], compared: Sequence[Comparison]) -> Iterator[str]:
    """What to look at first: what is wrong, what did not run, then where most time is lost, and with which knob it is sought."""
    for check in _of(Check, figures):
        if check.failed:
            yield f"{check.failed} of {check.name} fail, the first is {check.first}: no figure counts before that is right"
    yield from (f"{run.label} did not come to its end: {run.failure}" for run in runs if run.failure)
    for each in sorted(compared, key=lambda each: each.predicted_ms - each.measured_ms)[:3]:
        if each.ratio > 1 + CONFIRMED:
            yield f"{each.what} takes {each.ratio:.2f} times as long as predicted: look at {each.knob}"
    for step in _of(DecodeStep, figures):
        if step.graphs == "on" and (step.idle or 0.0) > CONFIRMED:
            which = f"{step.model}, {step.batch} rows of {step.context}"
            yield f"{which}: the device is idle for {step.idle:.0%} of a step: look at the host (launch column, other work)"
