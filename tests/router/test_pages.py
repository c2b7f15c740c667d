"""The pages about the router and its fleet, and what people do there: models, health, readiness, metrics, draining.

The histogram gives the same page as the client library's. Of metrics by the names of vLLM and SGLang, what their published
dashboards ask for is served, or the docs say that it is not.
"""

import re
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import httpx
import msgspec
import prometheus_client
import pytest
from msgspec.structs import asdict
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common import own_version
from common.config import MetricAliasNames, RouterConfig
from common.ids import DETOKENIZER, InstanceId
from common.messages import Counters, DetokenizerHeartbeat, Drain, FlushCache, LinkInfo, LinkTraffic, Load, Register
from router import core
from router.members import Member
from router.metrics import Histogram, member_metrics
from tests.builders import COMPUTES, instance
from tests.router.calls import assert_error, chat, get, metric, post, until
from tests.router.fakes import CONTEXT, MODEL, EchoFleet, Site, beat

pytestmark = pytest.mark.anyio
T = TypeVar("T", Load, Counters)


async def test_models_lists_the_one_model_and_knows_it_by_name(site: Site) -> None:
    listed = (await get(site, "/v1/models")).json()
    assert (await get(site, f"/v1/models/{MODEL}")).json() == listed["data"][0]
    assert (listed["data"][0]["id"], listed["data"][0]["max_model_len"]) == (MODEL, CONTEXT)
    assert "use 'echo'" in assert_error(await get(site, "/v1/models/org/other"), 404, "invalid_request_error", "model")


async def test_health_is_the_routers_life_and_ready_is_the_fleets(site: Site) -> None:
    async with Site(EchoFleet(joins=False)) as alone:
        assert (await get(alone, "/health")).status_code == 200
        unready = await get(alone, "/ready")
        assert unready.status_code == 503
        assert unready.json() == {"ready": False, "reasons": ["no instance is live"], "degraded": []}
    ready = await get(site, "/ready")
    assert (ready.status_code, ready.json()) == (200, {"ready": True, "reasons": [], "degraded": []})


