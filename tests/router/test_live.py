"""The live page and its states: what is told and when, against times by hand; who may look; and what a page may load."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterable
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from common.messages import Finished, Goodbye, Load, Register, Timeline, Times
from router.api import views
from router.live import MOST_LANES, MOST_MARKS, LiveRoster, LiveState, LiveView
from router.metrics import RouterMetrics
from router.timelines import ResumeReason
from tests.builders import instance, key
from tests.router.bench import D0, D1, P0, Bench, spec
from tests.router.calls import ALICE, CONTROL, assert_error, bearer, chat, get, keyed, until
from tests.router.fakes import EchoFleet, Site, beat, listening

pytestmark = pytest.mark.anyio
SECRET = "the prompt that nobody sees"
NAMED = "demo", "auto", "least_loaded", "least_loaded"
FILES = ("live.js", "dom.js", "fleet.js", "lanes.js", "charts.js", "details.js", "live.css", "uplot.js", "uplot.css")


# --- what a state says ---------------------------------------------------------------------------------------------------------


def view_of(bench: Bench, now: float = 0.0) -> tuple[LiveView, RouterMetrics]:
    metrics = RouterMetrics()
    return LiveView(bench.core, metrics, NAMED, now), metrics


def figures(view: LiveView, state: LiveState) -> dict[str, dict[str, Any]]:
    roster = view.roster
    rows = zip(roster.instances, state.instances, strict=True)
    return {str(entry[0]): dict(zip(roster.figures, row, strict=True)) for entry, row in rows}


def segments(state: LiveState) -> list[tuple[str, int, int]]:
    (lane,) = state.lanes
    return [(each.kind, each.begin, each.end) for each in lane.segments]


async def test_a_lane_fills_with_what_the_router_knows_and_then_with_what_instances_tell() -> None:
    bench = Bench(P0, D0).serving()
    view, _ = view_of(bench)
    assert segments(await view.look(0.4)) == [("prefill", -400, 0)], "it is first in the queue from its start"
    bench.text(0, "a", now=1.0)
    bench.text(1, "b", now=1.5)
    state = await view.look(2.0)
    assert segments(state) == [("prefill", -2000, -1000), ("decode", -1000, 0)]
    times = Times(20, 0.1, admitted_s=0.25, last_chunk_s=0.9, granted_s=0.3, first_push_s=0.5, handed_off_s=1.2, chunks=3)
    bench.core.receive(msgspec.structs.replace(beat(P0), timelines=(Timeline(key(), times),)), 2.0)
    bench.text(2, "c", Finished(reason="length"), now=3.0)
    state = await view.look(4.0)
    assert segments(state) == [
        ("queue", -4000, -3750),
        ("prefill", -3750, -3000),
        ("push", -3500, -2800),
        ("decode", -3000, -1000),
    ]
    (lane,) = state.lanes
    assert (lane.phase, lane.is_over, lane.tokens, lane.chunks, lane.first, lane.decode) == ("length", True, 3, 3, "p0", "d0")
    assert (state.ended, state.latest) == (1, [(1.0, 1.0, True)]), "its first token after 1 s, and 2 s for the other two"
    assert (await view.look(4.1 + views.BEAT_S)).ended == 0
    assert (await view.look(20.0)).lanes == [], "it is forgotten"


async def test_a_request_behind_another_one_queues_and_one_that_is_resumed_waits_and_begins_anew() -> None:
    bench = Bench(P0, D0).serving(spec("first"), spec("second", 1))
    view, _ = view_of(bench)
    lanes = {lane.place: [each.kind for each in lane.segments] for lane in (await view.look(1.0)).lanes}
    assert lanes == {"first": ["prefill"], "second": ["queue"]}
    bench.text(0, "a", now=1.5, name="first")
    later = {lane.place: [(each.kind, each.begin) for each in lane.segments] for lane in (await view.look(2.0)).lanes}
    assert later["second"] == [("queue", -2000), ("prefill", -500)], "its turn came with the other's first token"
    bench.leave(D0, 3.0)
    bench.leave(P0, 3.0)
    (lane, _) = (await view.look(4.0)).lanes
    assert [(each.kind, each.begin, each.end) for each in lane.segments][-1] == ("waits", -1000, 0) and lane.phase == "waits"
    bench.join(D1, 5.0)
    both = (await view.look(6.0)).lanes
    ends = [[(each.kind, each.begin) for each in lane.segments][-2:] for lane in both]
    assert sorted(ends) == [[("waits", -3000), ("prefill", -1000)], [("waits", -3000), ("queue", -1000)]]
    assert {lane.first for lane in both} == {"d1"}


async def test_what_happened_to_the_fleet_is_marked_once_also_what_happened_before_anybody_looked() -> None:
    bench = Bench(P0, D0, D1)
    view, metrics = view_of(bench)
    metrics.resumed(ResumeReason.PREEMPTED)
    assert [(mark.kind, mark.who) for mark in (await view.look(1.0)).marks] == [("joined", name) for name in ("p0", "d0", "d1")]
    bench.report(D1, 1.2, draining=True)
    metrics.resumed(ResumeReason.PREEMPTED)
    metrics.resumed(ResumeReason.LOST_INSTANCE)
    marks = [(mark.kind, mark.who, mark.text) for mark in (await view.look(2.0)).marks][3:]
    expected = "live → draining: it is leaving the fleet"
    assert marks == [("state", "d1", expected), ("resumed", "", "1 resumed: preempted")]
    version = view.roster.version
    bench.core.receive(Goodbye(id=D1.id, incarnation=D1.incarnation, reason="its node is gone"), 2.5)
    bench.core.receive(Register(instance=instance("d0", "prefill", "2")), 2.6)
    state = await view.look(3.0)
    assert [(mark.kind, mark.who, mark.text) for mark in state.marks[5:]] == [
        ("left", "d1", "is lost: its node is gone"),
        (
            "left",
            "d0",
            "is lost: replaced by a newer incarnation at tcp://127.0.0.1:12 (it was at tcp://127.0.0.1:11): if both run, give "
            "them different names",
        ),
        ("joined", "d0", "is back from 127.0.0.1:12 (prefill, 64 pages)"),
    ]
    assert state.roster == view.roster.version == version + 1
    assert (await view.look(4.0)).marks == state.marks


async def test_figures_are_those_that_an_instance_reported() -> None:
    bench = Bench(P0, D0)
    view, _ = view_of(bench)
    load = Load(
        waiting_requests=2, running_requests=3, running_tokens=100, pages_free=50, pages_cached=7, reservations=1,
        step_s=0.01, decode_row_s=0.002, held_token_s=0.0001,
    )  # fmt: skip
    bench.report(D0, 1.0, load)
    found = figures(view, await view.look(1.0))["d0"]
    assert (found["waiting_requests"], found["running_requests"], found["pages_free"], found["pages_cached"]) == (2, 3, 50, 7)
    assert found["pace_us"] == 26_000, "10 ms, 2 ms for each of 3 rows, and 0.1 ms for each of 100 tokens"


async def test_a_state_of_hundreds_of_instances_and_of_requests_is_bounded() -> None:
    members = [instance(f"{role}-{number:03}", role) for role in ("prefill", "decode") for number in range(150)]
    bench = Bench()
    for member in members:
        bench.core.receive(Register(instance=member), 0.0)
    specs = [spec(f"r{number}", number) for number in range(300)]
    with contextlib.suppress(Exception):
        bench.submit(*specs)
    view, _ = view_of(bench)
    state = await view.look(1.0)
    assert len(state.lanes) <= MOST_LANES and state.links == [] and len(state.instances) == 300
    assert len(msgspec.json.encode(state)) < 40_000
    for member in members:
        bench.core.receive(Goodbye(id=member.id, incarnation=member.incarnation), 1.5)
    state = await view.look(2.0)
    assert len(state.marks) == MOST_MARKS and len(msgspec.json.encode(state)) < 40_000


# --- who looks, and what that costs --------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def looking(site: Site) -> AsyncIterator[AsyncIterator[bytes]]:
    """Look as a viewer does, without a socket."""
    with site.api.live.look() as events:
        yield events


def said(event: bytes) -> list[Any]:
    return [json.loads(each.removeprefix(b"data: ")) for each in event.split(b"\n\n") if each]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When states were computed. One comes every 10 ms."""
    times: list[float] = []
    look = LiveView.look

    async def counted(self: LiveView, now: float) -> LiveState:
        times.append(now)
        return await look(self, now)

    monkeypatch.setattr(LiveView, "look", counted)
    monkeypatch.setattr(views, "BEAT_S", 0.01)
    return times


