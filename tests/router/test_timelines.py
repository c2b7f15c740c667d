"""Timelines at a router: what it remembers, what it takes from instances, and how it answers. The last hour as a trace, in which
blocks that are the same have the same numbers; and traces over HTTP, and their bounds.
"""

import asyncio
import json
import math
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import pytest

from common.config import RouterConfig
from common.ids import ROUTER, AttemptId, InstanceId, Life, RequestId, Role, pack_ids
from common.messages import Failed, Finished, Heartbeat, InstanceInfo, Span, Spans, Timeline, Times, Trace, pack_spans
from common.messages.base import UNNAMED
from common.pages.radix_cache import BlockNames
from common.tracing import SpanRecorder
from router import timelines
from router.api.views import RequestTimeline
from router.fleet import Members
from router.timelines import (
    FAILURE_CHARS,
    HOUR_S,
    MOST_ATTEMPTS,
    MOST_FOUND,
    REMEMBERED,
    AttemptTimeline,
    Durations,
    LoadLine,
    PastLoad,
    PlacementGrounds,
    RequestTimes,
    ResumeReason,
    Timelines,
    lines_of,
)
from router.traces import FRAME_BYTES, GRACE_S, Traces
from simulation.workload import read_trace
from tests.builders import instance, key
from tests.router.calls import ALICE, BOB, CONTROL, assert_error, bearer, chat, get, keyed, metric, post, sent_to_fleet, until
from tests.router.fakes import EchoFleet, Site, Unobserved, beat, listening

pytestmark = pytest.mark.anyio
SECRET = "the prompt that nobody sees"
AT_PREFILL = Times(
    len(SECRET),
    100.0,
    admitted_s=101.0,
    first_chunk_s=101.5,
    last_chunk_s=103.0,
    asked_s=101.0,
    granted_s=101.25,
    first_push_s=102.0,
    pushed_s=103.75,
    handed_off_s=104.0,
    ended_s=104.0,
    pages_had=0,
    pages_pushed=7,
)
AT_DECODE = Times(
    len(SECRET), 101.0, admitted_s=101.125, granted_s=101.125, handed_off_s=104.5, first_decode_s=105.0, ended_s=110.5
)
PHASES = {"queue_s": 1.0, "prefill_s": 2.0, "transfer_s": 2.0, "exposed_transfer_s": 1.0, "decode_s": 6.0}
"""Differences of the above: from arrival to pages, to the first token; from the first push, and from the first token, to the
handoff; from its arrival to the end."""


def tells(of: InstanceInfo, *timelines: Timeline) -> Heartbeat:
    return msgspec.structs.replace(beat(of), timelines=timelines)


def request(name: str) -> RequestTimes:
    attempts = [AttemptTimeline(0, InstanceId("p0"), 0.0)]
    return RequestTimes(
        request_id=RequestId(name), index=0, owner="", prompt_tokens=4, received_s=0.0, tokenized_s=0.0, attempts=attempts
    )


# --- over HTTP ---------------------------------------------------------------------------------------------------------------


