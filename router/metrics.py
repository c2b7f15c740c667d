"""Metrics in the Prometheus text format: what the router measures, and what its instances report.

Owns the names (prefix `tandem_`) and a registry of its own, so that two routers can live in one process. Implements
`request_book.Observer`. Does not know HTTP routes or where the numbers come from.
"""

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.instance.ports import Mail
from common.messages import Counters, Ending, Failed, LinkTraffic, Load, RouterInbox
from router.attempts import ResumeReason
from router.core import RouterCore
from router.members import Member
from router.requests import Phase

LATENCY_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
ATTEMPT_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16)
INSTANCE_LABELS = ("instance", "role")
LINK_LABELS = ("instance", "peer")


class RouterMetrics:
    """What the router itself counts and measures."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._first_token = Histogram(
            "tandem_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._inter_token = Histogram(
            "tandem_inter_token_seconds",
            "Time of one token after the first.",
            buckets=TOKEN_BUCKETS_S,
            registry=registry,
        )
        self._request = Histogram(
            "tandem_request_seconds",
            "From the arrival of a request to its ending.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._endings = Counter("tandem_requests_ended", "Requests by how they ended.", ("ending",), registry=registry)
        self._resumes = Counter("tandem_resumes", "Attempts that were followed by another one.", ("reason",), registry=registry)
        for reason in ResumeReason:
            self._resumes.labels(reason.value)
        self._resume_gap = Histogram(
            "tandem_resume_gap_seconds",
            "From the last token before a resume (from the resume, if there was none) to the next token.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._attempts = Histogram("tandem_attempts", "Attempts of a request.", buckets=ATTEMPT_BUCKETS, registry=registry)
        self._responses = Counter("tandem_http_responses", "HTTP responses.", ("path", "status"), registry=registry)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        self._inter_token.observe(seconds / tokens)

    def resumed(self, reason: ResumeReason) -> None:
        self._resumes.labels(reason.value).inc()

    def resume_gap(self, seconds: float) -> None:
        self._resume_gap.observe(seconds)

    def ended(self, ending: Ending, seconds: float, attempts: int) -> None:
        self._endings.labels(ending.kind if isinstance(ending, Failed) else ending.reason).inc()
        self._request.observe(seconds)
        self._attempts.observe(attempts)

    def responded(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class FleetCollector(Collector):
    """The last reports of the instances, and the router's open requests."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    def collect(self) -> Iterator[Metric]:
        core = self._core
        yield GaugeMetricFamily("tandem_requests_open", "Requests in the system.", len(core.requests))
        phases = GaugeMetricFamily("tandem_requests_in_phase", "Open requests by phase.", labels=("phase",))
        for phase in Phase:
            phases.add_metric((phase.value,), sum(record.phase is phase for record in core.requests.records()))
        yield phases
        stale = CounterMetricFamily("tandem_router_messages_stale", "Late messages that were dropped.", labels=("kind",))
        stale.add_metric(("text",), core.requests.stale)
        stale.add_metric(("probe",), core.requests.stale_standings)
        stale.add_metric(("membership",), core.fleet.stale)
        yield stale
        yield CounterMetricFamily("tandem_router_registrations_refused", "Registrations that were refused.", core.fleet.refusals)
        members = list(core.fleet.members())
        up = GaugeMetricFamily(
            "tandem_instance_up",
            "1 for a member that takes requests, 0 for one that drains, is stuck or has too many pages quarantined.",
            labels=INSTANCE_LABELS,
        )
        for member in members:
            up.add_metric(_labels(member), float(member.trouble is None))
        yield up
        yield from _reported(members)
        yield from _links(members)


class DetokenizerCollector(Collector):
    """The detokenizer's last report."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    def collect(self) -> Iterator[Metric]:
        watch = self._core.detokenizer
        if watch.last is None:
            return
        yield GaugeMetricFamily("tandem_detokenizer_up", "1 while its heartbeats come.", float(not watch.silent))
        yield GaugeMetricFamily("tandem_detokenizer_open_answers", "Answers that expect tokens.", watch.last.open_answers)
        early = "Answers whose tokens came before they were expected."
        yield GaugeMetricFamily("tandem_detokenizer_early_answers", early, watch.last.early_answers)
        dropped = "Useless token deltas since it started."
        yield CounterMetricFamily("tandem_detokenizer_dropped", dropped, watch.last.dropped)


class MailCollector(Collector):
    """What the router's own mailbox dropped, in either direction."""

    def __init__(self, mail: Mail[RouterInbox]) -> None:
        self._mail = mail

    def collect(self) -> Iterator[Metric]:
        for name, what, counts in (
            ("tandem_router_frames_refused", "Frames that arrived and were dropped.", self._mail.frames_refused),
            ("tandem_router_messages_lost", "Messages that could not be sent.", self._mail.messages_lost),
        ):
            counter = CounterMetricFamily(name, what, labels=("reason",))
            for reason, count in counts.items():
                counter.add_metric((reason,), count)
            yield counter


def _reported(members: Iterable[Member]) -> Iterator[Metric]:
    """A gauge for each field of Load, a counter for each field of Counters: a new field is a new metric."""
    members = list(members)
    for field in msgspec.structs.fields(Load):
        gauge = GaugeMetricFamily(f"tandem_instance_{field.name}", "As reported by the instance.", labels=INSTANCE_LABELS)
        for member in members:
            gauge.add_metric(_labels(member), msgspec.structs.asdict(member.load)[field.name])
        yield gauge
    for field in msgspec.structs.fields(Counters):
        counter = CounterMetricFamily(
            f"tandem_instance_{field.name}", "As reported by the instance since it started.", labels=INSTANCE_LABELS
        )
        for member in members:
            counter.add_metric(_labels(member), msgspec.structs.asdict(member.counters)[field.name])
        yield counter


def _links(members: Iterable[Member]) -> Iterator[Metric]:
    """What prefill instances report about each of their links."""
    links = [(member.info.id, link) for member in members if member.info.role == "prefill" for link in member.links.values()]
    up = GaugeMetricFamily("tandem_link_up", "1 for a link that is ready.", labels=LINK_LABELS)
    speed = GaugeMetricFamily("tandem_link_bytes_per_second", "As measured when the link came up.", labels=LINK_LABELS)
    for name, link in links:
        up.add_metric((name, link.peer), float(link.state == "ready"))
        if link.bytes_per_s is not None:
            speed.add_metric((name, link.peer), link.bytes_per_s)
    yield from (up, speed)
    for field in msgspec.structs.fields(LinkTraffic):
        counter = CounterMetricFamily(f"tandem_link_{field.name}", "As reported by the instance that pushes.", labels=LINK_LABELS)
        for name, link in links:
            counter.add_metric((name, link.peer), msgspec.structs.asdict(link.traffic)[field.name])
        yield counter


def _labels(member: Member) -> tuple[str, str]:
    return member.info.id, member.info.role