async def test_nothing_is_computed_for_nobody_and_once_for_all_who_look(site: Site, looks: list[float]) -> None:
    await asyncio.sleep(0.05)
    assert looks == []
    async with looking(site) as one, looking(site) as other:
        first, second = await anext(one), await anext(other)
        assert first == second and len(looks) == 1
        roster, state = said(first)
        assert (roster["type"], state["type"], [row[0] for row in roster["instances"]]) == ("roster", "state", ["p0", "d0"])
        (later,) = said(await anext(one))
        assert later["type"] == "state" and later["at"] > state["at"]
    computed = len(looks)
    await asyncio.sleep(0.05)
    assert len(looks) == computed and site.api.live.viewers == 0, "the last one has left"


async def test_who_reads_slowly_misses_states_and_keeps_nobody_waiting(site: Site, looks: list[float]) -> None:
    async with looking(site) as slow, looking(site) as quick:
        await anext(slow)
        for _ in range(20):
            await anext(quick)
        (state,) = said(await anext(slow))
        assert state["at"] == round(looks[-1], 3), "the newest one is next"


async def test_there_are_as_many_viewers_as_may_look_and_a_place_is_free_when_one_leaves(site: Site) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(views.MOST_VIEWERS):
            await stack.enter_async_context(looking(site))
        refused = await get(site, "/cluster/events")
        assert_error(refused, 429, "overloaded_error", None)
        assert refused.headers["retry-after"] == str(views.RETRY_S)
    assert site.api.live.viewers == 0


