"""Spans of requests for an OpenTelemetry collector (`--otlp-endpoint`), made of the timelines that the router has.

Owns which spans there are and what they say, by the semantic conventions for generative AI
(https://github.com/open-telemetry/semantic-conventions-genai). The SDK owns ids, sampling, batches and the wire. Instances report
their times some time after a request has ended, so a report waits for so long, and a thread of its own makes its spans then. Both
what waits and what is not sent yet is bounded; spans beyond that, and those that the collector does not take, are counted. Only
--otlp-endpoint imports this: the SDK is an extra.

    chat MODEL (the parent is the client's span)
    ├─ intake                     from the arrival until the first choice is dispatched
    ├─ attempt 0                  at the router
    │  ├─ queue, prefill          on the instance that computes the prompt
    │  ├─ transfer, exposed transfer
    │  └─ decode                  on the decode instance
    └─ attempt 1                  a resume, with a link to attempt 0
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from urllib.parse import urlsplit

import requests
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from common.config import RouterConfig
from common.errors import ConfigError
from router.api.admission import ServedRequest
from router.core import RouterCore
from router.metrics import RouterMetrics, SpanFate
from router.requests import Asked
from router.timelines import AttemptTimeline, RequestTimes, stages_of

MOST_REPORTS = 4_096
"""So many requests that have ended may wait for what instances say of them."""
MOST_SPANS = "2048"
"""The SDK's own default."""
CLOSE_S = 3.0
"""How long the end of the router waits for the last spans to be sent."""
TRACES_PATH = "/v1/traces"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
SERVER_ERROR = 500

_log = logging.getLogger(__name__)


