"""`launch bench trace`: its flags, a recording against a router behind a real socket that wants its control key, and the slices
and flows of any spans, checked event by event.
"""

import asyncio
import gzip
import itertools
import json
import shlex
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.options import DECIDED_BY_TRACE, LoadOptions, TraceOptions, WorkloadOptions
from bench.trace import (
    TraceFailed,
    TraceRecording,
    events,
    lanes,
    paths_of_requests,
    slices_of,
    table,
    write,
)
from common.access import Access, KeyRing
from common.errors import ConfigError
from common.ids import InstanceId
from common.options import read_config, to_flags
from common.tracing import TracedProcess, TraceLine, TraceStatus
from launch.main import build_parser, main
from tests.router.fakes import Site, listening


def test_the_command_can_be_repeated_and_the_load_lasts_as_long_as_the_trace() -> None:
    bench, workload = (
        TraceOptions(fleet="--decode 2 --model 'my model'", rate=3.0, seconds=20.0),
        WorkloadOptions(random_input_len=64),
    )
    assert bench.fleet_flags == ("--decode", "2", "--model", "my model")
    command = shlex.join(to_flags(bench, workload, LoadOptions(), without=DECIDED_BY_TRACE))
    flags = build_parser().parse_args(["bench", "trace", *shlex.split(command)])
    assert read_config(TraceOptions, flags) == bench
    sent = bench.load_on("http://h:1", read_config(WorkloadOptions, flags), read_config(LoadOptions, flags))
    assert (sent.workload.num_prompts, sent.load.request_rate, sent.target.url) == (60, 3.0, "http://h:1")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--seconds", "601"), "--seconds must be above 0 and at most 600"),
        (("--rate", "0"), "--rate must be above 0"),
        (("--out", "trace.json"), "--out must be a name that ends with .gz"),
        (("--fleet", "'"), "--fleet: the quotes"),
        (("--url", "host:1"), "--url must be http://host:port"),
        (("--url", "http://h:1", "--rate", "3"), "--rate has no effect with --url"),
        (("--insecure", "on"), "--insecure has no effect without --url"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "trace", *flags]) == 2
    assert says in capsys.readouterr().err


def test_flags_of_a_load_that_nobody_sends_are_refused() -> None:
    with pytest.raises(ConfigError, match="--random-input-len has no effect with --url"):
        TraceOptions(url="http://h:1").check_load(WorkloadOptions(random_input_len=5), LoadOptions())


CONTROL = "c" * 20


def record(url: str) -> None:
    with closing(TraceRecording(url)) as stranger, pytest.raises(TraceFailed, match="HTTP 401"):
        stranger.begin(1.0)
    with closing(TraceRecording(f"{url}/", CONTROL)) as recording, closing(TraceRecording(url, CONTROL)) as other:
        recording.begin(0.01)
        with pytest.raises(TraceFailed, match=r"HTTP 409.*a trace runs already"):
            other.begin(1.0)
        status, lines = recording.spans()
        assert (status.seconds, list(lines)) == (0.01, [])
        assert {process.role for process in status.processes} == {"router", "detokenizer", "prefill", "decode"}
        recording.forget()
        with pytest.raises(TraceFailed, match=r"HTTP 404.*begin one with POST /cluster/trace"):
            recording.spans()


def test_a_recording_shows_its_key_and_fails_with_the_routers_words() -> None:
    async def main() -> None:
        async with Site(access=Access(None, KeyRing({CONTROL: "control"}))) as site, listening(site) as port:
            await asyncio.to_thread(record, f"http://127.0.0.1:{port}")

    asyncio.run(main())


def test_nobody_is_there() -> None:
    with (
        closing(TraceRecording("http://127.0.0.1:9")) as recording,
        pytest.raises(TraceFailed, match="the router does not answer"),
    ):
        recording.begin(1.0)


BEGAN_S = 1.7e9
PROCESSES = [
    TracedProcess(id=InstanceId("prefill-0"), role="prefill", pid=7, host="h"),
    TracedProcess(id=InstanceId("router"), role="router"),
]
TIMES = st.integers(-50, 200)


def line_of(track: str, begin_s: float = 0.0, end_s: float = 0.5, request: str = "", **args: int) -> TraceLine:
    return TraceLine(0, track, track, BEGAN_S + begin_s, BEGAN_S + end_s, request, args)