async def test_a_drain_ends_the_stream_and_a_viewer_who_leaves_his_connection_frees_his_place(looks: list[float]) -> None:
    async with Site() as site, listening(site) as port:
        for request in (b"GET /cluster/events HTTP/1.1\r\nhost: localhost\r\n\r\n",) * 2:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            await reader.readuntil(b'"state"')
            assert site.api.live.viewers == 1
            writer.close()
            await until(lambda: site.api.live.viewers == 0)
        async with looking(site) as events:
            await anext(events)
            site.core.requests.is_draining = True
            last = [event async for event in events][-1]
        assert last == b"data: [DONE]\n\n"
        assert_error(await get(site, "/cluster/events"), 503, "unavailable_error", None)


async def test_no_text_and_no_token_of_a_request_is_told() -> None:
    async with Site(EchoFleet(stall_at=3)) as site, site.client() as client:
        headers = {"X-Request-Id": "<b>mine</b>"}
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=chat(SECRET), headers=headers))
        await until(lambda: any(len(record.token_ids) == 3 for record in site.core.requests.records()))
        async with looking(site) as events:
            event = await anext(events)
        asked.cancel()
    (lane,) = said(event)[1]["lanes"]
    assert lane[0] == "<b>mine</b>" and SECRET.encode() not in event and SECRET[:3].encode() not in event
    assert str(list(map(ord, SECRET[:3])))[1:-1].replace(" ", "").encode() not in event


async def test_only_the_control_key_opens_the_states_and_the_page_itself_needs_none() -> None:
    async with Site(access=keyed()) as site, site.client() as client:
        for name in ("/", *(f"/page/{name}" for name in FILES)):
            assert (await client.get(name, headers={"accept": "text/html"})).status_code == 200, name
        for given in ({}, bearer(ALICE)):
            assert (await client.get("/cluster/events", headers=given)).status_code == 401
        site.core.requests.is_draining = True  # so that the answer ends
        assert (await client.get("/cluster/events", headers=bearer(CONTROL))).status_code == 503


# --- the page ------------------------------------------------------------------------------------------------------------------


class Seen(HTMLParser):
    """The attributes of all elements, and what stands within scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.inline: list[str] = []
        self._within = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._within = tag

    def handle_data(self, data: str) -> None:
        if self._within in ("script", "style") and data.strip():
            self.inline.append(data)


async def test_the_page_loads_only_its_own_files_and_says_so_to_the_browser(site: Site) -> None:
    async with site.client() as client:
        page = await client.get("/", headers={"accept": "text/html,*/*"})
        text = (await client.get("/")).text
        served = {name: await client.get(f"/page/{name}") for name in FILES}
        assert (await client.get("/page/index.html")).status_code == 404
        assert (await client.get("/page/..%2f..%2fpyproject.toml")).status_code == 404
    assert "<" not in text and "/docs" in text, "a hint for who sees no page"
    rules = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == rules["form-action"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'" and rules["trusted-types"] == "'none'"
    seen = Seen()
    seen.feed(page.text)
    assert seen.inline == [] and not [each for each in seen.attributes if each[1] == "style" or each[1].startswith("on")]
    loaded = {value for _, name, value in seen.attributes if name in ("src", "href")} - {"data:,"}
    assert loaded <= {f"page/{name}" for name in FILES}
    imported = set(re.findall(r'from "\./([\w.]+)"', "".join(served[name].text for name in FILES if name != "uplot.js")))
    assert imported <= set(FILES)
    for name, answer in served.items():
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", answer.text), name
        assert not re.search(r"https?://(?!www\.w3\.org|github\.com/leeoniya)", answer.text), name


def test_the_structs_of_a_state_are_read_back_as_they_were_sent(bench: Bench) -> None:
    view, _ = view_of(bench)
    state = asyncio.run(view.look(1.0))
    both: Iterable[LiveRoster | LiveState] = (view.roster, state)
    assert [msgspec.json.decode(msgspec.json.encode(each), type=LiveRoster | LiveState) for each in both] == [view.roster, state]
