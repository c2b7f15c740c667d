"""What is told of requests that have ended: the access log, and spans for a collector, which reads them with its own messages."""

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")

from common.config import ModelConfig, RouterConfig
from common.errors import ConfigError, Unavailable
from common.ids import ROUTER, InstanceId
from common.logs import JsonLines, TextLines
from common.messages import Failed, Timeline, Times
from router import timelines
from router.api import spans
from router.api.admission import ServedRequest
from router.api.spans import SpanMaker
from router.process import serve
from tests.rig.collector import Collector, collecting, tree, values
from tests.router.calls import ALICE, bearer, chat, completion, get, keyed, message, metric, sent_to_fleet, until
from tests.router.fakes import EchoFleet, Site
from tests.router.test_disconnects import RawClient
from tests.router.test_timelines import tells

pytestmark = pytest.mark.anyio
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
"""The example of W3C's trace context."""
SET_BACK = Failed.of(Unavailable("the push failed"))


def config(collector: str = "http://127.0.0.1:1", **more: Any) -> RouterConfig:
    return RouterConfig(**{"dead_after_s": 60.0, "otlp_endpoint": collector, **more})


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


@asynccontextmanager
async def tracing(collector: str | RouterConfig, fleet: EchoFleet | None = None, **options: Any) -> AsyncIterator[Site]:
    """A router that makes spans for it. When this is left, they are sent."""
    served = config(collector) if isinstance(collector, str) else collector
    async with Site(fleet, served, **options) as site:
        made = site.api.admission.to_spans = SpanMaker(served, site.core, site.metrics)
        made._wait_s = 0.1
        try:
            yield site
        finally:
            await asyncio.to_thread(made.close)


def fates(site: Site) -> dict[str, float]:
    text = site.metrics.text().decode()
    names = ("sent", "late", "full", "refused")
    return {name: metric(text, f'tandem_router_spans_total{{fate="{name}"}}') for name in names}


# --- the spans of a request ----------------------------------------------------------------------------------------------------


async def test_a_request_is_one_trace_below_its_clients_span_from_the_router_to_both_instances(collector: Collector) -> None:
    async with tracing(collector.url, access=keyed()) as site, site.client() as client:
        site.core.unix_s = 0.0
        headers = {**SAMPLED, "tracestate": "vendor=1", "X-Request-Id": "one", **bearer(ALICE)}
        site.fleet.cached_tokens = 3
        answer = await client.post("/v1/chat/completions", json=chat(max_tokens=4, temperature=0.5), headers=headers)
        assert answer.status_code == 200
        (asked,), at = sent_to_fleet(site), time.monotonic()
        prefill = Times(5, at, admitted_s=at + 1, last_chunk_s=at + 3, granted_s=at + 2, handed_off_s=at + 4, ended_s=at + 4)
        decode = Times(5, at, admitted_s=at + 2, granted_s=at + 2, handed_off_s=at + 4.5, ended_s=at + 9)
        for of, times in ((site.fleet.prefill, prefill), (site.fleet.decode, decode)):
            site.fleet.say(tells(of, Timeline(asked.key, times)))
        await until(lambda: len(site.core.requests.timelines.find("one")[0].attempts[0].instances) == 2)
    spans = {span.name: span for span in collector.spans}
    stages = ["queue", "prefill", "transfer", "exposed transfer", "decode"]
    assert tree(collector.spans) == {"": ["chat echo"], "chat echo": ["intake", "attempt 0"], "attempt 0": stages}
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    root = spans["chat echo"]
    assert (root.parent_span_id.hex(), root.trace_state, root.kind) == (PARENT, "vendor=1", root.SPAN_KIND_SERVER)
    seconds = {name: (spans[name].end_time_unix_nano - spans[name].start_time_unix_nano) / 1e9 for name in stages}
    assert seconds == pytest.approx({"queue": 1, "prefill": 2, "transfer": 2, "exposed transfer": 1, "decode": 4.5})
    assert [values(spans[name].attributes)["tandem.instance"] for name in ("queue", "decode")] == ["p0", "d0"]
    told = values(root.attributes)
    assert told.pop("gen_ai.response.time_to_first_chunk") > 0
    assert told == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "tandem.request_id": "one",
        "tandem.key": "alice",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": "echo",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 3,
    }
    assert collector.resource["service.name"] == "tandem" and set(collector.paths) == {"/v1/traces"}
    assert ALICE not in str(collector.requests) and fates(site)["sent"] == len(collector.spans) == 8


