"""A collector of spans on a real port, which reads OTLP with the messages of `opentelemetry-proto`, and may be slow or refuse.

Owns what it was sent. Knows nothing of who sends it.
"""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """status: what it answers. gate: cleared, it takes requests and does not answer them."""

    def __init__(self) -> None:
        self.status = 200
        self.gate = threading.Event()
        self.gate.set()
        self.requests: list[Any] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.gate.wait(60)
                collector.paths.append(self.path)
                collector.headers.append(dict(self.headers))
                if collector.status == 200:
                    collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(collector.status)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def spans(self) -> list[Any]:
        """In the order in which they ended."""
        scopes = (scope for request in self.requests for resource in request.resource_spans for scope in resource.scope_spans)
        return [span for scope in scopes for span in scope.spans]

    @property
    def resource(self) -> dict[str, Any]:
        return values(self.requests[0].resource_spans[0].resource.attributes)

    def close(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def tree(spans: list[Any]) -> dict[str, list[str]]:
    """The names of the spans below each span, in the order of their beginning; names must differ where they have spans below."""
    names = {span.span_id: span.name for span in spans}
    below: dict[str, list[str]] = {}
    for span in sorted(spans, key=lambda each: each.start_time_unix_nano):
        below.setdefault(names.get(span.parent_span_id, ""), []).append(span.name)
    return below


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()
