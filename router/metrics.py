"""Metrics in the Prometheus text format: what the router measures and counts, and what its instances last reported.

Owns the names (`tandem_`, and `tandem_instance_` for figures of instances), those by which dashboards for vLLM and SGLang know
figures that mean the same here, and a registry of its own, so that two routers can live in one process. Implements
`timelines.Observer`. Does not know HTTP routes or where the numbers come from. docs/operate/metrics.md lists names of vLLM and
SGLang that have no counterpart.

Two things are written here rather than by the client library, because of what they cost. A histogram is observed with every
token: a third of a microsecond instead of two and a half. A thousand instances report 32,000 figures: a fraction of a microsecond
each instead of ten. Figures of pairs are not here: there are too many.
"""

import asyncio
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from operator import attrgetter
from typing import Literal, get_args, get_type_hints

from prometheus_client import CollectorRegistry, Counter, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common import own_version
from common.config import MetricAliasNames
from common.ids import ROLES
from common.instance.ports import Mail
from common.logs import lines_dropped
from common.messages import Counters, Ending, Failed, LinkState, Load, RouterInbox
from router.attempts import Phase
from router.core import RouterCore
from router.fleet import Members
from router.members import Member, RoleTotals
from router.scaling import ACTIONS, RoleFigures, role_figures
from router.timelines import Durations, RequestTimes, ResumeReason


