"""The routes: what a URL does not read, it refuses.

Owns the check of query parameters, and of bodies where none is read. Bodies that are read have readers of their own.
"""

from collections.abc import Callable, Collection, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from common.errors import BadRequest
from router.api.bodies import body_of
from router.api.errors import shown
from router.api.fields import object_in
from router.api.guard import OPEN_PATHS
from router.api.web_pages import EFFECTLESS_METHODS

MOST_BYTES = 1024
"""Longest body that is looked at where none is read."""


class StrictRoute(APIRoute):
    """A route that refuses what it would ignore. Open pages stay as they are: load balancers and monitors add parameters."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = {parameter.alias for parameter in self.dependant.query_params}
        is_open = self.path in OPEN_PATHS
        reads_body = "requestBody" in (self.openapi_extra or {})

        async def handle_strictly(request: Request) -> Response:
            if request.scope["query_string"] and not is_open:
                _require_known(request, known)
            if not reads_body and request.method not in EFFECTLESS_METHODS:
                await _require_no_fields(request)
            return await handle(request)

        return handle_strictly


def _require_known(request: Request, known: Collection[str]) -> None:
    """Raises BadRequest for a query parameter that is unknown, or there twice."""
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        where = f"{shown(name)} in the URL's query"
        if name not in known:
            fix = f"use {' or '.join(sorted(known))}" if known else "leave it out"
            raise BadRequest(f"{where} is not a parameter of {request.url.path}: {fix}", field=name, code="unknown_parameter")
        if name in seen:
            raise BadRequest(f"{where} is there twice: send it once", field=name, code="invalid_value")
        seen.add(name)


async def _require_no_fields(request: Request) -> None:
    """Raises BadRequest for a body that holds more than {}."""
    body = await body_of(request, MOST_BYTES)
    for name in object_in(body) if body.strip() else ():
        message = f"{shown(name)} is not a field of {request.url.path}, which reads no body: leave it out"
        raise BadRequest(message, field=name, code="unknown_parameter")
