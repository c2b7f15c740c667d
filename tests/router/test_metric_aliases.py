"""Metrics by the names of vLLM and SGLang: what their published dashboards ask for is served, or the docs say that it is not."""

import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.config import MetricAliasNames, RouterConfig
from common.messages import Counters, Load
from tests.router.calls import chat, get, post, until
from tests.router.fakes import MODEL, Site, beat

pytestmark = pytest.mark.anyio
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
