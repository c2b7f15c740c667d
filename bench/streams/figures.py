"""The figures of `launch bench streams`: times between the tokens of the streams, and prompts that were computed meanwhile.

Owns the definitions and the table. Pure: measures nothing.
"""

import statistics
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from bench.figures import Outcome
from bench.serve.answers import Answer
from bench.streams.plan import PAIR
from bench.tables import markdown_report, markdown_table, text_report, text_table

HEAD = ("layout", "inter-token p50, ms", "p95, ms", "p99, ms", "stream tokens/s", "prompt tokens/s", "first token p50, s")
STEADY = "Ratios within a round are affected least."
HOW = (
    "Median of the rounds, with the least and the most in brackets. Prompt tokens/s are those of whole prompts, from the first "
    "that arrived to the last that was computed."
)
RATIOS = f"{PAIR} / each layout, round by round: below 1 is better for times, above 1 for rates"


class StreamsRun(msgspec.Struct, frozen=True, kw_only=True):
    """A layout in one round. gaps_ms: p50, p95 and p99 of the times between tokens of all streams."""

    layout: str
    round: int
    gaps_ms: tuple[float, float, float]
    stream_tokens_per_s: float
    prompt_tokens_per_s: float
    first_token_s: float
    prompts: int


class StreamsOutcome(Outcome, frozen=True, kw_only=True):
    """All that is known at the end. layouts: the flags of each, the pair first."""

    layouts: dict[str, str]
    seconds: float
    streams: int
    prompt_tokens: int
    runs: list[StreamsRun]


def run_of(
    layout: str, number: int, streams: Sequence[Answer], prompts: Sequence[Answer], began_s: float, ended_s: float
) -> StreamsRun:
    """Tokens that came from began_s to ended_s, and prompts whose first token came in this time; the first one was sent at its
    beginning. A time between tokens belongs where it ends."""
    found = [_gaps(answer, began_s, ended_s) for answer in streams]
    gaps = np.concatenate([*found, np.zeros(0)])
    done = [answer for answer in prompts if answer.counted and answer.first_s <= ended_s]
    whole_s = max((answer.first_s for answer in done), default=ended_s) - began_s
    p50, p95, p99 = (1e3 * np.percentile(gaps, (50, 95, 99))).tolist() if len(gaps) else (0.0, 0.0, 0.0)
    return StreamsRun(
        layout=layout,
        round=number,
        gaps_ms=(p50, p95, p99),
        stream_tokens_per_s=len(gaps) / (ended_s - began_s),
        prompt_tokens_per_s=sum(answer.prompt_tokens for answer in done) / whole_s,
        first_token_s=statistics.median(answer.ttft_s for answer in done) if done else 0.0,
        prompts=len(done),
    )


def _gaps(answer: Answer, began_s: float, ended_s: float) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    gaps = np.frombuffer(answer.gaps_s, np.float64) if answer.gaps_s else np.zeros(0)
    at_s = answer.first_s + np.cumsum(gaps)
    return gaps[(at_s > began_s) & (at_s <= ended_s)]


FIGURES: tuple[tuple[Callable[[StreamsRun], float], str], ...] = (
    (lambda run: run.gaps_ms[0], "{:.0f}"),
    (lambda run: run.gaps_ms[1], "{:.0f}"),
    (lambda run: run.gaps_ms[2], "{:.0f}"),
    (lambda run: run.stream_tokens_per_s, "{:.1f}"),
    (lambda run: run.prompt_tokens_per_s, "{:.0f}"),
    (lambda run: run.first_token_s, "{:.2f}"),
)


def report(outcome: StreamsOutcome, markdown: bool) -> str:
    """For a terminal, or the section for docs/measurements/cpu.md."""
    settings = f"{outcome.streams} streams, prompts of {outcome.prompt_tokens} tokens, {outcome.seconds:g} s for each run"
    make, table = (markdown_report, markdown_table) if markdown else (text_report, text_table)
    flags = [("layout", "launch local"), *outcome.layouts.items()]
    body = [table(flags), HOW, table(_figures(outcome)), RATIOS + ":", table(_ratios(outcome))]
    return make(outcome, settings, STEADY, body)


def _figures(outcome: StreamsOutcome) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [HEAD]
    for layout in outcome.layouts:
        runs = [run for run in outcome.runs if run.layout == layout]
        lines.append((layout, *(_spread([figure(run) for run in runs], form) for figure, form in FIGURES)))
    return lines


def _ratios(outcome: StreamsOutcome) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [HEAD]
    of_pair = {run.round: run for run in outcome.runs if run.layout == PAIR}
    for layout in outcome.layouts:
        others = [run for run in outcome.runs if run.layout == layout != PAIR and run.round in of_pair]
        if others:
            lines.append((layout, *(_ratio(figure, of_pair, others) for figure, _ in FIGURES)))
    return lines


def _ratio(figure: Callable[[StreamsRun], float], of_pair: dict[int, StreamsRun], others: Sequence[StreamsRun]) -> str:
    """A round with nothing to divide by is left out."""
    return _spread([figure(of_pair[run.round]) / figure(run) for run in others if figure(run) > 0], "{:.2f}")


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "–"
    middle = form.format(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({form.format(min(values))} … {form.format(max(values))})"
