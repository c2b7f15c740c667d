"""The figures of `launch bench engine` as text: tables for a terminal, or a section of Markdown.

Owns the columns and their order. Measures and judges nothing. What matters most comes last, because the end of an output is what
one sees.
"""

from collections.abc import Callable, Iterator

from bench.engine.figures import (
    Agreement,
    Built,
    Ceilings,
    DecodeStep,
    EngineOutcome,
    Exposed,
    Floor,
    HostWork,
    Offline,
    Prefill,
    Pushed,
    SampledStep,
    Started,
    TaskRun,
)
from bench.report import Spread, bytes_text, markdown_report, markdown_table, text_report, text_table

STEADY = "Shares are of what the device did in the same run."
Table = list[tuple[str, ...]]
Section = tuple[str, Table]
MISSING = "–"
PROGRESS = ("loading", "making", "measuring", "capturing")


def text(outcome: EngineOutcome) -> str:
    """For a terminal: columns of equal width."""
    body: list[str] = []
    for title, table in sections(outcome):
        body += [f"{title}:", text_table(table)]
    return text_report(outcome, settings(outcome), STEADY, body)


def markdown(outcome: EngineOutcome) -> str:
    """The section for docs/measurements/engine.md."""
    body: list[str] = []
    for title, table in sections(outcome):
        body += [f"### {title}", markdown_table(table)]
    return markdown_report(outcome, settings(outcome), STEADY, body)


def settings(outcome: EngineOutcome) -> str:
    ceilings = outcome.ceilings
    speeds = ""
    if ceilings is not None:
        speeds = (
            f"; a copy on {ceilings.device} moves {_spread(ceilings.copy_gb_per_s, '.0f')} GB/s, a product of {ceilings.matmul} "
            f"makes {_spread(ceilings.matmul_tflop_per_s, '.3g')} TFLOP/s"
        )
    return f"device {outcome.device}, {outcome.seconds:.0f} s in all{speeds}"


def sections(outcome: EngineOutcome) -> Iterator[Section]:
    """Those that have figures."""
    makers: tuple[tuple[str, tuple[str, ...], Callable[[EngineOutcome], Table]], ...] = (
        ("What ran", ("task", "s", "not measured because"), _runs),
        ("Start-up", ("model", "dtype", "s", "weights read, GB", "pages, GB", "context", "phases, s"), _starts),
        ("What each model's start said", ("model", ""), _said),
        ("Builds, all at once", ("what", "s"), _builds),
        ("Equal tokens, up to the first of an answer that differs", ("what", "tokens", "of", ""), _agreements),
        ("Pushes, GB/s", ("way", "page", "pages", "arrangement", "GB/s"), _pushes),
        ("Exposed transfer, ms", ("fleet", "prompt", "first token", "all pushes", "exposed"), _exposed),
        ("Host work of the executor, ms", ("device", "rows", "graphs", "launch", "attention"), _host),
        ("What sampling parameters cost", ("model", "vocabulary", "rows", "asked", "ms", "to a plain step"), _sampled),
        (
            "Offline",
            ("model", "graphs", "in flight", "sequences", "tokens in", "out", "steps", "s", "tokens/s out", "all"),
            _offline,
        ),
        (
            "Steps on CPU and their floor, ms: medians of the rounds (goal: at most 1.15)",
            ("model", "step", "rows", "context", "step", "products alone", "attention at the memory's speed", "ratio"),
            _floors,
        ),
        ("Prefill", ("model", "tokens", "chunk", "ms", "tokens/s", "TFLOP/s", "of the product"), _prefills),
        ("Decode steps", ("model", "context", "batch", "ms", "device, ms", "launch, ms", "idle", "GB/s", "of the copy"), _steps),
    )
    for title, head, lines in makers:
        table = lines(outcome)
        if table:
            yield title, [head, *table]


def _runs(outcome: EngineOutcome) -> Table:
    return [_run_line(run) for run in outcome.runs]


def _run_line(run: TaskRun) -> tuple[str, ...]:
    return run.label, f"{run.seconds:.1f}", run.failure or MISSING


def _starts(outcome: EngineOutcome) -> Table:
    return [
        (
            start.model,
            start.dtype,
            f"{start.seconds:.1f}",
            f"{start.weight_bytes / 1e9:.2f}",
            f"{start.pool_bytes / 1e9:.2f}",
            str(start.context_tokens),
            ", ".join(f"{name} {seconds:.1f}" for name, seconds in start.phases.items()),
        )
        for start in outcome.of(Started)
    ]