async def test_a_resume_is_an_attempt_of_its_own_with_a_link_to_the_one_before(collector: Collector) -> None:
    async with tracing(collector.url, EchoFleet(2, failing=1, failed=SET_BACK)) as site, site.client() as client:
        assert (await client.post("/v1/completions", json=completion(max_tokens=4), headers=SAMPLED)).status_code == 200
    spans = {span.name: span for span in collector.spans}
    first, second = spans["attempt 0"], spans["attempt 1"]
    told = values(first.attributes)
    assert (told["tandem.tokens"], told["tandem.resume_reason"]) == (2, "failed_attempt")
    assert first.status.code == first.status.STATUS_CODE_ERROR and "the push failed" in first.status.message
    assert [link.span_id for link in second.links] == [first.span_id] and not first.links
    assert values(second.attributes)["tandem.tokens"] == 2 and second.status.code == second.status.STATUS_CODE_UNSET
    assert values(spans["text_completion echo"].attributes)["gen_ai.usage.output_tokens"] == 4
    assert first.end_time_unix_nano <= second.start_time_unix_nano


@pytest.mark.parametrize(
    ("path", "body", "status", "name", "told"),
    [
        ("/v1/messages", message(), 200, "chat echo", {}),
        ("/v1/responses", {"model": "echo", "input": "a"}, 200, "chat echo", {}),
        ("/generate", {"text": ["a", "b"]}, 200, "text_completion echo", {"gen_ai.usage.input_tokens": 2}),
        ("/v1/completions", completion(n=2), 200, "text_completion echo", {"gen_ai.request.choice.count": 2}),
        ("/v1/completions", completion(stream=True), 200, "text_completion echo", {"gen_ai.request.stream": True}),
        ("/v1/chat/completions", chat(n=0), 400, "POST /v1/chat/completions", {"http.response.status_code": 400}),
        ("/tokenize", {"prompt": "a"}, 200, "POST /tokenize", {}),
    ],
)
async def test_what_the_first_span_says(
    collector: Collector, path: str, body: Any, status: int, name: str, told: dict[str, Any]
) -> None:
    async with tracing(collector.url) as site, site.client() as client:
        assert (await client.post(path, json=body, headers=SAMPLED)).status_code == status
    (root,) = [span for span in collector.spans if span.parent_span_id.hex() == PARENT]
    assert root.name == name and told.items() <= values(root.attributes).items()


async def test_an_answer_that_fails_in_its_middle_is_an_error_though_its_status_was_200(collector: Collector) -> None:
    fleet = EchoFleet(fail_at=2)
    async with tracing(collector.url, fleet) as site, site.client() as client:
        streamed = await client.post("/v1/completions", json=completion(stream=True), headers=SAMPLED)
        assert streamed.status_code == 200
    root = next(span for span in collector.spans if span.parent_span_id.hex() == PARENT)
    assert root.status.code == root.status.STATUS_CODE_ERROR and values(root.attributes)["error.type"]


HOSTILE = [
    f"00-{TRACE}-{PARENT}-01-more",
    f"ff-{TRACE}-{PARENT}-01",
    f"00-{'0' * 32}-{PARENT}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"00-{TRACE.upper()}-{PARENT}-01",
    f"00-{TRACE}-{PARENT}-zz",
    "00-" * 8000,
    "\x00\x1b[31m",
    "é" * 100,
    "",
]


