"""`launch plan`: searches the best fleet for a load, in parallel processes, and prints and draws what it has found.

Owns the processes, the progress bar, the table and the page. The search is in `simulation/search.py`.
"""

import html
import itertools
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.pool import Pool
from pathlib import Path

import msgspec
from tqdm import tqdm

from bench.report import Hardware, ReportStyle, machine_line, say, this_hardware, write_figures
from common.config import RouterConfig
from common.errors import ConfigError
from common.host import core_count
from common.options import with_defaults
from common.processes.router_client import RouterClient
from launch.measured_fleet import measured_fleet, past_load
from launch.simulate import with_measured_front
from simulation.plan import FleetPlan, LoadPlan, SearchPlan
from simulation.search import Borne, FleetSearch, FoundPlan, SearchTask

WIDTH, HEIGHT, EDGE = 720, 400, 60
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>launch plan</title>
<style>body{{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}}table{{border-collapse:collapse}}
td,th{{border-bottom:1px solid #ccc;padding:.2em .8em;text-align:right}}pre{{white-space:pre-wrap}}</style>
{body}</html>
"""


class PlanOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """All that is written to --json."""

    command: str
    hardware: Hardware
    took_s: float
    fleet: str
    """Flags of `launch simulate` that were the same for all."""
    found: list[FoundPlan]
    """The fleets of the last round, the best first."""
    one_more: list[FoundPlan]
    """The best one with one more instance of each role."""


def run(
    plan: SearchPlan, fleet: FleetPlan, load: LoadPlan, config: RouterConfig, command: str, control_key: str, markdown: bool
) -> int:
    """Returns the exit status: 1 when no fleet keeps the limits at any rate. Raises ConfigError."""
    began_s, hardware = time.monotonic(), this_hardware()
    with tempfile.TemporaryDirectory() as folder:
        if plan.fleet_url:
            client = RouterClient(plan.fleet_url, control_key)
            measured = measured_fleet(client)
            fleet = with_defaults(fleet, {name: measured[name] for name in measured.keys() - {"prefill", "decode"}})
            if not load.trace:
                load = replace(load, trace=past_load(client, Path(folder)))
        fleet = with_measured_front(fleet)
        jobs = plan.jobs or core_count()
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            search = FleetSearch(plan, fleet, load, config, lambda what, tasks: _run_all(pool, what, tasks))
            found = search.best()
            if not found[0].goodput:
                say("no fleet keeps the limits at any rate: give it more time (--slo-ttft-s, --slo-itl-s) or more devices")
                return 1
            one_more = search.one_more(found[0])
    outcome = PlanOutcome(
        command=command,
        hardware=hardware,
        took_s=time.monotonic() - began_s,
        fleet=f"--step-cost {fleet.step_cost} --link-gbit {fleet.link_gbit:g} --kv-pages {fleet.kv_pages} --front {fleet.front}",
        found=found,
        one_more=one_more,
    )
    print(report(outcome, plan, load, ReportStyle(markdown)))
    write_figures(outcome, plan.json)
    if plan.page:
        _write_page(outcome, plan, load)
    return 0


def _run_all(pool: Pool, what: str, tasks: Sequence[SearchTask]) -> Iterator[Borne]:
    """With a bar on stderr where that is a terminal."""
    with tqdm(total=len(tasks), desc=what, unit="fleet", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
        if bar.disable:
            say(f"{what}: {len(tasks)} searches")
        for borne in pool.imap_unordered(_run_task, tasks):
            bar.update()
            yield borne


def _run_task(task: SearchTask) -> Borne:
    return task.run()


# --- the table ---------------------------------------------------------------------------------------------------------------


def report(outcome: PlanOutcome, plan: SearchPlan, load: LoadPlan, style: ReportStyle) -> str:
    limits = (
        f"first token within {load.slo_ttft_s:g} s and {1e3 * load.slo_itl_s:g} ms a token, {plan.attainment:.0%} of requests"
    )
    machine = machine_line(outcome.hardware, f"it searched for {outcome.took_s:.0f} s")
    parts = [machine, f"Limits: {limits}. For all: {outcome.fleet}.", chosen_line(outcome)]
    parts += style.section("Fleets of the last round, the best first", found_lines(outcome.found))
    parts += style.section("One more of each", more_lines(outcome))
    return style.text(outcome.command, parts)


def chosen_line(outcome: PlanOutcome) -> str:
    """The choice in words, with what is as good within the interval."""
    best, *others = outcome.found
    mean, least, most = best.per_device
    each = best.candidate
    equal = [other.candidate.shown for other in others if other.per_device[2] >= least]
    beside = f" Within its interval: {', '.join(equal)}." if equal else ""
    return (
        f"Chosen: {each.shown} (prefill : decode : both), chunks of {each.chunk_tokens}, policy {each.policy}: "
        f"{best.goodput:.2f} good requests/s, {mean:.3f} for each device ({least:.3f} to {most:.3f} over the windows).{beside}"
    )


def found_lines(found: Sequence[FoundPlan]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [
        ("fleet", "chunk", "policy", "good requests/s", "for each device", "least", "most", "first token p99, ms", "pace p99, ms")
    ]
    for each in found:
        mean, least, most = each.per_device
        at_best = [borne.best for borne in each.windows if borne.best is not None]
        tails = ("first_token_s", "mean_between_tokens_s")
        worst = (f"{1e3 * max((getattr(run, name).p99 for run in at_best), default=0.0):.0f}" for name in tails)
        rates = f"{each.goodput:.2f}", *(f"{rate:.3f}" for rate in (mean, least, most))
        lines.append((each.candidate.shown, str(each.candidate.chunk_tokens), each.candidate.policy, *rates, *worst))
    return lines


def more_lines(outcome: PlanOutcome) -> list[tuple[str, ...]]:
    best = outcome.found[0]
    lines: list[tuple[str, ...]] = [("fleet", "good requests/s", "more", "for each device")]
    for each in outcome.one_more:
        more = each.goodput - best.goodput
        lines.append((each.candidate.shown, f"{each.goodput:.2f}", f"{more:+.2f}", f"{each.per_device[0]:.3f}"))
    return lines


# --- the page ----------------------------------------------------------------------------------------------------------------


def _write_page(outcome: PlanOutcome, plan: SearchPlan, load: LoadPlan) -> None:
    """Raises ConfigError."""
    tables = [found_lines(outcome.found), more_lines(outcome)]
    parts = [
        "<h1>Which fleet</h1>",
        f"<p>{html.escape(chosen_line(outcome))}</p>",
        curves(outcome.found),
        *map(_html_table, tables),
        f"<pre>{html.escape(report(outcome, plan, load, ReportStyle(False)))}</pre>",
    ]
    try:
        Path(plan.page).write_text(PAGE.format(body="\n".join(parts)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--page {plan.page} cannot be written: {error.strerror}") from error
    say(f"wrote {plan.page}")


def _html_table(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line) for tag, line in _tagged(lines))
    return f"<table><tr>{'</tr><tr>'.join([head, *rest])}</tr></table>"


def _tagged(lines: Sequence[Sequence[str]]) -> Iterator[tuple[str, Sequence[str]]]:
    return zip(itertools.chain(["th"], itertools.repeat("td")), lines, strict=False)


def curves(found: Sequence[FoundPlan]) -> str:
    """Good requests a second of each device against the requests that come, as SVG."""
    points = {each.candidate: sorted((run.rate, run.goodput) for borne in each.windows for run in borne.runs) for each in found}
    across = max(rate / each.devices for each, runs in points.items() for rate, _ in runs)
    up = max(good / each.devices for each, runs in points.items() for _, good in runs)

    def at(x: float, y: float) -> str:
        return f"{EDGE + (WIDTH - 2 * EDGE) * x / across:.1f},{HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * y / max(up, 1e-9):.1f}"

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" font-size="12" font-family="sans-serif">',
        f'<polyline points="{at(0, up)} {at(0, 0)} {at(across, 0)}" fill="none" stroke="#444"/>',
        f'<polyline points="{at(0, 0)} {at(min(across, up), min(across, up))}" stroke="#aaa" stroke-dasharray="4"/>',
        f'<text x="{EDGE}" y="{HEIGHT - 15}">requests/s that come, for each device (to {across:.3g})</text>',
        f'<text x="{EDGE}" y="20">good requests/s for each device (to {up:.3g}); dashed: all are good</text>',
    ]
    for number, (each, runs) in enumerate(points.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(at(rate / each.devices, good / each.devices) for rate, good in runs)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{3 if number == 0 else 1.5}"/>')
        name = html.escape(f"{each.shown}, chunks {each.chunk_tokens}, {each.policy}")
        parts.append(f'<text x="{EDGE + 10}" y="{EDGE + 16 * number}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"])