async def test_a_chat_is_found_by_either_id_with_what_instances_told_and_without_its_text(
    client: httpx.AsyncClient, site: Site
) -> None:
    answer = await client.post("/v1/chat/completions", json=chat(SECRET), headers={"X-Request-Id": "a/b?"})
    (asked,) = sent_to_fleet(site)
    early = (await get(site, "/requests/a%2Fb%3F")).json()["choices"][0]
    assert early["attempts"][0]["instances"] == [] and early["durations"]["prefill_s"] is None
    for of, times in ((site.fleet.decode, AT_DECODE), (site.fleet.prefill, AT_PREFILL)):
        site.fleet.say(tells(of, Timeline(asked.key, times), Timeline(key("stranger"), times), Timeline(asked.key, times)))
    await until(lambda: site.core.requests.timelines.stale == 4)
    page = await get(site, "/requests/a%2Fb%3F")
    by_answer = (await get(site, f"/requests/{answer.json()['id'].replace('/', '%2F').replace('?', '%3F')}")).json()
    timeline = msgspec.json.decode(page.content, type=RequestTimeline)
    (choice,) = timeline.choices
    (attempt,) = choice.attempts
    assert (timeline.id, by_answer["choices"]) == ("a/b?", page.json()["choices"])
    assert (choice.index, choice.prompt_tokens, choice.tokens, choice.ending) == (0, len(SECRET), 5, "length")
    assert (attempt.first, attempt.decode, attempt.resume_reason) == ("p0", "d0", None)
    assert [(told.id, told.role, told.times) for told in attempt.instances] == [
        ("p0", "prefill", AT_PREFILL),
        ("d0", "decode", AT_DECODE),
    ]
    assert choice.first_token_s is not None and choice.ended_s is not None
    own = {
        "time_to_first_token_s": pytest.approx(choice.first_token_s - choice.received_s, abs=1e-6),
        "predicted_ttft_s": None,
        "e2e_s": pytest.approx(choice.ended_s - choice.received_s, abs=1e-6),
    }
    assert msgspec.to_builtins(choice.durations) == PHASES | own
    assert SECRET not in page.text and str(list(map(ord, SECRET)))[1:-1] not in page.text
    text = (await get(site, "/metrics")).text
    names = ("request_queue", "request_prefill", "kv_transfer", "kv_transfer_exposed", "request_decode")
    for name, seconds in zip(names, PHASES.values(), strict=True):
        assert (metric(text, f"tandem_{name}_seconds_count"), metric(text, f"tandem_{name}_seconds_sum")) == (1, seconds)
    assert metric(text, "tandem_e2e_request_latency_seconds_count") == 1


async def test_a_request_is_found_while_it_is_open_and_one_that_never_came_is_not() -> None:
    async with Site(EchoFleet(stall_at=2)) as site, site.client() as client:
        site.core.unix_s = 1e9
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=chat(), headers={"X-Request-Id": "open"}))
        await until(lambda: any(len(record.token_ids) == 2 for record in site.core.requests.records()))
        (choice,) = (await get(site, "/requests/open")).json()["choices"]
        assert (choice["ending"], choice["ended_s"], choice["durations"]["e2e_s"]) == (None, None, None)
        assert choice["first_token_s"] >= choice["tokenized_s"] >= choice["received_s"] > 1e9, "UNIX time"
        message = assert_error(await get(site, "/requests/never"), 404, "invalid_request_error", None)
        assert "'never'" in message and str(REMEMBERED) in message
        asked.cancel()


async def test_a_batch_is_found_by_the_ids_of_its_parts(site: Site) -> None:
    body = {"text": ["one", "two"], "rid": ["first", "second"], "sampling_params": {"max_new_tokens": 2, "n": 2}}
    whole = (await post(site, "/generate", body)).headers["x-request-id"]
    counts = [len((await get(site, f"/requests/{name}")).json()["choices"]) for name in ("first", "second", whole, "first_1")]
    assert counts == [2, 2, 4, 1]


async def test_any_router_behind_one_port_finds_a_request_for_whom_its_own_router_shows_it_to() -> None:
    """Two routers that share nothing: one had the request, the other is asked for it, by real connections."""
    access, headers = keyed(), {"alice": bearer(ALICE), "bob": bearer(BOB), "control": bearer(CONTROL)}
    async with (
        Site(access=access) as had,
        Site(access=access) as asked,
        listening(had) as port,
        asked.client() as client,
        had.client() as own,
    ):
        sent = await own.post("/v1/chat/completions", json=chat(), headers=headers["alice"] | {"X-Request-Id": "a/b?"})
        assert sent.status_code == 200
        alone = await client.get("/requests/a%2Fb%3F", headers=headers["alice"])
        asked.api.timelines.others.meet(["http://127.0.0.1:1", f"http://127.0.0.1:{port}"])
        found = {name: await client.get("/requests/a%2Fb%3F", headers=header) for name, header in headers.items()}
        by_other_header = await client.get("/requests/a%2Fb%3F", headers={"x-api-key": ALICE})
        here = await client.get("/requests/a%2Fb%3F?here=true", headers=headers["alice"])
        expected = (await own.get("/requests/a%2Fb%3F", headers=headers["alice"])).json()
        asked.api.timelines.others.close()
    assert [alone.status_code, here.status_code, found["bob"].status_code] == [404, 404, 404]
    assert found["alice"].json() == found["control"].json() == by_other_header.json() == expected
    assert expected["id"] == "a/b?" and expected["choices"][0]["tokens"] == 5


