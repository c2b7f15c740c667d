"""Figures of `/metrics` by the names that dashboards for vLLM and SGLang know, where they mean the same here.

Owns the names. Measures nothing: it reads what `router/metrics.py` has, and the reports of instances. Each figure has the label
`model_name`, by which those dashboards choose. docs/operate/metrics.md lists the names that have no counterpart.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.config import MetricAliasNames
from router.members import Member
from router.metrics import Kind, escaped, member_family

COPIES: dict[str, tuple[str, ...]] = {
    "tandem_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    "tandem_e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
    "tandem_inter_token_latency_seconds": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
        "sglang:inter_token_latency_seconds",
    ),
    "tandem_request_queue_seconds": ("vllm:request_queue_time_seconds",),
    "tandem_request_prefill_seconds": ("vllm:request_prefill_time_seconds",),
    "tandem_request_prompt_tokens": ("vllm:request_prompt_tokens", "vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "tandem_request_answer_tokens": (
        "vllm:request_generation_tokens",
        "vllm:generation_tokens_total",
        "sglang:generation_tokens_total",
    ),
}
"""The router's histograms that have other names too; by a name that ends with `total`, their sum is a counter."""
ENDINGS = {"stop": "stop", "length": "length", "cancelled": "abort"}
"""The `finished_reason` of endings."""
OF_INSTANCES: tuple[tuple[Kind, tuple[str, ...], Callable[[Member], float]], ...] = (
    ("gauge", ("vllm:num_requests_running", "sglang:num_running_reqs"), lambda member: member.load.running_requests),
    ("gauge", ("vllm:num_requests_waiting", "sglang:num_queue_reqs"), lambda member: member.load.waiting_requests),
    (
        "gauge",
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
        lambda member: member.load.pages_in_use / max(1, member.load.pages_total),
    ),
    ("gauge", ("sglang:num_used_tokens",), lambda member: member.load.pages_in_use * member.page_size),
    ("gauge", ("sglang:max_total_num_tokens",), lambda member: member.capacity_tokens),
    ("counter", ("vllm:prefix_cache_queries_total",), lambda member: member.counters.prompt_tokens_asked),
    ("counter", ("vllm:prefix_cache_hits_total",), lambda member: member.counters.prompt_tokens_hit),
    ("counter", ("vllm:num_preemptions_total",), lambda member: member.counters.preemptions),
    ("counter", ("vllm:spec_decode_num_draft_tokens_total",), lambda member: member.counters.tokens_drafted),
    ("counter", ("vllm:spec_decode_num_accepted_tokens_total",), lambda member: member.counters.tokens_accepted),
)


class MetricAliases(Collector):
    """The part of the page that has them. names: whose. model: the name that clients use. source: the router's own metrics."""

    def __init__(self, names: MetricAliasNames, model: str, source: CollectorRegistry) -> None:
        self._prefixes = ("vllm:", "sglang:") if names == "both" else (f"{names}:",)
        self._model, self._source = model, source
        self._registry = CollectorRegistry()
        self._registry.register(self)

    async def text(self, members: Iterable[Member]) -> bytes:
        """As they are now. The loop turns between two metrics of instances."""
        there, what = list(members), "As reported by the instance."
        labels = [
            f'model_name="{escaped(self._model)}",engine="{escaped(member.info.id)}",engine_type="{member.info.role}"'
            for member in there
        ]
        parts = [generate_latest(self._registry)]
        for kind, names, value in OF_INSTANCES:
            await asyncio.sleep(0)
            values, chosen = list(map(value, there)), [name for name in names if name.startswith(self._prefixes)]
            parts += [member_family(kind, name, what, labels, values).encode() for name in chosen]
        return b"".join(parts)

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            for name, kind, samples in _aliases(family):
                if name.startswith(self._prefixes):
                    alias = Metric(name, family.documentation, kind)
                    for of, labels, value in samples:
                        alias.add_sample(of, {**labels, "model_name": self._model}, value)
                    yield alias


def _aliases(family: Metric) -> Iterator[tuple[str, str, list[tuple[str, Mapping[str, str], float]]]]:
    """Each with its type and samples: names, labels and values."""
    for name in COPIES.get(family.name, ()):
        if name.endswith("_total"):
            total = sum(each.value for each in family.samples if each.name.endswith("_sum"))
            yield name.removesuffix("_total"), "counter", [(name, {}, total)]
        else:
            yield name, family.type, [(each.name.replace(family.name, name), each.labels, each.value) for each in family.samples]
    if family.name == "tandem_requests_ended":
        ends = {each.labels["ending"]: each.value for each in family.samples if each.name.endswith("_total")}
        counts = [({"finished_reason": reason}, ends.get(end, 0.0)) for end, reason in ENDINGS.items()]
        yield "vllm:request_success", "counter", [("vllm:request_success_total", *each) for each in counts]
