"""The description of the API at /openapi.json, from which /docs is made.

Owns the words and schemas. The schemas of bodies and errors are those of the structs that the router reads and writes; bodies are
still read by `router.api.fields`, whose errors name the field and the fix.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI

from router.api.chat import ChatFields
from router.api.completions import CompletionFields
from router.api.errors import ErrorBody
from router.api.sglang import AbortFields, GenerateFields
from router.api.tokens import DetokenizeFields, TokenizeFields

ABOUT = """Serves a large language model with prefill and decode on separate machines.

The completions follow the OpenAI API. A field that is not supported is refused by name, never ignored, unless its value asks for
nothing (`null`, `"functions": []`, `"best_of": 1`).
"""
TAGS = (
    {"name": "OpenAI", "description": "What OpenAI clients use."},
    {"name": "SGLang", "description": "What SGLang's own clients use beside it."},
    {"name": "vLLM", "description": "What vLLM's clients use beside it."},
    {"name": "Operations", "description": "For monitors, load balancers and people who run the fleet."},
)
_REFUSALS = {
    400: "A field is wrong: `param` names it, `message` says how to fix it.",
    404: "The model or instance is unknown.",
    408: "The body did not arrive in time.",
    413: "The body is longer than `--max-body`.",
    429: "Too many requests are open: try again after `Retry-After` seconds.",
    503: "No instance can serve the request now, or the router drains: try again after `Retry-After` seconds.",
    504: "The request took longer than its `timeout`, or than `--request-timeout-s`.",
}
COMPLETION_REFUSALS = (400, 404, 408, 413, 429, 503, 504)
CALL_REFUSALS = (400, 404, 408, 413, 429, 503)
_BODIES = (ChatFields, CompletionFields, GenerateFields, AbortFields, TokenizeFields, DetokenizeFields, ErrorBody)
_, _SCHEMAS = msgspec.json.schema_components(_BODIES, ref_template="#/components/schemas/{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What the description says about a route. Its endpoint's docstring is added to this.

    body: the struct that is read from the request's body. status, answer: of a success, and its media types.
    troubles: further statuses of the route's own, whose bodies have the same shape as its success. refusals: statuses of errors.
    """

    tag: str
    summary: str
    answer: str
    media_types: tuple[str, ...] = ("application/json",)
    status: int = 200
    body: type[msgspec.Struct] | None = None
    troubles: tuple[tuple[int, str], ...] = ()
    refusals: tuple[int, ...] = ()

    def route_arguments(self) -> dict[str, Any]:
        """The arguments of `FastAPI.add_api_route`."""
        error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
        content: dict[str, Any] = {media_type: {} for media_type in self.media_types}
        responses: dict[int | str, dict[str, Any]] = {self.status: {"description": self.answer, "content": content}}
        responses |= {status: {"description": why, "content": content} for status, why in self.troubles}
        responses |= {status: {"description": _REFUSALS[status], "content": error} for status in self.refusals}
        responses["default"] = {"description": "Any other error has the same shape.", "content": error}
        extra: dict[str, Any] = {}
        if self.body is not None:
            schema = {"$ref": f"#/components/schemas/{self.body.__name__}"}
            extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        return {
            "tags": [self.tag],
            "summary": self.summary,
            "status_code": self.status,
            "responses": responses,
            "openapi_extra": extra,
        }


class DescribedApp(FastAPI):
    """A FastAPI application whose description has the router's own schemas."""

    def __init__(self) -> None:
        super().__init__(
            title="Tandem",
            description=ABOUT,
            openapi_tags=[dict(tag) for tag in TAGS],
            redoc_url=None,
            swagger_ui_oauth2_redirect_url=None,
        )

    def openapi(self) -> dict[str, Any]:
        description = super().openapi()
        description.setdefault("components", {}).setdefault("schemas", {}).update(_SCHEMAS)
        return description