def _said(outcome: EngineOutcome) -> Table:
    """Each thing once, without mere progress: which attention it has, whether there are graphs, what the memory is for."""
    return [
        (start.model, text)
        for start in outcome.of(Started)
        for text in dict.fromkeys(start.said)
        if not text.startswith(PROGRESS)
    ]


def _builds(outcome: EngineOutcome) -> Table:
    return [(built.what, f"{built.seconds:.1f}") for built in outcome.of(Built)]


def _agreements(outcome: EngineOutcome) -> Table:
    return [(each.what, str(each.equal), str(each.total), f"{each.equal / each.total:.1%}") for each in outcome.of(Agreement)]


def _pushes(outcome: EngineOutcome) -> Table:
    return [
        (push.way, bytes_text(push.page_bytes), str(push.pages), push.arrangement, f"{push.gb_per_s:.2f}")
        for push in outcome.of(Pushed)
    ]


def _exposed(outcome: EngineOutcome) -> Table:
    return [
        (each.fleet, str(each.prompt_tokens), f"{each.first_token_ms:.1f}", f"{each.push_ms:.1f}", f"{each.exposed_ms:.1f}")
        for each in outcome.of(Exposed)
    ]


def _host(outcome: EngineOutcome) -> Table:
    return [
        (
            work.device,
            str(work.rows),
            "on" if work.graphs else "off",
            _spread(work.launch_ms, ".3f"),
            work.attention.split(",")[0].removeprefix("attention: "),
        )
        for work in outcome.of(HostWork)
    ]


def _sampled(outcome: EngineOutcome) -> Table:
    return [
        (step.model, str(step.vocab_size), str(step.rows), step.asked, _spread(step.step_ms, ".2f"), f"{step.ratio:.2f}")
        for step in outcome.of(SampledStep)
    ]


def _offline(outcome: EngineOutcome) -> Table:
    return [
        (
            run.model,
            run.graphs,
            str(run.steps_in_flight),
            str(run.sequences),
            str(run.prompt_tokens),
            str(run.answer_tokens),
            str(run.steps),
            f"{run.seconds:.2f}",
            f"{run.answer_tokens / run.seconds:.0f}",
            f"{(run.prompt_tokens + run.answer_tokens) / run.seconds:.0f}",
        )
        for run in outcome.of(Offline)
    ]


def _prefills(outcome: EngineOutcome) -> Table:
    return [_prefill_line(fill, outcome.ceilings) for fill in outcome.of(Prefill)]


def _prefill_line(fill: Prefill, ceilings: Ceilings | None) -> tuple[str, ...]:
    return (
        fill.model,
        str(fill.tokens),
        str(fill.chunk_tokens),
        _spread(fill.seconds, ".1f", scale=1e3),
        f"{fill.tokens_per_s:.0f}",
        f"{fill.flop / fill.seconds.median / 1e12:.3g}",
        MISSING if ceilings is None else f"{fill.matmul_share(ceilings):.1%}",
    )


def _steps(outcome: EngineOutcome) -> Table:
    return [_step_line(step, outcome.ceilings) for step in outcome.of(DecodeStep)]


def _step_line(step: DecodeStep, ceilings: Ceilings | None) -> tuple[str, ...]:
    where = step.model, str(step.context), str(step.batch)
    if step.step_ms is None:
        return (*where, *[MISSING] * 5, f"not measured: {step.skipped}")
    share = None if ceilings is None else step.memory_share(ceilings)
    return (
        *where,
        _spread(step.step_ms, ".2f"),
        MISSING if step.device_ms is None else f"{step.device_ms.median:.2f}",
        MISSING if step.launch_ms is None else f"{step.launch_ms.median:.2f}",
        MISSING if step.gap_share is None else f"{step.gap_share:.0%}",
        f"{step.read_bytes / step.step_ms.median / 1e6:.0f}",
        MISSING if share is None else f"{share:.1%}",
    )


def _floors(outcome: EngineOutcome) -> Table:
    return [_floor_line(floor) for floor in outcome.of(Floor)]


def _floor_line(floor: Floor) -> tuple[str, ...]:
    where = floor.model, floor.step, str(floor.rows), str(floor.context)
    parts = floor.step_ms, floor.products_ms, floor.attention_ms
    if floor.ratio is None:
        return (*where, *[MISSING] * 3, f"not measured: {floor.skipped}")
    times = [f"{part.median:.2f}" for part in parts if part is not None]
    return (*where, *times, f"{floor.ratio.median:.2f} ({floor.ratio.least:.2f} … {floor.ratio.most:.2f})")


def _spread(spread: Spread, form: str, scale: float = 1.0) -> str:
    """median (least … most)"""
    least, median, most = (format(scale * value, form) for value in (spread.least, spread.median, spread.most))
    return f"{median} ({least} … {most})"