async def test_a_drained_instance_is_told_and_shown_and_the_fleet_is_unready_when_it_was_the_last(
    client: httpx.AsyncClient, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    response = await client.post("/cluster/d0/drain")
    again = await client.post("/cluster/d0/drain")
    page, ready = (await get(site, "/cluster")).json(), await get(site, "/ready")
    refused = await post(site, "/v1/chat/completions", chat())
    told = [message for _, message in site.fleet.sent if isinstance(message, Drain)]
    warning = "no decode instance takes requests now, and new ones are refused"
    assert (response.status_code, response.json()) == (202, {"id": "d0", "state": "draining", "warning": warning})
    assert any(said.startswith("d0 live → draining: ") and said.endswith(warning) for said in caplog.messages)
    assert (again.status_code, len(told)) == (202, 2)
    assert [one["state"] for one in page["instances"]] == ["live", "draining"]
    assert ready.status_code == 503 and "d0 is draining" in ready.json()["reasons"][0]
    assert "d0 is draining" in assert_error(refused, 503, "unavailable_error", None)


async def test_every_instance_is_told_to_flush_its_cache(client: httpx.AsyncClient, site: Site) -> None:
    response = await client.post("/flush_cache")
    told = {to for to, message in site.fleet.sent if isinstance(message, FlushCache)}
    assert (response.status_code, response.json(), told) == (200, {"instances": 2}, {"p0", "d0"})


@pytest.mark.parametrize(
    ("method", "url", "body", "param"),
    [
        ("POST", "/flush_cache?timeout=30", None, "timeout"),
        ("POST", "/flush_cache", {"timeout": 30}, "timeout"),
        ("POST", "/cluster/d0/drain?force=1", None, "force"),
        ("POST", "/cluster/d0/drain", {"force": True}, "force"),
        ("POST", "/cluster/trace?second=1", None, "second"),
        ("POST", "/cluster/trace?seconds=1&seconds=2", None, "seconds"),
        ("POST", "/cluster/trace", {"seconds": 1}, "seconds"),
        ("DELETE", "/cluster/trace?id=1", None, "id"),
        ("GET", "/cluster?link=p0", None, "link"),
        ("GET", "/v1/models?limit=1", None, "limit"),
        ("POST", "/v1/chat/completions?stream=true", chat(), "stream"),
    ],
)
async def test_a_parameter_or_a_body_that_a_url_does_not_read_is_refused_by_name(
    client: httpx.AsyncClient, site: Site, method: str, url: str, body: Any, param: str
) -> None:
    sent = len(site.fleet.sent)
    refused = await client.request(method, url, json=body)
    assert param in assert_error(refused, 400, "invalid_request_error", param)
    assert len(site.fleet.sent) == sent
    assert (await client.post("/flush_cache", json={})).status_code == 200
    assert (await client.get("/health?at=7")).status_code == 200, "load balancers add some"


async def test_a_body_that_no_url_reads_is_refused_before_it_is_long(site: Site, client: httpx.AsyncClient) -> None:
    assert_error(await client.post("/flush_cache", json="x" * 2000), 413, "invalid_request_error", None)
    assert_error(await client.post("/flush_cache", json=[1]), 400, "invalid_request_error", None)


async def test_an_instance_that_is_not_a_member_cannot_be_drained(site: Site, client: httpx.AsyncClient) -> None:
    response = await client.post("/cluster/d9/drain")
    assert "'d9'" in assert_error(response, 404, "invalid_request_error", None)
    assert (await get(site, "/ready")).status_code == 200


@pytest.mark.parametrize(
    ("load", "state", "reason", "summary"),
    [
        (Load(oldest_transfer_s=42.0), "stuck", "its oldest transfer has not moved for 42 s", "d0 is stuck"),
        (Load(pages_quarantined=40), "quarantined", "40 of 64 pages are quarantined", "d0 is quarantined: 40 of 64"),
    ],
    ids=["stuck", "quarantined"],
)
async def test_an_instance_in_trouble_makes_the_fleet_unready_and_is_shown_with_the_reason(
    site: Site, load: Load, state: str, reason: str, summary: str
) -> None:
    site.fleet.say(beat(site.fleet.decode, load=load))
    await until(lambda: site.core.unready())
    ready, page = await get(site, "/ready"), (await get(site, "/cluster")).json()
    text = (await get(site, "/metrics")).text
    response = await post(site, "/v1/chat/completions", chat())
    assert ready.status_code == 503 and summary in ready.json()["reasons"][0]
    assert [(one["state"], one["reason"]) for one in page["instances"]] == [("live", None), (state, reason)]
    assert metric(text, 'tandem_instance_up{instance="d0",role="decode"}') == 0
    assert summary in assert_error(response, 503, "unavailable_error", None)


async def test_a_router_whose_detokenizer_falls_silent_is_neither_healthy_nor_ready_until_it_is_heard_again(site: Site) -> None:
    site.fleet.say(DetokenizerHeartbeat(open_answers=2, early_answers=1, dropped=5))
    await until(lambda: site.core.detokenizers[0].last is not None)
    text = (await get(site, "/metrics")).text
    healthy = await get(site, "/health")
    silent_at_s = site.core.detokenizers[0].silent_at_s
    assert silent_at_s is not None
    site.core.tick(silent_at_s)
    sick, unready, page = await get(site, "/health"), await get(site, "/ready"), (await get(site, "/cluster")).json()
    dark = (await get(site, "/metrics")).text
    site.fleet.say(DetokenizerHeartbeat(open_answers=0, early_answers=0, dropped=5))
    await until(lambda: not site.core.unhealthy())
    assert (await get(site, "/health")).status_code == 200
    assert metric(text, 'tandem_detokenizer_open_answers{shard="0"}') == 2
    assert metric(text, 'tandem_detokenizer_early_answers{shard="0"}') == 1
    assert metric(text, 'tandem_detokenizer_dropped_total{shard="0"}') == 5
    up = 'tandem_detokenizer_up{shard="0"}'
    assert (metric(text, up), metric(dark, up)) == (1, 0)
    assert (healthy.status_code, healthy.json()) == (200, {"status": "ok", "reasons": []})
    reason = "detokenizer 0 has not been heard of for 60 s"
    assert (sick.status_code, sick.json()) == (503, {"status": "unhealthy", "reasons": [reason]})
    assert unready.status_code == 503 and reason in unready.json()["reasons"]
    assert page["detokenizers"] == [{"shard": 0, "silent": True, "open_answers": 2, "early_answers": 1, "dropped": 5}]


async def test_cluster_shows_every_instance_with_ranks_load_and_links(site: Site) -> None:
    page = (await get(site, "/cluster")).json()
    assert page["router"]["requests_open"] == 0
    assert page["router"]["phases"] == {"awaiting_first_token": 0, "generating": 0, "resuming": 0}
    prefill, decode = page["instances"]
    assert (prefill["id"], prefill["role"], prefill["state"], prefill["pages_total"]) == ("p0", "prefill", "live", 64)
    computes = asdict(COMPUTES)
    assert prefill["ranks"] == [{"rank": 0, "pid": 1, "host": "localhost", "device": "cpu", "engine": computes}]
    assert (prefill["peers"], prefill["links"], prefill["usable"]) == (1, {"ready": 1}, 1)
    assert decode["incarnation"] == "1" and {"load", "counters", "pages_free"} <= decode.keys()


async def test_the_links_of_an_instance_are_asked_for_by_its_name_and_their_states_are_in_the_metrics(site: Site) -> None:
    traffic = LinkTraffic(pushes=3, runs=9, bytes_pushed=2**20, push_seconds=0.5, pushes_broken=1)
    prefill, decode = site.fleet.prefill, site.fleet.decode
    link = LinkInfo(
        peer=decode.id,
        incarnation=decode.incarnation,
        state="ready",
        detail="NIXL UCX: TCP over eth0",
        bytes_per_s=1e9,
        warning="slow",
        traffic=traffic,
    )
    site.fleet.tells = (link,)
    page, text = (await get(site, "/cluster?links=p0")).json(), (await get(site, "/metrics")).text
    assert page["id"] == prefill.id
    (shown,) = page["links"]
    assert (shown["detail"], shown["bytes_per_s"], shown["warning"]) == ("NIXL UCX: TCP over eth0", 1e9, "slow")
    assert shown["traffic"] == msgspec.to_builtins(traffic)
    for state, links in (("ready", 1), ("connecting", 0), ("lost", 0)):
        assert metric(text, f'tandem_instance_links{{instance="p0",role="prefill",state="{state}"}}') == links


async def test_links_are_asked_for_of_a_member_only_and_one_that_does_not_answer_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "LINKS_S", 0.05)
    stranger, decode, silent = [await get(site, f"/cluster?links={name}") for name in ("p9", "d0", "p0")]
    assert "'p9' is a member" in assert_error(stranger, 404, "invalid_request_error", None)
    assert "d0 is a decode instance" in assert_error(decode, 400, "invalid_request_error", None)
    assert "p0 did not tell of its links" in assert_error(silent, 504, "timeout_error", None)