async def test_routers_that_know_nothing_do_not_ask_each_other_in_a_circle() -> None:
    async with Site() as one, Site() as other, listening(one) as first, listening(other) as second, one.client() as client:
        one.api.timelines.others.meet([f"http://127.0.0.1:{second}"])
        other.api.timelines.others.meet([f"http://127.0.0.1:{first}"])
        message = assert_error(await client.get("/requests/never"), 404, "invalid_request_error", None)
        wrong = assert_error(await client.get("/requests/never?here=no"), 400, "invalid_request_error", "here")
        for site in (one, other):
            site.api.timelines.others.close()
    assert "'never'" in message and "here must be true" in wrong


# --- what is remembered ------------------------------------------------------------------------------------------------------


def test_the_last_requests_that_ended_are_remembered_and_forgotten_with_their_names() -> None:
    timelines = Timelines(Unobserved())
    still_open = request("open")
    timelines.begin(still_open)
    timelines.name({"both": [RequestId("open"), RequestId("unknown")]})
    for number in range(REMEMBERED + 2):
        made = request(f"r{number}")
        timelines.begin(made)
        timelines.name({f"name {number}": [made.request_id], "both": [made.request_id]})
        made.ended(Finished("stop"), 2.0)
        timelines.end(made)
    assert (len(timelines._requests), len(timelines.find("both"))) == (REMEMBERED + 1, MOST_FOUND)
    assert [timelines.find(f"name {number}") for number in (0, 1)] == [[], []]
    assert timelines.find("name 2") == [timelines._requests.get(RequestId("r2"))] and still_open not in timelines.find("both")
    assert timelines._requests.get(still_open.request_id) is still_open, "it has not ended"


def test_an_instance_tells_once_of_an_attempt_that_there_is_and_of_no_other() -> None:
    observer = Unobserved()
    timelines, decode = Timelines(observer), instance("d0", "decode")
    made = request("r")
    timelines.begin(made)
    attempts = [0, 0, 1, -1]
    timelines.receive(decode, [Timeline(AttemptId(made.request_id, number, ROUTER), AT_DECODE) for number in attempts])
    for number in range(20):
        timelines.receive(instance(f"d{number}", "decode"), [Timeline(AttemptId(made.request_id, 0, ROUTER), AT_DECODE)])
    assert len(made.attempts[0].instances) == 8 == len(observer.durations) < timelines.stale


def test_of_many_attempts_the_latest_are_remembered_under_their_numbers() -> None:
    made = request("r")
    for number in range(1, 2 * MOST_ATTEMPTS):
        made.resumed(ResumeReason.PREEMPTED, Failed(message="x" * 10_000), 1.0)
        made.dispatched(number, InstanceId(f"p{number}"), PlacementGrounds(0, 0, None, ()), 2.0)
    assert [each.number for each in made.attempts] == list(range(MOST_ATTEMPTS, 2 * MOST_ATTEMPTS))
    assert len(made.attempts[0].failure or "") == FAILURE_CHARS


@pytest.mark.parametrize(
    ("role", "times", "expected"),
    [
        ("prefill", Times(4, 1.0, ended_s=2.0), Durations()),
        ("prefill", Times(4, 1.0, admitted_s=2.0, last_chunk_s=4.0, ended_s=4.0), Durations(queue_s=1.0, prefill_s=2.0)),
        ("decode", Times(4, 1.0, admitted_s=2.0, last_chunk_s=4.0, ended_s=8.0), Durations(1.0, 2.0, decode_s=4.0)),
        ("decode", Times(4, 1.0, admitted_s=2.0, granted_s=2.0, handed_off_s=4.0, ended_s=8.0), Durations(decode_s=4.0)),
        ("decode", Times(4, 1.0, admitted_s=2.0, granted_s=2.0, handed_off_s=4.0, ended_s=3.0), Durations()),
        ("decode", Times(4, 1.0, admitted_s=2.0, granted_s=2.0, ended_s=3.0), Durations()),
        ("prefill", Times(4, math.nan, admitted_s=2.0, last_chunk_s=math.inf), Durations(prefill_s=None)),
    ],
    ids=["refused", "one token", "local prefill", "handed off", "ended before its handoff", "never handed off", "not in order"],
)
def test_durations_are_of_what_happened(role: Role, times: Times, expected: Durations) -> None:
    assert Durations.of(role, times) == expected


