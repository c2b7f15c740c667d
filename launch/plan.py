"""`launch plan`: searches the best fleet for a load, in parallel processes, and prints and draws what it has found.

Owns the processes, the progress bar, the table and the page, and what is taken of a running fleet: what its instances have
measured of themselves, as its router tells it on /cluster. The search is in `simulation/search.py`.
"""

import html
import multiprocessing
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.report import Outcome, ReportStyle, machine_line, say, this_hardware, write_figures
from common.config import RouterConfig
from common.errors import ConfigError, needs_file
from common.host import core_count
from common.options import with_defaults
from common.processes.router_client import RequestFailed, RouterClient
from common.step_cost import StepCost
from launch.simulate import with_measured_front
from simulation.plan import FleetPlan, LoadPlan, SearchPlan
from simulation.search import Borne, FleetSearch, FoundFleet, Trial

WIDTH, HEIGHT, EDGE = 720, 400, 60
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
HEAD = (
    "fleet", "chunk", "policy", "good requests/s", "more", "for each device", "least", "most", "first p99, ms", "pace p99, ms",
)  # fmt: skip
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Which fleet</title>
<style>body{{font:15px/1.5 sans-serif;margin:2em}}pre{{white-space:pre-wrap}}</style>
<h1>Which fleet</h1>{curves}<pre>{text}</pre></html>
"""
BITS = 8
SPAWN = multiprocessing.get_context("spawn")


class PlanOutcome(Outcome, frozen=True, kw_only=True):
    """All that is written to --json."""

    took_s: float
    same: str
    """What was the same for all, in words."""
    found: list[FoundFleet]
    """The fleets of the last round, the best first."""
    one_more: list[FoundFleet]
    """The best one with one more instance of each role."""


def run(
    plan: SearchPlan, fleet: FleetPlan, load: LoadPlan, config: RouterConfig, command: str, control_key: str, markdown: bool
) -> int:
    """Returns the exit status: 1 when no fleet keeps the limits at any rate. Raises ConfigError."""
    began_s, hardware = time.monotonic(), this_hardware()
    with tempfile.TemporaryDirectory() as folder, _pool(plan.jobs or core_count()) as pool:
        if plan.fleet_url:
            client = RouterClient(plan.fleet_url, control_key)
            measured = measured_fleet(client)
            fleet = with_defaults(fleet, {name: measured[name] for name in measured.keys() - {"prefill", "decode"}})
            load = load if load.trace else replace(load, trace=past_load(client, Path(folder)))
        fleet, run_all = with_measured_front(fleet), partial(run_in, pool)
        search = FleetSearch(plan, fleet, load, config)
        found = search.best(run_all)
        if not found[0].goodput:
            say("no fleet keeps the limits at any rate: give more time (--slo-ttft-s, --slo-itl-s) or more devices")
            return 1
        one_more = search.one_more(found[0], run_all)
    limits = (
        f"first token within {load.slo_ttft_s:g} s and {1e3 * load.slo_itl_s:g} ms a token, {plan.attainment:.0%} of requests"
    )
    assumed = f"--step-cost {fleet.step_cost} --link-gbit {fleet.link_gbit:g} --kv-pages {fleet.kv_pages} --front {fleet.front}"
    took_s, same = time.monotonic() - began_s, f"Limits: {limits}. For all: {assumed}."
    outcome = PlanOutcome(command=command, hardware=hardware, took_s=took_s, same=same, found=found, one_more=one_more)
    print(report(outcome, ReportStyle(markdown)))
    write_figures(outcome, load.json)
    if plan.page:
        _write_page(outcome, plan.page)
    return 0


def _pool(processes: int) -> Pool:
    """Ctrl-C reaches every process of a terminal, and this one alone says that it has ended."""
    return SPAWN.Pool(processes, signal.signal, (signal.SIGINT, signal.SIG_IGN))


def run_in(pool: Pool, what: str, search: FleetSearch, trials: Sequence[Trial]) -> Iterator[Borne]:
    """With a bar on stderr where that is a terminal."""
    with tqdm(total=len(trials), desc=what, unit="search", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
        if bar.disable:
            say(f"{what}: {len(trials)} searches")
        for borne in pool.imap_unordered(search.bears, trials):
            bar.update()
            yield borne


# --- a running fleet as a plan -----------------------------------------------------------------------------------------------


def measured_fleet(client: RouterClient) -> dict[str, Any]:
    """The fields of a `FleetPlan`. Raises ConfigError, also where nothing is measured."""
    try:
        instances = client.get("/cluster")["instances"]
        prefill = [each for each in instances if each["role"] == "prefill"]
        links = [link for each in prefill for link in client.get(f"/cluster?links={each['id']}")["links"]]
    except RequestFailed as error:
        raise ConfigError(f"--fleet-url {client.url}: {error}") from error
    decode = [each for each in instances if each["role"] != "prefill"]  # whoever serves whole requests too decodes
    if not decode:
        raise ConfigError(f"--fleet-url {client.url}: the fleet has no decode instance, so nothing can be learned of it")
    one = decode[0]
    plan: dict[str, Any] = {
        "prefill": len(prefill),
        "decode": len(decode),
        "kv_pages": min(each["pages_total"] for each in instances),
        "page_size": one["page_size"],
        "kv_token_bytes": one["page_bytes"] // one["page_size"],
        "context_tokens": one["model"]["context_tokens"],
        "max_running": one["max_running"],
        "step_cost": _spelled(prefill or decode, decode),
        "decode_step_cost": _spelled(decode, prefill),
    }
    speeds = [link["bytes_per_s"] for link in links if link.get("bytes_per_s")]
    if speeds:
        plan["link_gbit"] = statistics.median(speeds) * BITS / 1e9
    return plan


def _spelled(those: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> str:
    """The mean cost of their steps. What they have not measured is as with the others. Raises ConfigError."""
    parts = []
    for name in StepCost.__struct_fields__:
        known = [cost for each in (*those, *others) if (cost := each["load"].get(name, 0.0))][: len(those)]
        parts.append(statistics.fmean(known) if known else 0.0)
    if not parts[0] or not parts[1]:
        raise ConfigError("--fleet-url: the fleet has not measured its steps yet: send it some requests first")
    return ",".join(f"{part:.4g}" for part in parts)


def past_load(client: RouterClient, folder: Path) -> str:
    """The requests of the router's last hour, in a file. Raises ConfigError."""
    try:
        lines = client.read("/cluster/load")
    except RequestFailed as error:
        raise ConfigError(f"--fleet-url {client.url}: {error}") from error
    file = folder / "load.jsonl"
    file.write_bytes(lines)
    return str(file)


