"""What `launch bench engine` finds: a figure for each thing that was measured or checked, and whether the goals are met.

Owns the figures, how they become shares of what the device can do, and the goals. Measures and prints nothing.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias, TypeVar

from bench.engine.plan import GOAL_BATCH, GOAL_CONTEXT, GOAL_MODEL
from bench.report import BenchOutcome, Goal, Spread
from common.processes.lines import JsonLine, Progress

LEAST_MEMORY_SHARE, LEAST_MATMUL_SHARE, MOST_HOST_MS = 70, 60, 0.5
GOAL_PROMPT = 8192
GOAL_ROWS = 256


class Ceilings(JsonLine, frozen=True, kw_only=True):
    """copy_gb_per_s: read and written, 10^9 bytes. matmul_tflop_per_s: of `matmul`, such as "8192^3 bfloat16"."""

    device: str
    copy_gb_per_s: Spread
    matmul: str
    matmul_tflop_per_s: Spread


class Check(JsonLine, frozen=True, kw_only=True):
    """met: None when it was not checked, and then `figure` says why."""

    rule: str
    met: bool | None
    figure: str


class Agreement(JsonLine, frozen=True, kw_only=True):
    """How many tokens of answers are those of others: up to the first of an answer that differs, because what follows that has
    another past. must_be_equal: all of them; else it is a measurement without a verdict."""

    what: str
    equal: int
    total: int
    must_be_equal: bool


class Built(JsonLine, frozen=True, kw_only=True):
    """A model was started with one layer, which compiles its kernels. Others were started at the same time."""

    what: str
    seconds: float


class Started(JsonLine, frozen=True, kw_only=True):
    """A model runner was started. phases: the first words of what it said at each phase, and the seconds until the next.

    said: every line. weight_bytes: that a decode step reads. pool_bytes: of KV pages. free_bytes: of the device, afterwards.
    """

    model: str
    dtype: str
    seconds: float
    phases: dict[str, float]
    said: list[str]
    weight_bytes: int
    pool_bytes: int
    context_tokens: int
    free_bytes: int | None


class DecodeStep(JsonLine, frozen=True, kw_only=True):
    """A decode step of `batch` rows with about `context` tokens each.

    skipped: why it was not measured. step_ms: from the end of one step to the end of the next, two in flight. device_ms: of the
    device alone; None on CPU. launch_ms: until the host has given the step to the device. read_bytes: weights and KV.
    """

    model: str
    batch: int
    context: int
    skipped: str = ""
    step_ms: Spread | None = None
    device_ms: Spread | None = None
    launch_ms: Spread | None = None
    read_bytes: int = 0

    def memory_share(self, ceilings: Ceilings) -> float | None:
        """Of the time that a step takes, the part that reading its bytes at the speed of a copy takes."""
        if self.step_ms is None:
            return None
        return self.read_bytes / (ceilings.copy_gb_per_s.median * 1e9) / (self.step_ms.median / 1e3)

    @property
    def gap_share(self) -> float | None:
        """The part of a step's time in which the device has nothing to do."""
        if self.step_ms is None or self.device_ms is None:
            return None
        return max(0.0, 1 - self.device_ms.median / self.step_ms.median)


class Prefill(JsonLine, frozen=True, kw_only=True):
    """A prompt, chunk after chunk. flop: of all products of matrices, attention's included."""

    model: str
    tokens: int
    chunk_tokens: int
    seconds: Spread
    flop: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds.median

    def matmul_share(self, ceilings: Ceilings) -> float:
        return self.flop / self.seconds.median / (ceilings.matmul_tflop_per_s.median * 1e12)


class Floor(JsonLine, frozen=True, kw_only=True):
    """A step and its floor. step: "decode", or "prefill" of one row whose prompt is `context` tokens.

    skipped: why it was not measured. products_ms: its products of matrices alone, SwiGLU included, which is a part of one.
    attention_ms: its KV read once at the speed of the memory; in prefill at least its operations at the speed of the products.
    ratio: the step to its floor in each round, in which they took turns: the memory of a host that others use too may be twice
    as fast in one second as in the next.
    """

    model: str
    step: str
    rows: int
    context: int
    skipped: str = ""
    step_ms: Spread | None = None
    products_ms: Spread | None = None
    attention_ms: Spread | None = None
    ratio: Spread | None = None


class Offline(JsonLine, frozen=True, kw_only=True):
    """Sequences of an answer length that is given in advance, all known at the start."""

    model: str
    graphs: str
    steps_in_flight: int
    sequences: int
    prompt_tokens: int
    answer_tokens: int
    steps: int
    seconds: float