async def test_metrics_count_responses_endings_and_what_instances_report(site: Site) -> None:
    await post(site, "/v1/chat/completions", chat())
    await post(site, "/v1/chat/completions", chat(n=0))
    text = (await get(site, "/metrics")).text
    assert metric(text, 'tandem_http_responses_total{path="/v1/chat/completions",status="200"}') == 1
    assert metric(text, 'tandem_http_responses_total{path="/v1/chat/completions",status="400"}') == 1
    assert metric(text, 'tandem_requests_ended_total{ending="length"}') == 1
    assert metric(text, "tandem_time_to_first_token_seconds_count") == 1
    assert metric(text, "tandem_inter_token_latency_seconds_count") == 4
    assert metric(text, "tandem_requests_open") == 0
    assert metric(text, f'tandem_build_info{{version="{own_version()}"}}') == 1
    assert metric(text, "process_resident_memory_bytes") > 0 and "process_cpu_seconds_total" in text
    assert metric(text, 'tandem_instance_bytes_pushed_total{instance="p0",role="prefill"}') == 0
    assert metric(text, 'tandem_instance_up{instance="d0",role="decode"}') == 1


async def test_the_metrics_say_every_figure_that_every_instance_reported(site: Site) -> None:
    chance = Random(7)

    def anything(report: type[T]) -> T:
        fields = msgspec.structs.fields(report)
        figures: dict[str, Any] = {
            field.name: chance.randrange(10**12) if field.type is int else chance.random() * 10**9 for field in fields
        }
        return report(**figures)

    reports = {info.id: (anything(Load), anything(Counters)) for info in (site.fleet.prefill, site.fleet.decode)}
    for info in (site.fleet.prefill, site.fleet.decode):
        load, counters = reports[info.id]
        site.fleet.say(msgspec.structs.replace(beat(info, load=load), counters=counters))
    await until(lambda: all((member.load, member.counters) == reports[member.info.id] for member in site.core.fleet.members()))
    said = {
        (sample.name, sample.labels["instance"]): (family.type, sample.value)
        for family in text_string_to_metric_families((await get(site, "/metrics")).text)
        for sample in family.samples
        if "instance" in sample.labels and "state" not in sample.labels
    }
    expected: dict[tuple[str, str], tuple[str, float]] = {}
    for name, (load, counters) in reports.items():
        expected |= {(f"tandem_instance_{key}", name): ("gauge", value) for key, value in msgspec.structs.asdict(load).items()}
        for key, value in msgspec.structs.asdict(counters).items():
            expected[f"tandem_instance_{key}_total", name] = ("counter", value)
        expected["tandem_instance_up", name] = ("gauge", 0.0)  # so many seconds without progress
    assert said == expected


