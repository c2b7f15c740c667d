"""The description of the API at /openapi.json, and the page at /docs that shows it.

Owns the words and schemas. The schemas of bodies and errors are those of the structs that the router reads and writes; bodies are
still read by `router.api.fields`, whose errors name the field and the fix. The page is Swagger UI from files of the package
fastapi-offline: all of it comes from this host, and it reaches no other.
"""

from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

from router.api.errors import ErrorBody
from router.api.guard import DOCS_PREFIX, NeededKey, key_needed

SCRIPT, STYLE = "swagger-ui-bundle.js", "swagger-ui.css"


def docs_routes() -> list[Route]:
    """The page, and the files that it loads."""
    page = get_swagger_ui_html(
        openapi_url="./openapi.json",
        title="Tandem",
        swagger_js_url=f".{DOCS_PREFIX}/{SCRIPT}",
        swagger_css_url=f".{DOCS_PREFIX}/{STYLE}",
        swagger_favicon_url="data:,",
        swagger_ui_parameters={"validatorUrl": None},
    )
    html = bytes(page.body)
    headers = {"content-security-policy": _policy(html)}

    async def docs(request: Request) -> Response:
        return HTMLResponse(html, headers=headers)

    async def docs_file(request: Request) -> Response:
        return FileResponse(str(files("fastapi_offline") / "static" / request.url.path.rpartition("/")[2]))

    return [Route(DOCS_PREFIX, docs), *(Route(f"{DOCS_PREFIX}/{name}", docs_file) for name in (SCRIPT, STYLE))]


def _policy(html: bytes) -> str:
    """Only what is from here, and no page around it: a page could lead a click to one of its buttons."""
    starter = html.split(b"<script>")[1].split(b"</script>")[0]
    digest = b64encode(sha256(starter).digest()).decode()
    return (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


ABOUT = """Serves a large language model with prefill and decode on separate machines.

The completions follow the OpenAI API. A field that is not supported is refused by name, never ignored, unless its value asks for
nothing (`null`, `"functions": []`, `"best_of": 1`). So are parameters that a URL does not read, and a
name that an object has twice. Bodies are JSON, not compressed.
"""
TAGS = (
    {"name": "OpenAI", "description": "What OpenAI clients use."},
    {"name": "SGLang", "description": "What SGLang's own clients use beside it."},
    {"name": "vLLM", "description": "What vLLM's clients use beside it."},
    {"name": "Operations", "description": "For monitors, load balancers and people who run the fleet."},
)
_REFUSALS = {
    400: "A field is wrong: `param` names it, `message` says how to fix it.",
    403: "A web page asks, the router has no `--api-keys`, and its `--allow-origin` does not name where the page is from.",
    404: "It is unknown: a model, an instance, or what was asked for.",
    408: "The body did not arrive in time.",
    409: "It runs already, cannot be now, or needs a newer release of an instance.",
    413: "The body is longer than `--max-body`.",
    415: "The body is compressed, or the router has no `--api-keys` and the header is not `Content-Type: application/json`.",
    429: "Too many requests are open, or this one would be too late: try again after `Retry-After` seconds.",
    503: "No instance can serve the request now, or the router drains: try again after `Retry-After` seconds.",
    504: "The request took longer than its `timeout`, or than `--request-timeout-s`.",
}
COMPLETION_REFUSALS = (400, 403, 404, 408, 413, 415, 429, 503, 504)
CALL_REFUSALS = (400, 403, 404, 408, 413, 415, 429, 503)
_EVENTS = "text/event-stream"

SECURITY_SCHEMES = {
    NeededKey.API.value: {"type": "http", "scheme": "bearer", "description": "Needed where the router has `--api-keys`."},
    NeededKey.CONTROL.value: {"type": "http", "scheme": "bearer", "description": "Needed where it has `--control-key`."},
}


@dataclass(frozen=True, slots=True)
class Described:
    """What the description says about a route. Its endpoint's docstring is added to this.

    body: the struct that is read from the request's body. status, answer: of a success, and its media types. answer_type: of
    its JSON. troubles: further statuses of the route's own, whose bodies have the same shape as its success. refusals: statuses
    of errors.
    """

    tag: str
    summary: str
    answer: str
    answer_type: Any = None
    body: type[msgspec.Struct] | None = None
    status: int = 200
    media_types: tuple[str, ...] = ("application/json",)
    troubles: tuple[tuple[int, str], ...] = ()
    refusals: tuple[int, ...] = ()

    def route_arguments(self) -> dict[str, Any]:
        """The arguments of `FastAPI.add_api_route`."""
        error = {"application/json": {"schema": _schema_of(ErrorBody)}}
        shown = {} if self.answer_type is None else {"schema": _schema_of(self.answer_type)}
        content: dict[str, Any] = {name: {} if name == _EVENTS else shown for name in self.media_types}
        responses: dict[int | str, dict[str, Any]] = {self.status: {"description": self.answer, "content": content}}
        responses |= {status: {"description": why, "content": content} for status, why in self.troubles}
        responses |= {status: {"description": _REFUSALS[status], "content": error} for status in self.refusals}
        responses["default"] = {"description": "Any other error has the same shape.", "content": error}
        extra: dict[str, Any] = {}
        if self.body is not None:
            extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _schema_of(self.body)}}}
        return {
            "tags": [self.tag],
            "summary": self.summary,
            "status_code": self.status,
            "responses": responses,
            "openapi_extra": extra,
        }

    def components(self) -> dict[str, Any]:
        """The schemas to which the route's own refer."""
        types = [ErrorBody, *(one for one in (self.body, self.answer_type) if one is not None)]
        return {name: schema for one in types for name, schema in _described(one)[1].items()}


