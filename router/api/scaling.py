"""What a planner of the fleet tells the router, and what it asks of whoever started it.

Owns the bodies and answers of these endpoints. `router.scaling` owns what is remembered.
"""

import time
from typing import Annotated

import msgspec
from fastapi import Request
from msgspec import Meta
from msgspec.structs import replace
from starlette.responses import Response

from common.ids import Role
from router.api.admission import visit_of
from router.api.bodies import object_in
from router.api.description import Described, call_route
from router.api.fields import read_fields
from router.api.sending import json_response
from router.core import Gateway
from router.scaling import ScalingDecision


class StartFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /cluster/instances."""

    role: Annotated[Role, Meta(description="The role in which it is to start.")]


class ScalingDecisions(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of GET /cluster/decisions."""

    decisions: list[ScalingDecision]


_REFUSALS = (400, 403, 408, 409, 413, 415, 503)
DECIDED = call_route("Operations", "Tell of a decision", ScalingDecision, ScalingDecision)
DECISIONS = Described("Operations", "Decisions", "The latest decisions about the fleet, in order.", ScalingDecisions)
START_ONE = call_route("Operations", "Start an instance", StartFields, StartFields, _REFUSALS)


def _read_decision(body: bytes, context_tokens: int | None = None) -> ScalingDecision:
    return read_fields(object_in(body), ScalingDecision)


def _read_start(body: bytes, context_tokens: int | None = None) -> StartFields:
    return read_fields(object_in(body), StartFields)


class ScalingApi:
    """The handlers."""

    def __init__(self, gateway: Gateway) -> None:
        self._board = gateway.core.scaling

    async def decided(self, request: Request) -> Response:
        """Remember what a planner has decided, with the reason in words. The router does nothing else with it."""
        decision = replace(await visit_of(request).read(request, _read_decision), at=time.time())
        self._board.decided(decision)
        return json_response(decision)

    async def decisions(self) -> Response:
        """What planners have decided, and why; of decisions to stay that follow each other, the latest."""
        return json_response(ScalingDecisions(decisions=list(self._board.decisions)))

    async def start(self, request: Request) -> Response:
        """Have `launch local` or `launch ray`, by which this router was started, start one of its spare instances."""
        asked = await visit_of(request).read(request, _read_start)
        self._board.start(asked.role)
        return json_response(asked)