# --- what is shown -----------------------------------------------------------------------------------------------------------


def report(outcome: PlanOutcome, style: ReportStyle) -> str:
    found, machine = outcome.found, machine_line(outcome.hardware, f"it searched for {outcome.took_s:.0f} s")
    parts = [machine, outcome.same, chosen_line(found)]
    parts += style.section("Fleets of the last round, the best first", table(found, found[0]))
    return style.text(outcome.command, [*parts, *style.section("One more of each", table(outcome.one_more, found[0]))])


def chosen_line(found: Sequence[FoundFleet]) -> str:
    """The choice in words, with what is as good within the interval."""
    best, *others = found
    each, (mean, least, most) = best.candidate, best.per_device
    equal = [other.candidate.shown for other in others if other.per_device[2] >= least]
    return (
        f"Chosen: {each.shown} (prefill : decode : both), chunks of {each.chunk_tokens}, policy {each.policy}: "
        f"{best.goodput:.2f} good requests/s, {mean:.3f} for each device ({least:.3f} to {most:.3f} over the windows)."
        + (f" Within its interval: {', '.join(equal)}." if equal else "")
    )


def table(fleets: Sequence[FoundFleet], best: FoundFleet) -> list[tuple[str, ...]]:
    """best: with which they are compared."""
    lines: list[tuple[str, ...]] = [HEAD]
    for each in fleets:
        runs = [borne.best for borne in each.windows if borne.best is not None]
        tails = (
            max((tail.p99 for tail in tails), default=0.0)
            for tails in ([run.first_token_s for run in runs], [run.mean_between_tokens_s for run in runs])
        )
        rates = f"{each.goodput:.2f}", f"{each.goodput - best.goodput:+.2f}", *(f"{rate:.3f}" for rate in each.per_device)
        named = each.candidate.shown, str(each.candidate.chunk_tokens), each.candidate.policy
        lines.append((*named, *rates, *(f"{1e3 * tail:.0f}" for tail in tails)))
    return lines


def _write_page(outcome: PlanOutcome, page: str) -> None:
    """Raises ConfigError."""
    text = html.escape(report(outcome, ReportStyle(is_markdown=False)))
    with needs_file(f"--page {page} cannot be written"):
        Path(page).write_text(PAGE.format(curves=curves(outcome.found), text=text), encoding="utf-8")
    say(f"wrote {page}")


def curves(found: Sequence[FoundFleet]) -> str:
    """Good requests a second of each device against the requests that come, as SVG."""
    points = {each.candidate: sorted((run.rate, run.goodput) for borne in each.windows for run in borne.runs) for each in found}
    across = max(rate / each.devices for each, runs in points.items() for rate, _ in runs)
    up = max(good / each.devices for each, runs in points.items() for _, good in runs)

    def at(x: float, y: float) -> str:
        return f"{EDGE + (WIDTH - 2 * EDGE) * x / across:.1f},{HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * y / up:.1f}"

    parts = [
        f'<polyline points="{at(0, up)} {at(0, 0)} {at(across, 0)}" fill="none" stroke="#444"/>',
        f'<polyline points="{at(0, 0)} {at(min(across, up), min(across, up))}" stroke="#aaa" stroke-dasharray="4"/>',
        f'<text x="{EDGE}" y="{HEIGHT - 15}">requests/s that come, for each device (to {across:.3g})</text>',
        f'<text x="{EDGE}" y="20">good requests/s for each device (to {up:.3g}); dashed: all are good</text>',
    ]
    for number, (each, runs) in enumerate(points.items()):
        colour, line = (
            COLOURS[number % len(COLOURS)],
            " ".join(at(rate / each.devices, good / each.devices) for rate, good in runs),
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{1.5 if number else 3}"/>')
        name = f"{each.shown}, chunks of {each.chunk_tokens}, {each.policy}"
        parts.append(f'<text x="{EDGE + 10}" y="{EDGE + 16 * number}" fill="{colour}">{name}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" font-size="12">{"".join(parts)}</svg>'