# --- the last hour --------------------------------------------------------------------------------------------------------------


BLOCK = 512


def told(past: PastLoad, now: float = 0.0) -> list[LoadLine]:
    return list(lines_of(past.requests(now)))


@pytest.mark.parametrize("page_size", [16, 128])
def test_two_prompts_share_the_numbers_of_the_blocks_that_they_both_begin_with(page_size: int) -> None:
    """The reference compares the tokens themselves."""
    chance, past = Random(1), PastLoad()
    prompts: list[list[int]] = []
    for _ in range(40):
        base = chance.choice(prompts) if prompts and chance.random() < 0.8 else []
        kept = base[: chance.randrange(0, len(base) + 1)]
        prompts.append([*kept, *(chance.randrange(1000) for _ in range(chance.randrange(1, 1500)))])
        past.add(float(len(prompts)), len(prompts[-1]), 7, BlockNames.of(pack_ids(prompts[-1]), page_size), 0.0)
    lines = told(past)
    for one, line in zip(prompts, lines, strict=True):
        assert len(line.hash_ids) == -(-len(one) // BLOCK)
        for other, other_line in zip(prompts, lines, strict=True):
            if other is one:
                continue
            whole = [
                at for at in range(min(len(one), len(other)) // BLOCK) if one[: (at + 1) * BLOCK] == other[: (at + 1) * BLOCK]
            ]
            same = [at for at, (a, b) in enumerate(zip(line.hash_ids, other_line.hash_ids, strict=False)) if a == b]
            assert same == whole
    assert sorted({number for line in lines for number in line.hash_ids})[-1] < sum(len(line.hash_ids) for line in lines)


def test_requests_are_told_in_the_order_in_which_they_came_and_for_an_hour() -> None:
    past = PastLoad()
    past.add(100.0, 10, 3, None, 120.0)
    past.add(90.5, 600, 0, None, 130.0)
    assert [(each.timestamp, each.input_length, each.output_length) for each in told(past, 130.0)] == [(0, 600, 1), (9500, 10, 3)]
    assert told(past, 100.0 + HOUR_S + 1) == []


def test_only_so_many_requests_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MOST_REQUESTS", 20)
    past = PastLoad()
    for number in range(25):
        past.add(float(number), 1, 1, None, float(number % 2))
    assert len(past.requests(0.0)) == 20


@pytest.mark.anyio
async def test_the_page_is_a_trace_that_a_simulation_reads_and_holds_nothing_that_was_said(
    site: Site, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    secret = "the prompt that nobody sees"
    for _ in range(3):
        assert (await client.post("/v1/chat/completions", json=chat(secret))).status_code == 200
    read = await client.get("/cluster/load")
    lengths = {(each.prompt_tokens, each.answer_tokens) for each in site.core.requests.past.requests(site.gateway.clock())}
    assert read.headers["content-type"] == "application/x-ndjson"
    assert {key for line in read.text.splitlines() for key in json.loads(line)} == {
        "timestamp", "input_length", "output_length", "hash_ids",
    }  # fmt: skip
    assert secret not in read.text
    file = tmp_path / "load.jsonl"
    file.write_text(read.text)
    assert {(each.turns[0].input_tokens, each.turns[0].output_tokens) for each in read_trace(str(file))} == lengths


# --- traces ---------------------------------------------------------------------------------------------------------------------


TEXT = InstanceId("router.text-0")
SPANS = tuple(Span("turns", "turn", float(at), at + 0.5, "", {"tokens": at}) for at in range(3))


def made() -> Traces:
    fleet = Members(ROUTER, ["tcp://detokenizer:1"], RouterConfig())
    return Traces(ROUTER, (TEXT,), fleet, SpanRecorder())


def said(number: int = 1, **fields: Any) -> Spans:
    return msgspec.structs.replace(Spans(id=TEXT, number=number, count=3, packed=pack_spans(SPANS)), **fields)


def test_a_trace_is_over_when_all_have_said_so_or_have_had_their_time() -> None:
    traces = made()
    (told,) = traces.start(10.0, 100.0)
    assert (told.to, told.message) == (TEXT, Trace(seconds=10.0, number=1))
    assert traces.next_deadline() == 110.0
    traces.tick(110.0)
    assert traces.next_deadline() is None and traces.status(110.0).state == "running"
    assert traces.status(110.0 + GRACE_S).state == "over", "one that died says nothing"
    traces.receive(said(last=True))
    assert traces.status(110.0).state == "over"


def test_what_does_not_fit_is_refused_and_counted_and_so_is_what_belongs_to_another_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = len(pack_spans(SPANS)) + FRAME_BYTES
    monkeypatch.setattr("router.traces.MOST_BYTES", size + 1)
    traces = made()
    traces.start(10.0, 0.0)
    for message in (said(number=7), said(id=InstanceId("stranger")), said(dropped=5), said()):
        traces.receive(message)
    status = traces.status(0.0)
    assert (len(traces.frames()), status.bytes, status.spans_refused) == (1, size, 3)
    assert (status.processes[1].spans, status.processes[1].dropped) == (6, 5)
    assert traces.joined(Life(InstanceId("stranger"), UNNAMED), 1.0) == []
    (send,) = traces.end(1.0)
    assert send.message == Trace(seconds=0.0, number=1)
    assert [type(send.message) for send in traces.start(10.0, 2.0)] == [Trace] and traces.frames() == []


@pytest.mark.anyio
async def test_a_trace_is_begun_read_and_forgotten_over_http() -> None:
    fleet = EchoFleet()
    async with Site(fleet) as site, site.client() as client:
        assert_error(await client.get("/cluster/trace"), 404, "invalid_request_error", None)
        for seconds in ("0", "601", "nan", "soon"):
            refused = await client.post("/cluster/trace", params={"seconds": seconds})
            assert_error(refused, 400, "invalid_request_error", "seconds")
        begun = await client.post("/cluster/trace", params={"seconds": "60"})
        assert begun.status_code == 202 and begun.json()["state"] == "running"
        roles = [process["role"] for process in begun.json()["processes"]]
        assert roles[:2] == ["router", "detokenizer"] and {"prefill", "decode"} == set(roles[2:])
        assert_error(await client.post("/cluster/trace"), 409, "invalid_request_error", None)
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
        assert len((await client.get("/cluster/trace")).text.splitlines()) == 1, "there are no spans before it is over"
        traces = site.core.traces
        for at, process in enumerate(begun.json()["processes"][1:], 1):
            of = {"id": InstanceId(process["id"]), "incarnation": process["incarnation"], "last": True}
            traces.receive(said(packed=b"\xff" if at == 2 else pack_spans(SPANS), **of))
        assert traces._trace is not None
        traces._trace.ends_s = site.gateway.clock()
        traces.tick(site.gateway.clock())
        read = await client.get("/cluster/trace")
        assert read.headers["content-type"] == "application/x-ndjson"
        status, *lines = map(json.loads, read.text.splitlines())
        assert status["state"] == "over"
        own = [line for line in lines if line["process"] == 0]
        assert sorted(line["track"] for line in own) == ["attempts", "requests"]
        others = [line for line in lines if line["process"] > 0]
        assert len(others) == 3 * (len(roles) - 2), "what cannot be read is left out"
        assert others[0] == {
            "process": 1, "track": "turns", "name": "turn", "begin_s": 0.0, "end_s": 0.5, "request": "", "args": {"tokens": 0},
        }  # fmt: skip
        assert (await client.delete("/cluster/trace")).status_code == 200
        assert (await client.get("/cluster/trace")).status_code == 404