class HostWork(JsonLine, frozen=True, kw_only=True):
    """The executor's part of the host's work for a decode step: `StepRunner.launch` with a model that computes nothing."""

    device: str
    rows: int
    graphs: bool
    attention: str
    launch_ms: Spread


class SampledStep(JsonLine, frozen=True, kw_only=True):
    """A decode step in which each row asks for the same, greedily where nothing else is said. ratio: to a step in which no row
    asks for anything, of the same run."""

    model: str
    vocab_size: int
    rows: int
    asked: str
    step_ms: Spread
    ratio: float


class Pushed(JsonLine, frozen=True, kw_only=True):
    """As `python -m benchmarks.transfer` measures it, the median of its rounds."""

    way: str
    page_bytes: int
    pages: int
    arrangement: str
    gb_per_s: float


class Exposed(JsonLine, frozen=True, kw_only=True):
    """As `python -m benchmarks.overlap` measures it, medians of its rounds, in ms."""

    fleet: str
    prompt_tokens: int
    first_token_ms: float
    push_ms: float
    exposed_ms: float


class Done(JsonLine, frozen=True, kw_only=True):
    """A task is over."""


Figure: TypeAlias = (
    Ceilings
    | Check
    | Agreement
    | Built
    | Started
    | DecodeStep
    | Floor
    | Prefill
    | Offline
    | HostWork
    | SampledStep
    | Pushed
    | Exposed
)
WorkerReport: TypeAlias = Figure | Progress | Done
F = TypeVar("F")


class TaskRun(JsonLine, frozen=True, kw_only=True):
    """failure: why it did not come to its end, in one line; empty if it did. account: all that is known of that."""

    label: str
    seconds: float
    failure: str = ""
    account: str = ""


class EngineOutcome(BenchOutcome, frozen=True, kw_only=True):
    """All that is known at the end of `launch bench engine`."""

    device: str
    seconds: float
    runs: list[TaskRun]
    figures: list[Figure]

    def of(self, kind: type[F]) -> list[F]:
        return of(kind, self.figures)

    @property
    def ceilings(self) -> Ceilings | None:
        return next(iter(self.of(Ceilings)), None)


def of(kind: type[F], figures: Sequence[Figure]) -> list[F]:
    return [figure for figure in figures if isinstance(figure, kind)]


def judge(figures: Sequence[Figure]) -> list[Goal]:
    """The checks, then the goals of speed, which are goals of one Hopper card."""
    checks = [Goal(rule=check.rule, met=check.met, figure=check.figure) for check in of(Check, figures)]
    for tokens in of(Agreement, figures):
        if tokens.must_be_equal:
            met, figure = tokens.equal == tokens.total, f"{tokens.equal} of {tokens.total} tokens"
            checks.append(Goal(rule=tokens.what, met=met, figure=figure))
    return [*checks, *_goals(figures, next(iter(of(Ceilings, figures)), None))]


def _goals(figures: Sequence[Figure], ceilings: Ceilings | None) -> Iterator[Goal]:
    steps = [
        share
        for step in of(DecodeStep, figures)
        if (step.model, step.batch, step.context) == (GOAL_MODEL, GOAL_BATCH, GOAL_CONTEXT)
        and ceilings is not None
        and (share := step.memory_share(ceilings)) is not None
    ]
    yield _goal(
        f"{GOAL_MODEL}: a decode step of {GOAL_BATCH} rows and {GOAL_CONTEXT} tokens at {LEAST_MEMORY_SHARE} % of the speed of a "
        "copy or more",
        [100 * share for share in steps],
        LEAST_MEMORY_SHARE,
    )
    fills = [
        100 * fill.matmul_share(ceilings)
        for fill in of(Prefill, figures)
        if ceilings is not None and (fill.model, fill.tokens) == (GOAL_MODEL, GOAL_PROMPT)
    ]
    yield _goal(
        f"{GOAL_MODEL}: prefill of {GOAL_PROMPT} tokens at {LEAST_MATMUL_SHARE} % of the speed of a product of matrices or more, "
        "with the best chunk",
        fills,
        LEAST_MATMUL_SHARE,
    )
    host = [work.launch_ms.median for work in of(HostWork, figures) if work.rows == GOAL_ROWS]
    yield Goal(
        rule=f"the executor's host work for {GOAL_ROWS} decode rows below {MOST_HOST_MS} ms (the scheduler adds its own)",
        met=max(host) < MOST_HOST_MS if host else None,
        figure=f"{max(host):.3f} ms" if host else "not measured",
    )


def _goal(rule: str, shares: Sequence[float], least: float) -> Goal:
    return Goal(
        rule=rule,
        met=max(shares) >= least if shares else None,
        figure=f"{max(shares):.1f} %" if shares else "not measured",
    )