def completion_route(summary: str, body: type[msgspec.Struct], answer_type: Any, tag: str = "OpenAI") -> Described:
    answer = (
        "The answer. With `stream`, server-sent events, the last of which is `[DONE]` or a typed one; a failure after the "
        "stream has begun is an event too. Comment lines (`: keep-alive`) break long silences, also before the first event."
    )
    media_types = ("application/json", _EVENTS)
    return Described(tag, summary, answer, answer_type, body, media_types=media_types, refusals=COMPLETION_REFUSALS)


def call_route(
    tag: str,
    summary: str,
    body: type[msgspec.Struct],
    answer_type: type[msgspec.Struct],
    refusals: tuple[int, ...] = CALL_REFUSALS,
) -> Described:
    return Described(tag, summary, "What was asked for.", answer_type, body, refusals=refusals)


def check_route(summary: str, answer: str) -> Described:
    return Described("Operations", summary, answer, troubles=((503, "Not so; `reasons` says why."),))


class DescribedApp(FastAPI):
    """A FastAPI application whose description has the router's own schemas. routes: what is described."""

    def __init__(self, routes: Iterable[Described]) -> None:
        super().__init__(
            title="Tandem",
            description=ABOUT,
            openapi_tags=[dict(tag) for tag in TAGS],
            docs_url=None,
            redoc_url=None,
        )
        self.router.routes += docs_routes()
        self._components: dict[str, Any] = {}
        for route in routes:
            self._components |= route.components()

    def openapi(self) -> dict[str, Any]:
        description = super().openapi()
        description.setdefault("components", {}).setdefault("schemas", {}).update(self._components)
        description["components"]["securitySchemes"] = SECURITY_SCHEMES
        for path, operations in description["paths"].items():
            if (needed := key_needed(path)) is not NeededKey.NONE:
                schemes = SECURITY_SCHEMES if needed is NeededKey.EITHER else (needed.value,)
                for operation in operations.values():
                    operation["security"] = [*({scheme: []} for scheme in schemes), {}]  # nothing, where the router has no keys
        return description


@cache  # each takes milliseconds, and most routes refer to the same ones
def _described(one: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a type, and those to which it refers by name."""
    (schema,), components = msgspec.json.schema_components([one], ref_template="#/components/schemas/{name}")
    return schema, components


def _schema_of(described: Any) -> dict[str, Any]:
    return _described(described)[0]