async def test_labels_are_escaped_as_the_format_demands() -> None:
    odd = 'a"b\\c\nd'
    member = Member(msgspec.structs.replace(instance("p0", "prefill"), id=InstanceId(odd)), Load())
    families = text_string_to_metric_families((await member_metrics([member])).decode())
    assert {sample.labels["instance"] for family in families for sample in family.samples} == {odd}


async def test_metrics_count_what_the_routers_mailbox_dropped_by_reason_and_whom_the_fleet_refused(site: Site) -> None:
    site.fleet.frames_refused |= {"magic": 3, "body": 1}
    site.fleet.messages_lost["full"] = 2
    site.fleet.say(Register(instance=msgspec.structs.replace(site.fleet.decode, id=DETOKENIZER)))
    await until(lambda: site.core.fleet.refusals)
    text, page = (await get(site, "/metrics")).text, (await get(site, "/cluster")).json()
    assert metric(text, 'tandem_router_frames_refused_total{reason="magic"}') == 3
    assert metric(text, 'tandem_router_frames_refused_total{reason="body"}') == 1
    assert metric(text, 'tandem_router_messages_lost_total{reason="full"}') == 2
    assert metric(text, "tandem_router_registrations_refused_total") == 1
    assert [refused["id"] for refused in page["refused"]] == [f"{DETOKENIZER}#1"]


async def test_two_routers_can_live_in_one_process() -> None:
    async with Site() as one, Site() as other:
        await post(one, "/v1/chat/completions", chat())
        assert "tandem_requests_ended_total{" not in (await get(other, "/metrics")).text


VALUES = (0.0, 0.004, 0.005, 0.0051, 1.0, 2.5, 1e9)


def test_a_page_reads_like_that_of_the_client_library() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    name, what, buckets = "tandem_seconds", "Of something.", (0.005, 1.0, 2.0)
    mine = Histogram(name, what, buckets, ours)
    reference = prometheus_client.Histogram(name, what, buckets=buckets, registry=theirs)
    for value in VALUES:
        mine.observe(value)
        reference.observe(value)
    expected = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == expected


# --- metrics by the names of vLLM and SGLang ------------------------------------------------------------------------------------


TIMES = ("_bucket", "_sum", "_count")
PANELS: dict[str, tuple[str, ...]] = {
    "E2E Request Latency": tuple(f"vllm:e2e_request_latency_seconds{each}" for each in TIMES),
    "Token Throughput": ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    "Time Per Output Token Latency": tuple(f"vllm:time_per_output_token_seconds{each}" for each in TIMES),
    "Inter Token Latency (later releases)": tuple(f"vllm:inter_token_latency_seconds{each}" for each in TIMES),
    "Scheduler State": ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_swapped"),
    "Time To First Token Latency": tuple(f"vllm:time_to_first_token_seconds{each}" for each in TIMES),
    "Cache Utilization": ("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc", "vllm:cpu_cache_usage_perc"),
    "Request Prompt Length": ("vllm:request_prompt_tokens_bucket",),
    "Request Generation Length": ("vllm:request_generation_tokens_bucket",),
    "Finish Reason": ("vllm:request_success_total",),
    "Queue Time": ("vllm:request_queue_time_seconds_sum",),
    "Requests Prefill and Decode Time": ("vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum"),
    "Max Generation Token in Sequence Group": ("vllm:request_max_num_generation_tokens_sum",),
    "End-to-End Request Latency": tuple(f"sglang:e2e_request_latency_seconds{each}" for each in TIMES),
    "Time-To-First-Token Latency": tuple(f"sglang:time_to_first_token_seconds{each}" for each in TIMES),
    "Num Running Requests": ("sglang:num_running_reqs",),
    "Token Generation Throughput": ("sglang:gen_throughput",),
    "Cache Hit Rate": ("sglang:cache_hit_rate",),
    "Number Queued Requests": ("sglang:num_queue_reqs",),
}
"""What the panels ask for of vLLM's examples/online_serving/prometheus_grafana/grafana.json and of SGLang's
examples/monitoring/grafana/dashboards/json/sglang-dashboard.json, in the releases of 2025."""
GUIDE = (Path(__file__).parents[2] / "docs/operate/metrics.md").read_text().partition("## Dashboards for vLLM")[2]
DOCUMENTED, _, ABSENT = GUIDE.partition("Panels of their published dashboards stay empty")
NAME = r"`((?:vllm|sglang):\w+)`"


