"""The report: one row for each engine, also for those that failed.

Owns the table. Measures nothing.
"""

from collections.abc import Callable

from bench.cpu_peers.engines import ENGINES, Tandem
from bench.cpu_peers.figures import CpuPeersOutcome, Turn, lead
from bench.report import Spread, markdown_report, markdown_table, text_report, text_table

HEAD = (
    "engine",
    "precision",
    "output tokens/s",
    "TTFT p50, s",
    "inter-token p50, ms",
    "p95, ms",
    "memory, GB",
    "Tandem is ahead",
)
STEADY = "Memory is not affected."
HOW = (
    "Medians of the rounds, and for output tokens/s the least and the most. “Tandem is ahead”: the output tokens/s of colocated "
    "Tandem of the same precision, in those of the engine, round by round."
)


def report(outcome: CpuPeersOutcome, markdown: bool) -> str:
    """For a terminal, or the section for docs/measurements/cpu.md."""
    versions = ", ".join(f"{name} {version}" for name, version in outcome.versions.items())
    settings = (
        f"shape {outcome.shape}, {outcome.requests} requests at once with {outcome.prompt_tokens:,} prompt and "
        f"{outcome.answer_tokens:,} new tokens together, {outcome.threads} threads, {outcome.rounds} rounds"
        f"{f'; peers: {versions}' if versions else ''}"
    )
    failed = [f"{each.engine}, round {each.round + 1}: {each.reason}" for each in outcome.failures]
    if markdown:
        body = [
            markdown_table(lines(outcome)),
            HOW,
            *([markdown_table([("failed",), *((each,) for each in failed)])] * bool(failed)),
        ]
        return markdown_report(outcome, settings, STEADY, body)
    return text_report(outcome, settings, STEADY, [text_table(lines(outcome)), HOW, *failed])


def lines(outcome: CpuPeersOutcome) -> list[tuple[str, ...]]:
    """The first line is the head."""
    return [HEAD, *(_line(outcome, name) for name in outcome.engines)]


def _line(outcome: CpuPeersOutcome, name: str) -> tuple[str, ...]:
    engine, turns = ENGINES[name], outcome.of(name)
    if not turns:
        return engine.title, engine.precision, "failed", *[""] * (len(HEAD) - 3)

    def median(of: Callable[[Turn], float]) -> float:
        return Spread.of(of(turn) for turn in turns).median

    rate = Spread.of(turn.output_tokens_per_s for turn in turns)
    ahead = None if isinstance(engine, Tandem) and not engine.separate else lead(outcome.turns, name)
    return (
        engine.title,
        engine.precision,
        f"{rate.median:.1f}" + (f" ({rate.least:.1f} … {rate.most:.1f})" if len(turns) > 1 else ""),
        f"{median(lambda turn: turn.ttft_p50_ms) / 1000:.1f}",
        f"{median(lambda turn: turn.itl_p50_ms):.0f}",
        f"{median(lambda turn: turn.itl_p95_ms):.0f}",
        f"{median(lambda turn: turn.memory_gb):.1f}",
        "" if ahead is None else f"{ahead.median:.2f}x",
    )