class Histogram(Collector):
    """Registers itself. buckets: their upper bounds, in order, without infinity."""

    def __init__(self, name: str, what: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._what = name, what
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def counts(self) -> tuple[int, ...]:
        """Values up to each bound, without those up to the bound before it, and at last those beyond all."""
        return tuple(self._counts)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = [(bound, float(count)) for bound, count in zip(bounds, accumulate(self._counts), strict=True)]
        yield HistogramMetricFamily(self._name, self._what, buckets=buckets, sum_value=self._sum)


Kind = Literal["gauge", "counter"]
STATES: tuple[LinkState, ...] = get_args(LinkState)


async def member_metrics(members: Iterable[Member]) -> bytes:
    """Every metric of these members, as they are now. The loop turns between two metrics."""
    there = list(members)
    labels = [f'instance="{escaped(member.info.id)}",role="{member.info.role}"' for member in there]
    # A report is never changed, only replaced: all metrics tell of the same moment.
    loads, counters = [member.load for member in there], [member.counters for member in there]
    links = [Tally(member.links.values()) for member in there]
    up = [int(member.trouble is None) for member in there]

    what = "1 for a member that takes requests, 0 for one that drains, is stuck or has too many pages quarantined."
    parts = [member_family("gauge", "tandem_instance_up", what, labels, up)]
    with_state = [f'{one},state="{state}"' for one in labels for state in STATES]
    counts = [of[state] for of in links for state in STATES]
    what = "Links by state, as reported by the instance that pushes."
    parts.append(member_family("gauge", "tandem_instance_links", what, with_state, counts))
    for field in Load.__struct_fields__:
        await asyncio.sleep(0)
        values = list(map(attrgetter(field), loads))
        parts.append(member_family("gauge", f"tandem_instance_{field}", "As reported by the instance.", labels, values))
    for field in Counters.__struct_fields__:
        await asyncio.sleep(0)
        values = list(map(attrgetter(field), counters))
        what = "As reported by the instance since it started."
        parts.append(member_family("counter", f"tandem_instance_{field}_total", what, labels, values))
    return "".join(parts).encode()


def role_metrics(fleet: Members) -> bytes:
    """The metrics of each role, as planners, KEDA and HPA read them."""
    figures = [role_figures(fleet, role) for role in ROLES]
    labels, totals = [f'role="{role}"' for role in ROLES], [each.totals for each in figures]
    what, gauges = (
        "As the members of the role report together.",
        [name for name in RoleFigures.__struct_fields__ if name != "totals"],
    )
    parts = [member_family("gauge", f"tandem_role_{name}", what, labels, list(map(attrgetter(name), figures))) for name in gauges]
    for name in RoleTotals.__struct_fields__:
        parts.append(member_family("counter", f"tandem_role_{name}_total", what, labels, list(map(attrgetter(name), totals))))
    return "".join(parts).encode()


def member_family(kind: Kind, name: str, what: str, labels: Sequence[str], values: Sequence[float]) -> str:
    """One metric: a value for each set of labels."""
    lines = [f"{name}{{{one}}} {value}\n" for one, value in zip(labels, values, strict=True)]
    return f"# HELP {name} {what}\n# TYPE {name} {kind}\n" + "".join(lines)


def escaped(value: str) -> str:
    """As a label's value must be written."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


LATENCY_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
PHASE_BUCKETS_S = (0.0005, 0.001, 0.002, *LATENCY_BUCKETS_S)
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
ATTEMPT_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16)
LENGTH_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


PHASES = {
    "queue_s": "request_queue",
    "prefill_s": "request_prefill",
    "transfer_s": "kv_transfer",
    "exposed_transfer_s": "kv_transfer_exposed",
    "decode_s": "request_decode",
}
"""The metric of each of the `Durations`."""


class Dropped(StrEnum):
    """Why a connection was dropped."""

    NO_HEAD = "no_head"
    TOO_MANY = "too_many"
    LONG_HEAD = "long_head"
    UNREAD = "unread"
    PIPELINED = "pipelined"
    MANY_BODIES = "many_bodies"
    LARGE_BODIES = "large_bodies"


class SpanFate(StrEnum):
    """What became of a span for a collector."""

    SENT = "sent"
    LATE = "late"
    """Dropped: too many requests that had ended waited for what instances say of them."""
    FULL = "full"
    """Dropped: too many spans waited to be sent."""
    REFUSED = "refused"
    """Dropped: the collector was not there, did not answer in time, or did not take it."""


class RouterMetrics:
    """What the router itself counts and measures."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Info("tandem_build", "The release that this router is of.", registry=registry).info({"version": own_version()})

        def histogram(name: str, what: str, buckets: Sequence[float] = LATENCY_BUCKETS_S) -> Histogram:
            return Histogram(name, what, buckets=buckets, registry=registry)

        def counter(name: str, what: str, *labels: str, known: Iterable[str] = ()) -> Counter:
            """known: values of the label that are there before anything is counted."""
            made = Counter(name, what, labels, registry=registry)
            for value in known:
                made.labels(value)
            return made

        self.first_tokens = histogram("tandem_time_to_first_token_seconds", "From the arrival of a request to its first token.")
        what = "The same, as predicted when the request was placed."
        self._predicted = histogram("tandem_predicted_time_to_first_token_seconds", what)
        what = "The predicted time, divided by the real one."
        self._prediction_ratio = histogram("tandem_time_to_first_token_prediction_ratio", what, RATIO_BUCKETS)
        self.token_times = histogram("tandem_inter_token_latency_seconds", "Time of one token after the first.", TOKEN_BUCKETS_S)
        self._request = histogram("tandem_e2e_request_latency_seconds", "From the arrival of a request to its ending.")
        said = get_type_hints(Durations, include_extras=True)
        self._phases = {
            duration: histogram(f"tandem_{name}_seconds", said[duration].__metadata__[-1].description, PHASE_BUCKETS_S)
            for duration, name in PHASES.items()
        }
        self._endings = counter("tandem_requests_ended", "Requests by how they ended.", "ending")
        self.resumes = counter("tandem_resumes", "Attempts that were followed by another one.", "reason", known=ResumeReason)
        what = "From the last token before a resume (from the resume, if there was none) to the next token."
        self._resume_gap = histogram("tandem_resume_gap_seconds", what)
        self._attempts = histogram("tandem_attempts", "Attempts of a request.", ATTEMPT_BUCKETS)
        self._prompt_tokens = histogram(
            "tandem_request_prompt_tokens", "Tokens of the prompt of a request that ended.", LENGTH_BUCKETS
        )
        self._answer_tokens = histogram("tandem_request_answer_tokens", "Tokens of its answer.", LENGTH_BUCKETS)
        self._of_keys = counter("tandem_key_requests", "Requests that ended, by the name of their API key.", "key")
        what = "Tokens of these requests: of their prompts and of their answers."
        self._tokens_of_keys = counter("tandem_key_tokens", what, "key", "of")
        self._responses = counter("tandem_http_responses", "HTTP responses.", "path", "status")
        what = (
            "Connections that were dropped: the head came late or was too long, too many waited, an answer was not read, "
            "requests came behind an open one, or too many bodies or bytes of bodies had not arrived whole."
        )
        self._dropped = counter("tandem_http_connections_dropped", what, "reason", known=Dropped)
        what = "Spans for --otlp-endpoint: sent, or dropped because there was no room (late, full) or no collector (refused)."
        self._spans = counter("tandem_router_spans", what, "fate", known=SpanFate)

    def first_token(self, seconds: float, predicted_s: float | None) -> None:
        self.first_tokens.observe(seconds)
        if predicted_s is not None:
            self._predicted.observe(predicted_s)
            self._prediction_ratio.observe(predicted_s / max(seconds, 1e-9))

    def next_tokens(self, seconds: float, tokens: int) -> None:
        self.token_times.observe(seconds / tokens)

    def resumed(self, reason: ResumeReason) -> None:
        self.resumes.labels(reason.value).inc()

    def resume_gap(self, seconds: float) -> None:
        self._resume_gap.observe(seconds)

    def ended(self, ending: Ending, times: RequestTimes, attempts: int) -> None:
        self._endings.labels(ending.kind if isinstance(ending, Failed) else ending.reason).inc()
        if times.ended_s is not None:
            self._request.observe(times.ended_s - times.received_s)
        self._attempts.observe(attempts)
        self._prompt_tokens.observe(times.prompt_tokens)
        self._answer_tokens.observe(times.tokens)
        if times.owner:
            self._of_keys.labels(times.owner).inc()
            self._tokens_of_keys.labels(times.owner, "prompt").inc(times.prompt_tokens)
            self._tokens_of_keys.labels(times.owner, "answer").inc(times.tokens)

    def phases(self, durations: Durations) -> None:
        for duration, phase in self._phases.items():
            seconds = getattr(durations, duration)
            if seconds is not None:
                phase.observe(seconds)

    def responded(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def connection_dropped(self, why: Dropped) -> None:
        self._dropped.labels(why.value).inc()

    def spans_ended(self, fate: SpanFate, spans: int) -> None:
        """Any thread may call it."""
        self._spans.labels(fate.value).inc(spans)

    def text(self) -> bytes:
        return generate_latest(self.registry)


DETOKENIZER_FIGURES: tuple[tuple[Kind, str, str], ...] = (
    ("gauge", "open_answers", "Answers that expect tokens."),
    ("gauge", "early_answers", "Answers whose tokens came before they were expected."),
    ("counter", "dropped", "Useless token deltas since it started."),
)


class RouterCollector(Collector):
    """What the router knows at the moment of a scrape."""

    def __init__(self, core: RouterCore, mail: Mail[RouterInbox], store_stalled_s: Callable[[], float]) -> None:
        self._core = core
        self._mail = mail
        self._store_stalled_s = store_stalled_s

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._detokenizers()
        what = "Frames that arrived and were dropped."
        yield _family("counter", "tandem_router_frames_refused", what, "reason", self._mail.frames_refused)
        what = "Messages that could not be sent."
        yield _family("counter", "tandem_router_messages_lost", what, "reason", self._mail.messages_lost)
        what = "Lines of the router's log that were dropped: whoever reads them was too slow, or is gone."
        yield CounterMetricFamily("tandem_router_log_lines_dropped", what, lines_dropped())
        what = "How long calls have waited since the store last got something done. 0: none waits."
        yield GaugeMetricFamily("tandem_store_stalled_seconds", what, self._store_stalled_s())

    def _requests(self) -> Iterator[Metric]:
        """The open requests, and what the router refused or dropped."""
        requests, fleet = self._core.requests, self._core.fleet
        yield GaugeMetricFamily("tandem_requests_open", "Requests in the system.", len(requests))
        phases = Tally(record.phase for record in requests.records())
        by_phase = {phase.value: phases[phase] for phase in Phase}
        yield _family("gauge", "tandem_requests_in_phase", "Open requests by phase.", "phase", by_phase)
        what = "Requests that were refused at once, because their first token was predicted to come too late."
        yield CounterMetricFamily("tandem_requests_rejected_early", what, requests.placer.rejected)
        what = "Open requests by the name of their API key."
        yield _family("gauge", "tandem_key_requests_open", what, "key", dict(requests.places.of_keys()))
        stale = {
            "text": requests.stale,
            "probe": requests.retelling.stale_standings,
            "timeline": requests.timelines.stale,
            "membership": fleet.stale,
        }
        yield _family("counter", "tandem_router_messages_stale", "Late messages that were dropped.", "kind", stale)
        yield CounterMetricFamily("tandem_router_registrations_refused", "Registrations that were refused.", fleet.refusals)
        what, counts = "Decisions about the fleet that a planner has told.", self._core.scaling.counts
        yield _family("counter", "tandem_scaling_decisions", what, "action", {action: counts[action] for action in ACTIONS})

    def _detokenizers(self) -> Iterator[Metric]:
        """The last report of each detokenizer, by its number."""
        heard = {str(shard): watch for shard, watch in enumerate(self._core.detokenizers) if watch.last}
        up = {shard: not watch.silent for shard, watch in heard.items()}
        yield _family("gauge", "tandem_detokenizer_up", "1 while its heartbeats come.", "shard", up)
        for kind, figure, what in DETOKENIZER_FIGURES:
            values = {shard: getattr(watch.last, figure) for shard, watch in heard.items()}
            yield _family(kind, f"tandem_detokenizer_{figure}", what, "shard", values)


def _family(kind: Kind, name: str, what: str, label: str, values: Mapping[str, float]) -> Metric:
    """One metric: a value for each value of its label."""
    family = (GaugeMetricFamily if kind == "gauge" else CounterMetricFamily)(name, what, labels=(label,))
    for of, value in values.items():
        family.add_metric((of,), float(value))
    return family


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
