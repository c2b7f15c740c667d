"""What is told of a request when its response has ended: a line of the access log, and spans for a collector.

Owns what both are made of, which is gathered once. Nothing here waits: lines go to the log's thread, and reports to the thread of
whoever makes spans (`router/api/spans.py`). A key's name is told, never the key; no text of a prompt or an answer is.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from starlette.types import Scope

from common.config import RouterConfig
from common.logs import with_fields
from router.core import Gateway
from router.outbox import Asked, ClientRequest
from router.timelines import RequestTimes

MOST_CHARS = 1_024
"""The longest path and header that are kept: reports and lines wait for a while, and a client may send 64 KiB."""
_access = logging.getLogger("router.access")


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request whose response has ended. Times are of the router's clock. It holds no text, and nothing that does."""

    method: str
    path: str
    route: str
    """Its path as the router describes it; "": there is none."""
    parent: Mapping[str, Sequence[str]]
    """Its headers `traceparent` and `tracestate`."""
    request_id: str
    key: str
    """The name of its API key; "": it has none."""
    status: int
    begun_s: float
    ended_s: float
    answer_id: str
    session: str
    asked: Asked | None
    """None: it was not dispatched."""
    choices: tuple[RequestTimes, ...]

    @property
    def endings(self) -> list[str]:
        """How each choice ended."""
        return [each.ending or "" for each in self.choices]

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Cached tokens of each prompt once, with its first choice."""
        samples = 1 if self.asked is None else self.asked.samples
        return sum(each.cached_tokens for each in self.choices if each.index % samples == 0)

    @property
    def ttft_s(self) -> float | None:
        """From its arrival to the first token of any choice."""
        first_s = min((each.first_token_s for each in self.choices if each.first_token_s is not None), default=None)
        return None if first_s is None else first_s - self.begun_s


ToSpans: TypeAlias = Callable[[ServedRequest], object]


class Reports:
    """Those of one router. to_spans: makes spans of a report, without waiting; None: nobody does."""

    def __init__(self, gateway: Gateway, config: RouterConfig) -> None:
        self._gateway = gateway
        self._logs = config.access_log == "on"
        self.to_spans: ToSpans | None = None
        if self._logs:
            _access.setLevel(logging.INFO)

    def ended(self, scope: Scope, request_id: str, key: str, status: int, begun_s: float, client: ClientRequest | None) -> None:
        """The response has ended. See `ServedRequest`."""
        to_spans = None if client is None else self.to_spans
        if to_spans is None and not self._logs:
            return
        of_client = client or ClientRequest()
        known = map(self._gateway.core.requests.timelines.of, of_client.request_ids)
        route = scope.get("route")
        report = ServedRequest(
            method=scope["method"],
            path=scope["path"][:MOST_CHARS],
            route="" if route is None else route.path,
            parent=_parent_in(scope),
            request_id=request_id,
            key=key,
            status=status,
            begun_s=begun_s,
            ended_s=self._gateway.clock(),
            answer_id=of_client.id,
            session=of_client.session,
            asked=of_client.asked,
            choices=tuple(each for each in known if each is not None),
        )
        if self._logs:
            _log_access(report)
        if to_spans is not None:
            to_spans(report)


def _parent_in(scope: Scope) -> Mapping[str, Sequence[str]]:
    """The headers of W3C's trace context. A client that sends two parents has sent none that counts."""
    found: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
    for name, value in scope["headers"]:
        if name in (b"traceparent", b"tracestate") and len(value) <= MOST_CHARS:
            found[name.decode()].append(value.decode("latin-1"))
    return found if len(found["traceparent"]) == 1 else {}


def _log_access(report: ServedRequest) -> None:
    asked, ttft_s = report.asked, report.ttft_s
    of_answer = {}
    if asked is not None:
        of_answer = {
            "model": asked.model,
            "prompt_tokens": asked.prompt_tokens,
            "cached_tokens": report.cached_tokens,
            "answer_tokens": report.tokens,
            "ttft_s": None if ttft_s is None else round(ttft_s, 6),
            "finish": ",".join(dict.fromkeys(report.endings)),
        }
    of_http = {"method": report.method, "path": report.path, "status": report.status}
    duration_s = round(report.ended_s - report.begun_s, 6)
    fields = with_fields(report.request_id, **of_http, key=report.key or None, **of_answer, duration_s=duration_s)
    _access.info("served", extra=fields)