@pytest.mark.parametrize("header", HOSTILE, ids=range(len(HOSTILE)))
async def test_a_parent_that_is_none_begins_a_trace_of_its_own(collector: Collector, header: str) -> None:
    async with tracing(collector.url) as site:
        assert await answered(site, (b"traceparent", header.encode())) == 200
    assert tree(collector.spans)[""] == ["chat echo"] and {span.trace_id.hex() for span in collector.spans} != {TRACE}


async def test_two_parents_count_as_none_and_a_bad_state_does_not_harm_its_parent(collector: Collector) -> None:
    parent = (b"traceparent", SAMPLED["traceparent"].encode())
    async with tracing(collector.url) as site:
        assert await answered(site, parent, parent) == 200
        assert await answered(site, parent, (b"tracestate", b"=;\xff,,a=" + b"b" * 5000)) == 200
    roots = [span for span in collector.spans if span.name == "chat echo"]
    assert [root.parent_span_id.hex() for root in roots] == ["", PARENT]


async def answered(site: Site, *headers: tuple[bytes, bytes]) -> int:
    """The status of a chat with these headers, sent to the application as they are."""
    client = RawClient(site, "mine", *headers, max_tokens=5)
    await client.gone()
    status: int = client.sent[0]["status"]
    return status


async def test_a_client_that_does_not_sample_has_no_spans_and_the_sdks_own_sampler_decides_otherwise(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsampled = {"traceparent": SAMPLED["traceparent"][:-2] + "00"}
    async with tracing(collector.url) as site, site.client() as client:
        await client.post("/v1/chat/completions", json=chat(), headers=unsampled)
    assert not collector.spans and fates(site) == {"sent": 0, "late": 0, "full": 0, "refused": 0}
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=ours,zone=a")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=t1")
    async with tracing(collector.url + "/base/") as site, site.client() as client:
        await client.post("/v1/chat/completions", json=chat(), headers=unsampled)
    assert collector.spans and (collector.resource["service.name"], collector.resource["zone"]) == ("ours", "a")
    assert set(collector.paths) == {"/base/v1/traces"} and collector.headers[0]["x-tenant"] == "t1"


async def test_a_call_of_grpc_is_traced_by_its_metadata(collector: Collector) -> None:
    pytest.importorskip("grpc")
    from tests.router.test_grpc import ask, served

    async with tracing(collector.url) as site, served(site) as (client, _):
        await client.all_of(ask(), metadata=(("traceparent", SAMPLED["traceparent"]), ("x-request-id", "called")))
    (root,) = [span for span in collector.spans if span.parent_span_id.hex() == PARENT]
    told = values(root.attributes)
    assert (told["tandem.request_id"], told["gen_ai.usage.output_tokens"]) == ("called", 3)
    assert told["url.path"].endswith("SglangScheduler/Generate")


# --- collectors that are not there, hang or refuse ---------------------------------------------------------------------------


