"""Traces over HTTP, and their bounds at the router."""

import json
from typing import Any

import msgspec
import pytest

from common.config import RouterConfig
from common.ids import ROUTER, InstanceId, Life
from common.messages import Span, Spans, Trace, pack_spans
from common.messages.base import UNNAMED
from common.tracing import SpanRecorder
from router.fleet import Members
from router.traces import FRAME_BYTES, GRACE_S, Traces
from tests.router.calls import assert_error, chat
from tests.router.fakes import EchoFleet, Site

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