@st.composite
def a_line(draw: st.DrawFn) -> TraceLine:
    begin_s = BEGAN_S + draw(TIMES) / 1e5
    return TraceLine(
        process=draw(st.integers(0, 1)),
        track=draw(st.sampled_from(["requests", "chunks", "pushes", "another"])),
        name="n",
        begin_s=begin_s,
        end_s=begin_s + draw(st.integers(0, 40)) / 1e5,
        request=draw(st.sampled_from(["", "a", "b"])),
        args=draw(st.sampled_from([{}, {"bytes": 5, "peer": "decode-1"}])),
    )


LINES = st.lists(a_line(), max_size=25)


@given(st.lists(st.tuples(TIMES, st.integers(1, 60)).map(lambda pair: (pair[0], sum(pair))), max_size=30))
def test_intervals_of_a_lane_do_not_overlap_and_there_are_as_many_lanes_as_overlap_somewhere(
    intervals: list[tuple[int, int]],
) -> None:
    chosen = lanes(intervals)
    for lane in set(chosen):
        taken = sorted(interval for interval, its in zip(intervals, chosen, strict=True) if its == lane)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(taken))
    deepest = max((sum(begin <= at < end for begin, end in intervals) for at, _ in intervals), default=0)
    assert len(set(chosen)) == deepest


@given(LINES)
def test_every_span_is_a_slice_with_its_time_to_a_microsecond(lines: list[TraceLine]) -> None:
    slices = slices_of(lines, BEGAN_S)
    assert len(slices) == len(lines)
    expected = sorted((line.process, line.track, round((line.begin_s - BEGAN_S) * 1e6), line.request) for line in lines)
    found = sorted((each.span.process, each.span.track, each.begin_us, each.span.request) for each in slices)
    for (*is_, begin, of), (*was, due, its) in zip(found, expected, strict=True):
        assert (is_, of) == (was, its) and abs(begin - due) <= 1


@given(LINES)
def test_a_way_leads_through_every_slice_of_its_request_in_the_order_of_their_begins(lines: list[TraceLine]) -> None:
    slices = slices_of(lines, BEGAN_S)
    found = list(paths_of_requests(slices))
    for way in found:
        begins = [each.begin_us for each in way]
        assert begins == sorted(begins)
        assert {id(each) for each in way} == {id(each) for each in slices if each.span.request == way[0].span.request}
    several = {name for name in ("a", "b") if sum(line.request == name for line in lines) > 1}
    assert sorted(way[0].span.request for way in found) == sorted(several)


@given(LINES)
def test_slices_of_a_thread_do_not_overlap_and_every_event_of_a_flow_lies_within_one(lines: list[TraceLine]) -> None:
    made: list[dict[str, Any]] = list(events(PROCESSES, slices_of(lines, BEGAN_S)))
    threads: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in made:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for taken in threads.values():
        taken.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(taken))
    flows: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in made:
        if event["ph"] in "stf":
            assert any(begin <= event["ts"] < end for begin, end in threads[event["pid"], event["tid"]])
            flows[event["id"]].append(event)
    for flow in flows.values():
        assert "".join(event["ph"] for event in flow) == "s" + "t" * (len(flow) - 2) + "f"


def test_a_step_that_came_back_together_with_another_is_on_its_lane() -> None:
    times = [(0.0, 0.01), (0.01, 0.01), (0.01, 0.02)]
    steps = [line_of("steps", begin_s, end_s) for begin_s, end_s in times]
    slices = slices_of(steps, BEGAN_S)
    assert [each.lane for each in slices] == [0, 0, 0] and slices[1].end_us - slices[1].begin_us == 1


def test_the_file_is_json_and_names_every_process_and_thread(tmp_path: Path) -> None:
    lines = [
        line_of("steps"),
        line_of("chunks", request="a", tokens=8),
        line_of("chunks", request="b", tokens=4),
        line_of("pushes", end_s=0.1, request="a", bytes=2_000_000),
    ]
    status = TraceStatus(number=1, state="over", began_s=BEGAN_S, seconds=2.0, processes=PROCESSES, bytes=9, spans_refused=0)
    slices = slices_of(lines, BEGAN_S)
    path = tmp_path / "trace.json.gz"
    assert write(str(path), status, slices) == path.stat().st_size
    found = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {(event["name"], event["args"]["name"]) for event in found if event["name"] in ("process_name", "thread_name")}
    assert names == {
        *(("process_name", process.id) for process in PROCESSES),
        *(("thread_name", name) for name in ("steps", "chunks", "chunks 2", "pushes")),
    }
    router, prefill = table(status, slices)[1:]
    assert router[0] == "router" and prefill[:7] == ("prefill-0", "25.0%", "1", "2", "12", "1", "2.00")