FIGURES: dict[str, Any] = {"parent": {}, "asked": None, "choices": (), "status": 200, "begun_s": 0.0, "ended_s": 1.0}
WORDS: dict[str, Any] = dict.fromkeys(("method", "path", "route", "request_id", "key", "answer_id", "session"), "x")
REPORT = ServedRequest(**FIGURES, **WORDS)
TROUBLES: dict[str, Callable[[Collector], object]] = {
    "dead": Collector.close,
    "hangs": lambda collector: collector.gate.clear(),
    "refuses": lambda collector: setattr(collector, "status", 500),
    "redirects": lambda collector: setattr(collector, "status", 307),
}


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_collector_in_trouble_costs_spans_which_are_counted_and_holds_up_nobody(
    trouble: str, monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    """3,000 requests end at once, and others go on meanwhile."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(spans, "CLOSE_S", 1.0)
    monkeypatch.setattr(spans, "MOST_REPORTS", 1_000)
    TROUBLES[trouble](collector)
    async with Site(config=config(collector.url)) as site:
        made = site.api.admission.to_spans = SpanMaker(config(collector.url), site.core, site.metrics)
        made._wait_s = 0.0
        begun = time.monotonic()
        for _ in range(3_000):
            made(REPORT)
        assert time.monotonic() - begun < 5, "nobody waits for the thread"
        assert (await get(site, "/v1/models")).status_code == 200
        await until(lambda: made._reports.empty() and fates(site)["refused"] >= 512)
        begun = time.monotonic()
        await asyncio.to_thread(made.close)
        assert time.monotonic() - begun < 3, "the end of the router does not wait for it either"
    ended, unsent = fates(site), made._made - made._exporter.ended
    assert ended["sent"] == 0 and ended["late"] + ended["full"] > 1_000
    assert sum(ended.values()) + unsent == 6_000, "each request has two"
    assert unsent <= 2048, "what the SDK holds is bounded"


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "must be http/protobuf"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many", r"OTEL_\* cannot be used"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "1", r"OTEL_\* cannot be used"),
    ],
)
async def test_a_variable_that_cannot_be_honoured_is_refused(
    variable: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    async with Site(config=config()) as site:
        with pytest.raises(ConfigError, match=says):
            SpanMaker(config(), site.core, site.metrics)


async def test_without_the_sdk_the_flag_is_refused_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "router.api.spans", None)
    stop = asyncio.Event()
    asked = config(port=0, control_port=0)
    with pytest.raises(ConfigError, match=r"--otlp-endpoint needs .* pip install -c constraints.txt -e '.\[otlp\]'"):
        await serve(asked, ModelConfig(), InstanceId(ROUTER), ["tcp://127.0.0.1:1"], lambda serving: None, stop, stop)
    for url in ("localhost:4318", "ftp://a", "http://", "http://a?b"):
        with pytest.raises(ConfigError, match="--otlp-endpoint must be"):
            RouterConfig(otlp_endpoint=url)


# --- the access log ----------------------------------------------------------------------------------------------------------


async def logged(caplog: pytest.LogCaptureFixture, site: Site, sent: Callable[[Any], Any]) -> list[logging.LogRecord]:
    caplog.clear()
    async with site.client() as client:
        await sent(client)
    return [record for record in caplog.records if record.name == "router.access"]


async def test_the_access_log_has_one_line_for_each_request_with_the_name_of_its_key_and_never_the_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = EchoFleet()
    headers = {**bearer(ALICE), "X-Request-Id": "one"}
    async with Site(fleet, RouterConfig(dead_after_s=60.0, access_log="on"), access=keyed()) as site:
        fleet.cached_tokens = 2
        sent = (
            lambda client: client.post("/v1/completions", json=completion(["ab", "abc"], n=2, max_tokens=3), headers=headers),
            lambda client: client.post("/v1/completions", json=completion(stream=True, max_tokens=3), headers=headers),
            lambda client: client.post("/v1/completions", json=completion(), headers=bearer("wrong-key")),
            lambda client: client.get("/nowhere%0Astatus=200%20x"),
        )
        records = [record for each in sent for record in await logged(caplog, site, each)]
    lines = [json.loads(JsonLines("router").format(record)) for record in records]
    whole, streamed, refused, unknown = lines
    assert [line["status"] for line in lines] == [200, 200, 401, 401]
    expected = {"prompt_tokens": 5, "cached_tokens": 4, "answer_tokens": 12, "finish": "length", "key": "alice", "request": "one"}
    assert expected.items() <= whole.items() and 0 < whole["ttft_s"] <= whole["duration_s"]
    assert {"prompt_tokens": 5, "cached_tokens": 2, "answer_tokens": 3}.items() <= streamed.items()
    assert "key" not in refused and "prompt_tokens" not in refused
    assert unknown["path"] == "/nowhere\nstatus=200 x"
    texts = [TextLines("router").format(record) for record in records]
    assert all("\n" not in text for text in texts) and r'path="/nowhere\nstatus=200 x" status=401' in texts[-1]
    assert all(key not in str(texts) + str(lines) for key in (ALICE, "wrong-key"))


@pytest.mark.parametrize("trouble", ["none", "resumed", "aborted", "in the background", "a line of a batch"])
async def test_a_request_has_one_line_and_one_first_span_with_the_figures_of_its_answer(
    trouble: str, collector: Collector, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the timelines of its choices are forgotten before it has ended."""
    monkeypatch.setattr(timelines, "REMEMBERED", 1)
    fleet = (
        EchoFleet(2, failing=1, failed=SET_BACK)
        if trouble == "resumed"
        else EchoFleet(stall_at=2 if trouble == "aborted" else None)
    )
    fleet.cached_tokens, fleet.drafts = 1, (3, 1)
    served = config(collector.url, access_log="on", store=str(tmp_path / "store"))
    caplog.set_level(logging.INFO, "router")
    async with tracing(served, fleet) as site, site.client() as client:
        body = completion(["ab", "abc"], n=1 if trouble == "resumed" else 2, max_tokens=4)
        if trouble == "in the background":
            asked = {"model": "echo", "input": "hello", "background": True, "max_output_tokens": 8}
            usage = await answered_by(client, await client.post("/v1/responses", json=asked))
        elif trouble == "a line of a batch":
            usage = await answered_in_a_batch(client, body)
        else:
            asking = asyncio.create_task(client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"}))
            if trouble == "aborted":
                await until(lambda: sum(len(record.token_ids) for record in site.core.requests.records()) == 8)
                await client.post("/abort_request", json={"rid": "mine"})
            usage = (await asking).json()["usage"]
    prompt, completed = (usage.get(name, usage.get(other)) for name, other in USAGE)
    (line,) = [told for each in caplog.records if "model" in (told := json.loads(JsonLines("router").format(each)))]
    (root,) = [told for span in collector.spans if "gen_ai.request.model" in (told := values(span.attributes))]
    assert completed and (line["prompt_tokens"], line["answer_tokens"], line["status"]) == (prompt, completed, 200)
    assert (line["drafted_tokens"], line["accepted_tokens"]) == (3 * completed, completed)
    assert line["cached_tokens"] == (usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"] > 0
    assert line["finish"] == ("cancelled" if trouble == "aborted" else "length")
    of_span = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gen_ai.usage.cache_read.input_tokens"
    assert [root[name] for name in of_span] == [line[name] for name in ("prompt_tokens", "answer_tokens", "cached_tokens")]
    assert (root["tandem.drafted_tokens"], root["tandem.accepted_tokens"]) == (3 * completed, completed)


USAGE = ("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")


async def answered_by(client: httpx.AsyncClient, begun: httpx.Response) -> Any:
    """The usage of a response in the background."""
    async with asyncio.timeout(30):
        while (said := (await client.get(f"/v1/responses/{begun.json()['id']}")).json())["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
    return said["usage"]


async def answered_in_a_batch(client: httpx.AsyncClient, body: Any) -> Any:
    """The usage of the only line of a batch."""
    line = json.dumps({"custom_id": "line", "method": "POST", "url": "/v1/completions", "body": body})
    headers = {"Authorization": "Bearer none"}
    file = await client.post("/v1/files", files={"file": ("a", line)}, data={"purpose": "batch"}, headers=headers)
    of = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = (await client.post("/v1/batches", json=of)).json()
    async with asyncio.timeout(30):
        while batch["status"] != "completed":
            await asyncio.sleep(0.02)
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    answer = await client.get(f"/v1/files/{batch['output_file_id']}/content")
    return json.loads(answer.text)["response"]["body"]["usage"]


async def test_without_the_flag_there_is_no_access_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert not await logged(caplog, site, lambda client: client.post("/v1/completions", json=completion()))


async def test_every_line_about_a_request_names_it_at_the_lowest_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "router")
    async with Site(EchoFleet(1, failing=1, failed=SET_BACK)) as site, site.client() as client:
        await client.post("/v1/completions", json=completion(), headers={"X-Request-Id": "mine"})
    about = [record for record in caplog.records if record.message.startswith(("dispatched", "set back", "ended"))]
    assert [record.message.split(":")[0] for record in about] == ["dispatched", "set back", "dispatched", "ended"]
    assert all("mine" in json.loads(JsonLines("router").format(record))["request"] for record in about)