class CountingExporter(SpanExporter):
    """The SDK's exporter, which retries and waits on the SDK's thread. Counts what becomes of the spans that it gets."""

    def __init__(self, url: str, metrics: RouterMetrics) -> None:
        self._url, self._metrics = url, metrics
        session = requests.Session()
        session.hooks["response"].append(_refuse_redirect)
        self._exporter = OTLPSpanExporter(url, session=session)
        self._fails = False
        self.ended = 0
        """Spans that were sent or given up."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        fails = result is not SpanExportResult.SUCCESS
        self.ended += len(spans)
        self._metrics.spans_ended(SpanFate.REFUSED if fails else SpanFate.SENT, len(spans))
        if fails is not self._fails:
            self._fails = fails
            _log.warning("the collector at %s takes %s", self._url, "no spans: they are dropped" if fails else "spans again")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def _refuse_redirect(response: requests.Response, *_: object, **__: object) -> None:
    """The SDK follows no redirect, and would take its spans for sent."""
    if HTTPStatus.MULTIPLE_CHOICES <= response.status_code < HTTPStatus.BAD_REQUEST:
        response.close()
        raise requests.TooManyRedirects(f"{response.url} leads elsewhere")


class SpanMaker:
    """Makes spans of reports. It implements `ToSpans`. Raises ConfigError for variables that it cannot honour."""

    def __init__(self, config: RouterConfig, core: RouterCore, metrics: RouterMetrics) -> None:
        self._unix_s, self._metrics = core.unix_s, metrics
        self._wait_s = max(2 * config.heartbeat_s, config.dead_after_s / 2)
        """Within this time an instance tells of an attempt that it has let go of, unless it is lost."""
        for name in PROTOCOLS:
            if os.environ.get(name, "http/protobuf") != "http/protobuf":
                raise ConfigError(f"{name} must be http/protobuf, which is all that --otlp-endpoint speaks")
        parts = urlsplit(config.otlp_endpoint)
        path = parts.path.rstrip("/")
        url = parts._replace(path=path if path.endswith(TRACES_PATH) else path + TRACES_PATH).geturl()
        told = {"service.name": "tandem", "service.instance.id": core.router, **OTELResourceDetector().detect().attributes}
        try:
            self._most_spans = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", MOST_SPANS))
            provider = TracerProvider(resource=Resource.create(told), shutdown_on_exit=False)
            self._exporter = CountingExporter(url, metrics)
            self._processor = BatchSpanProcessor(self._exporter, max_queue_size=self._most_spans)
        except ValueError as error:
            raise ConfigError(f"--otlp-endpoint: a variable OTEL_* cannot be used: {error}") from error
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("tandem")
        # From here on it would say something for each bad header that a client sends, and for each batch that fails.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._reports: queue.Queue[tuple[float, ServedRequest] | None] = queue.Queue(MOST_REPORTS)
        self._made = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="spans", daemon=True)
        self._thread.start()

    def __call__(self, report: ServedRequest) -> None:
        try:
            self._reports.put_nowait((time.monotonic() + self._wait_s, report))
        except queue.Full:
            self._metrics.spans_ended(SpanFate.LATE, _size_of(report))

    def close(self) -> None:
        """Send what there is, for CLOSE_S at most."""
        self._closing.set()
        try:
            self._reports.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    # --- on the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (waiting := self._reports.get()) is not None:
            due_s, report = waiting
            self._closing.wait(max(0.0, due_s - time.monotonic()))
            if self._made - self._exporter.ended + _size_of(report) > self._most_spans:
                self._metrics.spans_ended(SpanFate.FULL, _size_of(report))
            else:
                self._make(report)
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def _make(self, report: ServedRequest) -> None:
        parent, asked = TraceContextTextMapPropagator().extract(report.parent), report.asked
        name = f"{report.method} {report.route}".strip() if asked is None else f"{asked.operation} {asked.model}"
        attributes = {**_of_http(report), **(_of_answer(report, asked) if asked is not None else {})}
        root = self._begin(name, parent, report.begun_s + self._unix_s, attributes, kind=SpanKind.SERVER)
        if not root.is_recording():  # nobody samples it
            return
        within = set_span_in_context(root, Context())
        dispatched_s = min((each.tokenized_s for each in report.choices), default=report.ended_s)
        self._begin("intake", within, report.begun_s + self._unix_s).end(_ns(dispatched_s + self._unix_s))
        for choice in report.choices:
            self._make_attempts(choice, within, report)
        failed = [each for each in report.endings if each not in ("stop", "length", "cancelled")]
        if failed or report.status >= SERVER_ERROR:
            root.set_attribute("error.type", failed[0] if failed else str(report.status))
            root.set_status(Status(StatusCode.ERROR))
        root.end(_ns(report.ended_s + self._unix_s))

    def _make_attempts(self, choice: RequestTimes, within: Context, report: ServedRequest) -> None:
        before: Span | None = None
        for attempt in choice.attempts:
            links = [] if before is None else [Link(before.get_span_context(), {"tandem.link": "resumes"})]
            facts = {f"tandem.{name}": value for name, value in attempt.facts().items()}
            facts |= {"tandem.choice": choice.index}
            span = self._begin(f"attempt {attempt.number}", within, attempt.dispatched_s + self._unix_s, facts, links)
            self._make_stages(attempt, set_span_in_context(span, Context()))
            if attempt.resume_reason is not None:
                span.set_attribute("tandem.resume_reason", attempt.resume_reason.value)
                span.set_status(Status(StatusCode.ERROR, attempt.failure))
            ended_s = choice.ended_s if attempt.ended_s is None else attempt.ended_s
            span.end(_ns((report.ended_s if ended_s is None else ended_s) + self._unix_s))
            before = span

    def _make_stages(self, attempt: AttemptTimeline, within: Context) -> None:
        for told in tuple(attempt.instances):
            where: dict[str, AttributeValue] = {"tandem.instance": told.id, "tandem.role": told.role}
            where |= {"tandem.cached_tokens": told.times.cached_tokens}
            for name, (begin_s, end_s) in stages_of(told.role, told.times).items():
                self._begin(name.removesuffix("_s").replace("_", " "), within, begin_s, where).end(_ns(end_s))

    def _begin(
        self,
        name: str,
        within: Context,
        begin_s: float,
        attributes: Mapping[str, AttributeValue] | None = None,
        links: Sequence[Link] = (),
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """begin_s: UNIX time."""
        span = self._tracer.start_span(name, within, kind, attributes, links, _ns(begin_s))
        self._made += span.is_recording()
        return span


def _ns(unix_s: float) -> int:
    return round(unix_s * 1e9)


def _size_of(report: ServedRequest) -> int:
    """How many spans it makes, as far as instances have told."""
    attempts = [attempt for choice in report.choices for attempt in choice.attempts]
    stages = sum(len(stages_of(told.role, told.times)) for attempt in attempts for told in tuple(attempt.instances))
    return 2 + len(attempts) + stages


def _of_http(report: ServedRequest) -> dict[str, AttributeValue]:
    told: dict[str, AttributeValue] = {"http.request.method": report.method, "url.path": report.path}
    told |= {"http.response.status_code": report.status, "tandem.request_id": report.request_id}
    return told | ({"http.route": report.route} if report.route else {}) | ({"tandem.key": report.key} if report.key else {})


def _of_answer(report: ServedRequest, asked: Asked) -> dict[str, AttributeValue]:
    told: dict[str, AttributeValue] = {
        "gen_ai.operation.name": asked.operation,
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": asked.model,
        "gen_ai.request.stream": asked.streams,
        **{f"gen_ai.request.{name}": value for name, value in asked.parameters.items()},
        "gen_ai.response.id": report.answer_id,
        "gen_ai.response.finish_reasons": report.endings,
        "gen_ai.usage.input_tokens": asked.prompt_tokens,
        "gen_ai.usage.output_tokens": report.tokens,
        "gen_ai.usage.cache_read.input_tokens": report.cached_tokens,
    }
    told |= {f"tandem.{name}": count for name, count in report.drafts.items()}
    if asked.samples != 1:
        told["gen_ai.request.choice.count"] = asked.samples
    if report.session:
        told["gen_ai.conversation.id"] = report.session
    if report.ttft_s is not None:
        told["gen_ai.response.time_to_first_chunk"] = report.ttft_s
    return told
