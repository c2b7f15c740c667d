"""The figures of `launch bench overlap` as text: tables for a terminal, or a section of Markdown.

Owns the columns and their order. Measures and judges nothing.
"""

from collections.abc import Iterable, Sequence

from bench.overlap_figures import Measured, OverlapOutcome, Sample, exposed_share
from bench.overlap_plan import FLEETS, FleetKind
from bench.report import Spread, markdown_report, markdown_table, text_report, text_table

FIRST_TOKEN = ("tokens", "fleet", "first token, ms", "beyond colocated's, ms", "in colocated's", "then to the second, ms")
TRANSFER = ("tokens", "fleet", "MB pushed", "all pushes, ms", "exposed, ms", "exposed share", "of page-wise's exposed")
SPREAD = "median / p90 of the requests, or of their pairs from one round"
STEADY = "Differences within a round are affected least."
Lines = list[tuple[str, ...]]


def text(outcome: OverlapOutcome) -> str:
    """For a terminal: columns of equal width."""
    body = []
    for measured in outcome.models:
        body += [f"{measured.model}, {SPREAD}:", text_table(_first_tokens(measured)), text_table(_transfers(measured))]
    return text_report(outcome, _settings(outcome), STEADY, body)


def markdown(outcome: OverlapOutcome) -> str:
    """The section for docs/measurements/overlap.md: the run, the goals, and every figure with the fleets side by side."""
    body = []
    for measured in outcome.models:
        body += [f"### {measured.model}: time to first token, {SPREAD}", markdown_table(_first_tokens(measured))]
        body += [f"### {measured.model}: the transfer of a prompt, {SPREAD}", markdown_table(_transfers(measured))]
    return markdown_report(outcome, _settings(outcome), STEADY, body)


def _first_tokens(measured: Measured) -> Lines:
    lines: Lines = [FIRST_TOKEN]
    for chunks, tokens in measured.prompt_tokens.items():
        for fleet in FLEETS:
            samples = measured.of(fleet, chunks)
            first, following = (sample.first_token_s for sample in samples), (sample.next_token_s for sample in samples)
            compared = ("", "") if fleet == "colocated" else _beyond(measured.pairs(fleet, "colocated", chunks))
            lines.append((str(tokens), fleet, _milliseconds(first), *compared, _milliseconds(following)))
    return lines


def _beyond(pairs: Sequence[tuple[Sample, Sample]]) -> tuple[str, str]:
    """By how much the first tokens of the first of each pair come later, and the ratio."""
    differences = (ours.first_token_s - theirs.first_token_s for ours, theirs in pairs)
    ratios = (ours.first_token_s / theirs.first_token_s for ours, theirs in pairs)
    return _milliseconds(differences), _numbers(ratios, "{:.3f}")


def _transfers(measured: Measured) -> Lines:
    lines: Lines = [TRANSFER]
    fleets: tuple[FleetKind, ...] = ("layer-wise", "page-wise")
    for chunks, tokens in measured.prompt_tokens.items():
        for fleet in fleets:
            samples = measured.of(fleet, chunks)
            pairs = measured.pairs(fleet, "page-wise", chunks)
            compared = _percent(ours.exposed_s / theirs.exposed_s for ours, theirs in pairs) if fleet == "layer-wise" else ""
            lines.append((
                str(tokens),
                fleet,
                f"{samples[0].pushed_bytes / 1e6:.1f}",
                _milliseconds(sample.push_s for sample in samples),
                _milliseconds(sample.exposed_s for sample in samples),
                _percent(map(exposed_share, samples)),
                compared,
            ))  # fmt: skip
    return lines


def _milliseconds(seconds: Iterable[float]) -> str:
    return _numbers((1e3 * value for value in seconds), "{:.1f}")


def _percent(shares: Iterable[float]) -> str:
    return _numbers((100 * share for share in shares), "{:.0f} %")


def _numbers(values: Iterable[float], form: str) -> str:
    spread = Spread.of(values)
    return f"{form.format(spread.median)} / {form.format(spread.p90)}"


def _settings(outcome: OverlapOutcome) -> str:
    threads = f"{outcome.threads} thread" + ("" if outcome.threads == 1 else "s")
    return f"{threads} for each instance, {outcome.transport}"
