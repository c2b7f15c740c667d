"""`launch top`: the fleet of a router in a terminal, from the states that the page at `/` shows too.

Owns the tables. Needs rich. Writes no character that a terminal could take for a command: ids and reasons come from elsewhere.
"""

import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from http import HTTPStatus

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from common.processes.router_client import RequestFailed, RouterClient
from launch.fleet_options import TopFlags
from router.live import LiveRoster, LiveState, RequestLane

SILENCE_S, AGAIN_S, WINDOW_S = 15.0, 2.0, 10.0
MOST_INSTANCES, MOST_MARKS, LEAST_LANES, LEAST_BAR = 24, 5, 8, 12
FINAL = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
BESIDE_BAR = 92
"""Columns of a terminal that the rest of a lane takes."""
STYLES = {"": "", "queue": "grey50", "prefill": "blue", "push": "yellow", "decode": "green", "waits": "red"}
COUNTS = ("waiting_requests", "running_requests", "pages_cached", "pushes_in_flight", "reservations")
HEAD = ("instance", "role", "state", "held", "queue", "batch", "cached", "pushes", "reserved", "pace")


def run(flags: TopFlags, control_key: str) -> int:
    """Show it until Ctrl-C. Returns the exit status: 1 when the router refuses, or does not answer the first time."""
    console, states = Console(), deque[LiveState]()
    router = RouterClient(flags.url, control_key, SILENCE_S)
    with suppress(KeyboardInterrupt), Live(console=console, screen=flags.once == "off", auto_refresh=False) as screen:
        while True:
            try:
                with closing(router.stream("/cluster/events", None)) as events:
                    for said in (msgspec.convert(event, LiveRoster | LiveState) for event in events):
                        if isinstance(said, LiveRoster):
                            roster = said
                            states.clear()
                            continue
                        states.append(said)
                        while states[0].at < said.at - WINDOW_S:
                            states.popleft()
                        screen.update(_page(roster, states, flags.url, console), refresh=True)
                        if flags.once == "on":
                            return 0
                trouble = "the router drains: looking for it again"
            except (RequestFailed, msgspec.ValidationError) as error:  # the latter: a router of another release
                trouble = plain(str(error))
                if not states or not isinstance(error, RequestFailed) or error.http_status in FINAL:
                    sys.stderr.write(f"launch top: {trouble}\n")
                    return 1
            screen.update(Text(trouble, style="red"), refresh=True)
            time.sleep(AGAIN_S)
    return 0


def _page(roster: LiveRoster, states: Sequence[LiveState], url: str, console: Console) -> Group:
    state = states[-1]
    times = (time.strftime("%H:%M:%S", time.localtime(mark.at)) for mark in state.marks)
    marks = [Text(plain(f"{at}  {mark.who}  {mark.text}")) for at, mark in zip(times, state.marks, strict=True)]
    room = max(LEAST_LANES, console.height - min(len(roster.instances), MOST_INSTANCES) - MOST_MARKS - 6)
    lanes = _lanes(state.lanes[-room:], max(LEAST_BAR, console.width - BESIDE_BAR))
    return Group(_head(roster, states, url), _instances(roster, state), lanes, *marks[-MOST_MARKS:])


def _head(roster: LiveRoster, states: Sequence[LiveState], url: str) -> Text:
    """Rates and times are of the last WINDOW_S seconds, as far as they were read."""
    first, state = states[0], states[-1]
    parts = [f"{roster.model} at {url}", f"{state.open} open", *[*state.unready, *state.degraded][:1]]
    if passed_s := state.at - first.at:
        place = roster.figures.index("tokens_generated")
        tokens = sum(int(row[place]) for row in state.instances) - sum(int(row[place]) for row in first.instances)
        parts += [f"{tokens / passed_s:,.0f} tokens/s", f"{sum(each.ended for each in states) / passed_s:.1f} requests/s"]
    first_s = median(first.first_tokens, state.first_tokens, roster.first_token_bounds_s)
    token_s = median(first.token_times, state.token_times, roster.token_bounds_s)
    parts += [f"first token {first_s * 1e3:,.0f} ms"] if first_s else []
    parts += [f"later tokens {token_s * 1e3:,.1f} ms"] if token_s else []
    return Text(plain("   ".join(parts)), style="bold")


def _instances(roster: LiveRoster, state: LiveState) -> Table:
    """Those with the most to do first, where not all have room."""
    table = Table(*(Column(name, no_wrap=True) for name in HEAD), box=None, header_style="dim")
    of, figures = roster.of_instance.index, roster.figures.index
    pairs = list(zip(roster.instances, state.instances, strict=True))
    if len(pairs) > MOST_INSTANCES:
        pairs.sort(key=lambda pair: -sum(int(pair[1][figures(name)]) for name in COUNTS[:2]))
    for entry, row in pairs[:MOST_INSTANCES]:
        held = 1 - int(row[figures("pages_free")]) / max(1, int(entry[of("pages")]))
        named = str(entry[of("id")]), str(entry[of("role")]), str(row[figures("state")])
        counts = (f"{row[figures(name)]:,}" for name in COUNTS)
        cells = *named, f"{held:.0%}", *counts, f"{int(row[figures('pace_us')]) / 1e3:.2f} ms"
        table.add_row(*(Text(plain(cell)) for cell in cells), style="" if named[2] == "live" else "red")
    return table


def _lanes(lanes: Sequence[RequestLane], width: int) -> Table:
    """On one axis of time, whose right end is now."""
    window = max((-lane.segments[0].begin for lane in lanes), default=0) + 1
    head = ("request", "prompt", "tokens", f"the last {window / 1e3:.1f} s", "where")
    table = Table(*(Column(name, no_wrap=True) for name in head), box=None, header_style="dim")
    for lane in lanes:
        kinds = [""] * (width + 1)
        for segment in lane.segments:
            begin, end = (max(0, width + width * at // window) for at in (segment.begin, segment.end))
            kinds[begin : end + 1] = [segment.kind] * (min(end, width) + 1 - begin)
        bar = Text.assemble(*(("█" if kind else " ", STYLES[kind]) for kind in kinds))
        where = " → ".join(filter(None, (lane.first, lane.decode, lane.phase)))
        table.add_row(Text(plain(lane.id[:24])), f"{lane.prompt_tokens:,}", f"{lane.tokens:,}", bar, Text(plain(where)))
    return table


def median(before: Sequence[int], now: Sequence[int], bounds: Sequence[float]) -> float | None:
    """The median of what a histogram has counted meanwhile, as if the values in a bucket were spread evenly; None: it has not."""
    counts, least = [late - early for early, late in zip(before, now, strict=True)], 0.0
    wanted = sum(counts) / 2
    for count, bound in zip(counts, bounds, strict=False):
        if 0 < wanted <= count:
            return least + (bound - least) * wanted / count
        wanted, least = wanted - count, bound
    return least if wanted > 0 else None


def plain(text: str) -> str:
    return "".join(char if char.isprintable() else "·" for char in text)