async def page(names: MetricAliasNames) -> tuple[dict[str, list[tuple[dict[str, str], float]]], str]:
    """Samples by name of a fleet that has served two requests, and the page."""
    async with Site(config=RouterConfig(dead_after_s=60.0, metric_aliases=names)) as site:
        await post(site, "/v1/chat/completions", chat())
        await post(site, "/v1/completions", {"model": MODEL, "prompt": "abc", "max_tokens": 2})
        load = Load(running_requests=3, waiting_requests=2, pages_total=64, pages_free=48)
        counters = Counters(prompt_tokens_asked=9, prompt_tokens_hit=4, preemptions=1)
        for info in (site.fleet.prefill, site.fleet.decode):
            site.fleet.say(msgspec.structs.replace(beat(info, load=load), counters=counters))
        await until(lambda: all(member.load == load for member in site.core.fleet.members()))
        text = (await get(site, "/metrics")).text
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples, text


async def test_every_panel_of_their_dashboards_is_served_or_named_as_absent() -> None:
    served, _ = await page("both")
    absent = set(re.findall(NAME, ABSENT))
    for title, names in PANELS.items():
        for name in names:
            family = re.sub(r"_(bucket|sum|count)$", "", name)
            assert (name in served) != (family in absent), f"{title}: {name}"
            assert all(labels["model_name"] == MODEL for labels, _ in served.get(name, ())), name
    assert {labels["finished_reason"] for labels, _ in served["vllm:request_success_total"]} == {"stop", "length", "abort"}


async def test_the_names_that_the_guide_lists_are_those_that_are_served() -> None:
    samples, _ = await page("both")
    served = {re.sub(r"_(bucket|sum|count)$", "", name) for name in samples if ":" in name}
    assert served == set(re.findall(NAME, DOCUMENTED))


@pytest.mark.parametrize(("names", "prefixes"), [("none", set()), ("vllm", {"vllm"}), ("sglang", {"sglang"})])
async def test_only_the_names_that_are_asked_for_are_there(names: MetricAliasNames, prefixes: set[str]) -> None:
    samples, _ = await page(names)
    assert {name.partition(":")[0] for name in samples if ":" in name} == prefixes


async def test_a_figure_is_the_same_by_either_name() -> None:
    samples, text = await page("both")
    for row in DOCUMENTED.splitlines():
        aliases, (native, *_) = re.findall(NAME, row), [*re.findall(r"`(tandem_\w+)`", row), ""]
        for alias in aliases:
            for suffix in TIMES if native and f"{native}_sum" in samples else ("",):
                if native and "ended" not in native:
                    assert sorted(v for _, v in samples[alias + suffix]) == sorted(v for _, v in samples[native + suffix]), alias
    assert samples["vllm:prompt_tokens_total"][0][1] == samples["tandem_request_prompt_tokens_sum"][0][1] > 3
    assert samples["sglang:generation_tokens_total"][0][1] == samples["tandem_request_answer_tokens_sum"][0][1] == 5 + 2
    assert {labels["engine"]: value for labels, value in samples["vllm:kv_cache_usage_perc"]} == {"p0": 0.25, "d0": 0.25}
    assert [value for _, value in samples["sglang:max_total_num_tokens"]] == [64 * 4] * 2
    assert {labels["finished_reason"]: value for labels, value in samples["vllm:request_success_total"]}["length"] == 2
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    assert kinds["vllm:request_success_total"] == "counter" and kinds["vllm:e2e_request_latency_seconds"] == "histogram"
